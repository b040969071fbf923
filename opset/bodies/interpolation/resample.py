"""The body of ResampleGrad: what a run must prove, then one matrix per axis."""

from functools import partial
from math import prod

from onnx_backprop.opset.bodies.builder import BOOL, FLOAT, INT64, Body, Tensor
from onnx_backprop.opset.bodies.expressions import Vector
from onnx_backprop.opset.bodies.interpolation.forms import InterpolatedAxis, PlacedBy
from onnx_backprop.opset.bodies.interpolation.lengths import positive_or_empty, shape_of_rank
from onnx_backprop.opset.bodies.interpolation.transpose import transpose
from onnx_backprop.opset.core.errors import KernelError, ShapeError
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.maths.interpolation import place_resample

LIMIT = 2**47  # elements, far beyond any memory; their number of bytes still is an int64
LISTS = ("output_sizes", "scales", "input_pixel_offsets", "output_pixel_offsets")


def body(
    b: Body, attrs: Attributes, gradient: Tensor, sizes: Tensor | None, input_offset: float, output_offset: float
) -> str:
    """OutputGradient; the offsets are the defaults."""
    rank = _rank(attrs, gradient, sizes)
    out = shape_of_rank(b, gradient, rank, f"expected input_gradient of rank {rank}")
    source, zero = _sizes(b, attrs, sizes, rank)
    source = positive_or_empty(
        source, out, "expected output_sizes >= 0, and >= 1 where input_gradient is not empty along the axis"
    )
    scales = attrs["scales"] or [None] * rank
    input_offsets = attrs["input_pixel_offsets"] or [input_offset] * rank
    output_offsets = attrs["output_pixel_offsets"] or [output_offset] * rank
    axes: list[InterpolatedAxis] = []
    for k, (scale, *offsets) in enumerate(zip(scales, input_offsets, output_offsets, strict=True)):
        rule = PlacedBy(partial(place_resample, attrs["interpolation_mode"], scale, *offsets))
        centred = Vector(b, [scale in (None, 1) and sum(offsets) == 0], dtype=BOOL)
        axes.append(InterpolatedAxis(k, source[k], rule, centred & source[k].equal(out[k])))
    dy = gradient if gradient.dims is not None else b.Reshape(gradient, out.name, allowzero=1)
    return transpose(b, dy, out, axes, source + zero)


def _rank(attrs: Attributes, gradient: Tensor, sizes: Tensor | None) -> int:
    known = {name: given for name in LISTS if (given := attrs[name])}  # an empty list stands for its default
    known = {"input_gradient": gradient.dims, **known, "input output_sizes": sizes and sizes.value}
    ranks = {name: len(given) for name, given in known.items() if given}
    count = sizes.dims[0] if sizes is not None and sizes.dims else None
    if isinstance(count, int):
        ranks["input output_sizes"] = count
    if attrs["dimension_count"] is not None:
        ranks["attribute dimension_count"] = attrs["dimension_count"]
    if len(set(ranks.values())) > 1:
        listed = ", ".join(f"{name} {rank}" for name, rank in ranks.items())
        raise ShapeError(f"expected one rank, got that of {listed}")
    if ranks:
        return next(iter(ranks.values()))
    raise KernelError(
        "a body in standard operators needs to know the rank: the shape of input_gradient, the number of output_sizes, "
        "one non-empty list of attributes or dimension_count must be known"
    )


def _sizes(b: Body, attrs: Attributes, sizes: Tensor | None, rank: int) -> tuple[Vector, Vector | int]:
    """The source's shape, and the 0 of a check that it agrees with the attribute."""
    stated = attrs["output_sizes"]
    for given in (stated, sizes and sizes.value):
        if given is not None and prod(given) >= LIMIT:
            raise ShapeError(f"output_gradient of shape {tuple(given)} does not fit in memory")
    if sizes is None:
        return Vector(b, stated), 0
    if sizes.value is not None:
        return Vector(b, sizes.value), 0
    proven = b.checked(sizes, Vector(b, [rank]), f"expected input output_sizes of {rank} entries")
    values = Vector(b, [None] * rank, b.Cast(proven, to=INT64))
    if stated is None:
        return values + (values.cast(FLOAT).product() < LIMIT).require("expected output_sizes that fit in memory"), 0
    same = values.equal(Vector(b, stated))
    return Vector(b, stated), same.require(f"expected input output_sizes {list(stated)} as the attribute says")
