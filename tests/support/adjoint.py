"""The adjoint identity against onnxruntime's own forward.

Every operator here is affine in each of its inputs when the others are held: F(v) - F(0) is linear in v, and its
adjoint at dy must satisfy <F(v) - F(0), dy> == <v, Fᵀ dy> for every v and dy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import onnxruntime
from onnx import ModelProto

import onnx_backprop as ob
from tests.support.batch import check_each
from tests.support.renamed import joined

Feeds = dict[str, np.ndarray]


def forward_session(model: ModelProto) -> onnxruntime.InferenceSession:
    """Stock onnxruntime with nothing of ours registered, on one thread."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, feeds: Feeds) -> list[np.ndarray]:
    """All outputs of a session whose outputs are tensors."""
    return cast("list[np.ndarray]", session.run(None, feeds))


@dataclass(frozen=True)
class Mismatch:
    """One input whose gradient is not the adjoint: both inner products and the scale they are compared on."""

    name: str
    expected: float
    got: float
    scale: float
    seed: int


@dataclass(frozen=True)
class Adjoint:
    """A model with one output, what it is fed and the names to differentiate by."""

    name: str
    model: ModelProto
    feeds: Feeds
    wrt: Sequence[str]
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name} (seed {self.seed})"


def check_adjoints(problems: Sequence[Adjoint], kernels: str = "numpy") -> None:
    """Every gradient is the adjoint; models of one opset are differentiated side by side in one."""
    alike: dict[str, list[Adjoint]] = {}
    for problem in problems:
        alike.setdefault(str(problem.model.opset_import), []).append(problem)
    for group in alike.values():
        check_each(group, partial(mismatches, kernels=kernels), _none)


def _none(_: Adjoint, wrong: list[Mismatch]) -> None:
    assert not wrong, wrong


def adjoint_mismatches(
    model: ModelProto, feeds: Feeds, wrt: list[str], *, kernels: str = "numpy", seed: int = 0, tolerance: float = 2e-5
) -> list[Mismatch]:
    """Differentiate a model with one output by `wrt` and compare with its own forward; [] when all is right."""
    return mismatches([Adjoint("", model, feeds, wrt, seed)], kernels=kernels, tolerance=tolerance)[0]


def mismatches(problems: Sequence[Adjoint], *, kernels: str = "numpy", tolerance: float = 2e-5) -> list[list[Mismatch]]:
    """Differentiate all models in one and compare each with its own forward."""
    model = joined([p.model for p in problems])
    feeds = {f"{n}/{name}": array for n, p in enumerate(problems) for name, array in p.feeds.items()}
    gradients = ob.backward(model, wrt=[f"{n}/{x}" for n, p in enumerate(problems) for x in p.wrt], kernels=kernels)
    derivative = ob.derivatives(gradients)[-1]
    forward, backward = forward_session(model), ob.session(gradients, kernels=None)
    outputs = [value.name for value in model.graph.output]
    fed, seeds, generators = dict(feeds), [], []
    for problem, output, y in zip(problems, outputs, run(forward, feeds), strict=True):
        generators.append(np.random.default_rng(problem.seed))
        dy = generators[-1].standard_normal(y.shape).astype(y.dtype)
        if output in derivative.seeds:
            fed[derivative.seeds[output]] = dy
        else:  # a one-element output is seeded with 1
            dy = np.ones_like(y)
        seeds.append(dy)
    accepted = {i.name for i in (*backward.get_inputs(), *backward.get_overridable_initializers())}
    answers = run(backward, {k: v for k, v in fed.items() if k in accepted})
    by_name = dict(zip([o.name for o in backward.get_outputs()], answers, strict=True))
    wrong: list[list[Mismatch]] = [[] for _ in problems]
    for turn in range(max(len(p.wrt) for p in problems)):
        moved_by = {n: p.wrt[turn] for n, p in enumerate(problems) if turn < len(p.wrt)}
        moves = {n: generators[n].standard_normal(problems[n].feeds[x].shape) for n, x in moved_by.items()}
        moves = {n: v.astype(problems[n].feeds[moved_by[n]].dtype) for n, v in moves.items()}
        at_v = run(forward, feeds | {f"{n}/{moved_by[n]}": v for n, v in moves.items()})
        at_zero = run(forward, feeds | {f"{n}/{moved_by[n]}": np.zeros_like(v) for n, v in moves.items()})
        for n, name in moved_by.items():
            moved = (at_v[n].astype(np.float64) - at_zero[n]) * seeds[n]
            pulled = moves[n].astype(np.float64) * by_name[derivative.results[f"{n}/{name}"]]
            scale = float(max(np.linalg.norm(moved), np.linalg.norm(pulled), 1e-30) * np.sqrt(max(moved.size, 1)))
            if not abs(moved.sum() - pulled.sum()) <= tolerance * scale:
                wrong[n].append(Mismatch(name, float(moved.sum()), float(pulled.sum()), scale, problems[n].seed))
    return wrong
