"""Declared shapes that a run does not keep to are not believed; where nothing else is known, the run checks the rank."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, parser
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS

X = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4) / 7

# a model with stale shapes inside, and the gradient of x by hand
STALE = {
    "batch of 1 before a pool": (
        "(float[N,3,H,W] x) => (float z) <float[1,3,H,W] a>"
        "{ a = Relu(x) y = GlobalAveragePool(a) z = ReduceMean<keepdims=0>(y) }",
        np.where(X > 0, 1 / X.size, 0),
    ),
    "one pixel before MaxPool": (
        "(float[N,3,4,4] x) => (float z) <float[N,3,1,1] a>"
        "{ a = Identity(x) y = MaxPool<kernel_shape=[4,4]>(a) z = ReduceSum<keepdims=0>(y) }",
        np.broadcast_to(np.arange(16).reshape(4, 4) == 15, X.shape),
    ),
    "the output's lengths": ("(float[N,3,H,W] x) => (float[1,3,9,9] z) { z = Mul(x, x) }", 2 * X),
    "the output's rank": ("(float[N,3,H,W] x) => (float[1,s] z) { z = Mul(x, x) }", 2 * X),
    "inside a branch": (
        "(float[N,3,H,W] x) => (float z) <bool n = {0}>"
        "{ c = Not(n) y = If(c) <then_branch = t () => (float[1,3,4,4] b) { b = Neg(x) },"
        " else_branch = e () => (float[1,3,4,4] d) { d = Neg(x) }>"
        " p = GlobalAveragePool(y) z = ReduceMean<keepdims=0>(p) }",
        np.full(X.shape, -1 / X.size),
    ),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", STALE)
def test_stale_shapes(case: str, kernels: str) -> None:
    text, want = STALE[case]
    got = gradient_of_x(model_of(text), kernels)
    np.testing.assert_allclose(got, want, rtol=1e-6)


# inference knows nothing of y's rank, LogSoftmax of none needs none, MatMul's gradient does
UNKNOWN = (
    "(float[N,M] x, int64[K] lengths) => (float[{declared}] z)"
    "<float[2,2] w = {{1.0, 2.0, 3.0, 4.0}}, float[{declared}] y> {{ y = Reshape(x, lengths) z = MatMul(y, w) }}"
)


def test_a_rank_that_only_the_file_knows_is_checked_by_the_run() -> None:
    model = ob.backward(model_of(UNKNOWN.format(declared="A,B,C")), wrt=["x"])
    session = ob.session(model)
    x, dz = np.ones((4, 3), np.float32), np.ones((2, 3, 2), np.float32)
    feeds = {"x": x, "lengths": np.array([2, 3, 2]), "z_grad": dz}
    np.testing.assert_array_equal(session.run(["x_grad"], feeds)[0], np.tile([3, 7], 6).reshape(4, 3))
    feeds |= {"lengths": np.array([6, 2]), "z_grad": dz.reshape(6, 2)}
    with pytest.raises((Fail, InvalidArgument, RuntimeException)):
        session.run(["x_grad"], feeds)


def model_of(text: str) -> ModelProto:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {text}')


def gradient_of_x(model: ModelProto, kernels: str) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # of wrong shapes onnxruntime warns as well
    converted = ob.backward(model, wrt=["x"], kernels=kernels)
    session = ob.session(converted, kernels=kernels, session_options=options)
    feeds = {"x": X, "z_grad": np.ones(X.shape, np.float32)}
    given = {value.name: feeds[value.name] for value in session.get_inputs()}
    return np.asarray(session.run(["x_grad"], given)[0])


def test_outputs_that_are_inputs_or_weights() -> None:
    model = model_of(
        "(float[N,M] x) => (float[3] z, float[9] w, float[9,9,9] x) <float[2,2] w = {1.0,2.0,3.0,4.0}> { y = MatMul(x, w) z = ReduceSum<keepdims=0>(y) }"
    )
    converted = ob.backward(model, wrt=["x", "w"], of=["z"])
    x = np.ones((3, 2), np.float32)
    *_, dx, dw = ob.session(converted).run(None, {"x": x})
    np.testing.assert_array_equal(dx, np.tile([3, 7], (3, 1)))
    np.testing.assert_array_equal(dw, np.full((2, 2), 3))


def test_a_loop_beside_the_path() -> None:
    """Its body keeps what onnxruntime wants to know of the counter and the condition."""
    model = model_of(
        "(float[N,2] x, int64 n, bool go) => (float[N,2] z, float[N,2] a)"
        " { z = Mul(x, x) a = Loop(n, go, x) <body = b (int64 i, bool c, float[1,2] s) => (bool d, float[1,2] t)"
        " { d = Identity(c) t = Mul(s, s) }> }"
    )
    x = np.array([[1, 2], [3, 4], [0.5, -1]], np.float32)
    feeds = {"x": x, "n": np.array(2), "go": np.array(True), "z_grad": np.ones_like(x)}
    z, a, dx = (np.asarray(v) for v in ob.session(ob.backward(model, wrt=["x"], of=["z"])).run(None, feeds))
    np.testing.assert_array_equal(dx, 2 * x)
    np.testing.assert_allclose(a, x**4, rtol=1e-6)
    assert z.shape == (3, 2)


def test_a_scan_has_the_rank_of_its_state_from_its_body_alone() -> None:
    """Found by `make search`: the rank that its input declared was dropped, and onnxruntime wants that of the output."""
    model = model_of(
        "(float[1,3] x, int64[K] to, float[5,3] xs) => (float[2,3] s, float[5] y) <float[3] w = {1.0,2.0,3.0},"
        " int64[2] two = {2,3}> { e = Expand(x, two) s0 = Reshape(e, to) s, y = Scan<num_scan_inputs = 1,"
        " body = b (float[2,3] si, float[3] xi) => (float so, float yo)"
        " { m = Mul(xi, w) so = Add(si, m) yo = ReduceSum<keepdims=0>(m) }>(s0, xs) }"
    )
    (body,) = (a.g for node in model.graph.node for a in node.attribute if a.HasField("g"))
    body.output[0].type.tensor_type.ClearField("shape")
    feeds = {"x": np.ones((1, 3), np.float32), "to": np.array([2, 3]), "xs": np.ones((5, 3), np.float32)}
    seeds = {"s_grad": np.ones((2, 3), np.float32), "y_grad": np.ones(5, np.float32)}
    dx, dw = ob.session(ob.backward(model, wrt=["x", "w"])).run(["x_grad", "w_grad"], feeds | seeds)
    np.testing.assert_array_equal(dx, [[2, 2, 2]])
    np.testing.assert_array_equal(dw, [15, 15, 15])


def test_a_node_without_a_name_whose_output_another_node_is_called_by() -> None:
    """Found by `make search`: two nodes of one name, which onnxruntime does not load."""
    model = model_of(
        "(float[2,3] x, int64[K] to) => (float[N,2] z) <float[2,2] w = {1.0,2.0,3.0,4.0}, float[A,B] y>"
        " { y = Reshape(x, to) [y] s = Neg(y) z = MatMul(s, w) }"
    )
    feeds = {"x": np.ones((2, 3), np.float32), "to": np.array([3, 2]), "z_grad": np.ones((3, 2), np.float32)}
    (dx,) = ob.session(ob.backward(model, wrt=["x"])).run(["x_grad"], feeds)
    np.testing.assert_array_equal(dx, [[-3, -7, -3], [-7, -3, -7]])
