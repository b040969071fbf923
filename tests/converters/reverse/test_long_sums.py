"""Gradients that are sums over many elements, on every route: exact to 1e-6, where one float32 sum is 1e-4 off."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS

SHAPE = (4, 8, 256, 128)  # 2²⁰ elements
EXACT = 1e-6


def mean(z: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return z.mean(axis=axes, keepdims=True)


def unit(x: np.ndarray, axes: tuple[int, ...], epsilon: float = 1e-5) -> np.ndarray:
    deviation = x - mean(x, axes)
    return deviation / np.sqrt(mean(deviation * deviation, axes) + epsilon)


def grouped(x: np.ndarray) -> np.ndarray:
    return unit(x.reshape(4, 4, 2, 256, 128), (2, 3, 4)).reshape(SHAPE)


def rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(mean(x * x, (3,)) + 1e-5)


# nodes, the shapes of parameters, and the gradient of each by dy and x in float64
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, Callable[..., np.ndarray]]]] = {
    "last axis": ("y = Add(x, b)", {"b": (128,)}, {"b": lambda dy, _: dy.sum((0, 1, 2))}),
    "channels": ("y = Mul(x, s)", {"s": (8, 1, 1)}, {"s": lambda dy, x: (dy * x).sum((0, 2, 3))[:, None, None]}),
    "channels, all axes": ("y = Add(b, x)", {"b": (1, 8, 1, 1)}, {"b": lambda dy, _: dy.sum((0, 2, 3), keepdims=True)}),
    "one number": ("y = Add(b, x)", {"b": (1,)}, {"b": lambda dy, _: dy.sum().reshape(1)}),
    "one number, four axes": ("y = Sub(x, b)", {"b": (1, 1, 1, 1)}, {"b": lambda dy, _: -dy.sum().reshape(1, 1, 1, 1)}),
    "positions": ("y = Add(x, p)", {"p": (256, 128)}, {"p": lambda dy, _: dy.sum((0, 1))}),
    "rows": ("y = Add(x, p)", {"p": (4, 1, 1, 1)}, {"p": lambda dy, _: dy.sum((1, 2, 3), keepdims=True)}),
    "rows and columns": ("y = Add(x, p)", {"p": (1, 8, 1, 128)}, {"p": lambda dy, _: dy.sum((0, 2), keepdims=True)}),
    "middle": ("y = Add(x, p)", {"p": (8, 256, 1)}, {"p": lambda dy, _: dy.sum((0, 3))[..., None]}),
    "PRelu": ("y = PRelu(x, s)", {"s": (8, 1, 1)}, {"s": lambda dy, x: (dy * np.minimum(x, 0)).sum((0, 2, 3))[:, None, None]}),
    "Conv": ("y = Conv(x, w, b)", {"w": (8, 8, 1, 1), "b": (8,)}, {"b": lambda dy, _: dy.sum((0, 2, 3))}),
    "MatMul, Add": ("a = MatMul(x, w) y = Add(a, b)", {"w": (128, 128), "b": (128,)}, {"b": lambda dy, _: dy.sum((0, 1, 2))}),
    "BatchNormalization": (
        "y = BatchNormalization(x, s, b, m, v)",
        {"s": (8,), "b": (8,), "m": (8,), "v": (8,)},
        {"s": lambda dy, x: (dy * (x - 1)).sum((0, 2, 3)) / np.sqrt(1 + 1e-5), "b": lambda dy, _: dy.sum((0, 2, 3))},
    ),
    "BatchNormalization, training": (
        "y, m1, v1 = BatchNormalization<training_mode = 1>(x, s, b, m, v)",
        {"s": (8,), "b": (8,), "m": (8,), "v": (8,)},
        {"s": lambda dy, x: (dy * unit(x, (0, 2, 3))).sum((0, 2, 3)), "b": lambda dy, _: dy.sum((0, 2, 3))},
    ),
    "LayerNormalization": (
        "y = LayerNormalization(x, s, b)",
        {"s": (128,), "b": (128,)},
        {"s": lambda dy, x: (dy * unit(x, (3,))).sum((0, 1, 2)), "b": lambda dy, _: dy.sum((0, 1, 2))},
    ),
    "GroupNormalization": (
        "y = GroupNormalization<num_groups = 4>(x, s, b)",
        {"s": (8,), "b": (8,)},
        {"s": lambda dy, x: (dy * grouped(x)).sum((0, 2, 3)), "b": lambda dy, _: dy.sum((0, 2, 3))},
    ),
    "InstanceNormalization": (
        "y = InstanceNormalization(x, s, b)",
        {"s": (8,), "b": (8,)},
        {"s": lambda dy, x: (dy * unit(x, (2, 3))).sum((0, 2, 3)), "b": lambda dy, _: dy.sum((0, 2, 3))},
    ),
    "RMS": (
        "q = Mul(x, x) n = ReduceMean(q, a) k = Add(n, e) r = Sqrt(k) z = Div(x, r) y = Mul(z, s)",
        {"s": (128,)},
        {"s": lambda dy, x: (dy * rms(x)).sum((0, 1, 2))},
    ),
}  # fmt: skip
HEAD = '<ir_version: 10, opset_import: ["": 21]>'


def model(name: str, *, symbolic: bool) -> ModelProto:
    nodes, shapes, _ = CASES[name]
    lengths = ("N", "8", "H", "128") if symbolic else tuple(map(str, SHAPE))
    lengths = ("4", *lengths[1:]) if name == "rows" else lengths
    extra = "a = Constant<value_ints = [-1]>() e = Constant<value_float = 1e-5>()" if name == "RMS" else ""
    shape = ",".join(lengths)
    result = parser.parse_model(f"{HEAD} g (float[{shape}] x) => (float[{shape}] y) {{ {extra} {nodes} }}")
    for parameter, size in shapes.items():
        values = np.ones(size, np.float32)
        result.graph.initializer.append(numpy_helper.from_array(values, parameter))
    return result


def data() -> tuple[np.ndarray, np.ndarray]:
    """X, and a dy whose roundings all go the same way: equal numbers, and 0 where z is negative, so that sums are large."""
    x = np.random.default_rng(0).random(SHAPE, np.float32) + np.float32(0.5)
    return x, np.where(x > 1, np.float32(0.1), np.float32(0))


@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_exact(name: str, kernels: str, symbolic: bool) -> None:
    gradients = CASES[name][2]
    x, dy = data()
    x = x - np.float32(2) if name == "PRelu" else x
    graph = ob.training_graph(
        model(name, symbolic=symbolic),
        loss=lambda op, o: op.ReduceSum(op.Mul(o["y"], op.input("dy", o["y"])), keepdims=0),
        trainable=list(gradients),
        training_mode="training" in name,
        kernels=kernels,
    )
    names = [graph.parameters[parameter] for parameter in gradients]
    results = ob.session(graph.model).run(names, {"x": x, "dy": dy})
    for got, (parameter, formula) in zip(results, gradients.items(), strict=True):
        expected = formula(dy.astype(np.float64), x.astype(np.float64))
        got = np.asarray(got)
        assert got.shape == expected.shape
        assert np.abs(got / expected - 1).max() <= EXACT, parameter
