"""What compiled code depends on besides its own file, and the decorators that give it names.

Numba's cache on disk looks at the file of a compiled function only, not at the files of what it calls, and the symbols
in a cached object bear a function's module, name, argument types and a number counted up in the process that compiled
it. When objects of several processes are linked together, two functions that have all but the number in common may be
taken for one another. So every compiled function has a name of its own, and those that are cached bear a stamp in it
that changes with every source file of this folder, the vector length and the processor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, njit

from onnx_backprop.ort_ops.runtime.machine import FEATURES, PROCESSOR, TRIPLE, VECTOR


def _stamp() -> int:
    digest = hashlib.sha256(f"{VECTOR} {TRIPLE} {PROCESSOR} {FEATURES}".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
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
