"""The decorators of compiled functions. What they may contain, and how they are compiled, is in `language`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnx_backprop.ort_ops.runtime.machine import VECTOR as VECTOR
from onnx_backprop.ort_ops.runtime.objects import Exported
from onnx_backprop.ort_ops.runtime.values import Inner, Type


def inner(function: Callable[..., object]) -> Any:
    """A function that other compiled functions call."""
    return Inner(function)


def compiled(name: str, **options: Any) -> Callable[[Callable[..., object]], Any]:
    """`inner` for one of several functions that a factory makes: a name for each."""

    def decorate(function: Callable[..., object]) -> Any:
        function.__qualname__ = name
        return Inner(function, options)

    return decorate


def fast(*flags: str) -> Callable[[Callable[..., object]], Any]:
    """`inner` with flags of LLVM's floating point arithmetic, as "reassoc" for sums in any order."""
    return lambda function: Inner(function, {"fastmath": set(flags)})


def exported(result: Type | None, *parameters: Type) -> Callable[[Callable[..., object]], Exported]:
    """A C function, compiled or taken from the cache on disk when its address is first asked for."""

    def decorate(function: Any) -> Exported:
        return Exported(function if isinstance(function, Inner) else Inner(function), parameters, result)

    return decorate
