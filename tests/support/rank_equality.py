"""On every rank of an MPI job: the networks of models/ on several ranks against one, printed by rank 0.

One gradient of a batch that is divided unevenly, and of one that the last rank has alone; the weights after 20 steps of
SGD, batches of which some have fewer rows than there are ranks; everything that a step renews after 6 steps with momentum,
clipping, accumulation and running means. The states of the ranks are compared bit for bit after every step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
from mpi4py import MPI
from onnx import ModelProto

import onnx_backprop as ob
from models import resnet, super_resolution, unet_conv_transpose, unet_resize
from onnx_backprop.distributed import Shard

STEPS = 20
GRADIENT, WEIGHT = 1e-6, 1e-6  # relative to the norm of all gradients; absolute
# In place of GRADIENT: either of the two is 1.6e-6 from the gradient in float64 (`python -m tests.field.ranks`).
NORMALISED = 3e-6


def networks() -> dict[str, tuple[ModelProto, str, dict[str, tuple[int, ...]]]]:
    """Model, loss, and the shapes of a row of its inputs and target."""
    image = {"image": (1, 16, 16), "target": (1, 16, 16)}
    return {
        "demo": (
            super_resolution.build(),
            "mse",
            {"low": (1, 8, 8), "target": (1, 8 * super_resolution.SCALE, 8 * super_resolution.SCALE)},
        ),
        "U-Net, ConvTranspose": (unet_conv_transpose.build(), "bce_with_logits", image),
        "U-Net, Resize": (unet_resize.build(), "bce_with_logits", image),
        "ResNet-18": (resnet.build(), "softmax_cross_entropy", {"image": (3, 32, 32), "labels": ()}),
    }


def drawn(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]], rows: int) -> dict[str, np.ndarray]:
    return {
        name: rng.integers(0, 10, rows) if name == "labels" else rng.random((rows, *shape), np.float32)
        for name, shape in shapes.items()
    }


def run(
    graph: ob.TrainingGraph, batches: list[dict[str, np.ndarray]], rate: float, communicator: MPI.Comm | None
) -> dict[str, np.ndarray]:
    settings = {} if communicator is None else {"communicator": communicator, "sync_batch_norm": True}
    trainer = ob.Trainer(graph, learning_rate=rate, verify_every=1, **settings)
    for batch in batches:
        trainer.step(batch)
    return trainer.state()


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray], names: Iterable[str]) -> float:
    return sum(float(((a[p].astype(np.float64) - b[p]) ** 2).sum()) for p in names) ** 0.5


def drift(a: np.ndarray, b: np.ndarray) -> float:
    """Absolute, but relative to running statistics above 1."""
    return float((np.abs(a - b) / np.maximum(1, np.abs(b))).max())


def main() -> int:
    world, wrong = MPI.COMM_WORLD, 0
    last = world.Get_rank() == world.Get_size() - 1
    for name, (model, loss, shapes) in networks().items():
        rng = np.random.default_rng(1)
        graph = ob.training_graph(model, loss=loss, optimizer=ob.optimizers.SGD())
        before = graph.initial_values()
        sizes = (8, 5, 3, 1 if loss != "softmax_cross_entropy" else 2)
        first = drawn(rng, shapes, 15)  # divided unevenly by 2 and by 4
        batches = [drawn(rng, shapes, sizes[n % len(sizes)]) for n in range(STEPS)]
        whole = run(graph, [first], 1e4, None)
        size = distance(whole, before, before)
        error = distance(run(graph, [first], 1e4, world), whole, before) / size
        alone = distance(run(graph, [Shard(first if last else {})], 1e4, world), whole, before) / size
        drifts = []
        optimizer = ob.optimizers.SGD(momentum=0.9, clip_norm=0.1, accumulate=2, ema=0.9)
        full = ob.training_graph(model, loss=loss, optimizer=optimizer)
        for of, steps in ((graph, batches), (full, batches[:6])):
            several, expected = (run(of, steps, 0.001, c) for c in (world, None))
            drifts.append(max(drift(several[p], expected[p]) for p in expected if expected[p].size))
        most = NORMALISED if name == "ResNet-18" else GRADIENT
        wrong += max(error, alone) > most or max(drifts) > WEIGHT
        if world.Get_rank() == 0:
            print(
                f"{name}, {world.Get_size()} ranks: gradient {error:.1e}, by the last rank {alone:.1e}, state after "
                f"{STEPS} steps {drifts[0]:.1e}, with clipping, accumulation and EMA {drifts[1]:.1e}"
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
