"""`onnx-backprop ops`: list the operators of the domain and the differentiable ONNX operators."""

import argparse
from collections.abc import Sequence

from onnx_backprop.command.parser import Command, flag
from onnx_backprop.converters.reverse.registry import supported_ops
from onnx_backprop.converters.tables import table
from onnx_backprop.opset import DOMAIN, OPS, OPSET_VERSION


def run(arguments: argparse.Namespace) -> int:
    """Print both lists."""
    domain = [(op.name, op.source.strip()) for op in OPS]
    versions: dict[str, list[str]] = {}
    for op in supported_ops():
        name = f"{op.domain}::{op.op_type}" if op.domain else op.op_type
        versions.setdefault(name, []).append(str(op.since_version))
    differentiable = [(name, ", ".join(since)) for name, since in versions.items()]
    show = _markdown if arguments.markdown else _plain
    print(f"Operators of the domain {DOMAIN}, version {OPSET_VERSION}\n")
    show(("operator", "source"), domain)
    print("\nONNX operators with a gradient (older models are converted to opset 18 first)\n")
    show(("operator", "versions"), differentiable)
    return 0


def _plain(header: tuple[str, str], rows: Sequence[tuple[str, str]]) -> None:
    head, *lines = table(header, rows)
    print(head, "-" * len(head), *lines, sep="\n")


def _markdown(header: tuple[str, str], rows: Sequence[tuple[str, str]]) -> None:
    print(f"| {header[0]} | {header[1]} |\n|---|---|")
    for name, text in rows:
        print(f"| `{name}` | {text} |")


COMMAND = Command(run=run, arguments=[flag("--markdown", help="as Markdown tables")])
