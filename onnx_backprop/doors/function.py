"""`function`: a model as a function of NumPy arrays, whose derivatives are functions of the same kind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx import ModelProto, helper

from onnx_backprop.converters.derivatives.dense import jacobian
from onnx_backprop.converters.derivatives.products import jvp, vjp
from onnx_backprop.converters.derivatives.work import Options
from onnx_backprop.converters.prepare.ir_models import to_ir, to_proto
from onnx_backprop.converters.prepare.load import check_names, pick
from onnx_backprop.converters.reverse.expand import drop_dead
from onnx_backprop.converters.reverse.known import is_float
from onnx_backprop.converters.reverse.models.backward import Draft
from onnx_backprop.converters.reverse.models.derivatives import derivatives
from onnx_backprop.converters.reverse.models.named import INPUT, OUTPUT, pick_values, require_floats
from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError, OnnxBackpropWarning, UnsupportedError
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.graphs.facts import DRAWS
from onnx_backprop.opset.graphs.walk import all_nodes
from onnx_backprop.ort_ops import Named
from onnx_backprop.providers.choose import chosen
from onnx_backprop.providers.placed import session
from onnx_backprop.training.inputs import cast, check_shapes, declared_dims, refusals

Opened = Callable[[ModelProto], onnxruntime.InferenceSession]


class Arguments(Options, total=False):
    """The keywords of `function`."""

    wrt: Sequence[str] | None
    of: Sequence[str] | None
    device: str | None
    providers: Sequence[Named] | None


def function(
    model: ModelProto | ir.Model | str | Path,
    *,
    wrt: Sequence[str] | None = None,
    of: Sequence[str] | None = None,
    device: str | None = None,
    providers: Sequence[Named] | None = None,
    **options: Unpack[Options],
) -> Function:
    """A model as a function (x, …) -> (y, …) of arrays, with its Jacobian J from both sides; these are functions too.

        f = ob.function("model.onnx")
        (y,) = f(x)
        (dx,) = f.vjp(x, u)  # Jᵀu
        (dy,) = f.jvp(x, v)  # Jv
        (h, _) = f.vjp.jacobian(x, u)  # of Jᵀu by x: the Hessian of uᵀy; by u: Jᵀ

    Args:
        model, options (stop, free, kernels, strict, straight_through, checkpoint): as `backward` takes them. With
            `free`, a file of one row becomes a function of rows.
        wrt: inputs and initializers to differentiate with respect to. The initializers become inputs after the model's
            own, and `f.values` has their arrays. Default: every float input.
        of: outputs, or values inside the graph, in a list. Default: all outputs.
        device, providers: what it runs on, as `session` takes them.

    Raises: InvalidArgumentError for unknown names; UnsupportedError for a model that draws random numbers, since its
    derivative would draw others; what `vjp` raises, when a derivative is first used.
    """
    chosen(device, providers)  # before any long work
    kernels = options.pop("kernels", "native")
    stop, free = options.pop("stop", None), options.pop("free", None)
    draft = Draft(model, names={"wrt": wrt, "of": of}, stop=stop, free=free)
    graph = draft.graph
    if drawing := next((node for node in all_nodes(graph) if node in DRAWS), None):
        raise UnsupportedError(
            f"{drawing.op_type} {drawing.name!r} draws random numbers, and a derivative would draw others. Export the "
            "model for inference, or train it with Trainer"
        )
    initializers = dict(graph.initializers)
    inputs = [str(value.name) for value in graph.inputs if value.name not in initializers]
    if wrt is None:
        variables = [str(value.name) for value in graph.inputs if value.name in inputs and is_float(value)]
    else:
        known = {str(value.name): value for value in graph.inputs} | initializers
        picked = require_floats(pick(check_names("wrt", wrt), known, argument="wrt", what=INPUT), "wrt")
        variables = list(wrt)
        inputs += [name for name in wrt if name in initializers]
        graph.inputs.extend(value for value in picked if not value.is_graph_input())
    if of is not None:
        _show(graph, of)
    for n, value in enumerate(graph.inputs):  # so that seeds are seen to have the same lengths
        dims = enumerate(value.shape or ())
        named = [f"unnamed_{n}_{axis}" if isinstance(d, ir.SymbolicDim) and d.value is None else d for axis, d in dims]
        value.shape = value.shape and ir.Shape(named)
    proto = draft.finish()
    opened = partial(session, kernels=kernels, device=device, providers=providers)
    return Function(proto, inputs, [value.name for value in proto.graph.output], variables, opened, options)


class Function:
    """The result of `function`; several threads may call it.

    inputs, outputs: names, in the order of arguments and results. variables: the inputs of the derivatives. targets:
    the float outputs. types, shapes: of all, as the model declares them: a NumPy type, and a tuple of lengths, None for
    symbols, or None. values: arrays of the inputs that are initializers. model: what it runs.

    A call casts arguments to the model's types if NumPy calls that "same kind": float64 to float32, not to integers.
    """

    def __init__(
        self,
        model: ModelProto,
        inputs: Sequence[str],
        outputs: Sequence[str],
        variables: Sequence[str],
        opened: Opened,
        options: Options,
        order: int = 0,
    ) -> None:
        self.model, self.inputs, self.outputs = model, tuple(inputs), tuple(outputs)
        self._open, self._options, self._order = opened, options, order
        self.types: dict[str, np.dtype[Any]] = {}
        self.shapes: dict[str, tuple[int | None, ...] | None] = {}
        self._dims: dict[str, Dims | None] = {}  # with symbols
        for value in (*model.graph.input, *model.graph.output):
            if value.name not in {*inputs, *outputs}:
                continue
            tensor = value.type.tensor_type
            if not tensor.elem_type:
                raise UnsupportedError(f"{value.name!r} is no tensor, or has no known type. Name other outputs in `of`")
            self.types[value.name] = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            dims = declared_dims(tensor.shape) if tensor.HasField("shape") else None
            self._dims[value.name] = dims
            self.shapes[value.name] = None if dims is None else tuple(n if isinstance(n, int) else None for n in dims)
        self.values = {tensor.name: to_array(tensor) for tensor in model.graph.initializer if tensor.name in inputs}
        self.variables = tuple(variables)
        self.targets = tuple(name for name in outputs if _is_float(self.types[name]))
        self._lengths: dict[object, list[tuple[int, ...]]] = {}
        self._opened_in: tuple[int, onnxruntime.InferenceSession] | None = None

    def __repr__(self) -> str:
        return f"<Function ({', '.join(self.inputs)}) -> ({', '.join(self.outputs)})>"

    def __call__(self, *arrays: Any) -> tuple[np.ndarray, ...]:
        """The outputs.

        Errors: InvalidArgumentError for too few or many arrays, those of another kind of type, other shapes than
        declared, in which equal symbols are equal lengths, and whatever else onnxruntime cannot run.
        """
        if len(arrays) != len(self.inputs):
            raise InvalidArgumentError(f"expected {', '.join(self.inputs)}, got {len(arrays)} arrays")
        feeds = {name: self._cast(name, array) for name, array in zip(self.inputs, arrays, strict=True)}
        free = () if self._order else self.inputs
        check_shapes(self._dims, {name: array.shape for name, array in feeds.items()}, free=free)
        with refusals(feeds, "these arrays"):
            results: Sequence[Any] = self._session().run(list(self.outputs), feeds)
        return tuple(results)

    def _session(self) -> onnxruntime.InferenceSession:
        if self._opened_in is None:
            self._opened_in = os.getpid(), self._open(self.model)
        process, session = self._opened_in
        if process != os.getpid():
            raise KernelError(
                "this process was forked from one that has run onnxruntime, whose threads it has not, and would wait "
                'for ever. Start it otherwise, with multiprocessing.get_context("spawn") or pm.sample(mp_ctx="spawn")'
            )
        return session

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: without the session, which is made anew."""
        return vars(self) | {"_opened_in": None}

    def _cast(self, name: str, array: Any) -> np.ndarray:
        array, expected = np.asarray(array), self.types[name]
        if not np.can_cast(array.dtype, expected, "same_kind"):
            raise InvalidArgumentError(f"{name!r} has type {expected}, got an array of {array.dtype}")
        return cast(name, array, expected)

    def lengths(self, *shapes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shapes of the outputs for those of the inputs: a run on zeros tells, the first time."""
        if shapes not in self._lengths:
            zeros = [np.zeros(shape, self.types[name]) for name, shape in zip(self.inputs, shapes, strict=True)]
            self._lengths[shapes] = [y.shape for y in self(*zeros)]
        return self._lengths[shapes]

    def showing(self, names: Sequence[str]) -> Function:
        """The same function with other outputs: outputs of it, and values inside its graph."""
        inner = to_ir(self.model)
        _show(inner.graph, names)
        return Function(to_proto(inner), self.inputs, names, self.variables, self._open, self._options)

    @cached_property
    def vjp(self) -> Function:
        """The function (*inputs, one seed u for each of targets) -> (Jᵀu for each of variables)."""
        return self.derived(vjp, self.variables, self.targets)

    @cached_property
    def jvp(self) -> Function:
        """The function (*inputs, a tangent v for each of variables) -> (Jv for each of targets)."""
        return self.derived(jvp, self.variables, self.targets)

    @cached_property
    def jacobian(self) -> Function:
        """The function (*inputs) -> (∂y/∂x for each of targets and, within, of variables), of the shapes of y and x."""
        return self.derived(jacobian, self.variables, self.targets)

    def derived(self, derivative: Callable[..., ModelProto], wrt: Sequence[str], of: Sequence[str]) -> Function:
        """The function of a derivative, a Function again: of its inputs and seeds."""
        with warnings.catch_warnings():
            if self._order:  # parts of second derivatives are zero more often than not
                warnings.simplefilter("ignore", OnnxBackpropWarning)
            model = derivative(self.model, wrt, of, **self._options)
        derivative_names = derivatives(model)[-1]
        results = list(derivative_names.results.values())
        outputs = [name for row in results for name in row.values()] if derivative_names.mode == "jacobian" else results
        inner = to_ir(model)
        _show(inner.graph, outputs)
        inputs, variables = ([*names, *derivative_names.seeds.values()] for names in (self.inputs, self.variables))
        return Function(to_proto(inner), inputs, outputs, variables, self._open, self._options, self._order + 1)


def _show(graph: ir.Graph, names: Sequence[str]) -> None:
    """Make other values the outputs of a graph, and leave out what they do not need."""
    outputs = {str(value.name): value for value in graph.outputs}
    graph.outputs[:] = pick_values(graph, names, outputs, argument="of", what=OUTPUT)
    drop_dead(graph)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"
