"""An engine whose messages take as long as on a slower network: one link, on which transfers queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from onnx_backprop.distributed.communicator import Communicator, exchange, start_of

TEN_GIGABIT = 1.25e9  # bytes a second
_LATENCY = 50e-6  # seconds of a message


class EmulatedNetwork:
    """Another engine, each of whose sums and exchanges is there bytes / rate after it has begun, or later.

    A sum begins when the one before it is over. sent: the bytes so far. waited: the seconds that `sum` and `gather`
    have kept their callers.
    """

    def __init__(self, engine: Communicator, rate: float = TEN_GIGABIT) -> None:
        self._engine, self._rate = engine, rate
        self.rank, self.size, self.threads = engine.rank, engine.size, engine.threads
        self.barrier, self.abort, self.broadcast = engine.barrier, engine.abort, engine.broadcast
        self._free = 0.0  # when the link is
        self.sent, self.waited = 0, 0.0
        begin = start_of(engine)
        self._begin = begin
        self.start = None if begin is None else self._started

    def _due(self, array: np.ndarray) -> float:
        self.sent += array.nbytes
        self._free = max(self._free, time.perf_counter()) + _LATENCY + array.nbytes / self._rate
        return self._free

    def _finish(self, began: float, due: float) -> None:
        time.sleep(max(0.0, due - time.perf_counter()))
        self.waited += time.perf_counter() - began

    def sum(self, array: np.ndarray) -> None:
        """Sum of the engine below, later."""
        began, due = time.perf_counter(), self._due(array)
        self._engine.sum(array)
        self._finish(began, due)

    def gather(self, array: np.ndarray, ends: Sequence[int]) -> None:
        """Exchange of the engine below, later."""
        began, due = time.perf_counter(), self._due(array)
        exchange(self._engine, array, ends)
        self._finish(began, due)

    def _started(self, array: np.ndarray) -> Callable[[], bool]:
        assert self._begin is not None
        due, there = self._due(array), self._begin(array)
        return lambda: there() and time.perf_counter() >= due
