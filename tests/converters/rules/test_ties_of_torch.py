"""Gradients at limits and ties by what a file of torch says of the operation, beside those of ONNX's own operators."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, StringStringEntryProto, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.exporters.origins import FX
from onnx_backprop.converters.prepare.exporters.torch_metadata import STOP

X = np.array([[-1.0, 0.0, 1.0, 1.0], [0.0, 0.0, -1.0, -2.0]])
DY = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])


def file_of(body: str, operation: str, arguments: str, kind: str = "double") -> ModelProto:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g ({kind}[2,4] x) => ({kind}[n,m] y) {{ {body} }}'
    )
    for node in model.graph.node if operation else ():
        text = f"%y : [num_users=1] = call_function[target=torch.ops.aten.{operation}](args = ({arguments}), kwargs = {{}})"
        node.metadata_props.append(StringStringEntryProto(key=FX, value=text))
    return model


def gradient(model: ModelProto, dy: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    result = ob.backward(model, wrt=["x"])
    names = ob.derivatives(result)[-1]
    feeds = {"x": X.astype(dtype), names.seeds["y"]: dy.astype(dtype)}
    return np.asarray(ob.session(result).run([names.results["x"]], feeds)[0])


ZERO, ONES = "l = Constant<value = double {0.0}>()", "l = Constant<value = double {1.0}>()"
LIMITS = "l = Constant<value = double {-1.0}>() h = Constant<value = double {1.0}>()"
CASES = [
    (f"{ZERO} y = Max(x, l)", "clamp.Tensor", "%x, %l", (X >= 0) * DY),
    (f"{ZERO} y = Max(x, l)", "clamp_min.default", "%x, 0.0", (X >= 0) * DY),
    (f"{ZERO} y = Max(x, l)", "maximum.default", "%x, %l", ((X > 0) + (X == 0) / 2) * DY),
    (f"{ZERO} y = Max(x, l)", "", "", ((X > 0) + (X == 0) / 2) * DY),
    (f"{ONES} y = Min(x, l)", "clamp_max.default", "%x, 1.0", (X <= 1) * DY),
    (f"{LIMITS} m = Max(x, l) y = Min(m, h)", "clamp.default", "%x, -1, 1", (np.abs(X) <= 1) * DY),
    (f"{LIMITS} y = Clip(x, l, h)", "hardtanh.default", "%x, -1.0, 1.0", (np.abs(X) < 1) * DY),
    (f"{LIMITS} y = Clip(x, l, h)", "clamp.default", "%x, -1.0, 1.0", (np.abs(X) <= 1) * DY),
]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda n: f"{CASES[n][1] or 'ONNX'} {n}")
def test_elements(case: int) -> None:
    body, operation, arguments, expected = CASES[case]
    np.testing.assert_array_equal(gradient(file_of(body, operation, arguments), DY), expected)


@pytest.mark.parametrize(("kind", "dtype"), [("double", np.float64), ("float", np.float32), ("float16", np.float16)])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("reduce", ["Max", "Min"])
def test_the_first_of_several(reduce: str, axis: int, keepdims: int, kind: str, dtype: type) -> None:
    body = f"a = Constant<value_ints = [1]>() y = Reduce{reduce}<keepdims={keepdims}>(x, a)"
    dy = np.array([[3.0], [5.0]])[:, : 1 if keepdims else None].reshape((2, 1) if keepdims else (2,))
    places = (X.argmax if reduce == "Max" else X.argmin)(1)
    first, ties = np.zeros_like(X), (X.max if reduce == "Max" else X.min)(1, keepdims=True) == X
    first[[0, 1], places] = dy.ravel()
    file = file_of(body, f"{reduce.lower()}.dim", f"%x, {axis}, True", kind)
    np.testing.assert_array_equal(gradient(file, dy, dtype), first)
    shared = gradient(file_of(body, f"a{reduce.lower()}.default", "%x, [1]", kind), dy, dtype)
    np.testing.assert_allclose(shared, ties * dy.reshape(2, 1) / ties.sum(1, keepdims=True), rtol=1e-3)


@pytest.mark.parametrize("in_axis", [0, 1, 2])
def test_the_first_of_several_behind_vmap(in_axis: int) -> None:
    """The axis of the node, not that of the text, which vmap leaves as it was."""
    row = file_of("a = Constant<value_ints = [1]>() y = ReduceMax(x, a)", "max.dim", "%x, 1, True")
    gradients = ob.backward(ob.vmap(row, {"x": in_axis}), wrt=["x"])
    names = ob.derivatives(gradients)[-1]
    rows = np.stack([X, X[::-1], 2 * X])
    feeds = {"x": np.moveaxis(rows, 0, in_axis).copy(), names.seeds["y"]: np.ones((3, 2, 1))}
    (got,) = ob.session(gradients).run([names.results["x"]], feeds)
    expected = np.zeros_like(rows)
    np.put_along_axis(expected, rows.argmax(2)[..., None], 1, 2)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(got), in_axis, 0), expected)


def test_a_stop_behind_vmap_stays_one() -> None:
    row = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (double[4] x) => (double[4] y) { d = Identity(x) y = Mul(x, d) }'
    )
    row.graph.node[0].metadata_props.add(key=STOP, value="detach")
    gradients = ob.backward(ob.vmap(row, {"x": 0}), wrt=["x"])
    names = ob.derivatives(gradients)[-1]
    (got,) = ob.session(gradients).run([names.results["x"]], {"x": X, names.seeds["y"]: np.ones_like(X)})
    np.testing.assert_array_equal(np.asarray(got), X)
