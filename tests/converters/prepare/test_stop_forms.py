"""Every way in which a file says detach: nodes of exporters, and functions that they write."""

from __future__ import annotations

import pytest
from onnx import ModelProto, TensorProto, helper

from onnx_backprop.converters.prepare.exporters.detached import is_stop, mark_detached

NODES = [
    ("org.chainer", "detach", ""),
    ("org.pytorch.aten", "detach", ""),
    ("aten", "detach", ""),
    ("org.pytorch.aten", "ATen", "detach"),
    ("aten", "ATen", "detach"),
]


def model_of(domain: str, op_type: str, operator: str) -> ModelProto:
    node = helper.make_node(op_type, ["x"], ["y"], domain=domain)
    if operator:
        node.attribute.append(helper.make_attribute("operator", operator))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("x", "y")]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
    return helper.make_model(helper.make_graph([node], "g", ends[:1], ends[1:]), opset_imports=imports)


@pytest.mark.parametrize(("domain", "op_type", "operator"), NODES)
def test_nodes(domain: str, op_type: str, operator: str) -> None:
    model = model_of(domain, op_type, operator)
    mark_detached(model)
    (node,) = model.graph.node
    assert (node.domain, node.op_type, list(node.attribute)) == ("", "Identity", [])
    assert is_stop(node)
    assert [o.domain for o in model.opset_import] == [""]


@pytest.mark.parametrize(
    ("domain", "op_type", "operator"), [("aten", "ATen", "clone"), ("aten", "clone", ""), ("x", "detach", "")]
)
def test_others_stay(domain: str, op_type: str, operator: str) -> None:
    model = model_of(domain, op_type, operator)
    before = model.SerializeToString()
    mark_detached(model)
    assert model.SerializeToString() == before


@pytest.mark.parametrize("name", ["detach", "aten_detach", "aten::detach"])
def test_functions(name: str) -> None:
    model = model_of("pkg.torch", name, "")
    body = [helper.make_node("Identity", ["a"], ["b"])]
    model.functions.append(helper.make_function("pkg.torch", name, ["a"], ["b"], body, [helper.make_opsetid("", 18)]))
    mark_detached(model)
    assert is_stop(model.functions[0].node[0])
    model.functions[0].name = "clone"
    del model.functions[0].node[0].metadata_props[:]
    mark_detached(model)
    assert not is_stop(model.functions[0].node[0])
