"""HTML for notebooks and files: tables with bars, charts with axes, pages. Without scripts, images or anything to load.

Everything takes its colours from the text around it, light or dark, and as much room as it is given.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx_backprop.opset.core.errors import InvalidArgumentError, printable
from onnx_backprop.opset.core.files import replacing

Points = Sequence[tuple[float, float]]

_POINTS = 1200  # of one curve at most; more are thinned out by means
_PIECES = re.compile(r"(?<=[/._:])(?=[^\W\d])|(?<=[a-z])(?=[A-Z])")
_COLUMNS = 2  # of text, beside those of numbers, in a table that fits a narrow page
_TICKS = 5  # of an axis, about
# As far from white as from black.
_COLOURS = ("#2f7fc4", "#d4641f", "#35945a", "#9464c8", "#cf4673", "#7d7d7d", "#a3811a", "#1f9490")


@dataclass(frozen=True)
class Bar:
    """A cell with a bar behind its text. share: of the width, 0 … 1."""

    text: str
    share: float


@dataclass(frozen=True)
class Verdict:
    """A cell that is good, bad, or neither (None)."""

    text: str
    good: bool | None


Cell = str | Bar | Verdict


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]], *, numbers: Sequence[int] = (), most: int = 0) -> str:
    """A table; columns of the given `numbers` stand to the right. Rows from the number `most` on open at a click.

    Where the page is narrow, rows of many columns of text become paragraphs. A column of empty cells is left out.
    """
    rows = [list(row) for row in rows]
    kept = [n for n in range(max(map(len, rows), default=len(header))) if not rows or any(row[n] != "" for row in rows)]
    header, rows = [header[n] for n in kept if header], [[row[n] for n in kept] for row in rows]
    numbers = [n for n, old in enumerate(kept) if old in numbers]
    wide = len(header) - len(numbers) > _COLUMNS
    names = header if wide else [""] * max(len(header), 1)
    lines = [
        _row([_td(cell, n in numbers, name) for n, (cell, name) in enumerate(zip(row, names, strict=True))])
        for row in rows
    ]
    head = _row([f"<th{' class=n' if n in numbers else ''}>{text(name)}</th>" for n, name in enumerate(header)])
    shown, rest = (lines[:most], lines[most:]) if 0 < most < len(lines) else (lines, [])
    page = _table(head, shown, wide=wide)
    if rest:
        page += f"<details><summary>{len(rest)} more</summary>{_table(head, rest, wide=wide)}</details>"
    return page


def facts(pairs: Mapping[str, str]) -> str:
    """A table of names and what there is to say of them."""
    lines = (f"<tr><th>{text(name)}</th><td>{_breakable(value)}</td></tr>" for name, value in pairs.items())
    return _table("", lines)


def _table(head: str, lines: Iterable[str], *, wide: bool = False) -> str:
    return f"<div class=table><table{' class=wide' if wide else ''}>{head}{''.join(lines)}</table></div>"


def _row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _td(cell: Cell, number: bool, name: str) -> str:
    named = f" data-name='{text(name)}'" if name else ""
    if isinstance(cell, Bar):
        width = 100 * min(max(cell.share, 0.0), 1.0) if math.isfinite(cell.share) else 100.0
        return f"<td class=bar{named}><i style='width:{width:.1f}%'></i><span>{text(cell.text)}</span></td>"
    if isinstance(cell, Verdict):
        kind = {True: "good", False: "bad", None: "even"}[cell.good]
        return f"<td{named}><b class={kind}>{_breakable(cell.text)}</b></td>"
    return f"<td{' class=n' if number else ''}{named}>{_breakable(cell)}</td>"


def scale_of(values: Sequence[float]) -> str:
    """Of an axis for some values: "logarithmic" when all are above 0 and span a factor of 20, else "linear"."""
    finite = [value for value in values if math.isfinite(value)]
    return "logarithmic" if finite and min(finite) > 0 and max(finite) > 20 * min(finite) else "linear"


def chart(
    curves: Mapping[str, Points], x: str, y: str, *, across: str = "linear", ends: tuple[float, float] | None = None
) -> str:
    """Curves over titled axes, the vertical one of `scale_of` the values. across: "linear" or "logarithmic".

    ends: what the horizontal axis reaches over in any case, so that charts below each other agree.
    """
    finite = {n: _thinned([p for p in points if math.isfinite(p[1])]) for n, points in curves.items()}
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return "<p>nothing was measured</p>"
    values = [v for points in finite.values() for _, v in points]
    places = [*(v for points in finite.values() for v, _ in points), *(ends or ())]
    scales = {"linear": _linear, "logarithmic": _decades}
    axis = scales[across](min(places), max(places))
    up = scales[scale := scale_of(values)](min(values), max(values))
    lines, legend = [], []
    for number, (name, points) in enumerate(finite.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        if len(points) == 1:
            points = [(10**end if axis.logarithmic else end, points[0][1]) for end in (axis.low, axis.high)]
        drawn = " ".join(f"{100 * axis.share(a):.2f},{100 - 100 * up.share(b):.2f}" for a, b in points)
        lines.append(f'<polyline points="{drawn}" stroke="{colour}"/>')
        legend.append(f'<span><i style="background:{colour}"></i>{text(name)} {points[-1][1]:.4g}</span>')
    grid = "".join(f'<path d="M0 {100 - 100 * s:.2f}H100"/>' for _, s in up.ticks)
    left = "".join(f'<span style="bottom:{100 * s:.2f}%">{label}</span>' for label, s in up.ticks)
    below = "".join(f'<span style="left:{100 * s:.2f}%">{label}</span>' for label, s in axis.ticks)
    plot = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{text(y)}">'
    return (
        f'<figure><figcaption>{text(y)} ({scale})</figcaption><div class="plot"><div class="left">{left}</div>'
        f'<div class="area">{plot}<g>{grid}</g>{"".join(lines)}</svg></div><div class="below">{below}</div></div>'
        f'<p class="axis">{text(x)}{" (logarithmic)" if across != "linear" else ""}</p>'
        f'<p class="legend">{"".join(legend)}</p></figure>'
    )


@dataclass(frozen=True)
class _Axis:
    """From low to high, both already logarithms where it is logarithmic; ticks: labels and where they stand, 0 … 1."""

    low: float
    high: float
    labels: tuple[tuple[str, float], ...]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        value = math.log10(value) if self.logarithmic else value
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[tuple[str, float]]:
        return [(label, (at - self.low) / (self.high - self.low)) for label, at in self.labels]


def _linear(low: float, high: float) -> _Axis:
    """Ticks at multiples of 1, 2 or 5 times a power of ten, at the ends too; a constant stands in the middle."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - abs(low), high + (abs(high) or 1.0)
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    large = max(abs(first), abs(last)) * step

    def label(value: float) -> str:
        return f"{value:.6g}" if large >= 1e6 or large < 1e-3 else f"{value:,.{digits}f}"

    return _Axis(first * step, last * step, tuple((label(n * step), n * step) for n in range(first, last + 1)))


def _decades(low: float, high: float) -> _Axis:
    """Ticks at powers of ten; where there are fewer than three, at 2 and 5 times these too."""
    bottom, top = math.log10(low), math.log10(high)
    span = range(math.floor(bottom), math.ceil(top) + 1)
    every = max(1, -(-(len(span) - 1) // (_TICKS + 1)))
    marks = [float(f"1e{n}") for n in span if n % every == 0]
    if len(span) <= 4:
        marks = [m * float(f"1e{n}") for n in span for m in (1, 2, 5)]
    kept = [m for m in marks if low * 0.999 <= m <= high * 1.001]
    return _Axis(bottom, top, tuple((f"{m:g}", math.log10(m)) for m in kept), logarithmic=True)


def _thinned(points: Points) -> Points:
    """At most `_POINTS` points, each the mean of neighbours."""
    size = -(-len(points) // _POINTS)
    if size <= 1:
        return points
    blocks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in blocks]


def text(value: object) -> str:
    """What a string from a file may be shown as."""
    import html  # and 0.7 MiB of entities, which no training needs

    return html.escape(printable(str(value)))


def _breakable(value: str) -> str:
    """A text that may be broken inside of names, where a separator or a capital shows how they are made."""
    return "<wbr>".join(text(piece) for piece in _PIECES.split(printable(value)))


def fragment(*parts: str) -> str:
    """Parts as a notebook shows them."""
    return f'<div class="onnx-backprop"><style>{_STYLE}</style>{"".join(parts)}</div>'


def write_page(path: str | Path, title: str, *parts: str) -> None:
    """Write parts as a file of their own, complete or not at all. InvalidArgumentError where it cannot be written."""
    body = fragment(f"<h1>{text(title)}</h1>", *parts)
    page = _PAGE.format(title=text(title), body=body)
    try:
        with replacing(path) as (file,):
            file.write(page.encode())
    except OSError as e:
        raise InvalidArgumentError(f"cannot write the page {path}: {e.strerror or e}") from e


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>
:root {{ color-scheme: light dark }} body {{ max-width: 60rem; margin: 1.5rem auto; padding: 0 1rem }}
</style></head><body>
{body}
</body></html>
"""
# Notebooks have rules of their own for tables, which these outweigh by naming the class twice.
_STYLE = """
.onnx-backprop { font: 15px/1.45 system-ui, sans-serif; overflow-wrap: break-word }
.onnx-backprop .table { overflow-x: auto }
.onnx-backprop h1 { font-size: 1.5em } .onnx-backprop h2 { font-size: 1.15em; margin: 1.6em 0 .4em }
.onnx-backprop.onnx-backprop table { border-collapse: collapse; margin: .3em 0; border: 0; font-size: inherit }
.onnx-backprop.onnx-backprop tr { background: none; border: 0; text-align: left }
.onnx-backprop.onnx-backprop :is(td, th) { text-align: left; vertical-align: top; font-weight: normal; border: 0;
  padding: .1em .9em .1em 0; max-width: 30em; white-space: normal }
.onnx-backprop.onnx-backprop th { opacity: .65 }
.onnx-backprop.onnx-backprop .n { text-align: right; font-variant-numeric: tabular-nums }
.onnx-backprop.onnx-backprop .bar { position: relative; min-width: 4em; width: 9em; white-space: nowrap }
.onnx-backprop .bar i { position: absolute; left: 0; top: .25em; height: 1.2em; background: #2f7fc4; opacity: .4 }
.onnx-backprop .bar span { position: relative; padding-left: .3em; font-variant-numeric: tabular-nums }
.onnx-backprop .good { color: #35945a } .onnx-backprop .bad { color: #d8483e } .onnx-backprop .even { color: #a3811a }
.onnx-backprop figure { margin: .6em 0 } .onnx-backprop :is(figcaption, .axis, .plot) { font-size: 12px; opacity: .85 }
.onnx-backprop .plot { display: grid; grid-template: 14em 1.6em / 4.5em 1fr; padding: .5em 1.2em 0 0 }
.onnx-backprop :is(.left, .below, .area) { position: relative; min-width: 0 }
.onnx-backprop .left span { position: absolute; right: .6em; transform: translateY(50%); white-space: nowrap }
.onnx-backprop .below { grid-column: 2 }
.onnx-backprop .below span { position: absolute; top: .3em; transform: translateX(-50%); white-space: nowrap }
.onnx-backprop svg { position: absolute; width: 100%; height: 100%; overflow: visible; fill: none }
.onnx-backprop svg path { stroke: currentColor; stroke-opacity: .18 } .onnx-backprop polyline { stroke-width: 1.5 }
.onnx-backprop svg * { vector-effect: non-scaling-stroke }
.onnx-backprop .axis { text-align: center; margin: 0 0 0 4.5em } .onnx-backprop .legend { margin: .3em 0 }
.onnx-backprop .legend span { display: inline-block; margin-right: 1.2em; font-size: 13px }
.onnx-backprop .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em }
@media (max-width: 36em) { .onnx-backprop { font-size: 13px }
  .onnx-backprop.onnx-backprop .bar { width: 4.5em }
  .onnx-backprop.onnx-backprop :is(td, th) { padding-right: .4em }
  .onnx-backprop .wide tr:first-child { display: none } .onnx-backprop .wide tr { display: block; margin: .4em 0 .7em }
  .onnx-backprop.onnx-backprop .wide td { display: inline-block; width: auto }
  .onnx-backprop.onnx-backprop .wide td:empty { display: none }
  .onnx-backprop .wide td::before { content: attr(data-name) " "; opacity: .65 }
  .onnx-backprop .wide i { display: none } }
"""
