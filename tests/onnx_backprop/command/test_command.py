"""The command: what it writes and what it prints."""

from __future__ import annotations

import importlib
import logging
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from pkgutil import iter_modules

import numpy as np
import onnx
import pytest
from onnx import ModelProto, parser

import onnx_backprop as ob
from models import unet_resize
from onnx_backprop.command import commands, options
from onnx_backprop.command import main as command
from onnx_backprop.command.commands import convert, demo
from onnx_backprop.opset import OPS
from onnx_backprop.ort_ops.runtime import ahead
from tests.support.command import MODEL, files, run


def output_names(path: str) -> list[str]:
    return [value.name for value in onnx.load(path).graph.output]


# --- what convert writes and prints


def test_convert_in_a_process(folder: Path) -> None:
    done = run("convert", "small.onnx", "-o", "out.onnx", "--loss", "mse")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "tensor    shape  numbers  share",
        "weight  2×1×1×1        2  33.3%  trained",
        "bias          2        2  33.3%  trained",
        "gain      2×1×1        2  33.3%  trained",
        "3 parameters trained, 0 frozen; numbers: 6 trained (100.0% trained)",
        "inputs: x, target",
        "loss: loss",
        "gradients: weight_grad, bias_grad, gain_grad",
        "operators of onnx_backprop: BiasAddBackward × 2, ConvolutionBackwardWeights × 1, ReLUBackward × 1",
        "written: out.onnx (kernels 'onnx')",
    ]
    assert files(folder) == {"small.onnx", "out.onnx"}


def test_a_whole_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--optimizer", "sgd", "--momentum", "0.5", "--clip-norm", "1", "--accumulate", "2"]
    assert command.main(["convert", "small.onnx", "-o", "out.onnx", "--loss", "mse", *options]) == 0
    assert "\nstate: " in capsys.readouterr().out
    optimizer = ob.optimizers.SGD(momentum=0.5, clip_norm=1.0, accumulate=2)
    expected = ob.training_graph("small.onnx", loss="mse", optimizer=optimizer)
    assert onnx.load("out.onnx") == expected.model
    x, target = np.ones((2, 1, 4, 4), np.float32), np.zeros((2, 2, 4, 4), np.float32)
    losses = [ob.Trainer(graph).step(x, target) for graph in ("out.onnx", expected)]
    assert losses[0] == losses[1]


def test_the_training_graph_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["convert", "small.onnx", "-o", "out.onnx", "--loss", "mse"]) == 0
    assert capsys.readouterr().err == ""
    expected = ob.training_graph("small.onnx", loss="mse").model
    assert onnx.load("out.onnx") == expected
    onnx.checker.check_model("out.onnx", full_check=True)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 1, 4, 4)).astype(np.float32), "target": np.zeros((2, 2, 4, 4), np.float32)}
    session = ob.session("out.onnx")
    y, loss = map(np.asarray, session.run(["y", "loss"], feeds))
    np.testing.assert_allclose(loss, np.mean(y**2), rtol=1e-6)


def test_inline_writes_no_functions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["convert", "small.onnx", "-o", "out.onnx", "--loss", "mse", "--inline"]) == 0
    assert onnx.load("out.onnx") == ob.training_graph("small.onnx", loss="mse", inline=True).model
    assert capsys.readouterr().out.endswith("written: out.onnx (kernels 'onnx', inlined)\n")
    assert command.main(["convert", "small.onnx", "-o", "gradients.onnx", "--wrt", "x", "--inline"]) == 0
    assert onnx.load("gradients.onnx") == ob.backward("small.onnx", wrt=["x"], inline=True)


def test_without_loss_it_is_backward(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", "small.onnx", "-o", "out.onnx", "--wrt", "x", "gain", "--of", "y"]
    assert command.main(arguments) == 0
    assert onnx.load("out.onnx") == ob.backward("small.onnx", wrt=["x", "gain"], of=["y"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["inputs: x, y_grad", "gradients: x_grad, gain_grad"]


@pytest.mark.parametrize(
    ("arguments", "gradients"),
    [
        (["--loss", "l1", "--frozen", "weight", "gain"], ["bias_grad"]),
        (["--loss", "bce_with_logits", "--trainable", "gain", "--trainable", "bias"], ["gain_grad", "bias_grad"]),
        (["--loss", "mse", "--frozen", "gain"], ["weight_grad", "bias_grad"]),
        (["--loss", "softmax_cross_entropy"], ["weight_grad", "bias_grad", "gain_grad"]),
    ],
)
def test_options_reach_training_graph(folder: Path, arguments: list[str], gradients: list[str]) -> None:
    assert command.main(["convert", "small.onnx", "-o", "out.onnx", "--quiet", *arguments]) == 0
    assert output_names("out.onnx") == ["loss", "y", *gradients]


def test_prediction_names_the_output(folder: Path) -> None:
    model = onnx.load("small.onnx")
    model.graph.output.append(onnx.helper.make_tensor_value_info("r", 1, ["N", 2, 4, 4]))
    onnx.save(model, "two.onnx")
    arguments = ["convert", "two.onnx", "-o", "out.onnx", "--loss", "mse", "--quiet", "--prediction", "r"]
    assert command.main(arguments) == 0
    assert output_names("out.onnx") == ["loss", "y", "r", "weight_grad", "bias_grad"]


def test_loss_none_takes_the_loss_of_the_model(folder: Path) -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        own (float[1] x) => (float[1] cost) <float[1] gain = {2.0}> { cost = Mul(x, gain) }
    """)
    onnx.save(model, "own.onnx")
    assert command.main(["convert", "own.onnx", "-o", "out.onnx", "--loss", "none", "--quiet"]) == 0
    assert output_names("out.onnx") == ["cost", "gain_grad"]
    assert [value.name for value in onnx.load("out.onnx").graph.input] == ["x", "gain"]


def test_quiet_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["convert", "small.onnx", "-o", "out.onnx", "--loss", "mse", "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")


def test_verbose_shows_what_the_converters_report(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("onnx_backprop")

    def report(*_: object, **__: object) -> ModelProto:
        logging.getLogger("onnx_backprop.converters.rules.resize").info("Resize 'up': its gradient is ResizeGrad")
        return parser.parse_model(MODEL)

    monkeypatch.setattr(convert, "differentiated", report)
    for option, shown in (("--verbose", "Resize 'up': its gradient is ResizeGrad\n"), ("--force", "")):
        assert command.main(["convert", "small.onnx", "-o", "out.onnx", "--force", option]) == 0
        assert capsys.readouterr().err == shown
    assert logger.handlers == []


def test_many_names_are_shortened(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gains = [f"gain{n}" for n in range(12)]
    body = " ".join(f"v{n + 1} = Mul({'x' if n == 0 else f'v{n}'}, {name})" for n, name in enumerate(gains))
    values = ", ".join(f"float[1] {name} = {{1.0}}" for name in gains)
    text = f'<ir_version: 10, opset_import: ["": 18]> many (float[1] x) => (float[1] v12) <{values}> {{ {body} }}'
    onnx.save(parser.parse_model(text), "many.onnx")
    arguments = ["convert", "many.onnx", "-o", "out.onnx", "--force"]
    assert command.main(arguments) == 0
    assert "gain7_grad, … (12 in all; --verbose lists them)" in capsys.readouterr().out
    assert command.main([*arguments, "--verbose"]) == 0
    assert "gain11_grad" in capsys.readouterr().out


def test_compilation_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def compiled(*, quiet: bool) -> str:
        with options.compilation_shown(quiet=quiet):
            for done in (0, 1, 3):
                for watcher in ahead.watchers:
                    watcher(done, 3)
        assert not ahead.watchers
        return capsys.readouterr().err

    assert compiled(quiet=True) == ""
    assert compiled(quiet=False) == "compiling 3 kernels for this processor, once\n"


# --- ops, demo, version


def test_ops_lists_both_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_backprop.command.main.fitting", nullcontext)  # a row a line
    assert command.main(["ops"]) == 0
    lines = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    for op in OPS:
        assert [op.name, op.source.strip()] in lines
    versions = [str(op.since_version) for op in ob.supported_ops() if op.op_type == "Conv"]
    assert ["Conv", ", ".join(versions)] in lines
    assert {row[0] for row in lines} >= {op.op_type for op in ob.supported_ops() if not op.domain}


def test_ops_as_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["ops", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("|---|---|") == 2
    for op in OPS:
        assert f"| `{op.name}` | {op.source.strip()} |" in lines
    assert sum(line.startswith("| `") for line in lines) == len(OPS) + len(
        {(op.domain, op.op_type) for op in ob.supported_ops()}
    )


@pytest.mark.parametrize("buffering", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_that_goes_away_is_no_error(buffering: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, *buffering, "-m", "onnx_backprop", "ops"],
            stdout=closed,
            stderr=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_demo_runs_the_script_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "super_resolution.py").write_text(
        "import sys\nopen(sys.argv[1], 'w').write(' '.join(sys.argv[2:]))\nsys.exit(7)\n"
    )
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "onnx_backprop" / "command" / "commands" / "demo.py"))
    assert command.main(["demo", str(tmp_path / "said"), "--steps", "3", "-h"]) == 7
    assert (tmp_path / "said").read_text() == "--steps 3 -h"


def test_demo_without_the_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "__file__", str(tmp_path / "onnx_backprop" / "command" / "commands" / "demo.py"))
    assert command.main(["demo"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "models/super_resolution.py" in err
    assert "make demo" in err


A_COMMAND = """\"\"\"`onnx-backprop rows`: print a number.\"\"\"
from onnx_backprop.command.parser import Command, argument

COMMAND = Command(
    run=lambda arguments: print(arguments.count) or 0,
    arguments=[argument("--count", default=3, least=1, help="of rows (%(default)s)")],
)
"""


def test_a_command_is_one_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.py").write_text(A_COMMAND)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{commands.__name__}.rows", raising=False)
    assert command.main(["rows", "--count", "4"]) == 0
    assert command.main(["rows", "--count", "0"]) == 2
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    out, err = capsys.readouterr()
    assert out.startswith("4\n")
    assert re.search("^    rows +print a number$", out, re.M)
    assert err == "onnx-backprop: error: --count: expected 1 or more, got 0\n"


def test_help_imports_nothing() -> None:
    """Every command with its sentence, and neither NumPy nor the package."""
    code = """
import atexit, sys
import onnx_backprop_command
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
sys.argv[1:] = ["--help"]
onnx_backprop_command.main()
"""
    environment = os.environ | {"COLUMNS": "300"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert {"numpy", "onnx", "onnx_backprop"}.isdisjoint(ended.stderr.split())
    listed = dict(re.findall(r"^    (\w+) +(\w.*)$", ended.stdout, re.M))
    assert sorted(listed) == sorted(module.name for module in iter_modules(commands.__path__))
    for name, sentence in listed.items():
        assert (doc := importlib.import_module(f"{commands.__name__}.{name}").__doc__) is not None
        assert doc.splitlines()[0] == f"`onnx-backprop {name}`: {sentence}."


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--version"])
    assert capsys.readouterr().out == f"onnx-backprop {ob.__version__}\n"


QUANTIZED = """
    <ir_version: 10, opset_import: ["": 21]> small (float[N, 2] x) => (float[N, 3] y)
    <float[2, 3] w = {0.3, -0.7, 1.2, 0.4, 9.0, -0.2}, float[2, 3] head = {0.3, -0.7, 1.2, 0.4, 9.0, -0.2},
     float s = {0.03125}, int8 z = {0}, float[3] bias = {0.0, 0.0, 0.0}>
    { q = QuantizeLinear(w, s, z) v = DequantizeLinear(q, s, z) a = Gemm(x, v, bias) b = Gemm(x, head, bias)
      f = Floor(head) c = Add(a, b) y = Add(c, bias) }
"""


def test_options_of_quantized_and_shared_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages are in the terms of the command, warnings are lines, and the options reach the library."""
    onnx.save(parser.parse_model(QUANTIZED), "quantized.onnx")
    convert = ["convert", "quantized.onnx", "-o", "out.onnx", "--loss", "mse"]
    assert command.main(convert) == 2
    assert "--straight-through" in capsys.readouterr().err
    assert command.main([*convert, "--straight-through"]) == 0
    captured = capsys.readouterr()
    assert re.search(r"^onnx-backprop: warning: trained as one.*--untie gives each its own$", captured.err, re.M)
    assert re.search(r"^s +scalar +1 +[0-9.]+% +quantization scale of QuantizeLinear$", captured.out, re.M)
    more = ["--straight-through", "--untie", "--tie", "w=head", "--force"]
    assert command.main([*convert, *more]) == 0
    assert capsys.readouterr().err == ""
    assert list(ob.TrainingGraph.load("out.onnx").parameters) == ["w", "bias", "bias_2", "bias_3"]
    assert command.main([*convert, *more, "--strict"]) == 0
    assert command.main([*convert, "--tie", "w", "--force"]) == 2
    assert "--tie: expected two names as A=B, got 'w'" in capsys.readouterr().err


def test_strict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(
        parser.parse_model(QUANTIZED.replace("y = Add(c, bias)", "y = Add(f, bias)").replace("[N, 3] y", "[A, B] y")),
        "floor.onnx",
    )
    convert = ["convert", "floor.onnx", "-o", "out.onnx", "--wrt", "head"]
    assert command.main(convert) == 0
    assert "warning: --wrt: the derivative by 'head' is zero: Floor 'f' stops it" in capsys.readouterr().err
    assert command.main([*convert, "--strict", "--force"]) == 2


def test_a_budget_of_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "unet.onnx", tmp_path / "out.onnx"
    onnx.save(unet_resize.build(), model)
    given = ["convert", str(model), "-o", str(out), "--loss", "bce_with_logits", "--memory", "60%"]
    assert command.main([*given, "--lengths", "N=2", "H=32", "W=32"]) == 0
    assert "nodes run again" in capsys.readouterr().out
    assert any(node.name.endswith("/recomputed") for node in onnx.load(out).graph.node)
    assert command.main([*given, "--force", "--lengths", "N=2", "H=none"]) == 2
    assert "--lengths: expected NAME=N" in capsys.readouterr().err
    assert command.main([*given, "--force", "--lengths", "N=2", "H=32"]) == 2
    assert "the lengths of 'W' (axis 3 of 'image') are not known" in capsys.readouterr().err


# --- convert --mode


@pytest.mark.parametrize(
    ("mode", "outputs"),
    [
        ("vjp", ["x_grad"]),
        ("jvp", ["y_tangent"]),
        ("jacobian", ["y_jacobian_x"]),
        ("hvp", ["x_hvp"]),
        ("hessian", ["x_hessian_x"]),
        ("value_and_grad", ["x_grad"]),
    ],
)
def test_convert_to_a_derivative(
    folder: Path, capsys: pytest.CaptureFixture[str], mode: str, outputs: list[str]
) -> None:
    scalar = mode in ("hvp", "hessian", "value_and_grad")
    text = MODEL.replace("float[N, 2, 4, 4] y", "float y").replace("y = Mul", "z = Mul") if scalar else MODEL
    text = text.replace("Mul(r, gain)", "Mul(r, gain) q = Mul(z, z) y = ReduceSum<keepdims = 0>(q)") if scalar else text
    onnx.save(parser.parse_model(text), "model.onnx")
    assert command.main(["convert", "model.onnx", "-o", "out.onnx", "--mode", mode, "--wrt", "x"]) == 0
    assert output_names("out.onnx") == ["y", *outputs]
    assert f"{mode}: {', '.join(outputs)}\n" in capsys.readouterr().out
    library = getattr(ob, mode, ob.backward) if mode != "value_and_grad" else ob.backward
    assert onnx.load("out.onnx").graph == library(parser.parse_model(text), wrt=["x"]).graph


def test_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["convert", "small.onnx", "-o", "rows.onnx", "--mode", "vmap", "--axes", "x:-1"]) == 0
    assert onnx.load("rows.onnx") == ob.vmap("small.onnx", {"x": -1})
    assert "vmap: y\n" in capsys.readouterr().out


def test_modes_are_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--mode", "jacobian", "--batched"], "--batched: goes with --mode vjp, jvp, hvp, got jacobian"),
        (["--mode", "jvp", "--loss", "mse"], "--mode: does not go with --loss"),
        (["--mode", "jvp", "--axes", "x:0"], "--axes: goes with --mode vmap, got jvp"),
        (["--mode", "vmap", "--axes", "x"], "--axes: expected INPUT:AXIS, as x:0, got 'x'"),
        (["--mode", "vmap", "--axes", "x:0", "--wrt", "x"], "--wrt: does not go with --mode vmap"),
        (["--mode", "vmap", "--axes", "x:0", "--straight-through"], "--straight-through: does not go with --mode vmap"),
        (["--mode", "family", "--axes", "x:0"], "--axes and --per-sample: do not go with --mode family"),
        (["--no-frozen-statistics"], "--no-frozen-statistics: goes with --loss"),
        (["--loss", "mse", "--lengths", "N=4"], "--lengths: goes with --memory"),
        (["--mode", "hvp"], "of: expected an output of one element, 'y' has the shape ['N', 2, 4, 4]"),
    ):
        assert command.main(["convert", "small.onnx", "-o", "out.onnx", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert command.main(["convert", "small.onnx", "-o", "out.onnx", "--mode", "jvp", "--batched", "--wrt", "x"]) == 0
    assert [d.dim_param or d.dim_value for d in onnx.load("out.onnx").graph.input[1].type.tensor_type.shape.dim] == [
        "seeds", "N", 1, 4, 4,
    ]  # fmt: skip
