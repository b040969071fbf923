"""Operators that a provider has no kernel for, written in those that it has."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backprop.converters.devices.pools import max_pool_backward
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.types import Dims
from onnx_backprop.opset.graphs.walk import attributes_of

_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_BUFFERS = 8  # that a shader may use on every GPU
_WHOLE = (TensorProto.INT32, TensorProto.INT64)


@dataclass(frozen=True)
class Known:
    """What is known of values: lengths, shapes whose lengths all are, element types, numbers of constants."""

    lengths: Mapping[str, Dims]
    shapes: Mapping[str, Sequence[int]]
    types: Mapping[str, int]
    constants: Mapping[str, np.ndarray]

    def rank(self, name: str) -> int | None:
        """The number of axes of a value."""
        return len(self.lengths[name]) if name in self.lengths else None


Form = Callable[[Emitter, NodeProto, Known], "dict[str, str] | None"]


def log_softmax(op: Emitter, node: NodeProto, _: Known) -> dict[str, str]:
    """d - log Σ exp(d), d = x - max(x), along an axis."""
    (x,) = node.input
    axes = op.constant([attributes_of(node).get("axis", -1)], np.int64)
    d = op.Sub(x, op.ReduceMax(x, axes, keepdims=1))
    return {node.output[0]: op.Sub(d, op.Log(op.ReduceSum(op.Exp(d), axes, keepdims=1)))}


def sign(op: Emitter, node: NodeProto, known: Known) -> dict[str, str] | None:
    """[x > 0] - [x < 0]; NaN becomes 0."""
    (x,) = node.input
    kind = known.types.get(x)
    if kind is None or kind not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return None
    zero = op.constant(0, helper.tensor_dtype_to_np_dtype(kind).type)
    return {node.output[0]: op.Sub(op.Cast(op.Greater(x, zero), to=kind), op.Cast(op.Less(x, zero), to=kind))}


def split(op: Emitter, node: NodeProto, known: Known) -> dict[str, str] | None:
    """A Slice for each part, where a shader would write into more buffers than every GPU has."""
    x, *sizes = node.input
    attributes, shape, parts = attributes_of(node), known.shapes.get(x), len(node.output)
    if parts < _BUFFERS or shape is None or (sizes and sizes[0] and sizes[0] not in known.constants):
        return None
    axis = attributes.get("axis", 0) % len(shape)
    if sizes and sizes[0]:
        lengths = [int(length) for length in known.constants[sizes[0]]]
    else:  # equal ones, the last may be smaller
        even = -(-shape[axis] // parts)
        lengths = [min(even, shape[axis] - n * even) for n in range(parts)]
    ends = np.cumsum(lengths)

    def part(length: int, end: int) -> str:
        return op.Slice(x, *(op.constant([k], np.int64) for k in (end - length, end, axis)))

    return {y: part(n, end) for y, n, end in zip(node.output, lengths, ends, strict=True) if y}


def sum_(op: Emitter, node: NodeProto, _: Known) -> dict[str, str]:
    """((x1 + x2) + x3) + …"""
    total, *rest = node.input
    for x in rest:
        total = op.Add(total, x)
    return {node.output[0]: total}


def one_hot(op: Emitter, node: NodeProto, known: Known) -> dict[str, str] | None:
    """`values[1]` where an index is that of its place, else `values[0]`; indices below 0 count from the end."""
    index, depth, values = node.input
    count, pair = known.constants.get(depth), known.constants.get(values)
    if count is None or pair is None or known.rank(index) is None or known.types.get(index) not in _WHOLE:
        return None
    length, rank = int(count.reshape(())), len(known.lengths[index])
    axis = attributes_of(node).get("axis", -1) % (rank + 1)
    places = np.arange(length, dtype=np.int32).reshape([-1, *[1] * (rank - axis)])
    small = op.Unsqueeze(op.Cast(index, to=TensorProto.INT32), op.constant([axis], np.int64))
    below = op.Less(small, op.constant(0, np.int32))
    place = op.Where(below, op.Add(small, op.constant(length, np.int32)), small)
    same = op.Equal(place, op.constant(places))
    return {node.output[0]: op.Where(same, op.constant(pair[1]), op.constant(pair[0]))}


def softmax_cross_entropy_loss(op: Emitter, node: NodeProto, known: Known) -> dict[str, str] | None:
    """-Σ w log p[label], over Σ w for the mean; w is 0 for ignored labels, else 1 or the weight of the class.

    The label's log p is the only one that a comparison with 0 … classes - 1 leaves: what Gather would take of int64.
    """
    attributes: dict[str, Any] = attributes_of(node)
    x, labels, *weights = node.input
    rank = known.rank(x)
    classes = known.lengths.get(x, (None, None))[1]
    if (
        rank is None
        or not isinstance(classes, int)
        or known.types.get(x) != TensorProto.FLOAT
        or labels not in known.types
    ):
        return None
    first = op.constant([1], np.int64)
    places = np.arange(classes, dtype=np.int32).reshape([1, -1, *[1] * (rank - 2)])
    small = labels if known.types[labels] == TensorProto.INT32 else op.Cast(labels, to=TensorProto.INT32)
    same = op.Equal(op.Unsqueeze(small, first), op.constant(places))
    log_p = log_softmax(op, helper.make_node("LogSoftmax", [x], ["p"], axis=1), known)["p"]
    none = op.constant(0, np.float32)
    loss = op.Neg(op.ReduceSum(op.Where(same, log_p, none), first, keepdims=0))
    weight = ""
    if weights and weights[0]:
        by_class = op.Reshape(weights[0], op.constant(places.shape, np.int64))
        weight = op.ReduceSum(op.Where(same, by_class, none), first, keepdims=0)
    if (ignored := attributes.get("ignore_index")) is not None:
        counts = op.Not(op.Equal(small, op.constant(ignored, np.int32)))
        weight = op.Where(counts, weight, none) if weight else op.Cast(counts, to=TensorProto.FLOAT)
    if weight:
        loss = op.Mul(loss, weight)
    reduction = attributes.get("reduction", b"mean").decode()
    if reduction == "sum" or (reduction == "mean" and weight):
        loss = op.ReduceSum(loss, keepdims=0)
    elif reduction == "mean":
        loss = op.ReduceMean(loss, keepdims=0)
    if reduction == "mean" and weight:
        loss = op.Div(loss, op.ReduceSum(weight, keepdims=0))
    results = {node.output[0]: loss}
    if len(node.output) > 1 and node.output[1]:
        results[node.output[1]] = log_p
    return results


def batch_normalization(op: Emitter, node: NodeProto, known: Known) -> dict[str, str] | None:
    """In training mode: y = (x - μ) · s / √(σ² + ε) + b, running ← m · running + (1 - m) · μ, and of σ² likewise.

    μ, σ²: of the batch, by sums in float32. None in inference mode, which has kernels.
    """
    attributes: dict[str, Any] = attributes_of(node)
    x, scale, bias, mean, variance = node.input
    rank = known.rank(x)
    if not attributes.get("training_mode") or rank is None:
        return None
    axes = op.constant([0, *range(2, rank)], np.int64)
    channels = op.constant([-1, *[1] * (rank - 2)], np.int64)
    momentum, epsilon = attributes.get("momentum", 0.9), attributes.get("epsilon", 1e-5)

    def wide(name: str) -> str:
        return op.Cast(name, to=TensorProto.FLOAT) if known.types.get(name) in _HALF else name

    def as_of(name: str, value: str) -> str:
        return op.Cast(value, to=known.types[name]) if known.types.get(name) in _HALF else value

    def number(value: float) -> str:
        return op.constant(value, np.float32)

    wide_x = wide(x)
    centre = op.ReduceMean(wide_x, axes, keepdims=1)
    d = op.Sub(wide_x, centre)
    spread = op.ReduceMean(op.Mul(d, d), axes, keepdims=1)
    factor = op.Div(op.Reshape(wide(scale), channels), op.Sqrt(op.Add(spread, number(epsilon))))
    y = op.Add(op.Mul(d, factor), op.Reshape(wide(bias), channels))
    results = {node.output[0]: as_of(x, y)}
    flat = op.constant([-1], np.int64)
    for name, running, now in zip(node.output[1:], (mean, variance), (centre, spread), strict=False):
        if name:
            kept = op.Mul(wide(running), number(momentum))
            results[name] = as_of(running, op.Add(kept, op.Mul(op.Reshape(now, flat), number(1 - momentum))))
    return results


def _max_pool_backward(op: Emitter, node: NodeProto, known: Known) -> dict[str, str] | None:
    if known.types.get(node.input[0]) != TensorProto.FLOAT:
        return None
    result = max_pool_backward(op, node, known.shapes)
    return None if result is None else {node.output[0]: result}


# "MaxPoolBackward" stands for the Indices of MaxPool, which its body in standard operators reads.
FORMS: dict[str, Form] = {
    "BatchNormalization": batch_normalization,
    "LogSoftmax": log_softmax,
    "MaxPoolBackward": _max_pool_backward,
    "OneHot": one_hot,
    "Sign": sign,
    "SoftmaxCrossEntropyLoss": softmax_cross_entropy_loss,
    "Split": split,
    "Sum": sum_,
}
