"""dx = W_0ᵀ · W_1ᵀ · … · dy in standard ONNX operators, one matrix W (O rows, I columns) per axis.

What is known when the body is written decides its form. Between two lengths that are known, taps become constants; any
other axis gets its taps, and from them its matrix, when the model runs (`TapRule.emit`), by the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.interpolation.forms import Axis, known_taps, one_axis
from onnx_backprop.opset.bodies.interpolation.lengths import Length


def transpose(b: Body, dy: Tensor | str, lengths: Sequence[Length], axes: Sequence[Axis], shape: str) -> str:
    """Dx, reshaped to `shape` (1-D int64), from a dy of the given lengths.

    An empty dy gives zeros. The axes that shrink most come first.
    """
    if 0 in lengths:
        return zeros(b, shape)
    steps = sorted((a for a in axes if not _is_identity(a, lengths[a.index])), key=lambda a: _growth(a, lengths))

    def chain(b: Body) -> str:
        current, result = list(lengths), dy
        for axis in steps:
            result = _unless_same(b, result, current, axis)
            current[axis.index] = axis.length
        return b.Reshape(result, shape, allowzero=1)

    if all(isinstance(length, int) for length in lengths):
        return chain(b)
    # onnxruntime multiplies no batch of zero matrices, and no reshape can infer a length beside a zero
    return b.choose(b.Equal(b.Size(dy), b.int_scalar(0)), lambda b: zeros(b, shape), chain)


def _unless_same(b: Body, x: Tensor | str, lengths: Sequence[Length], axis: Axis) -> Tensor | str:
    same = axis.rule.same(b, axis.length, lengths[axis.index])
    if isinstance(same, str):
        return b.choose(same, lambda b: b.Identity(x), lambda b: one_axis(b, x, lengths, axis))
    return x if same else one_axis(b, x, lengths, axis)


def zeros(b: Body, shape: str) -> str:
    """Float32 zeros."""
    return b.Expand(b.float_scalar(0), shape)


def _is_identity(axis: Axis, out: Length) -> bool:
    taps = known_taps(axis, out) if axis.length == out else None
    if taps is None:
        return False
    elsewhere = (taps.weights != 0) & (taps.indices != np.arange(taps.length)[:, None])
    return not elsewhere.any() and bool(np.all(taps.weights.sum(axis=1) == 1))


def _growth(axis: Axis, lengths: Sequence[Length]) -> float:
    out = lengths[axis.index]
    return axis.length / out if isinstance(axis.length, int) and isinstance(out, int) else 1.0
