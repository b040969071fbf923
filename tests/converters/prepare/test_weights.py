"""Large weights are set aside while a model is prepared, and come back as they were."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnx_backprop as ob
from onnx_backprop.converters.prepare import load as preparation
from onnx_backprop.converters.prepare.large_weights import LARGE, set_aside
from onnx_backprop.converters.prepare.load import prepare
from tests.support.gradient_checks import session_run

SIDE = 70
assert SIDE * SIDE > LARGE


def model(*, ir_version: int = 10, opset: int = 18, overridable: tuple[str, ...] = ()) -> ModelProto:
    """Y = (x · large + small) · last, the two matrices above the limit."""
    rng = np.random.default_rng(2)
    arrays = {
        "large": rng.uniform(-1, 1, (SIDE, SIDE)).astype(np.float32),
        "small": rng.uniform(-1, 1, SIDE).astype(np.float32),
        "last": rng.uniform(-1, 1, (SIDE, SIDE)).astype(np.float32),
        "shape": np.array([-1, SIDE]),
        "unread": np.zeros((SIDE, SIDE), np.float32),
    }
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["rows"]),
        helper.make_node("MatMul", ["rows", "large"], ["product"]),
        helper.make_node("Add", ["product", "small"], ["sum"]),
        helper.make_node("MatMul", ["sum", "last"], ["y"]),
    ]
    listed = arrays if ir_version < 4 else overridable
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, SIDE])] + [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(arrays[n].dtype), arrays[n].shape)
        for n in listed
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", SIDE])]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "weights", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


@pytest.mark.parametrize("overridable", [(), ("large",), ("large", "small", "last")])
@pytest.mark.parametrize("opset", [9, 18])
def test_they_come_back_in_their_places(opset: int, overridable: tuple[str, ...]) -> None:
    original = model(opset=opset, overridable=overridable)
    copy = ModelProto()
    copy.CopyFrom(original)
    prepared = prepare(original)
    assert original == copy, "the caller's model is not touched"
    assert list(prepared.graph.initializer)[:5] == list(original.graph.initializer)
    assert [value.name for value in prepared.graph.input] == ["x", *overridable]


def test_inputs_stand_for_them_meanwhile() -> None:
    light, weights = set_aside(model(overridable=("last",)))
    assert [tensor.name for tensor in light.graph.initializer] == ["small", "shape"]
    assert {value.name for value in light.graph.input} == {"x", "large", "last", "unread"}
    assert light.ByteSize() < 2000
    assert weights.put_back(light) == model(overridable=("last",))


def test_before_ir_version_4_initializers_are_inputs_too() -> None:
    original = model(ir_version=3, opset=9)
    training = ob.backward(original)
    assert [value.name for value in training.graph.output] == ["y", "large_grad", "small_grad", "last_grad"]
    assert [value.name for value in prepare(original).graph.input] == ["x"]
    x = np.random.default_rng(3).uniform(-1, 1, (2, SIDE)).astype(np.float32)
    dy = np.random.default_rng(4).uniform(-1, 1, (2, SIDE)).astype(np.float32)
    large, small, last, *_ = (numpy_helper.to_array(tensor) for tensor in original.graph.initializer)
    (y, *gradients) = session_run(training)({"x": x, "y_grad": dy})
    np.testing.assert_allclose(y, (x @ large + small) @ last, rtol=1e-4, atol=1e-4)
    wanted = [x.T @ (dy @ last.T), (dy @ last.T).sum(0), (x @ large + small).T @ dy]
    for got, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_broken_weight_is_reported_by_name() -> None:
    broken = model()
    broken.graph.initializer[0].raw_data = broken.graph.initializer[0].raw_data[:-4]
    with pytest.raises(ob.InvalidModelError, match="tensor 'large' .* holds 19596 bytes, expected 19600"):
        ob.backward(broken)


def large_linear() -> ModelProto:
    weights = np.random.default_rng(0).standard_normal((80, 80)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 80])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 80])],
        [numpy_helper.from_array(weights, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_a_tensor_that_no_message_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "PROTO_LIMIT", 20_000)
    with pytest.raises(ob.UnsupportedError, match="initializer 'w' has 25600 bytes, expected at most 20000"):
        ob.training_graph(large_linear(), loss="mse", optimizer=ob.optimizers.SGD())


def test_parts_of_a_training_graph_are_inferred_without_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights together may exceed what onnx can read from memory."""
    graph = ob.training_graph(large_linear(), loss="mse", optimizer=ob.optimizers.SGD())
    sizes, real = [], preparation.infer

    def infer(proto: ModelProto) -> ModelProto:
        sizes.append(proto.ByteSize())
        return real(proto)

    monkeypatch.setattr(preparation, "infer", infer)
    exported = graph.inference_model()
    assert sizes
    assert max(sizes) < 4 * 80 * 80
    (weights,) = exported.graph.initializer
    assert weights.name == "w"
