"""An engine of threads: each is a rank of one training in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Threads:
    """A rank among `size` threads. lost: how many bytes its sums have had."""

    threads = 1

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[np.ndarray | None]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, size, barrier, board
        self.bytes = 0

    def sum(self, array: np.ndarray) -> None:
        self.bytes += array.nbytes
        total = np.sum(self._shown(array), axis=0, dtype=array.dtype)
        self.barrier()
        array[...] = total

    def broadcast(self, array: np.ndarray) -> None:
        first = self._shown(array)[0]
        self.barrier()
        array[...] = first

    def _shown(self, array: np.ndarray) -> list[np.ndarray]:
        self._board[self.rank] = array.copy()
        self.barrier()
        return [shown for shown in self._board if shown is not None]

    def barrier(self) -> None:
        self._barrier.wait(60)

    def abort(self, message: str, code: int) -> None:  # noqa: ARG002
        self._barrier.abort()


def on_ranks(size: int, work: Callable[[Threads], T]) -> list[T]:
    """What each rank's work returns; the first error otherwise."""
    barrier, board = threading.Barrier(size), [None] * size
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, size, barrier, board))
        except BaseException as e:  # noqa: BLE001 to be raised by the caller
            errors[rank] = e
            barrier.abort()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    real = [e for e in errors.values() if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or list(errors.values()))[0]
    return [results[rank] for rank in range(size)]
