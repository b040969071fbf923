"""InterpolateBackward: the gradient of oneDNN's Interpolate with respect to its source."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, merge, require_at_least, require_length, require_rank, stated_shape
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution import MAX_RANK, MIN_RANK
from onnx_backprop.opset.maths.interpolation import apply_transpose, onednn_taps

MATHS = """
dx = W_Dᵀ · W_Hᵀ · W_Wᵀ · dy, one matrix W (O rows, I columns) per spatial axis

I is the source length, O the destination length. Row o of W places its taps at the source coordinate x of destination
index o: half_pixel x = (o + 1/2)·I/O - 1/2; align_corners x = o·(I-1)/(O-1), and 0 when O = 1. The scale is always O/I,
taken from the two shapes, never from `scales`.

- nearest: one tap of weight 1 at x rounded, ties up (towards the higher index).
- linear (bilinear and trilinear are the same, for any number of axes): with x clamped to [0, I-1], weight
  1 - frac(x) at floor(x) and frac(x) at floor(x) + 1. There is no antialiasing.
"""


@dataclass(frozen=True)
class InputNames:
    """How one of the two operators of this kind calls its inputs."""

    src: str
    diff_dst: str

    def shape(self, attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
        src, diff_dst, sizes = args
        assert src is not None
        assert diff_dst is not None
        op = attrs.op
        if attrs["sizes"] is not None and attrs["scales"] is not None:
            raise ShapeError("expected sizes or scales, got both. Remove one", op_type=op)
        given = None
        if sizes is not None:
            given = stated_shape(sizes.dims, sizes.value, 1, MAX_RANK - 2, op=op, subject="input sizes")
        for arg, name in ((src, self.src), (diff_dst, self.diff_dst)):
            if arg.dims is not None:
                require_rank(arg.dims, MIN_RANK, MAX_RANK, op=op, subject=name)
        if src.dims is None or diff_dst.dims is None:
            return src.dims
        require_rank(diff_dst.dims, len(src.dims), len(src.dims), op=op, subject=self.diff_dst)
        x, y = spec.ncx(attrs, src.dims), spec.ncx(attrs, diff_dst.dims)
        assert x is not None
        assert y is not None
        batch = merge(x[0], y[0], op=op, subject=f"batch sizes of {self.src} and {self.diff_dst}")
        channels = merge(x[1], y[1], op=op, subject=f"channels of {self.src} and {self.diff_dst}")
        _require_sizes(attrs, x[2:], y[2:], given, self.diff_dst)
        for length, out in zip(x[2:], y[2:], strict=True):
            if length == 0 and out != 0 and isinstance(out, int):
                raise ShapeError(f"{self.src}: expected spatial lengths >= 1, got {list(x[2:])}", op_type=op)
        return spec.from_ncx(attrs, (batch, channels, *x[2:]))

    def reference(
        self,
        attrs: Attributes,
        out: tuple[int, ...],
        _src: tuple[int, ...],
        diff_dst: Float64Array,
        _sizes: tuple[int, ...] | None,
    ) -> Float64Array:
        dx = diff_dst
        first = 2 if attrs["data_format"] == "NCX" else 1
        for axis in range(first, first + diff_dst.ndim - 2):
            if dx.shape[axis] == 0:
                return np.zeros(out)
            mode = "nearest" if attrs["mode"] == "nearest" else "linear"
            taps = onednn_taps(mode, attrs["coordinate_transformation_mode"], out[axis], dx.shape[axis])
            dx = apply_transpose(taps, dx, axis)
        return dx

    def body(self, b: Body, attrs: Attributes, src: Tensor, diff_dst: Tensor, sizes: Tensor | None) -> str:
        from onnx_backprop.opset.bodies.interpolation import interpolate

        return interpolate.body(b, attrs, (self.src, self.diff_dst), src, diff_dst, sizes)

    def inputs(self) -> tuple[Input, ...]:
        return (
            Input(self.src, "T1", "Source of the Interpolate. Only its shape is used.", shape_only=True),
            Input(self.diff_dst, "T1", "Gradient with respect to the Interpolate's destination."),
            Input("sizes", "T2", "Spatial shape of the destination, 1-D.", optional=True),
        )

    def doc(self) -> str:
        return f"""{MATHS}
dy = {self.diff_dst}. The values of {self.src} are never read, only its shape is.

Shapes (NCX): {self.src} (N, C, I…), {self.diff_dst} (N, C, O…) -> (N, C, I…), one to three spatial axes.

Units: coordinates in source pixels, pixel centres on integers.

Edge cases: I = 1 sums the whole axis; source pixels that no destination reads get 0; an empty {self.diff_dst} gives
zeros.

Errors: attributes sizes and scales together; sizes (attribute or input) that differ from the spatial shape of
{self.diff_dst} or from each other; scales with |I·scale - O| >= 1; other batch, channels or rank. Neither sizes nor
scales need be given (the shapes say everything), which the reference library would refuse.
"""


def _require_sizes(attrs: Attributes, lengths: Dims, out: Dims, sizes: Dims | None, name: str) -> None:
    """Sizes must be the spatial shape of diff_dst; scales must lead there up to less than one pixel."""
    op = attrs.op
    for given, subject in ((attrs["sizes"], "attribute sizes"), (sizes, "input sizes")):
        if given is None:
            continue
        require_length(given, len(out), op=op, subject=subject)
        require_at_least(given, 1 if subject == "attribute sizes" else 0, op=op, subject=subject)
        for s, o in zip(given, out, strict=True):
            merge(o, s, op=op, subject=f"the spatial shape of {name} and {subject}")
    if attrs["sizes"] is not None and sizes is not None:
        for a, b in zip(attrs["sizes"], sizes, strict=True):
            merge(a, b, op=op, subject="attribute sizes and input sizes")
    scales = attrs["scales"]
    if scales is None:
        return
    require_length(scales, len(out), op=op, subject="attribute scales")
    for axis, scale in enumerate(scales):
        if not (0 < scale < float("inf")):
            raise ShapeError(f"attribute scales: expected positive numbers, got {list(scales)}", op_type=op)
        i, o = lengths[axis], out[axis]
        if isinstance(i, int) and isinstance(o, int) and abs(i * scale - o) >= 1:
            raise ShapeError(
                f"attribute scales, spatial axis {axis}: {i} × {scale} expects {name} length {int(i * scale)}, got {o}",
                op_type=op,
            )


ATTRIBUTES = (
    Attribute(
        "mode",
        "string",
        "nearest, linear, bilinear or trilinear; the last three mean the same.",
        required=True,
        choices=("nearest", "linear", "bilinear", "trilinear"),
    ),
    Attribute(
        "coordinate_transformation_mode",
        "string",
        "half_pixel or align_corners.",
        default="half_pixel",
        choices=("half_pixel", "align_corners"),
    ),
    Attribute("sizes", "ints", "Spatial shape of the destination, > 0. Excludes scales."),
    Attribute(
        "scales",
        "floats",
        "Destination over source length per spatial axis, > 0. Checked, not used: the shapes give the scale. "
        "Excludes sizes.",
    ),
    spec.DATA_FORMAT,
)

NAMES = InputNames("src", "diff_dst")

OP = Op(
    name="InterpolateBackward",
    doc=NAMES.doc(),
    source="oneDNN Graph, InterpolateBackward",
    attributes=ATTRIBUTES,
    inputs=NAMES.inputs(),
    outputs=(Output("diff_src", "Gradient with respect to the source, shaped as src."),),
    shape=NAMES.shape,
    reference=NAMES.reference,
    body=NAMES.body,
)
