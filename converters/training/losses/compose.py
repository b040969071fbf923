"""Sums of losses, and emitting any loss behind a model's outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.rules.common import cast
from onnx_backprop.converters.training.losses.base import (
    Composable,
    Loss,
    LossBuilder,
    LossFunction,
    require_held,
    scalar,
)
from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.extensions import load_extensions
from onnx_backprop.opset.graphs.facts import VIEW
from onnx_backprop.opset.graphs.walk import is_standard

_SQUASHING = ("Sigmoid", "Softmax")


@dataclass(frozen=True)
class LossSum(Composable):
    """Σ factor · loss, as `0.7 * Dice("mask") + MSE("depth")` and {"mask": "dice", "depth": "mse"} make it.

    Losses of one prediction read one target; those of several have targets called `<prediction>_target` or `_labels`,
    and those that name the same `target` share it.
    """

    name: ClassVar[str] = "sum"
    terms: tuple[tuple[float, Loss | LossFunction], ...]


AnyLoss = str | Loss | LossSum | LossFunction | Mapping[str, Any] | None


def added(one: Any, other: Any) -> Any:
    """The sum of two losses; NotImplemented for what is none."""
    if not all(isinstance(loss, Loss | LossSum) or _is_function(loss) for loss in (one, other)):
        return NotImplemented
    return LossSum((*_terms(one), *_terms(other)))


def scaled(loss: Any, factor: float) -> Any:
    """A loss times a number; NotImplemented for something else."""
    if isinstance(factor, bool) or not isinstance(factor, int | float | np.number):
        return NotImplemented
    if not np.isfinite(factor):
        raise InvalidArgumentError(f"loss: expected a finite factor, got {factor}")
    return LossSum(tuple((float(factor) * number, term) for number, term in _terms(loss)))


def check_loss(loss: AnyLoss, known: Mapping[str, type[Loss] | LossFunction]) -> Loss | LossSum | LossFunction | None:
    """The loss as an object; InvalidArgumentError unless it is None, a name, a Loss, a dict of them or a callable."""
    if isinstance(loss, str):
        if loss not in known:
            load_extensions()
        if loss not in known:
            raise _unknown(loss, known)
        entry = known[loss]
        return entry() if isinstance(entry, type) else entry
    if isinstance(loss, Mapping):
        total = _of_outputs(loss, known)
        ((factor, term), *rest) = total.terms
        return term if factor == 1 and not rest else total
    if loss is None or isinstance(loss, Loss | LossSum) or _is_function(loss):
        return loss
    raise _unknown(loss, known)


def _unknown(loss: object, known: Mapping[str, object]) -> InvalidArgumentError:
    names = ", ".join(map(repr, known))
    return InvalidArgumentError(
        f"loss: expected None or one of {names}, a Loss, a dict of outputs and losses or a callable, "
        f"got {loss!r}{near(str(loss), known)}"
    )


def emit_loss(
    op: LossBuilder,
    loss: Loss | LossSum,
    find: Callable[[str | None], ir.Value],
    call: Callable[[LossFunction], ir.Value],
) -> ir.Value:
    """Emit a ready loss or a sum of losses. find: the value that a name stands for; call: a callable's value."""
    terms = _terms(loss)
    read = [[find(name) for name in term.reads()] if isinstance(term, Loss) else [] for _, term in terms]
    op.single = all(read) and len({str(values[0].name) for values in read}) == 1
    results: list[ir.Value] = []
    for (factor, term), values in zip(terms, read, strict=True):
        if isinstance(term, Loss):
            op.prefix = term.name
            if term.squashes():
                _warn_of_squashed(term, values[0])
            value = term.emit(op, *values)
        else:
            value = call(term)
        op.prefix = "loss"
        if factor != 1:
            require_held("loss: factor", factor, element_type(value).numpy())
            value = op.Mul(value, op.scalar(factor, value))
        results.append(value)
    double = any(element_type(value) == ir.DataType.DOUBLE for value in results)
    if double:
        results = [cast(op, value, ir.DataType.DOUBLE) for value in results]
    total = op.accumulate(results)
    return scalar(total, total) if all(read) else total  # what a callable returns may have any shape


def _warn_of_squashed(loss: Loss, y: ir.Value) -> None:
    """Say that a loss of logits reads what a softmax or a sigmoid has given already."""
    node = y.producer()
    while node is not None and (node in VIEW or is_standard(node, "Cast", "Transpose")):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.domain or node.op_type not in _SQUASHING or node.inputs[0] is None:
        return
    instead = "NLL" if node.op_type == "Softmax" else "BCE"
    warn(
        f"loss: {loss.name} takes logits, and {y.name!r} is the output of a {node.op_type}: it would be applied twice. "
        f"Read the logits: prediction={node.inputs[0].name!r}, or take a loss of probabilities, losses.{instead}()"
    )


def _is_function(loss: object) -> bool:
    return callable(loss) and not isinstance(loss, type)


def _terms(loss: Any) -> Sequence[tuple[float, Loss | LossFunction]]:
    return loss.terms if isinstance(loss, LossSum) else ((1.0, loss),)


def _of_outputs(losses: Mapping[str, Any], known: Mapping[str, type[Loss] | LossFunction]) -> LossSum:
    """The sum of a loss for each of some outputs."""
    terms: list[tuple[float, Loss | LossFunction]] = []
    for output, given in losses.items():
        if not isinstance(output, str):
            raise InvalidArgumentError(f"loss: expected names of outputs, got {output!r}")
        loss = None if given is None else check_loss(given, known)
        for factor, term in () if loss is None else _terms(loss):
            if not isinstance(term, Loss) or term.prediction not in (None, output):
                reads = f"one that reads {term.prediction!r}" if isinstance(term, Loss) else repr(term)
                raise InvalidArgumentError(f"loss: {output!r}: expected a ready loss of this output, got {reads}")
            terms.append((factor, replace(term, prediction=output)))
    if not terms:
        raise InvalidArgumentError("loss: expected a loss for one output or more, got an empty dict")
    return LossSum(tuple(terms))
