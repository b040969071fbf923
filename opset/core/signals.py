"""Blocks of code in which no signal handler of Python runs, such as the one that raises KeyboardInterrupt."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = tuple(signal.valid_signals())
# CPython's own, which make no enums of what they return: 2 µs for all signals in place of 20, in every step.
_plain = getattr(signal, "_signal", signal)
_handler = _plain.getsignal


class Deferred:
    """`with Deferred():` handlers wait until the end of the block, where they run and may raise.

    For what must not stop halfway, as when an object gets another owner. Handlers run in the main thread alone, so
    other threads have nothing to wait for. Until a block has begun and once it is over, what stands in for a handler
    calls it: an exception on the way in or out leaves no handler without effect.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: set[int] = set()
        self._active = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handlers = [(number, handler) for number in _SIGNALS if callable(handler := _handler(number))]
            for number, handler in handlers:
                self._handlers[number] = handler
                _plain.signal(number, self._note)
            self._active = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._active:
            self._waiting.add(number)
        else:
            self._handlers[number](number, frame)

    def __exit__(self, *_: object) -> None:
        self._active = False
        for number, handler in self._handlers.items():
            _plain.signal(number, handler)
        for number in self._waiting:
            signal.raise_signal(number)


def surface() -> None:
    """Raise what waits to be raised in the main thread: entering any Python function does that."""
