"""A molecular potential trained on forces: second derivatives in a training graph.

    python -m models.forces

Energy of a cluster: every pair of atoms adds what a small network makes of their distance. Forces are the negative
gradient of the energy by the positions, made by `backward`; the training graph is made of that gradient, with a loss
of the forces alone, so its gradients by the weights are mixed second derivatives of the energy. The truth is a Morse
potential. Exit code 0: the forces of clusters never seen end below a tenth of their size, 1: not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob

ATOMS, CENTRES = 4, 12
NEAR, FAR = 0.8, 3.0  # distances that the network tells apart
Array = NDArray[np.float32]


def build(*, seed: int = 0) -> ModelProto:
    """positions (B, atoms, 3) -> energy, the sum over all clusters, atoms and pairs of them."""
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 18]> potential (float[B, {ATOMS}, 3] positions) => (float energy) {{'
        " a = Gather <axis = 1> (positions, first) b = Gather <axis = 1> (positions, second) d = Sub(a, b)"
        " distance = ReduceL2 <keepdims = 1> (d, last)"
        " offset = Sub(distance, centres) square = Mul(offset, offset) scaled = Mul(square, width)"
        " features = Exp(scaled)"
        " h1 = MatMul(features, w1) h2 = Add(h1, b1) h3 = Tanh(h2) pair = MatMul(h3, w2)"
        " energy = ReduceSum <keepdims = 0> (pair) }"
    )
    rng = np.random.default_rng(seed)
    spacing = (FAR - NEAR) / (CENTRES - 1)
    pairs = np.array([(i, j) for i in range(ATOMS) for j in range(i)], np.int64)
    for name, values in {
        "first": pairs[:, 0],
        "second": pairs[:, 1],
        "last": np.array([-1], np.int64),
        "centres": np.linspace(NEAR, FAR, CENTRES, dtype=np.float32),
        "width": np.array(-1 / (2 * spacing**2), np.float32),
        "w1": (rng.standard_normal((CENTRES, 24)) / np.sqrt(CENTRES)).astype(np.float32),
        "b1": np.zeros(24, np.float32),
        "w2": (rng.standard_normal((24, 1)) / np.sqrt(24)).astype(np.float32),
    }.items():
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def clusters(count: int, *, seed: int) -> tuple[Array, Array]:
    """Positions (N, atoms, 3), of atoms on a shaken tetrahedron, and the forces of a Morse potential on them."""
    rng = np.random.default_rng(seed)
    corners = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) * 0.5
    x = corners * rng.uniform(0.8, 1.5, (count, 1, 1)) + rng.normal(0, 0.12, (count, ATOMS, 3))
    d = x[:, :, None] - x[:, None]
    r = np.sqrt((d * d).sum(-1)) + np.eye(ATOMS)
    e = np.exp(-1.5 * (r - 1.4))
    slope = 2 * 1.5 * (e - e * e) * (1 - np.eye(ATOMS))  # of (1 - e)², by the distance
    return x.astype(np.float32), -(slope[..., None] * d / r[..., None]).sum(2).astype(np.float32)


def force_model(potential: ModelProto) -> ModelProto:
    """positions -> gradient (B, atoms, 3), the negative forces."""
    model = ob.backward(potential, wrt=["positions"], of=["energy"])
    (gradient,) = ob.derivatives(model)[-1].results.values()
    kept = [value for value in model.graph.output if value.name == gradient]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    return model


def train(*, epochs: int, count: int = 512, seed: int = 0) -> tuple[ob.Trainer, float]:
    """Train on the forces of some clusters; the trainer, and the error on others over the size of their forces."""
    graph = ob.training_graph(force_model(build(seed=seed)), loss="mse", trainable=["w1", "b1", "w2"], optimizer="adam")
    x, forces = clusters(count, seed=seed)
    name, target = graph.inputs
    loader = ob.Batches({name: x, target: -forces}, 32, seed=seed)
    trainer = ob.Trainer(graph)
    trainer.fit(loader, epochs, schedule=ob.schedules.OneCycle(2e-2, steps=epochs * len(loader)))
    x, forces = clusters(128, seed=seed + 1)
    error = trainer.evaluate([{name: x, target: -forces}])
    return trainer, float(np.sqrt(error / np.mean(forces.astype(np.float64) ** 2)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and measure; returns the exit code."""
    options = argparse.ArgumentParser(prog="python -m models.forces", description=str(__doc__).partition("\n")[0])
    options.add_argument("--epochs", type=int, default=60, help="of training (%(default)s)")
    given = options.parse_args(arguments)
    _, error = train(epochs=given.epochs)
    print(f"forces of clusters never seen: off by {error:.1%} of their size")
    return 0 if error < 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
