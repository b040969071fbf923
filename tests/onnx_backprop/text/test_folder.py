"""The folder of a model: its files, the matrices that get adapters, and merged models of its kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, parser

import onnx_backprop as ob
from onnx_backprop.text import ModelFolder, projections

FOLDER = Path(__file__).parents[2] / "data" / "text"
LAYER = "model.layers.0."
MATRICES = [f"{LAYER}{name}.MatMul.weight_Q4" for name in ("attn.qkv_proj", "attn.o_proj", "mlp.gate_proj")]
MATRICES += [f"{LAYER}mlp.{name}_proj.MatMul.weight_Q4" for name in ("up", "down")]
IDS = np.array([[1, 80, 90, 100, 110, 120]])


def logits(model: Path | ModelProto, adapter: Path | None = None) -> np.ndarray:
    """Of stock onnxruntime, from an empty cache."""
    where = str(model) if isinstance(model, Path) else model.SerializeToString()
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3  # that adapters are inputs is meant
    session = onnxruntime.InferenceSession(where, settings, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    feeds |= {v.name: np.zeros((1, 1, 0, 16), np.float32) for v in session.get_inputs() if "past" in v.name}
    options = onnxruntime.RunOptions()
    if adapter:
        loaded = onnxruntime.LoraAdapter()
        loaded.Load(str(adapter))
        options.add_active_adapter(loaded)
    return np.asarray(session.run(["logits"], feeds, options)[0])


def moved(adapted: ob.LoraModel, size: float) -> dict[str, np.ndarray]:
    """Values of the adapters that change what the model computes."""
    rng = np.random.default_rng(0)
    shapes = {t.name: tuple(t.dims) for t in adapted.model.graph.initializer}
    return {name: rng.normal(0, size, shapes[name]).astype(np.float32) for name in adapted.trainable}


def test_the_matrices_are_all_but_that_of_the_logits() -> None:
    assert projections(FOLDER / "model.onnx") == MATRICES
    text = """
        <ir_version: 10, opset_import: ["": 18]>
        m (int64[b, t] ids) => (float[b, t, v] y) {
            e = Gather (table, ids) h = MatMul (e, w1) g = Relu (h) y = MatMul (g, w2) }"""
    model = parser.parse_model(text)
    for name, shape in {"table": (7, 4), "w1": (4, 4), "w2": (4, 7)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    assert projections(model) == ["w1"], "the last, where the file does not say how many logits there are"
    del model.graph.node[1:]
    model.graph.node[0].output[0] = "y"
    with pytest.raises(ob.InvalidArgumentError, match="expected one that multiplies by matrices"):
        projections(model)


def test_adapters_as_inputs_are_the_base_without_values_and_the_merged_model_with_them(tmp_path: Path) -> None:
    adapted = ob.lora(FOLDER / "model.onnx", MATRICES, rank=4, alpha=8)
    values = moved(adapted, 0.3)
    ModelFolder(FOLDER).write(tmp_path / "out", adapted.model, {"task": values})
    assert {file.name for file in FOLDER.iterdir()} - {"model.onnx.data"} | {"task.onnx_adapter"} == {
        file.name for file in (tmp_path / "out").iterdir()
    }
    base, out = logits(FOLDER / "model.onnx"), tmp_path / "out" / "model.onnx"
    np.testing.assert_array_equal(logits(out), base)
    active = logits(out, tmp_path / "out" / "task.onnx_adapter")
    assert np.abs(active - base).max() > 0.2
    floats = logits(ob.merge_adapter(adapted, values, floats=True))
    np.testing.assert_allclose(
        logits(out), logits(ob.merge_adapter(adapted, moved(adapted, 0), floats=True)), atol=2e-2
    )
    np.testing.assert_allclose(active, floats, atol=2e-2)  # onnxruntime rounds what MatMulNBits multiplies to 8 bits
    integers = ob.merge_adapter(adapted, values)
    assert {n.op_type for n in integers.graph.node} == {n.op_type for n in adapted.base.graph.node}
    assert {v.name for v in integers.graph.input} == {v.name for v in adapted.base.graph.input}
    lost, kept = np.abs(logits(integers) - active).max(), np.abs(active - base).max()
    assert lost < 0.5 * kept, "rounded to 4 bits"
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in ob.dequantize(adapted.base).graph.initializer}
    merged = {
        t.name: onnx.numpy_helper.to_array(t) for t in ob.merge_adapter(adapted, values, floats=True).graph.initializer
    }
    for name in MATRICES:
        change = 2 * values[f"{name}.lora_A"].astype(np.float64) @ values[f"{name}.lora_B"].astype(np.float64)
        w = name.removesuffix("_Q4")
        np.testing.assert_allclose(merged.pop(w), weights.pop(w) + change, rtol=1e-5, atol=1e-6)
    for name, value in weights.items():
        np.testing.assert_array_equal(merged[name], value)


def test_merge_adapter_of_floats_is_merge() -> None:
    floats = ob.dequantize(FOLDER / "model.onnx")
    adapted = ob.lora(floats, ["*proj*"], rank=2)
    values = moved(adapted, 0.2)
    assert ob.merge_adapter(adapted, values) == adapted.merge(values)


def tied() -> ModelProto:
    """An embedding that reads the packed weight of the head, as the builder writes it for small models."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        tied (int64[b, t] input_ids) => (float[b, t, 24] logits) <int64[2] shape = {24, -1}> {
            table = Reshape (head_Q4, shape)
            e = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 16> (table, input_ids, head_scales)
            h = com.microsoft.MatMulNBits <K = 32, N = 32, bits = 4, block_size = 16> (e, mid_Q4, mid_scales)
            logits = com.microsoft.MatMulNBits <K = 32, N = 24, bits = 4, block_size = 16> (h, head_Q4, head_scales)
        }""")
    rng = np.random.default_rng(0)
    for name, rows in (("head", 24), ("mid", 32)):
        for suffix, array in {
            "Q4": rng.integers(0, 256, (rows, 2, 8)).astype(np.uint8),
            "scales": rng.uniform(0.1, 0.2, (rows, 2)).astype(np.float32),
        }.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"{name}_{suffix}"))
    return model


def run(model: ModelProto, ids: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"input_ids": ids})[0])


def test_an_embedding_that_shares_the_integers_of_the_head() -> None:
    model, ids = tied(), np.arange(24).reshape(2, 12)
    floats = ob.dequantize(model)
    assert sorted(tensor.name for tensor in floats.graph.initializer) == ["head", "mid"]
    np.testing.assert_allclose(run(floats, ids), run(model, ids), rtol=1e-5, atol=1e-4)
    assert run(ob.requantize(floats, model), ids).tolist() == run(model, ids).tolist()
    adapted = ob.lora(model, projections(model), rank=3)
    assert adapted.trainable == ("mid_Q4.lora_A", "mid_Q4.lora_B")
    assert ob.lora(model, ["mid*"], rank=3).trainable == adapted.trainable, "and no warning of scales"
    values = moved(adapted, 0.5)
    expected = run(adapted.merge(values), ids)
    assert np.abs(expected - run(model, ids)).max() > 1
    np.testing.assert_allclose(run(ob.merge_adapter(adapted, values, floats=True), ids), expected, rtol=1e-4, atol=1e-3)
    assert {n.op_type for n in ob.merge_adapter(adapted, values).graph.node} == {n.op_type for n in model.graph.node}
    with pytest.warns(ob.OnnxBackpropWarning, match="stay frozen: 'head_Q4' of the GatherBlockQuantized 'e'"):
        both = ob.lora(model, ["mid_Q4", "head_Q4"], rank=3)
    values = moved(both, 0.5)
    expected = run(both.merge(values), ids)
    np.testing.assert_allclose(run(ob.merge_adapter(both, values, floats=True), ids), expected, rtol=1e-4, atol=1e-3)
    with pytest.raises(ob.InvalidArgumentError, match=r"the integers 'head_Q4' are read in several ways"):
        ob.merge_adapter(both, values)


def test_where_the_model_is(tmp_path: Path) -> None:
    folder = ModelFolder(FOLDER)
    assert (folder.path, folder.model, folder.context) == (FOLDER, FOLDER / "model.onnx", 128)
    assert ModelFolder(FOLDER / "model.onnx").path == FOLDER
    with pytest.raises(
        ob.InvalidArgumentError, match=r"expected genai_config.json or one .onnx file, got no .onnx file"
    ):
        ModelFolder(tmp_path)
    shutil.copy(FOLDER / "model.onnx", tmp_path / "decoder.onnx")
    assert ModelFolder(tmp_path).model.name == "decoder.onnx"
    assert ModelFolder(tmp_path).context is None
    shutil.copy(FOLDER / "model.onnx", tmp_path / "other.onnx")
    with pytest.raises(ob.InvalidArgumentError, match="got decoder.onnx, other.onnx"):
        ModelFolder(tmp_path)
    config = {"model": {"decoder": {"filename": "other.onnx"}}}
    (tmp_path / "genai_config.json").write_text(json.dumps(config))
    assert ModelFolder(tmp_path).model.name == "other.onnx"
    config["model"]["decoder"]["pipeline"] = [{}]
    (tmp_path / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(ob.InvalidArgumentError, match="pipeline"):
        ModelFolder(tmp_path)
    (tmp_path / "genai_config.json").write_text("[]")
    with pytest.raises(ob.InvalidArgumentError, match="expected an object"):
        ModelFolder(tmp_path)


def test_the_folder_of_the_model_is_not_replaced() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="is the folder of the model"):
        ModelFolder(FOLDER).write(FOLDER, ModelProto())


@pytest.mark.filterwarnings("ignore::onnx_backprop.OnnxBackpropWarning")  # that the file is a decoder
def test_a_budget_of_memory_counts_an_input_with_a_default() -> None:
    adapted = ob.lora(FOLDER / "model.onnx", MATRICES, rank=2)
    results = []
    for more in ({}, {"memory": "70%", "lengths": {"batch_size": 2, "sequence_length": 16}}):
        graph = ob.training_graph(
            adapted.model, loss="next_token", trainable=adapted.trainable, optimizer="sgd", **more
        )
        trainer = ob.Trainer(graph, learning_rate=1.0)
        ids = np.arange(5, 37).reshape(2, 16)
        trainer.step(input_ids=ids, labels=ids)
        results.append(trainer.parameters())
    for name, value in results[0].items():
        np.testing.assert_allclose(value, results[1][name], rtol=1e-5, atol=1e-7)
    assert "run again" in graph.summary()


def test_beside_a_model_without_a_configuration_only_files_of_its_text_are_copied(tmp_path: Path) -> None:
    names = {"chat_template.jinja", "config.json", "generation_config.json", "special_tokens_map.json"}
    names |= {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"}
    source = tmp_path / "source"
    source.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        shutil.copy(FOLDER / name, source)
    for name in (*names, "photograph.jpg", "notes.txt"):
        (source / name).write_text(name)
    ModelFolder(source).write(tmp_path / "out", onnx.load(FOLDER / "model.onnx"))
    copied = {
        file.name: file.read_text() for file in (tmp_path / "out").iterdir() if file.suffix not in (".onnx", ".data")
    }
    assert copied == {name: name for name in names}
