"""The gradient of Resize (and of Upsample, which has become a Resize by then)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.opset.core.shapes import Dim, Dims
from onnx_backprop.opset.maths.resize import (
    COORDINATES,
    MODES,
    NEAREST_MODES,
    POLICIES,
    ResizeAxis,
    coordinates,
    policy_length,
)
from onnx_backprop.opset.operators.resize_grad import scales_of_sizes

logger = logging.getLogger("onnx_backprop")

ROI, SCALES, SIZES = 1, 2, 3


@dataclass(frozen=True)
class _Mode:
    """The attributes of one Resize that place taps."""

    mode: str
    coordinates: str
    nearest_mode: str
    antialias: bool
    exclude_outside: bool

    def __str__(self) -> str:
        more = [self.nearest_mode] if self.mode == "nearest" else []
        more += [name for name in ("antialias", "exclude_outside") if getattr(self, name)]
        return ", ".join([self.mode, self.coordinates, *more])


class _Axis(NamedTuple):
    """What conversion knows of one axis. `scale` is 1 for one that is copied, and None where it is not known."""

    length: Dim
    out: Dim
    scale: float | None

    @property
    def keeps_length(self) -> bool:
        """Whether it does for certain."""
        if isinstance(self.length, int) and isinstance(self.out, int):
            return self.length == self.out
        return self.scale == 1


@gradient("Resize", versions=(18, 19), inputs=(0,))
def resize(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = W_0 · W_1 · … · x, one W per axis  =>  dx = W_0ᵀ · W_1ᵀ · … · dy, which is ResizeGrad(dy, x, …).

    It has the node's own attributes and inputs, as they are. roi, scales and sizes get no gradient.
    """
    mode, axes = _mode(node), _axes(node)
    if axes is not None and all(axis.keeps_length for axis in axes):
        logger.info("Resize '%s' (%s): every length is kept, which is a copy; so is its gradient", node.name, mode)
        return op.Identity(dy)
    if axes is not None:
        _refuse_overwritten(node, mode, axes)
    logger.info("Resize '%s' (%s): its gradient is ResizeGrad", node.name, mode)
    roi = node.input(ROI) if mode.coordinates == "tf_crop_and_resize" and node.has(ROI) else None
    if roi is not None and roi.dtype != ir.DataType.FLOAT:
        roi = op.Cast(roi, to=ir.DataType.FLOAT)
    scales, sizes = (None if _is_empty(node, n) else node.input(n) for n in (SCALES, SIZES))
    return op.domain.ResizeGrad(dy, node.input(0), roi, scales, sizes, **node.written)


def _is_empty(node: Forward, index: int) -> bool:
    """Whether an optional input is left out, or an empty constant, which means the same."""
    value = node.constant(index)
    return not node.has(index) or (value is not None and value.size == 0)


def _mode(node: Forward) -> _Mode:
    mode = _Mode(
        node.one_of("mode", "nearest", MODES),
        node.one_of("coordinate_transformation_mode", "half_pixel", COORDINATES),
        node.one_of("nearest_mode", "round_prefer_floor", NEAREST_MODES),
        node.int("antialias", 0) != 0,
        node.int("exclude_outside", 0) != 0,
    )
    node.one_of("keep_aspect_ratio_policy", "stretch", POLICIES)
    if mode.antialias and mode.mode == "nearest":
        raise node.invalid("attribute antialias: expected mode linear or cubic, got nearest")
    return mode


def _axes(node: Forward) -> list[_Axis] | None:
    """Every axis, those that the node does not list keeping their length; None where conversion knows too little."""
    lengths = dims(node.input(0))
    ask_scales, ask_sizes = not _is_empty(node, SCALES), not _is_empty(node, SIZES)
    scales, sizes = node.constant(SCALES), node.constant(SIZES)
    if ask_scales == ask_sizes:
        raise node.invalid(f"expected scales or sizes, got {'both' if ask_scales else 'neither'}")
    if lengths is None:
        return None
    listed = _listed(node, len(lengths))
    values = scales if ask_scales else sizes
    if values is not None and values.shape != (len(listed),):
        what = "scales" if ask_scales else "sizes"
        raise node.invalid(f"{what}: expected {len(listed)} values, got {values.tolist()}")
    outs = dims(node.output()) or (None,) * len(lengths)
    result = [_Axis(length, length, 1.0) for length in lengths]
    if node.string("keep_aspect_ratio_policy", "stretch") != "stretch" and ask_sizes:
        if any(axis < 0 for axis in node.ints("axes") or ()):
            raise node.unsupported(
                "keep_aspect_ratio_policy with negative axes, which onnxruntime reads as no axes at all. Count them "
                "from the front"
            )
        return _keep_aspect_ratio(node, lengths, listed, sizes, result)
    for position, axis in enumerate(listed):
        length = lengths[axis]
        if ask_scales:
            result[axis] = _by_scale(node, length, None if scales is None else float(scales[position]), outs[axis])
        else:
            size = outs[axis] if sizes is None else int(sizes[position])
            result[axis] = _Axis(length, size, _ratio(length, size))
    return result


def _listed(node: Forward, rank: int) -> list[int]:
    """The axes that roi, scales and sizes speak of, counted from 0."""
    axes = node.ints("axes") or list(range(rank))
    listed = [axis + rank if axis < 0 else axis for axis in axes]
    if len(set(listed)) != len(listed) or not all(0 <= axis < rank for axis in listed):
        raise node.invalid(f"attribute axes: expected different axes of {rank}, got {axes}")
    return listed


def _by_scale(node: Forward, length: Dim, scale: float | None, inferred: Dim) -> _Axis:
    """out = floor(length · scale) in float32, as onnxruntime computes it."""
    if scale is None or not isinstance(length, int):
        return _Axis(length, None, scale)
    out = int(np.float32(length) * np.float32(scale))
    if isinstance(inferred, int) and out != inferred:
        raise node.invalid(
            f"a scale of {scale:.9g} makes {out} pixels of {length} in onnxruntime, the model states {inferred}. "
            "Correct the stated shape"
        )
    return _Axis(length, out, scale)


def _ratio(length: Dim, size: Dim) -> float | None:
    """size / length in float32; 1 for equal symbols."""
    if isinstance(length, str) and length == size:
        return 1.0
    if isinstance(length, int) and isinstance(size, int) and length > 0:
        return float(np.float32(size) / np.float32(length))
    return None


def _keep_aspect_ratio(
    node: Forward, lengths: Dims, listed: Sequence[int], sizes: np.ndarray | None, axes: list[_Axis]
) -> list[_Axis] | None:
    """One scale for all listed axes, the smallest or largest of sizes / lengths; lengths rounded, halves up."""
    policy = node.string("keep_aspect_ratio_policy", "stretch")
    known = [length for length in (lengths[axis] for axis in listed) if isinstance(length, int) and length > 0]
    if sizes is None or len(known) != len(listed):
        return None
    scale = scales_of_sizes(policy, known, [int(size) for size in sizes])[0]
    for axis, length in zip(listed, known, strict=True):
        axes[axis] = _Axis(length, policy_length(scale, length), scale)
    return axes


def _refuse_overwritten(node: Forward, mode: _Mode, axes: Sequence[_Axis]) -> None:
    """Onnxruntime's own forward is wrong here, so there is nothing that a gradient could be right for."""
    if len(axes) != 4 or axes[1].scale == 1 or mode.coordinates != "tf_crop_and_resize":
        return
    unknown_axis = axes[1].scale is None
    if unknown_axis or not (mode.antialias or mode.mode == "cubic") or _inside(node, mode, axes):
        return
    raise node.unsupported(
        f"({mode}) with axis 1 resized: onnxruntime writes extrapolation_value to other pixels than those outside the "
        "roi. Transpose (N, H, W, C) to (N, C, H, W) before it"
    )


def _inside(node: Forward, mode: _Mode, axes: Sequence[_Axis]) -> bool:
    """Whether no pixel lies outside the roi, for certain."""
    if not node.has(ROI):
        return True
    roi = node.constant(ROI)
    listed = _listed(node, len(axes))
    if roi is None or roi.size not in (2 * len(listed), 2 * len(axes)):
        return False
    starts, ends = roi.reshape(2, -1).astype(np.float32)
    for position, number in enumerate(listed):
        axis = axes[number]
        at = position if len(starts) == len(listed) else number
        if axis.scale == 1:
            continue
        if not isinstance(axis.length, int) or not isinstance(axis.out, int):
            return False
        where = ResizeAxis(axis.length, axis.out, 1.0, mode.mode, mode.coordinates, roi=(starts[at], ends[at]))
        x = coordinates(where)
        if ((x < 0) | (x > axis.length - 1)).any():
            return False
    return True
