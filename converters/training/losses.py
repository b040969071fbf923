"""Losses: what `training_graph` puts behind a model's output, as ordinary ONNX nodes.

    loss = MSE(reduction="sum")  # or its name, "mse", for the defaults
    loss = SoftmaxCrossEntropy(weight=[1, 3], ignore_index=-100, label_smoothing=0.1)
    loss = lambda op, outputs: op.ReduceMean(op.Abs(op.Sub(outputs["y"], op.input("t", outputs["y"]))), keepdims=0)

float16 and bfloat16 predictions are cast to float32 first: one rounding back to the model's type, at the gradient
of the prediction, and a mean over more than 65504 elements stays finite.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike
from onnx import defs

from onnx_backprop.converters.reverse.builder import Builder, Operand
from onnx_backprop.converters.reverse.known import dims, element_type
from onnx_backprop.converters.rules.common import widen
from onnx_backprop.converters.training.names import MUST_HAVE_THE_SHAPE_OF, SOFTMAX_CROSS_ENTROPY
from onnx_backprop.opset.core.errors import InvalidArgumentError, InvalidModelError
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.core.shapes import Dim, Dims, describe

__all__ = ["L1", "MSE", "BCEWithLogits", "Huber", "LossBuilder", "SoftmaxCrossEntropy"]
REDUCTIONS = ("mean", "sum")


class LossBuilder(Builder):
    """A builder that can also add inputs to the graph; what a loss that is a callable receives."""

    def __init__(self, used_names: set[str]) -> None:
        super().__init__(used_names)
        self.inputs: list[ir.Value] = []

    def emit(
        self, op_type: str, inputs: Sequence[Operand], attributes: dict[str, Any], *, outputs: int = 1, domain: str = ""
    ) -> Sequence[ir.Value]:
        """Append a node; InvalidArgumentError for an operator or an attribute that ONNX does not have."""
        if not domain:
            if not defs.has(op_type):
                names = [schema.name for schema in defs.get_all_schemas() if not schema.domain]
                raise InvalidArgumentError(f"loss: {op_type!r} is no operator of ONNX{near(op_type, names)}")
            known = defs.get_schema(op_type).attributes
            for name in attributes:
                if name not in known:
                    raise InvalidArgumentError(f"loss: {op_type} has no attribute {name!r}{near(name, known)}")
        return super().emit(op_type, inputs, attributes, outputs=outputs, domain=domain)

    def input(
        self, name: str, like: ir.Value | None = None, *, dtype: ir.DataType | None = None, shape: Dims | None = None
    ) -> ir.Value:
        """A new graph input that every step must feed, of the type and shape of `like` where none is given.

        Errors: InvalidArgumentError when the name is taken, InvalidModelError when a type or shape is unknown.
        """
        given = self.unique(name)
        dtype = dtype or (None if like is None else like.dtype)
        shape = shape if shape is not None else None if like is None else dims(like)
        if dtype is None or shape is None:
            raise InvalidModelError(f"the input {name!r} of the loss needs an element type and a shape")
        value = ir.Value(name=given, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.inputs.append(value)
        return value


LossFunction = Callable[[LossBuilder, Mapping[str, ir.Value]], ir.Value]


@dataclass(frozen=True, kw_only=True)
class Loss(ABC):
    """A loss of one prediction and one target. reduction: "mean" or "sum" over all positions."""

    name: ClassVar[str]
    reduction: str = "mean"

    def __post_init__(self) -> None:
        """Refuse an unknown reduction."""
        if self.reduction not in REDUCTIONS:
            raise InvalidArgumentError(f"{self.name}: reduction: expected 'mean' or 'sum', got {self.reduction!r}")

    @abstractmethod
    def emit(self, op: LossBuilder, prediction: ir.Value) -> ir.Value:
        """Emit the nodes, with the target as a new input."""


@dataclass(frozen=True, kw_only=True)
class ElementLoss(Loss):
    """A loss of every element y of the prediction and t of the target."""

    def emit(self, op: LossBuilder, prediction: ir.Value) -> ir.Value:
        """Emit the nodes, with the target as a new input `target` of the prediction's type and shape."""
        shape = _known_rank(prediction)
        target = op.input("target", prediction)
        t = _checked(op, target, shape, op.Shape(prediction) if _symbolic(shape) else None, prediction)
        y, t = _wide(op, prediction), _wide(op, t)
        start = len(op.nodes)
        elements = self.elements(op, y, t)
        for node in op.nodes[start:]:  # whatever broadcasts here broadcasts to the prediction's shape
            for value in node.outputs:
                if node.op_type != "Constant":
                    value.type, value.shape = y.type, ir.Shape(shape)
        reduce = op.ReduceMean if self.reduction == "mean" else op.ReduceSum
        return scalar(op, reduce(elements, keepdims=0), y)

    @abstractmethod
    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        """The loss of every element, before the reduction."""


@dataclass(frozen=True, kw_only=True)
class MSE(ElementLoss):
    """(y - t)²."""

    name: ClassVar[str] = "mse"

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        difference = op.Sub(y, t)
        return op.Mul(difference, difference)


@dataclass(frozen=True, kw_only=True)
class L1(ElementLoss):
    """|y - t|; the derivative is 0 where y = t."""

    name: ClassVar[str] = "l1"

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        return op.Abs(op.Sub(y, t))


@dataclass(frozen=True, kw_only=True)
class Huber(ElementLoss):
    """d² / 2 where |d| <= δ, else δ · (|d| - δ/2), d = y - t.  With c = d clipped to ±δ that is c · (d - c/2).

    Source: Huber, "Robust Estimation of a Location Parameter", 1964.
    """

    name: ClassVar[str] = "huber"
    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.delta < np.inf:
            raise InvalidArgumentError(f"huber: delta: expected more than 0, got {self.delta}")

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        difference = op.Sub(y, t)
        clipped = op.Clip(difference, -self.delta, self.delta)
        return op.Mul(clipped, op.Sub(difference, op.Mul(0.5, clipped)))


@dataclass(frozen=True, kw_only=True)
class BCEWithLogits(ElementLoss):
    """p · t · softplus(-y) + (1 - t) · softplus(y), which for p = 1 is max(y, 0) - y·t + log(1 + exp(-|y|)).

    This form neither overflows nor cancels, and its derivative sigmoid(y) - t also holds at y = 0, where max and
    |·| have a kink each. p is `pos_weight`, a number or an array that broadcasts to y.
    """

    name: ClassVar[str] = "bce_with_logits"
    pos_weight: ArrayLike | None = None

    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        positive = op.Mul(t, op.Softplus(op.Neg(y)))
        if self.pos_weight is not None:
            weight = np.asarray(self.pos_weight, np.float64)
            _require_broadcast("bce_with_logits: pos_weight", weight.shape, dims(y) or ())
            positive = op.Mul(positive, weight.astype(element_type(y).numpy()))
        negative = op.Mul(op.Sub(1.0, t), op.Softplus(y))
        return op.Add(positive, negative)


@dataclass(frozen=True, kw_only=True)
class SoftmaxCrossEntropy(Loss):
    """(1 - ε) · Σ -w[t] · log p[t] / W + ε/C · Σ_n Σ_c -w_c · log p_c / W, p = softmax(y), the classes along axis 1.

    W = Σ w[t] over the positions (their number without weights), 1 for reduction "sum". Positions whose label is
    `ignore_index` count nowhere; when all are ignored, the mean is 0/0 = NaN.

    Args:
        weight: w, one number for each of the C classes.
        ignore_index: a label to leave out, in or outside 0 … C - 1.
        label_smoothing: ε in 0 … 1, the share of the target that is spread evenly over all classes.

    Shapes: y (N, C, d1, …); the target is the new input `labels`, int64, of shape (N, d1, …).
    Source: ONNX SoftmaxCrossEntropyLoss; Szegedy et al., "Rethinking the Inception Architecture", section 7.
    """

    name: ClassVar[str] = SOFTMAX_CROSS_ENTROPY
    weight: ArrayLike | None = None
    ignore_index: int | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing <= 1:
            raise InvalidArgumentError(
                f"softmax_cross_entropy: label_smoothing: expected 0 … 1, got {self.label_smoothing}"
            )

    def emit(self, op: LossBuilder, prediction: ir.Value) -> ir.Value:
        """Emit the nodes, with the target as a new input `labels`."""
        shape = _known_rank(prediction)
        if len(shape) < 2:
            raise InvalidArgumentError(
                f"loss: {self.name} expects a prediction of shape (N, C) or (N, C, d1, …), "
                f"got {prediction.name!r} of shape {describe(shape)}"
            )
        positions = (shape[0], *shape[2:])
        labels = op.input("labels", dtype=ir.DataType.INT64, shape=positions)
        wanted = None
        if _symbolic(positions):
            axes = [axis for axis in range(len(shape)) if axis != 1]
            wanted = op.Gather(op.Shape(prediction), axes)
        checked = _checked(op, labels, positions, wanted, prediction)
        y = _wide(op, prediction)
        weight = self._weights(op, y, shape[1])
        # runtimes count a negative label from the last class; sent out of range, it fails the run
        bad = op.Less(checked, 0)
        ignored = None
        if self.ignore_index is not None:
            ignored = op.Equal(checked, self.ignore_index)
            bad = op.And(bad, op.Not(ignored))
        t = op.Where(bad, np.iinfo(np.int64).max, checked)
        attributes = {"reduction": self.reduction, "ignore_index": self.ignore_index}
        smooth = self.label_smoothing
        outputs = op.emit("SoftmaxCrossEntropyLoss", [y, t, weight], attributes, outputs=2 if smooth else 1)
        loss = outputs[0]
        if smooth:
            outputs[1].shape = ir.Shape(shape)
            even = self._even(op, y, outputs[1], checked, weight, ignored)
            share = op.Div(smooth, op.Cast(op.Gather(op.Shape(y), 1), to=element_type(y)))
            loss = op.Add(op.Mul(1 - smooth, loss), op.Mul(share, even))
        return scalar(op, loss, y)

    def _weights(self, op: Builder, y: ir.Value, classes: Dim) -> ir.Value | None:
        if self.weight is None:
            return None
        values = np.asarray(self.weight, np.float64)
        if values.ndim != 1 or (isinstance(classes, int) and len(values) != classes):
            raise InvalidArgumentError(
                f"softmax_cross_entropy: weight: expected one number for each of {classes} classes, "
                f"got an array of shape {values.shape}"
            )
        return op.constant(values.astype(element_type(y).numpy()))

    def _even(
        self,
        op: Builder,
        y: ir.Value,
        log_p: ir.Value,
        labels: ir.Value,
        weight: ir.Value | None,
        ignored: ir.Value | None,
    ) -> ir.Value:
        """Σ_n Σ_c -w_c · log p_c / W."""
        rank = len(dims(y) or ())
        if weight is not None:
            log_p = op.Mul(log_p, op.Reshape(weight, [-1] + [1] * (rank - 2)))
        terms = op.Neg(op.ReduceSum(log_p, [1], keepdims=0))
        safe = labels
        if ignored is not None:
            terms = op.Where(ignored, 0, terms)
            safe = op.Where(ignored, 0, labels)
        total = op.ReduceSum(terms, keepdims=0)
        if self.reduction == "sum":
            return total
        counts = op.Expand(op.scalar(1, y), op.Shape(labels)) if weight is None else op.Gather(weight, safe, axis=0)
        if ignored is not None:
            counts = op.Where(ignored, 0, counts)
        return op.Div(total, op.ReduceSum(counts, keepdims=0))


LOSSES: dict[str, type[Loss]] = {loss.name: loss for loss in (MSE, L1, Huber, BCEWithLogits, SoftmaxCrossEntropy)}
AnyLoss = str | Loss | LossFunction | None


def check_loss(loss: AnyLoss) -> Loss | LossFunction | None:
    """The loss as an object; InvalidArgumentError unless `loss` is None, a name, a Loss or a callable."""
    if isinstance(loss, str) and loss in LOSSES:
        return LOSSES[loss]()
    if loss is None or isinstance(loss, Loss) or (callable(loss) and not isinstance(loss, type)):
        return loss
    names = ", ".join(map(repr, LOSSES))
    raise InvalidArgumentError(
        f"loss: expected None or one of {names}, a Loss or a callable, got {loss!r}{near(str(loss), LOSSES)}"
    )


def scalar(op: Builder, value: ir.Value, like: ir.Value) -> ir.Value:
    """The value as the loss: 0-D, under its name."""
    value.name = op.unique("loss")
    value.type, value.shape = like.type, ir.Shape(())
    return value


def _known_rank(prediction: ir.Value) -> Dims:
    shape = dims(prediction)
    if shape is None:
        raise InvalidModelError(
            f"the rank of {prediction.name!r} is unknown, so is that of the target. Give the output a shape"
        )
    return shape


def _require_broadcast(what: str, small: tuple[int, ...], large: Dims) -> None:
    """`small` stretches to `large` and not the other way round."""
    fits = len(small) <= len(large) and all(
        a in (1, b) or not isinstance(b, int) for a, b in zip(small[::-1], large[::-1], strict=False)
    )
    if not fits:
        raise InvalidArgumentError(
            f"{what}: expected a shape that broadcasts to {describe(large)}, got {describe(small)}"
        )


def _wide(op: Builder, value: ir.Value) -> ir.Value:
    """A half-precision value as float32."""
    wide = widen(op, value)
    wide.shape = value.shape
    return wide


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
    outer, op.prefix = op.prefix, f"{target.name}{MUST_HAVE_THE_SHAPE_OF}{prediction.name}"
    result = op.Reshape(target, wanted)
    if _symbolic(shape) > 1:
        got = op.Shape(target)
        result = op.Reshape(result, op.Where(op.Equal(got, wanted), wanted, op.Add(got, wanted)))
    op.prefix = outer
    result.type, result.shape = target.type, ir.Shape(shape)
    return result


def __dir__() -> list[str]:
    return list(__all__)
