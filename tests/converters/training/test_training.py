"""training_graph: what the graph takes and gives, what it leaves out, what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.reverse import registry
from tests.support.gradient_checks import float64_run, retyped
from tests.support.numeric import central_differences, outputs

SEED = 4711


def network(dtype: type = np.float32) -> ModelProto:
    """y = conv2(relu(conv1(x))) · gain, and an integer output beside it; weights from a fixed seed."""
    rng = np.random.default_rng(SEED)
    shapes = {"w1": (3, 1, 3, 3), "b1": (3,), "w2": (2, 3, 3, 3), "b2": (2,), "gain": (2, 1, 1)}
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], name="first", pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu"),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], name="second", pads=[1] * 4),
        helper.make_node("Mul", ["c2", "gain"], ["y"], name="scale"),
        helper.make_node("Shape", ["y"], ["size"], name="shape"),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", element, ["N", 1, "H", "W"])],
        [
            helper.make_tensor_value_info("size", TensorProto.INT64, [4]),
            helper.make_tensor_value_info("y", element, ["N", 2, "H", "W"]),
        ],
        [numpy_helper.from_array(rng.standard_normal(shape).astype(dtype) / 2, name) for name, shape in shapes.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def batch(dtype: type = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED + 1)
    return {
        "x": rng.standard_normal((2, 1, 4, 5)).astype(dtype),
        "target": rng.standard_normal((2, 2, 4, 5)).astype(dtype),
    }


def required_inputs(model: ModelProto) -> list[str]:
    optional = {tensor.name for tensor in model.graph.initializer}
    return [value.name for value in model.graph.input if value.name not in optional]


def output_names(model: ModelProto) -> list[str]:
    return [value.name for value in model.graph.output]


def test_inputs_and_outputs() -> None:
    model = network()
    before = model.SerializeToString()
    graph = ob.training_graph(model, loss="mse")
    assert model.SerializeToString() == before
    onnx.checker.check_model(graph.model, full_check=True)
    onnx.shape_inference.infer_shapes(graph.model, check_type=True, strict_mode=True, data_prop=True)
    names = ["w1", "b1", "w2", "b2", "gain"]
    assert graph.parameters == {name: f"{name}_grad" for name in names}
    assert output_names(graph.model) == ["loss", "size", "y", *graph.parameters.values()]
    assert [value.name for value in graph.model.graph.input] == ["x", "target", *names]
    assert graph.inputs == ("x", "target") == tuple(required_inputs(graph.model))
    assert (graph.loss, graph.target) == ("loss", "target")
    np.testing.assert_array_equal(ob.session(graph.model).run(["size"], batch())[0], [2, 2, 4, 5])


def test_gradients_against_finite_differences() -> None:
    """Of the loss in float64, by onnx's reference evaluator."""
    feeds = batch()
    got = outputs(ob.training_graph(network(), loss="mse").model, feeds)
    double = retyped(network(), TensorProto.DOUBLE)
    exact = {name: x.astype(np.float64) for name, x in feeds.items()}
    for tensor in double.graph.initializer:

        def loss(value: np.ndarray, tensor: TensorProto = tensor) -> float:
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
            return float(np.mean((float64_run(double)({"x": exact["x"]})[-1] - exact["target"]) ** 2))

        start = numpy_helper.to_array(tensor)
        expected = central_differences(loss, start)
        tensor.CopyFrom(numpy_helper.from_array(start, tensor.name))
        message = f"{tensor.name}, seed {SEED}"
        np.testing.assert_allclose(got[f"{tensor.name}_grad"], expected, rtol=1e-5, atol=1e-6, err_msg=message)
        np.testing.assert_allclose(got["loss"], loss(start), rtol=1e-6)


def test_parameters_can_be_fed_or_left_at_their_defaults() -> None:
    model = network()
    graph = ob.training_graph(model, loss="mse")
    values = graph.initial_values()
    assert list(values) == list(graph.parameters)
    for tensor in model.graph.initializer:
        np.testing.assert_array_equal(values[tensor.name], numpy_helper.to_array(tensor), strict=True)
    default = outputs(graph.model, batch())
    fed = outputs(graph.model, batch() | values)
    for name, array in default.items():
        np.testing.assert_array_equal(fed[name], array)
    values["gain"] *= 2
    doubled = outputs(graph.model, batch() | values)
    np.testing.assert_allclose(doubled["y"], 2 * default["y"], rtol=1e-5)
    assert abs(doubled["loss"] - default["loss"]) > 1e-2


def test_initializers_that_are_inputs_already_need_not_be_fed() -> None:
    model = network()
    for name, shape in (("gain", [2, 1, 1]), ("w1", [3, 1, 3, 3])):
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    graph = ob.training_graph(model, loss="mse", frozen=["w1"])
    onnx.checker.check_model(graph.model, full_check=True)
    assert graph.inputs == ("x", "target") == tuple(required_inputs(graph.model))
    assert list(graph.parameters) == ["b1", "w2", "b2", "gain"]
    plain = outputs(ob.training_graph(network(), loss="mse").model, batch())
    for name, array in outputs(graph.model, batch()).items():
        np.testing.assert_array_equal(array, plain[name])


def test_training_finds_the_least_squares_solution() -> None:
    rng = np.random.default_rng(SEED)
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        line (float[N, 2] x) => (float[N, 2] y) <float[2] slope = {0.0, 0.0}, float[2] offset = {0.0, 0.0}>
        { scaled = Mul(x, slope)  y = Add(scaled, offset) }
    """)
    graph = ob.training_graph(model, loss="mse")
    session = ob.session(graph.model)
    x = rng.standard_normal((32, 2)).astype(np.float32)
    target = (x * [3.0, -2.0] + [0.5, 1.0] + 0.1 * rng.standard_normal(x.shape)).astype(np.float32)
    values = graph.initial_values()
    for _ in range(200):
        gradients = session.run(list(graph.parameters.values()), {"x": x, "target": target, **values})
        for name, gradient in zip(graph.parameters, gradients, strict=True):
            values[name] = values[name] - np.float32(0.5) * np.asarray(gradient)
    for column in range(2):
        slope, offset = np.polyfit(x[:, column].astype(np.float64), target[:, column].astype(np.float64), 1)
        np.testing.assert_allclose(values["slope"][column], slope, atol=1e-4, err_msg=f"seed {SEED}")
        np.testing.assert_allclose(values["offset"][column], offset, atol=1e-4, err_msg=f"seed {SEED}")


def op_types(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == ob.DOMAIN]


def test_frozen_parameters_cost_nothing() -> None:
    graph = ob.training_graph(network(), loss="mse", frozen=["w1", "b1"])
    assert list(graph.parameters) == ["w2", "b2", "gain"]
    assert sorted(op_types(graph.model)) == ["BiasAddBackward", "BiasAddBackward", "ConvolutionBackwardWeights"]
    assert [value.name for value in graph.model.graph.input] == ["x", "target", "w2", "b2", "gain"]
    everything = outputs(ob.training_graph(network(), loss="mse").model, batch())
    for name, array in outputs(graph.model, batch()).items():
        np.testing.assert_array_equal(array, everything[name])


def test_trainable_keeps_the_order_given() -> None:
    graph = ob.training_graph(network(), loss="l1", trainable=["b2", "w1"])
    assert list(graph.parameters) == ["b2", "w1"]
    assert output_names(graph.model) == ["loss", "size", "y", "b2_grad", "w1_grad"]


def test_frozen_beside_trainable_may_repeat_what_is_left_out() -> None:
    graph = ob.training_graph(network(), loss="mse", trainable=["w2"], frozen=["w1", "b1"])
    assert list(graph.parameters) == ["w2"]


def test_an_initializer_without_gradient_is_no_parameter_by_default() -> None:
    model = upsampling_model()
    with pytest.warns(ob.OnnxBackpropWarning, match=r"^1 of the 5 numbers .*: 'scales' \(4, "):
        graph = ob.training_graph(model, loss="mse")
    assert list(graph.parameters) == ["gain"]
    with pytest.raises(ob.InvalidArgumentError, match=r"trainable: 'scales' does not influence loss"):
        ob.training_graph(model, loss="mse", trainable=["scales"])
    with pytest.raises(ob.InvalidArgumentError, match="trainable: no float initializer of the rest"):
        ob.training_graph(model, loss="mse", frozen=["gain", "scales"])
    with pytest.raises(ob.InvalidArgumentError, match="trainable: no float initializer of the rest"):
        ob.training_graph(model, loss="mse", frozen=["gain"])


def upsampling_model() -> ModelProto:
    return parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        up (float[1, 1, 2, 2] x) => (float[1, 1, 4, 4] y)
        <float[1] gain = {2.0}, float[4] scales = {1.0, 1.0, 2.0, 2.0}>
        { scaled = Mul(x, gain)  y = Resize<mode = "nearest">(scaled, , scales) }
    """)


def scalar_loss_model(shape: str = "float", axes: str = "keepdims = 0") -> ModelProto:
    return parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        own (float[N, 2] x) => (float[N, 2] y, {shape} cost, float[2] gain_copy)
        <float[2] gain = {{1.0, 2.0}}>
        {{ y = Mul(x, gain)  cost = ReduceMean<{axes}>(y)  gain_copy = Identity(gain) }}
    """)


@pytest.mark.parametrize(("shape", "axes"), [("float", "keepdims = 0"), ("float[1, 1]", "keepdims = 1")])
def test_a_model_with_its_own_loss(shape: str, axes: str) -> None:
    graph = ob.training_graph(scalar_loss_model(shape, axes), prediction="cost")
    onnx.checker.check_model(graph.model, full_check=True)
    assert (graph.loss, graph.target, graph.inputs) == ("cost", None, ("x",))
    assert output_names(graph.model) == ["cost", "y", "gain_copy", "gain_grad"]
    x = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
    result = outputs(graph.model, {"x": x})
    np.testing.assert_allclose(np.squeeze(result["cost"]), np.mean(x * [1.0, 2.0]))
    np.testing.assert_allclose(result["gain_grad"], x.sum(axis=0) / 4)


def test_prediction_chooses_among_outputs() -> None:
    model = scalar_loss_model()
    graph = ob.training_graph(model, loss="mse", prediction="y")
    assert output_names(graph.model) == ["loss", "y", "cost", "gain_copy", "gain_grad"]


def rename(model: ModelProto, old: str, new: str) -> ModelProto:
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = new if value.name == old else value.name
    return model


def test_names_that_are_taken_get_a_number() -> None:
    model = rename(rename(network(), "x", "target"), "y", "loss")
    graph = ob.training_graph(model, loss="mse")
    onnx.checker.check_model(graph.model, full_check=True)
    assert (graph.inputs, graph.target, graph.loss) == (("target", "target_2"), "target_2", "loss_2")
    feeds = batch()
    renamed = outputs(graph.model, {"target": feeds["x"], "target_2": feeds["target"]})
    plain = outputs(ob.training_graph(network(), loss="mse").model, feeds)
    np.testing.assert_array_equal(renamed["loss_2"], plain["loss"])
    np.testing.assert_array_equal(renamed["w1_grad"], plain["w1_grad"])


def test_float16_network() -> None:
    graph = ob.training_graph(network(np.float16), loss="mse")
    onnx.checker.check_model(graph.model, full_check=True)
    got = outputs(graph.model, batch(np.float16))
    expected = outputs(ob.training_graph(network(), loss="mse").model, batch())
    assert got["loss"].dtype == np.float32
    for name in graph.parameters.values():
        assert got[name].dtype == np.float16
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-2, atol=1e-2 * scale, err_msg=f"seed {SEED}")
    assert {array.dtype for array in graph.initial_values().values()} == {np.dtype(np.float16)}


def test_progress_sees_the_nodes_on_the_way() -> None:
    seen: list[str] = []

    def watch(nodes: Sequence[ir.Node]) -> Sequence[ir.Node]:
        seen.extend(node.op_type for node in nodes)
        return nodes

    ob.training_graph(network(), loss="mse", progress=watch)
    assert seen[-4:] == ["Mul", "Conv", "Relu", "Conv"]


def test_save_writes_the_model(tmp_path: Path) -> None:
    graph = ob.training_graph(network(), loss="mse")
    graph.save(tmp_path / "training.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["training.onnx"]
    got = ob.session(tmp_path / "training.onnx").run(["loss"], batch())[0]
    np.testing.assert_array_equal(got, outputs(graph.model, batch())["loss"])


def test_model_may_be_a_path(tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "network.onnx")
    from_path = ob.training_graph(tmp_path / "network.onnx", loss="mse")
    assert from_path.model == ob.training_graph(network(), loss="mse").model


def test_nothing_to_train_names_what_the_model_is_made_of() -> None:
    opsets = '<ir_version: 8, opset_import: ["" : 18, "ai.onnx.ml" : 1]>'
    plain = parser.parse_model(f"{opsets} g (float[n, 2] x) => (float[n, 2] y) {{ [act] y = Tanh(x) }}")
    with pytest.raises(ob.InvalidArgumentError, match=r"Tanh 'act'.* hold none\. backward\(model, wrt=\[…\]\)"):
        ob.training_graph(plain, loss="mse")
    with pytest.raises(
        ob.InvalidArgumentError, match=r"Tanh 'act' and what follows hold none; name graph inputs \(x\)"
    ):
        ob.backward(plain)
    stopped = parser.parse_model(f"{opsets} g (float[n, 2] x) => (float[n, 2] y) {{ [act] y = Sign(x) }}")
    with pytest.raises(ob.InvalidArgumentError, match="Sign 'act' stops it .*Choose an output that depends on weights"):
        ob.training_graph(stopped, loss="mse")


REFUSED = {
    "unknown trainable": ({"loss": "mse", "trainable": ["w11"]}, r"trainable: .*got 'w11'\. Did you mean 'w1'"),
    "unknown frozen": ({"loss": "mse", "frozen": ["gian"]}, r"frozen: .*got 'gian'\. Did you mean 'gain'"),
    "a graph input": (
        {"loss": "mse", "trainable": ["x"], "optimizer": "sgd"},
        r"trainable: 'x' is an input of the model, which no step renews. wrt_inputs=\['x'\] gives the gradient by it",
    ),
    "a graph input beside a weight": ({"loss": "mse", "trainable": ["w1", "x"]}, r"wrt_inputs=\['x'\] gives"),
    "wrt_inputs: a weight": ({"loss": "mse", "wrt_inputs": ["w1"]}, "wrt_inputs: expected the name of an input .*'w1'"),
    "wrt_inputs: a string": ({"loss": "mse", "wrt_inputs": "x"}, r"wrt_inputs: expected a list.*\['x'\]"),
    "wrt_inputs: twice": ({"loss": "mse", "wrt_inputs": ["x", "x"]}, "wrt_inputs: 'x' is given twice"),
    "unknown stop": (
        {"loss": "mse", "stop": ["w11"]},
        r"stop: expected the name of a value or node of the graph, got 'w11'",
    ),
    "in both lists": ({"loss": "mse", "trainable": ["w1", "b1"], "frozen": ["b1"]}, "'b1' in both lists"),
    "given twice": ({"loss": "mse", "trainable": ["w1", "w1"]}, "trainable: 'w1' is given twice"),
    "a string": ({"loss": "mse", "trainable": "w1"}, r"trainable: expected a list.*\['w1'\]"),
    "a string, frozen": ({"loss": "mse", "frozen": "w1"}, r"frozen: expected a list.*\['w1'\]"),
    "an empty list": ({"loss": "mse", "trainable": []}, "trainable: expected at least one name"),
    "everything frozen": (
        {"loss": "mse", "frozen": ["w1", "b1", "w2", "b2", "gain"]},
        "no float initializer of the rest influences loss",
    ),
    "unknown prediction": ({"loss": "mse", "prediction": "yy"}, r"prediction: .*got 'yy'\. Did you mean 'y'"),
    "integer prediction": ({"loss": "mse", "prediction": "size"}, "prediction: 'size' has type INT64"),
    "loss of many elements": ({}, r"'y' is the loss and must have one element, got shape \(N, 2, .*\)"),
    "unknown loss": ({"loss": "MSE"}, "loss: expected None or one of 'mse'"),
    "unknown kernels": ({"loss": "mse", "kernels": "nump"}, "kernels: expected one of 'onnx', 'numpy'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arguments(case: str) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.training_graph(network(), **arguments)


def test_several_outputs_are_listed() -> None:
    with pytest.raises(ob.InvalidArgumentError, match=r"3 float outputs, 'y', 'cost', 'gain_copy'"):
        ob.training_graph(scalar_loss_model(), loss="mse")


def test_no_float_output() -> None:
    model = network()
    del model.graph.output[1]
    with pytest.raises(ob.InvalidModelError, match="no float output"):
        ob.training_graph(model, loss="mse")


def test_integer_trainable() -> None:
    model = network()
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "steps"))
    with pytest.raises(ob.InvalidArgumentError, match="trainable: 'steps' has type INT64"):
        ob.training_graph(model, loss="mse", trainable=["steps"])


def test_unknown_optimizer() -> None:
    with pytest.raises(ob.InvalidArgumentError, match=r"optimizer: .*got 'adan'\. Did you mean 'adam'"):
        ob.training_graph(network(), loss="mse", optimizer="adan")


def test_missing_rules_are_listed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in registry.RULES if key[1] in ("Exp", "Tanh")]:
        monkeypatch.delitem(registry.RULES, key)
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        smooth (float[N, 2] x) => (float[N, 2] y) <float[2] gain = {1.0, 2.0}>
        { a = Mul(x, gain)  [first_node] b = Exp(a)  [second_node] c = Tanh(b)  y = Mul(c, b) }
    """)
    with pytest.raises(ob.UnsupportedOpError, match=r"(?s)Exp: 'first_node'.*Tanh: 'second_node'"):
        ob.training_graph(model, loss="mse")
