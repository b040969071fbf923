"""Rows as more entries of a batch, and back."""

import onnx_ir as ir

from onnx_backprop.converters.reverse.batching.registry import Rows
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import constant_value, dims, known_lengths
from onnx_backprop.opset.core.shapes import Dim
from onnx_backprop.opset.functions.long_vectors import is_nameless
from onnx_backprop.opset.graphs.walk import is_standard

QUANTISERS = ("QuantizeLinear", "DequantizeLinear")


def is_quantised(value: ir.Value) -> bool:
    """Whether a value comes of one that is quantised, by one scale."""
    node = value.producer()
    scale = node.inputs[1] if node is not None and is_standard(node, *QUANTISERS) else None
    return scale is not None and known_lengths(scale) == []


def moved(op: Builder, value: ir.Value, rank: int, source: int, target: int) -> ir.Value:
    """The value with one axis at another place."""
    if source == target:
        return value
    perm = [axis for axis in range(rank) if axis != source]
    perm.insert(target, source)
    return op.Transpose(value, perm=perm)


def _product(a: Dim, b: Dim) -> Dim:
    """n · d, by a symbol of its own: onnxruntime reuses buffers of values whose lengths it knows to be equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return None if None in (a, b) or is_nameless(str(a)) or is_nameless(str(b)) else f"{a}*{b}"


def fold(op: Builder, node: Rows, index: int, axis: int = 0) -> ir.Value:
    """An input (n, …, d, …) as (…, n · d, …), d being the batch at an axis of a row."""
    return _fold(op, node, index, node.rows(index), axis)


def _fold(op: Builder, node: Rows, index: int, value: ir.Value, axis: int = 0) -> ir.Value:
    """The same of a value of the shape of that input.

    What quantises by one scale goes behind: onnxruntime looks for it beside a convolution, and does not load a model of
    opset 21 with a Reshape behind a DequantizeLinear of int8.
    """
    rank = node.static_rank(index)
    if not axis and value in node.folded:
        return node.folded[value][0]
    if not axis and is_quantised(value) and (producer := value.producer()) is not None:
        source, *rest = producer.inputs
        assert source is not None
        attributes = {name: attribute.value for name, attribute in producer.attributes.items()}
        (result,) = op.emit(producer.op_type, [_fold(op, node, index, source), *rest], attributes)
        result.type = value.type
        node.folded[value] = result, node.lengths(index, 0, 1)
        return result
    if axis:
        assert rank is not None
        value = moved(op, value, rank + 1, 0, axis)
    if known_lengths(node.input(index), axis, axis + 1) == [1]:  # the length keeps its symbol, so buffers are reused
        return op.Squeeze(value, [axis + 1])
    parts = [node.lengths(index, 0, axis)] if axis else []
    rest = [] if rank == axis + 1 else [node.lengths(index, axis + 1)]
    shape, known = dims(node.input(index)), known_lengths(node.input(index))
    free = known is not None and all(known)
    merged = op.ints([-1]) if free else op.Mul(node.length, node.lengths(index, axis, axis + 1))
    result = op.Reshape(value, op.joined(*parts, merged, *rest), allowzero=1)
    if shape is not None:
        leading = dims(value)
        merged_length = None if axis or leading is None else _product(leading[0], shape[0])
        result.shape = ir.Shape([*shape[:axis], merged_length, *shape[axis + 1 :]])
    return result


def unfold(op: Builder, node: Rows, value: ir.Value, row: ir.Value, batch: ir.Value, axis: int = 0) -> ir.Value:
    """The same back, for a result that is `row` for one row; `batch`: the length d, which is at an axis."""
    shape, known, single = dims(row), known_lengths(row), constant_value(batch)
    if single is not None and single[0] == 1:
        whole = op.Unsqueeze(value, [axis + 1])
    elif known is not None and all(known):
        parts = [op.ints(known[:axis])] if axis else []
        whole = op.Reshape(value, op.joined(*parts, op.ints([-1, *known[axis:]])))
    else:
        front = [op.Shape(value, end=axis)] if axis else []
        known = known_lengths(row, axis + 1)
        rest = [op.Shape(value, start=axis + 1)] if known is None else [op.ints(known)] if known else []
        whole = op.Reshape(value, op.joined(*front, node.length, batch, *rest), allowzero=1)
    if not axis:
        node.folded[whole] = value, batch
    return whole if not axis or shape is None else moved(op, whole, len(shape) + 1, axis, 0)


def elementwise_folded(op: Builder, node: Rows) -> ir.Value | None:
    """An elementwise operator of what was folded, folded itself; None where an operand is not, or broadcasts.

    None too for a result: onnxruntime copies a Reshape that makes one, while one that an operator reads costs nothing.
    """
    batches, rank = set[object](), len(dims(node.output()) or ())
    if not rank or not node.folded or node.is_result(0):
        return None
    for n in range(node.count):
        value, shape = node.value(n), dims(node.input(n)) if node.has(n) else ()
        if value is None:
            continue
        if shape is None or (node.is_batched(n) and (value not in node.folded or len(shape) != rank)):
            return None
        if node.is_batched(n):
            batches.update(shape[:1])
        elif len(shape) == rank and shape[:1] != (1,):
            return None
    if len(batches) != 1 or None in batches:
        return None
    inputs = [node.folded[value][0] if value in node.folded else value for value in node.values()]
    first = next(n for n in range(node.count) if node.is_batched(n))
    return unfold(op, node, node.again(inputs)[0], node.output(), node.lengths(first, 0, 1))
