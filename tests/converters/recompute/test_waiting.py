"""What training graphs keep from the forward to the backward pass."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.training import phases as module

ATTENTION = """
    <ir_version: 8, opset_import: ["": 18]>
    attention (float[B,T,8] x, float[M,K,L] mask) => (float[B,T,8] y) <float ratio = {0.3}, float root = {2.8}> {
        q = MatMul(x, w_q)  k = Transpose<perm = [0, 2, 1]>(x)
        raw = MatMul(q, k)  scaled = Div(raw, root)  scores = Add(scaled, mask)
        p = Softmax<axis = -1>(scores)  d = Dropout(p, ratio)
        v = MatMul(x, w_v)  y = MatMul(d, v)
    }
"""


def attention() -> ModelProto:
    model = parser.parse_model(ATTENTION)
    rng = np.random.default_rng(0)
    for name in ("w_q", "w_v"):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((8, 8)).astype(np.float32), name))
    return model


def kept(graph: ob.TrainingGraph) -> Counter[str]:
    """The operators that made the float tensors of several axes which nodes of the backward pass read."""
    nodes = list(graph.model.graph.node)
    first = next(n for n, node in enumerate(nodes) if "_grad" in node.name)
    ranks = {
        v.name: len(v.type.tensor_type.shape.dim)
        for v in graph.model.graph.value_info
        if v.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    producers: dict[str, NodeProto] = {y: node for node in nodes[:first] for y in node.output if ranks.get(y, 0) > 1}
    return Counter(producers[x].op_type for x in {x for node in nodes[first:] for x in node.input if x in producers})


def test_attention_keeps_its_probabilities_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scores for their shape, no probabilities after Dropout beside those before it; the same bits."""

    def trained() -> tuple[ob.TrainingGraph, list[np.ndarray]]:
        graph = ob.training_graph(attention(), loss="mse", training_mode=True, carry_state=True)
        session = onnxruntime.InferenceSession(graph.model.SerializeToString())
        rng = np.random.default_rng(1)
        x, target = rng.standard_normal((2, 2, 5, 8)).astype(np.float32)
        mask = np.triu(np.full((1, 5, 5), -1e4, np.float32), 1)
        feeds = {"x": x, "target": target, "mask": mask, **graph.initial_state()}
        return graph, [np.asarray(y) for y in session.run([graph.loss, *graph.parameters.values()], feeds)]

    graph, got = trained()
    assert kept(graph) == {"Softmax": 1, "MatMul": 1, "Transpose": 1, "Sub": 1, "Mul": 1}  # P, V, K; the loss
    for name in ("dropped_again", "shapes_first"):
        monkeypatch.setattr(module, name, lambda *_: None)
    graph, plain = trained()
    assert kept(graph).keys() >= {"Softmax", "Where", "Div"}
    for ours, other in zip(got, plain, strict=True):
        np.testing.assert_array_equal(ours, other)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_gradients_of_weights_come_first_but_large_ones_last(precision: str | None) -> None:
    """`big` has 16384 numbers; what its gradient is made of has 2 · 8 · 128 in a small batch."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        five (float[B,8] x) => (float[B,4] y)
        { a = MatMul(x, w)  b = MatMul(a, v)  c = MatMul(b, up)  d = MatMul(c, big)  y = MatMul(d, down) }""")
    shapes = {"w": (8, 8), "v": (8, 8), "up": (8, 128), "big": (128, 128), "down": (128, 4)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    nodes = ob.training_graph(model, loss="mse", precision=precision).model.graph.node
    place = {name: n for n, node in enumerate(nodes) for name in node.output}
    order = [f"{name}_grad" for name in ("down", "up", "v", "w", "big")]
    assert sorted(order, key=place.__getitem__) == order
    assert place["down_grad"] < place["y_grad/MatMul"], "before the gradient of d"
    assert place["up_grad"] < place["c_grad/MatMul"], "before the gradient of b"


@pytest.mark.parametrize(
    "branches",
    [
        ("float[N,3] p", "n = Shape(a) p = Expand(v, n)", "float[N,3] q", "q = Identity(b)", "k = Identity(d)"),
        ("int64[2] n", "n = Shape(a)", "int64[2] q", "q = Shape(x)", "k = Expand(v, d)"),
        (  # both ask for the same part
            "float[3] p",
            "n = Shape<start = 1>(a) p = Expand(v, n)",
            "float[3] q",
            "m = Shape<start = 1>(a) q = Expand(v, m)",
            "k = Identity(d)",
        ),
    ],
)
def test_a_branch_that_asks_for_a_shape(branches: tuple[str, ...]) -> None:
    """Found by `make search`: the node that asks was looked for in the main graph, a ValueError of onnx_ir."""
    first, then, second, other, behind = branches
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[N,3] x, bool c) => (float loss)
        <float[3] w = {{1,2,3}}, float[1] v = {{1}}> {{ a = Mul(x, w) b = Tanh(a)
        d = If(c) <then_branch = t () => ({first}) {{ {then} }}, else_branch = e () => ({second}) {{ {other} }}>
        {behind} f = Mul(k, b) loss = ReduceSum<keepdims = 0>(f) }}"""
    )
    graph = ob.training_graph(model)
    plain = ob.backward(model, wrt=list(graph.parameters))
    for c in (True, False):
        feeds = {"x": np.full((2, 3), 0.5, np.float32), "c": np.array(c)}
        got = ob.session(graph.model).run(list(graph.parameters.values()), feeds)
        want = ob.session(plain).run([f"{name}_grad" for name in graph.parameters], feeds)
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6)
