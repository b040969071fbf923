"""The operators, read off this folder: a module named after an operator states it as `OP`."""

from importlib import import_module
from pkgutil import iter_modules

import onnx_backprop.opset.operators as folder
from onnx_backprop.opset.core.op import Op

BY_STEM: dict[str, Op] = {
    module.name: import_module(f"{folder.__name__}.{module.name}").OP
    for module in iter_modules(folder.__path__)
    if module.name != "registry"
}
"""By the name of the module."""
OPS = tuple(BY_STEM.values())
BY_NAME = {op.name: op for op in OPS}
