"""`y - t` for values of a graph, in functions of a user's own: a block in which arithmetic emits nodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

if TYPE_CHECKING:
    from onnx_backprop.converters.reverse.builder import Builder

_builder: ContextVar[Builder] = ContextVar("builder")


class _Operators:
    """What onnx_ir asks for a + b, which it does once per process and not once per thread."""

    def __getattr__(self, op_type: str) -> Any:
        return getattr(_builder.get(), op_type)


_operators: Any = _Operators()
_lock = threading.Lock()
_blocks = 0  # of all threads
_outside: Any = None  # whom onnx_ir asked before the first of them


@contextmanager
def arithmetic(op: Builder) -> Iterator[None]:
    """A block in which a + b, a - b, a * b, a / b and -a of values are nodes that `op` emits.

    One of them may be a number. `==` and `<` compare values as objects: `op.Equal`, `op.Less` emit nodes.
    """
    global _blocks, _outside
    token = _builder.set(op)
    with _lock:
        if not _blocks:
            _outside = ir.set_value_magic_handler(_operators)
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                ir.set_value_magic_handler(_outside)
        _builder.reset(token)
