"""How the command refuses bad input: one sentence that helps, nothing written, and what an interruption leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper, parser

from onnx_backprop.command import main as command
from onnx_backprop.command.commands import convert, demo
from onnx_backprop.converters.reverse import registry
from tests.support.command import files, run


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
    "unknown of": (
        "convert small.onnx -o out.onnx --of z",
        r"of: expected the name of a graph output, or of a value inside the graph, got 'z'",
    ),
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
    "unknown kernels": ("convert small.onnx -o out.onnx --kernels nump", r"kernels: .*'native', 'numba', got 'nump'"),
    "native kernels inline": ("convert small.onnx -o out.onnx --inline --kernels native", r"inline: kernels 'native'"),
    "no folder to write to": (
        "convert small.onnx -o none/out.onnx",
        r"cannot write none/out\.onnx: there is no folder",
    ),
    "output is a folder": ("convert small.onnx -o folder.onnx --force", r"cannot write folder\.onnx: it is a folder"),
    "output is a device": (f"convert small.onnx -o {os.devnull} --force", r"not a regular file"),
    "output exists": ("convert small.onnx -o there.onnx", r"there\.onnx exists\. .*--force"),
    "of beside a loss": ("convert small.onnx -o out.onnx --loss mse --of y", r"--of: .*--loss"),
    "a weight in wrt beside a loss": (
        "convert small.onnx -o out.onnx --loss mse --wrt gain",
        r"--wrt: expected the name of an input of the model, got 'gain'",
    ),
    "unknown stop": ("convert small.onnx -o out.onnx --stop gian", r"--stop: .*got 'gian'. Did you mean 'gain'"),
    "an optimizer without a loss": ("convert small.onnx -o out.onnx --optimizer sgd", r"--optimizer: goes with --loss"),
    "a norm without an optimizer": (
        "convert small.onnx -o out.onnx --loss mse --clip-norm 1 --accumulate 2",
        r"--clip-norm, --accumulate: go with --optimizer",
    ),
    "frozen without a loss": ("convert small.onnx -o out.onnx --frozen gain", r"--frozen: goes with --loss"),
    "verbose and quiet": ("convert small.onnx -o out.onnx --verbose --quiet", r"--verbose and --quiet"),
    "no loss": (
        "train small.onnx -o out.onnx --data data.npz",
        r"required: --loss\. --loss is one of mse, l1, .*none\.",
    ),
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
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "skimage" else name)
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
    monkeypatch.setattr(convert, "load", lambda _: pytest.fail("the model is read"))
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
        monkeypatch.setattr(convert, "differentiated", interrupt)
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
sys.argv[1:] = ["train", "--help"]
sys.exit(onnx_backprop_command.main())
"""


@pytest.mark.parametrize("module", ["onnx_backprop", "numpy", "onnx_backprop.command.commands.train"])
def test_interruption_of_the_imports(module: str) -> None:
    script = f"MODULE = {module!r}{STARTS}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "onnx-backprop: interrupted\n")


def test_nobody_interrupts_what_ignores_it() -> None:
    script = "MODULE = 'numpy'; import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + STARTS
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: onnx-backprop train MODEL -o OUT")
