"""The decorators of compiled functions. What they may contain, and how they are compiled, is in `language`."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from numba import types

from onnx_backprop.ort_ops.runtime.language import BOOL, DOUBLE, FLOAT, INT, INT32, Inner
from onnx_backprop.ort_ops.runtime.machine import VECTOR as VECTOR
from onnx_backprop.ort_ops.runtime.objects import Exported

_NAMES = {types.int64: INT, types.int32: INT32, types.boolean: BOOL, types.float32: FLOAT, types.float64: DOUBLE}


def inner(function: Callable[..., object]) -> Any:
    """A function that other compiled functions call."""
    return Inner(cast(FunctionType, function))


def compiled(name: str, **options: Any) -> Callable[[Callable[..., object]], Any]:
    """`inner` for one of several functions that a factory makes: a name for each."""

    def decorate(function: Callable[..., object]) -> Any:
        function.__qualname__ = name
        return Inner(cast(FunctionType, function), options)

    return decorate


def exported(signature: Any) -> Callable[[Callable[..., object]], Any]:
    """A C function, compiled or taken from the cache on disk when its address is first asked for."""
    arguments = tuple(_NAMES[argument] for argument in signature.args)
    result = None if signature.return_type == types.void else _NAMES[signature.return_type]

    def decorate(function: Callable[..., object]) -> Any:
        return Exported(Inner(cast(FunctionType, function)), arguments, result)

    return decorate
