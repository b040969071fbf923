"""Forms of one operator, many in one session: what it is written out as, and gradients, against its own kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import ModelProto

import onnx_backprop as ob
from tests.support.adjoint import Feeds, forward_session, run
from tests.support.fused_checks import expanded, one_node
from tests.support.renamed import joined
from tests.support.rule_checks import symbolic

STEP, TOLERANCE = 2.0**-7, 3e-4
FORWARD = {np.float16: 6e-3, np.float32: 3e-5}


@dataclass
class Form:
    """An operator with attributes and inputs, None where one is left out.

    specified: where its kernel writes numbers, output by output, None for an output without a name.
    """

    label: str
    op_type: str
    inputs: dict[str, np.ndarray | None]
    attributes: dict[str, Any]
    specified: list[np.ndarray | None]
    unread: Sequence[str] = ()  # floats that nothing depends on
    settings: dict[str, Any] = field(default_factory=dict)  # of `one_node`

    def model(self, *, dynamic: bool = False) -> ModelProto:
        outputs = [n for n, s in enumerate(self.specified) if s is not None]
        model = one_node(self.op_type, self.inputs, outputs, **self.settings, **self.attributes)
        for value in model.graph.output:  # which inference does not find for all
            value.type.tensor_type.elem_type = model.graph.input[0].type.tensor_type.elem_type
        return symbolic(model) if dynamic else model

    @property
    def feeds(self) -> Feeds:
        return {name: array for name, array in self.inputs.items() if array is not None}

    @property
    def wrt(self) -> list[str]:
        return [n for n, array in self.feeds.items() if array.dtype.kind == "f" and array.size and n not in self.unread]

    @property
    def written(self) -> list[np.ndarray]:
        return [s for s in self.specified if s is not None]

    def cast(self, source: type, dtype: type) -> Form:
        inputs = {n: a.astype(dtype) if a is not None and a.dtype == source else a for n, a in self.inputs.items()}
        return replace(self, label=f"{self.label}, {dtype.__name__}", inputs=inputs)

    def __str__(self) -> str:
        shapes = {name: array.shape for name, array in self.feeds.items()}
        return f"{self.label} {self.attributes} {shapes}"


def feeds_of(cases: Sequence[Form]) -> Feeds:
    return {f"{n}/{name}": array for n, case in enumerate(cases) for name, array in case.feeds.items()}


def answers_of(cases: Sequence[Form], answers: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """The outputs of all, case by case; 0 where the kernel leaves what was there."""
    rest = iter(answers)
    return [[np.where(s, next(rest), 0) for s in case.written] for case in cases]


def forwards(cases: Sequence[Form], *, dynamic: bool) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    written_out = expanded(joined([case.model(dynamic=dynamic) for case in cases]))
    theirs = forward_session(joined([case.model() for case in cases]))
    results = (answers_of(cases, run(session, feeds_of(cases))) for session in (theirs, forward_session(written_out)))
    return list(zip(*results, strict=True))


def same(case: Form, answers: tuple[list[np.ndarray], list[np.ndarray]]) -> None:
    for theirs, ours in zip(*answers, strict=True):
        assert theirs.dtype == ours.dtype
        close = FORWARD[theirs.dtype.type]
        np.testing.assert_allclose(ours, theirs, rtol=close, atol=close, err_msg=str(case), strict=True)


Gradients = tuple[list[Feeds], list[list[np.ndarray]]]


def gradients(cases: Sequence[Form], routes: Sequence[str], *, dynamic: bool = False) -> list[Gradients]:
    """What backward gives on each route, case by case, and the random dy of outputs, 0 where the kernel writes nothing."""
    model = joined([case.model(dynamic=dynamic) for case in cases])
    wrt = [f"{n}/{x}" for n, case in enumerate(cases) for x in case.wrt]
    graph = ob.backward(model, wrt=wrt, kernels=routes[0])
    outputs = [value.name for value in model.graph.output]
    routed = (graph, *(ob.use_kernels(graph, route) for route in routes[1:]))
    return [_gradients(cases, one, outputs) for one in routed]


def _gradients(cases: Sequence[Form], graph: ModelProto, names: Sequence[str]) -> Gradients:
    rng, outputs = np.random.default_rng(1), iter(names)
    derivative, fed, seeds = ob.derivatives(graph)[-1], feeds_of(cases), []
    for case in cases:
        kind = next(iter(case.feeds.values())).dtype
        seeds.append([(rng.standard_normal(s.shape) * s).astype(kind) for s in case.written])
        fed |= {derivative.seeds[next(outputs)]: dy for dy in seeds[-1]}
    session = ob.session(graph, kernels=None)
    accepted = {value.name for value in session.get_inputs()}
    answers = run(session, {name: array for name, array in fed.items() if name in accepted})
    named = dict(zip([o.name for o in session.get_outputs()], answers, strict=True))
    return [{x: named[derivative.results[f"{n}/{x}"]] for x in case.wrt} for n, case in enumerate(cases)], seeds


def slopes(
    cases: Sequence[Form], *, routes: Sequence[str], dynamic: bool
) -> list[dict[str, tuple[float, float, float]]]:
    """By input and route: <dy, dF/dh(x + h·v)> of onnxruntime's own forward, <dx, v>, and the scale to compare on."""
    answers = gradients(cases, routes, dynamic=dynamic)
    seeds = answers[0][1]  # the same on each route
    theirs, feeds, rng = (
        forward_session(joined([case.model() for case in cases])),
        feeds_of(cases),
        np.random.default_rng(2),
    )
    result: list[dict[str, tuple[float, float, float]]] = [{} for _ in cases]
    values = answers_of(cases, run(theirs, feeds))
    noise = [  # of a difference, by the rounding of what it is taken of
        float(np.finfo(np.float32).eps)
        * np.sqrt(sum(float(np.sum((y * dy) ** 2)) for y, dy in zip(*both, strict=True)))
        for both in zip(values, seeds, strict=True)
    ]
    for turn in range(max(len(case.wrt) for case in cases)):
        moved = {n: case.wrt[turn] for n, case in enumerate(cases) if turn < len(case.wrt)}
        moves = {n: rng.standard_normal(cases[n].feeds[x].shape) for n, x in moved.items()}

        def at(step: float, moved: dict[int, str] = moved, moves: dict[int, np.ndarray] = moves) -> list[float]:
            changed = {f"{n}/{x}": (cases[n].feeds[x] + step * moves[n]).astype(np.float32) for n, x in moved.items()}
            answers = answers_of(cases, run(theirs, feeds | changed))
            return [
                sum(float(np.sum(y.astype(float) * dy)) for y, dy in zip(ys, dys, strict=True))
                for ys, dys in zip(answers, seeds, strict=True)
            ]

        near, far = (np.subtract(at(h), at(-h)) / (2 * h) for h in (STEP, 2 * STEP))
        expected = (4 * near - far) / 3
        for n, name in moved.items():
            for route, (grads, _) in zip(routes, answers, strict=True):
                gradient, v = grads[n][name].astype(float), moves[n]
                size = float(np.linalg.norm(gradient) * np.linalg.norm(v)) / np.sqrt(v.size) + abs(expected[n])
                size += noise[n] / STEP / TOLERANCE
                result[n][f"{name}, {route}"] = float(expected[n]), float(np.sum(gradient * v)), size
    return result


def close(case: Form, answers: dict[str, tuple[float, float, float]]) -> None:
    for name, (expected, got, size) in answers.items():
        assert abs(expected - got) <= TOLERANCE * size, f"{case}: {name}: expected {expected:.6g}, got {got:.6g}"
