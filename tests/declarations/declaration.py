"""What tests know of an operator: one `Declaration` in tests/operators, from which they draw, derive and compare.

Schemas are written from the specification texts, not from the package: names, kinds, defaults, what is required.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from onnx.defs import OpSchema

import onnx_backprop as ob
from onnx_backprop.opset.core.op import NUMBER_TYPES
from onnx_backprop.opset.operators.registry import BY_NAME
from tests.declarations.calls import Call, Draws

Attributes = dict[str, Any]
Value = np.ndarray | tuple[int, ...] | None

# ----- The schema -----------------------------------------------------------------------------------------------------

REQUIRED = object()
INT, FLOAT, INTS, FLOATS, STRING = (
    OpSchema.AttrType.INT,
    OpSchema.AttrType.FLOAT,
    OpSchema.AttrType.INTS,
    OpSchema.AttrType.FLOATS,
    OpSchema.AttrType.STRING,
)
DATA_FORMAT = (STRING, "NXC", ("NXC", "NCX"))
AUTO_PAD = (STRING, "None", ("None", "SAME_UPPER", "SAME_LOWER", "VALID"))  # in lower case too, and NOTSET


class Schema(NamedTuple):
    """Attributes {name: (kind, REQUIRED, a default or None)}, of strings what they may be too; inputs; outputs.

    Inputs and outputs are {name: type}, with a question mark behind the type where an input is optional.
    """

    attributes: dict[str, tuple[Any, ...]]
    inputs: dict[str, str]
    outputs: dict[str, str]


# ----- Worked examples ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A call of an operator and its answer, worked out by hand or published with a specification.

    In `inputs` a nested list is data and a tuple is the value of an integer input; None is an absent one.
    """

    id: str
    op: str
    attributes: Attributes
    inputs: tuple[list[Any] | tuple[int, ...] | None, ...]
    expected: list[Any]
    more: tuple[list[Any], ...] = ()  # further outputs

    def arrays(self) -> list[np.ndarray | None]:
        """The inputs as float32 and integer arrays, the latter of the type that the operator takes."""
        result: list[np.ndarray | None] = []
        for spec, given in zip(BY_NAME[self.op].inputs, self.inputs, strict=False):
            kind = NUMBER_TYPES[spec.type_name].dtype if isinstance(given, tuple) else np.float32
            result.append(None if given is None else np.array(given, dtype=kind))
        return result


def row(*values: float) -> list[Any]:
    """One row of one channel: shape (1, 1, length)."""
    return [[list(values)]]


def zeros(*shape: int) -> list[Any]:
    """A source of which only the shape matters."""
    return np.zeros(shape).tolist()


# ----- Refusals -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """A change of the valid call and the whole sentence behind the operator's name. None removes."""

    op: str
    message: str
    attributes: Attributes = field(default_factory=dict)
    inputs: dict[int, Value] = field(default_factory=dict)
    error: type[Exception] = ob.ShapeError
    model_shows_it: bool = True

    @property
    def id(self) -> str:
        return f"{self.op}-{self.attributes or ''}{self.inputs or ''}"[:90]


def invalid(op: str, message: str, attributes: Attributes, *, model_shows_it: bool = True) -> Bad:
    return Bad(op, message, attributes, error=ob.InvalidModelError, model_shows_it=model_shows_it)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def ones(inputs: Sequence[Value]) -> list[np.ndarray | None]:
    """Ones of the shapes; numbers as they are."""
    return [np.ones(i, np.float32) if isinstance(i, tuple) else i for i in inputs]


# ----- All of it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """An operator.

    `calls` draws a valid call; inputs that have a tie or a kink are drawn without too, or named in `jumps`. `valid` is one
    valid call, its attributes, the shapes of its tensors and its numbers; what is refused is a change of it.
    """

    op: str
    schema: Schema
    calls: Callable[[Draws], Call]
    valid: tuple[Attributes, list[Value]]
    refused: Sequence[Bad]
    examples: Iterable[Example]
    gradient_of: Sequence[str] = ()
    """Operators of ONNX whose gradient rules emit it."""
    workspace: bool = True
    """Whether its native kernel takes memory beside its tensors."""
    inferred: Sequence[tuple[Attributes, list[Any], list[Any]]] = ()
    """Partly known shapes: attributes, what is known of each input, what is inferred of each output. None: no rank."""
    smooth: Callable[[Call], bool] = lambda _: True
    """Whether differences of a call tell its derivatives."""
    jumps: tuple[str, ...] = ()
    """Inputs by which the derivative is zero but for jumps, which differences would meet."""
    linear: tuple[str, ...] = ()
    """Inputs in which it is linear, beside nothing else: the second derivative by them is zero."""

    def spoilt(self, bad: Bad) -> tuple[Attributes, list[Value]]:
        """The valid call, changed."""
        attributes, inputs = self.valid
        changed = {k: v for k, v in (attributes | bad.attributes).items() if v is not None}
        given = dict(enumerate(inputs)) | bad.inputs
        return changed, [given.get(n) for n in range(max(given) + 1)]
