"""ResizeGrad: the gradient of ONNX's Resize, with all its attributes, with respect to X."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.core.errors import KernelError, ShapeError
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dim, Dims, merge, require_at_least, require_length, require_rank
from onnx_backprop.opset.maths import resize
from onnx_backprop.opset.maths.interpolation import apply_transpose

DOC = """
dX = W_0ᵀ · W_1ᵀ · … · dY, one matrix W (O rows, I columns) per axis, Resize being Y = W_0 · W_1 · … · X

I is the length of X, O that of dY, s the scale of an axis, o a destination index. Row o of W places its taps around
the source coordinate x of o:

- half_pixel: x = (o + 1/2)/s - 1/2. pytorch_half_pixel: the same, but 0 when O = 1.
- half_pixel_symmetric: x = I/2·(1 - O/(s·I)) + (o + 1/2)/s - 1/2.
- align_corners: x = o·(I-1)/(O-1), and 0 when O = 1.
- asymmetric: x = o/s. tf_half_pixel_for_nn: x = (o + 1/2)/s.
- tf_crop_and_resize: x = start·(I-1) + o·(end - start)·(I-1)/(O-1), and (start + end)·(I-1)/2 when O = 1. A row whose
  x lies outside [0, I-1] is zero: such a pixel takes the constant extrapolation_value.

The scale s is as given in scales; O/I where sizes are given with the policy stretch; the smallest (not_larger) or
largest (not_smaller) of sizes/I over the listed axes, one s for all of them, with the other two policies.

- nearest: one tap of weight 1 at x rounded, ties down (round_prefer_floor) or up (round_prefer_ceil), floor(x) or
  ceil(x), moved into [0, I-1].
- linear: weight max(0, 1 - t) of every pixel at distance t from x. cubic, with a = cubic_coeff_a: weight
  (a+2)·t³ - (a+3)·t² + 1 for t <= 1 and a·(t³ - 5·t² + 8·t - 4) for t < 2. Taps beyond the borders read the edge pixel;
  with exclude_outside = 1 they are dropped and the rest is divided by its sum.
- antialias = 1 with s < 1 (linear and cubic): distances are multiplied by s, so that a tap reaches 1/s times as far,
  and the weights are divided by their sum.

The gradient is that of onnxruntime's forward, also if it departs from the text of Resize. If every length of dY equals
that of X, Resize copies whatever the scales and roi say, and dX = dY. An axis of scale 1 is copied too;
tf_crop_and_resize then ignores its roi. With antialias, and for cubic on (N, H, W, C), an axis that keeps its length is
copied whatever its scale, except for pixels outside the roi. With antialias a row without a tap inside X is zero. x is
computed in float32.

Shapes: dY (O_0, …), X (I_0, …) -> dX (I_0, …), any rank >= 1. roi, scales and sizes have entries for the listed axes
only, in the order of axes (roi: all starts, then all ends; it may also have two entries for every axis of X). An axis
that is not listed keeps its length.

Units: coordinates in source pixels, pixel centres on integers; roi in units of I - 1.

Edge cases: with scales, O must be floor(I·s), computed in float32 as by onnxruntime or in float64 as by ONNX's shape
inference; if they differ, the length of dY decides. With not_larger and not_smaller, O is I·s
rounded, halves up. If exclude_outside drops all taps of a row, it is zero. Pixels that the forward never read get
0; an empty dY gives zeros. Empty scales or sizes count as absent. tf_crop_and_resize without roi takes the whole X;
the other modes ignore roi.

Errors: scales and sizes together, or neither; a policy other than stretch together with scales; a list without one
entry per listed axis; a roi with another number of entries, or numbers that are not finite; axes out of range or listed
twice; scales that are not positive and finite; antialias with nearest; a length of dY that does not follow from scales
or sizes.
"""

MAX_RANK = 32


def shape(attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
    dy, x, roi, scales, sizes = args
    assert dy is not None
    assert x is not None
    op = attrs.op
    _require_modes(attrs)
    by_scale = _asks_for_scales(scales, sizes, op)
    known = [(a.dims, name) for a, name in ((x, "X"), (dy, "dY")) if a.dims is not None]
    for dims, name in known:
        require_rank(dims, 1, MAX_RANK, op=op, subject=name)
    listed = _listed(attrs, len(known[0][0])) if known else attrs["axes"]
    if listed is not None:
        _require_counts(attrs, listed, len(known[0][0]) if known else None, (roi, scales, sizes))
    if by_scale is not None:
        _require_values(scales if by_scale else sizes, by_scale=by_scale, op=op)
    if by_scale and attrs["keep_aspect_ratio_policy"] != "stretch":
        raise ShapeError(
            f"keep_aspect_ratio_policy {attrs['keep_aspect_ratio_policy']}: expected sizes, got scales. Scales say "
            "the aspect ratio already",
            op_type=op,
        )
    if not known or listed is None:
        return None
    rank = len(known[0][0])
    lengths = x.dims or (None,) * rank
    outs = dy.dims or (None,) * rank
    require_rank(outs, rank, rank, op=op, subject="dY")
    wanted = _wanted(attrs, lengths, listed, scales if by_scale else None, sizes if by_scale is False else None)
    result: list[Dim] = []
    for axis, (length, out) in enumerate(zip(lengths, outs, strict=True)):
        result.append(length)
        if axis not in listed:
            result[axis] = merge(
                length, out, op=op, subject=f"lengths of axis {axis} of X and dY, which is not resized,"
            )
        elif wanted[axis] and isinstance(out, int) and out not in wanted[axis]:
            expected = " or ".join(map(str, sorted(wanted[axis])))
            raise ShapeError(f"axis {axis} of dY: expected length {expected}, got {out}", op_type=op)
        if length == 0 and isinstance(out, int) and out > 0:
            raise ShapeError(f"axis {axis} of X: expected a length >= 1 to make {out} of it, got 0", op_type=op)
    return tuple(result)


def reference(
    attrs: Attributes,
    out: tuple[int, ...],
    dy: Float64Array,
    _x: tuple[int, ...],
    roi: tuple[float, ...] | None,
    scales: tuple[float, ...] | None,
    sizes: tuple[int, ...] | None,
) -> Float64Array:
    if dy.size == 0:
        return np.zeros(out)
    dx = dy.copy()
    for axis, resized in enumerate(resized_axes(attrs, out, dy.shape, roi=roi, scales=scales, sizes=sizes)):
        if resized is not None:
            dx = apply_transpose(resize.resize_taps(resized), dx, axis)
    return dx


def resized_axes(
    attrs: Attributes,
    lengths: Sequence[int],
    outs: Sequence[int],
    *,
    roi: Sequence[float] | None,
    scales: Sequence[float] | None,
    sizes: Sequence[int] | None,
) -> list[resize.ResizeAxis | None]:
    """What happens to each axis of X, None for one that is copied: dX = Wᵀ·… with `resize_taps` of each.

    `lengths` are X's, `outs` dY's; roi, scales and sizes have entries for the listed axes, empty counts as absent.
    """
    result: list[resize.ResizeAxis | None] = [None] * len(lengths)
    if tuple(lengths) == tuple(outs):  # onnxruntime copies then
        return result
    listed = _listed(attrs, len(lengths))
    if not scales:
        assert sizes
        scales = scales_of_sizes(attrs["keep_aspect_ratio_policy"], [lengths[a] for a in listed], sizes)
    pairs = list(zip(listed, scales, strict=True))
    common = resize.axis_settings(attrs)
    regions = _regions(listed, len(lengths), roi)
    # cubic on (N, H, W, C), that is with axis 1 resized, runs on onnxruntime's kernels for antialias
    channels_last = common.mode == "cubic" and len(lengths) == 4 and any(a == 1 and s != 1 for a, s in pairs)
    for (axis, scale), region in zip(pairs, regions, strict=True):
        if scale != 1:
            length, out = lengths[axis], outs[axis]
            copied = length == out and (common.antialias or channels_last)
            result[axis] = replace(common, length=length, out=out, scale=float(scale), roi=region, copied=copied)
    return result


def _regions(listed: Sequence[int], rank: int, roi: Sequence[float] | None) -> list[tuple[float, float]]:
    """(start, end) of every listed axis."""
    if not roi:
        return [(0.0, 1.0)] * len(listed)
    if len(roi) == 2 * len(listed):
        return list(zip(roi[: len(listed)], roi[len(listed) :], strict=True))
    return [(roi[axis], roi[rank + axis]) for axis in listed]


def scales_of_sizes(policy: str, lengths: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """The scale of every listed axis, in float32: O/I, or one for all of them to keep the aspect ratio."""
    ratios = [np.float32(size) / np.float32(length) for length, size in zip(lengths, sizes, strict=True)]
    if policy == "stretch":
        return [float(r) for r in ratios]
    return [float(resize.policy_scale(policy, ratios))] * len(ratios)


def _listed(attrs: Attributes, rank: int) -> tuple[int, ...]:
    """The axes that roi, scales and sizes refer to, counted from 0."""
    axes: tuple[int, ...] | None = attrs["axes"]
    if axes is None:
        return tuple(range(rank))
    if not all(-rank <= a < rank for a in axes):
        raise ShapeError(f"axes: expected values from {-rank} to {rank - 1}, got {list(axes)}", op_type=attrs.op)
    listed = tuple(a % rank for a in axes)
    if len(set(listed)) != len(listed):
        raise ShapeError(f"axes: expected every axis once, got {list(axes)}", op_type=attrs.op)
    return listed


def _require_modes(attrs: Attributes) -> None:
    attrs.require_flags("antialias", "exclude_outside")
    if attrs["antialias"] and attrs["mode"] == "nearest":
        raise ShapeError("antialias: expected mode linear or cubic, got nearest", op_type=attrs.op)
    if not np.isfinite(attrs["cubic_coeff_a"]):
        raise ShapeError(
            f"attribute cubic_coeff_a: expected a finite number, got {attrs['cubic_coeff_a']}", op_type=attrs.op
        )


def _count(arg: Arg | None) -> int | None:
    """How many entries an input has, 0 for an absent one, None for not known."""
    if arg is None:
        return 0
    if arg.value is not None:
        return len(arg.value)
    return arg.dims[0] if arg.dims and isinstance(arg.dims[0], int) else None


def _asks_for_scales(scales: Arg | None, sizes: Arg | None, op: str) -> bool | None:
    """Whether scales (True) or sizes (False) say what happens; None where only the run will tell."""
    for arg, name in ((scales, "scales"), (sizes, "sizes")):
        if arg is not None and arg.dims is not None:
            require_rank(arg.dims, 1, 1, op=op, subject=f"input {name}")
    by_scale, by_size = _count(scales), _count(sizes)
    if by_scale == 0 and by_size == 0:
        raise ShapeError("expected scales or sizes, got neither", op_type=op)
    if by_scale and by_size:
        raise ShapeError("expected scales or sizes, got both. Leave one out, or empty", op_type=op)
    if by_scale or by_size == 0:
        return True
    if by_size or by_scale == 0:
        return False
    return None


def _require_counts(attrs: Attributes, listed: Sequence[int], rank: int | None, args: Sequence[Arg | None]) -> None:
    """One entry per listed axis; roi has two per listed axis, or two per axis of X."""
    op, count = attrs.op, len(listed)
    roi, scales, sizes = args
    for arg, name in ((scales, "scales"), (sizes, "sizes")):
        got = _count(arg)
        if got and got != count:
            raise ShapeError(f"input {name}: expected {count} entries, one per listed axis, got {got}", op_type=op)
    if attrs["coordinate_transformation_mode"] != "tf_crop_and_resize" or roi is None:
        return
    if roi.dims is not None:
        require_rank(roi.dims, 1, 1, op=op, subject="input roi")
    got, allowed = _count(roi), {2 * count, 2 * (rank or count)}
    if got is not None and got not in allowed and (rank is not None or got < 2 * count):
        expected = " or ".join(map(str, sorted(allowed)))
        raise ShapeError(f"input roi: expected {expected} entries, starts and ends, got {got}", op_type=op)
    if roi.value is not None and not np.isfinite(roi.value).all():
        raise ShapeError(f"input roi: expected finite numbers, got {list(roi.value)}", op_type=op)


def _require_values(arg: Arg | None, *, by_scale: bool, op: str) -> None:
    if arg is None:
        return
    if by_scale and arg.value is not None and not all(0 < s < float("inf") for s in arg.value):
        raise ShapeError(f"input scales: expected positive numbers, got {list(arg.value)}", op_type=op)
    if not by_scale and arg.value is not None:
        require_at_least(arg.value, 0, op=op, subject="input sizes")


def _wanted(
    attrs: Attributes, lengths: Dims, listed: Sequence[int], scales: Arg | None, sizes: Arg | None
) -> list[set[int]]:
    """The lengths that each axis of dY may have; empty where that is not known."""
    result: list[set[int]] = [set() for _ in lengths]
    policy = attrs["keep_aspect_ratio_policy"]
    if scales is not None and scales.value is not None:
        require_length(scales.value, len(listed), op=attrs.op, subject="input scales")
        for axis, scale in zip(listed, scales.value, strict=True):
            length = lengths[axis]
            if isinstance(length, int):
                with np.errstate(over="ignore"):
                    products = float(np.float32(length) * np.float32(scale)), length * scale
                if not all(map(math.isfinite, products)):
                    raise ShapeError(f"input scales: {scale} times the length {length} is no length", op_type=attrs.op)
                result[axis] = set(map(int, products))
    elif sizes is not None and sizes.value is not None:
        numbers = [n for n in (lengths[a] for a in listed) if isinstance(n, int) and n > 0]
        wanted = [size for size in sizes.value if isinstance(size, int)]
        if policy == "stretch":
            for axis, size in zip(listed, sizes.value, strict=True):
                result[axis] = {size} if isinstance(size, int) else set()
        elif len(numbers) == len(wanted) == len(listed):
            scale = scales_of_sizes(policy, numbers, wanted)[0]
            for axis, length in zip(listed, numbers, strict=True):
                result[axis] = {resize.policy_length(scale, length)}
    return result


def body(
    b: Body, attrs: Attributes, dy: Tensor, x: Tensor, roi: Tensor | None, scales: Tensor | None, sizes: Tensor | None
) -> str:
    given = scales and Arg(scales.dims, scales.value), sizes and Arg(sizes.dims, sizes.value)
    scales, sizes = (None if _count(arg) == 0 else tensor for arg, tensor in zip(given, (scales, sizes), strict=True))
    counts = [] if attrs["axes"] else [_count(arg) for arg in given if _count(arg)]
    known = [len(t.dims) for t in (x, dy) if t.dims is not None] + [c for c in counts if c]
    if not known:
        raise KernelError(
            "a body in standard operators needs to know the rank: the shape of X or of dY, or without axes the number "
            "of scales or sizes, must be known"
        )
    listed = _listed(attrs, known[0])
    by_scale = _asks_for_scales(*given, attrs.op)
    lengths = x.dims or (None,) * known[0]
    wanted = _wanted(attrs, lengths, listed, given[0] if by_scale else None, given[1] if by_scale is False else None)
    from onnx_backprop.opset.bodies.interpolation.resize_grad import ResizeBody

    return ResizeBody(b, attrs, listed, wanted, by_scale).write(dy, x, roi, scales, sizes)


OP = Op(
    name="ResizeGrad",
    doc=DOC,
    source="ONNX, Resize-19 (tf_half_pixel_for_nn: Resize-11), as onnxruntime computes it",
    attributes=(
        Attribute("antialias", "int", "1: widen the kernel by 1/s when s < 1.", default=0),
        Attribute("axes", "ints", "Axes that roi, scales and sizes refer to, negative ones from the end; absent: all."),
        Attribute(
            "coordinate_transformation_mode",
            "string",
            f"{', '.join(resize.COORDINATES[:-1])} or {resize.COORDINATES[-1]}.",
            default="half_pixel",
            choices=resize.COORDINATES,
        ),
        Attribute("cubic_coeff_a", "float", "Parameter of the cubic kernel.", default=-0.75),
        Attribute("exclude_outside", "int", "1: drop taps beyond the borders (cubic, or with antialias).", default=0),
        Attribute("extrapolation_value", "float", "Constant of the forward; the gradient ignores it.", default=0.0),
        Attribute(
            "keep_aspect_ratio_policy",
            "string",
            "stretch, not_larger or not_smaller: how sizes are read.",
            default="stretch",
            choices=resize.POLICIES,
        ),
        Attribute("mode", "string", "nearest, linear or cubic.", default="nearest", choices=resize.MODES),
        Attribute(
            "nearest_mode",
            "string",
            "round_prefer_floor, round_prefer_ceil, floor or ceil.",
            default="round_prefer_floor",
            choices=resize.NEAREST_MODES,
        ),
    ),
    inputs=(
        Input("dY", "T1", "Gradient with respect to the Resize's output."),
        Input("X", "T1", "The Resize's input. Only its shape is used.", shape_only=True),
        Input("roi", "T3", "Starts, then ends of the region of tf_crop_and_resize, 1-D.", optional=True),
        Input("scales", "T3", "Output over input length of every listed axis, > 0, 1-D.", optional=True),
        Input("sizes", "T4", "Output length of every listed axis, 1-D.", optional=True),
    ),
    outputs=(Output("dX", "Gradient with respect to X, shaped as X."),),
    shape=shape,
    reference=reference,
    body=body,
)
