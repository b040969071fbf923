"""A training as one HTML file that needs nothing else: curves, gradient norms, learning rate, timings."""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.files import replacing
from onnx_backprop.training.history import Record
from onnx_backprop.training.profiling import Profile, Timing

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 760, 240, 64, 28
_POINTS = 1200  # of one curve at most; more are thinned out by means
_COLOURS = ("#1f6fb2", "#d1622b", "#3a8f4d", "#8a5fb0", "#b03a5b", "#6b6b6b", "#b39117", "#2a9d9d")
_LAYERS = 24  # curves of gradient norms, the largest

Points = Sequence[tuple[float, float]]


def write_report(
    path: str | Path,
    *,
    title: str,
    facts: Mapping[str, str],
    records: Sequence[Record],
    norms: Mapping[str, Points],
    profile: Profile | None,
    summary: str,
) -> None:
    """Write the report; the file appears complete or not at all. InvalidArgumentError where it cannot be written."""
    rows = "".join(f"<tr><th>{_text(k)}</th><td>{_text(v)}</td></tr>" for k, v in facts.items())
    parts = [f"<h1>{_text(title)}</h1><table>{rows}</table>", "<h2>Loss</h2>"]
    curves = {"loss": [(float(r.step), r.loss) for r in records]}
    measured = [(float(r.step), r.evaluation) for r in records if r.evaluation is not None]
    parts.append(chart(curves | ({"evaluation": measured} if measured else {}), "loss"))
    parts += ["<h2>Learning rate</h2>", chart({"η": [(float(r.step), r.learning_rate) for r in records]}, "rate")]
    if norms:
        largest = sorted(norms, key=lambda name: -max((y for _, y in norms[name]), default=0.0))[:_LAYERS]
        parts += ["<h2>Gradient norms</h2>", chart({name: norms[name] for name in largest}, "‖gradient‖₂")]
    if profile is not None:
        parts.append(f"<h2>Time of one step, by operator</h2><p>mean of {profile.steps} steps</p>")
        parts += [_table(profile.operators), "<h2>Time of one step, by node</h2>", _table(profile.nodes[:30])]
    parts.append(f"<h2>Parameters</h2><pre>{_text(summary)}</pre>")
    page = _PAGE.format(title=_text(title), body="\n".join(parts))
    try:
        with replacing(path) as (file,):
            file.write(page.encode())
    except OSError as e:
        raise InvalidArgumentError(f"cannot write the report {path}: {e.strerror or e}") from e


def chart(curves: Mapping[str, Points], label: str) -> str:
    """Curves as an SVG; the vertical axis is logarithmic when all values are above 0 and span a factor of 20."""
    finite = {n: [(x, y) for x, y in points if math.isfinite(y)] for n, points in curves.items()}
    values = [y for points in finite.values() for _, y in points]
    if not values:
        return "<p>nothing was measured</p>"
    logarithmic = min(values) > 0 and max(values) > 20 * min(values)

    def scaled(y: float) -> float:
        return math.log10(y) if logarithmic else y

    low, high = scaled(min(values)), scaled(max(values))
    high = high if high > low else low + 1
    xs = [x for points in finite.values() for x, _ in points]
    first, last = min(xs), max(xs)
    last = last if last > first else first + 1
    lines = []
    for tick in range(5):
        share = tick / 4
        y = (_HEIGHT - _BOTTOM) * (1 - share) + 6
        value = low + share * (high - low)
        shown = f"{10**value if logarithmic else value:.3g}"
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>')
        x = _LEFT + share * (_WIDTH - _LEFT - 30)
        lines.append(f'<text x="{x:.1f}" y="{_HEIGHT}">{first + share * (last - first):.0f}</text>')
    legend = []
    for index, (name, points) in enumerate(finite.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        drawn = " ".join(
            f"{_LEFT + (x - first) / (last - first) * (_WIDTH - _LEFT):.1f},"
            f"{(_HEIGHT - _BOTTOM) * (1 - (scaled(y) - low) / (high - low)) + 6:.1f}"
            for x, y in _thinned(points)
        )
        lines.append(f'<polyline points="{drawn}" stroke="{colour}"/>')
        legend.append(f'<span style="color:{colour}">&#9632; {_text(name)}</span>')
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT + 8}" role="img" aria-label="{_text(label)}"'
    return f"<svg {box}>{''.join(lines)}</svg><p class='legend'>{' '.join(legend)}</p>"


def _thinned(points: Points) -> Points:
    """At most `_POINTS` points, each the mean of neighbours."""
    size = -(-len(points) // _POINTS)
    if size <= 1:
        return points
    blocks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in blocks]


def _table(timings: Sequence[Timing]) -> str:
    rows = "".join(
        f"<tr><td>{_text(t.name)}</td><td class='n'>{t.calls:g}</td><td class='n'>{t.milliseconds:.3f}</td>"
        f"<td class='n'>{100 * t.share:.1f} %</td>"
        f"<td><div class='bar' style='width:{300 * t.share:.0f}px'></div></td></tr>"
        for t in timings
    )
    return f"<table><tr><th></th><th>calls</th><th>ms</th><th>share</th><th></th></tr>{rows}</table>"


def _text(value: object) -> str:
    return html.escape(str(value))


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
table {{ border-collapse: collapse }} th, td {{ text-align: left; padding: .1rem .8rem .1rem 0; font-weight: normal }}
th {{ color: #666 }} td.n {{ text-align: right; font-variant-numeric: tabular-nums }}
svg {{ width: 100%; font-size: 11px; fill: #666 }} polyline {{ fill: none; stroke-width: 1.3 }}
.grid {{ stroke: #e3e3e3 }} .legend span {{ margin-right: 1rem; white-space: nowrap; font-size: 13px }}
.bar {{ background: #1f6fb2; height: .7rem }} pre {{ overflow-x: auto; font-size: 13px }}
</style></head><body>
{body}
</body></html>
"""
