"""What a file may ask for at most: one place for the defaults, and what holds at the moment."""

from contextvars import ContextVar
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """npz_bytes: of the arrays that are read from an .npz file, together. header_bytes: of a checkpoint's header."""

    npz_bytes: int = 16 * _GIB
    header_bytes: int = 100 * 10**6  # safetensors itself refuses more


_limits: ContextVar[Limits] = ContextVar("limits")


def current() -> Limits:
    """The limits that hold here."""
    return _limits.get(Limits())
