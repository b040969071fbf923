"""Decoders with a cache are trained on whole sequences, and are exported with their cache again."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, helper

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import (
    InvalidArgumentError,
    InvalidModelError,
    OnnxBackpropWarning,
    UnsupportedError,
)
from tests.converters.prepare.decoders import FORMS, HEADS, SIZE, VOCABULARY, B, P, T, decoder, merged

RNG = np.random.default_rng(1)
IDS = RNG.integers(0, VOCABULARY, (B, T))
LABELS = RNG.integers(0, VOCABULARY, (B, T))
PADDED = np.array([[1, 1, 1, 0], [1, 1, 1, 1]])
LOSS = ob.losses.NextToken()


def graph_of(model: Any, **options: Any) -> ob.TrainingGraph:
    with pytest.warns(OnnxBackpropWarning, match="the model is a decoder"):
        return ob.training_graph(model, loss=LOSS, **options)


def gradients(model: Any, feeds: dict[str, np.ndarray], **options: Any) -> dict[str, Any]:
    graph = graph_of(model, **options)
    outputs = ob.session(graph.model).run(None, feeds)
    named = dict(zip((v.name for v in graph.model.graph.output), outputs, strict=True))
    names = {"loss": graph.loss, **graph.parameters, **graph.input_gradients}
    return {x: named[g] for x, g in names.items()}


def without_cache(form: str, mask: np.ndarray, positions: np.ndarray, **options: Any) -> dict[str, Any]:
    """The gradients of the same decoder that an exporter has written without a cache."""
    form = "plain" if form == "GroupQueryAttention" else form  # the same numbers; the other is always a decoder
    graph = ob.training_graph(decoder(form, cache=False, **options), loss=LOSS, prediction="logits")
    feeds = {"input_ids": IDS, "labels": LABELS, "attention_mask": mask, "position_ids": positions}
    outputs = ob.session(graph.model).run([graph.loss, *graph.parameters.values()], feeds)
    return dict(zip(("loss", *graph.parameters), outputs, strict=True))


def empty_pasts(model: ModelProto) -> dict[str, Any]:
    """Pasts of length 0 in the shapes that a model declares."""
    lengths = {"batch": B, "past": 0, "head": SIZE}
    return {
        v.name: np.zeros([lengths.get(d.dim_param, d.dim_value) for d in v.type.tensor_type.shape.dim], np.float32)
        for v in model.graph.input
        if v.type.tensor_type.elem_type == 1
    }


def run(model: Any, feeds: dict[str, np.ndarray]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(model if isinstance(model, str) else model.SerializeToString())
    return dict(zip((y.name for y in session.get_outputs()), session.run(None, feeds), strict=True))


def assert_equal(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(got) >= set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("fixed", [False, True], ids=["symbolic", "fixed"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_without_a_cache(form: str, fixed: bool) -> None:
    feeds = {"input_ids": IDS, "labels": LABELS}
    whole = np.ones_like(IDS)
    expected = without_cache(form, whole, np.arange(T)[None].repeat(B, 0))
    assert_equal(gradients(decoder(form, fixed=fixed), feeds), expected)


@pytest.mark.parametrize(
    ("form", "left"), [("plain", True), ("plain", False), ("MultiHeadAttention", True), ("GroupQueryAttention", False)]
)
def test_a_mask_that_a_batch_has_is_used_and_positions_follow_it(form: str, left: bool) -> None:
    mask = PADDED[:, ::-1] if left else PADDED
    first = [1, 0, 1, 2] if left else [0, 1, 2, 1]  # as transformers: the cumulative sum less 1, and 1 where masked
    got = gradients(decoder(form), {"input_ids": IDS, "labels": LABELS, "attention_mask": mask})
    assert_equal(got, without_cache(form, mask, np.array([first, [0, 1, 2, 3]])))


def test_positions_that_a_batch_has_are_used() -> None:
    positions = np.array([[5, 4, 3, 2], [0, 2, 4, 6]])
    got = gradients(decoder("plain"), {"input_ids": IDS, "labels": LABELS, "position_ids": positions})
    assert_equal(got, without_cache("plain", np.ones_like(IDS), positions))


@pytest.mark.parametrize("shared", [True, False], ids=["shared weights", "weights of each branch"])
def test_of_a_merged_decoder_the_branch_without_a_cache_is_trained(shared: bool, tmp_path: Any) -> None:
    model = merged(shared=shared)
    expected = without_cache("plain", np.ones_like(IDS), np.arange(T)[None].repeat(B, 0))
    assert_equal(gradients(model, {"input_ids": IDS, "labels": LABELS}), expected)
    check_export(model, tmp_path, {"use_cache_branch": np.array([True])})
    check_export(model, tmp_path, {"use_cache_branch": np.array([False])})


@pytest.mark.parametrize("form", FORMS)
def test_the_exported_model_has_its_pasts_and_presents(form: str, tmp_path: Any) -> None:
    check_export(decoder(form), tmp_path)


@pytest.mark.parametrize("state", ["operator", "nodes"])
@pytest.mark.parametrize("form", ["plain", "GroupQueryAttention"])
def test_a_state_that_keeps_its_lengths_is_zeros(form: str, state: str, tmp_path: Any) -> None:
    """As of a convolution along time, which lies between layers of attention; whatever it is called."""
    model = decoder(form, state=state)
    graph = graph_of(model)
    assert graph.inputs == ("input_ids", "labels")
    assert graph.outputs == ("logits",)
    expected = without_cache(form, np.ones_like(IDS), np.arange(T)[None].repeat(B, 0), state=state)
    assert "taps" in expected
    assert_equal(gradients(model, {"input_ids": IDS, "labels": LABELS}), expected)
    check_export(model, tmp_path)


@pytest.mark.parametrize("state", ["operator", "nodes"])
def test_states_that_each_batch_has(state: str) -> None:
    """Beside pasts that it has: zeros are what they are without."""
    model = decoder("plain", state=state)
    feeds = {"input_ids": IDS, "labels": LABELS}
    given = {**feeds, **empty_pasts(model), "left": np.zeros((B, 2 * HEADS * SIZE // 2, 2), np.float32)}
    assert_equal(gradients(model, given, given=["past*"]), gradients(model, feeds))
    given["left"] += 1
    got = gradients(model, given, wrt_inputs=["left"])
    assert np.abs(got["left"]).max() > 1e-4
    assert abs(got["loss"] - gradients(model, feeds)["loss"]) > 1e-4


def test_a_state_whose_lengths_are_not_known_stays_an_input() -> None:
    model = decoder("plain", state="nodes")
    left = next(v for v in model.graph.input if v.name == "left")
    for dim in left.type.tensor_type.shape.dim[1:]:
        dim.ClearField("dim_value")
    assert "left" in graph_of(model, prediction="logits").inputs


def test_hidden_states_of_as_many_positions_as_the_tokens_stay_an_input() -> None:
    """As a head that speculates reads them: with an output of the same lengths, all of them declared."""
    model = decoder("plain")
    ids = next(v for v in model.graph.input if v.name == "input_ids")
    ids.type.tensor_type.shape.dim[1].dim_value = T
    for name, values in {"hidden": model.graph.input, "renewed": model.graph.output}.items():
        values.append(helper.make_tensor_value_info(name, 1, ["batch", T, 4]))
    model.graph.node.append(helper.make_node("Add", ["hidden", "hidden"], ["renewed"], "renew"))
    assert "renewed" in graph_of(model, prediction="logits").outputs


def check_export(model: ModelProto, folder: Any, more: dict[str, np.ndarray] | None = None) -> None:
    """After a step the export has the signature of the model, to the byte, its operators, and the new weights."""
    graph = graph_of(model, optimizer="sgd")
    graph.save(folder / "training.onnx")
    trainer = ob.Trainer(folder / "training.onnx", learning_rate=0.5)
    trainer.step(input_ids=IDS, labels=LABELS)
    trainer.export(folder / "trained.onnx")
    exported = onnx.load(folder / "trained.onnx")
    for field in ("input", "output"):
        before, after = ([v.SerializeToString() for v in getattr(m.graph, field)] for m in (model, exported))
        assert before == after
    fused = {node.op_type for node in model.graph.node if node.domain}
    assert fused <= {node.op_type for node in exported.graph.node}
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.arange(T)[None].repeat(B, 0)}
    whole = run(exported, {**feeds, **empty_pasts(model), **(more or {})})
    predicted = trainer.predict(input_ids=IDS, labels=LABELS)
    np.testing.assert_allclose(whole["logits"], predicted["logits"], rtol=1e-4, atol=1e-5)
    if more and not more["use_cache_branch"][0]:
        return
    # all tokens but the last, and then that with what the others have left behind
    first = {**feeds, "input_ids": IDS[:, :-1], "attention_mask": np.ones((B, T - 1), np.int64)}
    first["position_ids"] = feeds["position_ids"][:, :-1]
    left = run(exported, {**first, **empty_pasts(model), **(more or {})})
    names = list(empty_pasts(model))
    presents = [left[v.name] for v in model.graph.output if v.name != "logits"]
    rest = {**feeds, "input_ids": IDS[:, -1:], "position_ids": feeds["position_ids"][:, -1:], **(more or {})}
    rest |= dict(zip(names, presents, strict=True))
    np.testing.assert_allclose(run(exported, rest)["logits"], whole["logits"][:, -1:], rtol=1e-4, atol=1e-5)


def test_pasts_that_each_batch_has_are_used_and_have_gradients() -> None:
    model = decoder("plain")
    pasts = {v.name: RNG.normal(size=(B, HEADS, P, SIZE)).astype(np.float32) for v in model.graph.input[3:]}
    feeds = {"input_ids": IDS, "labels": LABELS, **pasts}
    name = next(iter(pasts))
    got = gradients(model, feeds, given=["past*"], wrt_inputs=[name])
    assert_equal(gradients(model, feeds, wrt_inputs=[name]), got)
    around = {"attention_mask": np.ones((B, P + T), np.int64), "position_ids": np.arange(P, P + T)[None].repeat(B, 0)}

    def loss(past: np.ndarray) -> float:
        logits = run(model, {**feeds, **around, name: past.astype(np.float32)} | {})["logits"].astype(np.float64)[
            :, :-1
        ]
        scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return float(-np.take_along_axis(scores, LABELS[:, 1:, None], -1).mean())

    feeds.pop("labels")
    np.testing.assert_allclose(got["loss"], loss(pasts[name]), rtol=1e-5)
    direction = RNG.normal(size=pasts[name].shape)
    step = 1e-2
    difference = (loss(pasts[name] + step * direction) - loss(pasts[name] - step * direction)) / (2 * step)
    np.testing.assert_allclose((got[name] * direction).sum(), difference, rtol=2e-3, atol=1e-5)


def test_a_length_of_an_empty_past_that_nobody_knows_is_refused_where_it_is_read() -> None:
    model = decoder("by length")
    three = onnx.numpy_helper.from_array(np.array(3), "three")
    model.graph.initializer.append(three)
    shape = next(n.output[0] for n in model.graph.node if n.op_type == "Shape" and n.input[0] == "past.0.key")
    next(n for n in model.graph.node if n.input and n.input[0] == shape).input[1] = "three"
    with pytest.raises(
        UnsupportedError, match=re.escape("'past.0.key' cannot be empty: nodes read the length of its axis 3")
    ):
        ob.training_graph(model, loss=LOSS)


def test_one_sentence_says_what_was_done() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ob.training_graph(decoder("plain", prefix="kv"), loss=LOSS)
    (text,) = (str(w.message) for w in caught)
    for name in ("kv.0.key", "present.0.value", "attention_mask", "position_ids"):
        assert repr(name) in text


@pytest.mark.parametrize("form", ["plain", "joint", "GroupQueryAttention"])
def test_pasts_are_found_by_what_reads_them(form: str) -> None:
    graph = graph_of(decoder(form, prefix="h_"))
    assert graph.inputs == ("input_ids", "labels")
    assert set(graph.optional) == {"attention_mask", "position_ids"}
    assert graph.outputs == ("logits",)


def test_nodes_without_names() -> None:
    model = decoder("plain")
    for node in model.graph.node:
        node.name = ""
    assert_equal(
        gradients(model, {"input_ids": IDS, "labels": LABELS}),
        without_cache("plain", np.ones_like(IDS), np.arange(T)[None].repeat(B, 0)),
    )


def test_the_loss_trains_with_adapters_that_are_merged_into_the_decoder(tmp_path: Any) -> None:
    model = decoder("MultiHeadAttention")
    adapted = ob.lora(model, ["q*", "v*"], rank=2)
    graph = graph_of(adapted.model, trainable=adapted.trainable, optimizer="sgd")
    trainer = ob.Trainer(graph, learning_rate=0.1)
    losses = [trainer.step(input_ids=IDS, labels=LABELS) for _ in range(5)]
    assert losses[-1] < losses[0] - 0.01
    tuned = adapted.merge(trainer.parameters())
    assert [v.SerializeToString() for v in tuned.graph.input] == [v.SerializeToString() for v in model.graph.input]
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.arange(T)[None].repeat(B, 0)}
    predicted = trainer.predict(input_ids=IDS, labels=LABELS)["logits"]
    np.testing.assert_allclose(run(tuned, {**feeds, **empty_pasts(model)})["logits"], predicted, rtol=1e-4, atol=1e-5)
    trainer.export(tmp_path / "adapted.onnx")
    logits = run(str(tmp_path / "adapted.onnx"), {**feeds, **empty_pasts(model)})["logits"]
    np.testing.assert_allclose(logits, predicted, rtol=1e-4, atol=1e-5)


def test_adapters_of_a_merged_decoder(tmp_path: Any) -> None:
    model = merged()
    with pytest.warns(OnnxBackpropWarning, match="the one with it takes the place of both"):
        adapted = ob.lora(model, ["q*", "o*"], rank=2)
    trainer = ob.Trainer(graph_of(adapted.model, trainable=adapted.trainable, optimizer="sgd"), learning_rate=0.1)
    losses = [trainer.step(input_ids=IDS, labels=LABELS) for _ in range(5)]
    assert losses[-1] < losses[0] - 0.01
    tuned = adapted.merge(trainer.parameters())
    trainer.export(tmp_path / "adapted.onnx")
    predicted = trainer.predict(input_ids=IDS, labels=LABELS)["logits"]
    feeds = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.arange(T)[None].repeat(B, 0)}
    feeds |= {**empty_pasts(model), "use_cache_branch": np.array([True])}
    for trained in (tuned, onnx.load(tmp_path / "adapted.onnx")):
        for field in ("input", "output"):
            before, after = ([v.SerializeToString() for v in getattr(m.graph, field)] for m in (model, trained))
            assert before == after
        np.testing.assert_allclose(run(trained, feeds)["logits"], predicted, rtol=1e-4, atol=1e-5)


def test_the_first_of_two_files_has_presents_without_pasts(tmp_path: Any) -> None:
    model = decoder("plain", pasts=False)
    expected = without_cache("plain", np.ones_like(IDS), np.arange(T)[None].repeat(B, 0))
    assert_equal(gradients(model, {"input_ids": IDS, "labels": LABELS}), expected)


def test_a_budget_of_memory_needs_the_lengths_of_the_tokens_alone() -> None:
    feeds = {"input_ids": IDS, "labels": LABELS}
    expected = without_cache("plain", np.ones_like(IDS), np.arange(T)[None].repeat(B, 0))
    got = gradients(decoder("plain"), feeds, memory="80%", lengths={"batch": B, "tokens": T})
    assert_equal(got, expected)


def test_a_past_that_is_fed_to_a_graph_without_it_is_refused_with_advice() -> None:
    trainer = ob.Trainer(graph_of(decoder("plain"), optimizer="sgd"))
    past = np.zeros((B, HEADS, P, SIZE), np.float32)
    with pytest.raises(InvalidArgumentError, match=re.escape("expected input_ids, labels and perhaps attention_mask")):
        trainer.step({"input_ids": IDS, "labels": LABELS, "past.0.key": past})
    with pytest.raises(InvalidArgumentError, match=re.escape("given: expected the name of an input, got 'pasta'")):
        ob.training_graph(decoder("plain"), loss=LOSS, given=["pasta"])


def test_a_model_that_only_joins_two_inputs_is_no_decoder() -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Concat", ["a", "b"], ["joined"], axis=2),
        helper.make_node("Concat", ["c", "a"], ["more"], axis=2),
        helper.make_node("MatMul", ["joined", "rows"], ["product"]),
        helper.make_node("MatMul", ["more", "rows"], ["other"]),
        helper.make_node("Concat", ["product", "other"], ["y"], axis=2),
    ]
    table = onnx.numpy_helper.from_array(RNG.normal(size=(VOCABULARY, 3)).astype(np.float32), "table")
    inputs = [helper.make_tensor_value_info(n, 1, ["batch", 2, f"length_{n}", 3]) for n in "abc"]
    inputs.append(helper.make_tensor_value_info("ids", 7, ["rows", 3]))
    outputs = [helper.make_tensor_value_info(n, 1, None) for n in ("joined", "more", "y")]
    graph = helper.make_graph(nodes, "features", inputs, outputs, [table])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    training = ob.training_graph(model, loss="mse", prediction="y")
    assert training.inputs == ("a", "b", "c", "ids", "target")
    assert training.outputs == ("joined", "more", "y")


def test_a_damaged_record_of_the_decoder_is_refused() -> None:
    graph = graph_of(decoder("plain"))
    for entry in graph.model.metadata_props:
        if entry.key == "onnx_backprop.decoder":
            entry.value = entry.value[: len(entry.value) // 2]
    with pytest.raises(InvalidModelError, match=re.escape("onnx_backprop.decoder")):
        graph.inference_model()


def test_tables_of_rotations_that_a_branch_chooses_are_no_parameters() -> None:
    """As of Phi-3, whose builder writes tables for short and for long texts."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"]),
        helper.make_node("Shape", ["input_ids"], ["shape"], start=1),
        helper.make_node("Greater", ["shape", "three"], ["long"]),
        helper.make_node("If", ["long"], ["cos", "sin"], **{f"{b}_branch": _tables(b) for b in ("then", "else")}),
        helper.make_node("RotaryEmbedding", ["x", "positions", "cos", "sin"], ["y"], domain="com.microsoft"),
        helper.make_node("MatMul", ["y", "w"], ["logits"]),
    ]
    stored = [("table", (VOCABULARY, 8)), ("w", (8, VOCABULARY))]
    weights = [onnx.numpy_helper.from_array(RNG.normal(size=s).astype(np.float32), n) for n, s in stored]
    weights.append(onnx.numpy_helper.from_array(np.array([3]), "three"))
    inputs = [helper.make_tensor_value_info(n, 7, ["batch", "tokens"]) for n in ("input_ids", "positions")]
    outputs = [helper.make_tensor_value_info("logits", 1, None)]
    graph = helper.make_graph(nodes, "rotated", inputs, outputs, weights)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    with pytest.warns(OnnxBackpropWarning, match="rotation of RotaryEmbedding"):
        training = ob.training_graph(helper.make_model(graph, opset_imports=imports, ir_version=10), loss=LOSS)
    assert set(training.parameters) == {"table", "w"}
    assert set(training.left_out.values()) == {"rotation of RotaryEmbedding"}
    assert len(training.left_out) == 4


def _tables(branch: str) -> onnx.GraphProto:
    nodes = []
    for name in ("cos", "sin"):
        table = onnx.numpy_helper.from_array(RNG.normal(size=(16, 4)).astype(np.float32))
        nodes.append(helper.make_node("Constant", [], [f"{name}_{branch}"], value=table))
    outputs = [helper.make_tensor_value_info(node.output[0], 1, (16, 4)) for node in nodes]
    return helper.make_graph(nodes, branch, [], outputs)


def test_a_step_takes_a_mask_and_the_next_does_not_remember_it() -> None:
    trainer = ob.Trainer(graph_of(decoder("plain"), optimizer="sgd"), learning_rate=0.0)
    left = PADDED[:, ::-1]
    whole, masked = (trainer.step(input_ids=IDS, labels=LABELS, **more) for more in ({}, {"attention_mask": left}))
    assert abs(whole - masked) > 1e-4
    assert trainer.step(IDS, LABELS) == whole == trainer.step(IDS, LABELS, attention_mask=np.ones_like(IDS))
    assert trainer.evaluate(input_ids=IDS, labels=LABELS, attention_mask=left) == pytest.approx(masked, rel=1e-5)
