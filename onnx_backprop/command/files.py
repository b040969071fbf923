"""What a command reads and writes: no file of it takes the place of another, and none is replaced unasked."""

import argparse
import os
from pathlib import Path

from onnx_backprop.converters.prepare.files import check_writable, same_file, sidecars
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.reading import external_files
from onnx_backprop.training.reports.history import read_log

# Arguments of any command that name files, and what a person calls them.
_READ = {"model": "the model", "data": "--data", "evaluation": "--evaluation", "feeds": "--feeds"}
_WRITTEN = {"output": "-o", "save_repro": "--save-repro", "log": "--log", "report": "--report", "html": "--html"}
_FOLDERS = ("--data", "--evaluation")  # which `train` reads by rows
_MODELS = ("output", "save_repro")


def checkpoint_beside(output: str | Path) -> Path:
    """Where `train` saves to."""
    return Path(output).with_name(f"{Path(output).name}.checkpoint.safetensors")


def check_files(arguments: argparse.Namespace) -> None:
    """Before any work of any command: it has something to read and a place of its own for all that it may write.

    Errors: InvalidArgumentError for an output that is an input or another output, through links too, whatever --force
    says; for one that exists, unless --force replaces or --resume continues it; for one that cannot be written.
    """
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    read = [(what, Path(given[name])) for name, what in _READ.items() if name in given]
    written = _written(given)
    for what, path in read:
        if os.path.isdir(path) and what not in _FOLDERS:
            raise InvalidArgumentError(f"{path} is a folder. Name {'an ONNX' if what == _READ['model'] else 'a'} file")
    if any(path.exists() for _, path in written):  # else there is nothing that could be lost
        read += [("the weights of the model", path) for path in external_files(given["model"])]
    for n, (what, path) in enumerate(written):
        for other, its in (*read, *written[:n]):
            if same_file(path, its):
                raise InvalidArgumentError(f"{what}: {path} is the file of {other} too. Name another one")
    if not given.get("force"):
        _check_replaced(given, [path for _, path in written if path.exists()])


def _written(given: dict[str, object]) -> list[tuple[str, Path]]:
    """All that a command may write, by what it is; each can be written."""
    result: list[tuple[str, Path]] = []
    for name, what in _WRITTEN.items():
        if name in given:
            path = str(given[name])
            check_writable(path)
            result.append((what, Path(path)))
            if name in _MODELS:
                result += [(f"large weights beside {what}", beside) for beside in sidecars(path)]
            if "resume" in given and name == "output":
                result.append((f"the checkpoint beside {what}", checkpoint_beside(path)))
    for _, path in result:
        check_writable(path)
    return result


def _check_replaced(given: dict[str, object], present: list[Path]) -> None:
    """Nothing is replaced, but for what a resumed training continues."""
    continued: list[Path] = []
    if given.get("resume"):
        output = str(given["output"])
        if checkpoint_beside(output).is_file():
            continued += [Path(output), *sidecars(output), checkpoint_beside(output)]
        if "log" in given and os.path.isfile(str(given["log"])):
            read_log(str(given["log"]))  # which refuses what is no log
            continued.append(Path(str(given["log"])))
    ways = ", --force to replace it, or --resume" if given.get("resume") is False else ", or --force to replace it"
    for path in present:
        if path not in continued:
            raise InvalidArgumentError(f"{path} exists. Name another file{ways}")
