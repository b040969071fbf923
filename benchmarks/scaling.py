"""Whether time grows with the work: python -m benchmarks.scaling [--rounds N] [--threads N] [--only PART …]

Every kernel at a base shape and at shapes with twice as much of one thing: N, the batch; C, the channels (of a
convolution its input's, the outputs stay; of a depthwise one all of them); rows or columns of the image. Each of these
doubles the work. They take turns in one process, the base between any two others. The table shows
time(doubled) / (2 · time(base)). A kernel with a cell outside 0.85 … 1.15 is measured once more, AGAIN times as long,
and that counts; what lies outside then is marked. Writes benchmarks/results/scaling.md and scaling.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper
from tqdm import tqdm

import onnx_backprop as ob
from benchmarks.cases import Convolution, Interpolation
from benchmarks.contenders import Run, one_node, ours
from benchmarks.report import write_text
from benchmarks.worker import COOLDOWN

RESULTS = Path(__file__).parent / "results"
DOUBLED = ("N", "C", "rows", "columns")
LOW, HIGH = 0.85, 1.15
AGAIN = 3
TURN = 0.02  # seconds that a shape has at a turn, about


@dataclass(frozen=True)
class Gradient:
    """A gradient with x, dy and a result of x's shape, windows of `window` cells beside each other."""

    op_type: str
    batch: int
    channels: int
    lengths: tuple[int, ...]
    channels_last: bool = False
    window: int = 1

    @property
    def name(self) -> str:
        shape = f"N{self.batch} C{self.channels} {self.lengths[0]}x{self.lengths[1]}"
        return f"{self.op_type} {shape}{f' k{self.window}' if self.window > 1 else ''}{' NXC' * self.channels_last}"

    def run(self, threads: int) -> Run:
        """A session of ours."""
        shapes = [[self.batch, *(n // k for n in self.lengths)] for k in (1, self.window)]
        for shape in shapes:
            shape.insert(3 if self.channels_last else 1, self.channels)
        rng = np.random.default_rng(0)
        feeds = {name: rng.standard_normal(s, np.float32) for name, s in zip(("x", "dy"), shapes, strict=True)}
        attributes: dict[str, Any] = {}
        inputs = ["x", "dy"]
        if self.op_type in ("MaxPoolBackward", "BatchNormTrainingBackward"):
            attributes["data_format"] = "NXC" if self.channels_last else "NCX"
        if self.op_type == "MaxPoolBackward":
            attributes |= {"kernel": [self.window] * 2, "strides": [self.window] * 2}
            attributes |= {"pads_begin": [0, 0], "pads_end": [0, 0]}
        elif self.op_type == "SoftMaxBackward":
            attributes["axis"] = 3
        elif self.op_type == "BatchNormTrainingBackward":
            attributes["epsilon"] = 1e-5
        node = helper.make_node(self.op_type, inputs, ["result"], domain=ob.DOMAIN, **attributes)
        return one_node(node, feeds, "native", threads)


Case = Convolution | Interpolation | Gradient

CONVOLUTIONS = (
    Convolution(8, 64, 64, (64, 64), 3, 1, 1),
    Convolution(8, 64, 64, (64, 64), 3, 1, 1, channels_last=True),
    Convolution(8, 128, 64, (64, 64), 1),
    Convolution(8, 128, 64, (64, 64), 1, channels_last=True),
    Convolution(8, 64, 64, (64, 64), 3, 2, 1),
    Convolution(8, 64, 64, (64, 64), 3, 2, 1, channels_last=True),
    Convolution(8, 64, 64, (64, 64), 3, 1, 2, dilation=2),
    Convolution(32, 128, 128, (64, 64), 3, 1, 1, groups=128),
    Convolution(32, 128, 128, (64, 64), 3, 1, 1, groups=128, channels_last=True),
    Convolution(8, 64, 32, (64, 64), 2, 2, transposed=True),
    Convolution(2, 32, 32, (16, 32, 32), 3, 1, 1),
)
INTERPOLATIONS = tuple(
    Interpolation(8, 64, lengths, outs, mode, last)
    for lengths, outs in (((96, 96), (192, 192)), ((192, 192), (96, 96)))
    for mode in ("nearest", "linear", "cubic")
    for last in (False, True)
)
OTHERS = (
    Gradient("MaxPoolBackward", 8, 64, (128, 128), window=2),
    Gradient("MaxPoolBackward", 8, 64, (128, 128), window=2, channels_last=True),
    Gradient("BatchNormTrainingBackward", 16, 64, (112, 112)),
    Gradient("BatchNormTrainingBackward", 16, 64, (112, 112), channels_last=True),
    Gradient("SoftMaxBackward", 8, 32, (256, 256)),
    Gradient("ReLUBackward", 8, 64, (128, 128)),
)


def doubled(case: Case, what: str) -> Case:
    """Twice as much of one thing."""
    if what == "N":
        return replace(case, batch=2 * case.batch)
    if what == "C":
        if isinstance(case, Convolution) and case.groups > 1:
            return replace(case, channels=2 * case.channels, outputs=2 * case.outputs, groups=2 * case.groups)
        return replace(case, channels=2 * case.channels)
    axis = len(case.lengths) - 1 if what == "columns" else 0
    lengths = _twice(case.lengths, axis)
    if isinstance(case, Interpolation):
        return replace(case, lengths=lengths, outs=_twice(case.outs, axis))
    return replace(case, lengths=lengths)


def _twice(lengths: Sequence[int], axis: int) -> tuple[int, ...]:
    return tuple(2 * n if place == axis else n for place, n in enumerate(lengths))


def prepared(case: Case, gradient: str, threads: int) -> Run:
    """What runs a kernel once."""
    run = case.run(threads) if isinstance(case, Gradient) else ours("native")(case, gradient, threads)
    assert run is not None
    return run


def works() -> list[tuple[str, Case, str]]:
    """Names, base shapes and gradients."""
    result: list[tuple[str, Case, str]] = [(f"{c.name} {g}", c, g) for c in CONVOLUTIONS for g in c.gradients]
    return [*result, *((c.name, c, "data") for c in (*INTERPOLATIONS, *OTHERS))]


def growth(runs: dict[str, Run], rounds: int, *, best: bool) -> tuple[float, dict[str, float]]:
    """Seconds of the base, and time(doubled) / (2 · time(base)) of every doubling.

    Medians of ratios to the base just before and just after, as the machine may be of another speed a second later;
    best: ratios of the fastest.
    """
    counts = {name: max(1, round(TURN / _once(run))) for name, run in runs.items()}
    bases: list[float] = []
    taken: dict[str, list[float]] = {what: [] for what in DOUBLED}
    ratios: dict[str, list[float]] = {what: [] for what in DOUBLED}
    for _ in range(rounds):
        bases.append(_turn(runs["base"], counts["base"]))
        for what in DOUBLED:
            taken[what].append(_turn(runs[what], counts[what]))
            bases.append(_turn(runs["base"], counts["base"]))
            ratios[what].append(taken[what][-1] / (bases[-2] + bases[-1]))
    if best:
        return min(bases), {what: min(taken[what]) / (2 * min(bases)) for what in DOUBLED}
    return statistics.median(bases), {what: statistics.median(ratios[what]) for what in DOUBLED}


def within(ratios: dict[str, float]) -> bool:
    """Whether all ratios are those of linear growth."""
    return all(LOW <= ratio <= HIGH for ratio in ratios.values())


def _turn(run: Run, count: int) -> float:
    """The median of some runs: the first one finds its tensors in no cache, and the threads before it come to rest."""
    time.sleep(COOLDOWN)
    run()
    return statistics.median(_once(run) for _ in range(count))


def _once(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def table(rows: Sequence[dict]) -> str:
    """Markdown; the base in milliseconds, the others as ratios."""
    heads = ["kernel and base shape", "base, ms", *(f"twice {what}" for what in DOUBLED)]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (1 + len(DOUBLED))]
    for row in rows:
        cells = [row["ratios"][what] for what in DOUBLED]
        shown = [f"{r:.2f}" if LOW <= r <= HIGH else f"**{r:.2f}**" for r in cells]
        lines.append(f"| {row['name']} | {1e3 * row['base']:.3g} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="of a session (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each shape (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[""], help="kernels whose name contains one of these")
    parser.add_argument("--best", action="store_true", help="fastest runs, not medians: where others use the machine")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    arguments = parser.parse_args()
    chosen = [work for work in works() if any(part in work[0] for part in arguments.only)]
    if not chosen:
        parser.error(f"no kernel's name contains {' or '.join(arguments.only)}: " + ", ".join(n for n, _, _ in works()))
    rows = []
    for name, case, gradient in tqdm(chosen, unit="kernel", disable=None):
        shapes = {"base": case} | {what: doubled(case, what) for what in DOUBLED}
        runs = {what: prepared(shape, gradient, arguments.threads) for what, shape in shapes.items()}
        base, ratios = growth(runs, arguments.rounds, best=arguments.best)
        again = not within(ratios)
        first = ratios
        if again:
            base, ratios = growth(runs, AGAIN * arguments.rounds, best=arguments.best)
        rows.append({"name": name, "base": base, "ratios": ratios, "first": first, "again": again})
    arguments.output.mkdir(parents=True, exist_ok=True)
    machine = {"threads": arguments.threads, "statistic": "fastest" if arguments.best else "median"}
    write_text(arguments.output / "scaling.json", json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    write_text(arguments.output / "scaling.md", table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
