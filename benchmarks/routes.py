"""A training step of the demo's network on each route, in a process that does nothing else.

    python -m benchmarks.routes            # half a minute on one core, two threads

Medians of ten steps behind three that are not counted; noise for photographs, which does not change the work.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

import onnx_backprop as ob
from models.super_resolution import BATCH, PATCH, SCALE, build, training_graph
from onnx_backprop.converters.tables import table

WARMING, STEPS = 3, 10


def milliseconds(kernels: str) -> float:
    """The median of a step."""
    trainer = ob.Trainer(training_graph(build()), kernels=kernels)
    rng = np.random.default_rng(0)
    low, high = (rng.random((BATCH, 1, side, side), np.float32) for side in (PATCH, PATCH * SCALE))
    times: list[float] = []
    for _ in range(WARMING + STEPS):
        start = time.perf_counter()
        trainer.step(low=low, target=high)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[WARMING:])


def main() -> None:
    """Print the table."""
    rows = [(name, f"{milliseconds(name):.3g}") for name in ("native", "onnx", "numpy")]
    print("\n".join(table(("route", "ms a step"), rows, numbers=[1])))


if __name__ == "__main__":
    main()
