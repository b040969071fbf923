"""Gradients that are asked for otherwise, on the command line: by inputs beside a loss, inside the graph, stopped."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import onnx_backprop as ob
from onnx_backprop.command import main as command


def test_a_loss_and_the_gradient_by_an_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["convert", "small.onnx", "-o", "out.onnx", "--loss", "mse", "--wrt", "x"]) == 0
    assert "gradients: x_grad, weight_grad, bias_grad, gain_grad\n" in capsys.readouterr().out
    assert onnx.load("out.onnx") == ob.training_graph("small.onnx", loss="mse", wrt_inputs=["x"]).model
    arguments = ["convert", "small.onnx", "-o", "alone.onnx", "--loss", "mse", "--trainable", "x"]
    assert command.main(arguments) == 0
    assert [v.name for v in onnx.load("alone.onnx").graph.output][-1] == "x_grad"


def test_values_inside_and_stops(folder: Path) -> None:
    inner = next(name for node in onnx.load("small.onnx").graph.node[:1] for name in node.output)
    for mode in ("backward", "jvp"):
        arguments = ["convert", "small.onnx", "-o", f"{mode}.onnx", "--mode", mode, "--wrt", inner, "--of", "y"]
        assert command.main(arguments) == 0
        assert onnx.load(f"{mode}.onnx").graph == getattr(ob, mode)("small.onnx", wrt=[inner], of=["y"]).graph
    with pytest.warns(ob.OnnxBackpropWarning):
        stopped = ob.backward("small.onnx", wrt=["x"], of=["y"], stop=[inner])
    arguments = ["convert", "small.onnx", "-o", "out.onnx", "--wrt", "x", "--of", "y", "--stop", inner]
    assert command.main(arguments) == 0
    assert onnx.load("out.onnx") == stopped


def test_stops_in_other_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (inner,) = onnx.load("small.onnx").graph.node[0].output
    assert command.main(["explain", "small.onnx", "--stop", inner]) == 0
    assert "it is marked as a stop" in capsys.readouterr().out
    assert command.main(["check", "small.onnx", "--stop", inner]) == 0
    out = capsys.readouterr().out
    assert "weight" not in out
    assert command.main(["convert", "small.onnx", "-o", "out.onnx", "--loss", "mse", "--stop", inner]) == 0
    assert "gradients: gain_grad\n" in capsys.readouterr().out


def test_a_fixed_batch_is_freed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load("small.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, "one.onnx")
    free = {"x": {0: "batch"}}
    assert command.main(["convert", "one.onnx", "-o", "out.onnx", "--loss", "mse", "--free", "x:0=batch"]) == 0
    assert onnx.load("out.onnx") == ob.training_graph("one.onnx", loss="mse", free=free).model
    assert command.main(["convert", "one.onnx", "-o", "jvp.onnx", "--mode", "jvp", "--free", "x:0=batch"]) == 0
    assert onnx.load("jvp.onnx") == ob.jvp("one.onnx", free=free)
    assert command.main(["explain", "one.onnx", "--free", "x:0=batch"]) == 0
    capsys.readouterr()
    for wrong, message in (
        ("x", "--free: expected INPUT:AXIS=NAME, as x:0=batch, got 'x'"),
        ("z:0=n", "--free: expected the name of an input of the model, got 'z'"),
    ):
        assert command.main(["convert", "one.onnx", "-o", "no.onnx", "--free", wrong]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_gradients_of_each_row(folder: Path) -> None:
    model, out = onnx.load("small.onnx"), "out.onnx"
    cases = [
        ([], ob.backward(model, per_sample=True)),
        (["--per-sample", "x"], ob.backward(model, per_sample=["x"])),
        (["--mode", "jacobian", "--wrt", "x"], ob.jacobian(model, wrt=["x"], per_sample=True)),
        (["--loss", "mse"], ob.training_graph(model, loss="mse", per_sample=True).model),
    ]
    for more, derived in cases:
        named = [] if "--per-sample" in more else ["--per-sample"]
        assert command.main(["convert", "small.onnx", "-o", out, "--force", *more, *named]) == 0
        assert onnx.load(out).graph == derived.graph


def test_rows_are_refused_where_they_mean_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, message in (
        (["--mode", "jvp"], "--per-sample: goes with --loss or --mode backward, jacobian, got jvp"),
        (["--mode", "family"], "--axes and --per-sample: do not go with --mode family"),
        (
            ["--loss", "mse", "--optimizer", "sgd"],
            "--per-sample: the gradients of each row do not go with an optimizer",
        ),
    ):
        assert command.main(["convert", "small.onnx", "-o", "out.onnx", *more, "--per-sample"]) == 2
        assert message in capsys.readouterr().err


def test_private_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", "small.onnx", "-o", "out.onnx", "--force", "--loss", "mse", "--optimizer", "sgd"]
    assert command.main([*arguments, "--per-sample-clip", "1", "--noise", "0.5", "--expected-batch", "8"]) == 0
    privacy = {"per_sample_clip": 1.0, "noise": 0.5, "expected_batch": 8}
    graph = ob.training_graph("small.onnx", loss="mse", optimizer="sgd", **privacy)
    assert onnx.load("out.onnx") == graph.model
    assert command.main([*arguments, "--noise", "0.5"]) == 2
    assert "noise, expected_batch: go with per_sample_clip (--per-sample-clip)" in capsys.readouterr().err
    assert command.main([*arguments, "--per-sample-clip", "1", "--accumulate", "2"]) == 2
    assert "Give --expected-batch" in capsys.readouterr().err
