"""The adjoint identity against onnxruntime's own forward.

Every operator here is affine in each of its inputs when the others are held: F(v) - F(0) is linear in v, and its
adjoint at dy must satisfy <F(v) - F(0), dy> == <v, Fᵀ dy> for every v and dy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import onnxruntime
from onnx import ModelProto

import onnx_backprop as ob

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


def adjoint_mismatches(
    model: ModelProto, feeds: Feeds, wrt: list[str], *, kernels: str = "numpy", seed: int = 0, tolerance: float = 2e-5
) -> list[Mismatch]:
    """Differentiate a model with one output by `wrt` and compare with its own forward; [] when all is right."""
    gradients = ob.backward(model, wrt=wrt, kernels=kernels)
    forward, backward = forward_session(model), ob.session(gradients, kernels=None)
    (y,) = run(forward, feeds)
    output = model.graph.output[0].name
    rng = np.random.default_rng(seed)
    dy = rng.standard_normal(y.shape).astype(y.dtype)
    accepted = {i.name for i in (*backward.get_inputs(), *backward.get_overridable_initializers())}
    fed = {k: v for k, v in (feeds | {f"{output}_grad": dy}).items() if k in accepted}
    if f"{output}_grad" not in accepted:  # a one-element output is seeded with 1
        dy = np.ones_like(y)
    answers = dict(zip([o.name for o in backward.get_outputs()], run(backward, fed), strict=True))
    wrong: list[Mismatch] = []
    for name in wrt:
        x = feeds[name]
        v = rng.standard_normal(x.shape).astype(x.dtype)
        (at_v,), (at_zero,) = (run(forward, feeds | {name: value}) for value in (v, np.zeros_like(x)))
        moved = (at_v.astype(np.float64) - at_zero) * dy
        pulled = v.astype(np.float64) * answers[f"{name}_grad"]
        scale = float(max(np.linalg.norm(moved), np.linalg.norm(pulled), 1e-30) * np.sqrt(max(y.size, 1)))
        if not abs(moved.sum() - pulled.sum()) <= tolerance * scale:
            wrong.append(Mismatch(name, float(moved.sum()), float(pulled.sum()), scale, seed))
    return wrong
