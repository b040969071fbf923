"""What a file may ask for at most: one place for the defaults, and what holds at the moment."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from onnx_backprop.opset.core.errors import InvalidArgumentError

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a file may ask for at most.

    nodes: of a model, those of sub-graphs and functions included. expansions: nodes that there are once functions are
    written out. folded_bytes: of a tensor that is computed from constants alone. npz_bytes: of arrays that take less
    room in their file than in memory, all that are read of one file together; of one row group of a column.
    header_bytes: of a checkpoint's header.
    """

    nodes: int = 1_000_000
    expansions: int = 100_000
    folded_bytes: int = _GIB
    npz_bytes: int = _GIB
    header_bytes: int = 100 * 10**6  # safetensors itself refuses more


_limits: ContextVar[Limits] = ContextVar("limits")


def current() -> Limits:
    """The limits that hold here."""
    return _limits.get(Limits())


@contextmanager
def limits(**changes: int) -> Iterator[Limits]:
    """Other limits inside a `with`: `with ob.limits(expansions=10**6): …`. The names: those of `Limits`.

    Errors: InvalidArgumentError for an unknown name, or what is no number of 0 or more.
    """
    known = vars(Limits())
    for name, value in changes.items():
        if name not in known:
            raise InvalidArgumentError(f"limits: expected some of {', '.join(known)}, got {name!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidArgumentError(f"limits: {name}: expected a whole number of 0 or more, got {value!r}")
    token = _limits.set(replace(current(), **changes))
    try:
        yield current()
    finally:
        _limits.reset(token)


def how_to_raise(name: str) -> str:
    """The last sentence of an error about a limit."""
    return f"The limit is {getattr(current(), name)}; `with onnx_backprop.limits({name}=…)` sets another"
