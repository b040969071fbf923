"""Training graphs with an update: groups, state of BatchNormalization, accumulation, the models inside."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, inliner, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.training.optimizers import SGD, AdamW
from tests.converters.training.classifier import batch, network, rate, run


def test_one_graph_takes_and_gives_everything() -> None:
    graph = ob.training_graph(network(), loss="softmax_cross_entropy", optimizer="adamw", training_mode=True)
    parameters = ["layer.scale", "layer.shift", "layer.weight", "layer.bias", "head.weight", "head.bias"]
    assert list(graph.parameters) == parameters
    slots = [f"{p}.{slot}" for p in parameters for slot in ("mean", "square")]
    assert list(graph.updates) == [
        "optimizer_step", *parameters, *slots, "layer.mean", "layer.variance", "random_state",
    ]  # fmt: skip
    names = [value.name for value in graph.model.graph.output]
    assert names == ["loss", "y", *graph.updates.values()]
    assert {f.name for f in graph.model.functions if f.domain == "onnx_backprop.training"} == {"AdamW"}
    state = graph.initial_state()
    result = run(graph.model, batch() | state | {"learning_rate": rate()})
    for name, new in graph.updates.items():
        assert (result[new].shape, result[new].dtype) == (state[name].shape, state[name].dtype)
        # the bias before a BatchNormalization in training mode has no influence
        assert name == "layer.bias" or not np.array_equal(result[new], state[name]), name


def test_gradient_norms_are_those_of_the_gradients() -> None:
    arguments = {"loss": "softmax_cross_entropy", "frozen": ["layer.bias"]}
    plain = ob.training_graph(network(), **arguments)
    graph = ob.training_graph(network(), **arguments, optimizer=SGD(clip_norm=1e-3), gradient_norms=True)
    assert graph.gradient_norms == "gradient_norms"
    gradients = run(plain.model, batch())
    norms = run(graph.model, batch() | graph.initial_state() | {"learning_rate": rate()})["gradient_norms"]
    expected = [np.linalg.norm(gradients[name]) for name in plain.parameters.values()]
    np.testing.assert_allclose(norms, expected, rtol=1e-5)


def test_hyper_parameters_are_inputs_with_defaults() -> None:
    graph = ob.training_graph(network(), loss="softmax_cross_entropy", optimizer=SGD(momentum=0.9, weight_decay=0.1))
    feeds = batch() | graph.initial_state() | {"learning_rate": rate()}
    other = ob.training_graph(network(), loss="softmax_cross_entropy", optimizer=SGD(momentum=0.9, weight_decay=0.5))
    got = run(graph.model, feeds | {"optimizer.weight_decay": np.array(0.5)})
    for name, value in run(other.model, feeds).items():
        np.testing.assert_array_equal(got[name], value)


def test_no_update_copies_what_it_has_computed(tmp_path: Path) -> None:
    """onnxruntime keeps an Identity that writes an output if something else reads its input: a copy of every slot."""
    graph = ob.training_graph(network(), loss="softmax_cross_entropy", optimizer=AdamW())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
    assert len(nodes) > 50
    assert not [node.output[0] for node in nodes if node.op_type == "Identity"]


def test_running_statistics_are_state() -> None:
    graph = ob.training_graph(network(), loss="softmax_cross_entropy", optimizer="sgd", training_mode=True)
    feeds, state = batch(), graph.initial_state()
    result = run(graph.model, feeds | state | {"learning_rate": rate()})
    hidden = feeds["x"] @ state["layer.weight"] + state["layer.bias"]
    np.testing.assert_allclose(result["layer.mean_new"], 0.2 * hidden.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result["layer.variance_new"], 0.8 + 0.2 * hidden.var(axis=0), rtol=1e-5)


def test_a_model_in_inference_mode_is_left_in_it() -> None:
    graph = ob.training_graph(network(), loss="softmax_cross_entropy", optimizer="sgd")
    assert not {"layer.mean", "layer.variance", "random_state"} & set(graph.updates)
    assert "layer.mean" not in graph.parameters
    with pytest.raises(ob.InvalidArgumentError, match=r"'layer.mean' is a running statistic"):
        ob.training_graph(network(), loss="softmax_cross_entropy", trainable=["layer.mean"])


def test_shared_statistics_are_renewed_one_after_the_other() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        twice (float[N, 2] x) => (float[N, 2] y)
        <float[2] s = {1.0, 1.0}, float[2] b = {0.0, 0.0}, float[2] m = {0.0, 0.0}, float[2] v = {1.0, 1.0}>
        {
            a, m1, v1 = BatchNormalization<training_mode = 1, momentum = 0.5>(x, s, b, m, v)
            shifted = Add(a, b)
            y, m2, v2 = BatchNormalization<training_mode = 1, momentum = 0.5>(shifted, s, b, m, v)
        }
    """)
    with pytest.warns(ob.OnnxBackpropWarning, match="'b' is read by a, shifted, y"):
        graph = ob.training_graph(model, loss="mse", optimizer="sgd")
    x = np.array([[1, 2], [3, 8]], np.float32)
    result = run(graph.model, {"x": x, "target": x, "learning_rate": rate()} | graph.initial_state())
    np.testing.assert_allclose(result["m_new"], 0.25 * x.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(result["v_new"], 0.5 * (0.5 + 0.5 * x.var(axis=0)) + 0.5, rtol=1e-4)


def test_statistics_that_are_inputs_are_refused() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        own (float[N, 2] x, float[2] m) => (float[N, 2] y) <float[2] s = {1.0, 1.0}, float[2] v = {1.0, 1.0}>
        { [norm] y, m1, v1 = BatchNormalization<training_mode = 1>(x, s, s, m, v) }
    """)
    with pytest.raises(ob.UnsupportedError, match="BatchNormalization 'norm': its running statistics are inputs"):
        ob.training_graph(model, loss="mse", optimizer="sgd")


@pytest.mark.parametrize("training_mode", [False, True])
def test_eval_model_is_the_model_in_inference_mode(training_mode: bool) -> None:
    graph = ob.training_graph(
        network(training=1), loss="softmax_cross_entropy", optimizer="adamw", training_mode=training_mode
    )
    twin = graph.eval_model()
    assert [v.name for v in twin.graph.output] == ["loss", "y"]
    assert {node.op_type for node in twin.graph.node} >= {"BatchNormalization", "Gemm"}
    assert not [f for f in twin.functions if f.domain == "onnx_backprop.training"]
    expected = run(network(), {"x": batch()["x"]})["y"]
    result = run(twin, batch())
    np.testing.assert_allclose(result["y"], expected, rtol=1e-5, atol=1e-6)
    shifted = expected - expected.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(result["loss"], -np.mean(log_p[np.arange(6), batch()["labels"]]), rtol=1e-5)
    fed = run(twin, batch() | {"head.bias": np.array([1, 2, 3], np.float32)})["y"]
    old = numpy_helper.to_array(network().graph.initializer[-1])
    np.testing.assert_allclose(fed, expected + np.array([1, 2, 3]) - old, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_inference_model_is_the_plain_model_with_other_weights(accumulate: int) -> None:
    graph = ob.training_graph(
        network(training=1), loss="softmax_cross_entropy", optimizer=AdamW(accumulate=accumulate), training_mode=True
    )
    values = {"head.bias": np.array([1, 2, 3], np.float32), "layer.mean": np.ones(5, np.float32)}
    model = graph.inference_model(values)
    source = network()
    assert [v.name for v in model.graph.input] == ["x"]
    assert [v.name for v in model.graph.output] == ["y"]
    assert model.graph.name == "classifier"
    assert {p.key: p.value for p in model.metadata_props} == {"author": "somebody"}
    assert {o.domain for o in model.opset_import} == {""}
    assert not model.functions
    for tensor in source.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
    x = {"x": batch()["x"]}
    np.testing.assert_allclose(run(model, x)["y"], run(source, x)["y"], rtol=1e-5, atol=1e-6)
    with pytest.raises(ob.InvalidArgumentError, match="expected names of parameters or statistics, got 'head'"):
        graph.inference_model({"head": np.ones(3)})
    with pytest.raises(ob.InvalidArgumentError, match=r"'head.bias' has shape \(3,\), got an array of \(4,\)"):
        graph.inference_model({"head.bias": np.ones(4)})


def test_saved_and_loaded(tmp_path: Path) -> None:
    graph = ob.training_graph(network(), loss="softmax_cross_entropy", optimizer=AdamW(ema=0.9), training_mode=True)
    graph.save(tmp_path / "training.onnx")
    loaded = ob.TrainingGraph.load(tmp_path / "training.onnx")
    assert loaded == graph
    onnx.save(network(), tmp_path / "plain.onnx")
    with pytest.raises(ob.InvalidArgumentError, match="the model is no training graph"):
        ob.TrainingGraph.load(tmp_path / "plain.onnx")


def test_summary() -> None:
    graph = ob.training_graph(
        network(), loss="softmax_cross_entropy", frozen=["layer.weight"], optimizer="sgd", training_mode=True
    )
    text = str(graph)
    assert re.search(r"head\.weight +5×3 +15 +23\.8% +trained", text)
    assert re.search(r"layer\.weight +4×5 +20 +31\.7% +frozen", text)
    assert re.search(r"layer\.mean +5 +5 +7\.9% +statistic", text)
    assert text.endswith("5 parameters trained, 1 frozen; numbers: 33 trained, 20 frozen, 10 statistic (52.4% trained)")


def test_half_parameters_are_updated_in_float32() -> None:
    """A state of float32, and a step too small for float16 arithmetic on the way to be lost in it."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        half (float16[N, 2] x) => (float16[N, 2] y)
        { y = Mul(x, gain) }
    """)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2], np.float16), "gain"))
    graph = ob.training_graph(model, loss="mse", optimizer=SGD(momentum=0.9, weight_decay=0.01))
    state = graph.initial_state()
    assert state["gain.momentum"].dtype == np.float32
    x = np.array([[1, 2], [3, 4]], np.float16)
    result = run(graph.model, {"x": x, "target": 0 * x, "learning_rate": rate(1e-2)} | state)
    g = np.mean(x.astype(float) ** 2, axis=0) * [1, 2] + 0.01 * np.array([1, 2])
    np.testing.assert_allclose(result["gain.momentum_new"], g, rtol=1e-3)
    assert result["gain_new"].dtype == np.float16
    np.testing.assert_allclose(result["gain_new"], np.array([1, 2]) - 1e-2 * g, rtol=1e-3)


def test_accumulation_renews_in_every_kth_run_only() -> None:
    optimizer = SGD(accumulate=2)
    graph = ob.training_graph(network(), loss="softmax_cross_entropy", optimizer=optimizer)
    state, feeds = graph.initial_state(), batch() | {"learning_rate": rate()}
    first = run(graph.model, feeds | state)
    np.testing.assert_array_equal(first["head.bias_new"], state["head.bias"])
    assert np.abs(first["head.bias.accumulated_new"]).max() > 0
    assert (first["micro_step_new"], first["optimizer_step_new"]) == (1, 0)
    middle = {name: first[new] for name, new in graph.updates.items()}
    second = run(graph.model, feeds | middle)
    assert (second["micro_step_new"], second["optimizer_step_new"]) == (0, 1)
    np.testing.assert_array_equal(second["head.bias.accumulated_new"], np.zeros(3))
    plain = ob.training_graph(network(), loss="softmax_cross_entropy", optimizer=SGD())
    expected = run(plain.model, feeds | plain.initial_state())
    np.testing.assert_allclose(second["head.bias_new"], expected["head.bias_new"], rtol=1e-6)


def test_names_of_state_that_are_taken_get_a_number() -> None:
    model = network()
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "head.bias.momentum"))
    model.graph.node.append(helper.make_node("Add", ["y", "head.bias.momentum"], ["z"]))
    model.graph.output[0].name = "z"
    graph = ob.training_graph(model, loss="softmax_cross_entropy", optimizer=SGD(momentum=0.5))
    assert {"head.bias.momentum", "head.bias.momentum_2", "head.bias.momentum.momentum"} <= set(graph.updates)
    run(graph.model, batch() | graph.initial_state() | {"learning_rate": rate()})


def test_numbers_of_an_update_have_as_many_axes_as_the_tensors() -> None:
    """Else onnxruntime takes 70 times as long where the last axes have length 1."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2,3,4,4] x) => (float[2,5,4,4] y) <float[5,3,1,1] w, float[5] b> { y = Conv(x, w, b) }""")
    for shape, name in (((5, 3, 1, 1), "w"), ((5,), "b")):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    kinds = [AdamW(clip_norm=1.0, ema=0.9), SGD(momentum=0.9, weight_decay=0.1, clip_value=1.0, accumulate=2)]
    for optimizer in kinds:
        graph = ob.training_graph(model, loss="mse", optimizer=optimizer)
        proto = onnx.shape_inference.infer_shapes(inliner.inline_local_functions(graph.model), data_prop=True)
        nodes, values = [*proto.graph.node], [*proto.graph.value_info, *proto.graph.input, *proto.graph.output]
        for inner in (a.g for n in proto.graph.node if n.op_type == "If" for a in n.attribute):
            nodes, values = [*nodes, *inner.node], [*values, *inner.value_info, *inner.output]
        rank = {v.name: len(v.type.tensor_type.shape.dim) for v in values}
        rank |= {t.name: len(t.dims) for t in proto.graph.initializer}
        rank |= {n.output[0]: len(n.attribute[0].t.dims) for n in nodes if n.op_type == "Constant"}
        seen = [n for n in nodes if n.op_type in ("Add", "Sub", "Mul", "Div") and rank[n.output[0]] == 4]
        mixed = [n for n in seen if {rank[i] for i in n.input} != {4}]
        assert len(seen) > 5
        assert mixed == []
