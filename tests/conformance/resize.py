"""Tens of thousands of Resize nodes: their gradients against onnxruntime's own forward.

Y = W · X is linear in X (but for the constant extrapolation_value, which is subtracted). Where the first axis is not
resized, X is the identity matrix with its rows along that axis: Y is then Wᵀ, and dX must be dY · W in every entry.
Elsewhere <Y, dY> = <X, dX>.

All nodes go through the converter: those that let the run decide everything one by one, in a session per set of
attributes, the others in batches, as independent parts of one model. `python -m tests.conformance.resize [route]` checks
all of them and prints the counts.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnxruntime
from onnx import ModelProto, helper

import onnx_backprop as ob
from tests.conformance.grid import Report, check_batch, reason, session_on, show
from tests.conformance.resize_cases import Case, cases

__all__ = ["Case", "Report", "cases", "report", "show"]

REASON = 150  # characters of one
TOLERANCE = 2e-5
BATCH = 50


def model_of(parts: Sequence[Case], *, tagged: bool) -> ModelProto:
    """One model of independent nodes, all of one opset."""
    inputs, initializers, nodes, outputs = zip(
        *(case.part(str(n) if tagged else "") for n, case in enumerate(parts)), strict=True
    )
    graph = helper.make_graph(
        list(nodes),
        "conformance",
        [i for some in inputs for i in some],
        list(outputs),
        [i for s in initializers for i in s],
    )
    opset = parts[0].opset
    assert all(case.opset == opset for case in parts)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10 if opset > 13 else 7)


@lru_cache(maxsize=64)
def _forward_session(extra: tuple[Any, ...], rank: int, how: str, count: int, roi: int) -> onnxruntime.InferenceSession:
    """A session that leaves everything to the run; `count` and `roi` are numbers of entries."""
    values = (1.0,) * count
    return session_on(model_of([Case((1,) * rank, how, values, extra, (0.0,) * roi if roi else None)], tagged=False))


@lru_cache(maxsize=64)
def _backward_session(
    extra: tuple[Any, ...], rank: int, how: str, count: int, roi: int, kernels: str
) -> onnxruntime.InferenceSession:
    values = (1.0,) * count
    model = model_of([Case((1,) * rank, how, values, extra, (0.0,) * roi if roi else None)], tagged=False)
    return session_on(ob.backward(model, wrt=["x"], kernels=kernels), ours=True)


def key(case: Case) -> tuple[tuple[Any, ...], int, str, int, int]:
    """What the cases of one session have in common."""
    return case.extra, len(case.shape), case.how, len(case.values), len(case.roi or ())


@lru_cache(maxsize=8 * BATCH)
def forward(case: Case) -> np.ndarray | str:
    """What onnxruntime computes, or why it does not. Opset 19 computes what older ones do (tested with the upgrade)."""
    fed = {"x": case.x()} | case.parameters
    try:
        session = _forward_session(*key(case))
        y = np.asarray(session.run(None, fed)[0])
    except Exception as e:  # noqa: BLE001 - whatever onnxruntime raises is its refusal
        return reason(str(e), REASON)
    return y if np.isfinite(y).all() else "0/0: exclude_outside drops every tap of a pixel"


def _without_x(case: Case, y: np.ndarray) -> np.ndarray:
    """The linear part of Y."""
    if "extrapolation_value" not in case.attributes:
        return y.astype(np.float64)
    fed = {"x": np.zeros(case.shape, np.float32)} | case.parameters
    return y.astype(np.float64) - np.asarray(_forward_session(*key(case)).run(None, fed)[0])


Outcome = tuple[np.ndarray, np.ndarray, np.ndarray]  # y, dy, dx


def gradients(chosen: Sequence[Case], kernels: str) -> list[Outcome]:
    """What every node of one model gets, from one run; one that leaves all to the run has a session of its own."""
    shapes = [np.shape(forward(case)) for case in chosen]
    if len(chosen) == 1 and chosen[0].known == "nothing":
        (case,) = chosen
        session, tags = _backward_session(*key(case), kernels), [""]
    else:
        model = model_of(chosen, tagged=True)
        tags = [str(n) for n in range(len(chosen))]
        session = session_on(ob.backward(model, wrt=[f"x{tag}" for tag in tags], kernels=kernels), ours=True)
    accepted = {i.name for i in session.get_inputs()}
    fed: dict[str, np.ndarray] = {}
    dys: list[np.ndarray] = []
    for tag, case, shape in zip(tags, chosen, shapes, strict=True):
        fed |= case.feeds(tag)
        if f"y{tag}_grad" in accepted:
            dys.append(case.dy(shape))
            fed[f"y{tag}_grad"] = dys[-1]
        else:  # a single element gets 1
            assert math.prod(shape) == 1
            dys.append(np.ones(shape, np.float32))
    fed = {name: value for name, value in fed.items() if name in accepted}
    answers = dict(zip([o.name for o in session.get_outputs()], session.run(None, fed), strict=True))
    return [
        (np.asarray(answers[f"y{tag}"]), dy, np.asarray(answers[f"x{tag}_grad"]))
        for tag, dy in zip(tags, dys, strict=True)
    ]


def verdict(case: Case, y: np.ndarray, dy: np.ndarray, dx: np.ndarray) -> str | None:
    """What is wrong with a gradient, None when nothing is."""
    expected = forward(case)
    assert not isinstance(expected, str)
    if y.shape != expected.shape or not np.allclose(
        y, expected, rtol=0, atol=1e-6 * max(1.0, np.abs(y).max(initial=0))
    ):
        return f"the forward changed: {expected.shape} became {y.shape}"
    if dx.shape != case.shape:
        return f"dX has shape {dx.shape}"
    if not np.isfinite(dx).all():
        return "dX is not finite"
    linear = _without_x(case, y)
    if case.is_basis:
        count = case.shape[0]
        w = linear.reshape(count, -1)  # transposed
        got, want = dx.reshape(count, count), dy.reshape(count, -1).astype(np.float64) @ w.T
        allowed = TOLERANCE * max(1.0, np.abs(w).max(initial=0)) * (1 + np.abs(dy).sum(initial=0) / max(count, 1))
        worst = np.abs(got - want).max(initial=0)
        return None if worst <= allowed else f"dX differs from dY · W by {worst:.3g}, got {got.tolist()[:3]}"
    pushed, pulled = linear * dy, case.x().astype(np.float64) * dx
    scale = max(np.abs(pushed).sum(), np.abs(pulled).sum(), 1e-30)
    if not abs(pushed.sum() - pulled.sum()) <= TOLERANCE * scale:
        return f"<Y, dY> = {pushed.sum():.7g} but <X, dX> = {pulled.sum():.7g}"
    return None


def report(kernels: str, chosen: Iterable[Case] | None = None) -> dict[str, Report]:
    """Check the chosen cases (default: all) on a route; one report per family."""
    reports: dict[str, Report] = defaultdict(Report)
    waiting: dict[int, list[Case]] = defaultdict(list)
    for case in sorted(cases() if chosen is None else chosen, key=key):
        ran = forward(case)
        if isinstance(ran, str):
            reports[case.family].not_run[ran] += 1
        elif case.known == "nothing":
            _check_batch([case], kernels, reports)
        else:
            waiting[case.opset].append(case)
            if len(waiting[case.opset]) == BATCH:
                _check_batch(waiting.pop(case.opset), kernels, reports)
    for rest in waiting.values():
        _check_batch(rest, kernels, reports)
    return dict(sorted(reports.items()))


def _check_batch(batch: list[Case], kernels: str, reports: dict[str, Report]) -> None:
    def verdicts(some: Sequence[Case]) -> list[str | None]:
        return [verdict(case, *result) for case, result in zip(some, gradients(some, kernels), strict=True)]

    check_batch(batch, verdicts, reports, "family", REASON)


if __name__ == "__main__":
    print(show(report(sys.argv[1] if len(sys.argv) > 1 else "numpy")))
