"""Trainer: steps, evaluation, fitting."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
import onnx_backprop.training.trainer
from models import fsrcnn, unet_conv_transpose
from onnx_backprop.converters.training.optimizers import SGD, AdamW
from onnx_backprop.opset import KERNELS
from onnx_backprop.opset.core.mapped import byte_size
from onnx_backprop.opset.graphs.edit import without_tensors
from onnx_backprop.ort_ops import native_route, sessions
from onnx_backprop.ort_ops.rewrites.replace_operators import replace_operators
from onnx_backprop.training.buffers import Buffers
from onnx_backprop.training.reports.profiling import profile
from tests.support.training_models import batches, classifier, data, training


def test_steps_are_those_of_the_graph() -> None:
    """Beside a plain loop that feeds every output back through NumPy; its operators are those of a Trainer."""
    graph = training()
    trainer = ob.Trainer(graph, learning_rate=0.02, seed=5)
    values = graph.initial_state()
    values["random_state"][0] = 5
    session = ob.session(replace_operators(ModelProto.FromString(graph.model.SerializeToString())), kernels="native")
    names = [graph.loss, *graph.updates.values()]
    for batch in batches():
        expected, *new = session.run(names, batch | values | {"learning_rate": np.array(0.02, np.float32)})
        values = dict(zip(values, new, strict=True))
        assert trainer.step(batch) == float(np.asarray(expected))
    got = trainer.state()
    assert list(got) == list(values)
    for name, value in values.items():
        np.testing.assert_array_equal(got[name], value, strict=True, err_msg=name)
    assert (trainer.steps, trainer.updates) == (9, 4)


@pytest.mark.parametrize("ema", [False, True])
def test_a_file_serves_as_well_and_is_not_needed_again(tmp_path: Path, ema: bool) -> None:
    graph = training()
    path = tmp_path / "training.onnx"
    graph.save(path)
    first, second = ob.Trainer(graph), ob.Trainer(path)
    path.unlink()
    for batch in batches():
        assert first.step(batch) == second.step(batch)
        assert first.evaluate(batch, ema=ema) == second.evaluate(batch, ema=ema)
    first.export(tmp_path / "first.onnx", ema=ema)
    second.export(tmp_path / "second.onnx", ema=ema)
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "second.onnx").read_bytes()
    assert str(first.graph) == str(second.graph)
    assert second.load(first.save(tmp_path / "checkpoint") or tmp_path / "checkpoint").steps == first.steps


def test_a_trainer_of_a_file_keeps_no_first_values(tmp_path: Path) -> None:
    path = tmp_path / "training.onnx"
    training().save(path)
    graph = ob.Trainer(path).graph
    assert not any(tensor.raw_data for tensor in graph.model.graph.initializer if tensor.name in graph.updates)
    asked = [graph.initial_values, graph.initial_state, graph.inference_model, lambda: graph.save(tmp_path / "again")]
    for ask in (*asked, lambda: ob.Trainer(graph), lambda: graph.inference_model({"nothing": np.zeros(1)})):
        with pytest.raises(ob.InvalidArgumentError, match=r"TrainingGraph\.load\(path\) has them"):
            ask()
    assert not (tmp_path / "again").exists()


def test_weights_gradients_run_as_soon_as_they_can(tmp_path: Path) -> None:
    """onnxruntime by itself runs them last, and keeps all that they read until then."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    graph = ob.training_graph(fsrcnn.build(), loss="mse", optimizer="sgd")
    batch = {graph.inputs[0]: np.ones((1, 1, 5, 4), np.float32), graph.inputs[1]: np.ones((1, 1, 15, 12), "f4")}
    ob.Trainer(graph).step(batch)  # what compiles kernels may run twice
    trainer = ob.Trainer(graph, session_options=options)
    trainer.step(batch)
    events = json.loads(Path(trainer.end_profiling()).read_text())
    ran = [e["args"]["op_name"] for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    backward = [name.rpartition("Backward")[2] for name in ran if name.startswith("OnnxBackprop_Conv")]
    convolutions = [part for part in backward if part in ("Data", "Weights")]
    assert convolutions == ["Weights", "Data"] * (len(convolutions) // 2) + ["Weights"]
    assert len(convolutions) > 9


@pytest.mark.parametrize("limit", [None, 1 << 30], ids=["of a trainer", "of the options"])
def test_zeros_of_a_table_of_words_are_not_held(tmp_path: Path, limit: int | None) -> None:
    """onnxruntime computes them once for all from constants, where it may, and keeps them beside the state."""
    words, width = 70_000, 64  # 17 MiB
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (int64[N] x) => (float[N,{width}] y) <float[{words},{width}] table> {{ y = Gather(table, x) }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((words, width), np.float32), "table"))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    if limit is not None:
        options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", str(limit))
    graph = ob.training_graph(model, loss="mse", optimizer="sgd", trainable=["table"])
    trainer = ob.Trainer(graph, session_options=options, learning_rate=1.0)
    assert trainer.step(np.array([3, 3]), np.zeros((2, width), np.float32)) == 1
    changed = np.flatnonzero((trainer.state()["table"] != 1).any(axis=1))
    assert changed.tolist() == [3]
    held = max(map(byte_size, onnx.load(tmp_path / "optimized.onnx").graph.initializer), default=0)
    assert (held > 16 << 20) == (limit is not None)


def test_other_kernels() -> None:
    """A convolution, whose gradients are operators of our domain, on every route."""
    graph = ob.training_graph(fsrcnn.build(), loss="mse", optimizer="sgd")
    low = np.random.default_rng(6).random((1, 1, 5, 4), np.float32)
    batch = {graph.inputs[0]: low, graph.inputs[1]: np.ones((1, 1, 15, 12), np.float32)}
    trainers = [ob.Trainer(graph, learning_rate=0.01, kernels=kernels) for kernels in (None, *KERNELS)]
    for _ in range(3):
        one, *others = (trainer.step(batch) for trainer in trainers)
        assert others == pytest.approx([one] * len(KERNELS), rel=1e-5)


def profiled_operators(trainer: ob.Trainer) -> set[str]:
    low = np.random.default_rng(6).random((1, 1, 5, 4), np.float32)
    target = np.ones((1, 1, 15, 12), np.float32)
    return {t.name for t in profile(trainer, dict(zip(trainer.graph.inputs, (low, target), strict=True))).operators}


def test_native_kernels_are_the_default_and_what_a_profile_shows() -> None:
    graph = ob.training_graph(fsrcnn.build(), loss="mse", optimizer="sgd")
    trainer, plain = ob.Trainer(graph), ob.Trainer(graph, kernels=None)
    assert (trainer.kernels, plain.kernels) == ("native", None)
    assert not trainer.session_options.enable_mem_pattern
    assert not trainer.session_options.enable_mem_reuse
    native = "OnnxBackprop_ConvolutionBackwardWeights"
    assert native in profiled_operators(trainer)
    assert native not in profiled_operators(plain)


@pytest.mark.parametrize("kernels", ["onnx", "numpy", "native"])
def test_without_native_kernels_standard_operators_take_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernels: str
) -> None:
    """Those that the file has, where it was converted for them; whatever it has, nothing runs in Python."""
    monkeypatch.setattr(native_route, "reason_against", lambda: "no such symbol")
    monkeypatch.setattr(sessions, "native_kernels_work", sessions.native_kernels_work.__wrapped__)
    with caplog.at_level(logging.WARNING, "onnx_backprop"):
        trainer = ob.Trainer(ob.training_graph(fsrcnn.build(), loss="mse", optimizer="sgd", kernels=kernels))
    assert "no such symbol" in caplog.text
    assert trainer.kernels == "onnx"
    ran = profiled_operators(trainer)
    assert "ConvolutionBackwardWeights" not in {name.removeprefix("OnnxBackprop_") for name in ran}, ran


def test_the_bodies_that_a_trainer_falls_back_on_are_those_of_the_file() -> None:
    graph = ob.training_graph(unet_conv_transpose.build(features=4), loss="mse", optimizer="sgd")
    stripped = without_tensors(graph.model, graph.updates)
    assert len(stripped.functions) > 20
    assert list(ob.use_kernels(stripped, "onnx").functions) == list(stripped.functions)


def test_the_seed_chooses_the_masks() -> None:
    batch = next(iter(batches()))
    losses = {seed: ob.Trainer(training(), seed=seed).step(batch) for seed in (0, 1)}
    assert losses[0] != losses[1]
    assert ob.Trainer(training()).step(batch) == losses[0]


def test_training_learns() -> None:
    trainer = ob.Trainer(training(AdamW(ema=0.95)), learning_rate=0.02)
    before = trainer.evaluate(**data())
    records = trainer.fit(batches(), 20, progress=False)
    assert len(records) == 180
    after = trainer.evaluate(data())
    assert after < 0.35 * before
    assert trainer.evaluate(data(), ema=True) < 0.5 * before
    predicted = trainer.predict(data())["y"].argmax(axis=1)
    assert np.mean(predicted == data()["labels"]) > 0.85


def test_evaluate_weighs_time_major_batches_by_elements() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[T, N, 2] x) => (float[T, N, 1] y) { y = MatMul (x, w) }""")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((2, 1), np.float32), "w"))
    trainer = ob.Trainer(ob.training_graph(model, loss="mse", optimizer="sgd"))
    x, target = np.zeros((5, 10, 2), np.float32), np.ones((5, 10, 1), np.float32)
    target[:, 9:] = 3
    batches = [{"x": x[:, rows], "target": target[:, rows]} for rows in (slice(0, 9), slice(9, 10))]
    assert trainer.evaluate(batches) == pytest.approx(float((target**2).mean()), rel=1e-6)


def test_evaluation_of_a_loader_is_that_of_all_rows() -> None:
    trainer = ob.Trainer(training())
    assert trainer.evaluate(batches()) == pytest.approx(trainer.evaluate(data()), rel=1e-5)
    tuples = [(batch["x"], batch["labels"]) for batch in batches()]
    assert trainer.evaluate(tuples) == pytest.approx(trainer.evaluate(data()), rel=1e-5)


def test_a_graph_without_an_optimizer() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="the graph has no optimizer"):
        ob.Trainer(ob.training_graph(classifier(), loss="softmax_cross_entropy"))


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    trainer = ob.Trainer(training(SGD()), learning_rate=1e30)
    with pytest.raises(FloatingPointError, match=r"the loss is (nan|inf) in step \d+ \(learning rate 1e\+30\)"):
        trainer.fit(batches(), 3, progress=False, checkpoint=tmp_path / "c")


def test_empty_loader() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="the loader is empty in epoch 0"):
        ob.Trainer(training()).fit([], 1)


def test_running_means_need_an_optimizer_that_keeps_them() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="keeps no running means"):
        ob.Trainer(training(SGD())).evaluate(data(), ema=True)


def test_set_state() -> None:
    trainer = ob.Trainer(training())
    trainer.set_state({"b2": [1, 2, 3]})
    np.testing.assert_array_equal(trainer.parameters()["b2"], [1, 2, 3])
    with pytest.raises(ob.InvalidArgumentError, match=r"'b2' has shape \(3,\), got \(2,\)"):
        trainer.set_state({"b2": [1, 2]})
    with pytest.raises(ob.InvalidArgumentError, match="expected names of the state, got 'b3'. Did you mean"):
        trainer.set_state({"b3": [1, 2, 3]})


def test_gradient_norms() -> None:
    arguments: dict[str, Any] = {"loss": "softmax_cross_entropy", "optimizer": "sgd"}
    trainer = ob.Trainer(ob.training_graph(classifier(), **arguments, gradient_norms=True), learning_rate=1.0)
    before = trainer.parameters()
    trainer.step(data())
    after = trainer.parameters()
    for name, norm in trainer.gradient_norms.items():
        assert norm == pytest.approx(np.linalg.norm(after[name] - before[name]), rel=1e-3)
    with pytest.raises(ob.InvalidArgumentError, match="the graph has no gradient norms"):
        print(ob.Trainer(ob.training_graph(classifier(), **arguments)).gradient_norms)


def test_batches() -> None:
    loader = batches()
    loader.set_epoch(1)
    first, again = list(loader), list(loader)
    assert len(first) == len(loader) == 9
    assert [len(batch["x"]) for batch in first] == [7] * 8 + [4]
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a["x"], b["x"])
    rows = np.concatenate([batch["x"] for batch in first])
    np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(data()["x"], axis=0))
    loader.set_epoch(2)
    assert not np.array_equal(next(iter(loader))["x"], first[0]["x"])
    assert [len(batch["x"]) for batch in batches(drop_last=True)] == [7] * 8
    with pytest.warns(ob.OnnxBackpropWarning, match="whole: it is called drop_last"):
        assert len(batches(whole=True)) == 8
    with pytest.warns(ob.OnnxBackpropWarning, match=r"1\.2 no longer knows this name\. Write memory_summary"):
        assert training().memory_told() == training().memory_summary()
    np.testing.assert_array_equal(next(iter(batches(shuffle=False)))["x"], data()["x"][:7])
    with pytest.raises(ob.InvalidArgumentError, match="one number of rows, got 'a': 2, 'b': 3"):
        ob.Batches({"a": np.zeros(2), "b": np.zeros(3)}, 1)
    with pytest.raises(ob.InvalidArgumentError, match="size: expected a whole number of 1 … 2, got 0"):
        ob.Batches({"a": np.zeros(2)}, 0)


def test_interrupted_at_every_bytecode_of_a_step() -> None:
    """Between two steps or behind the second, never in between: what a step reads is what `state` shows."""
    trainer = ob.Trainer(training(), seed=4)
    batch = next(iter(batches()))
    start, states = trainer.state(), [trainer.state()]
    for _ in range(2):
        trainer.step(batch)
        states.append(trainer.state())
    codes = {f.__code__ for f in (ob.Trainer.step, Buffers.run, Buffers.renew)}
    left, entered = 0, set[CodeType]()

    def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
        return all(np.array_equal(value, other[name]) for name, value in one.items())

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code not in codes:
            return None
        entered.add(frame.f_code)
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left < 0:
            raise KeyboardInterrupt
        return trace

    counts: set[int] = set()
    for moment in range(1000):
        trainer.set_state(start)
        left, before = moment, sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # or Python 3.12 traces no opcodes anywhere
        sys.settrace(trace)
        try:
            trainer.step(batch)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        after = next(n for n in (0, 1) if same(trainer.state(), states[n]))
        trainer.step(batch)
        assert same(trainer.state(), states[after + 1]), moment
        counts.add(after)
    assert counts == {0, 1}
    assert entered == codes


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kernels", ["native", "onnx"])
def test_running_means_are_of_what_the_updates_made(kernels: str, accumulate: int) -> None:
    """Σ dᵗ⁻ⁱ·xᵢ / Σ dᵗ⁻ⁱ, in which the start has no part."""
    decay, seen = 0.9, list[dict[str, np.ndarray]]()
    trainer = ob.Trainer(training(AdamW(ema=decay, accumulate=accumulate)), learning_rate=0.02, kernels=kernels)
    for n in range(12):
        trainer.step(data())
        if (n + 1) % accumulate == 0:
            seen.append(trainer.parameters())
    weights = decay ** np.arange(len(seen))[::-1]
    for name, mean in trainer.parameters(ema=True).items():
        expected = np.tensordot(weights / weights.sum(), np.array([s[name] for s in seen], np.float64), 1)
        np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)


def test_fit_measures_running_means(tmp_path: Path) -> None:
    trainer = ob.Trainer(training(SGD(ema=0.9)), learning_rate=0.1)
    records = trainer.fit([data()] * 3, 2, evaluation=[data()], ema=True, progress=False)
    assert records[-1].evaluation == trainer.evaluate(data(), ema=True) != trainer.evaluate(data())
    with pytest.raises(ob.InvalidArgumentError, match="ema: goes with evaluation"):
        trainer.fit([data()], 1, ema=True)
    with pytest.raises(ob.InvalidArgumentError, match="ema: the optimizer keeps no running means"):
        ob.Trainer(training(SGD())).fit([data()], 1, evaluation=[data()], ema=True)


@pytest.mark.parametrize("kernels", ["native", "onnx", "numpy"])
def test_evaluation_of_many_elements(kernels: str) -> None:
    """Within one batch, and over batches, to 1e-6 of float64."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]> g (float[N, 3, H, W] x) => (float[N, 3, H, W] y) <float[1] s = {1}>
        { y = Mul(x, s) }""")
    graph = ob.training_graph(model, loss="mse", optimizer=SGD(), trainable=["s"])
    trainer = ob.Trainer(graph, learning_rate=0.0, kernels=kernels)
    x = np.random.default_rng(0).random((4, 3, 512, 512), np.float32)  # 3 · 2²⁰ elements
    target = x + np.float32(0.1)
    expected = np.mean((x.astype(np.float64) - target) ** 2)
    for loader in ([(x, target)], [(x[n : n + 1], target[n : n + 1]) for n in range(4)]):
        assert trainer.evaluate(loader) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        ob.losses.SoftmaxCrossEntropy(ignore_index=255),
        ob.losses.SoftmaxCrossEntropy(weight=[1, 5, 0.25]),
        ob.losses.SoftmaxCrossEntropy(weight=[1, 5, 0.25], ignore_index=0, label_smoothing=0.0),
        ob.losses.SoftmaxCrossEntropy(),
    ],
    ids=str,
)
def test_evaluate_does_not_depend_on_the_batches(loss: ob.losses.Loss) -> None:
    """Batches of which most labels are ignored, or weigh little, count for as much as they hold."""
    rng = np.random.default_rng(7)
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[N, 4] x) => (float[N, 3] y) { y = MatMul (x, w) }""")
    model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((4, 3)).astype(np.float32), "w"))
    x, labels = rng.standard_normal((10, 4)).astype(np.float32), rng.integers(0, 3, 10)
    if "255" in str(loss):
        labels[1:5] = labels[6] = 255  # all of the second batch
    trainer = ob.Trainer(ob.training_graph(model, loss=loss, optimizer="sgd"), kernels="onnx")
    whole = trainer.evaluate(x, labels)
    parts = [(x[a:b], labels[a:b]) for a, b in ((0, 6), (6, 7), (7, 10))]
    assert trainer.evaluate(parts) == pytest.approx(whole, rel=1e-6)


def test_runs_that_reach_no_update_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onnx_backprop")
    trainer = ob.Trainer(training(SGD(accumulate=4)), learning_rate=0.1)
    before = trainer.parameters()
    with pytest.warns(ob.OnnxBackpropWarning, match="no update was made: 3 runs were accumulated, an update takes 4"):
        trainer.fit([data()] * 3, 1, progress=False)
    assert all(np.array_equal(value, before[name]) for name, value in trainer.parameters().items())
    trainer.fit([data()] * 3, 2, progress=False)
    assert "2 runs were accumulated, an update takes 4, and they have not changed the weights yet" in caplog.text
    caplog.clear()
    trainer.fit([data()] * 2, 3, progress=False)
    assert "accumulated" not in caplog.text  # it ended with an update
