"""What other processes do: help to compile, and compile what a wheel carries (`make release`).

python -m onnx_backprop.ort_ops.workers FOLDER writes machine code for the processor that NUMBA_CPU_NAME says.
"""

import sys
from pathlib import Path

from onnx_backprop.ort_ops import native_table
from onnx_backprop.ort_ops.compiler.objects import Exported, ship


def serve() -> None:
    """`runtime.ahead` names functions on the standard input; compile each into the cache and answer with a line."""
    native_table.load()
    functions = {function.label: function for function in Exported.every}
    for line in sys.stdin:
        if function := functions.get(line.strip()):  # what a program defines itself is compiled there
            function.compile()
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    native_table.load()
    sys.stdout.write(f"{ship(Path(sys.argv[1]))} functions in {sys.argv[1]}\n")
