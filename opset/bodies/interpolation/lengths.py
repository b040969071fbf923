"""What a run must prove of lengths in the bodies of the interpolation gradients."""

from onnx_backprop.opset.bodies.builder import INT64, Body, Tensor
from onnx_backprop.opset.bodies.expressions import Vector, shape


def shape_of_rank(b: Body, x: Tensor, rank: int, message: str) -> Vector:
    """The shape of x; a run with another rank fails with the message."""
    return shape(b, x) if x.dims is not None else Vector(b, [None] * rank, b.entries(b.Shape(x), rank, message))


def positive_or_empty(source: Vector, out: Vector, message: str) -> Vector:
    """The source's lengths, proven to be >= 1 where the destination is not empty along the axis, and never below 0."""
    if source.known and all(length > 0 for length in source.known):
        return source
    proven: Vector = source + (source >= (out > 0).cast(INT64)).require(message)
    return proven.knowing([v or None for v in source.entries])
