"""Pools: as many windows as onnxruntime has.

With ceil_mode none begins in the padding behind; with auto_pad SAME_* a window is padded as if it had no gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, helper

import onnx_backprop as ob
from onnx_backprop.converters.prepare.load import prepare

POOLS = ("AveragePool", "LpPool", "MaxPool")


def pools(length: int) -> ModelProto:
    """Of one x, with a window that is left out along one axis, along both, and one that ends beyond along the other."""
    nodes = []
    for op, k, s, begin, end, d, other in product(POOLS, (2, 3), (2, 3), (0, 1), (0, 1), (1, 2), ([0, 0], [0, 1])):
        for counts in (0, 1) if op == "AveragePool" else (None,):
            pads = [begin, other[0], end, other[1]]
            more = {} if counts is None else {"count_include_pad": counts}
            more |= {} if d == 1 else {"dilations": [d, 1]}
            nodes.append(
                helper.make_node(
                    op, ["x"], [f"y{len(nodes)}"], kernel_shape=[k, 2], strides=[s, 2], pads=pads, ceil_mode=1, **more
                )
            )
    inputs = [helper.make_tensor_value_info("x", 1, [1, 1, length, 4])]
    outputs = [helper.make_tensor_value_info(node.output[0], 1, None) for node in nodes]
    graph = helper.make_graph(nodes, "pools", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def same_pools(length: int) -> ModelProto:
    """As `pools`, of auto_pad SAME_*, gaps, and windows shorter than a stride."""
    nodes = []
    for op, auto, k, s, d, ceil in product(POOLS[::2], ("SAME_LOWER", "SAME_UPPER"), (1, 3), (1, 2, 3), (1, 2), (0, 1)):
        if s > k and (op == "MaxPool" or d > 1):
            continue  # which onnxruntime refuses, or this library
        nodes.append(
            helper.make_node(
                op, ["x"], [f"y{len(nodes)}"], kernel_shape=[k, 2], strides=[s, 1], dilations=[d, 1], ceil_mode=ceil,
                auto_pad=auto,
            )
        )  # fmt: skip
    inputs = [helper.make_tensor_value_info("x", 1, [1, 1, length, 4])]
    outputs = [helper.make_tensor_value_info(node.output[0], 1, None) for node in nodes]
    graph = helper.make_graph(nodes, "pools", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model: ModelProto, x: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(y) for y in onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})]


@pytest.mark.parametrize("make", [pools, same_pools])
@pytest.mark.parametrize("length", [5, 6])
def test_lengths(length: int, make: Callable[[int], ModelProto]) -> None:
    model, x = make(length), np.random.default_rng(length).standard_normal((1, 1, length, 4)).astype(np.float32)
    ready = prepare(model)
    expected, got = run(model, x), run(ready, x)
    misread = 0
    for value, plain, want, y in zip(
        ready.graph.output, onnx.shape_inference.infer_shapes(model).graph.output, expected, got, strict=True
    ):
        np.testing.assert_array_equal(y, want, err_msg=value.name)
        lengths = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
        assert lengths in (want.shape, (0,) * 4), value.name  # 0: not known
        misread += tuple(d.dim_value for d in plain.type.tensor_type.shape.dim) != want.shape
    assert misread > 2
    assert all(len(value.type.tensor_type.shape.dim) == 4 for value in ready.graph.output)


@pytest.mark.parametrize("op", POOLS)
def test_rows_and_gradients(op: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[3, 1, 4, 5] x) => (float[3, 1, 2, 3] y) { s = Sin(x) '
        f"p = {op}<kernel_shape = [2, 2], strides = [2, 2], pads = [0, 0, 1, 0], ceil_mode = 1>(s) y = Mul(p, p) }}"
    )
    rng = np.random.default_rng(0)
    x, dy, v = (rng.standard_normal((3, 3, 1, *size)).astype(np.float32) for size in ((4, 5), (2, 3), (4, 5)))
    derived = ob.vjp(model, ["x"], ["y"])
    session = ob.session(ob.vmap(derived, {"x": 0}))
    y, dx = (np.asarray(value) for value in session.run(["y", "x_grad"], {"x": x, "y_grad": dy}))
    near = [np.stack([run(model, row)[0] for row in x + step * v]).astype(np.float64) for step in (0.01, 0, -0.01)]
    np.testing.assert_allclose(y, near[1], atol=1e-6)
    np.testing.assert_allclose((dx * v).sum(), ((near[0] - near[2]) * dy).sum() / 0.02, rtol=1e-2)


@pytest.mark.parametrize("shape", ["1, 1, 3, 3", "N, 1, 3, W"])
@pytest.mark.parametrize("op", POOLS)
def test_a_result_that_is_broadcast(op: str, shape: str) -> None:
    """Inference says 3 x 3 where onnxruntime has 1 x 1: without padding for its gaps the window fits once."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[{shape}] x) => (float[N, 1, P, Q] y) {{ s = Sin(x) '
        f'p = {op}<kernel_shape = [3, 3], dilations = [2, 2], auto_pad = "SAME_UPPER">(s) y = Add(p, x) }}'
    )
    rng = np.random.default_rng(0)
    x, dy, v = (rng.standard_normal((1, 1, 3, 3)).astype(np.float32) for _ in range(3))
    y, dx = (
        np.asarray(z) for z in ob.session(ob.vjp(model, ["x"], ["y"])).run(["y", "x_grad"], {"x": x, "y_grad": dy})
    )
    near = [run(model, x + step * v)[0].astype(np.float64) for step in (0.01, 0, -0.01)]
    np.testing.assert_allclose(y, near[1], atol=1e-6)
    np.testing.assert_allclose((dx * v).sum(), ((near[0] - near[2]) * dy).sum() / 0.02, rtol=1e-2)


def test_gradients_of_pixels_that_same_leaves_out() -> None:
    """Windows shorter than a stride do not begin with the first pixel; windows with gaps begin later, too."""
    names, nodes = [], []
    for op, auto, (k, s, d) in product(POOLS[:2], ("UPPER", "LOWER"), ((1, 3, 1), (1, 4, 1), (2, 4, 2), (2, 3, 2))):
        names.append(f"y{len(names)}")
        attributes = f'kernel_shape = [{k}], strides = [{s}], dilations = [{d}], auto_pad = "SAME_{auto}"'
        nodes.append(f"{names[-1]} = {op}<{attributes}>(x)")
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[1, 1, L] x) => '
        f"({', '.join(f'float {name}' for name in names)}) {{ {' '.join(nodes)} }}"
    )
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    session, rng = ob.session(ob.vjp(model, ["x"], names)), np.random.default_rng(1)
    for length in (6, 7, 8, 9):
        x, v = (rng.uniform(1, 2, (1, 1, length)).astype(np.float32) for _ in range(2))
        near = [run(model, x + step * v) for step in (0.01, -0.01)]
        dys = {
            f"{name}_grad": rng.standard_normal(y.shape).astype(np.float32)
            for name, y in zip(names, near[0], strict=True)
        }
        dx = np.asarray(session.run(["x_grad"], {"x": x, **dys})[0])
        expected = sum(((a - b) * dy).sum() / 0.02 for a, b, dy in zip(*near, dys.values(), strict=True))
        np.testing.assert_allclose((dx * v).sum(), expected, rtol=1e-3, atol=1e-2)


def test_pixels_that_are_left_out_before_gaps_are_refused() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[1, 1, 8] x) => (float[1, 1, P] y) '
        '{ y = AveragePool<kernel_shape = [2], strides = [4], dilations = [2], auto_pad = "SAME_UPPER">(x) }'
    )
    with pytest.raises(ob.UnsupportedError, match="AveragePool 'y': auto_pad SAME_UPPER with dilations"):
        prepare(model)


@pytest.mark.parametrize("pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(("length", "kept"), [(6, [0, 4]), (8, [1, 5])])
def test_indices_of_a_pool_that_leaves_out_pixels(pad: str, length: int, kept: list[int]) -> None:
    """Its Indices count those pixels too; each window is one pixel."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g (float[1, 1, {length}] x) => (float[1, 1, 2] y) {{ '
        f'p, i = MaxPool<kernel_shape = [1], strides = [4], auto_pad = "{pad}", ceil_mode = 1>(x) '
        "f = Cast<to = 1>(i) y = Mul(p, f) }"
    )
    x = np.arange(1, length + 1, dtype=np.float32).reshape(1, 1, length)
    session = ob.session(ob.vjp(model, ["x"], ["y"]))
    y, dx = session.run(["y", "x_grad"], {"x": x, "y_grad": np.ones((1, 1, 2), np.float32)})
    np.testing.assert_array_equal(np.asarray(y), run(model, x)[0])
    expected = np.zeros(length)
    expected[kept] = kept
    np.testing.assert_allclose(np.asarray(dx).ravel(), expected)
