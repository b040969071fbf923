"""Operators that have a batch axis already: rows become more entries of it, where only data differs between rows."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import onnx_ir as ir

from onnx_backprop.converters.reverse.batching.folding import fold, unfold
from onnx_backprop.converters.reverse.batching.registry import Answer, Rows, batching
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims, known_lengths
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.graphs.walk import all_nodes, is_standard

# Inputs whose axis 0 is the batch; all others are shared.
FOLDED: Mapping[str, tuple[int, ...]] = {
    "AveragePool": (0,), "Col2Im": (0,), "Conv": (0,), "ConvInteger": (0,), "ConvTranspose": (0,),
    "DeformConv": (0, 2, 4), "DepthToSpace": (0,), "GlobalAveragePool": (0,), "GlobalLpPool": (0,),
    "GlobalMaxPool": (0,), "GridSample": (0, 1), "GroupNormalization": (0,), "InstanceNormalization": (0,),
    "LRN": (0,), "LpPool": (0,), "MaxPool": (0,), "QLinearConv": (0,), "SpaceToDepth": (0,),
}  # fmt: skip
OURS: Mapping[str, tuple[int, ...]] = {
    "ConvTransposeBackwardData": (0,), "Convolution": (0,), "MaxPoolBackward": (0, 1),
}  # fmt: skip
# The shape of the result, with its batch, is an attribute, or the input at this place.
SHAPED: Mapping[str, tuple[str, int]] = {
    "AffineGrid": ("", 1), "AvgPoolBackward": ("src_shape", 1), "ConvolutionBackwardData": ("dst_shape", 2),
}  # fmt: skip


def has_images(nodes: Iterable[ir.Node]) -> bool:
    """Whether some node has a batch that rows would be more entries of."""
    return any(n.op_type in (FOLDED if is_standard(n) else {*OURS, *SHAPED}) for n in all_nodes(nodes))


@batching(*FOLDED)
def folded(op: Builder, node: Rows) -> Answer:
    """y_(n, m) = f(x_(n, m))."""
    return _folded(op, node, FOLDED[node.op_type])


@batching(*OURS, domain=DOMAIN)
def folded_ours(op: Builder, node: Rows) -> Answer:
    if node.op_type == "MaxPoolBackward" and not node.is_batched(0) and known_lengths(node.input(0)) is not None:
        return None  # whose body finds the winners, which are the same for all rows, once
    return _folded(op, node, OURS[node.op_type])


def _folded(op: Builder, node: Rows, data: tuple[int, ...]) -> Answer:
    if not node.only(*data) or len(node.node.outputs) > 1:  # the indices of MaxPool count through the batch
        return None
    inputs = [fold(op, node, n) if n in data and node.has(n) else node.value(n) for n in range(node.count)]
    (y,) = node.again(inputs)
    return unfold(op, node, y, node.output(), node.lengths(0, 0, 1))


@batching("AffineGrid")
@batching(*SHAPED, domain=DOMAIN)
def shaped(op: Builder, node: Rows) -> Answer:
    """The same where the shape of the result is given."""
    name, place = SHAPED[node.op_type]
    if not node.only(0):
        return None
    given, dtype = node.ints(name), ir.DataType.INT64 if place == 1 else ir.DataType.INT32
    if node.has(place):
        rest = op.Cast(op.Slice(node.value(place), [1], [2**31 - 1]), to=ir.DataType.INT64)
    else:
        rest = op.ints(given[1:] if given else [])
    batch = op.Mul(node.length, node.lengths(0, 0, 1))
    inputs = [fold(op, node, 0), *node.values()[1:place]]
    (y,) = node.again([*inputs, op.Cast(op.joined(batch, rest), to=dtype)], **{name: None})
    return unfold(op, node, y, node.output(), node.lengths(0, 0, 1))


@batching("BatchNormalization")
def batch_normalization(op: Builder, node: Rows) -> Answer:
    """By running statistics; in training each row has statistics of its own, which a Scan finds."""
    return None if node.int("training_mode", 0) else _folded(op, node, (0,))


@batching("Resize")
def resize(op: Builder, node: Rows) -> Answer:
    """The batch is an axis that keeps its length, so it is left out of the axes that are resized."""
    rank, x = node.static_rank(0), known_lengths(node.input(0))
    if not node.only(0) or rank is None or node.string("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        return None
    axes = [axis % rank for axis in node.ints("axes", range(rank))]
    values = node.values() + [None] * (4 - node.count)
    place = 3 if values[3] is not None else 2
    numbers = node.constant(place)
    if numbers is None:
        return None
    if 0 in axes:
        at = axes.index(0)
        if node.given("keep_aspect_ratio_policy") and node.string("keep_aspect_ratio_policy", "") != "stretch":
            return None
        kept = numbers[at] == (1 if place == 2 else x[0] if x is not None else None)
        if not kept or len(axes) == 1:
            return None
        axes.pop(at)
        numbers = numbers[[n for n in range(len(numbers)) if n != at]]
    inputs = [fold(op, node, 0), None, None, None]
    inputs[place] = op.constant(numbers)
    return unfold(op, node, node.again(inputs, axes=axes)[0], node.output(), node.lengths(0, 0, 1))


class _Recurrent(NamedTuple):
    """Where the batch is: of each input, and of each output."""

    inputs: Mapping[int, int]
    outputs: tuple[int, ...]


_RECURRENT = {op: _Recurrent({0: 1, 4: 0, 5: 1}, (2, 1)) for op in ("GRU", "RNN")}
_RECURRENT["LSTM"] = _Recurrent({0: 1, 4: 0, 5: 1, 6: 1}, (2, 1, 1))


@batching("GRU", "LSTM", "RNN")
def recurrent(op: Builder, node: Rows) -> Answer:
    """Sequences of all rows side by side; weights are shared."""
    places = _RECURRENT[node.op_type]
    if node.int("layout", 0) or not node.only(*places.inputs) or node.static_rank(0) is None:
        return None
    inputs = [
        fold(op, node, n, places.inputs[n]) if n in places.inputs and node.has(n) else node.value(n)
        for n in range(node.count)
    ]
    outputs, batch = node.again(inputs), node.lengths(0, 1, 2)
    if any(row.name and dims(row) is None for row in node.node.outputs):
        return None
    return [
        unfold(op, node, y, row, batch, axis) if row.name else y
        for y, row, axis in zip(outputs, node.node.outputs, places.outputs, strict=False)
    ]
