"""Models below opset 18 are converted once, without changing what they compute."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.converters.upgrade import default_opset, upgrade
from tests.adjoint import adjoint_mismatches, forward_session


def legacy(op_type: str, opset: int, mode: str, scales: list[float], *, ir_version: int = 5) -> ModelProto:
    """Upsample-7, -9 or Resize-10 on a 4-D tensor."""
    attributes: dict[str, object] = {"mode": mode}
    inputs, initializers = ["x"], []
    if op_type == "Upsample" and opset < 9:
        attributes["scales"] = scales
    else:
        inputs.append("scales")
        initializers.append(numpy_helper.from_array(np.float32(scales), "scales"))
    node = helper.make_node(op_type, inputs, ["y"], name="node", **attributes)
    graph_inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 5, 4])]
    if ir_version < 4 and initializers:
        graph_inputs.append(helper.make_tensor_value_info("scales", TensorProto.FLOAT, [4]))
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)
    return helper.make_model(
        helper.make_graph([node], "g", graph_inputs, [output], initializers),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=ir_version,
    )


CASES = [
    ("Upsample", 7, "nearest", [1.0, 1, 2, 3]),
    ("Upsample", 7, "linear", [1.0, 1, 2, 2]),
    ("Upsample", 9, "nearest", [1.0, 1, 2, 2]),
    ("Upsample", 9, "linear", [1.0, 1, 1.6, 2.5]),
    ("Resize", 10, "nearest", [1.0, 1, 3, 2]),
    ("Resize", 10, "nearest", [1.0, 1, 0.6, 0.5]),
    ("Resize", 10, "linear", [1.0, 1, 0.6, 2.5]),
]


@pytest.mark.parametrize("ir_version", [3, 5])
@pytest.mark.parametrize(("op_type", "opset", "mode", "scales"), CASES)
def test_legacy_resizes_keep_their_meaning(
    op_type: str, opset: int, mode: str, scales: list[float], ir_version: int
) -> None:
    model = legacy(op_type, opset, mode, scales, ir_version=ir_version)
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 4)).astype(np.float32)
    before = np.asarray(forward_session(model).run(None, {"x": x})[0])
    copy = ModelProto()
    copy.CopyFrom(model)
    converted = upgrade(copy)
    assert default_opset(converted) == 18
    after = np.asarray(forward_session(converted).run(None, {"x": x})[0])
    np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6)
    assert not adjoint_mismatches(model, {"x": x}, ["x"])


def test_nearest_that_rounds_both_ways_is_refused() -> None:
    """Before opset 11 nearest takes floor above a scale of 1 and ceil below: no newer Resize does both."""
    with pytest.raises(ob.UnsupportedError, match="'node': nearest with scales above and below 1"):
        ob.backward(legacy("Resize", 10, "nearest", [1.0, 1, 0.5, 2]), wrt=["x"])


def test_nearest_with_scales_of_the_run_is_refused() -> None:
    model = legacy("Resize", 10, "nearest", [1.0, 1, 2, 2])
    del model.graph.initializer[:]
    model.graph.input.append(helper.make_tensor_value_info("scales", TensorProto.FLOAT, [4]))
    with pytest.raises(ob.UnsupportedError, match="'node': nearest needs constant scales before opset 11"):
        ob.backward(model, wrt=["x"])


def test_the_given_model_is_not_changed() -> None:
    model = legacy("Upsample", 9, "nearest", [1.0, 1, 2, 2], ir_version=3)
    before = model.SerializeToString(deterministic=True)
    ob.backward(model, wrt=["x"])
    assert model.SerializeToString(deterministic=True) == before


def test_newer_models_keep_their_opset() -> None:
    model = legacy("Resize", 10, "linear", [1.0, 1, 2, 2])
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear")
    del model.graph.node[:]
    model.graph.node.append(node)
    for opset in (18, 19, 21, 22, 26):
        model.opset_import[0].version, model.ir_version = opset, 10
        graph = ob.backward(model, wrt=["x"])
        assert default_opset(graph) == opset
