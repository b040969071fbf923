"""Matrix products with weights of a few bits, and the linear quantisation of com.microsoft."""

import numpy as np
from onnx import TensorProto

from onnx_backprop.converters.prepare.fused.composer import Composer


def mat_mul_n_bits(op: Composer) -> str:
    """y = a · wᵀ + bias, w (N, K) = (q - z) · scales, q and z being packed in bytes along K, the lowest bits first.

    w is written in standard operators on the packed weight, through which no gradient flows; it flows to a, scales,
    bias, and to zero points that are floats. Of these bias alone is trained unless the others are named. What
    `accuracy_level` rounds is not rounded here.
    """
    n, k, size = (op.attribute(name) for name in ("N", "K", "block_size"))
    bits = op.attribute("bits", 4)
    op.attribute("accuracy_level")
    if op.attribute("weight_prepacked", 0):
        raise op.refuse("weights that are packed for one processor are not handled. Export with weight_prepacked=0")
    if op.input(4):
        raise op.refuse("g_idx is not handled. Quantise without act-order")
    if bits not in (2, 4, 8):
        raise op.refuse(f"2, 4 and 8 bits are handled, got {bits}")
    a, blocks = op.input(0), -(-k // size)
    q = op.Reshape(op.typed_as(a, _unpacked(op, op.input(1), bits)), [n, blocks, size])
    centred = op.defined_by(op.Sub(q, _zero_points(op, a, n, blocks, bits)), 1, "zero point")
    scaled = op.defined_by(op.Mul(centred, op.Reshape(op.input(2), [n, blocks, 1])), 1, "quantization scale")
    w = op.Reshape(scaled, [n, blocks * size])
    w = op.Slice(w, [0], [k], [1]) if blocks * size != k else w
    y = op.MatMul(a, op.Transpose(w, perm=[1, 0]))
    return op.Add(y, op.input(5)) if op.input(5) else y


def quantize_linear(op: Composer) -> str:
    """The standard operator."""
    return op.QuantizeLinear(*_quantisation(op), axis=op.attribute("axis"))


def dequantize_linear(op: Composer) -> str:
    """The standard operator."""
    return op.DequantizeLinear(*_quantisation(op), axis=op.attribute("axis"))


def _quantisation(op: Composer) -> list[str]:
    return [op.input(0), op.input(1), op.input(2)]


def _zero_points(op: Composer, a: str, n: int, blocks: int, bits: int) -> str:
    """(n, blocks, 1), or the middle of the range where none are given; packed rows end on whole bytes."""
    given = op.input(3)
    if not given:
        return op.number(float(1 << (bits - 1)), a)
    if op.known.element(given) != TensorProto.UINT8:
        return op.Reshape(given, [n, blocks, 1])
    row = -(-blocks * bits // 8)
    z = op.Reshape(_unpacked(op, op.Reshape(given, [n, row]), bits), [n, row * (8 // bits)])
    z = op.Slice(z, [0], [blocks], [1])
    return op.Reshape(op.typed_as(a, z), [n, blocks, 1])


def _unpacked(op: Composer, packed: str, bits: int) -> str:
    """The numbers in bytes, along a new last axis, still uint8."""
    if bits == 8:
        return packed
    shifts = op.constant(np.arange(0, 8, bits, dtype=np.uint8))
    moved = op.BitShift(op.Unsqueeze(packed, [-1]), shifts, direction="RIGHT")
    return op.BitwiseAnd(moved, op.constant(np.array((1 << bits) - 1, np.uint8)))
