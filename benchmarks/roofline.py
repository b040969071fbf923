"""What the machine can do: the rate of fused multiply-adds and of copying, measured beside the contenders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np


def copy_bandwidth(threads: int, megabytes: int = 64, runs: int = 9) -> float:
    """Bytes per second read and written by copying arrays that no cache holds; the best of some runs."""
    count = megabytes * 2**20 // 4 // threads
    pairs = [(np.ones(count, np.float32), np.empty(count, np.float32)) for _ in range(threads)]

    def copy(n: int) -> None:
        np.copyto(pairs[n][1], pairs[n][0])

    seconds = min(_in_parallel(copy, threads) for _ in range(runs))
    return 2 * 4 * count * threads / seconds


def multiply_add_rate(threads: int, runs: int = 5) -> float:
    """Multiplications and additions per second of independent fused multiply-adds in registers, all threads."""
    from numba import njit

    @njit(nogil=True, fastmath={"contract"})
    def chains(rounds: int) -> float:
        lanes = np.zeros((12, 16), np.float32)
        total = np.float32(0)
        for _ in range(rounds):
            for i in range(12):
                for j in range(16):
                    lanes[i, j] = lanes[i, j] * np.float32(0.999) + np.float32(1e-3)
        for i in range(12):
            for j in range(16):
                total += lanes[i, j]
        return float(total)

    rounds = 200_000
    chains(10)
    seconds = min(_in_parallel(lambda _: chains(rounds), threads) for _ in range(runs))
    return 2.0 * 12 * 16 * rounds * threads / seconds


def _in_parallel(work: Callable[[int], object], threads: int) -> float:
    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start
