"""Models below opset 18 are converted once, without changing what they compute."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.converters.prepare.upgrade import default_opset, upgrade
from tests.support.adjoint import adjoint_mismatches, forward_session


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


def same_before_and_after(model: ModelProto, feeds: dict[str, np.ndarray]) -> None:
    """What is computed does not change, and the gradient is its adjoint."""
    copy = ModelProto()
    copy.CopyFrom(model)
    before = np.asarray(forward_session(model).run(None, feeds)[0])
    after = np.asarray(forward_session(upgrade(copy)).run(None, feeds)[0])
    np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6, strict=True)
    assert not adjoint_mismatches(model, feeds, ["x"])


# The lengths are 5 and 4. A scale of 1.2 keeps 4 and one of 1.1 both: a Resize of its own would be a copy then.
BOTH_WAYS = [
    [1.0, 1, 0.5, 2],
    [1.0, 1, 2.5, 0.3],
    [1.0, 1, 0.6, 1.2],
    [1.0, 1, 1.1, 0.5],
    [1.0, 0.5, 1.1, 1.1],
    [2.0, 0.5, 1.7, 0.9],
]


@pytest.mark.parametrize("scales", BOTH_WAYS)
def test_nearest_that_rounds_both_ways(scales: list[float]) -> None:
    """Before opset 11 nearest takes floor above a scale of 1 and ceil below; a newer Resize does one of them."""
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 4)).astype(np.float32)
    same_before_and_after(legacy("Resize", 10, "nearest", scales), {"x": x})


@pytest.mark.parametrize("op_type", ["Upsample", "Resize"])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("listed", [False, True], ids=["input", "overridable"])
def test_scales_of_the_run(op_type: str, mode: str, listed: bool) -> None:
    """Also where they have a default, an initializer that is listed as an input."""
    model = legacy(op_type, 9 if op_type == "Upsample" else 10, mode, [1.0, 1, 1, 1])
    if not listed:
        del model.graph.initializer[:]
    model.graph.input.append(helper.make_tensor_value_info("scales", TensorProto.FLOAT, [4]))
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 4)).astype(np.float32)
    growing = [[1, 1, 2, 2], [1, 1, 1.1, 1.1], [1, 1, 3, 1.1], [1, 1, 1, 1]]
    others = [[1, 1, 0.6, 0.5], [1, 1, 0.5, 2.7], [1, 1, 1, 0.5], *BOTH_WAYS[:4]]
    for scales in growing if op_type == "Upsample" else growing + others:
        same_before_and_after(model, {"x": x, "scales": np.float32(scales)})


@pytest.mark.parametrize("coordinates", ["tf_half_pixel_for_nn", "tf_crop_and_resize", "half_pixel"])
@pytest.mark.parametrize("opset", [11, 13])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_11_and_13(mode: str, opset: int, coordinates: str) -> None:
    """Version 11 has empty tensors for what is not given, and tf_half_pixel_for_nn, which onnxruntime never dropped."""
    node = helper.make_node(
        "Resize",
        ["x", "roi", "none", "sizes"],
        ["y"],
        name="node",
        mode=mode,
        coordinate_transformation_mode=coordinates,
    )
    constants = {
        "roi": np.float32([0, 0, 0.2, -0.1, 1, 1, 0.9, 1.3]),
        "none": np.zeros(0, np.float32),
        "sizes": np.array([1, 2, 7, 3], np.int64),
    }
    if coordinates != "tf_crop_and_resize":
        constants["roi"] = np.zeros(0, np.float32)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 5, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 7, 3])],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7)
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 4)).astype(np.float32)
    same_before_and_after(model, {"x": x})


def test_nodes_in_branches() -> None:
    """A legacy node in a branch keeps its meaning as well; its scales may come from outside."""
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 4)).astype(np.float32)
    outer = legacy("Resize", 10, "nearest", [1.0, 1, 0.6, 1.2])
    result = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    keep = [
        numpy_helper.from_array(np.array([value], np.int64), name) for name, value in (("o", 0), ("t", 3), ("a", 2))
    ]
    other = helper.make_graph([helper.make_node("Slice", ["x", "o", "t", "a"], ["z"])], "else", [], [result], keep)
    node = outer.graph.node[0]
    node.output[0] = "z"
    then = helper.make_graph([node], "then", [], [result])
    condition = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    del outer.graph.node[:]
    outer.graph.node.append(condition)
    outer.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    for flag in (True, False):
        feeds = {"x": x, "c": np.array(flag)}
        before = np.asarray(forward_session(outer).run(None, feeds)[0])
        copy = ModelProto()
        copy.CopyFrom(outer)
        after = np.asarray(forward_session(upgrade(copy)).run(None, feeds)[0])
        np.testing.assert_array_equal(after, before, strict=True)


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


def test_the_opset_of_a_model_of_another_domain_alone() -> None:
    graph = helper.make_graph(
        [helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft")],
        "contrib",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 2])],
        [numpy_helper.from_array(np.ones((3, 2), np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("com.microsoft", 1)], ir_version=10)
    with pytest.raises(ob.InvalidModelError, match="the model imports no opset of the default domain"):
        default_opset(model)
