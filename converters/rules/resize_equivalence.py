"""Which published gradient operator means the same as one axis of a Resize.

"The same" is checked: where the lengths are known by comparing the two linear maps, elsewhere by the few cases that
hold for every length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.core.shapes import Dim
from onnx_backprop.opset.maths.interpolation import Taps, apply, onednn_taps, resample_taps
from onnx_backprop.opset.maths.resize import ResizeAxis, resize_taps

SPEC_COORDINATES = ("half_pixel", "align_corners")
Offsets = tuple[float, float, float]  # scale, input offset, output offset of ResampleGrad

HALF_PIXEL_OFFSETS = (0.5, -0.5)
ASYMMETRIC_OFFSETS = (0.0, 0.0)


@dataclass(frozen=True)
class AxisScale:
    """What conversion knows of one axis. `scale` is None when it is O/I with a length unknown."""

    length: Dim
    out: Dim
    scale: float | None
    given: bool  # the scale is the node's, not O/I

    @property
    def identity(self) -> bool:
        """Whether the axis is copied for certain; equal symbols are equal lengths."""
        if self.given:
            return self.scale == 1
        return self.length is not None and self.length == self.out

    @property
    def keeps_length(self) -> bool:
        return self.identity or (isinstance(self.length, int) and self.length == self.out)

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
    antialias: bool = False
    exclude_outside: bool = False

    def __str__(self) -> str:
        more = [self.nearest_mode] if self.mode == "nearest" else []
        more += [name for name in ("antialias", "exclude_outside") if getattr(self, name)]
        return ", ".join([self.mode, self.coordinates, *more])

    @property
    def unpublished(self) -> str:
        """What in it neither published operator has, or ''."""
        if self.mode == "cubic":
            return "mode cubic"
        if self.coordinates == "tf_crop_and_resize":
            return self.coordinates
        return "antialias" if self.antialias else "exclude_outside" if self.exclude_outside else ""


COMPARED = 1 << 16  # pixels along an axis up to which the maps themselves are made and compared
ANY = Meaning(frozenset(SPEC_COORDINATES), (1.0, *HALF_PIXEL_OFFSETS))


def meanings(mode: Mode, axes: Sequence[AxisScale]) -> list[Meaning]:
    """What every axis means; the ones that are copied can be said by any operator."""
    return [ANY if axis.identity else _meaning(mode, axis) for axis in axes]


def onednn_coordinates(axes: Sequence[AxisScale], by_axis: Sequence[Meaning]) -> str:
    """The coordinate mode under which InterpolateBackward, which resizes spatial axes only, serves all axes, or ''."""
    if not 3 <= len(axes) <= 5 or not all(a.identity for a in axes[:2]):
        return ""
    common = frozenset(SPEC_COORDINATES).intersection(*(m.spec for m in by_axis[2:]))
    return next((c for c in SPEC_COORDINATES if c in common), "")


def why_neither(axes: Sequence[AxisScale], by_axis: Sequence[Meaning]) -> str:
    """Why no published operator serves all axes."""
    for number, (axis, one) in enumerate(zip(axes, by_axis, strict=True)):
        if not axis.identity and not one.spec and not one.resample:
            return f"axis {number}: {one.why_not}"
    for number, (axis, one) in enumerate(zip(axes, by_axis, strict=True)):
        if not one.resample:
            reason = "is not known to keep its length" if number < 2 and not axis.identity else one.why_not
            return f"axis {number}: {reason or 'its scale is unknown at conversion'}"
    raise AssertionError("ResampleGrad serves all axes")


def _meaning(mode: Mode, axis: AxisScale) -> Meaning:
    """Which published operators place the same taps as this Resize along one axis, for every run."""
    length, out, scale = axis.length, axis.out, axis.scale
    if isinstance(length, int) and isinstance(out, int) and scale is not None and max(length, out) <= COMPARED:
        return _known_lengths(mode, length, out, scale)
    return _any_lengths(mode, axis)


def _known_lengths(mode: Mode, length: int, out: int, scale: float) -> Meaning:
    """Compare the maps themselves."""
    wanted = resize_taps(ResizeAxis(length, out, scale, mode.mode, mode.coordinates, mode.nearest_mode))
    spec = frozenset(c for c in SPEC_COORDINATES if _same(wanted, onednn_taps(mode.mode, c, length, out)))
    kernel = "NEAREST_NEIGHBOR" if mode.mode == "nearest" else "LINEAR"
    why_not = f"{length} -> {out} pixels with scale {scale:g} place other taps"
    for offsets in _offset_candidates(mode, length, out, scale):
        if _same(wanted, resample_taps(kernel, length, out, *offsets)):
            return Meaning(spec, offsets)
    return Meaning(spec, None, why_not)


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


def _any_lengths(mode: Mode, axis: AxisScale) -> Meaning:
    """The cases that hold whatever the lengths turn out to be."""
    factor = axis.whole_factor
    if mode.mode == "linear" and mode.coordinates == "align_corners":
        return Meaning(frozenset({"align_corners"}), why_not="align_corners with lengths unknown at conversion")
    if not axis.given:
        return _any_ratio(mode)
    if factor and _centred(mode, factor):
        return Meaning(frozenset({"half_pixel"}), (axis.scale or 1.0, *HALF_PIXEL_OFFSETS))
    if axis.scale is None:
        return Meaning(why_not="its scale is unknown at conversion")
    if mode.mode == "nearest":
        return Meaning(why_not=f"nearest with lengths unknown at conversion and scale {axis.scale:g}")
    if mode.coordinates == "half_pixel":
        return _unless_copied(axis, HALF_PIXEL_OFFSETS)
    if mode.coordinates == "asymmetric":
        return _unless_copied(axis, ASYMMETRIC_OFFSETS)
    return Meaning(why_not=f"{mode.coordinates} with this scale depends on lengths unknown at conversion")


def _any_ratio(mode: Mode) -> Meaning:
    """Sizes given, scale O/I."""
    symmetric = mode.coordinates in ("half_pixel", "half_pixel_symmetric")
    why_not = "its sizes or lengths are unknown at conversion"
    if symmetric and (mode.mode == "linear" or mode.nearest_mode == "round_prefer_ceil"):
        return Meaning(frozenset({"half_pixel"}), why_not=why_not)
    return Meaning(why_not=why_not)


def _centred(mode: Mode, factor: int) -> bool:
    """Whether up-sampling by a whole factor is oneDNN's half_pixel: no ties arise, pixel o reads around o // k."""
    if mode.coordinates in ("half_pixel", "half_pixel_symmetric") or (
        mode.coordinates == "pytorch_half_pixel" and factor > 1
    ):
        return mode.mode == "linear" or mode.nearest_mode.startswith("round")
    return mode.mode == "nearest" and mode.coordinates == "asymmetric" and mode.nearest_mode == "floor"


def _unless_copied(axis: AxisScale, offsets: tuple[float, float]) -> Meaning:
    assert axis.scale is not None
    if 1 < axis.scale < 1.5:  # floor(2 · s) is still 2: such a length may come out unchanged
        return Meaning(why_not=f"onnxruntime copies where a scale of {axis.scale:g} happens to keep every length")
    return Meaning(resample=(axis.scale, *offsets))
