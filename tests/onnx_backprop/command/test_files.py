"""No output of the command is an input or another output; nothing is replaced unasked; names that cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_backprop.__main__ import main
from onnx_backprop.command.commands import train as command
from tests.support.training_models import classifier, data

TRAIN = "train model.onnx --data data.npz --loss softmax_cross_entropy --epochs 1 --batch-size 20 --quiet -o out.onnx"
CONVERT = "convert model.onnx --wrt x --quiet -o out.onnx"
CHECK = "check model.onnx --quiet --save-repro out.onnx"
CHECKPOINT = "out.onnx.checkpoint.safetensors"
DIGITS = "0123456789abcdef"
WEIGHTS = f"weights.{DIGITS}.data"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: model.onnx with its weights in a file, data.npz, links to them, what is precious."""
    monkeypatch.chdir(tmp_path)
    onnx.save(classifier(), "model.onnx", save_as_external_data=True, location=WEIGHTS, size_threshold=0)
    np.savez("data.npz", **data())
    np.savez("evaluation.npz", **data())
    for name in ("model.onnx", "data.npz"):
        Path(f"symbolic.{name}").symlink_to(name)
        Path(f"hard.{name}").hardlink_to(name)
    Path("folder").mkdir()
    Path("same").symlink_to(".")
    for name in ("keep.csv", "keep.html", f"keep.{DIGITS}.data", "keep.onnx"):
        Path(name).write_text("precious")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def refused(folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that has changed no file."""
    before = contents(folder)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert err.startswith("onnx-backprop: error: ")
    assert contents(folder) == before
    return err


SAME = {
    "convert, the model": (CONVERT, "-o model.onnx", "-o: model.onnx is the file of the model"),
    "convert, its weights": (CONVERT, f"-o {WEIGHTS}", f"-o: {WEIGHTS} is the file of the weights of the model"),
    "convert, what would remove its weights": (CONVERT, "-o weights", f"{WEIGHTS} is the file of the weights of the"),
    "convert, a link to the model": (CONVERT, "-o symbolic.model.onnx", "is the file of the model"),
    "convert, a hard link": (CONVERT, "-o hard.model.onnx", "is the file of the model"),
    "convert, through a folder": (CONVERT, "-o same/model.onnx", "is the file of the model"),
    "check, the model": (CHECK, "--save-repro model.onnx", "--save-repro: model.onnx is the file of the model"),
    "check, the feeds": (CHECK, "--feeds data.npz --save-repro hard.data.npz", "is the file of --feeds"),
    "train, the model": (TRAIN, "-o model.onnx", "-o: model.onnx is the file of the model"),
    "train, the data": (TRAIN, "-o hard.data.npz", "is the file of --data"),
    "train, the evaluation": (TRAIN, "--evaluation evaluation.npz --report evaluation.npz", "is the file of --eval"),
    "train, the report the output": (TRAIN, "--report out.onnx", "--report: out.onnx is the file of -o"),
    "train, the report the output by a link": (TRAIN, "--report same/out.onnx", "is the file of -o"),
    "train, the report the checkpoint": (TRAIN, f"--report {CHECKPOINT}", "is the file of the checkpoint beside -o"),
    "train, the report the weights": (
        TRAIN,
        f"-o keep --report keep.{DIGITS}.data",
        "is the file of large weights beside -o",
    ),
    "train, the report the model's weights": (TRAIN, f"--report {WEIGHTS}", "is the file of the weights of the"),
    "train, the log the report": (
        TRAIN,
        "--log a.csv --report same/a.csv",
        "--report: same/a.csv is the file of --log",
    ),
    "train, the log the data": (TRAIN, "--log symbolic.data.npz", "is the file of --data"),
}


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
@pytest.mark.parametrize("case", SAME)
def test_no_output_is_an_input_or_another_output(
    folder: Path, capsys: pytest.CaptureFixture[str], case: str, force: list[str]
) -> None:
    command, more, message = SAME[case]
    assert message in refused(folder, [*command.split(), *more.split(), *force], capsys)


EXISTS = {
    "convert": (CONVERT, "-o keep.onnx", "keep.onnx exists. Name another file, or --force to replace it"),
    "convert, large weights": (CONVERT, "-o keep", f"keep.{DIGITS}.data exists. Name another file, or --force"),
    "check": (CHECK, "--save-repro keep.onnx", "keep.onnx exists"),
    "train": (TRAIN, "-o keep.onnx", "keep.onnx exists. Name another file, --force to replace it, or --resume"),
    "train, log": (TRAIN, "--log keep.csv", "keep.csv exists"),
    "train, report": (TRAIN, "--report keep.html", "keep.html exists"),
    "resumed, report": (TRAIN, "--resume --report keep.html", "keep.html exists. Name another file, or --force"),
    "resumed, no checkpoint": (TRAIN, "--resume -o keep.onnx", "keep.onnx exists. Name another file, or --force"),
    "resumed, log": (TRAIN, "--resume --log keep.csv", "keep.csv is no log"),
}


@pytest.mark.parametrize("case", EXISTS)
def test_nothing_is_replaced_unasked(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    command, more, message = EXISTS[case]
    assert message in refused(folder, [*command.split(), *more.split()], capsys)


def test_force_replaces_and_resume_continues(folder: Path) -> None:
    files = ["-o", "keep.onnx", "--log", "keep.csv", "--report", "keep.html"]
    assert main([*TRAIN.split(), *files, "--force"]) == 0
    assert all(b"precious" not in contents(folder)[name] for name in ("keep.onnx", "keep.csv", "keep.html"))
    report = contents(folder)["keep.html"]
    assert main([*TRAIN.split(), *files, "--epochs", "2", "--resume"]) == 0
    assert contents(folder)["keep.csv"].count(b"\n") == 1 + 6
    assert contents(folder)["keep.html"] != report


LONG = "n" * 300 + ".csv"
NAMES = {
    "empty": ("", "it is a folder"),
    "this folder": (".", "it is a folder"),
    "the folder above": ("..", "it is a folder"),
    "the top": (os.sep, "it is a folder"),
    "NUL": ("a\0b.csv", "cannot write 'a\\x00b.csv': "),
    "300 characters": (LONG, "File name too long"),
    "long with what is added to it": ("n" * 230 + ".csv", "File name too long"),
    "below a file": ("data.npz/a.csv", "cannot write data.npz/a.csv: there is no folder"),
}


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("option", ["convert -o", "check --save-repro", "train -o", "train --log", "train --report"])
def test_names_that_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str, option: str
) -> None:
    monkeypatch.setattr(command, "training_graph", lambda *_, **__: pytest.fail("the work has begun"))
    name, message = NAMES[case]
    which, flag = option.split()
    given = {"convert": CONVERT, "check": CHECK, "train": TRAIN}[which].split()
    assert message in refused(folder, [*given, flag, name], capsys)


@pytest.mark.parametrize("name", ["", ".", "a\0b", LONG, "data.npz/model.onnx"])
@pytest.mark.parametrize("given", ["explain", "check", "train --data data.npz --loss mse -o out.onnx"])
def test_names_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str], given: str, name: str) -> None:
    which, *more = given.split()
    refused(folder, [which, name, *more], capsys)
    if which == "train":
        (folder / "empty").mkdir()
        refused(folder, [*TRAIN.split(), "--data", "empty" if name == "." else name], capsys)
