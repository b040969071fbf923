"""An engine whose messages take as long as on a slower network: one link, on which transfers queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from onnx_backprop.distributed.communicator import Communicator, exchange, start_of

TEN_GIGABIT = 1.25e9  # bytes a second
LATENCY = 50e-6  # seconds of a message


class EmulatedNetwork:
    """Another engine, each of whose sums and exchanges is there bytes / rate after it has begun, or later.

    A message begins when the one before it is over. summed, gathered: the seconds that `sum` and `gather` have kept
    their callers.
    """

    def __init__(self, engine: Communicator, rate: float = TEN_GIGABIT) -> None:
        self._engine, self._rate = engine, rate
        self.rank, self.size, self.threads = engine.rank, engine.size, engine.threads
        self.barrier, self.abort, self.broadcast = engine.barrier, engine.abort, engine.broadcast
        self._free = 0.0  # when the link is
        self.summed = self.gathered = 0.0
        self._begin = start_of(engine)
        self.start = None if self._begin is None else self._started

    def _due(self, array: np.ndarray) -> float:
        self._free = max(self._free, time.perf_counter()) + LATENCY + array.nbytes / self._rate
        return self._free

    def sum(self, array: np.ndarray) -> None:
        """Sum of the engine below, later."""
        began, due = time.perf_counter(), self._due(array)
        self._engine.sum(array)
        time.sleep(max(0.0, due - time.perf_counter()))
        self.summed += time.perf_counter() - began

    def gather(self, array: np.ndarray, ends: Sequence[int]) -> None:
        """Exchange of the engine below, later."""
        began, due = time.perf_counter(), self._due(array)
        exchange(self._engine, array, ends)
        time.sleep(max(0.0, due - time.perf_counter()))
        self.gathered += time.perf_counter() - began

    def _started(self, array: np.ndarray) -> Callable[[], bool]:
        assert self._begin is not None
        due, there = self._due(array), self._begin(array)
        return lambda: there() and time.perf_counter() >= due
