"""jvp, vjp and hvp of every case of the operator grid.

The tangent along a random v, and <vjp(u), v> for a random u, against differences of the forward along v; the two against
each other, <jvp(v), u> = <v, vjp(u)>; and <w, hvp(v)> of s = Σ c·y² for random c, v and w against second differences of s
in float64 by onnx's reference evaluator or, where that does not agree with onnxruntime, differences of the gradient that
onnxruntime computes. `python -m tests.conformance.derivatives Softmax` prints what is wrong about one operator.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
import onnx
from onnx import ModelProto, helper

import onnx_backprop as ob
from tests.conformance.operators import FORMS, cases
from tests.support.gradient_checks import SEED, Case, Feeds, _as, _forward, build, float64_run, session_run

MODES = ("vjp", "jvp", "hvp")
COLUMNS = ("vjp", "jvp", "dot", "hvp")
DOT = 1e-6
COARSE = 1e-2
OFF_TIES = 2.0**-9
TWICE = 1e-4  # step of second differences in float64


def directions(feeds: Feeds, wrt: list[str], seed: int) -> Feeds:
    """Random numbers between -1 and 1 in the place of each variable."""
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(-1, 1, feeds[name].shape).astype(np.float32) for name in wrt}


def moved(feeds: Feeds, along: Feeds, step: float) -> Feeds:
    return feeds | {n: np.asarray(feeds[n] + (step * v).astype(feeds[n].dtype)) for n, v in along.items()}


def run_named(model: ModelProto, feeds: Feeds) -> Feeds:
    return dict(zip([value.name for value in model.graph.output], session_run(model)(feeds), strict=True))


def dot(a: Feeds, b: Feeds) -> float:
    return float(sum((a[n].astype(np.float64) * b[n]).sum() for n in b))


def size(a: Feeds, b: Feeds) -> float:
    return float(sum(np.abs(a[n].astype(np.float64) * b[n]).sum() for n in b))


def scalar_of(model: ModelProto) -> ModelProto:
    """s = Σ c·y² behind the model, c being a further input of the shape of y."""
    result = ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    c = graph.input.add()
    c.CopyFrom(graph.output[0])
    c.name = "c_of_y"
    for dim in c.type.tensor_type.shape.dim:
        if dim.HasField("dim_value") and not dim.dim_value:
            dim.Clear()  # what onnx infers of heads of an unknown size
    for op, inputs, output in (("Mul", ["y", "y"], "y_y"), ("Mul", ["y_y", "c_of_y"], "c_y_y")):
        graph.node.append(helper.make_node(op, inputs, [output], name=output))
    graph.node.append(helper.make_node("ReduceSum", ["c_y_y"], ["s_of_y"], name="s_of_y", keepdims=0))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("s_of_y", c.type.tensor_type.elem_type, []))
    return result


def first_order(case: Case, model: ModelProto, feeds: Feeds, wrt: list[str]) -> dict[str, str]:
    forward, at = _forward(model, feeds, case.oracle)
    v = directions(feeds, wrt, SEED)
    (y,) = session_run(model)(feeds)
    u = np.random.default_rng(SEED + 1).uniform(0.5, 1.5, y.shape).astype(y.dtype)
    answers: dict[str, str] = {}

    def slope(h: float) -> np.ndarray:
        parts = [forward(moved(at, v, sign * h))[0].astype(np.float64) for sign in (1, -1)]
        return (parts[0] - parts[1]) / (2 * h)

    tangent = slope(case.oracle.step)
    expected = float((tangent * u).sum())
    results: dict[str, Feeds] = {}
    for mode, seeds in (("vjp", {"y_grad": u}), ("jvp", {f"{n}_tangent": a for n, a in v.items()})):
        try:
            derived = getattr(ob, mode)(model, wrt, ["y"])
            onnx.checker.check_model(derived, full_check=True)
            results[mode] = run_named(derived, feeds | seeds)
        except ob.UnsupportedError as e:
            answers[mode] = f"refused: {e}"
        except Exception as e:  # noqa: BLE001 - whatever it is, it is the answer
            answers[mode] = f"{type(e).__name__}: {e}"
    if "vjp" in results:
        gradient = {n: results["vjp"][f"{n}_grad"] for n in wrt}
        scale = max(1.0, float(sum(np.abs(a).sum() for a in v.values())), size(gradient, v), abs(expected))
        error = abs(dot(gradient, v) - expected) / scale
        answers["vjp"] = "right" if error <= case.oracle.tolerance else f"off by {error:.2g}"
    if "jvp" in results:
        got = results["jvp"]["y_tangent"]
        scale = max(1.0, float(np.abs(tangent).max(initial=0)), max(float(np.abs(a).sum()) for a in v.values()))
        # what rounds has a slope over long steps only; long ones err by the third derivative
        others = [] if case.oracle.tolerance >= COARSE else [slope(case.oracle.step / 4)]
        error = min(float(np.abs(got - t).max(initial=0)) for t in (tangent, *others)) / scale
        fits = (got.dtype, got.shape) == (y.dtype, y.shape)
        answers["jvp"] = "right" if fits and error <= case.oracle.tolerance else f"off by {error:.2g}, {got.shape}"
    if len(results) == 2:
        gradient, got = {n: results["vjp"][f"{n}_grad"] for n in wrt}, {"y": results["jvp"]["y_tangent"]}
        scale = max(1.0, size(got, {"y": u}) + size(gradient, v))
        error = abs(dot(got, {"y": u}) - dot(gradient, v)) / scale
        answers["dot"] = "right" if error <= DOT else f"off by {error:.2g}"
    return answers


def second_order(case: Case, model: ModelProto, feeds: Feeds, wrt: list[str]) -> str:
    (y,) = session_run(model)(feeds)
    scalar = scalar_of(model)
    feeds = feeds | {"c_of_y": np.random.default_rng(SEED + 2).uniform(0.5, 1.5, y.shape).astype(y.dtype)}
    v, w = directions(feeds, wrt, SEED), directions(feeds, wrt, SEED + 3)
    if case.oracle.runtime == "reference":  # off the ties between inputs, which second differences would cross
        feeds = moved(feeds, directions(feeds, wrt, SEED + 4), OFF_TIES)
    try:
        derived = ob.hvp(scalar, wrt, ["s_of_y"])
        onnx.checker.check_model(derived, full_check=True)
        got = run_named(derived, feeds | {f"{n}_direction": a for n, a in v.items()})
    except ob.UnsupportedError as e:
        return f"refused: {e}"
    product = {n: got[f"{n}_hvp"] for n in wrt}
    if any(product[n].shape != feeds[n].shape for n in wrt):
        return f"shapes {[a.shape for a in product.values()]}"
    if case.oracle.runtime == "reference":
        run, at, h = float64_run(scalar), _as(np.float64, feeds), TWICE

        def value(a: float, b: float) -> float:
            return float(run(moved(moved(at, v, a * h), w, b * h))[0])

        expected = (value(1, 1) - value(1, -1) - value(-1, 1) + value(-1, -1)) / (4 * h * h)
        tolerance, noise = 3e-5, abs(value(0, 0)) * 1e-7
    else:
        gradient = ob.backward(scalar, wrt=wrt, of=["s_of_y"])

        def slope(h: float) -> float:
            parts = [run_named(gradient, moved(feeds, v, sign * h)) for sign in (1, -1)]
            differences = {n: (parts[0][f"{n}_grad"].astype(np.float64) - parts[1][f"{n}_grad"]) / (2 * h) for n in wrt}
            return dot(differences, w)

        # what rounds has a slope over long steps only; short steps are off the kinks that long ones cross
        steps = (2.0**-8, 2.0**-10) if case.oracle.tolerance < COARSE else (case.oracle.step,)
        expected = min(map(slope, steps), key=lambda value: abs(value - dot(product, w)))
        tolerance, noise = max(10 * case.oracle.tolerance, 1e-3), 1e-3
    scale = max(1.0, size(product, w), abs(expected))
    error = abs(dot(product, w) - expected)
    return (
        "right"
        if error <= tolerance * scale + noise
        else f"off by {error / scale:.2g}: {dot(product, w):.7g}, {expected:.7g}"
    )


def examine(case: Case, form: str) -> dict[str, str]:
    """{mode: right, refused: …, not run, or what is wrong} of a case."""
    crashes = case.op == "Einsum" and any(0 in array.shape for array in case.inputs.values())
    if form in case.skips or crashes:  # onnxruntime divides by the length of an axis that is summed over
        return dict.fromkeys(COLUMNS, "not run")
    if form in case.refuses:
        return dict.fromkeys(COLUMNS, "refused: as the gradient is")
    answers: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ob.OnnxBackpropWarning)
        model, feeds, wrt = build(case, opset=case.since if form == "static" else case.until, variant=form)
        for names, part in ((MODES[:2], first_order), (MODES[2:], second_order)):
            try:
                answer = part(case, model, feeds, wrt)
                answers |= answer if isinstance(answer, dict) else {"hvp": answer}
            except Exception as e:  # noqa: BLE001 - whatever it is, it is the answer
                answers |= {name: f"{type(e).__name__}: {e}" for name in names}
    return answers


def _each(text: str, number: int) -> bool:
    """Whether a number is one of every so many."""
    return text.isdecimal() and number % int(text) == 0


def verdict(answer: str) -> str:
    if "attempting to re-use buffer" in answer:  # of two values that its inference says are of one length
        return "fails in onnxruntime"
    return answer if answer in ("right", "not run") else "refused" if answer.startswith("refused") else "wrong"


def report(chosen: Iterable[Case]) -> tuple[dict[str, dict[tuple[str, str], Counter[str]]], list[str]]:
    """Counts of verdicts by operator, form and mode, and what is wrong."""
    counts: defaultdict[str, dict[tuple[str, str], Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    wrong: list[str] = []
    for one in chosen:
        for form in FORMS:
            for mode, answer in examine(one, form).items():
                counts[one.op][form, mode][verdict(answer)] += 1
                if verdict(answer) == "wrong":
                    wrong.append(f"{one}, {form}, {mode}: {' '.join(answer.split())}")
    return dict(counts), wrong


def section(counts: dict[str, dict[tuple[str, str], Counter[str]]]) -> str:
    """The page's part: one line per operator, a column for each mode."""
    lines = [
        "## Derivatives",
        "",
        "The cases of Operators, with all dimensions known and with none. `vjp` and `jvp` along random seeds are compared "
        "with differences of the forward, of onnx's reference evaluator in float64 if it agrees with onnxruntime; "
        f"<jvp(v), u> with <v, vjp(u)>, to {DOT:g}; `hvp` of Σ c·y² with second differences in float64 or, failing those, "
        "differences of the gradient. Runs that fail in onnxruntime do so because it infers a wrong length.",
        "",
        "| operator | vjp | jvp | <jvp(v), u> = <v, vjp(u)> | hvp |",
        "|---|---|---|---|---|",
    ]
    total: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name in sorted(counts):
        cells: list[str] = []
        for mode in COLUMNS:
            count = sum((counts[name][form, mode] for form in FORMS), Counter[str]())
            total[mode] += count
            cells.append(verdict_counts(count))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"| **all** | {' | '.join(verdict_counts(total[mode], '**') for mode in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def verdict_counts(counts: Counter[str], mark: str = "") -> str:
    """How many there are of each verdict."""
    return ", ".join(f"{mark}{n}{mark} {what}" for what, n in sorted(counts.items()))


if __name__ == "__main__":
    asked = sys.argv[1:]
    everything = [c for n, c in enumerate(cases()) if not asked or c.op in asked or _each(asked[0], n)]
    counted, bad = report(everything)
    print(section(counted))
    print("\n".join(f"WRONG: {what[:600]}" for what in bad))
