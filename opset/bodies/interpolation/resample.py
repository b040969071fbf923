"""The body of ResampleGrad: what a run must prove, then one matrix per axis."""

from __future__ import annotations

from math import prod

from onnx_backprop.opset.bodies.builder import FLOAT, INT64, Body, Tensor
from onnx_backprop.opset.bodies.interpolation.forms import Axis
from onnx_backprop.opset.bodies.interpolation.lengths import Length, guarded, join, lengths_of, positive_or_empty, split
from onnx_backprop.opset.bodies.interpolation.taps import ResampleRule
from onnx_backprop.opset.bodies.interpolation.transpose import transpose
from onnx_backprop.opset.core.errors import KernelError, ShapeError
from onnx_backprop.opset.core.op import Attributes

LIMIT = 2**47  # elements, far beyond any memory; their number of bytes still is an int64
LISTS = ("output_sizes", "scales", "input_pixel_offsets", "output_pixel_offsets")


def body(
    b: Body, attrs: Attributes, gradient: Tensor, sizes: Tensor | None, input_offset: float, output_offset: float
) -> str:
    """OutputGradient; the offsets are the defaults."""
    rank = _rank(attrs, gradient, sizes)
    out = lengths_of(b, gradient, rank, f"expected input_gradient of rank {rank}")
    source, zero = _sizes(b, attrs, sizes, rank)
    source = positive_or_empty(
        b, source, out, "expected output_sizes >= 0, and >= 1 where input_gradient is not empty along the axis"
    )
    scales = attrs["scales"] or [None] * rank
    input_offsets = attrs["input_pixel_offsets"] or [input_offset] * rank
    output_offsets = attrs["output_pixel_offsets"] or [output_offset] * rank
    mode = attrs["interpolation_mode"]
    axes = [Axis(k, source[k], ResampleRule(mode, scales[k], input_offsets[k], output_offsets[k])) for k in range(rank)]
    dy = gradient if gradient.dims is not None else b.Reshape(gradient, join(b, out), allowzero=1)
    return transpose(b, dy, out, axes, guarded(b, join(b, source), zero))


def _rank(attrs: Attributes, gradient: Tensor, sizes: Tensor | None) -> int:
    for given in (gradient.dims, *(attrs[name] for name in LISTS), sizes and sizes.value):
        if given:  # an empty list stands for its default
            return len(given)
    count = sizes.dims[0] if sizes is not None and sizes.dims else None
    if isinstance(count, int):
        return count
    if attrs["dimension_count"] is not None:
        return attrs["dimension_count"]
    raise KernelError(
        "a body in standard operators needs to know the rank: the shape of input_gradient, the number of output_sizes, "
        "one non-empty list of attributes or dimension_count must be known"
    )


def _sizes(b: Body, attrs: Attributes, sizes: Tensor | None, rank: int) -> tuple[list[Length], str | None]:
    """The source's shape, and the 0 of a check that it agrees with the attribute."""
    stated = attrs["output_sizes"]
    for given in (stated, sizes and sizes.value):
        if given is not None and prod(given) >= LIMIT:
            raise ShapeError(f"output_gradient of shape {tuple(given)} does not fit in memory")
    if sizes is None:
        return list(stated), None
    if sizes.value is not None:
        return list(sizes.value), None
    message = f"expected input output_sizes of {rank} entries"
    values = b.Cast(b.checked(sizes, b.ints([rank]), (rank,), message), to=INT64)
    if stated is None:
        fits = b.Less(b.ReduceProd(b.Cast(values, to=FLOAT)), b.float_scalar(LIMIT))
        return split(b, b.Add(values, b.require(fits, "expected output_sizes that fit in memory")), rank), None
    same = b.Equal(values, b.ints(stated))
    return list(stated), b.require(same, f"expected input output_sizes {list(stated)} as the attribute says")
