"""What must hold of a model and its derivatives. Each oracle gives None, or a sentence that says what does not hold."""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Callable

import numpy as np
from onnx import ModelProto

import onnx_backprop as ob
from onnx_backprop.opset.graphs.walk import all_nodes
from tests.search.dress import CORRUPTED, copy, without_functions
from tests.search.generate import Feeds
from tests.search.pytorch import pytorch
from tests.search.subject import SkippedError, Subject, differs, dot, one_number, opened, size
from tests.search.training import ranks, training

STEP, TWICE, WIDE_STEP = 1e-5, 1e-4, 2.0**-7  # of first and second differences in float64, of first ones in float32
KINK = 1e-3  # between the slopes to both sides, relative: no smooth point
ROWS, RATE, SECONDS = 3, 0.125, 20


def routes(s: Subject) -> str | None:
    """All kernels give one gradient."""
    for kernels in ("onnx", "native", "numpy"):
        wrong = differs(s.gradients(s.converted, kernels), s.gradient, s.rounding, kernels)
        if wrong:
            return wrong
    return differs(
        {n: opened(s.converted)(s.seeded(s.converted))[n] for n in s.of},
        {n: s.values[n] for n in s.of},
        2e-5,
        "outputs",
    )


def differences(s: Subject) -> str | None:
    """<gradient, v> = (F(x + hv) - F(x - hv)) / 2h, one variable at a time, where the slopes to both sides agree."""
    w = s.exact
    step, coarse, unit = (STEP, 1e-6, 1e-15) if w.is_wide else (WIDE_STEP, 2e-2, 1e-6)
    for n in w.wrt:
        v = w.random({n: w.point[n]})
        if not all(w.keeps_shapes(v, h) for h in (-step, step)):
            continue
        at = [dot(w.seeds, {k: w.forward(w.moved(v, h))[k] for k in w.of}) for h in (-step, 0, step)]
        left, right = (at[1] - at[0]) / step, (at[2] - at[1]) / step
        got = dot(w.gradient, v)
        scale = max(size(w.gradient, v), abs(left), abs(right), 1e-3)
        noise = unit * sum(np.abs(w.values[k]).sum() for k in w.of) / step
        if not np.isfinite([left, right]).all() or abs(left - right) > (KINK if w.is_wide else 0.1) * scale + noise:
            continue
        if not abs(got - (left + right) / 2) <= 2 * abs(left - right) + coarse * scale + 10 * noise:
            near = [dot(w.seeds, {k: w.forward(w.moved(v, h))[k] for k in w.of}) for h in (-step / 2, step / 2)]
            if abs((near[1] - near[0]) / step - (left + right) / 2) > 0.2 * scale:
                continue  # a jump to both sides, as of x / |x| at 0
            return f"by {n!r}: {got:.6g}, differences {left:.6g}"
    if w is not s and not differs({n: w.values[n] for n in w.of}, {n: s.values[n] for n in s.of}, 1e-5, ""):
        return differs(s.gradient, w.gradient, 5e-2, "float32 beside float64")
    return None


def tangents(s: Subject) -> str | None:
    """<jvp(v), u> = <vjp(u), v>."""
    w = s.exact
    derived = ob.jvp(w.model, w.wrt, w.of)
    v = w.random(w.point)
    got = w.gradients(derived, None, w.seeded(derived, v))
    if any(got[n].shape != w.values[n].shape for n in w.of):
        return "tangent of another shape"
    a, b = dot(got, w.seeds), dot(w.gradient, v)
    scale = max(size(got, w.seeds), size(w.gradient, v), 1e-6)
    return (
        None
        if abs(a - b) <= w.rounding * scale or not np.isfinite([a, b]).all()
        else f"<jvp, u> = {a:.6g}, <v, vjp> = {b:.6g}"
    )


def second(s: Subject) -> str | None:
    """H v of Σ c·y² against differences of its gradient, where both sides agree."""
    w = s.exact
    if not w.is_wide:
        raise SkippedError("no float64")
    scalar = one_number(w)
    derived = ob.hvp(scalar, w.wrt, ["s of all"])
    v = w.random(w.point)
    steps = (-TWICE, -TWICE / 2, TWICE / 2, TWICE)
    if not all(w.keeps_shapes(v, h) for h in steps):
        raise SkippedError("no smooth point")
    got = w.gradients(derived, None, w.seeded(derived, v))
    first = ob.backward(scalar, wrt=w.wrt, of=["s of all"])
    run, names = opened(first), ob.derivatives(first)[-1].results
    at = [run(w.moved(v, h)) for h in steps]
    wide, near = (
        {n: (at[b][g] - at[a][g]) / by for n, g in names.items()} for a, b, by in ((0, 3, 2 * TWICE), (1, 2, TWICE))
    )
    u = w.random(w.point)
    a, b, c = dot(got, u), dot(near, u), dot(wide, u)
    scale = max(size(got, u), size(near, u), 1e-3)
    if not np.isfinite([b, c]).all() or abs(b - c) > KINK * scale:
        raise SkippedError("no smooth point")
    return None if abs(a - b) <= 2 * abs(b - c) + 1e-4 * scale else f"<H v, u> = {a:.6g}, differences {b:.6g}"


def rows(s: Subject) -> str | None:
    """vmap over random variables against a loop over rows, of the forward and of its gradient."""
    w = s.exact
    for model in (w.model, w.converted):
        chosen = {n: 0 for n in w.wrt if w.rng.random() < 0.5} or {w.wrt[0]: 0}
        seeds = {} if model is w.model else dict.fromkeys(ob.derivatives(model)[-1].seeds.values(), 0)
        derived = ob.vmap(model, chosen | seeds)
        given = {
            n: np.stack(
                [
                    w.point[n]
                    + w.point[n].dtype.type(0.1 * k) * w.rng.uniform(-1, 1, w.point[n].shape).astype(w.point[n].dtype)
                    for k in range(ROWS)
                ]
            )
            for n in chosen
        }
        feeds = w.feeds if model is w.model else w.seeded(w.converted)
        fed = {k: np.stack([v] * ROWS) if k in seeds else v for k, v in feeds.items()} | given
        subject = Subject(model, feeds, w.without)
        moved = [{n: np.asarray(v[k]) for n, v in given.items()} for k in range(ROWS)]
        try:
            answers = [w.forward(w.point | w.feeds | row) for row in moved]
        except Exception:  # noqa: BLE001 - of many classes
            raise SkippedError("rows that the model does not take, as of an index beyond a table") from None
        if any(one[y].shape != w.values[y].shape for one in answers for y in w.of):
            raise SkippedError("outputs whose lengths depend on numbers")
        each = [subject.forward(subject.point | feeds | row) for row in moved]
        if any(one[n].shape != each[0][n].shape for one in each for n in one):
            raise SkippedError("rows of several shapes")
        got = opened(derived)(fed)
        want = {n: np.stack([one[n] for one in each]) for n in each[0]}
        named = dict(zip(want, got.values(), strict=True))  # an output that is an input has another name
        wrong = differs(named, want, w.rounding, "vmap of the gradient" if model is w.converted else "vmap")
        if wrong and any(np.isnan(v).any() for v in want.values() if v.dtype.kind == "f"):
            raise SkippedError("NaN, which kernels pass on by the layout of what they read")
        if wrong:
            return wrong
    return None


def samples(s: Subject) -> str | None:
    """`per_sample` against a loop over batches of one row."""
    w = s.exact
    rowed = [
        v.name
        for v in w.model.graph.input
        if v.type.tensor_type.shape.dim and v.type.tensor_type.shape.dim[0].dim_param == "N"
    ]
    lengths = {w.feeds[n].shape[0] for n in rowed if n in w.feeds}
    if len(lengths) != 1 or 0 in lengths:
        raise SkippedError("no rows")
    if any(node.op_type == "ReverseSequence" for node in all_nodes(w.model)):
        raise SkippedError("lengths that one row may not have, at which onnxruntime ends the process")
    count = lengths.pop()
    alone = [w.feeds | {n: w.feeds[n][k : k + 1] for n in rowed} for k in range(count)]
    single = copy(w.model)
    for value in single.graph.input:
        if value.name in rowed:
            value.type.tensor_type.shape.dim[0].dim_value = 1
    try:
        opened(single)
        each = [w.forward(w.point | one) for one in alone]
    except Exception:  # noqa: BLE001 - of many classes
        raise SkippedError("no batch of one row") from None
    wrt = [n for n in w.wrt if n not in rowed]
    if not wrt:
        raise SkippedError("rows alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        derived = ob.backward(w.model, wrt=wrt, of=w.of, per_sample=True)
        plain = ob.backward(w.model, wrt=wrt, of=w.of)
    derivative = ob.derivatives(derived)[-1]
    shapes = {y: (w.values[y].shape, (count, *each[0][y].shape[1:]), each[0][y].shape) for y in derivative.seeds}
    if any(one[y].shape[:1] != (1,) and one[y].size > 1 for one in each for y in derivative.seeds) or any(
        whole not in others for whole, *others in shapes.values()
    ):
        raise SkippedError("rows elsewhere")
    stated = {v.name: v.type.tensor_type.shape for v in w.model.graph.output if v.type.tensor_type.HasField("shape")}
    if any(y in stated and len(stated[y].dim) != one[y].ndim for one in each for y in derivative.seeds):
        raise SkippedError("one row of another rank than the file states")
    ranked = {v.name: v.type.tensor_type.shape for v in derived.graph.input if v.type.tensor_type.HasField("shape")}
    ranks = {y: len(ranked[seed].dim) if seed in ranked else None for y, seed in derivative.seeds.items()}
    if count == 1 and None in ranks.values():
        raise SkippedError("one row of an unknown rank, whose seed has an axis more or has not")
    stacked = {
        y: shapes[y][0] == each[0][y].shape if rank is None else rank > each[0][y].ndim for y, rank in ranks.items()
    }
    join = {y: np.stack if stacked[y] else np.concatenate for y in derivative.seeds}
    seeds = [
        {
            y: w.rng.uniform(0.5, 1.5, one[y].shape).astype(one[y].dtype) if one[y].size > 1 else np.ones_like(one[y])
            for y in w.of
        }
        for one in each
    ]
    fed = {derivative.seeds[y]: join[y]([one[y] for one in seeds]) for y in derivative.seeds}
    got = w.gradients(derived, None, w.feeds | fed)
    run, names = opened(plain), ob.derivatives(plain)[-1]
    want = [run(one | {names.seeds[y]: seed[y] for y in names.seeds}) for one, seed in zip(alone, seeds, strict=True)]
    return differs(got, {n: np.stack([one[names.results[n]] for one in want]) for n in wrt}, w.rounding, "per_sample")


def forms(s: Subject) -> str | None:
    """The same gradient of a model without functions, written out, and with states stored at every second step."""
    others = {"inline": lambda: ob.backward(s.model, wrt=s.wrt, of=s.of, inline=True)}
    if s.model.functions:
        others["without functions"] = lambda: ob.backward(without_functions(s.model), wrt=s.wrt, of=s.of)
    if any(node.op_type in ("Loop", "Scan") for node in all_nodes(s.model)):
        others["checkpoint"] = lambda: ob.backward(s.model, wrt=s.wrt, of=s.of, checkpoint=2)
    for what, convert in others.items():
        wrong = differs(s.gradients(convert()), s.gradient, s.rounding, what)
        if wrong:
            return wrong
    return None


def jacobians(s: Subject) -> str | None:
    """uᵀ J = vjp(u), of all variables and outputs that are small."""
    w = s.exact
    if any(w.values[n].size == 0 for n in w.of):
        raise SkippedError("no rows of a Jacobian, over which onnxruntime does not scan")
    derived = ob.jacobian(w.model, w.wrt, w.of)
    answers, results = opened(derived)(w.feeds), ob.derivatives(derived)[-1].results
    got = {n: np.zeros_like(v) for n, v in w.point.items()}
    for y, by in results.items():
        for x, name in by.items():
            if answers[name].shape != (*w.values[y].shape, *w.point[x].shape):
                return f"Jacobian of the shape {answers[name].shape}"
            got[x] = got[x] + np.tensordot(w.seeds[y], answers[name], w.seeds[y].ndim)
    return differs(got, w.gradient, w.rounding, "Jacobian")


def explained(s: Subject) -> str | None:
    """`explain_gradients` answers."""
    str(ob.explain_gradients(s.model))
    return None


ORACLES: dict[str, Callable[[Subject], str | None]] = {
    f.__name__: f
    for f in (
        routes,
        differences,
        pytorch,
        tangents,
        second,
        forms,
        jacobians,
        rows,
        samples,
        training,
        ranks,
        explained,
    )
}
PLAIN = re.compile(r"'[^']*'|\"[^\"]*\"|-?\d+(\.\d+)?(e-?\d+)?|\([^()]*\)|\[[^\[\]]*\]")


def examine(model: ModelProto, feeds: Feeds, name: str) -> tuple[str, str]:
    """What an oracle says: right, skipped, refused with the sentence, or wrong with what is found.

    Variables that it is told no differentiable path leads from are left out.
    """
    without: tuple[str, ...] = ()
    while True:
        verdict, text = _examine(model, feeds, name, without)
        named = re.match(r".*?wrt: ('[^']*'(?:, '[^']*')*) do", text)
        names = () if verdict != "refused" or named is None else tuple(re.findall("'([^']*)'", named[1]))
        if set(names) <= set(without):
            return verdict, text
        without += names


def _examine(model: ModelProto, feeds: Feeds, name: str, without: tuple[str, ...]) -> tuple[str, str]:
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor, which other work may have
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            subject = Subject(model, feeds, without)
            if not subject.wrt or not subject.of:
                return "skipped", "no floats"
            wrong = ORACLES[name](subject)
        except SkippedError as e:
            return "skipped", str(e)
        except ob.InvalidModelError as e:
            return "wrong", f"InvalidModelError: {e}"
        except ob.OnnxBackpropError as e:
            return "refused", f"{type(e).__name__}: {e}"
        except Exception as e:  # noqa: BLE001 - that is what is looked for
            if model.producer_name == CORRUPTED and "ONNXRuntimeError" in str(e):
                return "refused", "onnxruntime refuses a shape that is declared wrong"
            if re.search(r"ONNXRuntimeError.*Node input '.*' is not a graph input, initializer, or output", str(e)):
                return "refused", "onnxruntime takes the branch of an If apart, and loses a value that it reads"
            return "wrong", f"{type(e).__name__}: {e}"
        else:
            return ("wrong", wrong) if wrong else ("right", "")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s of processor")


def kind(text: str) -> str:
    """A sentence without its names and numbers, so that equal findings are one."""
    return " ".join(PLAIN.sub("#", text).split())[:110]
