"""Adapters: what they compute, their merging, their gradients, what they go beside."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.finetune.lora import LoraModel, lora
from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropWarning
from tests.converters.finetune.cases import ALPHA, CASES, RANK, SCALE, Case, feeds_of, quantized, with_tensor


def options() -> onnxruntime.SessionOptions:
    result = onnxruntime.SessionOptions()
    result.log_severity_level = 3
    result.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # 4, the default, rounds the input
    return result


def run(model: ModelProto, **feeds: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), options(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {**feeds_of(model), **feeds})[0])


def tensor(model: ModelProto, name: str) -> np.ndarray:
    (initializer,) = (t for t in model.graph.initializer if t.name == name)
    return np.array(numpy_helper.to_array(initializer))


def random_values(adapted: LoraModel) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(8)
    shapes = {t.name: t.dims for t in adapted.model.graph.initializer}
    return {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in adapted.trainable}


@pytest.mark.parametrize("case", [c for c in CASES if c.delta], ids=lambda c: c.name)
def test_a_layer_and_its_adapter(case: Case) -> None:
    base = case.model()
    adapted = lora(base, ["w"], RANK, alpha=ALPHA)
    assert adapted.trainable == ("w.lora_A", "w.lora_B")
    np.testing.assert_array_equal(run(adapted.model), run(base), "B is zero")
    values = random_values(adapted)
    assert case.delta is not None
    changed = with_tensor(base, "w", (case.tensors["w"] + SCALE * case.delta(*values.values())).astype(np.float32))
    expected = run(changed)
    assert np.abs(expected - run(base)).max() > 0.1
    np.testing.assert_allclose(run(adapted.model, **values), expected, rtol=1e-4, atol=1e-4)
    merged = adapted.merge(values)
    np.testing.assert_allclose(run(merged), expected, rtol=1e-4, atol=1e-4)
    assert len(merged.graph.node) <= len(adapted.base.graph.node)
    assert [value.name for value in merged.graph.input] == ["x"]
    assert {t.name for t in merged.graph.initializer} <= {*case.tensors, "t.new"}


@pytest.mark.parametrize("name", quantized())
def test_a_quantized_weight_keeps_its_adapter(name: str) -> None:
    base, twin, delta = quantized()[name]
    adapted = lora(base, ["q"], RANK, alpha=ALPHA)
    np.testing.assert_allclose(run(base), run(twin), rtol=1e-3, atol=1e-3)
    values = random_values(adapted)
    changed = (tensor(twin, "w") + SCALE * delta(*values.values())).astype(np.float32)
    expected = run(with_tensor(twin, "w", changed))
    np.testing.assert_allclose(run(adapted.model, **values), expected, rtol=1e-3, atol=1e-3)
    merged = adapted.merge(values)
    np.testing.assert_allclose(run(merged), run(adapted.model, **values), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(tensor(merged, "q"), tensor(base, "q"))
    assert [value.name for value in merged.graph.input] == ["x"]


@pytest.mark.parametrize("name", quantized())
def test_gradients_through_quantized_weights(name: str) -> None:
    """Of the adapter, and of the input through the frozen weight: those of the twin in floats."""
    base, twin, _ = quantized()[name]
    results: list[list[np.ndarray]] = []
    for model, weight in ((base, "q"), (twin, "w")):
        adapted = lora(model, [weight], RANK)
        wrt = [*(() if name.endswith("table") else ("x",)), *adapted.trainable]
        graph = ob.backward(adapted.model, wrt=wrt, of=["y"])
        session = ob.session(graph, session_options=options())
        feeds = {**feeds_of(model), **random_values(adapted)}
        shape = run(twin).shape
        feeds["y_grad"] = np.random.default_rng(9).standard_normal(shape).astype(np.float32)
        results.append([np.asarray(g) for g in session.run([f"{one}_grad" for one in wrt], feeds)])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
        assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("case", [CASES[3], *CASES[5:7], *CASES[9:]], ids=lambda c: c.name)
def test_gradients(case: Case) -> None:
    adapted = lora(case.model(), ["*"], RANK, alpha=ALPHA)
    report = ob.check_gradients(adapted.model, wrt=list(adapted.trainable), feeds=random_values(adapted))
    assert report.ok, str(report)


def test_a_weight_in_two_layers_has_one_adapter_and_one_read_elsewhere_stays_there() -> None:
    text = """
        <ir_version: 10, opset_import: ["": 18]>
        tied (float[N, 4] x) => (float[N, 4] y, float[1, 4] row)
        {
            zero = Constant <value_ints = [0]> ()
            c = Gather <axis = 1> (w, zero)
            row = Transpose(c)
            a = MatMul(x, w)
            b = Relu(a)
            y = MatMul(b, w)
        }
    """
    base = parser.parse_model(text)
    w = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    base.graph.initializer.append(numpy_helper.from_array(w, "w"))
    with pytest.warns(OnnxBackpropWarning, match="stay frozen: 'w' of the Gather 'c'. To train them whole: also="):
        adapted = lora(base, ["w"], 1)
    assert adapted.trainable == ("w.lora_A", "w.lora_B")
    values = random_values(adapted)
    a, b = values.values()
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    expected = np.maximum(x @ (w + a @ b), 0) @ (w + a @ b)
    merged = adapted.merge(values)
    np.testing.assert_allclose(run(merged, x=x), expected, rtol=1e-4, atol=1e-5)
    session = onnxruntime.InferenceSession(merged.SerializeToString())
    np.testing.assert_array_equal(np.asarray(session.run(["row"], {"x": x})[0]), w[:, :1].T)
    assert {t.name for t in merged.graph.initializer} == {"w", "w.new"}


def test_both_ways_of_reading_a_weight_have_adapters_of_their_own() -> None:
    (case,) = (c for c in CASES if c.name == "read in two ways")
    adapted = lora(case.model(), ["w"], RANK)
    assert adapted.trainable == ("w.lora_A", "w.lora_B", "w.lora_A_2", "w.lora_B_2")
    values = random_values(adapted)
    x = feeds_of(case.model())["x"]
    a, b, c, d = values.values()
    w = case.tensors["w"]
    expected = x @ (w.T + a @ b) @ (w + c @ d)
    np.testing.assert_allclose(run(adapted.model, **values), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(run(adapted.merge(values)), expected, rtol=1e-4, atol=1e-4)


MLP = """
    <ir_version: 10, opset_import: ["": 18]>
    mlp (float[N, 4] x) => (float[N, 3] y)
    {
        [first] h = Gemm(x, w1, b1)
        [Relu_0] p = Relu(h)
        [second] y = Gemm(p, w2, b2)
    }
"""


def mlp() -> ModelProto:
    model = parser.parse_model(MLP)
    rng = np.random.default_rng(2)
    for name, shape in {"w1": (4, 8), "b1": (8,), "w2": (8, 3), "b2": (3,)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def test_training_changes_what_is_trainable_alone(tmp_path: Path) -> None:
    """By the node's name; with a head that is trained whole; exported, merged and as it is, it computes the same."""
    adapted = lora(mlp(), ["fir*"], 1, also=["*2"])
    assert adapted.trainable == ("w1.lora_A", "w1.lora_B", "w2", "b2")
    graph = ob.training_graph(
        adapted.model, loss="softmax_cross_entropy", trainable=adapted.trainable, optimizer="adamw"
    )
    assert tuple(graph.parameters) == adapted.trainable
    trainer = ob.Trainer(graph, learning_rate=0.05)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((16, 4)).astype(np.float32)
    losses = [trainer.step(x=x, labels=(x[:, 0] > 0).astype(np.int64)) for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]
    values = trainer.parameters()
    merged = adapted.merge(values)
    for name in ("w1", "w2", "b1", "b2"):
        assert np.array_equal(tensor(merged, name), tensor(mlp(), name)) == (name == "b1"), name
    trainer.export(tmp_path / "exported.onnx")
    exported = onnx.load(tmp_path / "exported.onnx")
    assert [v.name for v in exported.graph.input] == ["x"]
    for model in (adapted.model, merged):
        onnx.checker.check_model(model, full_check=True)
    np.testing.assert_allclose(run(merged, x=x), run(exported, x=x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run(merged, x=x), run(adapted.model, x=x, **values), rtol=1e-4, atol=1e-5)
    again = lora(mlp(), ["fir*"], 1, also=["*2"])
    assert again.model == adapted.model, "the same arguments make the same model"


REFUSED = [
    ({"targets": ["first"], "rank": 0}, "rank: expected a whole number of 1 or more, got 0"),
    ({"targets": ["first"], "rank": True}, "rank: expected a whole number"),
    ({"targets": ["first"], "rank": 2, "alpha": 0.0}, "alpha: expected a number above 0"),
    ({"targets": ["first"], "rank": 2, "alpha": float("nan")}, "alpha: expected a number above 0"),
    ({"targets": "first", "rank": 2}, r"Write \['first'\]"),
    ({"targets": [], "rank": 2}, "at least one name"),
    ({"targets": ["frist"], "rank": 2}, "Did you mean 'first'"),
    (
        {"targets": ["b1"], "rank": 2},
        r"names 'b1' of the Gemm 'first', where no adapter goes; .* train it whole: also=\['b1'\]",
    ),
    ({"targets": ["b?"], "rank": 2}, "'b\\?' names 'b1' of the Gemm 'first', 'b2' of the Gemm 'second', where"),
    ({"targets": ["first", "re:b."], "rank": 2}, "targets: 're:b.' names 'b1' of"),
    ({"targets": ["Relu_0"], "rank": 2}, "targets: 'Relu_0' names the Relu 'Relu_0', where no adapter goes"),
    ({"targets": ["attn*"], "rank": 2}, "'attn\\*' matches no"),
    ({"targets": ["first"], "rank": 2, "also": ["head"]}, "also: "),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_refusals(arguments: dict, sentence: str) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        lora(mlp(), **arguments)


def test_merging_refuses_other_names_and_shapes() -> None:
    adapted = lora(mlp(), ["first"], 1)
    with pytest.raises(InvalidArgumentError, match=r"got 'w1\.lora_C'\. Did you mean 'w1\.lora_"):
        adapted.merge({"w1.lora_C": np.zeros(1)})
    with pytest.raises(InvalidArgumentError, match=r"'w1\.lora_A' has shape \(4, 1\), got an array of \(1, 4\)"):
        adapted.merge({"w1.lora_A": np.zeros((1, 4))})


@pytest.mark.parametrize("merge", [LoraModel.merge, ob.merge_adapter])
@pytest.mark.parametrize(("given", "missing"), [((), "'w1.lora_A', 'w1.lora_B'"), (("w1.lora_A",), "'w1.lora_B'")])
def test_merging_refuses_missing_values(merge: Any, given: tuple[str, ...], missing: str) -> None:
    adapted = lora(mlp(), ["first"], 1)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in adapted.model.graph.initializer}
    with pytest.raises(InvalidArgumentError, match=f"values: expected all 2 of `trainable`.* {missing} missing"):
        merge(adapted, {name: tensors[name] for name in given})


def test_half_precision() -> None:
    base = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in base.graph.initializer:
            t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float16), t.name))
        for value in (*base.graph.input, *base.graph.output):
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    adapted = lora(base, ["*"], 2, alpha=1)
    assert {tensor(adapted.model, name).dtype for name in adapted.trainable} == {np.dtype(np.float16)}
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float16)
    values = {name: value.astype(np.float16) for name, value in random_values(adapted).items()}
    whole, merged = run(adapted.model, x=x, **values), run(adapted.merge(values), x=x)
    np.testing.assert_allclose(whole.astype(np.float32), merged.astype(np.float32), rtol=3e-2, atol=3e-2)


def test_a_repr_is_one_short_line() -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[N, 4] x) => (float[N, 8] y) <float[4, 8] w> { y = MatMul(x, w) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((4, 8), np.float32), "w"))
    assert repr(lora(model, ["w"], 2)) == "<LoraModel 'g': 1 adapters; 24 of 56 elements trained>"
