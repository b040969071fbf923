"""What all metrics have in common: what they read, the sums that they emit, and the numbers made of these."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims, type_name
from onnx_backprop.converters.training.losses.base import Expectation
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.shapes import describe

Sums = dict[str, np.ndarray]
Number = float | np.ndarray  # of a metric: one, or an array of them
NOWHERE = 2**40  # a place that no tensor has, which fails the run


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A prediction beside its target, as a loss reads them.

    takes: what the prediction is, see `Loss.takes`. axis: of the classes; None where the target has the shape of the
    prediction. ignored: the label that counts nowhere. shift: whether a label belongs to the logits before it.
    weights: the name of an input with a weight for every label.
    """

    prediction: str
    target: str
    loss: str = ""
    takes: str = "values"
    axis: int | None = None
    ignored: int | None = None
    shift: bool = False
    weights: str | None = None

    @staticmethod
    def of(record: Mapping[str, Any]) -> "Comparison":
        """What `Settings.compared` says."""
        known = {f.name for f in fields(Comparison)}
        return Comparison(**{name: value for name, value in record.items() if name in known and value is not None})


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a metric reads in the graph: the values of a `Comparison`. metric: its name, for messages."""

    metric: str
    about: Comparison
    y: ir.Value
    t: ir.Value
    weights: ir.Value | None = None

    @property
    def classes(self) -> bool:
        """Whether the target holds the numbers of classes."""
        return self.about.axis is not None

    def axis(self) -> int:
        """The axis of the classes, counted from the end, so that what is cut off in front of it does not move it."""
        rank = len(dims(self.y) or ())
        return (self.about.axis or 0) % rank - rank

    def refuse(self, expected: str) -> InvalidArgumentError:
        """The error about a metric that does not fit what the loss reads."""
        got = f"{self.about.prediction!r} of shape {describe(dims(self.y))}"
        what = "classes" if self.classes else f"{type_name(self.t)} of shape {describe(dims(self.t))}"
        loss = f" ({self.about.loss})" if self.about.loss else ""
        return InvalidArgumentError(
            f"{self.metric}: expected {expected}, got {got} beside {self.about.target!r}{loss}, which holds {what}. "
            "Take another metric, or name what it reads: prediction=, target="
        )

    def values(self, op: Builder) -> tuple[ir.Value, ir.Value]:
        """The prediction and a target of its shape, as float64; an error where the target holds classes."""
        if self.classes or len(dims(self.y) or ()) != len(dims(self.t) or ()):
            raise self.refuse("a target of the shape of the prediction")
        shape = op.shape(self.y)  # fails where it is another one: what is one row would be broadcast
        return double(op, self.y), double(op, op.Reshape(self.t, shape, allowzero=1))

    def before(self, op: Builder) -> ir.Value:
        """The scores that labels are compared with: without the last of a text, where labels come one later."""
        if not self.about.shift:
            return self.y
        return like(op.Slice(self.y, [0], [-1], [len(dims(self.y) or ()) - 2]), self.y)

    def labels(self, op: Builder) -> tuple[ir.Value, ir.Value | None]:
        """The labels of all positions, (M), int64, and which of them count, None for all.

        A label below 0 is sent to where there is no class, so that it fails the run where it is used as an index.
        """
        t, mask, rank = self.t, None, len(dims(self.t) or ())
        if self.about.shift:
            t = op.Slice(t, [1], [np.iinfo(np.int64).max], [rank - 1])
        t = op.Cast(op.Reshape(t, [-1]), to=ir.DataType.INT64)
        if self.about.ignored is not None:
            mask = op.Not(op.Equal(t, self.about.ignored))
        if self.weights is not None:
            weights = self.weights
            if self.about.shift:
                weights = op.Slice(weights, [1], [np.iinfo(np.int64).max], [rank - 1])
            counts = op.Not(op.Equal(double(op, op.Reshape(weights, [-1])), 0.0))
            mask = counts if mask is None else op.And(mask, counts)
        return op.Where(op.Less(t, 0), NOWHERE, t), mask

    def chosen(self, op: Builder) -> ir.Value:
        """The class with the highest score of every position, (M), the first of equal ones."""
        scores = self.before(op)
        return op.Reshape(op.ArgMax(single(op, scores), axis=self.axis(), keepdims=0), [-1])

    def count(self, op: Builder) -> ir.Value:
        """C, the number of classes, 0-D."""
        rank = len(dims(self.y) or ())
        return op.Reshape(op.length(self.y, self.axis() % rank), op.ints([]))

    def rows(self, op: Builder) -> ir.Value:
        """The scores as (M, C), one row for every position."""
        scores, axis = self.before(op), self.axis()
        rank = len(dims(scores) or ())
        if axis != -1:
            order = [n for n in range(rank) if n != axis % rank]
            scores = like(op.Transpose(scores, perm=[*order, axis % rank]), scores)
        return op.Reshape(double(op, scores), op.Concat([-1], op.Reshape(self.count(op), [1]), axis=0))

    def decided(self, op: Builder, threshold: float | None) -> tuple[ir.Value, ir.Value]:
        """Where the prediction and the target say yes, two masks of the shape (rows, channels, others).

        threshold: above which a prediction says yes. Default: 0 of logits, 1/2 of probabilities.
        """
        if self.classes:
            raise self.refuse("a target of the shape of the prediction, 1 for yes and 0 for no")
        if threshold is None:
            threshold = {"logits": 0.0, "probabilities": 0.5}.get(self.about.takes)
        if threshold is None:
            raise self.refuse("classes, logits or probabilities, or the argument threshold=, above which it is a yes")
        y, t = self.values(op)
        rank = len(dims(self.y) or ())
        shape = op.ints([0, 0, -1]) if rank > 1 else op.ints([-1, 1, 1])
        return (op.Reshape(op.Greater(x, limit), shape) for x, limit in ((y, threshold), (t, 0.5)))  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Metric(ABC):
    """A number about all batches of an evaluation together, from sums that the graph computes for each batch.

    Args:
        prediction: the output of the model that it reads, or a value inside the model. Default: what the loss reads.
        target: the name of the input to compare with. Default: that of the loss.

    The sums of batches, and of several ranks, are added in float64 and int64, and the number is computed from the
    totals. So it does not depend on how rows are divided into batches.
    """

    name: ClassVar[str]
    higher: ClassVar[bool]  # whether more of it is better
    expects: ClassVar[Mapping[str, Expectation]] = {}
    prediction: str | None = field(default=None, kw_only=False)
    target: str | None = None

    def __post_init__(self) -> None:
        """Refuse arguments that are not what is expected."""
        for argument, (expected, holds) in self.expects.items():
            given = getattr(self, argument)
            try:
                right = holds(given)
            except TypeError:
                right = False
            if not right:
                raise InvalidArgumentError(f"{self.name}: {argument}: expected {expected}, got {given!r}")

    @property
    def label(self) -> str:
        """What it is called where nobody gives it a name."""
        return self.name

    @abstractmethod
    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        """Emit the nodes; the sums of a batch by name, float64 or int64."""

    @abstractmethod
    def value(self, sums: Sums) -> Number:
        """The number that the totals give."""

    def merged(self, one: Sums, other: Sums) -> Sums:
        """The sums of two batches together."""
        return {name: total + other[name] for name, total in one.items()}


def like(value: ir.Value, other: ir.Value) -> ir.Value:
    """A value of the type and rank of another, of lengths that are not known."""
    value.type, value.shape = other.type, ir.Shape([None] * len(dims(other) or ()))
    return value


def double(op: Builder, value: ir.Value) -> ir.Value:
    """A value as float64."""
    result = op.Cast(value, to=ir.DataType.DOUBLE)
    result.shape = value.shape
    return result


def single(op: Builder, value: ir.Value) -> ir.Value:
    """Half precision as float32, which every runtime compares; others as they are."""
    half = value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return op.Cast(value, to=ir.DataType.FLOAT) if half else value


def total(op: Builder, value: ir.Value) -> ir.Value:
    """The sum of all elements, 0-D; of truths how many there are, int64."""
    if value.dtype == ir.DataType.BOOL:
        value = op.Cast(value, to=ir.DataType.INT64)
    return op.ReduceSum(value, keepdims=0)


def histogram(op: Builder, places: ir.Value, length: ir.Value, mask: ir.Value | None) -> ir.Value:
    """How often each place 0 … length - 1 is among those that are kept, (length), int64; others fail the run."""
    places = op.Where(op.Less(places, length), places, NOWHERE)
    if mask is not None:
        places = op.Where(mask, places, length)  # the place behind the last, which is cut off
    ones = op.filled(op.Shape(places), 1)
    zeros = op.filled(op.Reshape(op.Add(length, 1), [1]), 0)
    counts = op.ScatterElements(zeros, places, ones, axis=0, reduction="add")
    return op.Slice(counts, [0], op.Reshape(length, [1]), [0])


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole in float64, NaN where nothing counts."""
    with np.errstate(all="ignore"):
        return np.asarray(part, np.float64) / np.asarray(whole, np.float64)


def ratio(name: str, part: np.ndarray, whole: np.ndarray) -> float:
    """part / whole of two numbers; InvalidArgumentError where nothing counts."""
    if not whole:
        raise InvalidArgumentError(f"{name}: no position of the evaluation counts. Give it more, or other labels")
    return float(part) / float(whole)
