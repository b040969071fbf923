"""What all losses have in common: the builder that adds inputs, the target and its checks, sums of losses."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, cast, get_type_hints

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike

from onnx_backprop.converters.reverse.builder import Builder, Operand
from onnx_backprop.converters.reverse.known import dims, type_name
from onnx_backprop.converters.rules.common import widen
from onnx_backprop.converters.training.names import shape_check
from onnx_backprop.opset.core.errors import InvalidArgumentError, InvalidModelError
from onnx_backprop.opset.core.hints import complaint_of
from onnx_backprop.opset.core.shapes import Dims, describe


class LossBuilder(Builder):
    """A builder that can also add inputs to the graph; it is passed to a loss that is a callable."""

    def __init__(self, used_names: set[str], model_inputs: Mapping[str, ir.Value] | None = None) -> None:
        """model_inputs: inputs of the model, which a loss may name as its target."""
        super().__init__(used_names)
        self.inputs: list[ir.Value] = []
        self.labels: dict[str, dict[str, Any]] = {}  # by the name of an input that holds classes: what is known of it
        self.compared: list[dict[str, Any]] = []  # what each ready loss reads: its prediction and its target
        self.blocks: dict[str, int] = {}  # by the name of a last product: the rows of its blocks, see `linear`
        self.counted: ir.Value | None = None  # what a mean over tokens is divided by, where accumulation weighs by it
        self.single = False  # whether all ready losses read one prediction, whose target needs no name of its own
        self._model_inputs = dict(model_inputs or {})
        self._targets: dict[str, ir.Value] = {}

    def emit(
        self, op_type: str, inputs: Sequence[Operand], attributes: dict[str, Any], *, outputs: int = 1, domain: str = ""
    ) -> Sequence[ir.Value]:
        """Append a node; InvalidArgumentError for an operator or an attribute that ONNX does not have."""
        if not domain and (words := complaint_of(op_type, attributes)):
            raise InvalidArgumentError(f"loss: {words}")
        return super().emit(op_type, inputs, attributes, outputs=outputs, domain=domain)

    def input(
        self, name: str, like: ir.Value | None = None, *, dtype: ir.DataType | None = None, shape: Dims | None = None
    ) -> ir.Value:
        """A new graph input that every step must feed, by default with the type and shape of `like`.

        Errors: InvalidArgumentError if the name is taken, InvalidModelError if a type or shape is unknown.
        """
        given = self.unique(name)
        dtype = dtype or (None if like is None else like.dtype)
        shape = shape if shape is not None else None if like is None else dims(like)
        if dtype is None or shape is None:
            raise InvalidModelError(f"the input {name!r} of the loss needs an element type and a shape")
        value = ir.Value(name=given, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.inputs.append(value)
        if like is not None and like.name:
            self.compared.append({"target": given, "prediction": like.name})
        return value

    def target(
        self, loss: "Loss", prediction: ir.Value, role: str, *, dtype: ir.DataType | None = None, shape: Dims
    ) -> ir.Value:
        """The input that a ready loss compares a prediction with; losses that give it one name share it.

        Its name is `loss.target`, which may be an input of the model; by default `target` or `labels`, behind the name
        of the prediction where the losses read several. Errors: InvalidArgumentError when another loss or the model
        uses the name for an input of another type or shape.
        """
        plain = loss.target is None or role not in loss.roles[:1]
        name = (role if self.single else f"{prediction.name}_{role}") if plain else str(loss.target)
        target = self._targets.get(name) or (None if plain else self._model_inputs.get(name))
        wanted = dtype or prediction.dtype
        self.compared.append({"target": name, "prediction": prediction.name, "loss": loss.name, "takes": loss.takes()})
        if target is None:
            target = self._targets[name] = self.input(name, dtype=wanted, shape=shape)
        elif target.dtype != wanted or not _may_be_equal(dims(target), shape):
            assert wanted is not None
            raise InvalidArgumentError(
                f"loss: {loss.name} expects {name!r} of type {wanted.name} and shape {describe(shape)}, and it is of "
                f"type {type_name(target)} and shape {describe(dims(target) or ())}. "
                f"Give the loss a target of its own: target='another name'"
            )
        return target


def _number(what: str, value: Any, *, whole: bool) -> float:
    """The value as a number of Python; InvalidArgumentError for something else, or what float32 does not hold."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral if whole else Real):
        raise InvalidArgumentError(f"{what}: expected a {'whole ' if whole else ''}number, got {value!r}")
    if whole:
        return int(cast(int, value))
    require_held(what, float(value), np.float32)
    return float(value)


def require_held(what: str, values: ArrayLike, dtype: Any) -> np.ndarray:
    """Numbers as float64; InvalidArgumentError for what are none, and for those that become 0 or infinite in a type."""
    try:
        result = np.asarray(values, np.float64)
    except (TypeError, ValueError) as e:
        raise InvalidArgumentError(f"{what}: expected numbers, got {values!r}") from e
    with np.errstate(all="ignore"):
        held = result.astype(dtype).astype(np.float64)
    if not (np.isfinite(held) & ((held == 0) == (result == 0))).all():
        raise InvalidArgumentError(f"{what}: expected numbers that {np.dtype(dtype).name} holds, got {values!r}")
    return result


Expectation = tuple[str, Callable[[Any], bool]]  # what an argument is to be, in words, and whether it is
NAME: Expectation = ("a name", lambda given: isinstance(given, str | None) and given != "")
POSITIVE: Expectation = ("more than 0", lambda number: 0 < number < np.inf)
NOT_NEGATIVE: Expectation = ("0 or more", lambda number: 0 <= number < np.inf)


def between(low: int, high: int) -> Expectation:
    """A number from low to high."""
    return f"{low} … {high}", lambda number: low <= number <= high


def one_of(*choices: str | None) -> Expectation:
    """One of some names."""
    *others, last = map(repr, choices)
    return " or ".join(filter(None, (", ".join(others), last))), lambda given: given in choices


LossFunction = Callable[[LossBuilder, Mapping[str, ir.Value]], ir.Value]


class Composable:
    """What can be added and multiplied by numbers: 0.7 * Dice("mask") + MSE("depth")."""

    def __add__(self, other: Any) -> Any:
        """The sum of two losses."""
        from onnx_backprop.converters.training.losses.compose import added  # which is made of losses

        return added(self, other)

    def __radd__(self, other: Any) -> Any:
        """The sum of two losses; sum([…]) begins with 0."""
        from onnx_backprop.converters.training.losses.compose import added

        return self if isinstance(other, int) and other == 0 else added(other, self)

    def __mul__(self, factor: float) -> Any:
        """The loss times a number."""
        from onnx_backprop.converters.training.losses.compose import scaled

        return scaled(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Any:
        """The loss divided by a number."""
        if isinstance(divisor, bool) or not isinstance(divisor, Real):
            return NotImplemented
        if divisor == 0:
            raise InvalidArgumentError("loss: expected a divisor other than 0")
        return self * (1 / divisor)


@dataclass(frozen=True, kw_only=True)
class Loss(Composable, ABC):
    """A loss of one prediction and one target.

    Args:
        prediction: the output of the model that it reads, or a value inside the model. Default: the only float output.
        reduction: "mean" or "sum" over all positions.
        target: the name of the input to compare with, which may be one of the model's own. Default: `target` or
            `labels`; in a sum of losses of several outputs, the name of the prediction precedes it.

    `loss(op, y)` emits it in a callable of your own, and `a * loss + b * other` is a loss too.
    """

    name: ClassVar[str]
    reductions: ClassVar[tuple[str, ...]] = ("mean", "sum")
    expects: ClassVar[Mapping[str, Expectation]] = {}  # of arguments of its own
    roles: ClassVar[tuple[str, ...]] = ("target",)  # of the inputs that it adds
    prediction: str | None = field(default=None, kw_only=False)
    reduction: str = "mean"
    target: str | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown reduction, names that are none, and what is no number that float32 holds."""
        for argument, kind in get_type_hints(type(self)).items():
            optional = kind in (float | None, int | None)
            if kind in (float, int) or (optional and getattr(self, argument) is not None):
                number = _number(f"{self.name}: {argument}", getattr(self, argument), whole=kind in (int, int | None))
                object.__setattr__(self, argument, number)
        expects = {"reduction": one_of(*self.reductions), "prediction": NAME, "target": NAME, **self.expects}
        for argument, (expected, holds) in expects.items():
            if not holds(given := getattr(self, argument)):
                raise InvalidArgumentError(f"{self.name}: {argument}: expected {expected}, got {given!r}")

    def __call__(self, op: LossBuilder, *predictions: ir.Value) -> ir.Value:
        """Emit the nodes in a callable of one's own; the loss, 0-D. The target is `<prediction>_target` (`_labels`)."""
        return self.emit(op, *predictions)

    def reads(self) -> tuple[str | None, ...]:
        """The names of the predictions, None for the only float output."""
        return (self.prediction,)

    def squashes(self) -> bool:
        """Whether it takes logits, and applies softmax or sigmoid to them."""
        return False

    def takes(self) -> str:
        """What a prediction is: "logits", "probabilities", "log_probabilities", or "values" of any kind."""
        return "logits" if self.squashes() else "values"

    @abstractmethod
    def emit(self, op: LossBuilder, *predictions: ir.Value) -> ir.Value:
        """Emit the nodes, with the target as a new input."""

    def reduced(self, op: Builder, elements: ir.Value, like: ir.Value) -> ir.Value:
        """The mean or the sum of all elements."""
        reduce = op.ReduceMean if self.reduction == "mean" else op.ReduceSum
        return scalar(reduce(elements, keepdims=0), like)


@dataclass(frozen=True, kw_only=True)
class ElementLoss(Loss):
    """A loss of every element y of the prediction and t of the target, of the prediction's type and shape."""

    def emit(self, op: LossBuilder, *predictions: ir.Value) -> ir.Value:
        """Emit the nodes, with the target as a new input of the prediction's type and shape."""
        (prediction,) = predictions
        y, t = compared(op, self, prediction)
        start = len(op.nodes)
        elements = self.elements(op, y, t)
        shaped_as(op, start, y)
        return self.reduced(op, elements, y)

    @abstractmethod
    def elements(self, op: Builder, y: ir.Value, t: ir.Value) -> ir.Value:
        """The loss of every element, before the reduction."""


def compared(op: LossBuilder, loss: Loss, prediction: ir.Value) -> tuple[ir.Value, ir.Value]:
    """A prediction and its target, of its type and shape; half precision widened."""
    shape = require_rank(prediction)
    target = op.target(loss, prediction, "target", shape=shape)
    t = checked(op, target, shape, op.Shape(prediction) if symbolic(shape) else None, prediction)
    return wide(op, prediction), wide(op, t)


def shaped_as(op: Builder, start: int, y: ir.Value) -> None:
    """Note the type and shape of y on what was emitted since: whatever broadcasts there broadcasts to that shape."""
    for node in op.nodes[start:]:
        for value in node.outputs:
            if node.op_type != "Constant":
                value.type = y.type if value.dtype is None or value.dtype.is_floating_point() else value.type
                value.shape = y.shape


def scalar(value: ir.Value, like: ir.Value) -> ir.Value:
    """The value as a loss, 0-D."""
    value.type, value.shape = like.type, ir.Shape(())
    return value


def require_rank(prediction: ir.Value) -> Dims:
    """The shape of a prediction; InvalidModelError when its rank is unknown."""
    shape = dims(prediction)
    if shape is None:
        raise InvalidModelError(
            f"the rank of {prediction.name!r} is unknown, so is that of the target. Give the output a shape"
        )
    return shape


def require_broadcast(what: str, small: tuple[int, ...], large: Dims) -> None:
    """`small` stretches to `large` and not the other way round."""
    fits = len(small) <= len(large) and all(
        a in (1, b) or not isinstance(b, int) for a, b in zip(small[::-1], large[::-1], strict=False)
    )
    if not fits:
        raise InvalidArgumentError(
            f"{what}: expected a shape that broadcasts to {describe(large)}, got {describe(small)}"
        )


def wide(op: Builder, value: ir.Value) -> ir.Value:
    """A half-precision value as float32."""
    result = widen(op, value)
    result.shape = value.shape
    return result


def symbolic(shape: Dims) -> int:
    """The number of dimensions that are known only at run time."""
    return sum(not isinstance(d, int) for d in shape)


def checked(op: Builder, target: ir.Value, shape: Dims, wanted: ir.Value | None, prediction: ir.Value) -> ir.Value:
    """The target, or a failing run where its shape is not the wanted one.

    onnxruntime checks the rank and the fixed dimensions of what is fed but not the symbolic ones, and a target of
    one row would be broadcast over the whole batch without a word. A Reshape fails on another number of elements;
    with several symbolic dimensions, a second one fails on the same number in another arrangement, by asking for
    more elements than there are.
    """
    if wanted is None:
        return target
    outer, op.prefix = op.prefix, shape_check(str(target.name), str(prediction.name))
    result = op.Reshape(target, wanted)
    if symbolic(shape) > 1:
        got = op.Shape(target)
        result = op.Reshape(result, op.Where(op.Equal(got, wanted), wanted, op.Add(got, wanted)))
    op.prefix = outer
    result.type, result.shape = target.type, ir.Shape(shape)
    return result


def _may_be_equal(one: Dims | None, other: Dims) -> bool:
    """Whether two shapes are of one rank, and their fixed dimensions agree."""
    return (
        one is not None
        and len(one) == len(other)
        and not any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(one, other, strict=True))
    )
