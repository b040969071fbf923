"""vjp, jvp, hvp: names, seeds, several of them in one run, zeros, and how they compose."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

import onnx_backprop as ob
from tests.support.adjoint import run
from tests.support.broken_rules import break_rule

RNG = np.random.default_rng(7)
TEXT = """<ir_version: 10, opset_import: ["": 21]> net (float[N, 4] x) => (float[N, 3] y, float s)
    { a = MatMul(x, w) t = Tanh(a) b = MatMul(t, v) y = Softmax<axis = -1>(b) q = Mul(y, y) s = ReduceSum<keepdims = 0>(q) }"""


def network(text: str = TEXT) -> ModelProto:
    model = parser.parse_model(text)
    for name, shape in (("w", (4, 5)), ("v", (5, 3))):
        values = np.random.default_rng(len(name + str(shape))).standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def drawn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def answers(model: ModelProto, kernels: str | None = None, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = ob.session(model, kernels=kernels)
    return dict(zip([value.name for value in session.get_outputs()], run(session, feeds), strict=True))


def dims(model: ModelProto, name: str) -> list[int | str]:
    (value,) = (v for v in (*model.graph.input, *model.graph.output) if v.name == name)
    return [d.dim_value or d.dim_param for d in value.type.tensor_type.shape.dim]


def test_a_gradient_of_a_gradient_of_a_gradient() -> None:
    """y = x⁵; every derivative has a name of its own, and the metadata tells which."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[3] x) => (float[3] y) { s = Mul(x, x) q = Mul(s, s) y = Mul(q, x) }'
    )
    x = np.array([1, -2, 0.5], np.float32)
    of, derived = "y", model
    for order, coefficient in enumerate((5, 20, 60, 120, 120), start=1):
        derived = ob.backward(derived, wrt=["x"], of=[of])
        newest = ob.derivatives(derived)[-1]
        of = newest.results["x"]
        seeds = {s: np.ones(3, np.float32) for one in ob.derivatives(derived) for s in one.seeds.values()}
        np.testing.assert_allclose(answers(derived, x=x, **seeds)[of], coefficient * x ** (5 - order), rtol=1e-5)
    assert len(ob.derivatives(derived)) == 5
    names = [value.name for value in (*derived.graph.input, *derived.graph.output)]
    assert names == ["x", "y_grad", *(f"x_grad{n}_grad" for n in ("", "_2", "_3", "_4")), "y", "x_grad"] + [
        f"x_grad_{n}" for n in (2, 3, 4, 5)
    ]


def test_a_model_that_has_such_names_already() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2] x, float[2] x_grad) => (float[2] y) { y_grad = Mul(x, x) y = Mul(y_grad, x_grad) }'
    )
    derived = ob.backward(model, wrt=["x", "x_grad"])
    assert ob.derivatives(derived)[-1] == ob.Derivative(
        "vjp", {"y": "y_grad_2"}, {"x": "x_grad_2", "x_grad": "x_grad_grad"}
    )


def test_models_come_and_go_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(network(), path)
    expected = ob.jvp(network(), ["x"], ["y"])
    assert ob.jvp(path, ["x"], ["y"]) == expected
    derived = ob.jvp(ir.load(path), ["x"], ["y"])
    assert isinstance(derived, ir.Model)
    assert ir.to_proto(derived).graph.node == ir.to_proto(ir.from_proto(expected)).graph.node
    assert ob.derivatives(derived) == ob.derivatives(expected)
    assert isinstance(ob.use_kernels(derived, "numpy"), ir.Model)
    assert ob.session(derived).run(["y"], {"x": drawn(2, 4), "x_tangent": drawn(2, 4)})


@pytest.mark.parametrize("kernels", ["onnx", "numpy", "native"])
def test_a_tangent_and_a_gradient_fit_each_other(kernels: str) -> None:
    x, v, u, w = drawn(2, 4), drawn(2, 4), drawn(2, 3), drawn(4, 5)
    forward = ob.jvp(network(), ["x", "w"], ["y"], kernels=kernels)
    assert [n for n in (i.name for i in forward.graph.input) if n not in ("x", "w")] == ["x_tangent", "w_tangent"]
    assert "y_grad" not in str(forward.graph.input)
    reverse = ob.vjp(network(), ["x", "w"], ["y"], kernels=kernels)
    tangent = answers(forward, x=x, x_tangent=v, w_tangent=w)["y_tangent"]
    gradient = answers(reverse, x=x, y_grad=u)
    assert float((tangent * u).sum()) == pytest.approx(
        float((gradient["x_grad"] * v).sum() + (gradient["w_grad"] * w).sum()), rel=1e-6, abs=2e-6
    )


def test_the_tangent_keeps_nothing_of_the_gradient() -> None:
    """Of y = w·x alone: one product, however y's gradient is made."""
    model = network(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N, 4] x) => (float[N, 5] y) { y = MatMul(x, w) }"""
    )
    derived = ob.jvp(model, ["x"])
    assert [node.op_type for node in derived.graph.node if node.op_type != "Transpose"] == ["MatMul", "MatMul"]


def test_a_name_is_that_of_one_length() -> None:
    """Bodies are inferred alone, each from the same first name on; onnxruntime would give one's memory to another."""
    pool = "MaxPool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>"
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]> g (float[N,2,H,W] x, float[2,2,1,1] w) =>
    (float[N,2,P,Q] y) {{ a = {pool} (x) b = Tanh(a) c = Conv(b, w) d = {pool} (c) e = Conv(d, w) y = {pool} (e) }}""")
    jvp = ob.jvp(model, ["x"], ["y"])
    infos = {v.name: v for v in jvp.graph.value_info if v.type.HasField("tensor_type")}
    jvp.graph.output.extend(infos.values())
    feeds = {"x": drawn(2, 2, 16, 16), "w": drawn(2, 2, 1, 1), "x_tangent": drawn(2, 2, 16, 16)}
    lengths: dict[str, set[int]] = {}
    for name, value in answers(jvp, "onnx", **feeds).items():
        for dim, length in zip(
            infos[name].type.tensor_type.shape.dim if name in infos else (), np.shape(value), strict=False
        ):
            lengths.setdefault(dim.dim_param, set()).add(length)
    assert {name: sizes for name, sizes in lengths.items() if name and len(sizes) > 1} == {}


def test_every_output_is_seeded() -> None:
    derived = ob.vjp(network(), ["x"])
    assert ob.derivatives(derived)[-1].seeds == {"y": "y_grad", "s": "s_grad"}
    x, u = drawn(2, 4), drawn(2, 3)
    both = answers(derived, x=x, y_grad=u, s_grad=np.array(3, np.float32))["x_grad"]
    alone = answers(derived, x=x, y_grad=u, s_grad=np.array(0, np.float32))["x_grad"]
    of_s = answers(ob.backward(network(), wrt=["x"], of=["s"]), x=x)["x_grad"]
    np.testing.assert_allclose(both, alone + 3 * of_s, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["vjp", "jvp", "hvp"])
@pytest.mark.parametrize("count", [1, 3])
def test_several_seeds_in_one_run(mode: str, count: int) -> None:
    of, seed, shape, result = {
        "vjp": ("y", "y_grad", (2, 3), "x_grad"),
        "jvp": ("y", "x_tangent", (2, 4), "y_tangent"),
        "hvp": ("s", "x_direction", (2, 4), "x_hvp"),
    }[mode]
    once, many = (getattr(ob, mode)(network(), ["x"], [of], batched=b) for b in (False, True))
    assert dims(many, seed) == ["seeds", *dims(once, seed)]
    assert dims(many, result) == ["seeds", *dims(once, result)]
    assert ob.derivatives(many)[-1].batched
    x, seeds = drawn(2, 4), drawn(count, *shape)
    got = answers(many, x=x, **{seed: seeds})[result]
    assert len(got) == count
    for row, one in zip(got, seeds, strict=True):
        np.testing.assert_allclose(row, answers(once, x=x, **{seed: one})[result], rtol=1e-6, atol=1e-7)
    tanh, as_before = ([node for node in derived.graph.node if node.op_type == "Tanh"] for derived in (many, once))
    assert tanh == as_before, "what does not depend on the seeds is computed once"
    assert not [node for node in many.graph.node if node.op_type == "Scan"]


def test_seeds_of_seeds_have_lengths_of_their_own() -> None:
    """Two tangents, and three cotangents of each: onnxruntime reuses memory between lengths of one name."""
    inner = ob.jvp(network(), ["x"], ["y"], batched=True)
    outer = ob.vjp(inner, ["x"], ["y_tangent"], batched=True)
    assert dims(outer, "y_tangent_grad") == ["seeds_2", "seeds", *dims(network(), "y")]
    x, v, u = drawn(2, 4), drawn(2, 2, 4), drawn(3, 2, 2, 3)
    got = answers(outer, x=x, x_tangent=v, y_tangent_grad=u)["x_grad"]
    once = ob.vjp(ob.jvp(network(), ["x"], ["y"]), ["x"], ["y_tangent"])
    for n in range(3):
        each = [answers(once, x=x, x_tangent=v[m], y_tangent_grad=u[n, m])["x_grad"] for m in range(2)]
        np.testing.assert_allclose(got[n], np.sum(each, axis=0), rtol=1e-4, atol=1e-6)


def test_a_hessian_times_a_vector() -> None:
    """s(x, w): against second differences in float64."""
    model = network()
    x, v = drawn(2, 4), {"x": drawn(2, 4), "w": drawn(4, 5)}
    derived = ob.hvp(model, ["x", "w"], ["s"])
    assert [value.name for value in derived.graph.output] == ["y", "s", "x_hvp", "w_hvp"]
    got = answers(derived, x=x, x_direction=v["x"], w_direction=v["w"])
    parameters = {tensor.name: numpy_helper.to_array(tensor).astype(np.float64) for tensor in model.graph.initializer}

    def slope(step: float) -> tuple[np.ndarray, np.ndarray]:
        a, w = x.astype(np.float64) + step * v["x"], parameters["w"] + step * v["w"].astype(np.float64)
        t = np.tanh(a @ w)
        e = np.exp(t @ parameters["v"])
        y = e / e.sum(1, keepdims=True)
        g = y * (2 * y - (2 * y * y).sum(1, keepdims=True))
        back = (g @ parameters["v"].T) * (1 - t * t)
        return back @ w.T, a.T @ back

    above, below = slope(1e-5), slope(-1e-5)
    for name, upper, lower in zip(("x_hvp", "w_hvp"), above, below, strict=True):
        np.testing.assert_allclose(got[name], (upper - lower) / 2e-5, rtol=1e-4, atol=1e-5)


def test_they_compose() -> None:
    """The tangent of a gradient is a Hessian-vector product; the tangent of a tangent along the same v is vᵀ∇²s·v."""
    x, v = drawn(2, 4), drawn(2, 4)
    product = answers(ob.hvp(network(), ["x"], ["s"]), x=x, x_direction=v)["x_hvp"]
    forward = ob.jvp(ob.backward(network(), wrt=["x"], of=["s"]), ["x"], ["x_grad"])
    np.testing.assert_allclose(answers(forward, x=x, x_tangent=v)["x_grad_tangent"], product, rtol=1e-4, atol=1e-6)
    twice = ob.jvp(ob.jvp(network(), ["x"], ["s"]), ["x"], ["s_tangent"])
    assert ob.derivatives(twice)[-1].seeds == {"x": "x_tangent_2"}
    got = answers(twice, x=x, x_tangent=v, x_tangent_2=v)["s_tangent_tangent"]
    assert float(got) == pytest.approx(float((product * v).sum()), rel=1e-4)


def test_a_derivative_in_a_training_graph() -> None:
    """Trained on its gradient: s of the training graph is a loss of x_grad, its gradients second derivatives."""
    gradient = ob.vjp(network(), ["x"], ["s"])
    del gradient.graph.output[:2]
    graph = ob.training_graph(gradient, loss="mse", prediction="x_grad")
    assert list(graph.parameters) == ["w", "v"]
    assert graph.target is not None
    x, one = drawn(2, 4), np.array(1, np.float32)
    got = answers(
        graph.model, x=x, s_grad=one, **{graph.target: np.zeros((2, 4), np.float32)}, **graph.initial_values()
    )
    w, v = graph.initial_values()["w"], drawn(4, 5)

    def loss(step: float) -> float:
        gradient.graph.initializer[0].CopyFrom(numpy_helper.from_array((w + step * v).astype(np.float32), "w"))
        return float((answers(gradient, x=x, s_grad=one)["x_grad"].astype(np.float64) ** 2).mean())

    expected = (loss(1e-2) - loss(-1e-2)) / 2e-2
    assert float((got["w_grad"] * v).sum()) == pytest.approx(expected, rel=2e-2, abs=1e-5)


ZERO = '<ir_version: 10, opset_import: ["": 21]> g (float[3] x, float[3] z) => (float[3] y, float[3] r) { a = Floor(x) y = Mul(a, z) r = Mul(z, z) }'


def test_kinds_of_nothing() -> None:
    model = parser.parse_model(ZERO)
    x, z = drawn(3), drawn(3)
    with pytest.warns(ob.OnnxBackpropWarning, match="the derivative by 'x' is zero: Floor 'a' stops it") as caught:
        derived = ob.jvp(model, ["x"], ["y", "r"])
    assert len(caught) == 1
    got = answers(derived, x=x, z=z, x_tangent=drawn(3))
    assert not got["y_tangent"].any()
    assert not got["r_tangent"].any()
    assert "y_grad" not in [value.name for value in derived.graph.input]
    with pytest.raises(ob.InvalidArgumentError, match="Floor"):
        ob.jvp(model, ["x"], ["y"], strict=True)


def test_a_linear_function_has_no_second_derivative() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N] x) => (float s) { r = Relu(x) s = ReduceSum<keepdims = 0>(r) }'
    )
    with pytest.warns(ob.OnnxBackpropWarning, match="the derivative by 'x' is zero"):
        derived = ob.hvp(model, ["x"])
    np.testing.assert_array_equal(answers(derived, x=drawn(3), x_direction=drawn(3))["x_hvp"], np.zeros(3, np.float32))
    with pytest.raises(ob.InvalidArgumentError, match="'x' does not influence"):
        ob.hvp(model, ["x"], strict=True)


@pytest.mark.parametrize(
    "node",
    [
        "ReduceL2 <axes = [1]> (z)",
        "LpNormalization <axis = 1> (z)",
        "LpNormalization <axis = 1, p = 1> (z)",
        "LpPool <kernel_shape = [2, 2]> (z)",
        "GlobalLpPool <p = 3> (z)",
        "Pow (z, p)",
    ],
)
def test_where_a_norm_is_zero(node: str) -> None:
    """y of f · w is 0 for every w where f = 0, and so are all derivatives by w and p: 0 / 0 is nowhere."""
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 17]> g (float[2, 2, 3, 3] f, float[2, 2, 3, 3] w, float[1] p) => (float s)
            {{ z = Mul(f, w) y = {node} s = ReduceSum<keepdims = 0>(y) }}"""
    )
    wrt = ["w", "p"] if "p)" in node else ["w"]
    first = ob.backward(model, wrt=wrt, of=["s"])
    for derived in (
        ob.hvp(model, wrt, ["s"]),
        ob.backward(first, wrt=wrt, of=list(ob.derivatives(first)[-1].results.values())),
    ):
        newest = ob.derivatives(derived)[-1]
        seeds = {seed: drawn(*dims(derived, seed)) for one in ob.derivatives(derived) for seed in one.seeds.values()}
        feeds = {"f": np.zeros((2, 2, 3, 3), np.float32), "w": drawn(2, 2, 3, 3), "p": np.float32([2.5])}
        results = answers(
            derived, **seeds, **{n: feeds[n] for n in feeds if n in [v.name for v in derived.graph.input]}
        )
        for name in newest.results.values():
            np.testing.assert_array_equal(results[name], np.zeros(results[name].shape))


def test_what_has_no_hessian_is_refused() -> None:
    with pytest.raises(ob.InvalidArgumentError, match=r"one element, 'y' has the shape \['N', 3\]. Add a ReduceSum"):
        ob.hvp(network(), ["x"], ["y"])
    with pytest.raises(ob.InvalidArgumentError, match="expected a list of one output"):
        ob.hvp(network(), ["x"])


def test_metadata_of_a_stranger() -> None:
    model = network()
    for text in ("[", "{}", "[1]", '[{"mode": "vjp"}]', '[{"mode": "x", "seeds": {}, "results": {}}]', "[" * 100000):
        model.metadata_props.clear()
        helper.set_model_props(model, {"onnx_backprop.derivatives": text})
        assert ob.derivatives(model) == ()
        assert len(ob.derivatives(ob.backward(model, wrt=["x"], of=["s"]))) == 1


def test_in_a_half_type() -> None:
    model = network(TEXT.replace("float", "float16"))
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    x, v = (drawn(2, 4).astype(np.float16) for _ in "xv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = answers(ob.jvp(model, ["x"], ["y"]), x=x, x_tangent=v)["y_tangent"]
    want = answers(ob.jvp(network(), ["x"], ["y"]), x=x.astype(np.float32), x_tangent=v.astype(np.float32))["y_tangent"]
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-3)


def test_a_rule_that_is_not_linear_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "Tanh", lambda op, _node, grads: [None if g is None else op.Mul(g, g) for g in grads])
    with pytest.raises(ob.UnsupportedError, match="the tangent of 'y' cannot be found: a gradient rule is not linear"):
        ob.jvp(network(), ["x"], ["y"])


def test_through_both_branches() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[N, 2] x, float[2] w, bool c) => (float[N, 2] y) { '
        "y = If(c) <then_branch = t () => (float[N, 2] a) { a = Mul(x, w) }, else_branch = e () => (float[N, 2] b) { s = Sin(x) b = Sub(s, w) }> }"
    )
    derived = ob.jvp(model, ["x", "w"])
    x, w, v, u = drawn(3, 2), drawn(2), drawn(3, 2), drawn(2)
    for c, expected in ((True, v * w + x * u), (False, np.cos(x) * v - u)):
        got = answers(derived, x=x, w=w, c=np.array(c), x_tangent=v, w_tangent=u)["y_tangent"]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def product_error(model: ModelProto, feeds: dict[str, np.ndarray], h: float = 2.0**-6) -> float:
    """How far hvp is from differences of the gradient of the one output s by x, of its largest number."""
    v = drawn(*feeds["x"].shape)
    got = answers(ob.hvp(model, ["x"], ["s"]), "onnx", **feeds, x_direction=v)["x_hvp"]
    gradient = ob.backward(model, wrt=["x"], of=["s"])
    along = [{**feeds, "x": feeds["x"] + np.float32(e) * v} for e in (h, -h)]
    above, below = (answers(gradient, "onnx", **point)["x_grad"].astype(float) for point in along)
    want = (above - below) / (2 * h)
    return float(np.abs(got - want).max() / np.abs(want).max())


def test_our_operators_in_a_branch_alone() -> None:
    """A gradient with operators of ours inside its branches only is differentiated again like any other."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (float[1,2,4,4] x, float[2,2,3,3] w, bool c) =>
    (float s) { y = If (c) <then_branch: graph = t () => (float[1,2,4,4] a) { p = Conv <pads = [1, 1, 1, 1]> (x, w) a = Tanh(p) },
    else_branch: graph = e () => (float[1,2,4,4] b) { b = Exp(x) }> q = Mul(y, y) s = ReduceSum <keepdims = 0> (q) }""")
    feeds = {"x": drawn(1, 2, 4, 4), "w": drawn(2, 2, 3, 3) / 3}
    for c in (True, False):
        assert product_error(model, {**feeds, "c": np.array(c)}) < 1e-2


def test_a_recurrent_node_of_unknown_rank() -> None:
    """Its sequence and states have three axes, whether inference finds them or not."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]> g (float[24] x, float[8] h, int64[K] xs, int64[L] hs,
    float[1,16,3] w, float[1,16,4] r) => (float s) { a = Reshape(x, xs) b = Reshape(h, hs)
    y, yh, yc = LSTM <hidden_size = 4> (a, w, r, , , b, b) q = Mul(y, y) s = ReduceSum <keepdims = 0> (q) }""")
    feeds = {"x": drawn(24), "h": drawn(8), "w": drawn(1, 16, 3) / 2, "r": drawn(1, 16, 4) / 2}
    assert product_error(model, {**feeds, "xs": np.array([4, 2, 3]), "hs": np.array([1, 2, 4])}) < 1e-2
