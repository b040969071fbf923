"""dx = W_0ᵀ · W_1ᵀ · … · dy in standard ONNX operators, one matrix W (O rows, I columns) per axis.

What is known when the body is written decides its form. Between two lengths that are known, taps become constants; any
other axis gets its taps, and from them its matrix, when the model runs (`TapRule.place`), by the same arithmetic.
"""

from collections.abc import Sequence

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.expressions import Vector
from onnx_backprop.opset.bodies.interpolation.forms import InterpolatedAxis, known_taps, one_axis


def transpose(b: Body, dy: Tensor | str, lengths: Vector, axes: Sequence[InterpolatedAxis], shape: Vector | str) -> str:
    """Dx of a shape, from a dy of the given lengths.

    An empty dy gives zeros. The axes that shrink most come first.
    """
    name = shape if isinstance(shape, str) else shape.name
    if 0 in lengths.entries:
        return zeros(b, name)
    outs = [lengths[k] for k in range(lengths.count)]
    steps = sorted((a for a in axes if not _is_identity(a, outs[a.index])), key=lambda a: _growth(a, outs[a.index]))

    def chain() -> str:
        current, result = list(outs), dy
        for axis in steps:
            result = _unless_same(b, result, current, axis)
            current[axis.index] = axis.length
        return b.Reshape(result, name, allowzero=1)

    if lengths.known:
        return chain()
    # onnxruntime multiplies no batch of zero matrices, and no reshape can infer a length beside a zero
    return b.choose(b.Equal(b.Size(dy), b.int_scalar(0)), lambda: zeros(b, name), chain)


def _unless_same(b: Body, x: Tensor | str, lengths: Sequence[Vector], axis: InterpolatedAxis) -> Tensor | str:
    if axis.same.known:
        return x if axis.same.value else one_axis(b, x, lengths, axis)
    return b.choose(axis.same.name, lambda: b.Identity(x), lambda: one_axis(b, x, lengths, axis))


def zeros(b: Body, shape: str) -> str:
    """Float32 zeros."""
    return b.Expand(b.float_scalar(0), shape)


def _is_identity(axis: InterpolatedAxis, out: Vector) -> bool:
    taps = known_taps(axis, out) if axis.length.known == out.known else None
    if taps is None:
        return False
    elsewhere = (taps.weights != 0) & (taps.indices != np.arange(taps.length)[:, None])
    return not elsewhere.any() and bool(np.all(taps.weights.sum(axis=1) == 1))


def _growth(axis: InterpolatedAxis, out: Vector) -> float:
    return axis.length.value / out.value if axis.length.known and out.known else 1.0
