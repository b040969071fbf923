"""A number that changes whenever a source file of this folder or the vector length does.

Numba's cache on disk looks at the file of a compiled function only, not at the files of what it calls. Each function
compiled with `cache=True` therefore refers to `STAMP` as a variable of an enclosing function, which the cache's key
includes.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import llvmlite.binding

VECTOR_VARIABLE = "ONNX_BACKPROP_VECTOR_LENGTH"


def _vector_length() -> int:
    """How many float32 one register of this processor holds; the environment may force another power of two."""
    forced = os.environ.get(VECTOR_VARIABLE)
    if forced:
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
    digest = hashlib.sha256(str(VECTOR).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7])


STAMP = _stamp()
