"""Compile every native kernel into the cache, on every core: python -m tests.ort_ops.compile_kernels

Otherwise each process of the test run that meets a kernel first would compile it, several of them at the same time.
Those that need registers of matrices are left out where the processor has none.
"""

from __future__ import annotations

import multiprocessing
import operator
import time
from concurrent.futures import ProcessPoolExecutor

from onnx_backprop.ort_ops import native_table
from onnx_backprop.ort_ops.compiler import machine
from onnx_backprop.ort_ops.compiler.objects import TILE_INSTRUCTIONS, Exported


def exported() -> dict[str, Exported]:
    """All compiled entry points, by name."""
    native_table.load()
    return {function.name: function for function in Exported.every}


def compile_kernel(name: str) -> float:
    """Seconds of the processor."""
    start, function = time.process_time(), exported()[name]
    if machine.matrix_tiles() or TILE_INSTRUCTIONS not in function.text(operator.attrgetter("name")):
        function.compile()
    return time.process_time() - start


def main() -> None:
    missing = [name for name, function in exported().items() if not function.cached]
    # An executor says so when one of its processes ends; a pool would wait for ever.
    with ProcessPoolExecutor(machine.processors(), multiprocessing.get_context("spawn")) as executor:
        seconds = sum(executor.map(compile_kernel, missing))
    print(f"{len(missing)} native kernels compiled in {seconds:.0f} s of the processor")


if __name__ == "__main__":
    main()
