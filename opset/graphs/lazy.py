"""onnx_ir, imported when something of it is first asked for.

With it comes sympy: 33 MiB and 0.2 s that a process which only runs models has no use for.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import onnx_ir as ir
else:

    class _OnnxIr:
        def __getattr__(self, name: str) -> Any:
            vars(self)[name] = value = getattr(import_module("onnx_ir"), name)
            return value

    ir = _OnnxIr()


def is_ir_model(model: object) -> "TypeGuard[ir.Model]":
    """Whether this is an onnx_ir.Model, of which there is none where nobody has imported onnx_ir."""
    return "onnx_ir" in sys.modules and isinstance(model, ir.Model)
