"""`function`: an ONNX model as a function of JAX, whose values and derivatives are computed in onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
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
    """A function of JAX (x, …) -> y, or -> (y, …) of several outputs, for `jit`, `grad`, `jvp`, `hessian` and `vmap`.

        f = ob.jax.function("model.onnx", wrt=["x", "kernel"])
        loss = jax.jit(jax.value_and_grad(lambda kernel, x: (f(x, kernel) ** 2).mean()))

    Its arguments are the model's inputs and then the initializers of `wrt`, by position or by name; `f.values` has
    their arrays. `arguments` are those of `ob.function`.

    Arrays have the model's types; Python numbers take them. float64 needs jax_enable_x64, integers of fewer bits go
    for int64. Integers have no gradient. Derivatives are there in both modes and to any order. `vmap` calls the model
    row by row; one that takes a batch is better called with it. A first run on zeros tells the shapes of outputs.

    Raises: KernelError without JAX; what `ob.function` does; InvalidArgumentError for arrays of another type.
    """
    f = function_of(model, **arguments)

    def taken(*arrays: Any, **named: Any) -> Any:
        rest = f.inputs[len(arrays) :]
        if len(arrays) > len(f.inputs) or set(rest) != set(named):
            received = ", ".join([*map(str, range(len(arrays))), *named])
            raise InvalidArgumentError(f"expected {', '.join(f.inputs)}, got the arguments {received}")
        pairs = zip(f.inputs, [*arrays, *(named[name] for name in rest)], strict=True)
        typed = [_typed(f, name, array) for name, array in pairs]
        results = _primitive().bind(*typed, f=f, ranks=tuple(array.ndim for array in typed), of=None)
        return results[0] if len(results) == 1 else tuple(results)

    result: Any = taken
    result.values = f.values
    result.__doc__ = repr(f)
    return result


def _shapes(f: Function, ranks: Sequence[int], arrays: Sequence[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """The axes that `vmap` has put in front of arrays of these ranks, and what a call gives."""
    inner = [x.shape[len(x.shape) - rank :] for x, rank in zip(arrays, ranks, strict=True)]
    outer = np.broadcast_shapes(*(x.shape[: len(x.shape) - rank] for x, rank in zip(arrays, ranks, strict=True)))
    types = [jax.dtypes.canonicalize_dtype(f.types[name]) for name in f.outputs]
    return outer, [(outer + shape, dtype) for shape, dtype in zip(f.lengths(*inner), types, strict=True)]


def _rows(f: Function, ranks: Sequence[int], *arrays: Any) -> list[np.ndarray]:
    """One call for each entry of those axes."""
    arrays = tuple(np.asarray(array) for array in arrays)
    outer, _ = _shapes(f, ranks, arrays)
    inner = [array.shape[array.ndim - rank :] for array, rank in zip(arrays, ranks, strict=True)]
    flat = (np.broadcast_to(x, outer + shape).reshape(-1, *shape) for x, shape in zip(arrays, inner, strict=True))
    results = [_run(f, *entry) for entry in zip(*flat, strict=True)]
    return [np.stack(entries).reshape((*outer, *entries[0].shape)) for entries in zip(*results, strict=True)]


def _run(f: Function, *arrays: np.ndarray) -> list[np.ndarray]:
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


@cache
def _primitive() -> Any:
    """JAX's operator (arrays; f, ranks, of) -> the outputs of f, whose derivatives are the operator of f.jvp, f.vjp.

    ranks: of the arrays without the axes of `vmap`, which are in front, of length 1 where an array is not mapped. of:
    the function that f is the jvp or the vjp of; f is linear in what it has more inputs than this one.
    """
    ad, batching, mlir = (import_module(f"jax.interpreters.{name}") for name in ("ad", "batching", "mlir"))
    operator = import_module("jax.extend.core").Primitive("onnx_model")
    operator.multiple_results = True

    def abstract(*arrays: Any, f: Function, ranks: tuple[int, ...], **_: Any) -> list[Any]:
        return [jax.core.ShapedArray(*one) for one in _shapes(f, ranks, arrays)[1]]

    def call(*arrays: Any, f: Function, ranks: tuple[int, ...], **_: Any) -> list[Any]:
        shapes = [jax.ShapeDtypeStruct(*one) for one in _shapes(f, ranks, arrays)[1]]
        return list(jax.pure_callback(partial(_rows, f, ranks), shapes, *arrays))

    def jvp(primals: Any, tangents: Any, f: Function, ranks: tuple[int, ...], of: Function | None) -> Any:
        results, seeds, more = operator.bind(*primals, f=f, ranks=ranks, of=of), list[Any](), list[int]()
        for name, tangent, rank in zip(f.inputs, tangents, ranks, strict=True):
            if name in f.variables:
                seeds.append(ad.instantiate_zeros(tangent))
                more.append(rank)
            elif not isinstance(tangent, ad.Zero) and f.types[name].kind == "f":
                raise InvalidArgumentError(f"{name!r} is not among those to differentiate by: name it in `wrt`")
        products = iter(operator.bind(*primals, *seeds, f=f.jvp, ranks=(*ranks, *more), of=f))
        zeros = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in results]
        pairs = zip(f.outputs, zeros, strict=True)
        return results, [next(products) if name in f.targets else zero for name, zero in pairs]

    def transpose(cotangents: Any, *arrays: Any, f: Function, ranks: tuple[int, ...], of: Function) -> list[Any]:
        count, seeds = len(of.inputs), [ad.instantiate_zeros(seed) for seed in cotangents]
        axes = arrays[0].ndim - ranks[0]
        more = [seed.ndim - axes for seed in seeds]
        adjoint = of.vjp if f is of.jvp else of.jvp
        results = operator.bind(*arrays[:count], *seeds, f=adjoint, ranks=(*ranks[:count], *more), of=of)
        gradients: list[Any] = [None] * count
        for array, result in zip(arrays[count:], results, strict=True):
            if ad.is_undefined_primal(array):
                shared = [n for n in range(axes) if array.aval.shape[n] == 1]
                gradients.append(result.sum(shared, keepdims=True))
            else:
                gradients.append(None)
        return gradients

    def batch(arrays: Any, dims: Any, **params: Any) -> Any:
        pairs = zip(arrays, dims, strict=True)
        results = operator.bind(*(x[None] if n is None else jax.numpy.moveaxis(x, n, 0) for x, n in pairs), **params)
        return results, [0] * len(results)

    operator.def_impl(call)
    operator.def_abstract_eval(abstract)
    ad.primitive_jvps[operator], ad.primitive_transposes[operator] = jvp, transpose
    batching.primitive_batchers[operator] = batch
    mlir.register_lowering(operator, mlir.lower_fun(call, multiple_results=True))
    return operator


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
