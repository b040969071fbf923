"""Elementwise values that the backward pass makes again: which, where, and that they are the same."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, checker, parser

import onnx_backprop as ob
from onnx_backprop.ort_ops.rewrites.rematerialize import rematerialize


def model(forward: str, backward: str) -> ModelProto:
    return parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[N] x, float[N] w) => (float[1] loss, float[N] z)
        {{ {forward} loss = ReduceSum(last) {backward} }}""")


KEPT = "t = Tanh(x)  y = Mul(t, w)  last = Tanh(y)"
OMITTED = 'd, "" = Dropout(x)  t = Tanh(d)  h = Constant<value = float {0.5}>()  y = Clip(t, "", h)  last = Tanh(y)'


@pytest.mark.parametrize(
    ("forward", "backward", "again"),
    [
        (KEPT, "a = Mul(y, last)  z = Mul(a, t)", {"y"}),
        (KEPT, "a = Mul(last, t)  z = Mul(a, y)", set()),
        ("y = Mul(x, w)  last = Tanh(y)", "z = Mul(y, last)", {"y"}),
        ("y = Tanh(x)  last = Tanh(y)", "z = Mul(y, last)", set()),
        (
            "t = Tanh(x)  y = Mul(t, w)  u = Mul(y, t)  last = Tanh(u)",
            "a = Mul(u, y)  b = Mul(a, y) z = Mul(b, t)",
            {"y"},
        ),
        (OMITTED, "a = Mul(y, last)  b = Mul(a, t)  z = Mul(b, h)", {"y"}),
        (KEPT, "a = Sin(x)  b = Mul(y, a)  c = Mul(b, y)  z = Mul(c, t)", {"y"}),
    ],
    ids=[
        "kept",
        "kept too briefly",
        "of inputs",
        "not cheap",
        "of what is made again",
        "omitted ends",
        "in front of its reader",
    ],
)
def test_what_is_made_again(forward: str, backward: str, again: set[str]) -> None:
    plain, changed = model(forward, backward), rematerialize(model(forward, backward), ["loss"])
    copies = {node.output[0]: n for n, node in enumerate(changed.graph.node) if node.output[0].endswith("/again")}
    assert set(copies) == {f"{name}/again" for name in again}
    for name, n in copies.items():
        assert name in changed.graph.node[n + 1].input
    checker.check_model(changed)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(5).astype(np.float32) for name in ("x", "w")}
    for got, expected in zip(ob.session(changed).run(None, feeds), ob.session(plain).run(None, feeds), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_outputs_and_what_branches_read_stay() -> None:
    branch = """
        c = Less(one, two)
        z = If(c) <then_branch = t () => (float[N] p) { p = Mul(y, x) }, else_branch = e () => (float[N] q) { q = Neg(x) }>
        """.replace("one", "loss").replace("two", "loss")
    assert len(rematerialize(model("y = Mul(x, w)  last = Tanh(y)", branch), ["loss"]).graph.node) == 5
    graph = model("y = Mul(x, w)  last = Tanh(y)", "z = Mul(y, last)")
    graph.graph.output.add().CopyFrom(graph.graph.output[1])
    graph.graph.output[2].name = "y"
    assert len(rematerialize(graph, ["loss"]).graph.node) == 4
