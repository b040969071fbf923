"""`value_and_grad`: a model as a function of NumPy arrays with its gradient, as optimisers call them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx import ModelProto, ValueInfoProto, helper

from onnx_backprop.converters.derivatives.products import hvp as hvp_model
from onnx_backprop.converters.derivatives.products import scalar_gradient
from onnx_backprop.converters.derivatives.work import Options
from onnx_backprop.converters.reverse.models.derivatives import derivatives
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.ort_ops import Named, lock_of, run_bound
from onnx_backprop.providers.choose import chosen
from onnx_backprop.providers.memory import HOST
from onnx_backprop.providers.placed import session

Feeds = Mapping[str, np.ndarray]
_REDUCTIONS = {"sum": "ReduceSum", "mean": "ReduceMean"}
_ADVICE = (
    "reduction='sum' adds its elements up; for one row of a symbolic batch give feeds={'x': x}, an array of one row; "
    "or name another output"
)
_TYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


def value_and_grad(
    model: ModelProto | ir.Model | str | Path,
    wrt: Sequence[str] | None = None,
    of: Sequence[str] | None = None,
    *,
    feeds: Feeds | None = None,
    reduction: str | None = None,
    hvp: bool = False,
    kernels: str = "native",
    device: str | None = None,
    providers: Sequence[Named] | None = None,
    strict: bool = False,
    straight_through: bool = False,
) -> ValueAndGrad:
    """A function x -> (y, ∂y/∂x) of one vector x, y being an output of one element, as `scipy.optimize.minimize` wants.

        from scipy.optimize import minimize

        f = ob.value_and_grad("energy.onnx", wrt=["a", "b"], of=["energy"], feeds={"temperature": t}, hvp=True)
        minimize(f, f.start, jac=True, hessp=f.hvp, method="Newton-CG")

    Args:
        model, wrt, strict, straight_through: as `backward` takes them.
        of: the output, or a value inside the graph, in a list of one. Default: the only float output.
        feeds: values of the other inputs, and where an input of `wrt` has unknown lengths one of it, for its shape:
            every length of that name is then this one, so that an output for each row is one number for one row.
        reduction: "sum" or "mean" of all elements where y has several. None: it must have one.
        hvp: the Hessian too, for `f.hvp`.
        kernels: see `use_kernels`.
        device, providers: what it runs on, as `session` takes them.

    Raises: what `hvp` does, InvalidArgumentError where a shape or an input is missing, KernelError without onnxruntime.
    """
    chosen(device, providers)  # before any long work
    return ValueAndGrad(
        model,
        wrt,
        of,
        feeds=feeds or {},
        reduction=reduction,
        hvp=hvp,
        opened=partial(session, kernels=kernels, device=device, providers=providers),
        options={"strict": strict, "straight_through": straight_through},
    )


@dataclass(frozen=True)
class _Variable:
    name: str
    shape: tuple[int, ...]
    dtype: type[np.generic]
    part: slice  # of the vector


class ValueAndGrad:
    """`f(x)` is (y, gradient), `f.hvp(x, p)` the Hessian's product with p; both may be called from several threads.

    x, p and the gradient are vectors of float64, the variables one after the other; where there is one variable, x may
    have its shape instead, and so has the gradient then. The model computes in its own type. A further argument of a
    call, {input: array}, takes the place of `feeds`.

    start: the vector of the values that the variables have in the model; zeros for those that have none.
    """

    def __init__(
        self,
        model: ModelProto | ir.Model | str | Path,
        wrt: Sequence[str] | None,
        of: Sequence[str] | None,
        *,
        feeds: Feeds,
        reduction: str | None,
        hvp: bool,
        opened: Callable[[ModelProto], onnxruntime.InferenceSession],
        options: Options,
    ) -> None:
        if not isinstance(feeds, Mapping):
            raise InvalidArgumentError(f"feeds: expected arrays by the names of inputs, got {feeds!r}")
        self._model = model, wrt, of
        self._arguments = {"feeds": dict(feeds), "reduction": reduction, "hvp": hvp}
        self._arguments |= {"opened": opened, "options": options}
        source = _of_lengths(load(model), wrt, feeds)
        y = of[0] if of is not None and len(of) == 1 and not isinstance(of, str) else None
        if reduction is not None:
            y = y or _only_float(source)
            source, y = _reduced(source, y, reduction)
            of = [y]
        gradients = scalar_gradient(source, wrt, of, advice=_ADVICE, **options)
        derivative = derivatives(gradients)[-1]
        values = {tensor.name: to_array(tensor) for tensor in source.graph.initializer}
        self._feeds = {name: np.asarray(value) for name, value in feeds.items() if name not in derivative.results}
        self._variables = _variables(gradients, list(derivative.results), {**values, **feeds})
        self._size = self._variables[-1].part.stop
        self.start = np.zeros(self._size)
        for variable in self._variables:
            if variable.name in values:
                self.start[variable.part] = values[variable.name].ravel()
        y = y or _only_float(source)
        self._gradient = _Function(opened(gradients), [y, *derivative.results.values()])
        self._hessian = None
        if hvp:
            products = hvp_model(source, list(derivative.results), [y], **options)
            self._directions = derivatives(products)[-1]
            names = list(self._directions.results.values())
            self._hessian = _Function(opened(products), names)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """For pickle, and with it `workers=` of SciPy: sessions are made anew, of a path the file is read again."""
        return partial(type(self), **self._arguments), self._model

    def __call__(self, x: np.ndarray, feeds: Feeds | None = None) -> tuple[float, np.ndarray]:
        """(y, ∂y/∂x)."""
        shape, inputs = np.shape(x), self._split(x)
        shapes = [(), *(variable.shape for variable in self._variables)]
        y, *parts = self._gradient({**self._feeds, **(feeds or {}), **inputs}, shapes)
        return float(y.item()), np.concatenate([part.ravel() for part in parts]).astype(np.float64).reshape(shape)

    def hvp(self, x: np.ndarray, p: np.ndarray, feeds: Feeds | None = None) -> np.ndarray:
        """∂²y/∂x² · p."""
        if self._hessian is None:
            raise InvalidArgumentError("hvp: the Hessian was not asked for. Give value_and_grad hvp=True")
        inputs = self._split(x)
        inputs |= {self._directions.seeds[name]: part for name, part in self._split(p).items()}
        parts = self._hessian(
            {**self._feeds, **(feeds or {}), **inputs}, [variable.shape for variable in self._variables]
        )
        return np.concatenate([part.ravel() for part in parts]).astype(np.float64).reshape(np.shape(p))

    def split(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """{variable: array} of a vector, in the types of the model."""
        return {name: part.copy() for name, part in self._split(x).items()}

    def _split(self, x: np.ndarray) -> dict[str, np.ndarray]:
        x = np.asarray(x)
        if x.shape not in [
            (self._size,),
            *(variable.shape for variable in self._variables if len(self._variables) == 1),
        ]:
            raise InvalidArgumentError(f"expected a vector of {self._size} numbers, got an array of shape {x.shape}")
        flat = x.reshape(-1)
        return {
            variable.name: flat[variable.part].astype(variable.dtype).reshape(variable.shape)
            for variable in self._variables
        }


class _Function:
    """A session with inputs and outputs bound to arrays of each thread."""

    def __init__(self, session: onnxruntime.InferenceSession, outputs: Sequence[str]) -> None:
        self._session = session
        self._outputs = list(outputs)
        types = {value.name: value.type for value in (*session.get_inputs(), *session.get_outputs())}
        self._inputs = {value.name for value in session.get_inputs()}
        self._optional = {value.name for value in session.get_overridable_initializers()}
        self._types = [_type_of(name, types[name]) for name in self._outputs]
        # a binding copies at once what is read in another memory than the CPU's
        self._keeps = all(info.name == HOST for info in session.get_input_memory_infos())
        self._floats = {name: _TYPES[text] for name, text in types.items() if text in _TYPES}
        self._of_thread = threading.local()

    def __call__(self, feeds: Feeds, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """The outputs, in arrays that the next call of this thread overwrites; floats are cast to the model's."""
        missing = sorted(self._inputs - feeds.keys())
        unknown = sorted(feeds.keys() - self._inputs - self._optional)
        if missing or unknown:
            raise InvalidArgumentError(
                f"feeds: expected values of {', '.join(missing)}"
                if missing
                else f"feeds: the model has no input {', '.join(map(repr, unknown))}"
            )
        feeds = {name: self._cast(name, np.asarray(value)) for name, value in feeds.items()}
        with lock_of(self._session):
            bound = self._bound(feeds, shapes)
            for name, value in feeds.items():
                np.copyto(bound.arrays[name], value)
            run_bound(self._session, bound.binding)
        return bound.results

    def _cast(self, name: str, value: np.ndarray) -> np.ndarray:
        dtype = self._floats.get(name)
        return value if dtype is None or value.dtype.kind != "f" else value.astype(dtype, copy=False)

    def _bound(self, feeds: Feeds, shapes: Sequence[tuple[int, ...]]) -> _Bound:
        key = tuple((name, value.shape, value.dtype.str) for name, value in feeds.items())
        known: dict[object, _Bound] = vars(self._of_thread).setdefault("bound", {})
        if key not in known or not self._keeps:
            known.clear()  # one shape at a time, as in an optimisation
            binding = self._session.io_binding()
            arrays = {name: np.array(value, order="C") for name, value in feeds.items()}
            results = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, self._types, strict=True)]
            for name, array in arrays.items():
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            for name, array in zip(self._outputs, results, strict=True):
                shape = self._shape(name) if array.ndim == 0 else array.shape
                binding.bind_output(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)
            known[key] = _Bound(binding, arrays, results)
        return known[key]

    def _shape(self, name: str) -> list[int]:
        """That of an output of one element."""
        (value,) = (value for value in self._session.get_outputs() if value.name == name)
        return [1] * len(value.shape)


@dataclass(frozen=True)
class _Bound:
    binding: onnxruntime.IOBinding
    arrays: dict[str, np.ndarray]
    results: list[np.ndarray]


def _variables(model: ModelProto, names: Sequence[str], values: Feeds) -> list[_Variable]:
    """The variables in their order, with the shapes that the model, or a value, gives them."""
    declared = {value.name: value.type.tensor_type for value in model.graph.input}
    result: list[_Variable] = []
    start = 0
    for name in names:
        lengths = [dim.dim_value if dim.HasField("dim_value") else None for dim in declared[name].shape.dim]
        ranked = declared[name].HasField("shape")
        known = tuple(n for n in lengths if n is not None) if ranked and None not in lengths else None
        shape = known if known is not None else np.shape(values[name]) if name in values else None
        if shape is None:
            raise InvalidArgumentError(f"the shape of {name!r} is not known. Give a value of it in feeds", "wrt")
        dtype = helper.tensor_dtype_to_np_dtype(declared[name].elem_type).type
        result.append(_Variable(name, shape, dtype, slice(start, start + prod(shape))))
        start += prod(shape)
    return result


def _of_lengths(model: ModelProto, wrt: Sequence[str] | None, feeds: Feeds) -> ModelProto:
    """The model with the lengths of variables that `feeds` has values of, which are the same in every call."""
    result, lengths = copied(model), dict[str, int]()
    inputs = {value.name: value.type.tensor_type.shape.dim for value in result.graph.input}
    for name in () if wrt is None or isinstance(wrt, str) else wrt:
        dims, shape = inputs.get(name, ()), np.shape(feeds[name]) if name in feeds else ()
        for dim, length in zip(dims, shape, strict=False) if len(dims) == len(shape) else ():
            if dim.dim_param and lengths.setdefault(dim.dim_param, length) != length:
                raise InvalidArgumentError(
                    f"feeds: {name!r} has the shape {shape}, but {dim.dim_param} is {lengths[dim.dim_param]} elsewhere"
                )
            if not dim.dim_value:
                dim.dim_value = length
    for dim in (dim for dims in inputs.values() for dim in dims if dim.dim_param in lengths):
        dim.dim_value = lengths[dim.dim_param]
    return result


def _reduced(model: ModelProto, y: str, reduction: str) -> tuple[ModelProto, str]:
    """The model with the sum or the mean of a value as its first output, and the name of that."""
    if reduction not in _REDUCTIONS:
        raise InvalidArgumentError(f"reduction: expected None, 'sum' or 'mean', got {reduction!r}")
    name = unique(f"{y}_{reduction}", used_names(model.graph))
    node = helper.make_node(_REDUCTIONS[reduction], [y], [name], name=name, keepdims=0)
    model.graph.node.append(node)
    model.graph.output.insert(0, ValueInfoProto(name=name))
    return model, name


def _only_float(model: ModelProto) -> str:
    floats = [v.name for v in model.graph.output if v.type.tensor_type.elem_type in (1, 10, 11, 16)]
    return floats[0]


def _type_of(name: str, text: str) -> type[np.generic]:
    if text not in _TYPES:
        raise InvalidArgumentError(f"{name!r} is a {text}; NumPy has no such type. Cast it in the model")
    return _TYPES[text]
