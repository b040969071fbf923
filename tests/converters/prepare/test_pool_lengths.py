"""Pools with ceil_mode: as many windows as onnxruntime has, none of which begins in the padding behind."""

from __future__ import annotations

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


def run(model: ModelProto, x: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(y) for y in onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})]


@pytest.mark.parametrize("length", [5, 6])
def test_lengths(length: int) -> None:
    model, x = pools(length), np.random.default_rng(length).standard_normal((1, 1, length, 4)).astype(np.float32)
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
