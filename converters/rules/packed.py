"""Gradients of products with weights of a few bits, packed in bytes, which no gradient flows to."""

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import as_shaped, cast, narrow, work_type
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.bodies.packed import centred
from onnx_backprop.opset.functions.mat_mul_n_bits import ATTRIBUTES, DEFAULTS, MICROSOFT
from onnx_backprop.opset.maths.packed import lengths_of


@gradient("MatMulNBits", versions=(1,), domain=MICROSOFT, inputs=(0, 2, 3, 5))
def mat_mul_n_bits(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = a · Wᵀ + bias, W = (q - z) · s  =>  da = dy · W, dbias = Σ dy; of dW = dyᵀ · a: ds = Σ dW · (q - z),
    dz = -Σ dW · s, summed over each block.

    Where `accuracy_level` lets onnxruntime round a, this is the gradient with round' = 1.
    """
    attributes = {name: node.int(name, DEFAULTS.get(name, 0)) for name in ATTRIBUTES}
    weight, scales, *points = _parts(op, node, attributes)
    da = op.domain.MatMulNBitsBackwardData(dy, weight, scales, *points, **attributes)
    ds, dz = _by_blocks(op, node, attributes, dy, node.input(0))
    return da, None, ds, dz, None, op.unbroadcast(dy, node.input(5), node.output()) if node.has(5) else None


@gradient("MatMulNBitsBackwardData", versions=(1,), domain=DOMAIN)
def mat_mul_n_bits_backward_data(op: Builder, node: Forward, g: ir.Value) -> Grads:
    """dx = dy · W  =>  ddy = g · Wᵀ, a MatMulNBits; of dW = dyᵀ · g by scales and zero points as there."""
    attributes = {name: node.int(name, DEFAULTS.get(name, 0)) for name in ATTRIBUTES}
    points = node.optional(3) or node.optional(4)
    inputs = [g, node.input(1), node.input(2), points]
    ddy = op.typed(op.emit("MatMulNBits", inputs, attributes, domain=MICROSOFT)[0], node.input(0))
    ds, dz = _by_blocks(op, node, attributes, node.input(0), g)
    return ddy, None, ds, None, dz


def _parts(op: Builder, node: Forward, attributes: dict[str, int]) -> list[ir.Value | None]:
    """The weight, the scales, and zero points packed and in floats, in the shapes that our operator takes."""
    packed = points = node.optional(3)
    if points is not None and points.dtype == ir.DataType.UINT8:
        points = None
    else:
        packed = None
    parts = [node.input(1), node.input(2), packed, points]
    return [
        value if value is None or dims(value) == lengths else op.Reshape(value, list(lengths))
        for value, lengths in zip(parts, lengths_of(attributes), strict=True)
    ]


def _by_blocks(
    op: Builder, node: Forward, attributes: dict[str, int], rows: ir.Value, columns: ir.Value
) -> tuple[ir.Value | None, ir.Value | None]:
    """Of dW = rowsᵀ · columns, (…, N) and (…, K): the gradients by scales and by zero points that are floats."""
    place = 3 if node.op_type == "MatMulNBits" else 4
    if not (node.wants(2) or node.wants(place)):
        return None, None
    n, k, size = (attributes[name] for name in ("N", "K", "block_size"))
    wide, blocks = work_type(rows), -(-k // size)
    flat = [op.Reshape(cast(op, x, wide), [-1, length]) for x, length in ((rows, n), (columns, k))]
    dw = op.Gemm(*flat, transA=1)
    dw = dw if blocks * size == k else op.Pad(dw, [0, 0, 0, blocks * size - k])
    dw = op.Reshape(dw, [n, blocks, size])
    if node.op_type == "MatMulNBits":
        weight, scales, packed, points = _parts(op, node, attributes)
    else:
        weight, scales, packed, points = (node.optional(place) for place in range(1, 5))
    assert scales is not None
    q = centred(op, attributes, weight, packed, points and cast(op, points, wide), to=int(wide))
    ds = narrow(op, as_shaped(op, op.ReduceSum(op.Mul(dw, q), [2], keepdims=0), node.input(2)), node.input(2))
    if not node.wants(place):
        return ds, None
    dz = op.Neg(op.Mul(op.ReduceSum(dw, [2], keepdims=0), cast(op, scales, wide)))
    return ds, narrow(op, as_shaped(op, dz, node.input(place)), node.input(place))
