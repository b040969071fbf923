"""What stands for a value gives way to it."""

from __future__ import annotations

import onnx_ir as ir
from onnx import parser

from onnx_backprop.converters.recompute.marks import DROPPED, ROUNDED, VIEW, originals

MODEL = """
    <ir_version: 10, opset_import: ["": 18]>
    chain (float[2] x) => (float[2] y) { d = Neg(x)  v = Abs(d)  r = Floor(v)  y = Exp(r) }
"""


def test_what_stands_for_what_stands_for_a_value_gives_way_to_that() -> None:
    graph = ir.from_proto(parser.parse_model(MODEL)).graph
    d, v, r, last = graph
    for node, mark, name in ((d, DROPPED, "x"), (v, VIEW, "d"), (r, ROUNDED, "v")):
        node.metadata_props[mark] = name
    assert [node for node, _ in originals(graph, ROUNDED)] == [r]
    for node, value in originals(graph, DROPPED, VIEW, ROUNDED):
        node.outputs[0].replace_all_uses_with(value)
    assert last.inputs[0] is graph.inputs[0]
