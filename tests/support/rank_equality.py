"""On every rank of an MPI job: the networks of models/ on several ranks against one, printed by rank 0."""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI
from onnx import ModelProto

import onnx_backprop as ob
from models import resnet, super_resolution, unet_conv_transpose, unet_resize

STEPS = 20
GRADIENT, WEIGHT = 1e-6, 1e-6  # relative to the norm of all gradients; absolute
NORMALISED = 3e-6  # in place of GRADIENT, since BatchNormalization takes the difference of nearly equal sums in float32


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


def run(graph: ob.TrainingGraph, batches: list[dict[str, np.ndarray]], rate: float, communicator: MPI.Comm | None):
    settings = {} if communicator is None else {"communicator": communicator, "sync_batch_norm": True}
    trainer = ob.Trainer(graph, learning_rate=rate, verify_every=1, **settings)
    for batch in batches:
        trainer.step(batch)
    return trainer.parameters()


def main() -> int:
    world, wrong = MPI.COMM_WORLD, 0
    for name, (model, loss, shapes) in networks().items():
        rng = np.random.default_rng(1)
        graph = ob.training_graph(model, loss=loss, optimizer=ob.optimizers.SGD())
        before = graph.initial_values()
        sizes = (8, 5, 3, 1 if loss != "softmax_cross_entropy" else 2)
        first = drawn(rng, shapes, 15)  # divided unevenly by 2 and by 4
        batches = [drawn(rng, shapes, sizes[n % len(sizes)]) for n in range(STEPS)]
        results = [(run(graph, [first], 1e4, c), run(graph, batches, 0.001, c)) for c in (world, None)]
        (reduced, weights), (whole, expected) = results
        size = np.sqrt(sum(float(((before[p] - whole[p]).astype(np.float64) ** 2).sum()) for p in before))
        error = np.sqrt(sum(float(((reduced[p] - whole[p]).astype(np.float64) ** 2).sum()) for p in before)) / size
        drift = max(float(np.abs(weights[p] - expected[p]).max()) for p in before)
        wrong += error > (NORMALISED if name == "ResNet-18" else GRADIENT) or drift > WEIGHT
        if world.Get_rank() == 0:
            print(f"{name}, {world.Get_size()} ranks: gradient {error:.1e}, weights after {STEPS} steps {drift:.1e}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
