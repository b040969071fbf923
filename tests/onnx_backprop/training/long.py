"""One long training in flat memory: python -m tests.onnx_backprop.training.long --steps 100000

A small network of the demo on pictures of many sizes; every thousandth part it is saved, evaluated and exported. The median
of memory in the last fifth may be two megabytes above that in the second one, since allocators need one fifth to settle and
fluctuate by half a megabyte afterwards. What leaks 40 bytes in each step, or 4 KiB in each export, grows by more.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

import onnx_backprop as ob
from models.super_resolution import SCALE, build, training_graph
from tests.ort_ops.sessions_in_memory import resident

MOST = 2 << 20  # bytes
SIZES, BATCH = range(4, 12), 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    trainer = ob.Trainer(training_graph(build(features=2, layers=1, seed=arguments.seed)), learning_rate=1e-3)
    losses, sizes = np.empty(arguments.steps), list[int]()
    with tempfile.TemporaryDirectory() as folder:
        for n in range(arguments.steps):
            height, width = rng.choice(SIZES, 2)
            high = rng.random((BATCH, 1, SCALE * height, SCALE * width), np.float32)
            low = high.reshape(BATCH, 1, height, SCALE, width, SCALE).mean((3, 5))
            losses[n] = trainer.step(low=low, target=high)
            if (n + 1) % max(1, arguments.steps // 1000) == 0:
                trainer.save(Path(folder) / "checkpoint.safetensors")
                trainer.export(Path(folder) / "model.onnx")
                trainer.evaluate([{"low": low, "target": high}])
                sizes.append(resident())
    before, after = (int(np.median(part)) for n, part in enumerate(np.array_split(sizes, 5)) if n in (1, 4))
    grown = after - before
    start, end = (float(part.mean()) for part in (losses[: len(losses) // 100], losses[-len(losses) // 100 :]))
    well = grown <= MOST and bool(np.isfinite(losses).all()) and end < start and trainer.steps == arguments.steps
    print(
        f"endurance: {arguments.steps:,} steps: {grown / 1024:.0f} KiB more in the last fifth than the {before >> 20} MiB "
        f"in the second, loss {start:.5f} -> {end:.5f}{'' if well else ': WRONG'}"
    )
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
