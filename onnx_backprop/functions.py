"""`value_and_grad`: a model as a function of NumPy arrays with its gradient, as optimisers call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
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
from onnx_backprop.ort_ops import Named
from onnx_backprop.providers.choose import chosen
from onnx_backprop.providers.placed import session
from onnx_backprop.training.inputs import cast, refusals

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
    """A function x -> (y, ∂y/∂x) of one vector x, for an output y of one element, as `scipy.optimize.minimize` needs.

        from scipy.optimize import minimize

        f = ob.value_and_grad("energy.onnx", wrt=["a", "b"], of=["energy"], feeds={"temperature": t}, hvp=True)
        minimize(f, f.start, jac=True, hessp=f.hvp, method="Newton-CG")

    Args:
        model, wrt, strict, straight_through: as `backward` takes them.
        of: the output, or a value inside the graph, in a list of one. Default: the only float output.
        feeds: values of the other inputs; also of an input of `wrt` with unknown lengths, for its shape. Every length
            of that name is then fixed, so an output per row is one number for one row.
        reduction: "sum" or "mean" of all elements if y has several. None: it must have one.
        hvp: the Hessian too, for `f.hvp`.
        kernels: see `use_kernels`.
        device, providers: what it runs on, as `session` takes them.

    Raises: what `hvp` does, InvalidArgumentError if a shape or an input is missing, KernelError without onnxruntime.
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


class Vector:
    """Arrays of given shapes, one after the other, as one vector of float64; of one array, its shape may be kept."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.sizes = [prod(shape) for shape in shapes.values()]
        *self._starts, self.size = accumulate(self.sizes, initial=0)
        self._fit = {(self.size,), *(shape for shape in shapes.values() if len(shapes) == 1)}

    def split(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """{name: array} of a vector, views of it."""
        x = np.asarray(x)
        if x.shape not in self._fit:
            raise InvalidArgumentError(f"expected a vector of {self.size} numbers, got an array of shape {x.shape}")
        flat, places = x.reshape(-1), zip(self.shapes.items(), self._starts, self.sizes, strict=True)
        return {name: flat[start : start + size].reshape(shape) for (name, shape), start, size in places}


def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """The vector of arrays."""
    return np.concatenate([array.ravel() for array in arrays]).astype(np.float64)


class ValueAndGrad:
    """`f(x)` is (y, gradient), `f.hvp(x, p)` the Hessian's product with p; several threads may call both.

    x, p and the gradient are vectors of float64, the variables one after the other; with a single variable, x may have
    its shape instead, and then the gradient has it too. The model computes in its own type. A second argument of a
    call, {input: array}, replaces `feeds`.

    start: the vector of the values that the variables have in `feeds`, or else in the model; zeros for others.
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
        self._x = Vector(_shapes(gradients, list(derivative.results), {**values, **feeds}))
        self.start = joined(
            _first(name, feeds.get(name, values.get(name)), shape) for name, shape in self._x.shapes.items()
        )
        y = y or _only_float(source)
        self._of = y
        self._gradient = _Function(opened(gradients), [y, *derivative.results.values()])
        self._hessian = None
        if hvp:
            products = hvp_model(source, list(derivative.results), [y], **options)
            self._directions = derivatives(products)[-1]
            names = list(self._directions.results.values())
            self._hessian = _Function(opened(products), names)

    def __repr__(self) -> str:
        """Of what, by what, and how many numbers that are."""
        by = ", ".join(f"{name} {'×'.join(map(str, shape)) or 'scalar'}" for name, shape in self._x.shapes.items())
        also = ", with its Hessian" if self._hessian is not None else ""
        return f"<ValueAndGrad of {self._of} by {by}: {self._x.size:,} numbers{also}>"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """For pickle, and with it `workers=` of SciPy: sessions are made anew, of a path the file is read again."""
        return partial(type(self), **self._arguments), self._model

    def __call__(self, x: np.ndarray, feeds: Feeds | None = None) -> tuple[float, np.ndarray]:
        """(y, ∂y/∂x)."""
        y, *parts = self._gradient({**self._feeds, **(feeds or {}), **self._x.split(x)})
        if y.size != 1:
            raise InvalidArgumentError(f"{self._of!r} has the shape {y.shape}, expected one element: {_ADVICE}")
        return float(y.item()), joined(parts).reshape(np.shape(x))

    def hvp(self, x: np.ndarray, p: np.ndarray, feeds: Feeds | None = None) -> np.ndarray:
        """∂²y/∂x² · p."""
        if self._hessian is None:
            raise InvalidArgumentError("hvp: the Hessian was not asked for. Give value_and_grad hvp=True")
        seeds = {self._directions.seeds[name]: part for name, part in self._x.split(p).items()}
        parts = self._hessian({**self._feeds, **(feeds or {}), **self._x.split(x), **seeds})
        return joined(parts).reshape(np.shape(p))

    def split(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """{variable: array} of a vector, in the types of the model."""
        return {name: self._gradient.cast(name, part.copy()) for name, part in self._x.split(x).items()}


class _Function:
    """A session that is asked for the same outputs each time; numbers become the model's floats."""

    def __init__(self, session: onnxruntime.InferenceSession, outputs: Sequence[str]) -> None:
        self._session = session
        self._outputs = list(outputs)
        inputs, optional = session.get_inputs(), session.get_overridable_initializers()
        types = {value.name: value.type for value in (*inputs, *optional, *session.get_outputs())}
        for name in self._outputs:
            if types[name] not in _TYPES:
                raise InvalidArgumentError(f"{name!r} is a {types[name]}; NumPy has no such type. Cast it in the model")
        self._inputs, self._optional = ({value.name for value in values} for values in (inputs, optional))
        self._floats = {name: _TYPES[text] for name, text in types.items() if text in _TYPES}

    def __call__(self, feeds: Feeds) -> list[np.ndarray]:
        missing = sorted(self._inputs - feeds.keys())
        unknown = sorted(feeds.keys() - self._inputs - self._optional)
        if missing or unknown:
            raise InvalidArgumentError(
                f"feeds: expected values of {', '.join(missing)}"
                if missing
                else f"feeds: the model has no input {', '.join(map(repr, unknown))}"
            )
        feeds = {name: self.cast(name, np.asarray(value)) for name, value in feeds.items()}
        with refusals(feeds):
            results: Any = self._session.run(self._outputs, feeds)
        return results

    def cast(self, name: str, value: np.ndarray) -> np.ndarray:
        """A value of an input in the type of the model."""
        dtype = self._floats.get(name)
        if dtype is not None and value.dtype.kind not in "biuf":
            raise InvalidArgumentError(f"feeds: {name!r} has the type {np.dtype(dtype)}, got an array of {value.dtype}")
        return value if dtype is None else cast(name, value, np.dtype(dtype))


def _shapes(model: ModelProto, names: Sequence[str], values: Feeds) -> dict[str, tuple[int, ...]]:
    """The shapes of the variables, which the model, or a value, gives them."""
    declared = {value.name: value.type.tensor_type for value in model.graph.input}
    result: dict[str, tuple[int, ...]] = {}
    for name in names:
        lengths = [dim.dim_value if dim.HasField("dim_value") else None for dim in declared[name].shape.dim]
        known = tuple(n for n in lengths if n is not None)
        if declared[name].HasField("shape") and len(known) == len(lengths):
            result[name] = known
        elif name in values:
            result[name] = np.shape(values[name])
        else:
            raise InvalidArgumentError(f"the shape of {name!r} is not known. Give a value of it in feeds", "wrt")
    return result


def _first(name: str, value: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    if value is not None and np.shape(value) != shape:
        raise InvalidArgumentError(f"feeds: {name!r} has the shape {shape}, got an array of {np.shape(value)}")
    return np.zeros(shape) if value is None else np.asarray(value)


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
