"""An engine of threads: each is a rank of one training in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")


class Board(NamedTuple):
    """Where each rank puts what the others read."""

    barrier: threading.Barrier
    shown: list[np.ndarray | None]


class Threads:
    """A rank among `size` threads. bytes: how many its sums have had; began: when those of `start` did."""

    threads = 1

    def __init__(self, rank: int, boards: Sequence[Board]) -> None:
        """boards: what ranks show each other; the second one, where there is one, is that of `start`."""
        self.rank, self.size, (self._barrier, self._board) = rank, boards[0].barrier.parties, boards[0]
        self._beside = Threads(rank, boards[1:]) if boards[1:] else None
        self.bytes = 0
        self.began: list[float] = []

    def start(self, array: np.ndarray) -> Callable[[], bool]:
        assert self._beside is not None
        self.began.append(time.perf_counter())
        self.bytes += array.nbytes
        self._beside.sum(array)
        return lambda: True

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
    boards = [Board(threading.Barrier(size), [None] * size) for _ in range(2)]
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, boards))
        except BaseException as e:  # noqa: BLE001 to be raised by the caller
            errors[rank] = e
            for board in boards:
                board.barrier.abort()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    real = [e for e in errors.values() if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or list(errors.values()))[0]
    return [results[rank] for rank in range(size)]
