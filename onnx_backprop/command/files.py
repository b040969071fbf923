"""What a command reads and writes: no file of it takes the place of another, and none is replaced unasked."""

import argparse
import os
from pathlib import Path

from onnx_backprop.command.parser import Argument
from onnx_backprop.converters.prepare.writing.files import check_writable, same_file, sidecars
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.reading import external_files
from onnx_backprop.training.reports.history import read_log


def checkpoint_beside(output: str | Path) -> Path:
    """Where `train` saves to."""
    return Path(output).with_name(f"{Path(output).name}.checkpoint.safetensors")


def best_beside(output: str | Path) -> Path:
    """Where `train --keep-best` saves to."""
    return Path(output).with_name(f"{Path(output).name}.best.safetensors")


def check_folder(option: str, path: Path, ways: str, *, replace: bool) -> None:
    """InvalidArgumentError for a file, and for a folder that is not empty unless it is replaced; ways: what to do."""
    if path.exists() and not path.is_dir():
        raise InvalidArgumentError(f"{option}: {path} is a file. Name a folder")
    if path.is_dir() and any(path.iterdir()) and not replace:
        raise InvalidArgumentError(f"{option}: {path} is not empty. Name another folder{ways}")


def check_files(arguments: argparse.Namespace) -> None:
    """Before any work of any command: it has something to read and a place of its own for all that it may write.

    Errors: InvalidArgumentError for an output that is an input or another output, through links too, whatever --force
    says; for one that exists, unless --force replaces or --resume continues it; for one that cannot be written.
    """
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    named = [argument for argument in arguments.command.all_arguments() if argument.file and argument.dest in given]
    read: list[tuple[str, Path]] = []
    for argument in named:
        path, is_model = Path(str(given[argument.dest])), argument.dest == "model"
        if argument.file == "read" and os.path.isdir(path):
            raise InvalidArgumentError(f"{path} is a folder. Name {'an ONNX' if is_model else 'a'} file")
        if argument.file in ("read", "rows"):
            read.append(("the model" if is_model else argument.names[0], path))
    written = _written(given, [argument for argument in named if argument.file in ("written", "written model")])
    if any(path.exists() for _, path in written):  # else there is nothing that could be lost
        read += [("the weights of the model", path) for path in external_files(given["model"])]
    for n, (what, path) in enumerate(written):
        for other, its in (*read, *written[:n]):
            if same_file(path, its):
                raise InvalidArgumentError(f"{what}: {path} is the file of {other} too. Name another one")
    if not given.get("force"):
        _check_replaced(given, [path for _, path in written if path.exists()])


def _written(given: dict[str, object], outputs: list[Argument]) -> list[tuple[str, Path]]:
    """All that a command may write, by what it is; each can be written."""
    result: list[tuple[str, Path]] = []
    for argument in outputs:
        what, path = argument.names[0], str(given[argument.dest])
        check_writable(path)
        result.append((what, Path(path)))
        if argument.file == "written model":
            result += [(f"large weights beside {what}", beside) for beside in sidecars(path)]
        if "resume" in given and what == "-o":
            result.append((f"the checkpoint beside {what}", checkpoint_beside(path)))
        if given.get("keep_best") and what == "-o":
            result.append((f"the best checkpoint beside {what}", best_beside(path)))
    for _, path in result:
        check_writable(path)
    return result


def _check_replaced(given: dict[str, object], present: list[Path]) -> None:
    """Nothing is replaced, but for what a resumed training continues."""
    continued: list[Path] = []
    if given.get("resume"):
        output = str(given["output"])
        if checkpoint_beside(output).is_file():
            continued += [Path(output), *sidecars(output), checkpoint_beside(output), best_beside(output)]
        if "log" in given and os.path.isfile(str(given["log"])):
            read_log(str(given["log"]))  # which refuses what is no log
            continued.append(Path(str(given["log"])))
        report = Path(str(given.get("report", "")))
        if report.is_file() and b"<title>Training of " in report.read_bytes()[:1000]:  # one of ours
            continued.append(report)
    ways = ", --force to replace it, or --resume" if given.get("resume") is False else ", or --force to replace it"
    for path in present:
        if path not in continued:
            raise InvalidArgumentError(f"{path} exists. Name another file{ways}")
