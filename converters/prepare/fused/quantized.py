"""Matrix products with weights of a few bits, and the linear quantisation of com.microsoft."""

import numpy as np
from onnx import TensorProto

from onnx_backprop.converters.prepare.fused.composer import SCALE, Composer

_INTEGERS = (TensorProto.INT4, TensorProto.UINT4)
_EIGHT_BIT_FLOATS = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2)
_EIGHT_BIT_FLOATS += (TensorProto.FLOAT8E5M2FNUZ,)
_FP4 = [sign * n for sign in (1, -1) for n in (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4)]
_NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
_NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
_NF4 += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def mat_mul_n_bits(op: Composer) -> None:
    """y = a · wᵀ + bias, w (N, K) = (q - z) · scales, q and z being packed in bytes along K, the lowest bits first.

    It stays onnxruntime's, and has a gradient rule; forms without one are refused.
    """
    for name in ("N", "K", "block_size", "accuracy_level"):
        op.attribute(name)
    if op.attribute("weight_prepacked", 0):
        raise op.refuse("weights that are packed for one processor are not handled. Export with weight_prepacked=0")
    if op.input(4):
        raise op.refuse("g_idx is not handled. Quantise without act-order")
    if (bits := op.attribute("bits", 4)) not in (2, 4, 8):
        raise op.refuse(f"2, 4 and 8 bits are handled, got {bits}")
    for index in (0, 1, 2, 3, 5):
        op.input(index)
    if 0 in (op.known.length(op.input(1), axis) for axis in range(3)):
        raise op.refuse("a weight without numbers is not handled. Leave the node out of the model")


def mat_mul_bnb4(op: Composer) -> str:
    """y = a · wᵀ, w (N, K) = table[q] · absmax, a number of absmax for each block of w's numbers in their order.

    q are two in a byte, the first in the high bits, and name numbers of FP4 or NF4. They are frozen.
    """
    n, k, size, kind = (op.attribute(name) for name in ("N", "K", "block_size", "quant_type"))
    op.attribute("training_mode")
    if op.attribute("transB", 1) != 1:
        raise op.refuse("transB=0 is not handled, nor does onnxruntime's CPU compute it. Transpose the weight")
    if kind not in (0, 1):
        raise op.refuse(f"quant_type 0, FP4, and 1, NF4, are handled, got {kind}")
    a, count, blocks = op.input(0), n * k, -(-n * k // size)
    pairs = op.BitShift(op.Unsqueeze(op.input(1), [-1]), op.constant([4, 0], np.uint8), direction="RIGHT")
    codes = op.Reshape(op.Cast(op.BitwiseAnd(pairs, op.constant(np.array(15, np.uint8))), to=TensorProto.INT32), [-1])
    values = op.Gather(op.typed_as(a, op.constant(_NF4 if kind else _FP4, np.float32)), codes)
    missing = blocks * size - count - count % 2
    values = op.Pad(values, [0, missing]) if missing > 0 else values
    scaled = op.Mul(op.Reshape(values, [blocks, size]), op.Reshape(op.input(2), [blocks, 1]))
    w = op.Reshape(op.defined_by(scaled, 1, SCALE), [-1])
    w = op.Slice(w, [0], [count]) if blocks * size != count else w
    return op.MatMul(a, op.Transpose(op.Reshape(w, [n, k]), perm=[1, 0]))


def gather_block_quantized(op: Composer) -> str:
    """y = (q - z) · scales of what ids choose along `gather_axis`, a scale for each block along `quantize_axis`.

    q is int4, uint4 or an 8-bit float in any form, or bytes packed as for `mat_mul_n_bits`, chosen along the first axis
    in blocks along the last. Only what is chosen is written out in floats. The numbers and zero points are frozen.
    """
    data, ids, scales, points = (op.input(n) for n in range(4))
    rank, element = op.rank(data, "for its blocks"), op.known.element(data)
    along, blocked = op.attribute("gather_axis", 0) % rank, op.attribute("quantize_axis", 1) % rank
    bits, size, stored = op.attribute("bits", 4), op.attribute("block_size", 128), op.known.length(data, blocked)
    packed, small = element == TensorProto.UINT8, TensorProto.INT8 if element in _INTEGERS else TensorProto.FLOAT16
    if not packed and element not in (*_INTEGERS, *_EIGHT_BIT_FLOATS):
        raise op.refuse("data of uint8, int4, uint4 and 8-bit floats are handled. Quantise to these")
    if packed and ((along, blocked) != (0, rank - 1) or bits not in (2, 4, 8)):
        raise op.refuse("of uint8, 2, 4 and 8 bits, gather_axis=0 and quantize_axis=-1 are handled, as by onnxruntime")
    if stored is None:
        raise op.refuse(f"the lengths of {data!r} must be known. Declare its shape")
    columns = np.arange(stored * (8 // bits if packed else 1))
    size = size or columns.size
    axis = blocked - rank if blocked > along else blocked  # of the blocks in what is chosen

    def chosen(name: str, at: str) -> str:
        whole = name if packed or name == scales else op.Cast(name, to=small)  # Gather takes none so narrow
        return op.Gather(whole, at, axis=along)

    def numbers(name: str, at: str, places: np.ndarray | None) -> str:
        """Those at some places along the blocks, or at all, in floats."""
        rows = chosen(name, at)
        if not packed or places is None:
            return op.typed_as(scales, rows if places is None else op.Gather(rows, op.constant(places), axis=axis))
        rows = op.Gather(rows, op.constant(places * bits // 8), axis=axis)
        shifted = op.BitShift(rows, op.constant((places * bits % 8).astype(np.uint8)), direction="RIGHT")
        return op.typed_as(scales, op.BitwiseAnd(shifted, op.constant(np.array((1 << bits) - 1, np.uint8))))

    q = numbers(data, ids, columns if packed else None)
    blocks = columns // size
    if along == blocked:
        from_front = op.Where(op.Less(ids, 0), op.Add(ids, op.typed_as(ids, op.Squeeze(op.length(data, along)))), ids)
        at, blocks = op.Div(from_front, size), None
    else:
        count = op.known.length(scales, along)
        at = op.Mul(ids, 0) if count == 1 else ids  # one scale for all
        if count is None:
            at = op.Mul(ids, op.typed_as(ids, op.Squeeze(op.Min(op.Sub(op.length(scales, along), 1), 1))))
    if points or packed:
        q = op.Sub(q, numbers(points, at, blocks) if points else op.number(float(1 << (bits - 1)), scales))
    rows = op.defined_by(chosen(scales, at), 0, SCALE)
    return op.Mul(q, rows if blocks is None else op.Gather(rows, op.constant(blocks), axis=axis))


def quantize_linear(op: Composer) -> str:
    """The standard operator."""
    return op.QuantizeLinear(*_quantisation(op), axis=op.attribute("axis"))


def dequantize_linear(op: Composer) -> str:
    """The standard operator."""
    return op.DequantizeLinear(*_quantisation(op), axis=op.attribute("axis"))


def _quantisation(op: Composer) -> list[str]:
    return [op.input(0), op.input(1), op.input(2)]
