"""The decorators of compiled functions. What these may contain, and how they are compiled, is in `language`."""

from collections.abc import Callable
from typing import Any

from onnx_backprop.ort_ops.compiler.machine import VECTOR as VECTOR
from onnx_backprop.ort_ops.compiler.objects import Exported
from onnx_backprop.ort_ops.compiler.values import INT, Inner, Type


def inner(function: Callable[..., object]) -> Any:
    """A function that other compiled functions call."""
    return Inner(function)


def apart(function: Callable[..., object]) -> Any:
    """`inner` that is not inlined: what is called in many places, and works for longer than a call takes."""
    return Inner(function, apart=True)


def shared(function: Callable[..., object]) -> Any:
    """`apart` that is compiled once for all kernels that call it: int64 arguments, and no result."""
    result = Inner(function)
    result.shared = Exported(result, (INT,) * function.__code__.co_argcount, None)
    return result


def compiled(name: str) -> Callable[[Callable[..., object]], Any]:
    """`inner` for one of several functions that a factory makes: a name for each."""

    def decorate(function: Callable[..., object]) -> Any:
        function.__qualname__ = name
        return Inner(function)

    return decorate


def fast(*flags: str) -> Callable[[Callable[..., object]], Any]:
    """`inner` with flags of LLVM's floating point arithmetic, as "reassoc" for sums in any order."""
    return lambda function: Inner(function, fast=flags)


def exported(result: Type | None, *parameters: Type) -> Callable[[Callable[..., object]], Exported]:
    """A C function, compiled or taken from the cache on disk when its address is first asked for."""

    def decorate(function: Any) -> Exported:
        return Exported(function if isinstance(function, Inner) else Inner(function), parameters, result)

    return decorate
