"""How far gradients and predictions are from each other, for `verdict`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.field.sources import Feeds

QUANTUM = 2.0**-24  # between the smallest numbers of float16


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, relative to the largest number; where that is a small probability, to a hundredth."""
    if np.shape(a) != np.shape(b):
        return float("inf")
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-2)) if a.size else 0.0


def beside(at: Feeds, seed: int) -> Feeds:
    """Values that float16 rounds to the same, or to the next ones: onnxruntime rounds some of them, and not others."""
    rng = np.random.default_rng(seed)
    return {k: v * (1 + rng.choice([-1, 1], v.shape) * 2.0**-11) if v.ndim > 1 else v for k, v in at.items()}


def worst(got: Feeds, expected: Feeds, near: Sequence[Feeds] = ()) -> tuple[float, str]:
    """The largest ‖g - r‖ / ‖r‖, and whose. Below a fraction of the typical size of all gradients r is rounding.

    Of a file in float16 what is less than the distance of neighbouring numbers does not count, nor what is less than
    twice the change of r where all values of the forward are half such a distance off. `near`: such r, several, because
    by chance that of a single number may hardly change.
    """
    half = bool(near)
    rms = {name: float(np.sqrt(np.mean(np.square(r)))) if r.size else 0.0 for name, r in expected.items()}
    floor = (1e-2 if half else 1e-4) * max(rms.values(), default=0.0) + 1e-30
    errors = {}
    for name, r in expected.items():
        g = np.asarray(got[name], np.float64)
        if g.shape != r.shape:
            return float("inf"), name
        off = np.maximum(np.abs(g - r) - (QUANTUM if half else 0), 0)
        gap = float(np.sqrt(np.mean(np.square(off)))) if r.size else 0.0
        changes = (float(np.sqrt(np.mean(np.square(other[name] - r)))) for other in near if r.size)
        unsure = 2 * max(changes, default=0.0)
        errors[name] = max(gap - unsure, 0.0) / max(rms[name], floor)
    name = max(errors, key=lambda n: errors[n], default="")
    return errors.get(name, 0.0), name


def given_out(model: onnx.ModelProto, output: str | None) -> tuple[onnx.ModelProto, str]:
    """Of an output of maps, as ZipMap makes: the model giving out the tensor they are made of too, and its name."""
    tensor = next((n.input[0] for n in model.graph.node if n.op_type == "ZipMap" and output in n.output), "")
    if tensor:
        model.graph.output.append(onnx.ValueInfoProto(name=tensor))
    return model, tensor


def as_array(value: object) -> np.ndarray:
    """A tensor, or the numbers of maps, one for each row, in the order of their keys."""
    return np.array([list(row.values()) for row in value]) if isinstance(value, list) else np.asarray(value)


def stored_floats(graph: onnx.GraphProto) -> list[np.ndarray]:
    tensors = list(graph.initializer)
    arrays: list[np.ndarray] = []
    for node in graph.node:
        for attribute in node.attribute:
            value = helper.get_attribute_value(attribute)
            if isinstance(value, onnx.GraphProto):
                arrays += stored_floats(value)
            elif isinstance(value, onnx.TensorProto) and node.op_type == "Constant":
                tensors.append(value)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
    return arrays + [numpy_helper.to_array(t) for t in tensors if t.data_type in floats]
