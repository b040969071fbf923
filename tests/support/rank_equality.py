"""On every rank of an MPI job: the networks of models/ on several ranks against one, printed by rank 0.

One gradient of a batch that is divided unevenly, and of one that the last rank has alone, beside those of one rank and
of float64; 20 steps of SGD, each from the weights of the ranks and all of them in a row, on batches of which some have
fewer rows than there are ranks; everything that a step renews after 6 steps with momentum, clipping, accumulation and
running means. The states of the ranks are compared bit for bit after every step.

Where rounding puts an activation on the other side of a Relu, weights go ways of their own from then on, as with any
other order of sums. In 20 steps of ResNet-18 with a rate of 0.001 that happens as a rule, so in a row they are run with
a rate at which it does not matter.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mpi4py import MPI
from onnx import ModelProto, TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import onnx_backprop as ob
from models import resnet, super_resolution, unet_conv_transpose, unet_resize
from onnx_backprop.converters.prepare.float_types import converted, with_float_type
from onnx_backprop.distributed import Shard

STEPS = 20
WEIGHT = 1e-6  # absolute
# Relative to the norm of all gradients: between ranks and one; from float64 at most, and as a multiple of one rank's.
GRADIENT, ROUNDING, MORE = 1e-6, 1.5e-6, 1.25
RATE = 1e4  # of one step of SGD, in which the weights themselves are below rounding


Gradient = dict[str, np.ndarray]


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


def steps_apart(graph: ob.TrainingGraph, batches: list[dict[str, np.ndarray]], communicator: MPI.Comm) -> float:
    """The largest drift of a single step of several ranks from that of one."""
    several = ob.Trainer(graph, learning_rate=0.001, communicator=communicator, sync_batch_norm=True, verify_every=1)
    one, result = ob.Trainer(graph, learning_rate=0.001), 0.0
    for batch in batches:
        one.set_state(several.state())
        several.step(batch)
        one.step(batch)
        result = max(result, furthest(several.state(), one.state()))
    return result


def gradient(graph: ob.TrainingGraph, batch: dict[str, np.ndarray], communicator: MPI.Comm | None) -> Gradient:
    before, after = graph.initial_values(), run(graph, [batch], RATE, communicator)
    return {p: (value.astype(np.float64) - after[p]) / RATE for p, value in before.items()}


class Pad(OpRun):
    """With zeros. onnx's own takes no pads below 0, which cut off."""

    def _run(self, data: np.ndarray, pads: np.ndarray, *_: Any, mode: str) -> tuple[np.ndarray]:
        assert mode == "constant"
        sides = np.reshape(pads, (2, -1)).T
        kept = tuple(slice(max(0, -a), n - max(0, -b)) for (a, b), n in zip(sides, data.shape, strict=True))
        return (np.pad(data[kept], np.maximum(sides, 0)),)


def exact(model: ModelProto, loss: str, batch: dict[str, np.ndarray]) -> Gradient:
    """In float64, by onnx's reference evaluator."""
    graph = ob.training_graph(model, loss=loss, inline=True)
    double = with_float_type(graph.model, TensorProto.DOUBLE)
    feeds = {name: converted(value, TensorProto.DOUBLE) for name, value in batch.items()}
    grads = ReferenceEvaluator(double, new_ops=[Pad]).run(list(graph.parameters.values()), feeds)
    return dict(zip(graph.parameters, map(np.asarray, grads), strict=True))


def distance(a: Gradient, b: Gradient) -> float:
    """‖a - b‖ / ‖b‖."""
    return (sum(((a[p] - b[p]) ** 2).sum() for p in b) / sum((b[p] ** 2).sum() for p in b)) ** 0.5


def drift(a: np.ndarray, b: np.ndarray) -> float:
    """Absolute, but relative to running statistics above 1."""
    return float((np.abs(a - b) / np.maximum(1, np.abs(b))).max())


def furthest(values: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    return max(drift(values[p], expected[p]) for p in expected if expected[p].size)


def main() -> int:
    world, wrong = MPI.COMM_WORLD, 0
    last = world.Get_rank() == world.Get_size() - 1
    for name, (model, loss, shapes) in networks().items():
        rng = np.random.default_rng(1)
        graph = ob.training_graph(model, loss=loss, optimizer=ob.optimizers.SGD())
        sizes = (8, 5, 3, 1 if loss != "softmax_cross_entropy" else 2)
        first = drawn(rng, shapes, 15)  # divided unevenly by 2 and by 4
        batches = [drawn(rng, shapes, sizes[n % len(sizes)]) for n in range(STEPS)]
        right, whole = exact(model, loss, first), gradient(graph, first, None)
        rounding = distance(whole, right)
        grads = gradient(graph, first, world), gradient(graph, Shard(first if last else {}), world)
        errors, apart = ([distance(g, reference) for g in grads] for reference in (right, whole))
        drifts = [steps_apart(graph, batches, world)]
        optimizer = ob.optimizers.SGD(momentum=0.9, clip_norm=0.1, accumulate=2, ema=0.9)
        full = ob.training_graph(model, loss=loss, optimizer=optimizer)
        rate = 1e-5 if name == "ResNet-18" else 0.001
        for of, steps in ((graph, batches), (full, batches[:6])):
            drifts.append(furthest(*(run(of, steps, rate, c) for c in (world, None))))
        wrong += max(errors) > min(ROUNDING, MORE * rounding) or max(apart) > GRADIENT
        wrong += max(drifts) > WEIGHT
        if world.Get_rank() == 0:
            print(
                f"{name}, {world.Get_size()} ranks: gradient {errors[0]:.1e} from float64, by the last rank "
                f"{errors[1]:.1e}, that of one rank {rounding:.1e}; from that of one rank {apart[0]:.1e}, "
                f"{apart[1]:.1e}; state after a step {drifts[0]:.1e}, after {STEPS} {drifts[1]:.1e}, with clipping, "
                f"accumulation and EMA {drifts[2]:.1e}"
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
