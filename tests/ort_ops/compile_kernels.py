"""Compile every native kernel into Numba's cache, on every core: python -m tests.ort_ops.compile_kernels

Otherwise each process of the test run that meets a kernel first would compile it, several of them at the same time.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import time
from types import ModuleType

from onnx_backprop import ort_ops
from onnx_backprop.ort_ops.runtime import machine

PREFIX = f"{ort_ops.__name__}."


def modules() -> list[str]:
    """The modules that have compiled entry points."""
    names = [module.name for module in pkgutil.walk_packages(ort_ops.__path__, PREFIX)]
    return [name for name in names if hasattr(importlib.import_module(name), "_build")]


def entry_points(module: ModuleType) -> tuple[object, ...]:
    """A module's compiled functions, compiled now or taken from the cache."""
    attributes = vars(module)
    return (attributes.get("functions") or attributes["_functions"])()


def compile_module(name: str) -> float:
    """Seconds of the processor."""
    start = time.process_time()
    entry_points(importlib.import_module(name))
    return time.process_time() - start


def main() -> None:
    with multiprocessing.get_context("spawn").Pool(machine.processors()) as pool:
        seconds = sum(pool.imap_unordered(compile_module, modules()))
    print(f"native kernels compiled in {seconds:.0f} s of the processor")


if __name__ == "__main__":
    main()
