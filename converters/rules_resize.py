"""The gradient of Resize (and of Upsample, which has become a Resize by then).

Resize has more modes than the two published gradient operators, but where one of them places exactly the same taps it
is emitted: InterpolateBackward first, then ResampleGrad. "Exactly" is checked, axis by axis: where the lengths are
known by comparing the two linear maps, elsewhere by the few cases that hold for every length. What neither can say is
refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..opset.errors import InvalidModelError, UnsupportedAttributeError, UnsupportedError
from ..opset.interpolation import Taps, apply, resample_taps, spec_taps
from ..opset.onnx_resize import ResizeAxis, resize_taps
from ..opset.shapes import Dim
from .builder import Builder, dims
from .forward import Forward
from .registry import Grads, gradient
from .rules_conv import wanted_shape

logger = logging.getLogger("onnx_backprop")

SPEC_COORDINATES = ("half_pixel", "align_corners")
Offsets = tuple[float, float, float]  # scale, input offset, output offset of ResampleGrad

HALF_PIXEL_OFFSETS = (0.5, -0.5)
ASYMMETRIC_OFFSETS = (0.0, 0.0)


@dataclass(frozen=True)
class Axis:
    """What conversion knows of one axis. `scale` is None when it is O/I with a length unknown."""

    length: Dim
    out: Dim
    scale: float | None
    given: bool  # the scale is the node's, not O/I

    @property
    def identity(self) -> bool:
        return self.scale == 1 and (self.given or self.length == self.out)

    @property
    def whole_factor(self) -> int:
        """K where the scale is a given whole number k >= 1, else 0."""
        if self.given and self.scale is not None and self.scale >= 1 and self.scale == int(self.scale):
            return int(self.scale)
        return 0


@dataclass(frozen=True)
class Meaning:
    """Which published operators mean the same on one axis; `why_not` says why not where there are none."""

    spec: frozenset[str] = frozenset()  # coordinate_transformation_mode of InterpolateBackward
    resample: Offsets | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Mode:
    """The attributes of one Resize that place taps."""

    mode: str
    coordinates: str
    nearest_mode: str

    def __str__(self) -> str:
        rounding = f", {self.nearest_mode}" if self.mode == "nearest" else ""
        return f"{self.mode}, {self.coordinates}{rounding}"


ANY = Meaning(frozenset(SPEC_COORDINATES), (1.0, *HALF_PIXEL_OFFSETS))


@gradient("Resize", versions=(18, 19), inputs=(0,))
def resize(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = W_0 · W_1 · … · x, one W per axis  =>  dx = W_0ᵀ · W_1ᵀ · … · dy.

    As InterpolateBackward(x, dy) or ResampleGrad(dy). roi, scales and sizes get no gradient.
    """
    nothing = (None,) * (len(node.inputs) - 1)
    mode, axes = _mode(node), _axes(node)
    moving = [axis for axis in axes if not axis.identity]
    if not moving:
        return (op.Identity(dy), *nothing)
    _refuse_copy(node, axes)
    meanings = [ANY if axis.identity else meaning(mode, axis) for axis in axes]
    coordinates = _spec_coordinates(axes, meanings)
    if coordinates:
        _log(node, "InterpolateBackward", mode)
        return (_interpolate_backward(op, node, dy, mode, coordinates, axes), *nothing)
    if all(m.resample for m in meanings):
        _log(node, "ResampleGrad", mode)
        return (_resample_grad(op, node, dy, mode, [m.resample for m in meanings if m.resample]), *nothing)
    reason = next((m.why_not for m in meanings if m.why_not), "its axes need different operators")
    raise UnsupportedAttributeError(
        f"({mode}) is neither InterpolateBackward nor ResampleGrad: {reason}",
        op_type=node.op_type,
        node=node.name,
    )


def meaning(mode: Mode, axis: Axis) -> Meaning:
    """Which published operators place the same taps as this Resize along one axis, for every run."""
    if isinstance(axis.length, int) and isinstance(axis.out, int) and axis.scale is not None:
        return _known_lengths(mode, axis.length, axis.out, axis.scale)
    return _any_lengths(mode, axis)


def _known_lengths(mode: Mode, length: int, out: int, scale: float) -> Meaning:
    """Compare the maps themselves."""
    wanted = resize_taps(ResizeAxis(length, out, scale, mode.mode, mode.coordinates, mode.nearest_mode))
    spec = frozenset(c for c in SPEC_COORDINATES if _same(wanted, spec_taps(mode.mode, c, length, out)))
    kernel = "NEAREST_NEIGHBOR" if mode.mode == "nearest" else "LINEAR"
    for offsets in _offset_candidates(mode, length, out, scale):
        if _same(wanted, resample_taps(kernel, length, out, *offsets)):
            return Meaning(spec, offsets)
    return Meaning(spec, None, f"{length} -> {out} pixels with scale {scale:g} place other taps")


def _offset_candidates(mode: Mode, length: int, out: int, scale: float) -> list[Offsets]:
    """(scale, input offset, output offset) of ResampleGrad under which the taps may be the same."""
    base: dict[str, Offsets] = {
        "half_pixel": (scale, 0.5, -0.5),
        "pytorch_half_pixel": (scale, 0.5, -0.5) if out > 1 else (1.0, 0.0, 0.0),
        "half_pixel_symmetric": (scale, 0.5 - length / 2 * (1 - out / (scale * length)), -0.5),
        "align_corners": ((out - 1) / (length - 1), 0.0, 0.0) if out > 1 and length > 1 else (1.0, 0.0, 0.0),
        "asymmetric": (scale, 0.0, 0.0),
        "tf_half_pixel_for_nn": (scale, 0.0, -0.5),
    }
    s, before, after = base[mode.coordinates]
    # ResampleGrad rounds, ties down. Moving x a little up takes ties up; by a half makes ceil, by almost a half floor
    little = 2.0**-12
    shifts = (0.0, -little, -0.5, 0.5 - little) if mode.mode == "nearest" else (0.0,)
    return [_as_float32((s, before + shift, after)) for shift in shifts]


def _as_float32(offsets: Offsets) -> Offsets:
    """What is left of the numbers once they are float attributes."""
    scale, before, after = (float(np.float32(v)) for v in offsets)
    return scale, before, after


def _same(a: Taps, b: Taps) -> bool:
    """Whether two maps agree, by what they make of three random vectors."""
    rng = np.random.default_rng(a.length)
    x = rng.random((3, a.length))
    # coordinates are float32 in the forward: their error, and so a weight's, grows with the length
    tolerance = 4 * float(np.finfo(np.float32).eps) * max(a.length, len(a.indices), 8)
    return bool(np.allclose(apply(a, x, 1), apply(b, x, 1), rtol=0, atol=tolerance))


def _any_lengths(mode: Mode, axis: Axis) -> Meaning:
    """The cases that hold whatever the lengths turn out to be."""
    factor = axis.whole_factor
    if mode.mode == "linear" and mode.coordinates == "align_corners":
        return Meaning(frozenset({"align_corners"}))
    if not axis.given:
        return _any_ratio(mode)
    if factor and _centred(mode, factor):
        return Meaning(frozenset({"half_pixel"}), (axis.scale or 1.0, *HALF_PIXEL_OFFSETS))
    if mode.mode == "nearest":
        return Meaning(why_not="nearest with lengths unknown at conversion needs a whole-number scale")
    if axis.scale is None:
        return Meaning(why_not="the scale is unknown at conversion")
    if mode.coordinates == "half_pixel":
        return _unless_copied(axis, HALF_PIXEL_OFFSETS)
    if mode.coordinates == "asymmetric":
        return _unless_copied(axis, ASYMMETRIC_OFFSETS)
    return Meaning(why_not=f"{mode.coordinates} with this scale depends on lengths unknown at conversion")


def _any_ratio(mode: Mode) -> Meaning:
    """Sizes given, scale O/I."""
    symmetric = mode.coordinates in ("half_pixel", "half_pixel_symmetric")
    if symmetric and (mode.mode == "linear" or mode.nearest_mode == "round_prefer_ceil"):
        return Meaning(frozenset({"half_pixel"}))
    return Meaning(why_not="its sizes or lengths are unknown at conversion")


def _centred(mode: Mode, factor: int) -> bool:
    """Whether up-sampling by a whole factor is oneDNN's half_pixel: no ties arise, pixel o reads around o // k."""
    if mode.coordinates in ("half_pixel", "half_pixel_symmetric") or (
        mode.coordinates == "pytorch_half_pixel" and factor > 1
    ):
        return mode.mode == "linear" or mode.nearest_mode.startswith("round")
    return mode.mode == "nearest" and mode.coordinates == "asymmetric" and mode.nearest_mode == "floor"


def _unless_copied(axis: Axis, offsets: tuple[float, float]) -> Meaning:
    assert axis.scale is not None
    if 1 < axis.scale < 1.5:  # floor(2 · s) is still 2: such a length may come out unchanged
        return Meaning(why_not=f"onnxruntime copies where a scale of {axis.scale:g} happens to keep every length")
    return Meaning(resample=(axis.scale, *offsets))


def _refuse_copy(node: Forward, axes: Sequence[Axis]) -> None:
    if all(isinstance(a.length, int) and a.length == a.out for a in axes):
        raise UnsupportedError(
            f"scales {[a.scale for a in axes]} keep every length; ONNX interpolates then but onnxruntime copies. "
            "Use scales of 1",
            op_type=node.op_type,
            node=node.name,
        )


def _spec_coordinates(axes: Sequence[Axis], meanings: Sequence[Meaning]) -> str:
    """The coordinate mode under which InterpolateBackward serves all axes, or ''.

    It resizes spatial axes only. A batch or channel axis whose ratio is unknown passes: the operator compares these
    lengths when it runs.
    """
    if not 3 <= len(axes) <= 5 or any(a.scale is not None and not a.identity for a in axes[:2]):
        return ""
    common = frozenset(SPEC_COORDINATES).intersection(*(m.spec for m in meanings[2:]))
    return next((c for c in SPEC_COORDINATES if c in common), "")


def _interpolate_backward(
    op: Builder, node: Forward, dy: ir.Value, mode: Mode, coordinates: str, axes: Sequence[Axis]
) -> ir.Value:
    outs = [a.out for a in axes[2:]]
    sizes = [o for o in outs if isinstance(o, int)]
    scales = [a.scale for a in axes[2:] if a.given and a.scale is not None]
    attributes: dict[str, object] = {
        "mode": mode.mode,
        "coordinate_transformation_mode": coordinates,
        "data_format": "NCX",
    }
    inputs: list[ir.Value] = []
    if len(sizes) == len(outs):
        attributes["sizes"] = sizes
    elif len(scales) == len(outs):
        attributes["scales"] = scales
    else:
        inputs.append(op.Cast(op.Shape(dy, start=2), to=ir.DataType.INT32.value))
    return op.domain.InterpolateBackward(node.input(0), dy, *inputs, **attributes)


def _resample_grad(op: Builder, node: Forward, dy: ir.Value, mode: Mode, offsets: Sequence[Offsets]) -> ir.Value:
    shape, shape_input = wanted_shape(op, node.input(0))
    return op.domain.ResampleGrad(
        dy,
        *shape_input,
        interpolation_mode="NEAREST_NEIGHBOR" if mode.mode == "nearest" else "LINEAR",
        scales=[s for s, _, _ in offsets],
        input_pixel_offsets=[i for _, i, _ in offsets],
        output_pixel_offsets=[o for _, _, o in offsets],
        dimension_count=len(offsets),
        output_sizes=shape,
    )


def _mode(node: Forward) -> Mode:
    mode = node.string("mode", "nearest")
    coordinates = node.string("coordinate_transformation_mode", "half_pixel")
    if mode not in ("nearest", "linear"):
        raise node.refuse("mode", mode, "nearest and linear")
    if coordinates == "tf_crop_and_resize":
        raise node.refuse("coordinate_transformation_mode", coordinates, "but tf_crop_and_resize")
    for name in ("antialias", "exclude_outside"):
        if node.int(name, 0):
            raise node.refuse(name, node.int(name, 0), "0")
    return Mode(mode, coordinates, node.string("nearest_mode", "round_prefer_floor"))


def _axes(node: Forward) -> list[Axis]:
    """Lengths and scale of every axis; axes that the node does not list keep their length."""
    lengths = dims(node.input(0))
    if lengths is None:
        raise UnsupportedError("the rank of X is unknown; give it a shape", op_type=node.op_type, node=node.name)
    rank = len(lengths)
    listed = node.ints("axes", range(rank)) or []
    listed = [axis + rank if axis < 0 else axis for axis in listed]
    request = _request(node, len(listed))
    outs = dims(node.output()) or (None,) * rank
    result = [Axis(length, length, 1.0, given=True) for length in lengths]
    for position, axis in enumerate(listed):
        length = lengths[axis]
        if request.scales is not None:
            result[axis] = _given_scale(node, length, float(request.scales[position]), outs[axis])
        elif request.by_scale:
            result[axis] = Axis(length, None, None, given=True)
        else:
            size = int(request.sizes[position]) if request.sizes is not None else outs[axis]
            result[axis] = Axis(length, size, _ratio(length, size), given=False)
    policy = node.string("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch" and not request.by_scale:
        if request.sizes is None:
            raise node.refuse("keep_aspect_ratio_policy", policy, "when sizes are constant")
        _keep_aspect_ratio(node, policy, result, listed)
    return result


def _given_scale(node: Forward, length: Dim, scale: float, inferred: Dim) -> Axis:
    """out = floor(length · scale) in float32, as onnxruntime computes it; onnx does so in float64."""
    out = int(np.float32(length) * np.float32(scale)) if isinstance(length, int) else None
    if out is not None and isinstance(inferred, int) and out != inferred:
        raise UnsupportedError(
            f"a scale of {scale:.9g} makes {inferred} pixels of {length} by onnx's shape inference, {out} by "
            "onnxruntime. Give sizes instead",
            op_type=node.op_type,
            node=node.name,
        )
    return Axis(length, out, scale, given=True)


def _ratio(length: Dim, size: Dim) -> float | None:
    if isinstance(length, int) and isinstance(size, int) and length > 0:
        return float(np.float32(size) / np.float32(length))
    return None


def _keep_aspect_ratio(node: Forward, policy: str, axes: list[Axis], listed: Sequence[int]) -> None:
    """One scale for all listed axes, the smallest or largest of sizes / lengths; lengths rounded, halves up."""
    if policy not in ("not_larger", "not_smaller"):
        raise node.refuse("keep_aspect_ratio_policy", policy, "stretch, not_larger, not_smaller")
    ratios = [axes[axis].scale for axis in listed]
    known = [r for r in ratios if r is not None]
    if len(known) != len(ratios):
        raise node.refuse("keep_aspect_ratio_policy", policy, "when lengths and sizes are known at conversion")
    scale = min(known) if policy == "not_larger" else max(known)
    for axis in listed:
        length = axes[axis].length
        assert isinstance(length, int)
        out = int(np.floor(np.float32(scale) * np.float32(length) + np.float32(0.5)))
        if out == 0:
            raise node.refuse("keep_aspect_ratio_policy", policy, f"when no length becomes 0 (axis {axis} does)")
        axes[axis] = Axis(length, out, scale, given=True)


@dataclass(frozen=True)
class _Request:
    """What a node asks for: constant scales, constant sizes, or one of them unknown until the run."""

    by_scale: bool
    scales: np.ndarray | None = field(default=None)
    sizes: np.ndarray | None = field(default=None)


def _request(node: Forward, count: int) -> _Request:
    scales, sizes = node.constant(2), node.constant(3)
    asks_scales = node.has(2) and not (scales is not None and scales.size == 0)
    asks_sizes = node.has(3) and not (sizes is not None and sizes.size == 0)
    if asks_scales == asks_sizes:
        got = "both" if asks_scales else "neither"
        raise InvalidModelError(f"expected scales or sizes, got {got}", op_type=node.op_type, node=node.name)
    values = scales if asks_scales else sizes
    if values is not None and values.shape != (count,):
        what = "scales" if asks_scales else "sizes"
        raise InvalidModelError(
            f"{what}: expected {count} values, got {values.tolist()}", op_type=node.op_type, node=node.name
        )
    return _Request(asks_scales, scales if asks_scales else None, sizes if asks_sizes else None)


def _log(node: Forward, chosen: str, mode: Mode) -> None:
    logger.info("Resize '%s' (%s): %s means exactly the same", node.name, mode, chosen)
