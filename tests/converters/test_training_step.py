"""Training graphs with an update: selection, groups, state of BatchNormalization and Dropout, the models inside."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.losses import LossBuilder
from onnx_backprop.converters.optimizers import SGD, AdamW, Group

SEED = 77


def network(*, training: int = 0, element: str = "float") -> ModelProto:
    """Gemm, BatchNormalization, Relu, Dropout, Gemm; one metadata entry."""
    ones = ", ".join(["1.0"] * 5)
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        classifier ({element}[N, 4] x) => ({element}[N, 3] y)
        <{element}[5] layer__scale = {{1.0, 2.0, 3.0, 4.0, 5.0}}, {element}[5] layer__shift = {{{ones}}},
         {element}[5] layer__mean = {{{ones.replace("1", "0")}}}, {element}[5] layer__variance = {{{ones}}},
         float ratio = {{0.5}}, bool mode = {{{training}}}>
        {{
            hidden = Gemm(x, layer__weight, layer__bias)
            normal = BatchNormalization<training_mode = 0, momentum = 0.8>
                (hidden, layer__scale, layer__shift, layer__mean, layer__variance)
            positive = Relu(normal)
            [drop] kept = Dropout(positive, ratio, mode)
            y = Gemm(kept, head__weight, head__bias)
        }}
    """)
    model.metadata_props.add(key="author", value="somebody")
    for part in (*model.graph.node, *model.graph.initializer):
        if isinstance(part, onnx.NodeProto):
            part.input[:] = [name.replace("__", ".") for name in part.input]
        else:
            part.name = part.name.replace("__", ".")
    kind = np.float32 if element == "float" else np.float64
    rng = np.random.default_rng(SEED)
    shapes = {"layer.weight": (4, 5), "layer.bias": (5,), "head.weight": (5, 3), "head.bias": (3,)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(kind), name))
    return model


def batch(rows: int = 6, dtype: type = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED + 1)
    return {"x": rng.standard_normal((rows, 4)).astype(dtype), "labels": rng.integers(0, 3, rows)}


def run(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    session = ob.session(model, kernels=None)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, map(np.asarray, session.run(names, dict(feeds))), strict=True))


def rate(value: float = 0.1) -> np.ndarray:
    return np.array(value, np.float32)


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
    graph = ob.training_graph(model, loss="mse", optimizer="sgd")
    x = np.array([[1, 2], [3, 8]], np.float32)
    result = run(graph.model, {"x": x, "target": x, "learning_rate": rate()} | graph.initial_state())
    np.testing.assert_allclose(result["m_new"], 0.25 * x.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(result["v_new"], 0.5 * (0.5 + 0.5 * x.var(axis=0)) + 0.5, rtol=1e-4)


def test_computed_statistics_are_refused() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        own (float[N, 2] x, float[2] m) => (float[N, 2] y) <float[2] s = {1.0, 1.0}, float[2] v = {1.0, 1.0}>
        { [norm] y, m1, v1 = BatchNormalization<training_mode = 1>(x, s, s, m, v) }
    """)
    with pytest.raises(ob.UnsupportedError, match="BatchNormalization 'norm': its running statistics are computed"):
        ob.training_graph(model, loss="mse", optimizer="sgd")


def dropout_step(ratio: float, size: int = 40_000) -> tuple[ob.TrainingGraph, Any]:
    """y = dropout(x · gain), one gain for each element, and a function that gives the mask of a seed and a run."""
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        drops (float[{size}] x) => (float[{size}] y) <float ratio = {{{float(ratio)}}}, bool mode = {{1}}>
        {{ scaled = Mul(x, gain)  y = Dropout(scaled, ratio, mode) }}
    """)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(size, np.float32), "gain"))
    graph = ob.training_graph(model, loss="mse", optimizer="sgd", trainable=["gain"])
    session = ob.session(graph.model, kernels=None)
    x = np.ones(size, np.float32)

    def step(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        feeds = {"x": x, "target": 0 * x, "learning_rate": rate(size / 2), **graph.initial_state()}
        y, gain = session.run(["y", "gain_new"], feeds | {"random_state": np.array([seed, count])})
        return np.asarray(y), np.asarray(gain)

    return graph, step


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_dropout_drops_its_share_and_scales_the_rest(ratio: float) -> None:
    _, step = dropout_step(ratio)
    y, gain = step(1, 2)
    kept = y != 0
    assert abs(kept.mean() - (1 - ratio)) < 5 * np.sqrt(max(ratio * (1 - ratio), 1e-9) / y.size) + 1e-9
    scale = 1 / (1 - ratio) if ratio < 1 else 0.0
    np.testing.assert_allclose(y[kept], scale, rtol=1e-6)
    # loss = mean y², d/dgain = 2 y · scale / size where kept: the gradient drops what this run dropped
    np.testing.assert_allclose(gain, np.where(kept, 1 - scale**2, 1), rtol=1e-4, atol=1e-4)


def test_dropout_masks_are_a_function_of_seed_and_run() -> None:
    graph, step = dropout_step(0.5)
    masks = {(seed, count): step(seed, count)[0] != 0 for seed in (0, 1) for count in (0, 1, 2)}
    np.testing.assert_array_equal(masks[0, 1], step(0, 1)[0] != 0)
    signs = {key: 2.0 * mask - 1 for key, mask in masks.items()}
    limit = 5 / np.sqrt(40_000)
    for key, a in signs.items():
        for other, b in signs.items():
            assert key == other or abs(np.mean(a * b)) < limit, (key, other)
        for lag in (1, 2, 3, 8, 64, 1000):  # neither neighbours nor rows of an image go together
            assert abs(np.mean(a[lag:] * a[:-lag])) < limit, (key, lag)
    first, second = signs[0, 0], signs[0, 1]
    assert max(abs(np.mean(first[n:] * second[: len(first) - n])) for n in range(1, 200)) < limit
    state = graph.initial_state() | {"random_state": np.array([7, 41])}
    x = np.ones(40_000, np.float32)
    assert list(run(graph.model, {"x": x, "target": x, "learning_rate": rate()} | state)["random_state_new"]) == [7, 42]


def test_two_dropouts_draw_different_masks() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        drops (float[1000] x) => (float[1000] y, float[1000] z) <float[1] gain = {1.0}, bool mode = {1}>
        { scaled = Mul(x, gain)  y = Dropout(scaled, , mode)  z = Dropout(scaled, , mode) }
    """)
    graph = ob.training_graph(model, loss="mse", prediction="y", optimizer="sgd")
    x = np.ones(1000, np.float32)
    result = run(graph.model, {"x": x, "target": x, "learning_rate": rate()} | graph.initial_state())
    assert 0.4 < np.mean((result["y"] > 0) == (result["z"] > 0)) < 0.6


def test_a_mask_that_is_read_is_refused() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        drops (float[4] x) => (float[4] y, bool[4] mask) <float[1] gain = {1.0}, bool mode = {1}>
        { scaled = Mul(x, gain)  [drop] y, mask = Dropout(scaled, , mode) }
    """)
    with pytest.raises(ob.UnsupportedError, match="Dropout 'drop': its mask is read"):
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


SELECTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "glob": ({"trainable": ["head.*"]}, ["head.weight", "head.bias"]),
    "regex": ({"trainable": [r"re:.*\.weight"]}, ["layer.weight", "head.weight"]),
    "compiled": ({"trainable": [re.compile(r"head\.\w+")]}, ["head.weight", "head.bias"]),
    "names and patterns": ({"trainable": ["head.bias", "*.weight"]}, ["head.bias", "layer.weight", "head.weight"]),
    "a glob leaves statistics out": (
        {"trainable": ["layer.*"]}, ["layer.scale", "layer.shift", "layer.weight", "layer.bias"],
    ),
    "frozen glob": ({"frozen": ["layer.*"]}, ["head.weight", "head.bias"]),
    "frozen out of trainable": ({"trainable": ["*.weight"], "frozen": ["layer.*"]}, ["head.weight"]),
    "frozen group": (
        {"optimizer": SGD(groups=[Group(parameters=["layer.*"], frozen=True)])}, ["head.weight", "head.bias"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SELECTIONS)
def test_selection(case: str) -> None:
    arguments, expected = SELECTIONS[case]
    graph = ob.training_graph(network(), loss="softmax_cross_entropy", **arguments)
    assert list(graph.parameters) == expected
    everything = {"layer.scale", "layer.shift", "layer.weight", "layer.bias", "head.weight", "head.bias"}
    assert set(graph.frozen) == everything - set(expected)


NOT_FOUND = {
    "glob": ({"trainable": ["haed.*"]}, r"trainable: 'haed\.\*' matches no initializer\. (Did you mean|There are)"),
    "near miss of a glob": ({"trainable": ["head.weigth*"]}, r"matches no initializer\. Did you mean 'head.weight'"),
    "frozen regex": ({"frozen": ["re:body.*"]}, r"frozen: 're:body\.\*' matches no initializer"),
    "bad regex": ({"frozen": ["re:("]}, r"frozen: 're:\(' is not a regular expression"),
    "everything frozen": ({"trainable": ["head.*"], "frozen": ["*"]}, "frozen leaves nothing"),
    "group": (
        {"optimizer": SGD(groups=[Group(parameters=["heads"])])},
        r"groups\[0\]\.parameters: .*got 'heads'",
    ),
}


@pytest.mark.parametrize("case", NOT_FOUND)
def test_nothing_found(case: str) -> None:
    arguments, message = NOT_FOUND[case]
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.training_graph(network(), loss="softmax_cross_entropy", **arguments)


def test_summary() -> None:
    graph = ob.training_graph(
        network(), loss="softmax_cross_entropy", frozen=["layer.weight"], optimizer="sgd", training_mode=True
    )
    text = str(graph)
    assert re.search(r"head\.weight +5×3 +15 +trained", text)
    assert re.search(r"layer\.weight +4×5 +20 +frozen", text)
    assert re.search(r"layer\.mean +5 +5 +statistic", text)
    assert text.endswith("5 parameters trained, 1 frozen; elements: 33 trained, 20 frozen, 10 statistic")


def relative(op: LossBuilder, outputs: Mapping[str, ir.Value]) -> ir.Value:
    y = outputs["y"]
    t, w = op.input("truth", y), op.input("importance", dtype=ir.DataType.FLOAT, shape=("N", 1))
    return op.ReduceMean(op.Mul(w, op.Abs(op.Sub(y, t))), keepdims=0)


def test_loss_that_is_a_callable() -> None:
    graph = ob.training_graph(network(), loss=relative, trainable=["head.bias"])
    assert graph.inputs == ("x", "truth", "importance")
    assert graph.target == "truth"
    rng = np.random.default_rng(SEED)
    x, t, w = batch()["x"], rng.standard_normal((6, 3)).astype(np.float32), rng.random((6, 1)).astype(np.float32)
    result = run(graph.model, {"x": x, "truth": t, "importance": w})
    np.testing.assert_allclose(result["loss"], np.mean(w * np.abs(result["y"] - t)), rtol=1e-5)
    np.testing.assert_allclose(
        result["head.bias_grad"], np.sum(w * np.sign(result["y"] - t), axis=0) / 18, rtol=1e-5, atol=1e-7
    )
    assert [v.name for v in graph.inference_model().graph.input] == ["x"]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda op, outputs: op.Mul(outputs["y"], outputs["y"]), "must have one element"),
        (lambda *_: 3, "must return a value of the graph, got 3"),
    ],
)
def test_callables_that_are_refused(loss: Any, message: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.training_graph(network(), loss=loss)


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


REFUSED_NUMBERS = {
    "momentum": (lambda: SGD(momentum=1.0), r"SGD: momentum: expected 0 or more and less than 1, got 1.0"),
    "nesterov": (lambda: SGD(nesterov=True), "SGD: nesterov: expected a momentum above 0"),
    "decay": (lambda: AdamW(weight_decay=-1), "AdamW: weight_decay: expected 0 or more, got -1"),
    "epsilon": (lambda: AdamW(epsilon=float("nan")), "AdamW: epsilon: expected 0 or more, got nan"),
    "clip": (lambda: SGD(clip_norm=0), "SGD: clip_norm: expected None or more than 0, got 0"),
    "accumulate": (lambda: SGD(accumulate=0), "SGD: accumulate: expected 1 or more, got 0"),
    "ema": (lambda: SGD(ema=1.0), "SGD: ema: expected 0 or more and less than 1"),
    "group": (lambda: Group(parameters=["a"], rate=-1), "Group: rate: expected 0 or more, got -1"),
    "delta": (lambda: ob.losses.Huber(delta=0), "huber: delta: expected more than 0, got 0"),
    "smoothing": (lambda: ob.losses.SoftmaxCrossEntropy(label_smoothing=1.5), "label_smoothing: expected 0 … 1"),
    "reduction": (lambda: ob.losses.MSE(reduction="none"), "mse: reduction: expected 'mean' or 'sum', got 'none'"),
}


@pytest.mark.parametrize("case", REFUSED_NUMBERS)
def test_refused_numbers(case: str) -> None:
    make, message = REFUSED_NUMBERS[case]
    with pytest.raises(ob.InvalidArgumentError, match=message):
        make()


def test_class_weights_of_another_length() -> None:
    loss = ob.losses.SoftmaxCrossEntropy(weight=[1, 2])
    with pytest.raises(
        ob.InvalidArgumentError, match=r"one number for each of 3 classes, got an array of shape \(2,\)"
    ):
        ob.training_graph(network(), loss=loss)


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
