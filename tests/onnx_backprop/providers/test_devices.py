"""Training on a device: on the CPU in the place of one whose kernels are limited, and on WebGPU where the plugin is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.devices.bounds import REFUSES
from onnx_backprop.providers import choose, placed
from onnx_backprop.providers.placement import Elsewhere, Placement
from onnx_backprop.training import trainer as trainers
from tests.devices.beside import beside
from tests.devices.networks import tiny
from tests.onnx_backprop.distributed.threads import on_ranks
from tests.support.training_models import data, training

ROWS = data()


def batches(*sizes: int) -> list[dict[str, np.ndarray]]:
    ends = np.cumsum(sizes)
    return [
        {name: array[end - size : end] for name, array in ROWS.items()} for size, end in zip(sizes, ends, strict=True)
    ]


def test_a_training_on_a_device_is_that_of_the_cpu(device: str, tmp_path: Path) -> None:
    """Batches of other lengths are other sessions; checkpoints and exports go on here and there."""
    graph = training()
    ours, there = ob.Trainer(graph), ob.Trainer(graph, device=device)
    given = batches(10, 10, 7, 10, 7)
    assert there.placement is None
    for batch in given:
        np.testing.assert_allclose(there.step(batch), ours.step(batch), rtol=1e-5)
    assert there.kernels == "onnx"
    on = there._placed
    assert on is not None
    assert len(on._sessions) == (2 if on.target.limits.fixed_lengths else 1)
    assert there.placement is not None
    assert there.placement.nodes > 20
    np.testing.assert_allclose(there.evaluate(given[0]), ours.evaluate(given[0]), rtol=1e-5)
    for name, value in ours.predict(given[0]).items():
        np.testing.assert_allclose(there.predict(given[0])[name], value, rtol=1e-4, atol=1e-6)
    ours.save(tmp_path / "ours")
    there.save(tmp_path / "there")
    ours.export(tmp_path / "ours.onnx")
    there.export(tmp_path / "there.onnx")
    assert (tmp_path / "ours").stat().st_size == (tmp_path / "there").stat().st_size
    models = [onnx.load(tmp_path / name) for name in ("ours.onnx", "there.onnx")]
    for model in models:
        del model.graph.initializer[:]
    assert models[0] == models[1]
    swapped = ob.Trainer(graph).load(tmp_path / "there"), ob.Trainer(graph, device=device).load(tmp_path / "ours")
    for trainer, name in zip(swapped, ("there", "ours"), strict=True):
        trainer.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / name).read_bytes(), "bit for bit what was loaded"
    losses = [trainer.step(given[0]) for trainer in (ours, there, *swapped)]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    assert losses[0] == ob.Trainer(graph).load(tmp_path / "ours").step(given[0])


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("device", [None, "webgpu"])
def test_losses_are_read_every_so_many_steps(device: str | None, tmp_path: Path) -> None:
    graph = training()
    given = batches(10, 10, 10, 10, 10, 10)
    every, later = ob.Trainer(graph, device=device), ob.Trainer(graph, device=device, read_every=4)
    expected = [every.step(batch) for batch in given]
    losses = [later.step(batch) for batch in given]
    assert np.isnan(losses[:3]).all()
    assert losses[3:] == [expected[3]] * 3
    assert later.read_losses() == expected[4:]
    assert [loss for _, loss in later.losses.points] == expected
    assert later.read_losses() == []
    whole, parts = (ob.Trainer(graph, device=device, read_every=n) for n in (1, 4))
    loader = ob.Batches(ROWS, 10, seed=0)
    records = [
        trainer.fit(loader, 2, checkpoint=tmp_path / str(n), every=5, log=tmp_path / f"{n}.csv", evaluation=given[:1])
        for n, trainer in enumerate((whole, parts))
    ]
    assert [(r.step, r.loss, r.evaluation) for r in records[0]] == [(r.step, r.loss, r.evaluation) for r in records[1]]
    assert len((tmp_path / "1.csv").read_text().splitlines()) == 13
    seen: list[float] = []
    parts.fit(loader, 3, callbacks=[lambda trainer, record: seen.append(record.loss - trainer.losses.last)])
    assert seen == [0.0] * 6


@pytest.mark.usefixtures("limited")
def test_a_loss_that_is_no_number_is_found_when_it_is_read() -> None:
    trainer = ob.Trainer(training(), learning_rate=1e30, device="webgpu", read_every=3)
    given = batches(10, 10, 10)
    trainer.step(given[0])
    trainer.step(given[1])
    with pytest.raises(FloatingPointError, match="the loss is .* in step "):
        trainer.step(given[2])


def test_a_node_that_a_provider_takes_and_cannot_run_goes_to_the_cpu(
    limited: choose.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime's own words about a node of which nobody knew; the step then runs, and the state is not spoiled."""
    graph = training()
    there, ours, failed = ob.Trainer(graph, device="webgpu"), ob.Trainer(graph), list[str]()
    run = trainers.Buffers.run

    def fails(buffers: Any) -> None:
        (node, *_) = [n for n in there._placed._model.graph.node if n.op_type == "Relu"]  # type: ignore[union-attr]
        name = node.name or f"Relu/{node.output[0]}"
        if name not in there._placed._moved:  # type: ignore[union-attr]
            failed.append(name)
            raise RuntimeError(
                f"[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Relu node. "
                f"Name:'{name}_token_7' Status Message: no such thing."
            )
        run(buffers)

    monkeypatch.setattr(placed, "placement", _on_device)
    monkeypatch.setattr(trainers.Buffers, "run", fails)
    given = batches(10, 10)
    losses = [there.step(batch) for batch in given]
    monkeypatch.setattr(trainers.Buffers, "run", run)
    np.testing.assert_allclose(losses, [ours.step(batch) for batch in given], rtol=1e-5)
    assert len(failed) == 1
    (reason,) = there._placed._moved.values()  # type: ignore[union-attr]
    assert reason == "its kernel fails there, no such thing"
    assert limited.provider.name == "webgpu"


def _on_device(session: Any, target: Any, model: Any, host: Any) -> Placement:
    """As if the CPU were a device."""
    return Placement(target.name, len(model.graph.node), tuple(Elsewhere("?", name, why) for name, why in host.items()))


def test_the_sentence() -> None:
    nodes = [Elsewhere("MaxPool", "p1", "no Indices"), *(Elsewhere("Add", f"a{n}", "no int64") for n in range(6))]
    assert str(Placement("WebGpu", 288, tuple(nodes))) == (
        "281 of 288 nodes on WebGpu; MaxPool 'p1' on the CPU: no Indices; "
        "Add 'a0', Add 'a1', Add 'a2', Add 'a3' and 2 more on the CPU: no int64"
    )
    assert str(Placement("WebGpu", 3)) == "3 of 3 nodes on WebGpu"


@pytest.mark.usefixtures("limited")
def test_routes_of_python_and_ranks_do_not_go_with_a_device() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="kernels: expected kernels 'onnx' with a device, got 'numpy'"):
        ob.Trainer(training(), device="webgpu", kernels="numpy")
    for more in ({"device": "webgpu"}, {"providers": ["WebGpuExecutionProvider"]}, {"read_every": 2}):
        with pytest.raises(ob.InvalidArgumentError, match="device, providers, read_every: go with one rank, not sever"):
            on_ranks(2, lambda c, more=more: ob.Trainer(training(), kernels="onnx", communicator=c, **more))


def test_other_doors(device: str, rng: np.random.Generator) -> None:
    """A session, a function and a check on a device give what they give on the CPU, whatever is fed."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[4] x) => (float e) '
        "{ a = MatMul (w, x) b = Tanh (a) c = Mul (b, b) e = ReduceSum <keepdims = 0> (c) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((4, 4)).astype(np.float32), "w"))
    ours, there = (ob.value_and_grad(model, ["x"], hvp=True, device=each) for each in (None, device))
    sessions = ob.session(model), ob.session(model, device=device)
    for _ in range(3):
        x, p = rng.standard_normal((2, 4))
        np.testing.assert_allclose(there(x)[1], ours(x)[1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(there.hvp(x, p), ours.hvp(x, p), rtol=1e-4, atol=1e-5)
        a, b = (np.asarray(session.run(None, {"x": x.astype(np.float32)})[0]) for session in sessions)
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert ob.check_gradients(model, device=device, progress=iter).ok


def test_metrics_and_callbacks_on_a_device(device: str, tmp_path: Path) -> None:
    """What is measured there, and what acts on it, is what the CPU's training measures and does."""
    asked = {name: name for name in ("accuracy", "f1", "top2", "confusion_matrix", "auroc", "perplexity")}
    asked |= {"own": ob.metrics.Function(function=lambda true, chosen: (true == chosen).mean(), form="classes")}

    def trained(where: str | None) -> tuple[Any, ...]:
        it = ob.Trainer(training(), learning_rate=0.02, device=where)
        calls = [
            ob.callbacks.KeepBest(tmp_path / f"{where}.safetensors", "accuracy"),
            ob.callbacks.EarlyStopping("evaluation", patience=2),
            ob.callbacks.ReduceLROnPlateau("evaluation", patience=1),
            histograms := ob.callbacks.Histograms(batches(10)[0], every=6),
        ]
        records = it.fit(batches(20, 20), 4, evaluation=batches(20, 20), metrics=asked, callbacks=calls)
        courses = {name: course.quantiles for name, course in histograms.found.items()}
        averaged = ob.Trainer(training(), learning_rate=0.02, device=where)
        averaged.fit(batches(20), 4, callbacks=[ob.callbacks.StochasticWeightAveraging(start=0.5)])
        return records, courses, it.parameters(), averaged.parameters()

    (ours, counted, weights, mean), (there, counted_there, weights_there, mean_there) = trained(None), trained(device)
    assert [r.learning_rate for r in there] == [r.learning_rate for r in ours]
    for one, other in zip(ours, there, strict=True):
        assert one.metrics.keys() == other.metrics.keys()
        for name, value in one.metrics.items():
            np.testing.assert_allclose(other.metrics[name], value, rtol=1e-4, err_msg=name)
    assert counted_there.keys() == counted.keys() >= {"weights/w1", "gradients/w1"}
    for name, quantiles in counted.items():
        np.testing.assert_allclose(counted_there[name], quantiles, rtol=1e-2, atol=1e-5, err_msg=name)
    for name, value in weights.items():
        np.testing.assert_allclose(weights_there[name], value, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(mean_there[name], mean[name], rtol=1e-3, atol=1e-5)


def test_on_webgpu(webgpu: str, caplog: pytest.LogCaptureFixture) -> None:
    """Losses of the CPU; state copied there once and back for a checkpoint; what runs elsewhere is said once."""
    result = beside(tiny(), webgpu, 6, read_every=3)
    assert result["unlike"] < 1e-5
    assert result["copied"] == 0
    assert result["saved"] == result["state"] - 1, "the counter of steps lies in the CPU's memory"
    assert {reason for _, reason in result["elsewhere"]} == {"its kernel there takes no int64", REFUSES}
    messages = [record.message for record in caplog.records if "nodes on WebGpu" in record.message]
    assert len(messages) == 1


def test_a_function_on_webgpu_sees_what_it_is_fed(webgpu: str, rng: np.random.Generator) -> None:
    """A binding copies what is fed to the device at once: one that were kept would give the first gradient again."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[3] x) => (float e) { c = Mul (x, x) e = ReduceSum <keepdims = 0> (c) }'
    )
    function = ob.value_and_grad(model, ["x"], device=webgpu)
    for _ in range(3):
        x = rng.standard_normal(3)
        np.testing.assert_allclose(function(x)[1], 2 * x, rtol=1e-5)
