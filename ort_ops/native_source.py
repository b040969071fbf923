"""What compiled code depends on besides its own file, and the decorators that give it names.

Numba's cache on disk looks at the file of a compiled function only, not at the files of what it calls, and the symbols
in a cached object bear a function's module, name, argument types and a number counted up in the process that compiled
it. When objects of several processes are linked together, two functions that have all but the number in common may be
taken for one another. So every compiled function has a name of its own, and those that are cached bear a stamp in it
that changes with every source file of this folder, the vector length and the processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
from numba import cfunc, njit

VECTOR_VARIABLE = "ONNX_BACKPROP_VECTOR_LENGTH"
_LENGTHS = ("2", "4", "8", "16", "32", "64")


def _vector_length() -> int:
    """How many float32 one register of this processor holds; the environment may force another power of two."""
    forced = os.environ.get(VECTOR_VARIABLE)
    if forced:
        if forced not in _LENGTHS:
            raise ValueError(f"{VECTOR_VARIABLE}: expected a power of two from 2 to 64, got {forced!r}")
        return int(forced)
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") else 4


def _registers() -> int:
    """How many vector registers there are."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return 16 if x86 and not llvmlite.binding.get_host_cpu_features().get("avx512f") else 32


VECTOR = _vector_length()
REGISTERS = _registers()


def _stamp() -> int:
    features = llvmlite.binding.get_host_cpu_features().flatten()
    digest = hashlib.sha256(f"{VECTOR} {llvmlite.binding.get_host_cpu_name()} {features}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7])


STAMP = _stamp()


def compiled(name: str, **options: Any) -> Callable[[Callable[..., object]], Any]:
    """`njit` for one of several functions that a factory makes: a name for each."""

    def decorate(function: Callable[..., object]) -> Any:
        function.__qualname__ = name
        return njit(**options)(function)

    return decorate


def exported(signature: Any) -> Callable[[Callable[..., object]], Any]:
    """A C function, compiled now or taken from the cache on disk."""

    def decorate(function: Callable[..., object]) -> Any:
        function.__qualname__ = f"{function.__name__}_{STAMP:x}"
        return cfunc(signature, cache=True)(function)

    return decorate
