"""The demo: what its network is, that it learns, and what its command leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from PIL import Image

import onnx_backprop as ob
from models import super_resolution
from models.photographs import Patches, Photograph, load
from models.super_resolution import Training, build, enlarge, train, training_graph
from tests.support.adjoint import forward_session

SEED = 5


@pytest.fixture(scope="module")
def graph() -> ob.TrainingGraph:
    return training_graph(build())


@pytest.fixture(scope="module")
def photographs() -> list[Photograph]:
    return [load(name, 2) for name in ("astronaut.png", "motorcycle_left.png")]


def error(model: onnx.ModelProto, batch: tuple[np.ndarray, np.ndarray]) -> float:
    """The mean squared error of a forward model on one batch."""
    (high,) = forward_session(model).run(None, {"low": batch[0]})
    return float(np.mean((np.asarray(high) - batch[1]) ** 2, dtype=np.float64))


def test_all_three_families_of_gradients_work(graph: ob.TrainingGraph) -> None:
    used = {node.op_type for node in graph.model.graph.node if node.domain == ob.DOMAIN}
    assert {"ConvolutionBackwardData", "ConvolutionBackwardWeights"} <= used
    assert {"ConvTransposeBackwardData", "ConvTransposeBackwardWeights"} <= used
    assert "ResizeGrad" in used


def test_training_starts_from_linear_interpolation() -> None:
    photograph = load("coins.png", 2)
    high = enlarge(forward_session(build()), photograph.low_luma)
    size = photograph.high.size
    linear = np.asarray(Image.fromarray(photograph.low_luma).resize(size, Image.Resampling.BILINEAR))
    np.testing.assert_allclose(high, linear, atol=1e-6)


def test_a_short_training_lowers_the_error(graph: ob.TrainingGraph, photographs: list[Photograph]) -> None:
    """By a tenth at least on patches that were not trained on; every parameter has moved."""
    training = train(graph, Patches(photographs, size=12, seed=SEED), steps=120, quiet=True)
    assert len(training.losses) == 120
    batch = Patches(photographs, size=12, seed=SEED + 1).batch(64)
    before, after = error(build(), batch), error(graph.inference_model(training.parameters), batch)
    assert after < 0.9 * before, f"seed {SEED}: {before:.6f} -> {after:.6f}"
    initial = graph.initial_values()
    still = [name for name, value in training.parameters.items() if np.array_equal(value, initial[name])]
    assert not still


def test_the_same_seed_gives_the_same_training(graph: ob.TrainingGraph, photographs: list[Photograph]) -> None:
    one, same = (train(graph, Patches(photographs, size=8, seed=SEED), steps=4, quiet=True) for _ in range(2))
    assert one.losses == same.losses
    for name, value in one.parameters.items():
        np.testing.assert_array_equal(value, same.parameters[name])


def test_the_first_loss_is_the_error_of_the_start(graph: ob.TrainingGraph, photographs: list[Photograph]) -> None:
    training = train(graph, Patches(photographs, size=8, seed=SEED), steps=1, quiet=True)
    batch = Patches(photographs, size=8, seed=SEED).batch(super_resolution.BATCH)
    assert training.losses == [pytest.approx(error(build(), batch), rel=1e-5)]


def test_training_ends_when_the_time_is_over(
    graph: ob.TrainingGraph, photographs: list[Photograph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second whenever it is read: at the start, before each step, at the end."""
    seconds = count()
    monkeypatch.setattr(super_resolution, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    training = train(graph, Patches(photographs, size=8, seed=SEED), steps=10**6, seconds=5, quiet=True)
    assert len(training.losses) == 4
    assert training.seconds == 6
    assert len(train(graph, Patches(photographs, size=8, seed=SEED), steps=9, seconds=1e-9, quiet=True).losses) == 1


def test_a_loss_that_is_no_number_stops_the_training(photographs: list[Photograph]) -> None:
    broken = build()
    for tensor in broken.graph.initializer:
        if tensor.name == "Conv_1.bias":
            tensor.CopyFrom(numpy_helper.from_array(np.full(tensor.dims, np.nan, np.float32), tensor.name))
    graph = training_graph(broken)
    with pytest.raises(FloatingPointError, match="the loss is nan in step 1"):
        train(graph, Patches(photographs, size=8, seed=SEED), steps=3, quiet=True)


def test_the_command_leaves_a_picture_and_two_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    assert super_resolution.main(["--steps", "500", "--seconds", "60", "--output", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "chelsea" in output
    assert "coffee" in output
    assert sorted(p.name for p in folder.iterdir()) == ["model.onnx", "super_resolution.png", "training.onnx"]
    with Image.open(folder / "super_resolution.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").resize((64, 64)).getcolors(4096) or ()) > 100
    onnx.checker.check_model(str(folder / "training.onnx"), full_check=True)
    trained = onnx.load(folder / "model.onnx")
    assert {opset.domain for opset in trained.opset_import} == {""}, "the trained network needs no extension"
    names = {value.name for value in ob.session(folder / "training.onnx").get_outputs()}
    assert "high" in names


def untrained(graph: ob.TrainingGraph, *_: object, **__: object) -> Training:
    return Training(graph.initial_values(), [0.002, 0.001], 1.0)


def test_the_command_fails_when_cubic_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Untrained weights are linear interpolation, which is worse."""
    monkeypatch.setattr(super_resolution, "train", untrained)
    assert super_resolution.main(["--output", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "does not beat cubic up-sampling on chelsea, coffee" in captured.err
    assert captured.out.count("-0.") + captured.out.count("-1.") == 2


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [(KeyboardInterrupt(), 130, "interrupted"), (FloatingPointError("the loss is nan"), 1, "the loss is nan")],
)
def test_a_training_that_ends_early_leaves_no_model(
    failure: BaseException,
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> Training:
        raise failure

    monkeypatch.setattr(super_resolution, "train", fail)
    assert super_resolution.main(["--output", str(tmp_path)]) == code
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["training.onnx"]


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--seconds", "0"], ["--seconds", "nan"], ["--seed", "-1"], ["--step", "x"]]
)
def test_bad_arguments_end_with_code_2(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        super_resolution.main(arguments)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_ends_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert super_resolution.main(["--output", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
