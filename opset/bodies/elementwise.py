"""Operators on tensors of one shape: what is known of it, and its proof inside a body."""

import math
from collections.abc import Callable, Sequence

from onnx_backprop.opset.bodies.builder import FLOAT, Body, Tensor
from onnx_backprop.opset.bodies.builder import known as known_lengths
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Attributes
from onnx_backprop.opset.core.shapes import Dim, Dims, merge, require_rank

MAX_RANK = 64  # numpy's


def same_shape(op: str, args: Sequence[Arg | None], names: tuple[str, str], low: int, high: int) -> Dims | None:
    """What two inputs of one shape say about it together; ShapeError when they contradict each other."""
    dims: list[Dims] = []
    for arg, name in zip(args[:2], names, strict=True):
        assert arg is not None, f"{name} is required"
        if arg.dims is not None:
            require_rank(arg.dims, low, high, op=op, subject=name)
            if dims:
                require_rank(arg.dims, len(dims[0]), len(dims[0]), op=op, subject=name)
            dims.append(arg.dims)
    if len(dims) < 2:
        return dims[0] if dims else None
    merged: list[Dim] = []
    for axis, (a, b) in enumerate(zip(*dims, strict=True)):
        merged.append(merge(a, b, op=op, subject=f"lengths of axis {axis} of {names[0]} and {names[1]}"))
    return tuple(merged)


def proof_of_shape(b: Body, value: Tensor | None, expected: str, dims: Dims | None, message: str) -> str:
    """0, computed by a run in which a tensor has the shape `expected`; '' where that is known, or it is absent."""
    if value is None or (dims is not None and value.dims == dims and None not in dims):
        return ""
    shapes = [b.Concat(b.Shape(shape), shape, axis=0) for shape in (b.Shape(value), expected)]  # led by the rank
    return b.require(b.Equal(*shapes, name=f"{b.op}: {message}"), message)


def share(b: Body, dims: Dims | None, count: Callable[[], str]) -> str:
    """1/n, n the number of elements of some dimensions, `count` where not all are known; finite without any too."""
    if dims is not None and (known := known_lengths(dims)) is not None:
        return b.float_scalar(1 / max(math.prod(known), 1))
    return b.Reciprocal(b.Max(b.Cast(count(), to=FLOAT), b.float_scalar(1)))


def require_epsilon(attrs: Attributes) -> None:
    """Raise ShapeError unless the number added to a variance is finite and not negative."""
    if not (math.isfinite(attrs["epsilon"]) and attrs["epsilon"] >= 0):
        raise ShapeError(f"attribute epsilon: expected a number >= 0, got {attrs['epsilon']}", op_type=attrs.op)


def proven_alike(b: Body, result: str, x: Tensor, y: Tensor, message: str, axis: int | None = None) -> str:
    """The result of operators on x and y, element by element; a run in which these have different shapes fails.

    Broadcasting fails, or makes a result that has more elements than x or than y, and then a Reshape named after the
    message does. Nothing is added where the shapes are known to be equal; equal symbols are equal lengths. Of unknown
    ranks neither shows that they differ, nor that there is an `axis`: these are compared.
    """
    if x.dims is not None and x.dims == y.dims and None not in x.dims:
        return result
    name = f"{b.op}: {message}"
    if x.dims is None or y.dims is None:
        shape = b.Add(b.Shape(x), proof_of_shape(b, y, b.Shape(x), None, message))
        if axis is not None:
            length = b.Gather(b.Shape(x), b.ints([axis]), name=f"{b.op}: expected an axis that there is")
            shape = b.Add(shape, b.Sub(length, length))
        return b.Reshape(result, shape, allowzero=1)
    return b.Reshape(b.Reshape(result, b.Shape(y), allowzero=1, name=name), b.Shape(x), allowzero=1, name=name)
