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
    q = op.Reshape(op.typed_as(a, unpacked(op, op.input(1), bits)), [n, blocks, size])
    centred = op.defined_by(op.Sub(q, _zero_points(op, a, n, blocks, bits)), 1, "zero point")
    scaled = op.defined_by(op.Mul(centred, op.Reshape(op.input(2), [n, blocks, 1])), 1, "quantization scale")
    w = op.Reshape(scaled, [n, blocks * size])
    w = op.Slice(w, [0], [k], [1]) if blocks * size != k else w
    y = op.MatMul(a, op.Transpose(w, perm=[1, 0]))
    return op.Add(y, op.input(5)) if op.input(5) else y


def gather_block_quantized(op: Composer) -> str:
    """y = w[ids], w (V, D) = (q - z) · scales, a scale for each block of a row, bytes packed as for `mat_mul_n_bits`.

    Only the rows that are read are written out in floats. The numbers and the zero points are frozen.
    """
    data, ids, scales, points = (op.input(n) for n in range(4))
    bits, size, axes = op.attribute("bits", 4), op.attribute("block_size", 128), op.rank(data, " for its blocks")
    if (axes, op.attribute("gather_axis", 0), op.attribute("quantize_axis", 1) % 2) != (2, 0, 1):
        raise op.refuse("tables (V, D) with blocks along their rows are handled: gather_axis=0, quantize_axis=1")
    if bits not in (2, 4, 8):
        raise op.refuse(f"2, 4 and 8 bits are handled, got {bits}")
    stored, packed = op.known.length(data, 1), op.known.element(data) == TensorProto.UINT8
    if stored is None:
        raise op.refuse(f"the lengths of {data!r} must be known. Declare its shape")
    columns = np.arange(stored * (8 // bits if packed else 1))

    def numbers(name: str, places: np.ndarray) -> str:
        """Those at some places of each row that is read, in floats."""
        if not packed:
            rows = op.Gather(op.typed_as(scales, name), ids)
            return op.Gather(rows, op.constant(places), axis=-1)
        chosen = op.Gather(op.Gather(name, ids), op.constant(places * bits // 8), axis=-1)
        shifted = op.BitShift(chosen, op.constant((places * bits % 8).astype(np.uint8)), direction="RIGHT")
        return op.typed_as(scales, op.BitwiseAnd(shifted, op.constant(np.array((1 << bits) - 1, np.uint8))))

    q, blocks = numbers(data, columns), columns // size
    if points or packed:
        q = op.Sub(q, numbers(points, blocks) if points else op.number(float(1 << (bits - 1)), scales))
    rows = op.defined_by(op.Gather(scales, ids), 0, "quantization scale")
    return op.Mul(q, op.Gather(rows, op.constant(blocks), axis=-1))


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
    z = op.Reshape(unpacked(op, op.Reshape(given, [n, row]), bits), [n, row * (8 // bits)])
    z = op.Slice(z, [0], [blocks], [1])
    return op.Reshape(op.typed_as(a, z), [n, blocks, 1])


def unpacked(op: Composer, packed: str, bits: int) -> str:
    """The numbers in bytes, along a new last axis, still uint8."""
    if bits == 8:
        return packed
    shifts = op.constant(np.arange(0, 8, bits, dtype=np.uint8))
    moved = op.BitShift(op.Unsqueeze(packed, [-1]), shifts, direction="RIGHT")
    return op.BitwiseAnd(moved, op.constant(np.array((1 << bits) - 1, np.uint8)))
