"""Losses of distributions and of embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.training.losses.base import (
    NAME,
    Expectation,
    Loss,
    LossBuilder,
    between,
    checked,
    compared,
    one_of,
    require_rank,
    scalar,
    shaped_as,
    symbolic,
    wide,
)
from onnx_backprop.converters.training.losses.binary import log
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.shapes import describe

_EPSILON = 1e-12  # added to squared norms, as torch does


@dataclass(frozen=True, kw_only=True)
class KLDivergence(Loss):
    """Σ t · (log t - log p), 0 where t = 0; log p is y.

    Args:
        form: what y is: "log_probabilities", log p; "probabilities", p; "logits", of which log p is the log-softmax.
        log_target: whether the target is log t.
        axis: of the softmax of logits.
        reduction: "batchmean", the sum divided by the number of rows, the divergence of the definition; "mean", divided
            by the number of elements; "sum".

    Shapes: the target is the new input `target` of y's type and shape.
    Source: Kullback and Leibler, "On Information and Sufficiency", 1951.
    """

    name: ClassVar[str] = "kl_div"
    reductions: ClassVar[tuple[str, ...]] = ("batchmean", "mean", "sum")
    expects: ClassVar[Mapping[str, Expectation]] = {"form": one_of("log_probabilities", "probabilities", "logits")}
    reduction: str = "batchmean"
    form: str = "log_probabilities"
    log_target: bool = False
    axis: int = 1

    def squashes(self) -> bool:
        return self.form == "logits"

    def takes(self) -> str:
        return "values"  # since no class of an element is compared

    def emit(self, op: LossBuilder, *predictions: ir.Value) -> ir.Value:
        """Emit the nodes, with the target as a new input."""
        (prediction,) = predictions
        shape = require_rank(prediction)
        if not shape or (self.form == "logits" and not -len(shape) <= self.axis < len(shape)):
            raise InvalidArgumentError(
                f"loss: kl_div expects a prediction with rows and axis {self.axis}, "
                f"got {prediction.name!r} of shape {describe(shape)}"
            )
        y, t = compared(op, self, prediction)
        start = len(op.nodes)
        log_p = {"logits": lambda: op.LogSoftmax(y, axis=self.axis), "probabilities": lambda: log(op, y)}
        y = log_p[self.form]() if self.form in log_p else y
        if self.log_target:
            elements = op.Mul(op.Exp(t), op.Sub(t, y))
        else:
            some = op.Greater(t, 0.0)
            entropy = op.Where(some, op.Mul(t, op.Log(op.Where(some, t, 1.0))), 0.0)
            elements = op.Sub(entropy, op.Mul(t, y))
        shaped_as(op, start, t)
        if self.reduction != "batchmean":
            return self.reduced(op, elements, t)
        rows = op.Cast(op.Gather(op.Shape(t), 0), to=element_type(t))
        return scalar(op.Div(op.ReduceSum(elements, keepdims=0), rows), t)


@dataclass(frozen=True, kw_only=True)
class CosineEmbedding(Loss):
    """1 - cos(x1, x2) where t = 1, max(0, cos(x1, x2) - m) where t = -1; NaN for another t.

    cos(a, b) = Σ a·b / √((Σ a² + 10⁻¹²) · (Σ b² + 10⁻¹²)) along axis 1.

    Args:
        other: x2, an output of the model or a value inside. None: x2 is the target, and t is 1 everywhere.
        margin: m.

    Shapes: x1 and x2 (N, D); the target is the new input `target` of their type: t of shape (N), or x2.
    """

    name: ClassVar[str] = "cosine_embedding"
    expects: ClassVar[Mapping[str, Expectation]] = {"other": NAME, "margin": between(-1, 1)}
    other: str | None = field(default=None, kw_only=False)
    margin: float = 0.0

    def reads(self) -> tuple[str | None, ...]:
        return (self.prediction,) if self.other is None else (self.prediction, self.other)

    def emit(self, op: LossBuilder, *predictions: ir.Value) -> ir.Value:
        """Emit the nodes, with the target as a new input."""
        first = predictions[0]
        shape = require_rank(first)
        for value in predictions:
            if len(require_rank(value)) != 2 or element_type(value) != element_type(first):
                raise InvalidArgumentError(
                    f"loss: cosine_embedding expects predictions of shape (N, D) and of one type, got {value.name!r} "
                    f"of shape {describe(require_rank(value))}, {element_type(value).name}"
                )
        if len(predictions) == 1:
            one, two = compared(op, self, first)
            t = None
        else:
            target = op.target(self, first, "target", shape=shape[:1])
            t = checked(op, target, shape[:1], op.Shape(first, end=1) if symbolic(shape[:1]) else None, first)
            second = _of_equal_shape(op, predictions[1], first)
            one, two, t = wide(op, first), wide(op, second), wide(op, t)

        def along(a: ir.Value, b: ir.Value) -> ir.Value:
            result = op.ReduceSum(op.Mul(a, b), [1], keepdims=0)
            result.type, result.shape = a.type, ir.Shape(shape[:1])
            return result

        product = along(one, two)
        start = len(op.nodes)
        squares = op.Mul(op.Add(along(one, one), _EPSILON), op.Add(along(two, two), _EPSILON))
        cosine = op.Div(product, op.Sqrt(squares))
        loss = op.Sub(1.0, cosine)
        if t is not None:
            apart = op.Relu(op.Sub(cosine, self.margin))
            loss = op.Where(op.Equal(t, 1.0), loss, op.Where(op.Equal(t, -1.0), apart, np.nan))
        for node in op.nodes[start:]:
            if node.op_type in ("Add", "Sqrt", "Div", "Sub", "Relu", "Where"):
                node.outputs[0].shape = ir.Shape(shape[:1])
        return self.reduced(op, loss, one)


def _of_equal_shape(op: LossBuilder, value: ir.Value, like: ir.Value) -> ir.Value:
    """The value, which must not be stretched to another one's shape, at conversion or in a run."""
    shape, expected = require_rank(value), require_rank(like)
    if any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(shape, expected, strict=True)):
        raise InvalidArgumentError(
            f"loss: cosine_embedding expects predictions of equal shapes, got {like.name!r} of shape "
            f"{describe(expected)} and {value.name!r} of shape {describe(shape)}"
        )
    known = all(d is not None and d == e for d, e in zip(shape, expected, strict=True))
    return value if known else checked(op, value, expected, op.Shape(like), like)
