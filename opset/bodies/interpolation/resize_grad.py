"""The body of ResizeGrad: what a run must prove, the scale of every axis, then one matrix per axis that changes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from operator import and_

from onnx_backprop.opset.bodies.builder import BOOL, DOUBLE, FLOAT, INT64, Body, Tensor
from onnx_backprop.opset.bodies.expressions import Expression, Numpy, Vector, join
from onnx_backprop.opset.bodies.interpolation.forms import InterpolatedAxis
from onnx_backprop.opset.bodies.interpolation.lengths import positive_or_empty, shape_of_rank
from onnx_backprop.opset.bodies.interpolation.transpose import transpose
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.maths.interpolation import Placed, Taps
from onnx_backprop.opset.maths.resize import ResizeAxis, axis_settings, place_resize, resize_taps

CROP = "tf_crop_and_resize"


@dataclass(frozen=True)
class ResizeRule:
    """`place_resize`, for an axis of which the scale, the region and whether it is copied are vectors of one entry."""

    axis: ResizeAxis

    def taps(self, length: int, out: int) -> Taps | None:
        scale, start, end, copied = (v.value for v in (self.axis.scale, *self.axis.roi, self.axis.copied))
        if None in (scale, start, end, copied):
            return None
        return resize_taps(replace(self.axis, length=length, out=out, scale=scale, roi=(start, end), copied=copied))

    def place(self, length: Vector, out: Vector, xp: Numpy) -> Placed:
        return place_resize(replace(self.axis, length=length, out=out), xp)


class ResizeBody:
    """Writes one body.

    listed: the axes that roi, scales and sizes refer to. wanted: the lengths that each axis of dY may have, empty where
    that is not known. by_scale: whether scales (True) or sizes (False) are given, None where only the run can tell.
    """

    def __init__(
        self, b: Body, attrs: Attributes, listed: tuple[int, ...], wanted: Sequence[set[int]], by_scale: bool | None
    ) -> None:
        self.b, self.attrs, self.listed, self.wanted, self.by_scale = b, attrs, listed, wanted, by_scale
        self.lengths: list[Vector] = []
        self.outs: list[Vector] = []
        self.scales = self.sizes = Vector(b, [])  # of the listed axes, where they may be given
        self.zero = Vector(b, [0])  # of the checks that nothing else depends on
        self.has_scales = Vector(b, [bool(by_scale)], dtype=BOOL)

    def write(self, dy: Tensor, x: Tensor, roi: Tensor | None, scales: Tensor | None, sizes: Tensor | None) -> str:
        """DX."""
        b, rank = self.b, len(self.wanted)
        whole = shape_of_rank(b, x, rank, f"expected X of rank {rank}")
        outs = shape_of_rank(b, dy, rank, f"expected dY of rank {rank}")
        self._read(scales, sizes)
        kept = [axis not in self.listed or self._known_scale(axis) == 1 for axis in range(rank)]
        self.lengths, self.outs = [whole[k] for k in range(rank)], [outs[k] for k in range(rank)]
        for axis, same in enumerate(kept):
            if same:
                self.lengths[axis] = self.outs[axis] = whole[axis].knowing(outs.entries[axis : axis + 1])
            elif len(self.wanted[axis]) == 1:
                self.outs[axis] = Vector(b, list(self.wanted[axis]))
        expected = join(b, *(whole[axis] if same else self.outs[axis] for axis, same in enumerate(kept)))
        message = "expected dY with the lengths that X, scales, sizes and axes lead to"
        gradient = b.checked(dy, expected, message)
        changed = [axis for axis, same in enumerate(kept) if not same]
        known = [len(self.wanted[a]) == 1 or (self.wanted[a] and outs.entries[a] is not None) for a in changed]
        if not all(known):
            self.zero += self._lengths_agree().require(message)
        empty = any(out.value == 0 for out in self.outs)
        if changed and not empty:
            source, out = (join(b, *(values[a] for a in changed)) for values in (self.lengths, self.outs))
            sized = positive_or_empty(source, out, "expected X with lengths >= 1")
            for k, axis in enumerate(changed):
                self.lengths[axis] = sized[k]
        empty = empty or any(length.value == 0 for length in self.lengths)
        axes = [] if empty else self._axes(changed, roi)
        return transpose(b, gradient, join(b, *self.outs), axes, join(b, *self.lengths) + self.zero)

    # ----- scales and sizes ------------------------------------------------------------------------------------------

    def _read(self, scales: Tensor | None, sizes: Tensor | None) -> None:
        """Scales and sizes as they are known, or proven to be what they must be."""
        b, count = self.b, len(self.listed)
        one_of = f"expected {count} scales or sizes, not both, one per listed axis"
        if self.by_scale is None:
            assert scales is not None
            assert sizes is not None
            one = b.Equal(b.Min(b.Size(scales), b.Size(sizes)), b.int_scalar(0))
            self.zero += Expression(b, one, BOOL).require(one_of)
            given = b.Reshape(b.Greater(b.Size(scales), b.int_scalar(0)), b.ints([1]))
            self.has_scales = Vector(b, [None], given, BOOL)
            values = b.entries(b.Concat(scales, b.Cast(sizes, to=FLOAT), axis=0), count, one_of)
            padded = b.Concat(b.Cast(sizes, to=INT64), b.ints([0] * count), axis=0)
            self.scales = self._positive(values)
            self.sizes = self._not_negative(b.Slice(padded, b.ints([0]), b.ints([count])))
            if self.attrs["keep_aspect_ratio_policy"] != "stretch":
                message = "expected sizes, as keep_aspect_ratio_policy wants, got scales"
                self.zero += (~self.has_scales).require(message)
            return
        given, other = (scales, sizes) if self.by_scale else (sizes, scales)
        assert given is not None
        if other is not None and other.value is None:
            none = b.Equal(b.Size(other), b.int_scalar(0))
            self.zero += Expression(b, none, BOOL).require(one_of)
        if given.value is not None and None not in given.value:
            values = Vector(b, given.value, dtype=FLOAT if self.by_scale else INT64)
        else:
            name = "scales" if self.by_scale else "sizes"
            proven = b.checked(given, Vector(b, [count]), f"expected {count} {name}, one per listed axis").name
            values = self._positive(proven) if self.by_scale else self._not_negative(b.Cast(proven, to=INT64))
        self.scales, self.sizes = (values, self.sizes) if self.by_scale else (self.scales, values)

    def _positive(self, name: str) -> Vector:
        """Scales that depend on a check of them."""
        values = Vector(self.b, [None] * len(self.listed), name, FLOAT)
        zero = ((values > 0) & (values < inf) | ~self.has_scales).require("expected positive, finite scales")
        places = Vector(self.b, range(len(self.listed))) + zero
        return Vector(self.b, values.entries, self.b.Gather(name, places.name), FLOAT)

    def _not_negative(self, name: str) -> Vector:
        values = Vector(self.b, [None] * len(self.listed), name)
        return values + (values >= 0).require("expected sizes >= 0")

    def _known_scale(self, axis: int) -> float | None:
        return self.scales.entries[self.listed.index(axis)] if self.by_scale else None

    def _of_listed(self, lengths: Sequence[Vector]) -> Vector:
        return join(self.b, *(lengths[axis] for axis in self.listed))

    def _lengths_agree(self) -> Vector:
        """Whether the listed lengths of dY follow from those of X."""
        lengths, outs = self._of_listed(self.lengths), self._of_listed(self.outs)
        if self.by_scale is False:
            return outs.equal(self._lengths_of_sizes())
        single, double = ((lengths.cast(t) * self.scales.cast(t)).cast(INT64) for t in (FLOAT, DOUBLE))
        scaled = outs.equal(single) | outs.equal(double)
        if self.by_scale:
            return scaled
        return (self.has_scales & scaled) | (~self.has_scales & outs.equal(self._lengths_of_sizes()))

    def _lengths_of_sizes(self) -> Vector:
        """The listed lengths that sizes lead to; of an empty X, any."""
        if self.attrs["keep_aspect_ratio_policy"] == "stretch":
            return self.sizes
        lengths = self._of_listed(self.lengths).cast(FLOAT)
        wanted = Numpy(self.b).floor(self._policy_scale() * lengths + 0.5).cast(INT64)
        return lengths.least().equal(0).where(self._of_listed(self.outs), wanted)

    def _policy_scale(self) -> Vector:
        """The one scale of all listed axes, in float32."""
        ratios: Vector = self.sizes.cast(FLOAT) / self._of_listed(self.lengths).cast(FLOAT)
        return ratios.least() if self.attrs["keep_aspect_ratio_policy"] == "not_larger" else ratios.greatest()

    # ----- axes ------------------------------------------------------------------------------------------------------

    def _axes(self, changed: list[int], roi: Tensor | None) -> list[InterpolatedAxis]:
        b = self.b
        equal = {axis: self.lengths[axis].equal(self.outs[axis]) for axis in changed}
        whole: Vector = reduce(and_, equal.values(), Vector(b, [True], dtype=BOOL))
        if whole.value:
            return []
        scales = {axis: self._scale(axis) for axis in changed}
        common = axis_settings(self.attrs)
        # cubic on (N, H, W, C), that is with axis 1 resized, runs on onnxruntime's kernels for antialias
        copies = Vector(b, [common.antialias], dtype=BOOL)
        if common.mode == "cubic" and len(self.lengths) == 4 and 1 in scales:
            copies |= ~scales[1].equal(1)
        regions = self._regions(roi if common.coordinates == CROP else None)
        result: list[InterpolatedAxis] = []
        for axis in changed:
            k = self.listed.index(axis)
            region = regions[k], regions[len(self.listed) + k]
            rule = ResizeRule(replace(common, scale=scales[axis], roi=region, copied=copies & equal[axis]))
            same = whole | scales[axis].equal(1)
            result.append(InterpolatedAxis(axis, self.lengths[axis], rule, same))
        return result

    def _scale(self, axis: int) -> Vector:
        """The scale of an axis, in float32."""
        k = self.listed.index(axis)
        if self.by_scale:
            return self.scales[k]
        if self.attrs["keep_aspect_ratio_policy"] == "stretch":
            ratio = self.outs[axis].cast(FLOAT) / self.lengths[axis].cast(FLOAT)
        else:
            ratio = self._policy_scale()
        return ratio if self.by_scale is False else self.has_scales.where(self.scales[k], ratio)

    def _regions(self, roi: Tensor | None) -> Vector:
        """Starts and ends of the listed axes; roi has two entries for each of them or for every axis of X."""
        b, count, rank = self.b, len(self.listed), len(self.lengths)
        if roi is None:
            return Vector(b, [0.0] * count + [1.0] * count, dtype=FLOAT)
        every = [*self.listed, *(rank + axis for axis in self.listed)]
        if roi.value is not None:
            values = Vector(b, roi.value, dtype=FLOAT)
            return values if values.count == 2 * count else values[every]
        entries = roi.dims[0] if roi.dims else None
        positions, size = b.ints(range(2 * count)), b.Size(roi)
        if isinstance(entries, int):
            positions = positions if entries == 2 * count else b.ints(every)
        elif rank != count:
            positions = b.Where(b.Equal(size, b.int_scalar(2 * count)), positions, b.ints(every))
        fits = b.Or(b.Equal(size, b.int_scalar(2 * count)), b.Equal(size, b.int_scalar(2 * rank)))
        zero = b.require(fits, f"expected {2 * count} or {2 * rank} entries of roi, starts and ends")
        finite = b.Less(b.Abs(roi), b.float_scalar(inf))
        zero = b.Add(zero, b.require(finite, "expected finite numbers in roi"))
        values = b.Gather(b.Reshape(roi, b.ints([-1])), b.Add(positions, zero))
        return Vector(b, [None] * (2 * count), values, FLOAT)
