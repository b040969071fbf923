"""Running statistics that an exporter merged with weights: tensors of their own, for every door."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.load import prepare

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((5, 4)).astype(np.float32)
W = RANDOM.standard_normal((4, 4)).astype(np.float32)
SHARED = "a = MatMul(x, w) y = BatchNormalization(a, ones, zeros, zeros, ones)"
IDENTITY = (
    "mean = Identity(zeros) var = Identity(ones) a = MatMul(x, w) y = BatchNormalization(a, ones, zeros, mean, var)"
)
CHAIN = (
    "m1 = Identity(zeros) mean = Identity(m1) v1 = Identity(ones) var = Identity(v1) a = MatMul(x, w) "
    "y = BatchNormalization(a, ones, zeros, mean, var)"
)
AFTER_ALL = "b = Identity(mean) a = MatMul(x, w) y = BatchNormalization(a, ones, b, mean, ones)"
FORMS = {"shared": SHARED, "identity": IDENTITY, "chain": CHAIN, "the bias behind one": AFTER_ALL}


def _model(text: str, output: str = "float[N,4] y") -> ModelProto:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => ({output}) {{ {text} }}')
    read = {name for node in model.graph.node for name in node.input}
    fills = {"zeros": 0, "ones": 1, "mean": 0, "var": 1}
    produced = {name for node in model.graph.node for name in node.output}
    for name in sorted(read & {*fills, "w"} - produced):
        values = W if name == "w" else np.full(4, fills[name], np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


DOORS: dict[str, Callable[[ModelProto, str], ModelProto]] = {
    "vjp": lambda model, bias: ob.vjp(model, wrt=[bias], of=["y"]),
    "vjp by default": lambda model, _: ob.vjp(model, of=["y"]),
    "backward": lambda model, _: ob.backward(model),
}


@pytest.mark.parametrize("unnamed", [False, True])
@pytest.mark.parametrize("door", DOORS.values(), ids=list(DOORS))
@pytest.mark.parametrize("text", FORMS.values(), ids=list(FORMS))
def test_the_gradient_by_a_bias_is_none_by_a_mean(
    text: str, door: Callable[[ModelProto, str], ModelProto], unnamed: bool
) -> None:
    model = _model(text)
    if not unnamed:
        for n, node in enumerate(model.graph.node):
            node.name = f"node {n}/é"
    bias = "mean" if text is AFTER_ALL else "zeros"
    dy = RANDOM.standard_normal((5, 4)).astype(np.float32)
    result = door(model, bias)
    session = ob.session(result)
    results = map(np.asarray, session.run(None, {"x": X, "y_grad": dy}))
    values = dict(zip([v.name for v in session.get_outputs()], results, strict=True))
    np.testing.assert_allclose(values[f"{bias}_grad"], dy.sum(0), rtol=1e-5, atol=1e-5)
    scale = (X @ W / np.sqrt(1 + 1e-5) * dy).sum(0)
    if "ones_grad" in values:
        np.testing.assert_allclose(values["ones_grad"], scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", FORMS.values(), ids=list(FORMS))
def test_training_renews_statistics_and_not_weights(text: str) -> None:
    graph = ob.training_graph(_model(text), loss="mse", optimizer="sgd", training_mode=True)
    bias = "mean" if text is AFTER_ALL else "zeros"
    assert set(graph.parameters) == {"w", "ones", bias}
    trainer = ob.Trainer(graph, learning_rate=0.0)
    trainer.step(x=X, target=np.zeros((5, 4), np.float32))
    state = trainer.state()
    np.testing.assert_array_equal(state["ones"], 1)
    np.testing.assert_array_equal(state[bias], 0)
    statistics = {name: v for name, v in state.items() if name not in (*graph.parameters, "optimizer_step")}
    expected = [0.1 * (X @ W).mean(0), 0.9 + 0.1 * (X @ W).var(0)]
    assert len(statistics) == 2
    for value, want in zip(statistics.values(), expected, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-6)


def _statistics(model: ModelProto) -> list[tuple[str, str]]:
    graph = prepare(model).graph
    stored = {tensor.name for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "BatchNormalization"]
    assert all(name in stored for node in nodes for name in node.input[3:])
    return [(node.input[3], node.input[4]) for node in nodes]


def test_a_statistic_has_the_name_that_an_identity_gave_it() -> None:
    assert _statistics(_model(IDENTITY)) == [("mean", "var")]


def test_a_name_that_something_else_reads_stays_with_that() -> None:
    model = _model(IDENTITY.replace("y = Batch", "z = Add(mean, mean) y = Batch"), "float[N,4] y, float[4] z")
    assert _statistics(model) == [("mean/statistic", "var")]
    model = _model(IDENTITY, "float[N,4] y, float[4] mean")
    assert _statistics(model) == [("mean/statistic", "var")]


def test_two_modules_have_statistics_each_and_one_module_has_one() -> None:
    """Of nodes that read other scales; a module that is called twice renews its statistics twice."""
    two = (
        "a = BatchNormalization(x, s1, b1, mean, var) b = BatchNormalization(a, s2, b2, mean, var) "
        "y = BatchNormalization(b, s2, b2, mean, var)"
    )
    model = _model(two)
    for name in ("s1", "b1", "s2", "b2"):
        model.graph.initializer.append(numpy_helper.from_array(RANDOM.standard_normal(4).astype(np.float32), name))
    first, second, third = _statistics(model)
    assert not set(first) & set(second)
    assert second == third
    handed_on = _model(
        "a = BatchNormalization(x, s1, b1, mean, var) m = Identity(mean) v = Identity(var) "
        "b = BatchNormalization(a, s1, b1, m, v) y = BatchNormalization(b, s2, b2, m, v)"
    )
    handed_on.graph.initializer.extend(model.graph.initializer[2:])
    first, second, third = _statistics(handed_on)  # as of dynamo with optimize=False
    assert first == second
    assert not set(second) & set(third)
    once = _model("y = BatchNormalization(x, ones, zeros, mean, var)")
    assert _statistics(once) == [("mean", "var")]


@pytest.mark.parametrize(
    ("names", "mean", "apart"),
    [
        ("/a/BatchNormalization /b/BatchNormalization", 0.0, True),
        ("/a/BatchNormalization /a_1/BatchNormalization", 0.0, False),  # a further call
        ("/a/BatchNormalization /b/BatchNormalization", 0.5, False),  # modules that have been trained have other means
        ("model/a/bn model/b/bn", 0.0, False),
    ],
)
def test_modules_of_one_scale_and_one_bias_are_two_by_their_names(names: str, mean: float, apart: bool) -> None:
    model = _model("a = BatchNormalization(x, s, c, m, var) y = BatchNormalization(a, s, c, m, var)")
    arrays = {"s": np.float32([1, 2, 3, 4]), "c": np.float32([4, 3, 2, 1]), "m": np.full(4, mean, np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    for node, name in zip(model.graph.node, names.split(), strict=True):
        node.name = name
    (first, _), (second, _) = _statistics(model)
    assert (first != second) is apart


@pytest.mark.parametrize(
    "other", ["z = Mul(v, v)", "q = SequenceConstruct(v, v) z = SequenceAt(q, i)", "z = Identity(v)"]
)
def test_a_statistic_that_is_a_weight_too_has_the_derivative_through_both(other: str) -> None:
    """Found by `make search`: the gradient was that through the other reader alone."""
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> g (float[2, 2] x) => (float[2, 2] y, float[2] z)
        <float[2] s = {{0.5, 2}}, float[2] v = {{1.25, 0.5}}, int64 i = {{0}}>
        {{ y = BatchNormalization(x, s, s, v, v) {other} }}"""
    )
    x = np.float32([[1, 2], [3, -4]])
    session = ob.session(ob.vjp(model, ["v"], ["y", "z"]))
    seeds = {"y_grad": np.ones((2, 2), np.float32), "z_grad": np.ones(2, np.float32)}
    (gradient,) = session.run(["v_grad"], {"x": x} | seeds)
    s, v = np.array([0.5, 2]), np.array([1.25, 0.5])
    statistic = (-s / np.sqrt(v) - s * (x - v) / (2 * v * np.sqrt(v))).sum(0)
    np.testing.assert_allclose(np.asarray(gradient), statistic + (2 * v if "Mul" in other else 1), rtol=1e-4)


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4, 4)])
def test_fresh_statistics_in_training_mode_are_not_written_over_equal_weights(shape: tuple[int, ...]) -> None:
    """onnxruntime renews a constant mean in place, and a bias of the same zeros with it, before it reads the bias."""
    dims = ",".join(map(str, shape))
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g (float[{dims}] x) => (float[{dims}] z) '
        "<float[3] s = {1, 1, 1}, float[3] b = {0, 0, 0}, float[3] m = {0, 0, 0}, float[3] v = {1, 1, 1}> "
        "{ a = Mul(x, w) y, rm, rv = BatchNormalization<training_mode=1>(a, s, b, m, v) z = Mul(y, y) }"
    )
    rng = np.random.default_rng(0)
    w = rng.uniform(0.5, 2, shape[1:]).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    x, dz = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    axes = (0, *range(2, len(shape)))
    a = (x * w).astype(np.float64)
    y = (a - a.mean(axes, keepdims=True)) / np.sqrt(a.var(axes, keepdims=True) + 1e-5)
    dy = 2 * y * dz
    centred = dy - dy.mean(axes, keepdims=True) - y * (dy * y).mean(axes, keepdims=True)
    expected = (centred / np.sqrt(a.var(axes, keepdims=True) + 1e-5) * x).sum(0)
    for kernels in ("onnx", None):
        session = ob.session(ob.vjp(model, wrt=["w"]), kernels=kernels)
        outputs = dict(
            zip([o.name for o in session.get_outputs()], session.run(None, {"x": x, "z_grad": dz}), strict=True)
        )
        np.testing.assert_allclose(np.asarray(outputs["z"]), y * y, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.asarray(outputs["w_grad"]), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("behind", ["", "m = Identity(mean) "])
def test_statistics_of_two_modules_have_the_derivative_through_both(behind: str) -> None:
    """In inference mode: each has a copy of its own, and what the caller names is what both are copies of."""
    mean, shift, seed = (RANDOM.standard_normal(4).astype(np.float32) for _ in range(3))
    name = "m" if behind else "mean"
    model = _model(
        f"{behind}a = BatchNormalization(x, s1, zeros, {name}, var) t = Mul(a, a) "
        f"y = BatchNormalization(t, s2, zeros, {name}, var)"
    )
    for s, value in (("s1", mean + 2), ("s2", shift)):
        model.graph.initializer.append(numpy_helper.from_array(value, s))
    dy = np.tile(seed, (5, 1))
    session = ob.session(ob.vjp(model, wrt=["mean", "var"], of=["y"]))
    outputs = [np.asarray(v) for v in session.run(["mean_grad", "var_grad"], {"x": X, "y_grad": dy})]

    def loss(m: np.ndarray, v: np.ndarray) -> float:
        a = (X - m) / np.sqrt(v + 1e-5) * (mean.astype(float) + 2)
        return float((((a * a) - m) / np.sqrt(v + 1e-5) * shift * dy).sum())

    h, m, v = 1e-5, np.zeros(4), np.ones(4)
    for got, (dm, dv) in zip(outputs, ((h, 0), (0, h)), strict=True):
        want = [(loss(m + dm * e, v + dv * e) - loss(m - dm * e, v - dv * e)) / (2 * h) for e in np.eye(4)]
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_statistics_of_two_modules_that_a_run_feeds_are_those_of_both() -> None:
    """As an input with a default, and as an input of `vmap` that differs between rows."""
    model = _model("a = BatchNormalization(x, s1, zeros, mean, var) y = BatchNormalization(a, s2, zeros, mean, var)")
    for s in ("s1", "s2"):
        model.graph.initializer.append(numpy_helper.from_array(np.float32([1, 2, 3, 4]), s))
    given = RANDOM.standard_normal((2, 4)).astype(np.float32)
    scale = np.float64([1, 2, 3, 4]) / np.sqrt(1 + 1e-5)
    expected = [((X - m) * scale - m) * scale for m in given.astype(float)]
    rows = ob.session(ob.vmap(model, {"mean": 0})).run(["y"], {"x": X, "mean": given})[0]
    np.testing.assert_allclose(np.asarray(rows), expected, rtol=1e-3, atol=1e-3)
    model.graph.input.append(helper.make_tensor_value_info("mean", TensorProto.FLOAT, [4]))
    session = ob.session(ob.vjp(model, wrt=["s1"], of=["y"]))
    fed = session.run(["y"], {"x": X, "mean": given[0], "y_grad": X})[0]
    np.testing.assert_allclose(np.asarray(fed), expected[0], rtol=1e-3, atol=1e-3)
