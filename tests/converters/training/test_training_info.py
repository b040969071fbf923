"""TrainingInfoProto: written, checked, read back and trained; one written by somebody else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.converters.training.optimizers import SGD, Adagrad
from tests.support.training_models import classifier, data, training


@pytest.mark.parametrize("accumulate", [False, True])
def test_round_trip_trains_the_same(tmp_path: Path, accumulate: bool) -> None:
    graph = training(None if accumulate else Adagrad(initial=0.5))
    model = ob.to_training_info(graph)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "model.onnx")
    trainers = [ob.Trainer(graph), ob.Trainer(tmp_path / "model.onnx")]
    for batch in ob.Batches(data(), 12):
        one, other = (trainer.step(batch) for trainer in trainers)
        assert one == other
    for name, value in trainers[0].state().items():
        np.testing.assert_array_equal(value, trainers[1].state()[name])
    assert trainers[1].evaluate(data()) == trainers[0].evaluate(data())


def test_numbers_of_the_optimizer_stay_inputs() -> None:
    graph = training()
    numbers = {v.name for v in graph.model.graph.input} - {*graph.inputs, *graph.updates, graph.learning_rate}
    assert "optimizer.weight_decay" in numbers
    inputs = {v.name for v in ob.from_training_info(ob.to_training_info(graph)).model.graph.input}
    assert numbers <= inputs == {v.name for v in graph.model.graph.input}


def test_the_main_graph_is_the_inference_model() -> None:
    model = ob.to_training_info(training())
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = onnxruntime.InferenceSession(classifier().SerializeToString(), providers=["CPUExecutionProvider"])
    x = {"x": data()["x"]}
    np.testing.assert_allclose(
        np.asarray(session.run(None, x)[0]), np.asarray(expected.run(None, x)[0]), rtol=1e-5, atol=1e-6
    )


def test_bindings_name_what_the_specification_asks_for() -> None:
    graph = training(SGD(momentum=0.5, ema=0.9))
    model = ob.to_training_info(graph)
    (info,) = model.training_info
    main, algorithm = ({t.name for t in g.initializer} for g in (model.graph, info.algorithm))
    assert not main & algorithm
    assert {b.key for b in info.update_binding} == set(graph.updates)
    assert {b.key for b in info.update_binding} <= main | algorithm
    assert {b.value for b in info.update_binding} <= {v.name for v in info.algorithm.output}
    assert [v.name for v in info.algorithm.input] == ["x", "labels", "learning_rate"]
    assert {b.key for b in info.initialization_binding} == set(graph.fill) <= algorithm
    start = helper.make_model(info.initialization, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(start, full_check=True)
    session = onnxruntime.InferenceSession(start.SerializeToString(), providers=["CPUExecutionProvider"])
    for binding in info.initialization_binding:
        value = np.asarray(session.run([binding.value], {})[0])
        np.testing.assert_array_equal(value, graph.initial_state()[binding.key], strict=True)


def somebodys() -> ModelProto:
    """y = W·x; the algorithm computes mean(y - t)² by hand, its Gradient, and W - R · dW."""
    domain = "ai.onnx.preview.training"
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18, "{domain}": 1]>
        line (float[N] x) => (float[N] y) <float[1] W = {{0.0}}> {{ y = Mul(W, x) }}
    """)
    step = parser.parse_graph(f"""
        step (float[N] x, float[N] t, float R) => (float cost, float[1] W_next)
        {{
            y = Mul(W, x)
            d = Sub(y, t)
            square = Mul(d, d)
            cost = ReduceMean<keepdims = 0>(square)
            dW = {domain}.Gradient<xs = ["W"], zs = ["x", "t"], y = "cost">(W, x, t)
            move = Mul(R, dW)
            W_next = Sub(W, move)
        }}
    """)
    info = model.training_info.add()
    info.algorithm.CopyFrom(step)
    info.update_binding.add(key="W", value="W_next")
    return model


def test_one_by_somebody_else() -> None:
    graph = ob.from_training_info(somebodys())
    assert (graph.loss, graph.inputs, graph.learning_rate) == ("cost", ("x", "t"), "R")
    assert graph.updates == {"W": "W_next"}
    trainer = ob.Trainer(graph, learning_rate=0.1)
    x = np.array([1.0, 2.0, -1.0])
    losses = [trainer.step(x=x, t=3 * x) for _ in range(60)]
    assert losses[0] == pytest.approx(18.0)
    np.testing.assert_allclose(trainer.parameters()["W"], [3.0], rtol=1e-4)


def test_refused() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="the model has no training_info"):
        ob.from_training_info(classifier())
    with pytest.raises(ob.InvalidArgumentError, match="there is no step to write"):
        ob.to_training_info(ob.training_graph(classifier(), loss="softmax_cross_entropy"))
    with pytest.raises(ob.InvalidArgumentError, match=r"loss: .*got 'costs'. Did you mean 'cost'"):
        ob.from_training_info(somebodys(), loss="costs")
    broken = somebodys()
    broken.training_info[0].update_binding.add(key="V", value="W_next")
    with pytest.raises(ob.InvalidModelError, match="update_binding: 'V' -> 'W_next'"):
        ob.from_training_info(broken)


def wide() -> ModelProto:
    """One layer of 4 KiB: large enough to lie in a file of its own."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        wide (float[N, 32] x) => (float[N, 32] y) { y = MatMul(x, w) }
    """)
    weight = np.random.default_rng(7).standard_normal((32, 32)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


def test_external_data_in_and_out(tmp_path: Path) -> None:
    """Weights beside the model: read, trained, and the training graph written with its weights beside it again."""
    x = np.random.default_rng(8).standard_normal((5, 32)).astype(np.float32)
    batch = {"x": x, "target": 0 * x}
    onnx.save(wide(), tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    graph = ob.training_graph(tmp_path / "model.onnx", loss="mse", optimizer="sgd")
    expected = ob.Trainer(ob.training_graph(wide(), loss="mse", optimizer="sgd"), learning_rate=0.1)
    losses = [expected.step(batch) for _ in range(3)]
    save_model(graph.model, tmp_path / "training.onnx", limit=100)
    assert next(tmp_path.glob("training.onnx.*.data")).stat().st_size >= 4096
    (tmp_path / "weights.bin").unlink()
    trainer = ob.Trainer(tmp_path / "training.onnx", learning_rate=0.1)
    assert [trainer.step(batch) for _ in range(3)] == losses
    assert losses[2] < losses[0]
