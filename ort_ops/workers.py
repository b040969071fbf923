"""What another process does that helps to compile: `runtime.ahead` starts it and tells it functions line by line."""

from __future__ import annotations

import sys

from onnx_backprop.ort_ops import native_table
from onnx_backprop.ort_ops.compiler.objects import Exported


def serve() -> None:
    """Compile into the cache what is named on the standard input, and answer with a line for each."""
    assert native_table.KERNELS  # what imports all modules that have functions
    functions = {function.label: function for function in Exported.every}
    for line in sys.stdin:
        functions[line.strip()].compile()
        sys.stdout.write("\n")
        sys.stdout.flush()
