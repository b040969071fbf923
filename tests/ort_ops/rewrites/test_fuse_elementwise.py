"""Chains of elementwise operators: which are found, and that their values are those of the operators."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, parser, shape_inference
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

import onnx_backprop as ob
from onnx_backprop.opset.functions.native import NATIVE_DOMAIN
from onnx_backprop.ort_ops.elementwise.kernel import ELEMENTWISE
from onnx_backprop.ort_ops.rewrites.fuse_elementwise import fuse_elementwise

NUMBERS = "float one = {1.0}, float[1] three = {3.0}, float[1,1] less = {-3.0}, float six = {6.0}"
SILU = "s = Sub(one, y)  p = Mul(y, s)  q = Mul(x, p)  a = Add(q, y)  z = Mul(dy, a)"
HARD_SWISH = """
    under = LessOrEqual(x, less)  over = GreaterOrEqual(x, three)
    d = Neg(x)  e = Div(d, three)  between = Where(under, one, e)  slope = Where(over, six, between)
    z = Mul(slope, dy)"""
FLAGS = """
    a = Less(x, y)  b = Greater(y, dy)  c = And(a, b)  d = Not(c)  e = Or(d, a)
    r = Where(e, x, dy)  s = Sqrt(r)  t = Sign(y)  z = Sub(s, t)"""
ACTIVATIONS = "a = Relu(x)  b = HardSwish(y)  c = Add(a, b)  z = Mul(c, dy)"
RELU = "sum = Add(x, dy)  z = onnx_backprop.ReLUBackward(y, sum)"


def model(
    nodes: str, shape: str = "N, 3", *, numbers: str = NUMBERS, outputs: str = "z", dy: str | None = None
) -> ModelProto:
    kept = "".join(f", float[{shape}] {name}" for name in outputs.split()[1:])
    graph = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18, "onnx_backprop": 1]>
        g (float[{shape}] x, float[{shape}] y, float[{dy or shape}] dy) => (float[{shape}] z{kept})
        <{numbers}> {{ {nodes} }}""")
    inferred = shape_inference.infer_shapes(graph)
    if "ReLUBackward" in nodes:
        inferred.graph.value_info.append(graph.graph.output[0])
    return inferred


def kinds(graph: ModelProto) -> list[str]:
    return [node.op_type for node in graph.graph.node]


@pytest.mark.parametrize("size", [0, 1, 5, 16, 17, 5463])
@pytest.mark.parametrize(
    "nodes", [SILU, HARD_SWISH, FLAGS, RELU, ACTIVATIONS], ids=["silu", "hard swish", "flags", "relu", "activations"]
)
def test_the_values_are_those_of_the_operators(nodes: str, size: int) -> None:
    rng = np.random.default_rng(size)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3, -3, 1e-42, 3e38], np.float32)
    feeds = {}
    for name in ("x", "y", "dy"):
        values = rng.standard_normal((size, 3)).astype(np.float32) * 3
        picked = rng.random(values.shape) < 0.3
        values[picked] = rng.choice(special, picked.sum())
        feeds[name] = values
    plain, fused = model(nodes), fuse_elementwise(model(nodes))
    assert kinds(fused) == [ELEMENTWISE]
    (expected,) = ob.session(plain, kernels="onnx").run(None, feeds)
    (got,) = ob.session(fused).run(None, feeds)
    np.testing.assert_array_equal(got, expected, strict=True)


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (model("a = Mul(x, y)  z = Add(a, dy)", outputs="z a"), ["Mul", "Add"]),
        (model("a = Mul(x, y)  b = Tanh(a)  z = Add(a, b)"), ["Mul", "Tanh", "Add"]),
        (model("a = Mul(x, y)  z = Add(a, dy)", dy="3"), ["Mul", "Add"]),
        (model("a = Mul(x, y)  z = Add(a, dy)", dy="M, 3"), ["Mul", "Add"]),
        (model("a = Mul(x, y)  z = Add(a, dy)", "?, 3"), ["Mul", "Add"]),
        (model("a = Mul(x, big)  z = Add(a, dy)", numbers="float[1,1,1] big = {2.0}"), ["Mul", "Add"]),
        (model("a = Mul(x, two)  z = Add(a, dy)", numbers="float[3] two = {1.0, 2.0, 3.0}"), ["Mul", "Add"]),
        (model("a = Less(x, y)  b = Cast<to = 1>(a)  z = Where(a, b, x)"), ["Less", "Cast", "Where"]),
        (model("a = Mul(x, y)  z = Tanh(a)"), ["Mul", "Tanh"]),
        (model("z = Add(x, dy)"), ["Add"]),
        (model("a = Mul(x, y)  b = Tanh(a)  c = Add(x, y)  z = Add(b, c)"), ["Mul", "Tanh", ELEMENTWISE]),
        (model("a = Mul(x, y)  b = Mul(a, a)  c = Add(b, a)  z = Sub(c, b)"), [ELEMENTWISE]),
        (model("a = Mul(x, y)  b = Tanh(a)  c = Add(a, b)  z = Sub(c, a)"), ["Mul", "Tanh", ELEMENTWISE]),
        (
            model("s = Sigmoid(x)  a = Mul(x, s)  b = Tanh(a)  c = Mul(b, s)  z = Mul(c, x)"),
            [ELEMENTWISE, "Tanh", ELEMENTWISE],
        ),
        (
            model("s = Mul(x, y)  a = Mul(s, s)  b = Tanh(s)  c = Add(b, a)  z = Sub(c, x)"),
            ["Mul", "Tanh", ELEMENTWISE],
        ),
        (
            model("e = Erf(x)  a = Add(e, one)  h = Mul(x, a)  t = Tanh(h)  b = Mul(t, a)  z = Mul(b, x)"),
            [ELEMENTWISE, "Tanh", ELEMENTWISE],
        ),
        (
            model("s = Sigmoid(x)  a = Mul(x, s)  b = Mul(a, y)  t = Tanh(b)  z = Mul(a, t)"),
            [ELEMENTWISE, "Tanh", ELEMENTWISE],
        ),
        (model("s = Sigmoid(x)  a = Mul(x, s)  t = Tanh(a)  z = Mul(a, t)"), [ELEMENTWISE, "Tanh", "Mul"]),
        (model("d = Dropout(x, six)  a = Mul(d, y)  z = Add(a, d)"), [ELEMENTWISE]),
        (model("d = Dropout(x, six)  a = Mul(d, y)  z = Add(a, d)", outputs="z d"), ["Dropout", ELEMENTWISE]),
    ],
    ids=[
        *("an output", "read elsewhere", "broadcast", "other symbols", "unknown", "more axes", "no number", "flag"),
        *("other operator", "alone", "one of two", "all readers inside", "read before", "copied"),
        *("not copied", "several copied", "copied by all readers", "not by all", "nothing dropped"),
        "passed on to an output",
    ],
)
def test_what_becomes_a_chain(graph: ModelProto, expected: list[str]) -> None:
    assert kinds(fuse_elementwise(graph)) == expected


@pytest.mark.parametrize(
    ("operator", "exact"),
    [("Exp", math.exp), ("Erf", math.erf), ("Sigmoid", lambda x: 1 / (1 + math.exp(-x)) if x > -700 else 0.0)],
)
def test_functions_are_within_three_units(operator: str, exact: Callable[[float], float]) -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate(
        [np.linspace(-110, 88.7, 20_001), rng.standard_normal(20_000) * 3, rng.standard_normal(999) / 1e3]
    )
    x = x.astype(np.float32)
    x = x[: len(x) // 3 * 3].reshape(-1, 3)
    fused = fuse_elementwise(model(f"a = {operator}(x)  b = Mul(a, one)  z = Mul(b, one)"))
    assert kinds(fused) == [ELEMENTWISE]
    session = ob.session(fused)
    ones = np.ones_like(x)
    got = np.asarray(session.run(None, {"x": x, "y": ones, "dy": ones})[0], np.float64)
    expected = np.array([exact(float(v)) for v in x.ravel()]).reshape(x.shape)
    unit = np.spacing(np.abs(expected.astype(np.float32))).astype(np.float64)
    assert (np.abs(got - expected) <= 3 * unit).all(), x[np.abs(got - expected) > 3 * unit][:5]
    special = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    (got,) = session.run(None, {"x": special, "y": special, "dy": special})
    limits = {"Exp": [np.nan, np.inf, 0], "Erf": [np.nan, 1, -1], "Sigmoid": [np.nan, 1, 0]}
    np.testing.assert_array_equal(np.asarray(got)[0], limits[operator])


def test_numbers_that_a_run_may_give_are_tensors() -> None:
    graph = model("a = Mul(x, one)  z = Add(a, dy)")
    graph.graph.input.append(helper.make_tensor_value_info("one", TensorProto.FLOAT, []))
    assert kinds(fuse_elementwise(graph)) == ["Mul", "Add"]


def test_values_that_subgraphs_read_stay() -> None:
    graph = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[N] x, bool c) => (float[N] z)
        { a = Mul(x, x)
          b = If(c) <then_branch = t () => (float[N] p) { p = Identity(a) },
                     else_branch = f () => (float[N] q) { q = Identity(x) }>
          z = Add(a, b) }""")
    assert kinds(fuse_elementwise(shape_inference.infer_shapes(graph))) == ["Mul", "If", "Add"]


def test_a_shape_that_is_not_the_stated_one_is_refused() -> None:
    session = ob.session(fuse_elementwise(model("a = Mul(x, y)  z = Add(a, dy)", "N, M")))
    feeds = {"x": np.ones((2, 3), np.float32), "y": np.ones((2, 3), np.float32), "dy": np.ones((3, 2), np.float32)}
    with pytest.raises(Fail, match="must have one shape"):
        session.run(None, feeds)


def test_training_graphs_have_chains_and_the_same_losses(rng) -> None:
    forward = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[N,5] x) => (float[N,4] y)
        { h = MatMul(x, w)  s = Sigmoid(h)  a = Mul(h, s)  b = HardSwish(a)  y = Add(b, h) }""")
    weights = rng.standard_normal((5, 4)).astype(np.float32)
    forward.graph.initializer.add(name="w", data_type=1, dims=(5, 4), raw_data=weights.tobytes())
    graph = ob.training_graph(forward, loss="mse", optimizer="adam")
    assert NATIVE_DOMAIN in {o.domain for o in fuse_elementwise(graph.model).opset_import}
    feeds = {
        "x": rng.standard_normal((7, 5)).astype(np.float32),
        "target": rng.standard_normal((7, 4)).astype(np.float32),
    }
    graph = ob.training_graph(forward, loss="mse", optimizer="adam")
    losses = []
    for kernels in ("native", "onnx"):
        trainer = ob.Trainer(graph, kernels=kernels)
        losses.append([trainer.step(feeds) for _ in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
