"""Every error this package raises on purpose, and its one warning, `OnnxBackpropWarning(UserWarning)`.

    OnnxBackpropError(Exception)             catch-all
    ├─ InvalidArgumentError(ValueError)      a call names something that is not there or does not fit
    │  └─ CheckpointError                    a file is no checkpoint, or one of another training
    ├─ InvalidModelError(ValueError)         the model breaks the ONNX or the operator's specification
    ├─ ShapeError(ValueError)                shapes, types or geometry contradict each other
    ├─ UnsupportedError(NotImplementedError) meaningful, but not handled
    │  ├─ UnsupportedOpError                 no gradient rule for (domain, operator, version)
    │  └─ UnsupportedAttributeError          the rule exists; this attribute value is not handled
    ├─ KernelError(RuntimeError)             a kernel route is missing or failed to start
    ├─ ReplicaError(RuntimeError)            ranks of one training do not have the same
    └─ RegistrationError(RuntimeError)       developer's: a rule or operator registered twice

A message reads ``{operator} '{node}': {what was expected}, got {value}. {what to do}``, or begins with the name of the
argument that is wrong, ``{argument}: ``, which the error carries too. Names come from files: what a
terminal would obey is escaped in it and what would fill the screen is cut, see `printable`.
"""

import inspect
import math
import numbers
import re
import warnings

_WORD, _LINE = 400, 4000  # characters
_LONG_WORD = re.compile(rf"\S{{{_WORD + 1},}}")


def printable(text: str, *, lines: bool = False) -> str:
    """A text for people: escapes for what is no printable character, the middle of long words and lines left out.

    lines: keep line breaks, as in a message that is a list.
    """
    if not text.isprintable():
        kept = "\n" if lines else ""
        text = "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= _WORD:
        return text
    text = _LONG_WORD.sub(lambda word: _cut(word[0], _WORD), text)
    return "\n".join(_cut(line, _LINE) for line in text.split("\n"))


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 2]}…{text[-length // 4 :]}"


def _about(argument: str, message: str) -> str:
    return f"{argument}: {message}" if argument else message


class OnnxBackpropError(Exception):
    """Base of all errors raised on purpose; `op_type` and `node`, or `argument`, name the culprit if there is one."""

    def __init__(self, message: str, argument: str = "", *, op_type: str = "", node: str = "") -> None:
        message, op_type = printable(_about(argument, message), lines=True), printable(op_type)
        subject = " ".join(filter(None, (op_type, f"'{printable(node)}'" if node else "")))
        super().__init__(f"{subject}: {message}" if subject else message)
        self.message = message
        self.op_type = op_type
        self.node = node
        self.argument = argument


class InvalidArgumentError(OnnxBackpropError, ValueError):
    """A call names something that is not there, or passes a value that does not fit."""


class CheckpointError(InvalidArgumentError):
    """A file is no checkpoint, a damaged one, or one of another training graph."""


class InvalidModelError(OnnxBackpropError, ValueError):
    """The model or a node breaks the specification it claims to follow."""


class ShapeError(OnnxBackpropError, ValueError):
    """Shapes, element types or geometry contradict each other."""


class UnsupportedError(OnnxBackpropError, NotImplementedError):
    """Meaningful input that this version does not handle; refused rather than guessed."""


class UnsupportedOpError(UnsupportedError):
    """No gradient rule for an operator; the message and `operators` list every such operator of the model at once."""

    def __init__(self, message: str, operators: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.operators = tuple(map(printable, operators))


class UnsupportedAttributeError(UnsupportedError):
    """A gradient rule exists, but not for this attribute value."""


class KernelError(OnnxBackpropError, RuntimeError):
    """A kernel route is not available in this installation or could not be started."""


class ReplicaError(OnnxBackpropError, RuntimeError):
    """The ranks of one training have different graphs, programs or weights; their sums would mean nothing."""


class RegistrationError(OnnxBackpropError, RuntimeError):
    """A developer's mistake: the same operator, rule or kernel registered twice, or a facet missing."""


class OnnxBackpropWarning(UserWarning):
    """Something that is done all the same, and may not be what was meant; `argument` names the culprit."""

    def __init__(self, message: str, argument: str = "") -> None:
        super().__init__(printable(_about(argument, message), lines=True))
        self.argument = argument


def require_numbers(least: float, *, whole: bool = False, **values: object) -> None:
    """InvalidArgumentError for a value that is no finite number of `least` or more."""
    for name, value in values.items():
        kind = numbers.Integral if whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= float(value) < math.inf:
            expected = f"a {'whole ' if whole else ''}number of {least:g} or more"
            raise InvalidArgumentError(f"expected {expected}, got {value!r}", name)


def warn(message: str, *, argument: str = "") -> None:
    """Give a warning whose place is the line outside of this package that came here, however deep this is called."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "onnx_backprop":
        level, frame = level + 1, frame.f_back
    warnings.warn(OnnxBackpropWarning(message, argument=argument), stacklevel=level)
