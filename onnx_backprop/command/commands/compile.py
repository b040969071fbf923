"""`onnx-backprop compile`: compile a training graph and its kernels for C++, C# and whatever else runs onnxruntime."""

import argparse
from pathlib import Path

from onnx_backprop.command.files import check_folder
from onnx_backprop.command.options import shared
from onnx_backprop.command.parser import Command, argument
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import InvalidArgumentError


def run(arguments: argparse.Namespace) -> int:
    """Write the folder."""
    folder = Path(arguments.folder)
    check_folder("-o", folder, ", or --force to replace", replace=arguments.force)
    graph = TrainingGraph.load(arguments.model)
    lengths = [dict(map(_length, one.split(","))) for one in arguments.lengths or ()]
    names = arguments.target.split(",") if arguments.target else None

    from onnx_backprop.plugin import compile_plugin  # onnxruntime

    libraries = compile_plugin(graph, folder, lengths=lengths, target=names)
    if not arguments.quiet:
        for path in libraries:
            print(f"{path}: {path.stat().st_size / 1000:,.0f} KB")
    return 0


def _length(text: str) -> tuple[str, int]:
    name, _, length = text.partition("=")
    if not name or not length.isdecimal():
        raise InvalidArgumentError(f"expected NAME=LENGTH, got {text!r}", "lengths")
    return name, int(length)


COMMAND = Command(
    description="FOLDER gets TARGET/onnx_backprop.so (.dll, .dylib), a library of custom operators, and the graphs "
    "that run with it: docs/plugin.md. It serves the lengths that are named, and refuses others.",
    run=run,
    arguments=[
        *shared("model", metavar="TRAINING.onnx", help="a training graph with an optimizer, as `convert` writes it"),
        argument("-o", "--output", dest="folder", metavar="FOLDER", required=True, help="the folder to write"),
        argument(
            "--lengths",
            action="append",
            metavar="NAME=LENGTH,…",
            help="of the symbols in the inputs' shapes, as batch=8,height=128; once more for each further set",
        ),
        argument(
            "--target",
            metavar="NAME,…",
            help="systems and processors, as linux-x86_64-v3,windows-x86_64-v3,macos-arm64 (default: this one); others "
            "than this one need pip install 'onnx-backprop[plugin]'",
        ),
        *shared("--limit", "--force", "--quiet"),
    ],
)
