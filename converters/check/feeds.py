"""Inputs to check a model at: drawn at random from the types and shapes that it declares."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnx_backprop.converters.prepare.float_types import FLOATS
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import suggest
from onnx_backprop.opset.core.limits import current, how_to_raise
from onnx_backprop.opset.graphs.facts import CARRIES_SHAPE
from onnx_backprop.opset.graphs.walk import called, subgraphs

Feeds = dict[str, np.ndarray]

# Inputs whose values set a shape, a position or a count: random ones would ask for something else than was meant.
# fmt: off
_SECOND = (
    "AffineGrid", "CenterCropPad", "CumSum", "Expand", "OneHot", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Reshape",
    "ReverseSequence", "Split", "Squeeze", "Tile", "TopK", "Unsqueeze", "Upsample",
)
# fmt: on
_SHAPE_INPUTS: dict[str, set[int]] = {op_type: {1} for op_type in _SECOND} | {
    "Col2Im": {1, 2},
    "ConstantOfShape": {0},
    "DFT": {1, 2},
    "MaxUnpool": {1, 2},
    "Pad": {1, 3},
    "Range": {0, 1, 2},
    "Resize": {2, 3},
    "STFT": {1, 3},
    "Slice": {1, 2, 3, 4},
}


@dataclass(frozen=True)
class Draw:
    """One way to draw: the length of symbolic axes (the first axis apart) and the numbers of float inputs."""

    length: int
    floats: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def _between(low: float, high: float) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    return lambda rng, shape: rng.uniform(low, high, shape)


BATCH = 2  # the length of a symbolic first axis
# The first that the model can be run at is taken: small before large, any sign before the ranges that Log, Acos or
# Acosh need.
DRAWS = (
    *(Draw(length, _normal) for length in (3, 8, 16, 32, 64, 128, 224)),
    *(Draw(length, between) for between in (_between(0.1, 0.9), _between(1.1, 2.0)) for length in (3, 32, 224)),
)


def required_inputs(graph: GraphProto) -> list[ValueInfoProto]:
    """The inputs that a run must be fed."""
    optional = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in optional]


def check_given(model: ModelProto, feeds: Mapping[str, np.ndarray], wrt: Mapping[str, object]) -> Feeds:
    """The caller's arrays; InvalidArgumentError for an unknown name, another type, or another shape than declared."""
    inputs = {value.name: value for value in model.graph.input}
    result: Feeds = {}
    for name, given in feeds.items():
        array = np.asarray(given)
        if name not in inputs and name not in wrt:
            raise InvalidArgumentError(
                f"feeds: expected the name of a graph input, got {name!r}{suggest(name, inputs)}"
            )
        if name in inputs:
            _check_array(inputs[name], array)
        result[name] = array
    return result


def _check_array(declared: ValueInfoProto, array: np.ndarray) -> None:
    tensor = declared.type.tensor_type
    wanted = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if array.dtype != wanted and not (wanted.kind == "O" and array.dtype.kind in "OU"):
        raise InvalidArgumentError(f"feeds: {declared.name!r} has type {wanted}, got an array of {array.dtype}")
    if not tensor.HasField("shape"):
        return
    dims = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    if len(dims) != array.ndim or any(d not in (None, n) for d, n in zip(dims, array.shape, strict=True)):
        shape = ["?" if d is None else d for d in dims]
        raise InvalidArgumentError(f"feeds: {declared.name!r} has shape {shape}, got an array of {list(array.shape)}")


def draw_feeds(model: ModelProto, given: Mapping[str, np.ndarray], draw: Draw, rng: np.random.Generator) -> Feeds:
    """An array for every input that a run must be fed and `given` does not hold.

    Equal symbols get equal lengths: that of a given array, else `BATCH` where the symbol names a first axis, else
    the draw's. Integers are 0 or 1, indices that fit most axes. InvalidArgumentError for an input that no random
    value fits: one that sets a shape, or is no tensor of numbers.
    """
    inputs = required_inputs(model.graph)
    lengths = _lengths(inputs, given, draw.length)
    result: Feeds = {}
    for value in inputs:
        if value.name not in given:
            _require_drawable(model.graph, value)
            dims = value.type.tensor_type.shape.dim
            shape = tuple(
                d.dim_value if d.HasField("dim_value") else lengths.get(d.dim_param, draw.length if axis else BATCH)
                for axis, d in enumerate(dims)
            )
            if 8 * prod(shape) > current().folded_bytes:
                raise InvalidArgumentError(
                    f"feeds: the input {value.name!r} of shape {shape} is too large to be drawn. "
                    f"{how_to_raise('folded_bytes')}"
                )
            result[value.name] = _array(value.type.tensor_type.elem_type, shape, draw, rng)
    return result


def _lengths(inputs: list[ValueInfoProto], given: Mapping[str, np.ndarray], length: int) -> dict[str, int]:
    known: dict[str, int] = {}
    drawn: dict[str, int] = {}
    for value in inputs:
        array = given.get(value.name)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param and array is not None and axis < array.ndim:
                known.setdefault(dim.dim_param, array.shape[axis])
            elif dim.dim_param:
                drawn.setdefault(dim.dim_param, length if axis else BATCH)
    return drawn | known


def _array(element: int, shape: tuple[int, ...], draw: Draw, rng: np.random.Generator) -> np.ndarray:
    if element in FLOATS:
        return draw.floats(rng, shape).astype(helper.tensor_dtype_to_np_dtype(element))
    return rng.integers(0, 2, shape).astype(helper.tensor_dtype_to_np_dtype(element))


def _require_drawable(graph: GraphProto, value: ValueInfoProto) -> None:
    ask = f"Give it: feeds={{{value.name!r}: array}}, or on the command line --feeds FILE.npz"
    if value.type.WhichOneof("value") != "tensor_type":
        raise InvalidArgumentError(f"feeds: the input {value.name!r} is no tensor, there is no default for it. {ask}")
    tensor = value.type.tensor_type
    if tensor.elem_type in (TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.COMPLEX128, TensorProto.UNDEFINED):
        dtype = TensorProto.DataType.Name(tensor.elem_type)
        raise InvalidArgumentError(f"feeds: the input {value.name!r} has type {dtype}, which is not drawn. {ask}")
    if not tensor.HasField("shape"):
        raise InvalidArgumentError(f"feeds: the input {value.name!r} has no shape to draw an array of. {ask}")
    sets = next(_shape_uses(graph, value.name), None)
    if sets is not None:
        raise InvalidArgumentError(
            f"feeds: the input {value.name!r} sets a shape, a position or a count of {sets.op_type} "
            f"'{called(sets)}', for which no random value will do. {ask}"
        )


def _shape_uses(graph: GraphProto, name: str) -> Iterator[NodeProto]:
    """The nodes that a value reaches, directly or carried on, at an input that sets a shape."""
    names = {name}
    for node in graph.node:
        read = {n for n, used in enumerate(node.input) if used in names}
        if read & _SHAPE_INPUTS.get(node.op_type, set()):
            yield node
        elif read and node.op_type in CARRIES_SHAPE:
            names.update(node.output)
        for inner in subgraphs(node):
            for captured in names - {value.name for value in inner.input}:
                yield from _shape_uses(inner, captured)
