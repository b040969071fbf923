"""Names that a conversion gives: short, free, and the model's own untouched; and what else a file need not say."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, checker, helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.models import backward as reverse
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.walk import all_nodes
from tests.support.adjoint import run

# its values have names that would be given
TEXT = """<ir_version: 10, opset_import: ["": 20]> g (float[4] s, float[4] w, int64 n) => (float[] e) {
    _2 = Mul(s, w)
    y = Loop (n, , _2) <body: graph = own (int64 i, bool go, float[4] _1) => (bool on, float[4] a) {
        on = Identity(go) p = Mul(_1, w) a = Sin(p) }>
    q = Mul(y, y)  e = ReduceSum<keepdims = 0>(q) }"""
RNG = np.random.default_rng(7)
S, W, V = RNG.standard_normal((3, 4)).astype(np.float32)
FEEDS = {"s": S, "w": W, "n": np.array(3)}


def answers(model: ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = ob.session(model, kernels=None)
    return dict(zip([value.name for value in session.get_outputs()], run(session, feeds), strict=True))


@pytest.mark.parametrize("inline", [False, True])
def test_names_of_the_model_stay_and_others_are_short(*, inline: bool) -> None:
    model = parser.parse_model(TEXT)
    derived = ob.backward(model, wrt=["s", "w"], inline=inline)
    checker.check_model(derived, full_check=True)
    names, nodes = used_names(model.graph), {node.name for node in all_nodes(derived.graph)}
    values = used_names(derived.graph) - names - nodes - {"s_grad", "w_grad"}
    assert names - {""} <= used_names(derived.graph)
    assert values
    assert all(name[0] == "_" and name[1:].isdigit() for name in values), values
    assert {"p_grad/1", "p_grad/2"} <= nodes
    assert not any(node.name for node in all_nodes(derived.graph) if node.op_type == "Constant")
    (body,) = (
        a.g for node in derived.graph.node if node.op_type == "Loop" and "y" in node.output for a in node.attribute
    )
    assert body.name == "own"


def test_renaming_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parser.parse_model(TEXT)
    short = ob.hvp(model, ["s", "w"], ["e"])
    monkeypatch.setattr(reverse, "shorten_names", lambda derived, _: derived)
    long = ob.hvp(model, ["s", "w"], ["e"])
    got, want = (answers(derived, **FEEDS, s_direction=V, w_direction=W) for derived in (short, long))
    assert {name: array.tobytes() for name, array in got.items()} == {n: array.tobytes() for n, array in want.items()}
    assert short.ByteSize() < 0.7 * long.ByteSize()


def test_names_are_free_when_a_derivative_is_differentiated_again() -> None:
    model = parser.parse_model(TEXT)
    first = ob.backward(model, wrt=["s"], of=["e"])
    second = ob.vjp(first, ["s"], ["s_grad"])
    checker.check_model(second, full_check=True)
    assert used_names(first.graph) <= used_names(second.graph)
    derivative = ob.derivatives(second)[-1]
    got = answers(second, **FEEDS, **{derivative.seeds["s_grad"]: V})[derivative.results["s"]]
    want = answers(ob.hvp(model, ["s"], ["e"]), **FEEDS, s_direction=V)["s_hvp"]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_failing_node_tells_what_it_belongs_to() -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[N] x, float[M] w) => (float[N] y) { y = Mul(x, w) }'
    derived = ob.backward(parser.parse_model(text), wrt=["w"], of=["y"])
    x = np.ones(4, np.float32)
    with pytest.raises(Exception, match="Name:'y_grad/1'"):
        answers(derived, x=x, w=x, y_grad=np.ones(3, np.float32))


def test_what_is_the_default_is_not_said() -> None:
    op = Builder(set())
    x = op.constant(np.ones((2, 3), np.float32))
    cases = [
        (op.Gemm(x, x, alpha=1.0, beta=1.0, transA=0, transB=1), {"transB"}),
        (op.ReduceSum(x, [1], keepdims=1, noop_with_empty_axes=1), {"noop_with_empty_axes"}),
        (op.Reshape(x, [3, 2], allowzero=1), set()),
        (op.Reshape(x, [0, 2], allowzero=1), {"allowzero"}),
        (op.Reshape(x, op.Shape(x), allowzero=1), {"allowzero"}),
        (op.ints([3, 4]), {"value_ints"}),
        (op.domain.SoftMaxBackward(x, x, axis=1), set[str]()),
        (op.domain.SoftMaxBackward(x, x, axis=0), {"axis"}),
    ]
    for value, attributes in cases:
        node = value.producer()
        assert node is not None
        assert set(node.attributes) == attributes, node


@pytest.mark.parametrize("width", [3, 5000])  # large weights are set aside meanwhile
def test_types_of_initializers_and_inputs_are_not_said_twice(width: int) -> None:
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[N, {width}] x) => (float[N, 2] y) <float[{width}, 2] w = {{{", ".join(["0.5"] * 2 * width)}}}>
        {{ a = MatMul(x, w) y = Tanh(a) }}""")
    derived = ob.backward(model, wrt=["x"])
    assert not derived.graph.value_info
    feeds = {"x": np.ones((4, width), np.float32), "y_grad": np.ones((4, 2), np.float32)}
    assert answers(derived, **feeds)["x_grad"].shape == (4, width)


def test_functions_have_the_optional_attributes_that_nodes_state() -> None:
    stated = helper.make_node("ConvolutionBackwardData", ["dy", "w"], ["a"], domain=ob.DOMAIN, groups=1, **_SAME)
    unstated = helper.make_node("ConvolutionBackwardData", ["dy", "w"], ["b"], domain=ob.DOMAIN, **_SAME)
    text = "g (float[1, 4, 4, 2] dy, float[3, 3, 2, 2] w) => (float[1, 4, 4, 2] a, float[1, 4, 4, 2] b) { }"
    graph = parser.parse_graph(text)
    for nodes, attributes in (([stated, unstated], ["dst_shape", "groups"]), ([unstated, unstated], ["dst_shape"])):
        del graph.node[:]
        graph.node.extend(nodes)
        graph.node[0].output[0], graph.node[1].output[0] = "a", "b"
        imports = [helper.make_opsetid("", 18), helper.make_opsetid(ob.DOMAIN, 1)]
        converted = ob.use_kernels(helper.make_model(graph, opset_imports=imports, ir_version=10), "onnx")
        (function,) = converted.functions
        assert sorted(a.name for a in function.attribute_proto) == attributes
        checker.check_model(converted, full_check=True)
        dy, w = RNG.standard_normal((1, 4, 4, 2), np.float32), RNG.standard_normal((3, 3, 2, 2), np.float32)
        got = answers(converted, dy=dy, w=w)
        np.testing.assert_array_equal(got["a"], got["b"])


_SAME = {"strides": [1, 1], "dilations": [1, 1], "pads_begin": [1, 1], "pads_end": [1, 1], "dst_shape": [1, 4, 4, 2]}
