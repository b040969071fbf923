"""The commands of `onnx-backprop`, one module each, with a record `COMMAND`. To add one, add a module.

May import what commands share in `onnx_backprop.command`, and each other.
"""

from importlib import import_module
from pkgutil import iter_modules

from onnx_backprop.command.parser import Command


def commands() -> list[Command]:
    """All of them, by name."""
    return [import_module(f"{__name__}.{module.name}").COMMAND for module in iter_modules(__path__)]
