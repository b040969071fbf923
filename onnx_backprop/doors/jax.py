"""`function`: an ONNX model as a function of JAX, whose values and derivatives are computed in onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.doors import library
from onnx_backprop.doors.function import Arguments, Function
from onnx_backprop.doors.function import function as function_of
from onnx_backprop.opset.core.errors import InvalidArgumentError

jax = library("jax", package="jax")


def function(model: ModelProto | ir.Model | str | Path, **arguments: Unpack[Arguments]) -> Any:
    """A function of JAX (x, …) -> y, or -> (y, …) of several outputs, for `jit`, `grad`, `vjp`, `jacrev` and `vmap`.

        f = ob.jax.function("model.onnx", wrt=["x", "kernel"])
        loss = jax.jit(jax.value_and_grad(lambda kernel, x: (f(x, kernel) ** 2).mean()))

    Its arguments are the model's inputs and then the initializers of `wrt`, by position or by name; `f.values` has
    their arrays. `arguments` are those of `ob.function`.

    Arrays have the model's types; Python numbers take them. float64 needs jax_enable_x64, integers of fewer bits go
    for int64. Integers have no gradient. Derivatives in reverse mode are there to any order (`jacrev(grad(f))`); JAX
    refuses forward mode (`jvp`, `jacfwd`, and `jax.hessian`, which uses it) of what is a `custom_vjp`. `vmap` calls the
    model row by row; one that takes a batch is better called with it. A first run on zeros tells the shapes of outputs.

    Raises: KernelError without JAX; what `ob.function` does; InvalidArgumentError for arrays of another type.
    """
    f = function_of(model, **arguments)
    call = _differentiable(f)

    def taken(*arrays: Any, **named: Any) -> Any:
        rest = f.inputs[len(arrays) :]
        if len(arrays) > len(f.inputs) or set(rest) != set(named):
            received = ", ".join([*map(str, range(len(arrays))), *named])
            raise InvalidArgumentError(f"expected {', '.join(f.inputs)}, got the arguments {received}")
        pairs = zip(f.inputs, [*arrays, *(named[name] for name in rest)], strict=True)
        results = call(*(_typed(f, name, array) for name, array in pairs))
        return results[0] if len(results) == 1 else results

    result: Any = taken
    result.values = f.values
    result.__doc__ = repr(f)
    return result


def _differentiable(f: Function) -> Callable[..., tuple[Any, ...]]:
    """A function of arrays of the model's types -> a tuple; its backward pass is one of the same kind."""
    adjoints: list[Any] = []

    def called(*arrays: Any) -> tuple[Any, ...]:
        types = [jax.dtypes.canonicalize_dtype(f.types[name]) for name in f.outputs]
        lengths = f.lengths(*(np.shape(array) for array in arrays))
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(lengths, types, strict=True)]
        ranks = [np.ndim(array) for array in arrays]
        return tuple(jax.pure_callback(partial(rows, ranks), shapes, *arrays, vmap_method="expand_dims"))

    def rows(ranks: list[int], *arrays: Any) -> list[np.ndarray]:
        """One call for each entry of the axes that `vmap` has put in front of arrays of these ranks."""
        arrays = tuple(np.asarray(array) for array in arrays)
        inner = [array.shape[array.ndim - rank :] for array, rank in zip(arrays, ranks, strict=True)]
        outer = np.broadcast_shapes(
            *(array.shape[: array.ndim - rank] for array, rank in zip(arrays, ranks, strict=True))
        )
        flat = (np.broadcast_to(x, outer + shape).reshape(-1, *shape) for x, shape in zip(arrays, inner, strict=True))
        results = [run(*entry) for entry in zip(*flat, strict=True)]
        return [np.stack(entries).reshape((*outer, *entries[0].shape)) for entries in zip(*results, strict=True)]

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        results: list[np.ndarray] = []
        for name, y, shape in zip(f.outputs, f(*arrays), f.lengths(*(x.shape for x in arrays)), strict=True):
            canonical = y.astype(jax.dtypes.canonicalize_dtype(y.dtype))
            if y.shape != shape or (y.dtype.kind in "iu" and not np.array_equal(canonical, y)):
                raise InvalidArgumentError(
                    f"{name!r}: expected the shape {shape}, got {y.shape}: it depends on the values of inputs"
                    if y.shape != shape
                    else f"{name!r} has numbers beyond {canonical.dtype}. Enable jax_enable_x64"
                )
            results.append(canonical)
        return results

    def backward(arrays: tuple[Any, ...], seeds: tuple[Any, ...]) -> tuple[Any, ...]:
        if not adjoints:
            adjoints.append(_differentiable(f.vjp))
        cotangents = [_filled(seed) for name, seed in zip(f.outputs, seeds, strict=True) if name in f.targets]
        gradients = dict(zip(f.variables, adjoints[0](*arrays, *cotangents), strict=True))
        return tuple(gradients.get(name) for name in f.inputs)  # None for zero

    def forward(*primals: Any) -> tuple[Any, Any]:
        for name, primal in zip(f.inputs, primals, strict=True):
            if primal.perturbed and name not in f.variables and f.types[name].kind == "f":
                raise InvalidArgumentError(f"{name!r} is not among those to differentiate by: name it in `wrt`")
        arrays = tuple(primal.value for primal in primals)
        return differentiable(*arrays), arrays

    differentiable = jax.custom_vjp(called)
    differentiable.defvjp(forward, backward, symbolic_zeros=True)
    return differentiable


def _filled(seed: Any) -> Any:
    symbolic = isinstance(seed, jax.custom_derivatives.SymbolicZero)
    return jax.numpy.zeros(seed.shape, seed.dtype) if symbolic else seed


def _typed(f: Function, name: str, array: Any) -> Any:
    """An array of JAX in the type that the model has, or one that NumPy widens to it."""
    expected = f.types[name]
    canonical = jax.dtypes.canonicalize_dtype(expected)
    if expected.kind == "f" and canonical != expected:
        raise InvalidArgumentError(f'{name!r} has type {expected}. Use jax.config.update("jax_enable_x64", True)')
    if isinstance(array, bool | int | float):
        return jax.numpy.asarray(array, canonical)
    array = jax.numpy.asarray(array)
    if array.dtype != canonical and not (expected.kind in "iu" and np.can_cast(array.dtype, expected)):
        raise InvalidArgumentError(
            f"{name!r} has type {canonical}, got an array of {array.dtype}. Use .astype({str(canonical)!r})"
        )
    return array
