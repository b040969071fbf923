"""Losses: what `training_graph` puts behind a model's output, as ordinary ONNX nodes.

    mse                    mean((y - t)²)
    l1                     mean(|y - t|)
    bce_with_logits        mean(max(y, 0) - y·t + log(1 + exp(-|y|)))
    softmax_cross_entropy  mean over positions of -log softmax(y)[label], the classes along axis 1

float16 and bfloat16 predictions are cast to float32 first: one rounding back to the model's type, at the gradient
of the prediction, and a mean over more than 65504 elements stays finite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ..opset.errors import InvalidArgumentError, InvalidModelError
from ..opset.shapes import Dims
from .builder import Builder, dims
from .prepare import near

HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def squared_error(op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
    """(y - t)², element by element."""
    difference = op.Sub(y, t)
    return op.Mul(difference, difference)


def absolute_error(op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
    """|y - t|, element by element; the derivative is 0 where y = t."""
    return op.Abs(op.Sub(y, t))


def binary_cross_entropy(op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
    """t·softplus(-y) + (1 - t)·softplus(y), which equals max(y, 0) - y·t + log(1 + exp(-|y|)).

    This form neither overflows nor cancels, and its derivative sigmoid(y) - t also holds at y = 0, where max and
    |·| have a kink each.
    """
    positive = op.Mul(t, op.Softplus(op.Neg(y)))
    negative = op.Mul(op.Sub(op.scalar(1.0, y), t), op.Softplus(y))
    return op.Add(positive, negative)


ELEMENTWISE: dict[str, Callable[[Builder, ir.Value, ir.Value], ir.Value]] = {
    "mse": squared_error,
    "l1": absolute_error,
    "bce_with_logits": binary_cross_entropy,
}
CROSS_ENTROPY = "softmax_cross_entropy"
LOSSES = (*ELEMENTWISE, CROSS_ENTROPY)


def check_loss(loss: str | None) -> None:
    """Raise unless `loss` is None or the name of a loss."""
    if loss is not None and loss not in LOSSES:
        names = ", ".join(map(repr, LOSSES))
        hint = near(str(loss), LOSSES)
        raise InvalidArgumentError(f"loss: expected None or one of {names}, got {loss!r}{hint}")


def emit_loss(op: Builder, loss: str, prediction: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Emit the nodes of a loss; return (loss, target).

    The target is a new graph input: `target` with the prediction's type and shape, or `labels`, int64 with the
    prediction's shape less axis 1. The loss is a 0-D tensor: float64 for a float64 prediction, else float32.
    """
    shape = dims(prediction)
    if shape is None:
        raise InvalidModelError(
            f"the rank of {prediction.name!r} is unknown, so is that of the target. Give the output a shape"
        )
    if loss == CROSS_ENTROPY:
        return _cross_entropy(op, prediction, shape)
    target = _input(op, "target", prediction.dtype, shape)
    t = _checked(op, target, shape, _int64(op.Shape(prediction)) if _symbolic(shape) else None, prediction)
    y = _wide(op, prediction)
    t = _wide(op, t)
    start = len(op.nodes)
    elements = ELEMENTWISE[loss](op, y, t)
    for node in op.nodes[start:]:  # nothing here broadcasts: every result has the prediction's shape
        for value in node.outputs:
            if node.op_type != "Constant":
                value.type, value.shape = y.type, ir.Shape(shape)
    return _scalar(op, op.ReduceMean(elements, keepdims=0), y), target


def _cross_entropy(op: Builder, prediction: ir.Value, shape: Dims) -> tuple[ir.Value, ir.Value]:
    if len(shape) < 2:
        raise InvalidArgumentError(
            f"loss: {CROSS_ENTROPY} expects a prediction of shape (N, C) or (N, C, d1, …), "
            f"got {prediction.name!r} of shape {describe(shape)}"
        )
    positions = (shape[0], *shape[2:])
    labels = _input(op, "labels", ir.DataType.INT64, positions)
    wanted = None
    if _symbolic(positions):
        axes = [axis for axis in range(len(shape)) if axis != 1]
        wanted = _int64(op.Gather(_int64(op.Shape(prediction)), op.ints(axes)))
    checked = _checked(op, labels, positions, wanted, prediction)
    # runtimes count a negative label from the last class; sent out of range, it fails the run
    negative = op.Less(checked, op.constant(np.array(0)))
    checked = op.Where(negative, op.constant(np.array(np.iinfo(np.int64).max)), checked)
    y = _wide(op, prediction)
    return _scalar(op, op.SoftmaxCrossEntropyLoss(y, checked, reduction="mean"), y), labels


def _input(op: Builder, name: str, dtype: ir.DataType | None, shape: Dims) -> ir.Value:
    assert dtype is not None
    return ir.Value(name=op.unique(name), type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _scalar(op: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    value.name = op.unique("loss")
    value.type, value.shape = like.type, ir.Shape(())
    return value


def _wide(op: Builder, value: ir.Value) -> ir.Value:
    """A half-precision value as float32."""
    if value.dtype not in HALF_TYPES:
        return value
    wide = op.Cast(value, to=ir.DataType.FLOAT.value)
    wide.dtype, wide.shape = ir.DataType.FLOAT, value.shape
    return wide


def _int64(value: ir.Value) -> ir.Value:
    """A shape, stated to be one: no gradient is looked for behind it."""
    value.dtype = ir.DataType.INT64
    return value


def _symbolic(shape: Dims) -> int:
    """The number of dimensions that are known only at run time."""
    return sum(not isinstance(d, int) for d in shape)


def _checked(op: Builder, target: ir.Value, shape: Dims, wanted: ir.Value | None, prediction: ir.Value) -> ir.Value:
    """The target, or a failing run where its shape is not the wanted one.

    onnxruntime checks the rank and the fixed dimensions of what is fed but not the symbolic ones, and a target of
    one row would be broadcast over the whole batch without a word. A Reshape fails on another number of elements;
    with several symbolic dimensions, a second one fails on the same number in another arrangement, by asking for
    more elements than there are.
    """
    if wanted is None:
        return target
    outer, op.prefix = op.prefix, f"{target.name}_must_have_the_shape_of_{prediction.name}"
    result = op.Reshape(target, wanted)
    if _symbolic(shape) > 1:
        got = op.Shape(target)
        more = _int64(op.Where(op.Equal(got, wanted), wanted, op.Add(got, wanted)))
        result = op.Reshape(result, more)
    op.prefix = outer
    result.type, result.shape = target.type, ir.Shape(shape)
    return result


def describe(shape: Dims | None) -> str:
    """A shape for a message: (N, 3, ?)."""
    if shape is None:
        return "of unknown rank"
    return f"({', '.join('?' if d is None else str(d) for d in shape)})"
