"""onnx-backprop train --dequantize: floats are trained, integers are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_backprop as ob
from onnx_backprop.__main__ import main
from tests.converters.quantized.forms import FORMS
from tests.converters.quantized.test_forms import run, tensors

STATIC = FORMS["a Relu that is gone"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    x = np.random.default_rng(0).uniform(-4, 4, (40, 6)).astype(np.float32)  # the file's own scales end at 2.56
    y = STATIC.y(x, {n: 1.5 * a for n, a in STATIC.floats().items()})
    np.savez(tmp_path / "data.npz", x=x, target=y.astype(np.float32))
    onnx.save(STATIC.model(), tmp_path / "model.onnx")
    return tmp_path


def train(folder: Path, *more: str, dequantize: bool = True) -> int:
    given = ["--data", str(folder / "data.npz"), "--loss", "mse", "--epochs", "40", "--batch-size", "10"]
    given += ["--learning-rate", "0.02", *(["--dequantize"] if dequantize else [])]
    return main(["train", str(folder / "model.onnx"), "-o", str(folder / "out.onnx"), *given, *more])


def loss(folder: Path, name: str) -> float:
    data = np.load(folder / "data.npz")
    return float(np.mean(np.square(run(onnx.load(folder / name), data["x"]) - data["target"])))


def test_writes_integers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder) == 0
    before, after = onnx.load(folder / "model.onnx"), onnx.load(folder / "out.onnx")
    assert [n.op_type for n in after.graph.node] == [n.op_type for n in before.graph.node]
    assert tensors(after)["w_quantized"].dtype == np.int8
    x = np.load(folder / "data.npz")["x"]
    np.testing.assert_allclose(tensors(after)["sx"], np.abs(x).max() / 127, rtol=1e-6)  # of the data
    assert loss(folder, "out.onnx") < 0.05 * loss(folder, "model.onnx")
    assert "the losses are those of the floats" in capsys.readouterr().out


def test_writes_floats(folder: Path) -> None:
    assert train(folder, "--floats") == 0
    assert not {n.op_type for n in onnx.load(folder / "out.onnx").graph.node} & {"QuantizeLinear", "DequantizeLinear"}
    assert loss(folder, "out.onnx") < 0.05 * loss(folder, "model.onnx")
    onnx.checker.check_model(ob.requantize(folder / "out.onnx", folder / "model.onnx", calibration=calibration(folder)))


def calibration(folder: Path) -> list[dict[str, np.ndarray]]:
    return [{"x": np.load(folder / "data.npz")["x"]}]


def test_resumes(folder: Path) -> None:
    """The float model of a file is the same every time, and so a checkpoint fits."""
    assert train(folder, "--epochs", "20") == 0
    (folder / "out.onnx").rename(folder / "half.onnx")
    assert train(folder, "--resume", "--force") == 0
    resumed = tensors(onnx.load(folder / "out.onnx"))
    assert train(folder, "--force") == 0
    for name, array in tensors(onnx.load(folder / "out.onnx")).items():
        np.testing.assert_array_equal(resumed[name], array)


def test_ema(folder: Path) -> None:
    assert train(folder, "--ema", "0.9") == 0
    assert loss(folder, "out.onnx") < 0.2 * loss(folder, "model.onnx")


def test_without_it_the_error_names_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, dequantize=False) == 2
    assert "integers cannot be trained: train --dequantize makes floats of them" in capsys.readouterr().err


def test_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(ob.dequantize(folder / "model.onnx"), folder / "floats.onnx")
    (folder / "model.onnx").write_bytes((folder / "floats.onnx").read_bytes())
    assert train(folder) == 2
    assert "expected a quantised one" in capsys.readouterr().err
    assert not (folder / "out.onnx").exists()
    data = str(folder / "data.npz")
    assert main(["train", str(folder / "model.onnx"), "-o", data, "--data", data, "--loss", "mse", "--floats"]) == 2
    arguments = ["--data", data, "--loss", "mse", "--floats"]
    assert main(["train", str(folder / "model.onnx"), "-o", str(folder / "out.onnx"), *arguments]) == 2
    assert "--floats: goes with --dequantize" in capsys.readouterr().err
