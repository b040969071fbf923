"""What the machine can do: the rate of fused multiply-adds and of copying, measured beside the contenders."""

from __future__ import annotations

import ctypes
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


def multiply_add_rate(threads: int, runs: int = 25) -> float:
    """Multiplications and additions per second of the register tile that our products are made of, all threads.

    Its operands stay in the first-level cache and its sums in registers, so it shows what the processor can do.
    """
    from onnx_backprop.ort_ops.compiler.decorators import exported
    from onnx_backprop.ort_ops.compiler.values import INT
    from onnx_backprop.ort_ops.vector.gemm_tile import CHUNK, COLUMNS, ROWS, VECTORS, multiply_tile

    steps, rounds = 64, 20_000

    @exported(None, *[INT] * 6)
    def tiles(c, a, rows, b, table, rounds):
        for _ in range(rounds):
            multiply_tile(ROWS, VECTORS, c, 4 * COLUMNS, a, rows, b, 1, table, steps, 4 * ROWS, 4 * COLUMNS, 0, CHUNK)

    def arrays() -> list[np.ndarray]:
        floats = [np.zeros(n, np.float32) for n in (ROWS * COLUMNS, ROWS * steps)]
        return [*floats, 4 * np.arange(ROWS), np.zeros(COLUMNS * steps, np.float32), np.zeros(2, np.int64)]

    operands = [arrays() for _ in range(threads)]
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(tiles.address)

    def work(n: int) -> None:
        c, a, rows, b, table = (array.ctypes.data for array in operands[n])
        run(c, a, rows, b, table, rounds)

    work(0)
    seconds = min(_in_parallel(work, threads) for _ in range(runs))
    return 2.0 * ROWS * COLUMNS * steps * rounds * threads / seconds


def _in_parallel(work: Callable[[int], object], threads: int) -> float:
    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start
