"""One long training in flat memory: python -m tests.onnx_backprop.training.long --steps 100000

A small network of the demo on pictures of many sizes; every hundredth part it is saved, evaluated and exported. Memory may
grow by a megabyte after the first fifth, in which allocators settle; what leaks grows by more in so many steps.
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

MOST = 1 << 20  # bytes
SIZES, BATCH = range(4, 12), 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    trainer = ob.Trainer(training_graph(build(features=2, layers=1, seed=arguments.seed)), learning_rate=1e-3)
    losses, sizes, before = np.empty(arguments.steps), list[int](), 0
    with tempfile.TemporaryDirectory() as folder:
        for n in range(arguments.steps):
            height, width = rng.choice(SIZES, 2)
            high = rng.random((BATCH, 1, SCALE * height, SCALE * width), np.float32)
            low = high.reshape(BATCH, 1, height, SCALE, width, SCALE).mean((3, 5))
            losses[n] = trainer.step(low=low, target=high)
            if (n + 1) % max(1, arguments.steps // 100) == 0:
                trainer.save(Path(folder) / "checkpoint.safetensors")
                trainer.export(Path(folder) / "model.onnx")
                trainer.evaluate([{"low": low, "target": high}])
                sizes.append(resident())
    before, grown = sizes[len(sizes) // 5], sizes[-1] - sizes[len(sizes) // 5]
    start, end = (float(part.mean()) for part in (losses[: len(losses) // 100], losses[-len(losses) // 100 :]))
    well = grown <= MOST and bool(np.isfinite(losses).all()) and end < start and trainer.steps == arguments.steps
    print(
        f"endurance: {arguments.steps:,} steps: {grown / 1024:.0f} KiB more than the {before >> 20} MiB after a fifth, "
        f"loss {start:.5f} -> {end:.5f}{'' if well else ': WRONG'}"
    )
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
