"""Compile every native kernel into the cache, on every core: python -m tests.ort_ops.compile_kernels

Otherwise each process of the test run that meets a kernel first would compile it, several of them at the same time.
"""

from __future__ import annotations

import multiprocessing
import time

from onnx_backprop.ort_ops import native_table
from onnx_backprop.ort_ops.compiler import machine
from onnx_backprop.ort_ops.compiler.objects import Exported


def exported() -> dict[str, Exported]:
    """All compiled entry points, by name."""
    native_table.load()
    return {function.name: function for function in Exported.every}


def compile_kernel(name: str) -> float:
    """Seconds of the processor."""
    start = time.process_time()
    exported()[name].compile()
    return time.process_time() - start


def main() -> None:
    missing = [name for name, function in exported().items() if not function.cached]
    with multiprocessing.get_context("spawn").Pool(machine.processors()) as pool:
        seconds = sum(pool.imap_unordered(compile_kernel, missing))
    print(f"{len(missing)} native kernels compiled in {seconds:.0f} s of the processor")


if __name__ == "__main__":
    main()
