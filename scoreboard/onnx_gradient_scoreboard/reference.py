"""The derivatives of a case: differences of its forward, and how far they can be trusted.

In float64 of onnxruntime's own kernels where it has all of them, else of onnx's reference evaluator where that agrees
with onnxruntime, else of onnxruntime in float32 over wide steps. Each difference is taken with a step and a shorter
one, extrapolated, and believed where the two agree; differences to the left and to the right must agree too, or the
point lies on a kink. What no forward is sure of is not asked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_gradient_scoreboard.cases import Arrays, Case, at, session
from onnx_gradient_scoreboard.questions import draw

Forward = Callable[[Arrays], list[np.ndarray]]
FEW, RANDOM = 8, 6  # inputs of so few elements are differenced in each, others along so many directions
STEPS = {np.float64: (2.0**-17, 2.0**-10), np.float32: (2.0**-6, None)}  # of first and second differences
SHORTER = 0.37  # of a step: no power of two, by which kernels that round to float32 inside would agree with themselves
TRUST = 0.5  # of the tolerance that a difference may be unsure of
SECOND = 10  # times the tolerance for second derivatives, where float32 rounds twice


@dataclass
class Probe:
    """<gradient, direction> = value ± doubt."""

    direction: np.ndarray
    value: float
    doubt: float


@dataclass
class Reference:
    """What right answers are. scale: what the tolerance is of, by input or output."""

    forward: str
    seeds: Arrays
    gradient: dict[str, list[Probe]]
    tangent: Arrays
    second: dict[str, list[Probe]] | None
    scale: dict[str, float] = field(default_factory=dict)

    def error(self, case: Case, answer: Arrays, kind: str, wrt: tuple[str, ...]) -> float:
        """The largest error of an answer over what is allowed: right up to 1; infinite for other shapes or NaN."""
        if kind == "jvp":
            pairs = [(answer[n], expected, case.tolerance * self.scale[n]) for n, expected in self.tangent.items()]
            return max(
                float(np.abs(a - b).max(initial=0)) / allowed if np.shape(a) == b.shape else np.inf
                for a, b, allowed in pairs
            )
        probes = self.second if kind == "second" else self.gradient
        assert probes is not None
        worst = 0.0
        for name in wrt:
            known = name if name in probes else case.inputs[0]  # a bias has the gradient of what it is added to
            allowed = case.tolerance * self.scale[f"second {known}" if kind == "second" else known]
            allowed *= SECOND if kind == "second" else 1
            got = answer[name]
            if np.shape(got) != probes[known][0].direction.shape or not np.isfinite(got).all():
                return np.inf
            for probe in probes[known]:
                error = abs(float((got.astype(np.float64) * probe.direction).sum()) - probe.value)
                worst = max(worst, error / (allowed + probe.doubt))
        return worst


def reference(case: Case) -> Reference | str:
    """Of a case, or why nobody can be asked."""
    names, at_first = list(case.outputs), dict(case.feeds)
    expected = session(case.model).run(names, at_first)
    if not all(np.isfinite(a).all() for a in expected):
        return "its forward is not finite"
    seeds = draw(case, dict(zip(names, expected, strict=True)))
    reasons = []
    for title, forward, dtype in _forwards(case):
        try:
            return _differences(case, title, forward, dtype, seeds, expected)
        except _UnsureError as e:
            reasons.append(f"{title}: {e}")
    return "; ".join(reasons)


class _UnsureError(Exception):
    pass


def _forwards(case: Case) -> Iterator[tuple[str, Forward, type]]:
    names = list(case.outputs)
    double = in_float64(at(case.model, case.opsets[-1]))
    try:
        opened = session(double)
    except Exception:  # noqa: BLE001 - onnxruntime has no float64 kernel for it
        opened = None
    if opened is not None:
        yield "onnxruntime in float64", lambda feeds: opened.run(names, feeds), np.float64
    try:
        evaluator = ReferenceEvaluator(double)
    except Exception:  # noqa: BLE001 - it lacks the operator
        evaluator = None
    if evaluator is not None:
        yield "onnx's reference evaluator in float64", lambda feeds: evaluator.run(names, feeds), np.float64
    single = session(case.model)
    yield "onnxruntime in float32", lambda feeds: single.run(names, feeds), np.float32


def in_float64(model: ModelProto) -> ModelProto:
    """Every float a double: types, constants, attributes, subgraphs."""
    result = ModelProto()
    result.CopyFrom(model)
    _widen(result.graph)
    return result


def _widen(graph: GraphProto) -> None:
    for value in [*graph.input, *graph.output, *graph.value_info]:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _widen(attribute.g)
            elif attribute.type == AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.DOUBLE


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def _differences(
    case: Case, title: str, run: Forward, dtype: type, seeds: Arrays, expected: list[np.ndarray]
) -> Reference:
    feeds = {n: np.asarray(a, dtype) if a.dtype == np.float32 else a for n, a in case.feeds.items()}
    weights = [seeds[n].astype(np.float64) for n in case.outputs]

    def forward(moves: Arrays, step: float) -> list[np.ndarray]:
        shifted = {n: np.asarray(feeds[n] + step * v, dtype) for n, v in moves.items()}
        try:
            values = run(feeds | shifted)
        except Exception as e:
            raise _UnsureError(f"fails: {' '.join(str(e).split())[:100]}") from e
        return [np.asarray(a, np.float64) for a in values]

    here = forward({}, 0)
    for a, b in zip(here, expected, strict=True):
        if a.shape != b.shape or not np.allclose(a, b, rtol=1e-3, atol=1e-4 * max(1, np.abs(b).max(initial=0))):
            raise _UnsureError("disagrees with onnxruntime in float32")
    parts = [np.abs(w * a) for w, a in zip(weights, here, strict=True)]
    floor = max(1e-4, 1e-2 * max(float(a.max(initial=0)) for a in parts))
    noise = float(np.finfo(dtype).eps) * sum(float(a.sum()) for a in parts)
    first, twice = STEPS[dtype]
    steps = first, SHORTER * first
    directions = {n: list(_directions(case, n)) for n in dict.fromkeys(case.inputs + case.weights)}
    scale, gradient = {}, {}

    def total(moves: Arrays, step: float, power: int = 1) -> float:
        return sum(float((w * a**power).sum()) for w, a in zip(weights, forward(moves, step), strict=True))

    middle = total({}, 0)
    for name, chosen in directions.items():
        gradient[name], kinks = [], []
        for direction in chosen:
            sides = [[total({name: direction}, s * h) for s in (1, -1)] for h in steps]
            wide, close = ((a - b) / (2 * h) for (a, b), h in zip(sides, steps, strict=True))
            doubt = abs(wide - close) / 2 + 4 * noise / first
            gradient[name].append(Probe(direction, _limit(wide, close), doubt))
            gaps = [abs(a + b - 2 * middle) / h for (a, b), h in zip(sides, steps, strict=True)]
            kinks.append(gaps[1] if dtype == np.float64 or gaps[1] > 0.5 * gaps[0] else 0)  # a smooth gap shrinks
        scale[name] = _scale(gradient[name], floor)
        _sure(gradient[name], kinks, case.tolerance * scale[name], name)
    moves = {n: seeds[n].astype(np.float64) for n in case.inputs}
    wide, close = (
        [(a - b) / (2 * h) for a, b in zip(forward(moves, h), forward(moves, -h), strict=True)] for h in steps
    )
    tangent = {}
    for n, a, b in zip(case.outputs, wide, close, strict=True):
        tangent[n] = np.asarray(_limit(a, b))
        scale[n] = max(floor, float(np.abs(tangent[n]).max(initial=0)))
        if not np.abs(a - b).max(initial=0) <= TRUST * case.tolerance * scale[n]:
            raise _UnsureError(f"two steps along all inputs differ in {n}")
    second = (
        None if twice is None else _second(case, total, {n: directions[n] for n in case.inputs}, moves, twice, scale)
    )
    return Reference(title, seeds, gradient, tangent, second, scale)


def _second(
    case: Case,
    total: Callable[[Arrays, float, int], float],
    directions: dict[str, list[np.ndarray]],
    moves: Arrays,
    step: float,
    scale: dict[str, float],
) -> dict[str, list[Probe]] | None:
    """<w, H·v> of Σ u·y², from its values at ±v ± w; None where two steps differ."""
    by_input: dict[str, list[Probe]] = {}
    for name, chosen in directions.items():
        by_input[name] = []
        for w in chosen:
            two = []
            for h in (step, SHORTER * step):
                corners = [
                    a * b * total({n: a * v + (b * w if n == name else 0) for n, v in moves.items()}, h, 2)
                    for a in (1, -1)
                    for b in (1, -1)
                ]
                two.append(sum(corners) / (4 * h * h))
            by_input[name].append(Probe(w, _limit(*two), abs(two[0] - two[1]) / 2))
    for name, probes in by_input.items():
        scale[f"second {name}"] = _scale(probes, scale[name])
        try:
            _sure(probes, [], case.tolerance * scale[f"second {name}"], name)
        except _UnsureError:
            return None
    return by_input


def _limit(wide: Any, close: Any) -> Any:
    """Of two differences by steps of the ratio SHORTER, whose error is quadratic in the step."""
    return (close - SHORTER**2 * wide) / (1 - SHORTER**2)


def _scale(probes: list[Probe], floor: float) -> float:
    return max([floor, *(abs(p.value) for p in probes)])


def _sure(probes: list[Probe], kinks: list[float], allowed: float, name: str) -> None:
    if not all(np.isfinite(p.value) for p in probes):
        raise _UnsureError(f"differences by {name} are not finite")
    if not all(p.doubt <= TRUST * allowed for p in probes):
        raise _UnsureError(f"two steps differ by {name}")
    if any(k > allowed for k in kinks):
        raise _UnsureError(f"left and right differ by {name}: a kink")


def _directions(case: Case, name: str) -> Iterator[np.ndarray]:
    """Every axis of a small input; of others random signs of all elements, and of a quarter of them."""
    shape, size = case.feeds[name].shape, case.feeds[name].size
    if size <= FEW:
        yield from (unit.reshape(shape) for unit in np.eye(size))
        return
    rng = np.random.default_rng(zlib.crc32(f"{name} of {case.name}".encode()))
    for number in range(RANDOM):
        signs = rng.choice([-1.0, 1.0], shape)
        yield signs if number < 2 else signs * (rng.random(shape) < 0.25)
