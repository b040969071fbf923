"""A run may take place twice unless an operator draws numbers or loops: each of ONNX."""

from __future__ import annotations

import pytest
from onnx import ModelProto, TensorProto, defs, helper

from onnx_backprop.ort_ops.runtime import ahead

STANDARD = sorted({schema.name for schema in defs.get_all_schemas_with_history() if schema.domain == ""})
# As ONNX says itself: what draws numbers takes a seed.
DRAWING = {s.name for s in defs.get_all_schemas_with_history() if s.domain == "" and "seed" in s.attributes}


def model_of(op_type: str) -> ModelProto:
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    return helper.make_model(helper.make_graph([helper.make_node(op_type, [], ["y"])], "g", [], [value]))


@pytest.mark.parametrize("inside", [False, True], ids=["by itself", "in a branch"])
def test_every_operator(inside: bool) -> None:
    once = set()
    for op_type in STANDARD:
        model = model_of(op_type)
        if inside:
            outer = model_of("If")
            outer.graph.node[0].attribute.append(helper.make_attribute("then_branch", model.graph))
            model = outer
        if not ahead.repeatable(model):
            once.add(op_type)
    assert once == DRAWING | {"Loop"}
