"""vmap of every case of the operator grid, its gradients and its tangents, against a loop over the rows.

Each row has the numbers of the case in another order. The loop runs the model without `vmap`, row after row, in
onnxruntime. `python -m tests.conformance.vmap Softmax` prints what is wrong about one operator.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import onnx
from onnx import ModelProto

import onnx_backprop as ob
from tests.conformance.derivatives import run_named, verdict_counts
from tests.conformance.operators import FORMS, cases
from tests.support.gradient_checks import SEED, Case, Feeds, build

MODES = ("forward", "vjp", "jvp")
ROWS = 3
TOLERANCE = 2e-5


def in_rows(array: np.ndarray, n: int) -> np.ndarray:
    """The numbers of an array in another order for each row: what is legal for an operator stays so."""
    return np.roll(array.ravel(), n).reshape(array.shape)


def by_loop(model: ModelProto, feeds: Sequence[Feeds]) -> Feeds:
    """What the model gives for each row, stacked; ValueError where rows have different shapes."""
    rows = [run_named(model, one) for one in feeds]
    return {name: np.stack([one[name] for one in rows]) for name in rows[0]}


def compared(model: ModelProto, axes: Sequence[str], feeds: Feeds) -> str:
    """Whether `vmap` over axis 0 of some inputs gives what the loop gives; `feeds`: of one row."""
    rows = [
        {k: in_rows(v, n) if k in axes and v.dtype.kind in "fb" else v for k, v in feeds.items()} for n in range(ROWS)
    ]
    try:
        expected = by_loop(model, rows)
    except Exception as e:  # noqa: BLE001 - what onnxruntime does not run, or rows that do not stack
        return f"not run: {e}"
    try:
        mapped = ob.vmap(model, dict.fromkeys(axes, 0))
        onnx.checker.check_model(mapped, full_check=True)
    except ob.UnsupportedError as e:
        return f"refused: {e}"
    got = run_named(mapped, {k: np.stack([row[k] for row in rows]) if k in axes else feeds[k] for k in feeds})
    for name, want in expected.items():
        value = got[name]
        if (value.dtype, value.shape) != (want.dtype, want.shape):
            return f"{name}: {value.dtype}{value.shape}, a loop gives {want.dtype}{want.shape}"
        if want.dtype.kind not in "fV":
            if not np.array_equal(value, want):
                return f"{name}: other {want.dtype}"
            continue
        a, b = value.astype(np.float64), want.astype(np.float64)
        scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0)))
        if not np.array_equal(np.isnan(a), np.isnan(b)) or not np.allclose(a, b, 0, TOLERANCE * scale, equal_nan=True):
            return f"{name}: off by {np.nanmax(np.abs(a - b)) / scale:.2g}"
    return "right"


def choices(case: Case, feeds: Feeds) -> list[list[str]]:
    """The inputs that get the axis: all by which the case is differentiated, each of them alone, all inputs."""
    wrt = [name for name in feeds if name in case.wrt] or list(feeds)[:1]
    alone = [[name] for name in wrt] if len(wrt) > 1 else []
    return [wrt, *alone, *([list(feeds)] if len(feeds) > len(wrt) else [])]


def examine(case: Case, form: str, modes: Sequence[str] = MODES) -> dict[str, list[str]]:
    """{mode: an answer for every choice of inputs} of a case."""
    answers: dict[str, list[str]] = {}
    crashes = case.op == "Einsum" and any(0 in array.shape for array in case.inputs.values())
    if form in case.skips or crashes:  # onnxruntime divides by the length of an axis that is summed over
        return answers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ob.OnnxBackpropWarning)
        model, feeds, wrt = build(case, opset=case.since if form == "static" else case.until, variant=form)
        rng = np.random.default_rng(SEED)
        for mode in modes:
            if mode == "forward":
                answers[mode] = [_tried(model, axes, feeds) for axes in choices(case, feeds)]
                continue
            try:
                derived = getattr(ob, mode)(model, wrt, ["y"])
            except ob.OnnxBackpropError:
                continue  # a derivative that there is not
            seeds = ob.derivatives(derived)[-1].seeds
            if mode == "vjp":
                shapes = {seeds["y"]: run_named(model, feeds)["y"]}
            else:
                shapes = {seed: feeds[name] for name, seed in seeds.items()}
            more = {k: rng.uniform(-1, 1, v.shape).astype(v.dtype) for k, v in shapes.items()}
            answers[mode] = [_tried(derived, [*wrt, *more], feeds | more)]
    return answers


def _tried(model: ModelProto, axes: Sequence[str], feeds: Feeds) -> str:
    try:
        return compared(model, axes, feeds)
    except Exception as e:  # noqa: BLE001 - whatever it is, it is the answer
        return f"{type(e).__name__}: {e}"


def verdict(answer: str) -> str:
    kind = answer.partition(":")[0]
    return kind if kind in ("right", "refused", "not run") else "wrong"


def report(
    chosen: Iterable[Case], forms: Sequence[str] = FORMS
) -> tuple[dict[str, dict[str, Counter[str]]], list[str]]:
    """Counts of verdicts by operator and mode, and what is wrong."""
    counts: defaultdict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    wrong: list[str] = []
    for one in chosen:
        for form in forms:
            for mode, answers in examine(one, form).items():
                for answer in answers:
                    counts[one.op][mode][verdict(answer)] += 1
                    if verdict(answer) == "wrong":
                        wrong.append(f"{one}, {form}, {mode}: {' '.join(answer.split())}")
    return dict(counts), wrong


def section(counts: dict[str, dict[str, Counter[str]]]) -> str:
    """The page's part: one line per operator, a column for the model, its gradients and its tangents."""
    lines = [
        "## Many rows at once",
        "",
        f"The cases of Operators, with all dimensions known and with none: `vmap` over {ROWS} rows of the model, of its `vjp` "
        "and of its `jvp` is compared with a loop over the rows in onnxruntime, to "
        f"{TOLERANCE:g} of the largest number, with equal types and shapes. The rows are in all inputs that have derivatives, "
        "in each of these alone, and in all inputs. Not run: the loop does not run, or its rows have different shapes.",
        "",
        "| operator | model | vjp | jvp |",
        "|---|---|---|---|",
    ]
    total: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name in sorted(counts):
        tallies = [counts[name].get(mode, Counter[str]()) for mode in MODES]
        for mode, one in zip(MODES, tallies, strict=True):
            total[mode] += one
        lines.append(f"| {name} | {' | '.join(map(verdict_counts, tallies))} |")
    lines.append(f"| **all** | {' | '.join(verdict_counts(total[mode], '**') for mode in MODES)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    every = [c for c in cases() if not sys.argv[1:] or c.op in sys.argv[1:]]
    counted, bad = report(every)
    print(section(counted))
    print("\n".join(f"WRONG: {what[:600]}" for what in bad))
