"""What the command `onnx-backprop` starts with: Ctrl-C ends it with one line, also while all the rest is imported.

SIGTERM ends it as well as an exception can. `--help` and `--version` import nothing more.

Outside of the package, because importing anything of that imports it as a whole, which takes a second.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROGRAM = "onnx-backprop"
_FIRST_STEPS = f"""\
first steps:
  {PROGRAM} explain model.onnx
  {PROGRAM} train model.onnx -o trained.onnx --data data.npz --loss mse

`{PROGRAM} COMMAND --help` explains a command.
"""


def summaries(folders: Iterable[str]) -> dict[str, str]:
    """A sentence for each command, from the first line of its module, which is not imported."""
    sentences = dict[str, str]()
    for path in sorted(path for folder in folders for path in Path(folder).glob("[!_]*.py")):
        with path.open(encoding="utf-8") as file:
            sentences[path.stem] = file.readline().partition(": ")[2].rstrip('."\n')
    return sentences


def parser_of(kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> tuple[argparse.ArgumentParser, Any]:
    """The parser of the command, and the action to which its commands are to be added."""
    try:
        number = version(PROGRAM)
    except PackageNotFoundError:  # the source on the path, not installed
        number = "0+unknown"
    parser = kind(
        prog=PROGRAM,
        description="Train ONNX models in stock onnxruntime.",
        epilog=_FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"{PROGRAM} {number}")
    return parser, parser.add_subparsers(required=True, metavar="COMMAND")


def _answer_without_imports() -> None:
    """End the process where nothing but the help of the command, or its version, is asked for."""
    if sys.argv[1:2] not in (["-h"], ["--help"], ["-V"], ["--version"]) or (spec := find_spec("onnx_backprop")) is None:
        return
    parser, commands = parser_of()
    folders = [os.path.join(folder, "command", "commands") for folder in spec.submodule_search_locations or ()]
    for name, sentence in summaries(folders).items():
        commands.add_parser(name, help=sentence)
    try:
        parser.parse_args()
    finally:
        sys.stdout.flush()


def _end(*_: object) -> None:
    """Where there is nothing to undo: at the beginning and at the end of the process."""
    os.write(2, b"onnx-backprop: interrupted\n")
    os._exit(130)


def _terminated(*_: object) -> None:
    """An exception, so that nothing half written is left."""
    raise SystemExit(128 + signal.SIGTERM)


def main() -> int:
    """Run the command; returns its exit code."""
    _answer_without_imports()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # nobody may interrupt this process
        from onnx_backprop.command.main import main as run

        return run()
    signal.signal(signal.SIGINT, _end)
    from onnx_backprop.command.main import main as run

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run()
        signal.signal(signal.SIGINT, _end)
    except KeyboardInterrupt:  # just before or behind what `run` catches
        _end()
        raise
    return code
