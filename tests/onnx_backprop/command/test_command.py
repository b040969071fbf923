"""The command: what it writes, what it prints, and how it refuses bad input."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from models import unet_resize
from onnx_backprop.command import main as command
from onnx_backprop.command import options
from onnx_backprop.converters.reverse import registry
from onnx_backprop.opset import OPS
from onnx_backprop.ort_ops.runtime import ahead

MODEL = """
    <ir_version: 10, opset_import: ["": 18]>
    small (float[N, 1, 4, 4] x) => (float[N, 2, 4, 4] y)
    <float[2, 1, 1, 1] weight = {0.5, -1.5}, float[2] bias = {0.25, 1.0}, float[2, 1, 1] gain = {2.0, 3.0}>
    { [conv] c = Conv(x, weight, bias)  [relu] r = Relu(c)  [scale] y = Mul(r, gain) }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, holding small.onnx."""
    monkeypatch.chdir(tmp_path)
    onnx.save(parser.parse_model(MODEL), "small.onnx")
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "onnx_backprop", *arguments], capture_output=True, text=True, check=False
    )


def output_names(path: str) -> list[str]:
    return [value.name for value in onnx.load(path).graph.output]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- what convert writes and prints


def test_convert_in_a_process(folder: Path) -> None:
    done = run("convert", "small.onnx", "-o", "out.onnx", "--loss", "mse")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "inputs: x, target",
        "loss: loss",
        "parameters: weight 2×1×1×1, bias 2, gain 2×1×1",
        "gradients: weight_grad, bias_grad, gain_grad",
        "operators of onnx_backprop: BiasAddBackward × 1, ConvolutionBackwardWeights × 1, ReLUBackward × 1",
        "written: out.onnx (kernels 'onnx')",
    ]
    assert files(folder) == {"small.onnx", "out.onnx"}


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
        logging.getLogger("onnx_backprop.converters.rules.resize").info("Resize 'up': by InterpolateBackward")
        return parser.parse_model(MODEL)

    monkeypatch.setattr(command, "differentiated", report)
    for option, shown in (("--verbose", "Resize 'up': by InterpolateBackward\n"), ("--force", "")):
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


# --- bad input


def test_on_a_terminal_no_word_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    assert command.main(["explain", "no_such_model.onnx"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40
    assert " ".join(line.strip() for line in lines).startswith("onnx-backprop: error: no such file: no_such_model.onnx")


def write_bad_files() -> None:
    good = Path("small.onnx").read_bytes()
    Path("truncated.onnx").write_bytes(good[: len(good) // 2])
    Path("empty.onnx").touch()
    Path("text.onnx").write_text("this is no model\n")
    Path("text.json").write_text("{oops")
    Path("folder.onnx").mkdir()
    Path("there.onnx").write_text("precious")
    model = onnx.load("small.onnx")
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))  # into raw bytes
    onnx.save(model, "external.onnx", save_as_external_data=True, location="gone.data", size_threshold=0)
    Path("gone.data").unlink()
    model = onnx.load("small.onnx")
    model.graph.node[0].op_type = "Convolve"
    onnx.save(model, "unknown_op.onnx")
    text = "small (int64[2] n, float[2] x) => (float[2] y) <float[2] gain = {1.0, 2.0}>"
    head = '<ir_version: 10, opset_import: ["": 18]>'
    onnx.save(
        parser.parse_model(f"{head} {text} {{ f = Cast<to = 1>(n)  g = Mul(f, gain)  y = Add(g, x) }}"), "ints.onnx"
    )


BAD_INPUT = {
    "no such file": ("convert none.onnx -o out.onnx", r"no such file: none\.onnx"),
    "a folder": ("convert folder.onnx -o out.onnx", r"folder\.onnx is a folder"),
    "truncated": ("convert truncated.onnx -o out.onnx", r"truncated\.onnx is not an ONNX file: .+"),
    "empty": ("convert empty.onnx -o out.onnx", r"empty\.onnx is not an ONNX file: it holds no graph"),
    "text": ("convert text.onnx -o out.onnx", r"text\.onnx is not an ONNX file: .+"),
    "broken json": ("convert text.json -o out.onnx", r"text\.json is not an ONNX file: .+"),
    "external data gone": ("convert external.onnx -o out.onnx", r"external\.onnx cannot be read: .*gone\.data"),
    "unknown operator": ("convert unknown_op.onnx -o out.onnx", r"does not pass onnx\.checker: .*Convolve"),
    "unknown wrt": ("convert small.onnx -o out.onnx --wrt gian", r"error: --wrt: .*got 'gian'\. Did you mean 'gain'"),
    "unknown of": ("convert small.onnx -o out.onnx --of z", r"of: expected the name of a graph output, got 'z'"),
    "integer wrt": ("convert ints.onnx -o out.onnx --wrt n", r"wrt: 'n' has type INT64"),
    "unknown trainable": (
        "convert small.onnx -o out.onnx --loss mse --trainable wieght",
        r"trainable: .*got 'wieght'\. Did you mean 'weight'",
    ),
    "unknown frozen": ("convert small.onnx -o out.onnx --loss mse --frozen bais", r"Did you mean 'bias'"),
    "loss of many elements": ("convert small.onnx -o out.onnx --loss none", r"'y' .* must have one element"),
    "unknown loss": (
        "convert small.onnx -o out.onnx --loss msee",
        r"--loss: invalid choice: 'msee' .*Did you mean 'mse'\? `.* convert --help`",
    ),
    "unknown kernels": ("convert small.onnx -o out.onnx --kernels nump", r"kernels: .*'numba', got 'nump'"),
    "native kernels inline": ("convert small.onnx -o out.onnx --inline --kernels numba", r"inline: kernels 'numba'"),
    "no folder to write to": (
        "convert small.onnx -o none/out.onnx",
        r"cannot write none/out\.onnx: there is no folder",
    ),
    "output is a folder": ("convert small.onnx -o folder.onnx --force", r"cannot write folder\.onnx: it is a folder"),
    "output is a device": (f"convert small.onnx -o {os.devnull} --force", r"not a regular file"),
    "output exists": ("convert small.onnx -o there.onnx", r"there\.onnx exists\. .*--force"),
    "wrt beside a loss": ("convert small.onnx -o out.onnx --loss mse --wrt x", r"--wrt: .*--loss"),
    "frozen without a loss": ("convert small.onnx -o out.onnx --frozen gain", r"--frozen: go with --loss"),
    "verbose and quiet": ("convert small.onnx -o out.onnx --verbose --quiet", r"--verbose and --quiet"),
    "no output": ("convert small.onnx", r"required: -o/--output"),
    "unknown option": ("convert small.onnx -o out.onnx --los mse --fast", r"unrecognized arguments: .*--fast"),
    "unknown command": ("transmute", r"invalid choice: 'transmute'"),
    "misspelt command": ("convrt small.onnx", r"invalid choice: 'convrt' .*Did you mean 'convert'\?"),
    "misspelt option": (
        "check small.onnx --tolerence=1",
        r"--tolerence=1\. Did you mean '--tolerance'\? `.* check --help`",
    ),
    "misspelt file": ("check smal.onnx", r"no such file: smal\.onnx\. Did you mean 'small\.onnx'\?"),
    "stray argument": ("ops everything", r"unrecognized arguments: everything"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line(folder: Path, capfd: pytest.CaptureFixture[str], case: str) -> None:
    arguments, message = BAD_INPUT[case]
    write_bad_files()
    before = files(folder)
    assert command.main(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("onnx-backprop: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert re.search(message, err), err
    assert files(folder) == before
    assert Path("there.onnx").read_text() == "precious"


def test_the_demo_says_what_it_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "skimage" else name)
    assert command.main(["demo"]) == 2
    assert "the demo needs skimage. Run `make demo`, or" in capsys.readouterr().err


def test_without_a_command_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "onnx-backprop train model.onnx -o trained.onnx --data" in err


@pytest.mark.parametrize("output", ["none/out.onnx", "small.onnx", "folder"])
def test_an_unusable_output_is_refused_before_the_work(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    Path("folder").mkdir()
    monkeypatch.setattr(command, "load", lambda _: pytest.fail("the model is read"))
    assert command.main(["convert", "small.onnx", "-o", output]) == 2
    assert capsys.readouterr().err.startswith("onnx-backprop: error: ")


def test_bad_input_in_a_process(folder: Path) -> None:
    done = run("convert", "small.onnx", "-o", "out.onnx", "--wrt", "wieght")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"onnx-backprop: error: --wrt: .*Did you mean 'weight'.*\n", done.stderr)
    assert files(folder) == {"small.onnx"}


def test_missing_rules_are_a_list(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in [key for key in registry.RULES if key[1] == "Mul"]:
        monkeypatch.delitem(registry.RULES, key)
    assert command.main(["convert", "small.onnx", "-o", "out.onnx", "--wrt", "weight"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("onnx-backprop: error: no gradient rule for 1 operator(s)")
    assert "\n  Mul: 'scale'\n" in err
    assert "Traceback" not in err
    assert not Path("out.onnx").exists()


def test_a_failed_write_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert command.main(["convert", "small.onnx", "-o", "out.onnx"]) == 2
    assert "cannot write out.onnx: No space left on device" in capsys.readouterr().err
    assert files(folder) == {"small.onnx"}


@pytest.mark.parametrize("step", ["convert", "write"])
def test_interruption(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if step == "convert":
        monkeypatch.setattr(command, "differentiated", interrupt)
    else:
        monkeypatch.setattr(os, "fsync", interrupt)
    assert command.main(["convert", "small.onnx", "-o", "out.onnx"]) == 130
    assert capsys.readouterr().err == "onnx-backprop: interrupted\n"
    assert files(folder) == {"small.onnx"}


STARTS = """
import signal, sys
import onnx_backprop_command

class Finder:
    def find_spec(self, name, *_):
        if name == MODULE:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["--version"]
sys.exit(onnx_backprop_command.main())
"""


@pytest.mark.parametrize("module", ["onnx_backprop", "numpy", "onnx_backprop.command.train"])
def test_interruption_of_the_imports(module: str) -> None:
    script = f"MODULE = {module!r}{STARTS}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "onnx-backprop: interrupted\n")


def test_nobody_interrupts_what_ignores_it() -> None:
    script = "MODULE = 'numpy'; import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + STARTS
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"onnx-backprop {ob.__version__}\n", "")


# --- ops, demo, version


def test_ops_lists_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
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
    monkeypatch.setattr(command, "__file__", str(tmp_path / "onnx_backprop" / "command" / "main.py"))
    assert command.main(["demo", str(tmp_path / "said"), "--steps", "3", "-h"]) == 7
    assert (tmp_path / "said").read_text() == "--steps 3 -h"


def test_demo_without_the_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "__file__", str(tmp_path / "onnx_backprop" / "command" / "main.py"))
    assert command.main(["demo"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "models/super_resolution.py" in err
    assert "make demo" in err


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
    told = capsys.readouterr()
    assert re.search(r"^onnx-backprop: warning: trained as one.*--untie gives each its own$", told.err, re.M)
    assert "no parameters: s (quantization scale of QuantizeLinear)" in told.out
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
    assert "the lengths of W are not known" in capsys.readouterr().err


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


def test_modes_are_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--mode", "jacobian", "--batched"], "--batched: goes with --mode vjp, jvp, hvp, got jacobian"),
        (["--mode", "jvp", "--loss", "mse"], "--mode: do not go with --loss"),
        (["--mode", "hvp"], "of: expected an output of one element, 'y' has the shape ['N', 2, 4, 4]"),
    ):
        assert command.main(["convert", "small.onnx", "-o", "out.onnx", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert command.main(["convert", "small.onnx", "-o", "out.onnx", "--mode", "jvp", "--batched", "--wrt", "x"]) == 0
    assert [d.dim_param or d.dim_value for d in onnx.load("out.onnx").graph.input[1].type.tensor_type.shape.dim] == [
        "seeds", "N", 1, 4, 4,
    ]  # fmt: skip
