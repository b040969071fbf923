"""ResampleGrad: the gradient of DirectML's RESAMPLE with respect to its input."""

from collections.abc import Sequence

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, merge, require_at_least, require_length, require_rank, stated_shape
from onnx_backprop.opset.maths.interpolation import apply_transpose, resample_taps

DOC = """
OutputGradient = W_0ᵀ · W_1ᵀ · … · InputGradient, one matrix W (O rows, I columns) per axis, batch and channels included

I is the length of output_gradient (the forward input), O that of input_gradient (the forward output). Row o of W
places its taps at x = (o - OutputPixelOffset) / Scale - InputPixelOffset.

- NEAREST_NEIGHBOR: one tap of weight 1 at ceil(x - 1/2), that is x rounded, ties down.
- LINEAR: weight 1 - frac(x) at floor(x) and frac(x) at floor(x) + 1.

Columns outside [0, I-1] are moved to the nearest edge. The scales are used as given, never recomputed from the
lengths: if Scale·I > O the surplus is cropped, if smaller the edge repeats.

Offsets (0.5, -0.5), which empty lists stand for, are half-pixel centres; (0, 0) is asymmetric. Both offsets belong to
the *forward* operator: outX = (inX + InputPixelOffset)·Scale + OutputPixelOffset. Values written for a library that
reads them from the gradient's side must be swapped.

Shapes: input_gradient (O_0, …) -> output_gradient (I_0, …), any rank >= 1; the lengths I come from output_sizes.

Units: offsets and coordinates in pixels.

Edge cases: I = 1 sums the whole axis; pixels that the forward never read get 0; an empty input_gradient gives zeros.

Errors: no output_sizes; a list without one entry per axis; dimension_count other than the rank; a scale that is not
positive and finite.
"""

MAX_RANK = 32
DEFAULT_INPUT_OFFSET, DEFAULT_OUTPUT_OFFSET = 0.5, -0.5


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    gradient, output_sizes = args
    assert gradient is not None
    op = attrs.op
    sizes: Dims | None = attrs["output_sizes"]
    if sizes is None and output_sizes is None:
        raise ShapeError("expected output_sizes as attribute or input, got neither", op_type=op)
    if output_sizes is not None:
        stated = stated_shape(output_sizes.dims, output_sizes.value, 1, MAX_RANK, op=op, subject="input output_sizes")
        if stated is not None and sizes is not None:
            require_length(stated, len(sizes), op=op, subject="input output_sizes")
            subject = "attribute and input output_sizes"
            stated = tuple(merge(a, b, op=op, subject=subject) for a, b in zip(sizes, stated, strict=True))
        sizes = sizes if stated is None else stated
    known = [dims for dims in (gradient.dims, sizes) if dims is not None]
    if not known:
        return None
    rank = len(known[0])
    require_rank(
        known[0], 1, MAX_RANK, op=op, subject="input_gradient" if gradient.dims is not None else "output_sizes"
    )
    if sizes is not None:
        require_length(sizes, rank, op=op, subject="output_sizes (one per axis)")
        require_at_least(sizes, 0, op=op, subject="output_sizes")
    if attrs["dimension_count"] not in (None, rank):
        raise ShapeError(f"attribute dimension_count: expected {rank}, got {attrs['dimension_count']}", op_type=op)
    for name in ("scales", "input_pixel_offsets", "output_pixel_offsets"):
        if attrs[name]:
            require_length(attrs[name], rank, op=op, subject=f"attribute {name} (one per axis)")
            _require_finite(attrs, name)
    if sizes is None:
        return (None,) * rank
    for size, out in zip(sizes, gradient.dims or (), strict=False):
        if size == 0 and isinstance(out, int) and out > 0:
            raise ShapeError(f"output_sizes: expected values >= 1, got {list(sizes)}", op_type=op)
    return sizes


def _require_finite(attrs: Attributes, name: str) -> None:
    low = 0.0 if name == "scales" else -float("inf")
    if not all(low < v < float("inf") for v in attrs[name]):
        wanted = "positive numbers" if name == "scales" else "finite numbers"
        raise ShapeError(f"attribute {name}: expected {wanted}, got {list(attrs[name])}", op_type=attrs.op)


def reference(
    attrs: Attributes, out: tuple[int, ...], gradient: Float64Array, _sizes: tuple[int, ...] | None
) -> Float64Array:
    rank = gradient.ndim
    scales = attrs["scales"] or [None] * rank
    input_offsets = attrs["input_pixel_offsets"] or [DEFAULT_INPUT_OFFSET] * rank
    output_offsets = attrs["output_pixel_offsets"] or [DEFAULT_OUTPUT_OFFSET] * rank
    dx = gradient
    if dx.size == 0:
        return np.zeros(out)
    for axis in range(rank):
        taps = resample_taps(
            attrs["interpolation_mode"],
            out[axis],
            dx.shape[axis],
            scales[axis],
            input_offsets[axis],
            output_offsets[axis],
        )
        dx = apply_transpose(taps, dx, axis)
    return dx


def body(b: Body, attrs: Attributes, gradient: Tensor, sizes: Tensor | None) -> str:
    from onnx_backprop.opset.bodies.interpolation import resample

    return resample.body(b, attrs, gradient, sizes, DEFAULT_INPUT_OFFSET, DEFAULT_OUTPUT_OFFSET)


OP = Op(
    name="ResampleGrad",
    doc=DOC,
    source="DirectML, DML_RESAMPLE_GRAD_OPERATOR_DESC (any rank, where DirectML takes 4)",
    attributes=(
        Attribute(
            "interpolation_mode",
            "string",
            "NEAREST_NEIGHBOR or LINEAR.",
            required=True,
            choices=("NEAREST_NEIGHBOR", "LINEAR"),
        ),
        Attribute("scales", "floats", "Forward output over input length per axis, > 0; [] means O/I.", required=True),
        Attribute(
            "input_pixel_offsets", "floats", "InputPixelOffset per axis, in pixels; [] means 0.5 each.", required=True
        ),
        Attribute(
            "output_pixel_offsets",
            "floats",
            "OutputPixelOffset per axis, in pixels; [] means -0.5 each.",
            required=True,
        ),
        Attribute("dimension_count", "int", "The rank; only checked."),
        Attribute(
            "output_sizes",
            "ints",
            "Shape of output_gradient, which DirectML takes from the tensor description; must agree with the input "
            "of the same name when both are given.",
        ),
    ),
    inputs=(
        Input("input_gradient", "T1", "Gradient with respect to the forward output."),
        Input("output_sizes", "T2", "Shape of output_gradient, 1-D.", optional=True),
    ),
    outputs=(Output("output_gradient", "Gradient with respect to the forward input, shaped output_sizes."),),
    shape=shape,
    reference=reference,
    body=body,
)
