"""Matrix products with weights of a few bits, and the linear quantisation of com.microsoft."""

import numpy as np
from onnx import TensorProto

from onnx_backprop.converters.prepare.fused.composer import Composer


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
