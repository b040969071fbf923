"""Jacobians and Hessians: against products with random vectors, in both directions, of several inputs and outputs."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob
from onnx_backprop.opset.graphs.walk import all_nodes, reads
from tests.converters.derivatives.test_products import answers, dims, drawn, network

KNOWN = """<ir_version: 10, opset_import: ["": 21]> net (float[2, 4] x, float[5] c) => (float[2, 3] y, float[2, 5] t)
    { a = MatMul(x, w) d = Add(a, c) t = Sin(d) b = MatMul(t, v) y = Exp(b) }"""


@pytest.mark.filterwarnings("ignore:wrt. the derivative (by 'v'|of 't') is zero:onnx_backprop.OnnxBackpropWarning")
@pytest.mark.parametrize("direction", ["reverse", "forward", "auto"])
@pytest.mark.parametrize("text", [KNOWN, KNOWN.replace("[2, ", "[N, ")])
def test_jacobian(direction: str, text: str) -> None:
    model = network(text)
    derived = ob.jacobian(model, ["x", "c", "v"], ["y", "t"], direction=direction)
    (one,) = ob.derivatives(derived)
    assert one.mode == "jacobian"
    assert [list(block) for block in one.results.values()] == [["x", "c", "v"]] * 2
    x, c = drawn(2, 4), drawn(5)
    got = answers(derived, x=x, c=c)
    tangents = {"x": drawn(2, 4), "c": drawn(5), "v": drawn(5, 3)}
    product = answers(
        ob.jvp(model, ["x", "c", "v"], ["y", "t"]), x=x, c=c, **{f"{n}_tangent": v for n, v in tangents.items()}
    )
    for y, blocks in one.results.items():
        total = np.zeros_like(got[y])
        for name, block in blocks.items():
            v = tangents[name]
            assert got[block].shape == got[y].shape + v.shape
            assert dims(derived, block) == [*dims(model, y), *([5, 3] if name == "v" else dims(model, name))]
            total += np.tensordot(got[block], v, v.ndim)
        np.testing.assert_allclose(total, product[f"{y}_tangent"], rtol=1e-4, atol=1e-5)
    assert not got["t_jacobian_v"].any()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_known_lengths_are_found_at_conversion(direction: str) -> None:
    """No node asks for a length, none makes what nobody reads, and what one row alone reads lies in its loop."""
    known, unknown = (
        ob.jacobian(network(text), ["x"], ["y"], direction=direction) for text in (KNOWN, KNOWN.replace("[2, ", "[N, "))
    )
    lengths = {"Shape", "ReduceProd", "Concat"}
    assert lengths.isdisjoint(node.op_type for node in all_nodes(known.graph))
    assert lengths <= {node.op_type for node in all_nodes(unknown.graph)}
    read = {name for node in known.graph.node for name in reads(node)} | {"y", "t", "y_jacobian_x"}
    assert all(not read.isdisjoint(node.output) for node in known.graph.node)
    assert not {v.name for v in known.graph.value_info} & {"w", "v"}, "initializers say their types themselves"


@pytest.mark.filterwarnings("ignore:wrt. the derivative:onnx_backprop.OnnxBackpropWarning")
@pytest.mark.parametrize("direction", ["reverse", "forward", "auto"])
def test_blocks_of_no_elements(direction: str) -> None:
    """Found by `make search`: onnxruntime does not scan over no rows or columns, as of what has no known rank."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[2, 0] x, float[2, 3] w, int64[r] k) => (float[2, 3] y, float[0, 2] z)
        { f = Reshape(x, k) s = ReduceMean<keepdims = 0>(f) y = Mul(w, s) t = Transpose<perm = [1, 0]>(x) z = Exp(t) }"""
    )
    shapes = {"x": (2, 0), "w": (2, 3), "y": (2, 3), "z": (0, 2)}
    derived = ob.jacobian(model, ["x", "w"], ["y", "z"], direction=direction)
    got = answers(derived, x=np.ones((2, 0), np.float32), w=drawn(2, 3), k=np.array([2, 0]))
    for y, blocks in ob.derivatives(derived)[-1].results.items():
        for x, block in blocks.items():
            assert got[block].shape == (*shapes[y], *shapes[x])


def test_the_shorter_way() -> None:
    """Rows for a short output, columns for a short input: the body of the loop is that of a gradient or a tangent."""
    wide = '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[20] y) { e = Expand(x, s) f = Reshape(e, n) y = Sin(f) }'
    model = parser.parse_model(
        wide.replace("=> (float[20] y)", "=> (float[20] y) <int64[2] s = {10, 2}, int64[1] n = {20}>")
    )
    reverse, forward, auto = (ob.jacobian(model, ["x"], ["y"], direction=d) for d in ("reverse", "forward", "auto"))
    assert auto == forward != reverse
    x = drawn(2)
    expected = np.zeros((20, 2), np.float32)
    expected[np.arange(20), np.arange(20) % 2] = np.tile(np.cos(x), 10)
    for derived in (reverse, forward):
        np.testing.assert_allclose(answers(derived, x=x)["y_jacobian_x"], expected, rtol=1e-6)
    with pytest.raises(ob.InvalidArgumentError, match="direction: expected one of 'auto', 'reverse', 'forward'"):
        ob.jacobian(model, ["x"], ["y"], direction="sideways")


@pytest.mark.parametrize("kernels", ["onnx", "native"])
def test_hessian(kernels: str) -> None:
    derived = ob.hessian(network(), ["x", "w"], ["s"], kernels=kernels)
    (one,) = ob.derivatives(derived)
    assert one.results == {a: {b: f"{a}_hessian_{b}" for b in ("x", "w")} for a in ("x", "w")}
    x, v, w = drawn(2, 4), drawn(2, 4), drawn(4, 5)
    got = answers(derived, x=x)
    product = answers(ob.hvp(network(), ["x", "w"], ["s"]), x=x, x_direction=v, w_direction=w)
    for name in ("x", "w"):
        total = np.tensordot(got[f"{name}_hessian_x"], v, 2) + np.tensordot(got[f"{name}_hessian_w"], w, 2)
        np.testing.assert_allclose(total, product[f"{name}_hvp"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["x_hessian_w"], got["w_hessian_x"].transpose(2, 3, 0, 1), atol=1e-5)


def test_a_block_of_zeros_between_variables() -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[2] x, float[3] z) => (float s) { a = Sin(x) b = Mul(z, z) c = ReduceSum<keepdims = 0>(a) d = ReduceSum<keepdims = 0>(b) s = Add(c, d) }'
    x, z = drawn(2), drawn(3)
    got = answers(ob.hessian(parser.parse_model(text), ["x", "z"]), x=x, z=z)
    np.testing.assert_allclose(got["x_hessian_x"], -np.diag(np.sin(x)), rtol=1e-5)
    np.testing.assert_array_equal(got["z_hessian_z"], 2 * np.eye(3, dtype=np.float32))
    assert got["x_hessian_z"].shape == (2, 3)
    assert not got["x_hessian_z"].any()


@pytest.mark.parametrize("shape", ["1, 2, 6, 6", "N, 2, H, W"])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_winners_of_a_pool_are_found_once(shape: str, direction: str) -> None:
    """∂y/∂x is 1 at each winner; no row looks for them again, and other kernels do as they did."""
    pool = "MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1], ceil_mode = 1>"
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g (float[{shape}] x) => (float[A, 2, B, C] y) {{ y = {pool} (x) }}'
    )
    x = np.random.default_rng(3).permutation(72).reshape(1, 2, 6, 6).astype(np.float32)
    derived = ob.jacobian(model, ["x"], ["y"], direction=direction)
    got = answers(derived, "onnx", x=x)
    np.testing.assert_array_equal(got["y_jacobian_x"], (got["y"][..., None, None, None, None] == x).astype(np.float32))
    scans = [node for node in derived.graph.node if node.op_type == "Scan"]
    left = {node.op_type for node in all_nodes(scans) if node.op_type.startswith("MaxPool")}
    assert left == (set() if shape[0] == "1" else {"MaxPoolBackward"} if direction == "reverse" else left)
    native = ob.jacobian(model, ["x"], ["y"], direction=direction, kernels="native")
    np.testing.assert_array_equal(answers(native, "native", x=x)["y_jacobian_x"], got["y_jacobian_x"])


def test_a_crop_in_the_body_of_a_scan() -> None:
    """onnxruntime writes CenterCropPad out under the same names inside and outside, so no gradient has one."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 3, 4] x) => (float[N, 3, 5] y) <int64[1] k = {5}> '
        "{ p = AveragePool<kernel_shape = [1]>(x) y = CenterCropPad<axes = [-1]>(p, k) }"
    )
    derived = ob.jacobian(model, ["x"], ["y"])
    (got,) = (value for name, value in answers(derived, x=drawn(2, 3, 4)).items() if name != "y")
    expected = np.einsum("na,cb,hw->nchabw", np.eye(2), np.eye(3), np.eye(5, 4))
    np.testing.assert_array_equal(got, expected)


PRODUCTS = {
    "ReduceProd": "p = ReduceProd<keepdims = 0>(x)",
    "ReduceProd of axes": "m = Reshape(x, shape) q = ReduceProd<keepdims = 1>(m, ends) p = Squeeze(q)",
    "ScatterElements": 'e = ScatterElements<reduction = "mul">(one, zeros, x) p = Squeeze(e)',
    "ScatterND": 'u = Unsqueeze(zeros, last) e = ScatterND<reduction = "mul">(one, u, x) p = Squeeze(e)',
}


@pytest.mark.parametrize("values", [(1.0, 2, 3, 4), (0, 2, 3, 4), (2, 0, 3, 0), (0, 0, 3, 0), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("nodes", PRODUCTS.values(), ids=PRODUCTS)
def test_products_with_factors_of_zero(nodes: str, values: tuple[float, ...]) -> None:
    """∂²Π x / ∂x_i ∂x_j = Π of the others, 0 for i = j; third derivatives along the axes likewise."""
    text = f"""<ir_version: 10, opset_import: ["": 18]> g (double[4] x) => (double p)
        <double[1] one = {{1}}, int64[4] zeros = {{0, 0, 0, 0}}, int64[3] shape = {{2, 1, 2}}, int64[2] ends = {{0, 2}},
         int64[1] last = {{1}}> {{ {nodes} }}"""
    model = parser.parse_model(text)
    x = np.array(values, np.float64)

    def others(*which: int) -> float:
        return float(np.prod(np.delete(x, which))) if len({*which}) == len(which) else 0.0

    hessian = ob.hessian(model, ["x"], ["p"])
    (name,) = {value.name for value in hessian.graph.output} - {"p"}
    result = answers(hessian, x=x)[name]
    np.testing.assert_allclose(result, np.array([[others(i, j) for j in range(4)] for i in range(4)]), atol=1e-12)
    third = ob.jvp(hessian, ["x"], [name])
    newest = ob.derivatives(third)[-1]
    for k in range(4):
        result = answers(third, **{"x": x, newest.seeds["x"]: np.eye(4)[k]})[newest.results[name]]
        expected = np.array([[others(i, j, k) for j in range(4)] for i in range(4)])
        np.testing.assert_allclose(result, expected, atol=1e-12)


def test_large_factors_beside_one_of_zero() -> None:
    """0 · 1e30 · 1e30 in float32: the gradients of the large ones are 0, not 0 · ∞."""
    text = """<ir_version: 10, opset_import: ["": 18]> g (float[3] x) => (float p)
        <float[1] one = {1}, int64[3] zeros = {0, 0, 0}>
        { e = ScatterElements<reduction = "mul">(one, zeros, x) p = Squeeze(e) }"""
    model = ob.backward(parser.parse_model(text), wrt=["x"], of=["p"])
    result = answers(model, x=np.float32([0, 1e30, 1e30]))["x_grad"]
    np.testing.assert_array_equal(result, np.float32([np.inf, 0, 0]))
