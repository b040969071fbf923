"""Walking, naming, searching and emitting: the same of onnx's messages and of onnx_ir's graphs."""

from __future__ import annotations

import json
from graphlib import CycleError
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import GraphProto, NodeProto, checker, defs, helper, parser, shape_inference

from onnx_backprop.opset.graphs.edit import add_import, assign, copied, insert, without
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.hide import hide, show
from onnx_backprop.opset.graphs.names import Names, rename, unique, used_names
from onnx_backprop.opset.graphs.order import (
    ancestors,
    dependencies,
    descendants,
    for_default_sessions,
    positions,
    producers,
    topological,
)
from onnx_backprop.opset.graphs.scope import scoped_graphs
from onnx_backprop.opset.graphs.types import shapes_of
from onnx_backprop.opset.graphs.walk import (
    WITH_SUBGRAPHS,
    all_graphs,
    all_nodes,
    defined_in,
    is_standard,
    reads,
    values_read,
)

TEXT = """<ir_version: 10, opset_import: ["": 18, "f": 1]> main (float[3] x, bool c) => (float[3] y) <float[1] w = {2}> {
    a = Neg(x)
    b = f.Twice(a)
    d = If(c) <
        then_branch = one () => (t) { s = Mul(a, w) t = Add(s, b) },
        else_branch = two () => (e) { r = ReduceMax<keepdims=0>(x) u = Cast<to=9>(r) e = If(u) <
            then_branch = three () => (p) { p = Exp(b) }, else_branch = four () => (q) { q = Identity(a) }> }
    >
    unread = Abs(a)
    y = Relu(d)
}
<domain: "f", opset_import: ["": 18]> Twice (v) => (z) { z = Add(v, v) }"""
MODEL = parser.parse_model(TEXT)


def in_ir() -> ir.Graph:
    return ir.from_proto(MODEL).graph


def test_walks_meet_everything_once_and_the_outer_first() -> None:
    assert [graph.name for graph in all_graphs(MODEL.graph)] == ["main", "one", "two", "three", "four"]
    model = copied(MODEL)
    model.functions[0].node.add().CopyFrom(MODEL.graph.node[2])
    assert [graph.name for graph in all_graphs(model)][5:] == ["one", "two", "three", "four"]
    assert [graph.name for graph in all_graphs(MODEL.graph, lambda node: node.op_type != "If")] == ["main"]
    assert [node.output[0] for node in all_nodes(MODEL)] == [*"abdstruepq", "unread", "y", "z"]
    assert [graph.name for graph, _ in scoped_graphs(MODEL.graph)] == ["main", "one", "two", "three", "four"]
    scopes = {graph.name: scope for graph, scope in scoped_graphs(MODEL.graph)}
    assert scopes["four"].dims("x") == (3,)
    assert scopes["one"].constant("w") == [2]


def test_what_a_node_reads_is_what_it_captures_too() -> None:
    branch = MODEL.graph.node[2]
    assert reads(branch) == {"c", "a", "b", "w", "x"}
    assert {value.name for value in values_read(list(in_ir())[2])} == {"c", "a", "b", "w", "x"}
    assert defined_in(MODEL.graph) == {"x", "c", "w", "a", "b", "d", "unread", "y"}
    changed = copied(branch)
    rename(changed, {"a": "new", "t": "hidden", "d": "result"})
    assert reads(changed) == {"c", "new", "b", "w", "x"}
    assert list(changed.output) == ["result"]
    assert [value.name for graph in all_graphs(MODEL.graph) for value in graph.output] == ["y", "t", "e", "p", "q"]


@pytest.mark.parametrize("graph", [MODEL.graph, in_ir()], ids=["onnx", "onnx_ir"])
def test_names_are_those_of_values_and_nodes_in_all_graphs(graph: GraphProto | ir.Graph) -> None:
    taken = used_names(graph)
    assert {*"abdstuepqyxwc", "unread"} <= taken
    assert [unique("a", taken) for _ in range(3)] == ["a_2", "a_3", "a_4"]
    assert unique("a_3", taken) == "a_3_2"
    assert unique("fresh", taken) == "fresh"
    assert unique("fresh", taken) == "fresh_2"
    plain = {"a", "a_2"}
    assert [unique("a", plain), unique("a", plain)] == ["a_3", "a_4"]


def test_searches_go_through_sub_graphs() -> None:
    nodes = list(MODEL.graph.node)
    assert positions(nodes) == {"a": 0, "b": 1, "d": 2, "unread": 3, "y": 4}
    assert producers(nodes)["d"] == nodes[2]
    assert ancestors(nodes, ["y"]) == [0, 1, 2, 4]
    assert ancestors(nodes, ["y"], stops={"b"}) == [0, 2, 4]
    assert ancestors(nodes, ["x"]) == []
    assert dependencies(nodes, ["d"]) == {"d", "c", "a", "b", "w", "x"}
    assert [node.output[0] for node in descendants(nodes, ["b"])] == ["d", "y"]
    inner = list(in_ir())
    assert ancestors(inner, inner[4].outputs) == [0, 1, 2, 4]
    assert {value.name for value in dependencies(inner, inner[2].outputs)} == {"d", "c", "a", "b", "w", "x"}
    assert descendants(inner, inner[1].outputs) == [inner[2], inner[4]]
    available = {"x", "c", "w"}
    for node in topological(nodes[::-1]):
        assert reads(node) <= available
        available |= {*node.output}
    assert len(available) == 8
    with pytest.raises(CycleError):
        topological([helper.make_node("Abs", ["m"], ["n"]), helper.make_node("Abs", ["n"], ["m"])])


def test_a_session_without_options_runs_gradients_of_weights_as_early_as_it_can(tmp_path: Path) -> None:
    """Four layers: h of the forward part, d of the gradients that go back, w of those of weights, which one node reads."""
    forward = "".join(f"h{n} = Exp(h{n - 1})" for n in range(1, 5))
    backward = "".join(f"d{n} = Mul(d{n + 1}, h{n}) w{n} = Sub(d{n}, h{n - 1})" for n in (4, 3, 2, 1))
    text = f"<ir_version: 10, opset_import: ['': 18]> main (float[3] h0, float[3] d5) => (float[3] y) {{ {forward} {backward} y = Sum(w1, w2, w3, w4) }}"
    model = parser.parse_model(text.replace("'", '"'))
    for node in model.graph.node:
        node.name = node.output[0]

    def order() -> list[str]:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        session.run(None, {"h0": np.ones(3, np.float32), "d5": np.ones(3, np.float32)})
        events = json.loads(Path(session.end_profiling()).read_text())
        return [event["name"].removesuffix("_kernel_time") for event in events if event.get("cat") == "Node"]

    wanted = [node.name for node in model.graph.node]
    assert order() != wanted
    assign(model.graph.node, for_default_sessions(model.graph.node))
    checker.check_model(model)
    assert order() == wanted


def test_emitted_nodes_have_free_names_and_no_empty_ends() -> None:
    op = Emitter("node", Names({"node/Add"}))
    total = op.Add("x", op.constant([1.0], np.float32), None)
    first, second = op.emit("Split", [total, ""], {"num_outputs": 2, "axis": None}, outputs=2)
    assert [node.name for node in op.nodes] == ["node/Constant", "node/Add_2", "node/Split"]
    assert (first, second) == ("node/Split", "node/Split/1")
    assert list(op.nodes[-1].input) == [total]
    assert [a.name for a in op.nodes[-1].attribute] == ["num_outputs"]
    nodes = op.finish({"y": second, "again": second, "same": "x", "z": first})
    assert [list(node.output) for node in nodes[2:]] == [["z", "y"], ["again"], ["same"]]
    assert [list(node.input) for node in nodes[3:]] == [["y"], ["x"]]
    with pytest.raises(AttributeError):
        op.lower  # noqa: B018


def test_messages_are_changed_in_place() -> None:
    model = copied(MODEL)
    assign(model.graph.node, [*model.graph.node[3:], *model.graph.node[:1]])
    assert [node.output[0] for node in model.graph.node] == ["unread", "y", "a"]
    insert(model.graph, 1, [helper.make_node("Abs", ["x"], [name]) for name in "mn"])
    assert [node.output[0] for node in model.graph.node] == ["unread", "m", "n", "y", "a"]
    for _ in range(2):
        add_import(model, "new", 3)
    assert [(o.domain, o.version) for o in model.opset_import][-1] == ("new", 3)
    assert len(model.opset_import) == 3
    bare = without(MODEL, "graph", "functions")
    assert bare.ir_version == 10
    assert not bare.functions
    assert not bare.HasField("graph")
    assert shapes_of(MODEL.graph) == {"x": (3,), "c": (), "y": (3,), "w": (1,)}


def test_the_default_domain_has_two_names() -> None:
    assert is_standard(NodeProto(op_type="Add"), "Add", "Mul")
    assert is_standard(NodeProto(op_type="Add", domain="ai.onnx"))
    assert not is_standard(NodeProto(op_type="Add"), "Mul")
    assert not is_standard(NodeProto(op_type="Add", domain="my.ops"), "Add")


def test_hidden_nodes_are_taken_as_they_are() -> None:
    model = copied(MODEL)
    hide(model, [node for node in all_nodes(model) if node.op_type in ("Neg", "Exp")], "nobody")
    assert sum(node.domain == "nobody" for node in all_nodes(model)) == 2
    assert not shape_inference.infer_shapes(model).graph.value_info
    show(model, "nobody")
    assert model == MODEL


def test_the_operators_with_subgraphs_are_those_of_the_schemas() -> None:
    """`subgraphs` looks into no other node of the default domain."""
    graphs = (defs.OpSchema.AttrType.GRAPH, defs.OpSchema.AttrType.GRAPHS)
    schemas = [schema for schema in defs.get_all_schemas_with_history() if schema.domain == ""]
    names = {schema.name for schema in schemas if any(a.type in graphs for a in schema.attributes.values())}
    assert names == WITH_SUBGRAPHS
