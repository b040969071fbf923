"""vmap against a loop of onnxruntime over rows of the model that came: names, shapes, nesting, refusals."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import ModelProto, helper, parser

import onnx_backprop as ob
from tests.support.renamed import STYLES, renamed
from tests.support.vmap_checks import check, drawn, model_of, run


def dims(model: ModelProto, name: str) -> list[int | str]:
    (value,) = (v for v in (*model.graph.input, *model.graph.output) if v.name == name)
    return [d.dim_value or d.dim_param for d in value.type.tensor_type.shape.dim]


NETWORK = "(float[1, 4] x, float[3] s) => (float[1, 3] y, float[5] h, float[3] t) { a = MatMul(x, w) z = Tanh(a) h = Squeeze(z, zero) b = MatMul(z, v) y = Mul(b, s) t = Exp(s) }"


def network() -> ModelProto:
    return model_of(NETWORK, w=drawn(4, 5), v=drawn(5, 3), zero=np.array([0]))


@pytest.mark.parametrize("rows", [4, 1])
def test_a_file_of_one_row(rows: int) -> None:
    mapped = check(network(), {"x": drawn(rows, 1, 4), "s": drawn(3)}, {"x": 0})
    assert dims(mapped, "x") == ["batch", 1, 4]
    assert [dims(mapped, name) for name in "yht"] == [["batch", 1, 3], ["batch", 5], ["batch", 3]]
    assert not [node for node in mapped.graph.node if node.op_type == "Scan"]


def test_no_rows() -> None:
    got = run(ob.vmap(network(), {"x": 0}), {"x": drawn(0, 1, 4), "s": drawn(3)})
    assert [value.shape for value in got.values()] == [(0, 1, 3), (0, 5), (0, 3)]


def test_axes_of_inputs_and_outputs() -> None:
    feeds = {"x": drawn(1, 4, 6), "s": drawn(6, 3)}
    check(network(), feeds, {"x": -1, "s": 0}, {"y": 1, "h": -1})
    mapped = check(network(), feeds, {"x": 2, "s": 0}, 1)
    assert dims(mapped, "x") == [1, 4, "batch"]
    assert dims(mapped, "h") == [5, "batch"]


@pytest.mark.parametrize("style", STYLES)
def test_names(style: str) -> None:
    model, names = renamed(network(), style)
    check(model, {names["x"]: drawn(3, 1, 4), names["s"]: drawn(3)}, {names["x"]: 0})


def test_an_output_that_is_an_input() -> None:
    """Inputs and weights keep their names, so that such an output gets another."""
    model = model_of(
        "(float[3] x, float[2] z) => (float[3] x, float[3] y, float[2] z, float[2] w) { y = Exp(x) }", w=drawn(2)
    )
    mapped = ob.vmap(model, {"x": 1}, {"x": 1, "y": 0})
    onnx.checker.check_model(mapped, full_check=True)
    x, z = drawn(3, 4), drawn(2)
    got = run(mapped, {"x": x, "z": z})
    assert list(got) == ["x_rows", "y", "z_rows", "w_rows"]
    np.testing.assert_array_equal(got["x_rows"], x)
    np.testing.assert_allclose(got["y"], np.exp(x.T), rtol=1e-5)
    np.testing.assert_array_equal(got["z_rows"], np.tile(z, (4, 1)))
    np.testing.assert_array_equal(got["w_rows"], np.tile(drawn(2), (4, 1)))


def test_weights_of_an_ensemble() -> None:
    """An initializer that is named is an input without a default; one that is an input too loses its default."""
    model = network()
    model.graph.input.append(helper.make_tensor_value_info("v", onnx.TensorProto.FLOAT, [5, 3]))
    mapped = ob.vmap(model, {"w": 0, "v": 0})
    assert {tensor.name for tensor in mapped.graph.initializer} == {"zero"}
    x, s, w, v = drawn(1, 4), drawn(3), drawn(6, 4, 5), drawn(6, 5, 3)
    got = run(mapped, {"x": x, "s": s, "w": w, "v": v})
    want = [np.tanh(x @ a) @ b * s for a, b in zip(w, v, strict=True)]
    np.testing.assert_allclose(got["y"], want, rtol=1e-5, atol=1e-6)
    shared = ob.vmap(model, {"x": 0})
    assert {tensor.name for tensor in shared.graph.initializer} == {"w", "v", "zero"}


def test_a_default_that_is_fed_holds_for_all_rows() -> None:
    model = network()
    model.graph.input.append(helper.make_tensor_value_info("v", onnx.TensorProto.FLOAT, [5, 3]))
    check(model, {"x": drawn(3, 1, 4), "s": drawn(3), "v": drawn(5, 3)}, {"x": 0})


def test_rows_draw_numbers_of_their_own() -> None:
    text = "(float[50] x) => (float[50] y, float[50] z) { y = RandomNormalLike(x) c = ConstantOfShape(n) z = RandomNormalLike(c) }"
    got = run(ob.vmap(model_of(text, n=np.array([50])), {"x": 0}), {"x": drawn(3, 50)})
    assert len(np.unique(got["y"], axis=0)) == 3
    assert len(np.unique(got["z"], axis=0)) == 1, "what reads no row is drawn once"


def test_nested() -> None:
    model = network()
    twice = ob.vmap(ob.vmap(model, {"x": 0}), {"x": 0, "s": 0}, 1)
    x, s = drawn(2, 4, 1, 4), drawn(2, 3)
    got = run(twice, {"x": x, "s": s})
    assert dims(twice, "x") == ["batch_2", "batch", 1, 4]
    assert dims(twice, "y") == ["batch", "batch_2", 1, 3]
    for i in range(2):
        for j in range(4):
            want = run(model, {"x": x[i, j], "s": s[i]})
            np.testing.assert_allclose(got["y"][j, i], want["y"], rtol=1e-5, atol=1e-6)


def test_jacobian_between_two() -> None:
    """vmap(jacobian(vmap f)), for all f of the outer rows, and the Jacobian of a vmap, which is block diagonal."""
    model = model_of("(float[2] x) => (float[2] y) { a = MatMul(x, w) y = Sin(a) }", w=drawn(2, 2))
    inner = ob.vmap(model, {"x": 0})
    jacobians = ob.vmap(ob.jacobian(inner, ["x"], ["y"]), {"x": 0})
    x, w = drawn(3, 4, 2), drawn(2, 2)
    got = run(jacobians, {"x": x})["y_jacobian_x"]
    assert got.shape == (3, 4, 2, 4, 2)
    for n in range(3):
        for i in range(4):
            for j in range(4):
                want = np.cos(x[n, i] @ w)[:, None] * w.T if i == j else np.zeros((2, 2))
                np.testing.assert_allclose(got[n, i, :, j, :], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_products_in_any_order(order: str) -> None:
    """vmap of a vjp, jvp and hvp, and those of a vmap, are the same; seeds get the axis of what they belong to."""
    model = model_of(
        "(float[3] x) => (float s, float[2] y) { y = MatMul(x, w) t = Tanh(y) s = ReduceSum<keepdims = 0>(t) }",
        w=drawn(3, 2),
    )
    x, v, u = drawn(4, 3), drawn(4, 3, seed=1), drawn(4, 2, seed=2)
    w = drawn(3, 2)
    f = lambda derived: derived if order == "inside" else ob.vmap(derived, {"x": 0})  # noqa: E731
    g = lambda derived: ob.vmap(derived, {"x": 0}) if order == "inside" else derived  # noqa: E731
    vjp, jvp = g(ob.vjp(f(model), ["x"], ["y"])), g(ob.jvp(f(model), ["x"], ["y"]))
    np.testing.assert_allclose(run(vjp, {"x": x, "y_grad": u})["x_grad"], u @ w.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(jvp, {"x": x, "x_tangent": v})["y_tangent"], v @ w, rtol=1e-5, atol=1e-6)
    assert dims(vjp, "y_grad") == ["batch", 2]
    (derivative,) = ob.derivatives(vjp)
    assert (derivative.seeds, derivative.results) == ({"y": "y_grad"}, {"x": "x_grad"})
    if order == "inside":
        hvp = ob.vmap(ob.hvp(model, ["x"], ["s"]), {"x": 0})
        t = np.tanh(x @ w)
        want = ((-2 * t * (1 - t * t)) * (v @ w)) @ w.T
        np.testing.assert_allclose(run(hvp, {"x": x, "x_direction": v})["x_hvp"], want, rtol=1e-4, atol=1e-5)


def test_a_seed_that_all_rows_share() -> None:
    derived = ob.vmap(ob.vjp(network(), ["x"], ["y"]), {"x": 0, "y_grad": None})
    assert dims(derived, "y_grad") == [1, 3]
    check(
        ob.vjp(network(), ["x"], ["y"]),
        {"x": drawn(3, 1, 4), "s": drawn(3), "y_grad": drawn(3, 1, 3)},
        {"x": 0, "y_grad": 0},
    )


@pytest.mark.parametrize(("batch", "merged"), [("1", "batch"), ("2", "batch*2"), ("M", "batch*M")])
def test_rows_in_a_batch_cost_no_copies(batch: str, merged: str) -> None:
    """Lengths that are equal have one symbol, by which onnxruntime reuses buffers; the last operator writes the output."""
    text = f"(float[{batch}, 4, 6, 6] x) => (float[{batch}, 4, 6, 6] y) {{ a = BatchNormalization(x, s, s, s, s) r = Relu(a) "
    model = model_of(
        text + "c = Conv<pads = [1, 1, 1, 1]>(r, k) y = Tanh(c) }", s=np.full(4, 0.5, "f"), k=drawn(4, 4, 3, 3)
    )
    mapped = check(model, {"x": drawn(3, 2 if batch == "M" else int(batch), 4, 6, 6)}, {"x": 0})
    producers = {name: node for node in mapped.graph.node for name in node.output}
    assert producers["y"].op_type == "Tanh"
    shapes = {v.name: v for v in onnx.shape_inference.infer_shapes(mapped).graph.value_info}
    lengths = {
        shapes[name].type.tensor_type.shape.dim[0].dim_param
        for name, node in producers.items()
        if node.op_type in ("BatchNormalization", "Relu", "Conv")
    }
    assert lengths == {merged}
    assert not [node for node in producers.values() if node.op_type == "Shape" and node.input[0] != "x"]


@pytest.mark.parametrize("batch", ["1", "2", "M"])
def test_a_quantised_network(batch: str) -> None:
    """As onnxruntime looks for it: nothing stands between what quantises and what it is for."""
    model = model_of(
        f"(float[{batch}, 2, 4, 4] x) => (float[{batch}, 3] y) {{ q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) "
        "w = DequantizeLinear(k, s, z) c = Conv(a, w) r = Relu(c) rq = QuantizeLinear(r, s, z) d = DequantizeLinear(rq, s, z) "
        "f = Flatten(d) v = DequantizeLinear(h, s, z) g = MatMul(f, v) gq = QuantizeLinear(g, s, z) "
        "y = DequantizeLinear(gq, s, z) }",
        s=np.array(0.04, "f"),
        z=np.array(0, np.int8),
        k=(9 * drawn(3, 2, 3, 3)).astype(np.int8),
        h=(9 * drawn(12, 3)).astype(np.int8),
    )
    mapped = check(model, {"x": drawn(3, 1 if batch == "1" else 2, 2, 4, 4)}, {"x": 0})
    producers = {name: node.op_type for node in mapped.graph.node for name in node.output}
    assert producers[next(node for node in mapped.graph.node if node.op_type == "Conv").input[0]] == "DequantizeLinear"


def test_gradients_where_the_scale_differs_between_rows() -> None:
    model = model_of(
        "(float[2, 4] x) => (float[2, 4] y) { q, s, z = DynamicQuantizeLinear(x) d = DequantizeLinear(q, s, z) y = Mul(d, d) }"
    )
    feeds = {"x": drawn(3, 2, 4), "y_grad": drawn(3, 2, 4, seed=3)}
    rows = check(ob.vjp(model, ["x"], ["y"], straight_through=True), feeds, {"x": 0, "y_grad": 0})
    whole = ob.vjp(ob.vmap(model, {"x": 0}), ["x"], ["y"], straight_through=True)
    np.testing.assert_allclose(run(whole, feeds)["x_grad"], run(rows, feeds)["x_grad"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", ["onnx", "native"])
def test_gradients_of_operators_of_this_domain(kernels: str) -> None:
    text = (
        "(float[1, 2, 8, 8] x) => (float[1, 3] y) { a = Conv<pads = [1, 1, 1, 1]>(x, k, b) r = Relu(a) "
        "p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) q = AveragePool<kernel_shape = [2, 2]>(p) f = Flatten(q) "
        "l = LayerNormalization(f, g) z = MatMul(l, v) y = Softmax(z) }"
    )
    model = model_of(text, k=drawn(4, 2, 3, 3), b=drawn(4), g=drawn(36), v=drawn(36, 3))
    derived = ob.vjp(model, ["x", "k", "b", "g", "v"], ["y"], kernels=kernels)
    feeds = {"x": drawn(3, 1, 2, 8, 8), "y_grad": drawn(3, 1, 3)}
    mapped = check(derived, feeds, dict.fromkeys(feeds, 0), atol=1e-5)
    assert not [node for node in mapped.graph.node if node.op_type == "Scan"]


def test_a_shared_seed_that_was_widened_and_narrowed() -> None:
    """Rows with as many steps as they say are a Scan, whose body reads the seed from outside."""
    text = (
        "(float[1, 2] x) => (float[1, 2] y) { a = Abs(x) m = ReduceMax<keepdims = 0>(a) b = Add(m, one) n = Cast<to = 7>(b) "
        "h = Loop(n, yes, x) <body = step (int64 i, bool c, float[1, 2] s) => (bool d, float[1, 2] t) "
        "{ t = Tanh(s) d = Identity(c) }> w = Cast<to = 11>(h) y = Cast<to = 1>(w) }"
    )
    model = ob.vjp(model_of(text, one=np.float32(1), yes=np.array(True)), ["x"], ["y"])
    mapped = ob.vmap(model, {"x": 0, "y_grad": None})
    x, dy = 2 * drawn(4, 1, 2), drawn(1, 2)
    got = run(mapped, {"x": x, "y_grad": dy})["x_grad"]
    np.testing.assert_allclose(got, [run(model, {"x": row, "y_grad": dy})["x_grad"] for row in x], rtol=1e-5)


def test_functions_of_the_model() -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "own": 1]> g (float[2, 3] x) => (float[3] y) { y = own.f(x) }
        <domain: "own", opset_import: ["": 21]> f (a) => (b) { c = Exp(a) b = ReduceSum<keepdims = 0>(c, axes) }"""
    model = parser.parse_model(text.replace("(c, axes)", "(c, k) k = Constant<value_ints = [0]>()"))
    body = model.functions[0]
    body.node.insert(0, body.node.pop())
    check(model, {"x": drawn(3, 2, 3)}, {"x": 0})


def test_a_path_and_an_ir_model(tmp_path: object) -> None:
    model = network()
    assert isinstance(ob.vmap(ir.from_proto(model), {"x": 0}), ir.Model)
    onnx.save(model, f"{tmp_path}/model.onnx")
    assert ob.vmap(f"{tmp_path}/model.onnx", {"x": 0}) == ob.vmap(model, {"x": 0})


REFUSALS = [
    ({}, 0, "axes: expected an axis by input, as axes={'x': 0}, got {}"),
    ({"z": 0}, 0, "axes: expected the name of an input or an initializer, got 'z'"),
    ({"x": 3}, 0, "axes: 'x' has 3 axes with the new one, got axis 3"),
    ({"x": True}, 0, "axes: 'x': expected the number of an axis, got True"),
    ({"x": None}, 0, "axes: expected an axis for one input at least"),
    ({"x": 0}, 2, "out_axes: 'h' has 2 axes with the new one, got axis 2"),
    ({"x": 0}, {"q": 0}, "out_axes: expected the name of an output, got 'q'"),
]


@pytest.mark.parametrize(("axes", "out_axes", "message"), REFUSALS)
def test_refusals(axes: dict[str, int], out_axes: int, message: str) -> None:
    with pytest.raises(ob.InvalidArgumentError) as caught:
        ob.vmap(network(), axes, out_axes)
    assert message in str(caught.value)


def test_an_output_that_is_no_tensor() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[4] x) => (seq(float[1]) s) { s = SplitToSequence(x) }'
    )
    with pytest.raises(ob.UnsupportedError, match="'s' is no tensor"):
        ob.vmap(model, {"x": 0})


def test_rows_of_different_lengths_are_an_error() -> None:
    model = model_of("(float[4] x) => (int64[1, n] i) { i = NonZero(x) }")
    mapped = ob.vmap(model, {"x": 0})
    same = np.eye(4, dtype=np.float32)
    np.testing.assert_array_equal(run(mapped, {"x": same})["i"], np.arange(4).reshape(4, 1, 1))
    with pytest.raises(Exception, match="[Ss]can"):
        run(mapped, {"x": np.tril(same + 1)})


def test_renewed_statistics_of_each_row_are_those_of_its_own() -> None:
    """onnxruntime writes the statistics of a row over those that the next one reads, which are others therefore."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 17]> g (float[2, 2, 3] x) => (float[2, 2, 3] y, float[2] m, float[2] u)
        <float[2] w = {1, 2}, float[2] b = {0, 1}, float[2] mean = {1, 0}, float[2] var = {1, 2}>
        { y, m, v = BatchNormalization<training_mode = 1>(x, w, b, mean, var) u = Add(v, mean) }"""
    )
    x = np.random.default_rng(3).standard_normal((4, 2, 2, 3), np.float32)
    results = run(ob.vmap(model, {"x": 0}), {"x": x})
    stored, spread = np.float32([1, 0]), np.float32([1, 2])
    for row, y, m, u in zip(x, results["y"], results["m"], results["u"], strict=True):
        mean, var = row.mean((0, 2)), row.var((0, 2))
        scaled = (row - mean[:, None]) / np.sqrt(var + 1e-5)[:, None] * [[1], [2]] + [[0], [1]]
        np.testing.assert_allclose(y, scaled, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(m, 0.9 * stored + 0.1 * mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(u, 0.9 * spread + 0.1 * var + stored, rtol=1e-5)
