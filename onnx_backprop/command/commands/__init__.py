"""The commands of `onnx-backprop`, one module each, with a record `COMMAND`. To add one, add a module.

Its first line says in a sentence what the command does: "`onnx-backprop NAME`: SENTENCE." is what `--help` lists.
May import what commands share in `onnx_backprop.command`, and each other.
"""

from importlib import import_module

from onnx_backprop.command.parser import Command


def command(name: str) -> Command:
    """The command of this name."""
    record: Command = import_module(f"{__name__}.{name}").COMMAND
    return record
