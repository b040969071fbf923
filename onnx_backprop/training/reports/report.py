"""A training as one HTML file that needs nothing else: curves, gradient norms, learning rate, timings."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

from onnx_backprop.converters import pages
from onnx_backprop.converters.pages import Bar, Points, chart
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.functions.native import NATIVE_PREFIX
from onnx_backprop.training.rates import RateSearch
from onnx_backprop.training.reports.history import Record, Records
from onnx_backprop.training.reports.profiling import Profile, Timing

_LAYERS = 8  # curves of gradient norms, the largest; every one has a colour of its own
_MOST = 200  # rows of a table
_ROWS = 15  # of a table that are shown at once


def write_report(
    path: str | Path,
    *,
    title: str,
    facts: Mapping[str, str],
    records: Sequence[Record],
    norms: Mapping[str, Points],
    profile: Profile | None,
    graph: TrainingGraph,
    rates: RateSearch | None = None,
) -> None:
    """Write the report; the file appears complete or not at all. InvalidArgumentError where it cannot be written."""
    parts = [pages.facts(facts), "<h2>Curves</h2>", Records(records).chart()]
    if norms:
        largest = sorted(norms, key=lambda name: -max((y for _, y in norms[name]), default=0.0))
        of = f", the {_LAYERS} largest of {len(norms)}" if len(norms) > _LAYERS else ""
        parts += [f"<h2>Gradient norms{of}</h2>"]
        parts.append(chart({name: norms[name] for name in largest[:_LAYERS]}, "step", "‖gradient‖₂"))
    if rates is not None:
        parts += ["<h2>Learning rates that were tried</h2>", rates.chart()]
    if profile is not None:
        parts.append(f"<h2>Time of one step, by operator</h2><p>mean of {profile.steps} steps</p>")
        parts += [_timings(profile.operators), "<h2>Time of one step, by node</h2>", _timings(profile.nodes)]
    parts += ["<h2>Parameters</h2>", graph.html()]
    pages.write_page(path, title, *parts)


def _timings(timings: Sequence[Timing]) -> str:
    longest = max((t.share for t in timings), default=0) or 1
    rows = [
        (name.removeprefix(NATIVE_PREFIX), f"{calls:g}", f"{ms:.3f}", Bar(f"{100 * share:.1f} %", share / longest))
        for name, calls, ms, share in map(astuple, timings[:_MOST])
    ]
    return pages.table(("", "calls", "ms", "share"), rows, numbers=(1, 2), most=_ROWS)
