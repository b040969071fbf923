"""The body of ResizeGrad: what a run must prove, the scale of every axis, then one matrix per axis that changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from onnx_backprop.opset.bodies.builder import DOUBLE, FLOAT, INT64, Body, Tensor
from onnx_backprop.opset.bodies.interpolation.forms import Axis, Truth
from onnx_backprop.opset.bodies.interpolation.lengths import (
    Length,
    guarded,
    join,
    lengths_of,
    positive_or_empty,
    vector,
)
from onnx_backprop.opset.bodies.interpolation.resize_taps import Number, ResizeRule, both, either
from onnx_backprop.opset.bodies.interpolation.taps import equal
from onnx_backprop.opset.bodies.interpolation.transpose import transpose
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.maths.resize import ResizeAxis, policy_scale

CROP = "tf_crop_and_resize"


@dataclass
class ResizeBody:
    """Writes one body.

    listed: the axes that roi, scales and sizes speak of. wanted: the lengths that each axis of dY may have, empty where
    that is not known. by_scale: whether scales (True) or sizes (False) are given, None where only the run can tell.
    """

    b: Body
    attrs: Attributes
    listed: tuple[int, ...]
    wanted: Sequence[set[int]]
    by_scale: bool | None
    lengths: list[Length] = field(default_factory=list)
    outs: list[Length] = field(default_factory=list)
    scales: tuple[float, ...] | str | None = None  # entries, or the name of a 1-D float32 tensor of them
    sizes: tuple[int, ...] | str | None = None
    has_scales: Truth = True
    zero: str | None = None  # of the checks that nothing else depends on

    def write(self, dy: Tensor, x: Tensor, roi: Tensor | None, scales: Tensor | None, sizes: Tensor | None) -> str:
        """DX."""
        b, rank = self.b, len(self.wanted)
        whole = lengths_of(b, x, rank, f"expected X of rank {rank}")
        outs = lengths_of(b, dy, rank, f"expected dY of rank {rank}")
        self._read(scales, sizes)
        kept = [axis not in self.listed or self._known_scale(axis) == 1 for axis in range(rank)]
        self.lengths, self.outs = list(whole), list(outs)
        for axis, same in enumerate(kept):
            if same:
                known = next((n for n in (whole[axis], outs[axis]) if isinstance(n, int)), whole[axis])
                self.lengths[axis] = self.outs[axis] = known
            elif len(self.wanted[axis]) == 1:
                self.outs[axis] = next(iter(self.wanted[axis]))
        expected = [whole[axis] if same else self.outs[axis] for axis, same in enumerate(kept)]
        dims = tuple(length if isinstance(length, int) else None for length in expected)
        message = "expected dY with the lengths that X, scales, sizes and axes lead to"
        gradient = b.checked(dy, join(b, expected), dims, message)
        changed = [axis for axis, same in enumerate(kept) if not same]
        if any(len(self.wanted[a]) != 1 and not (self.wanted[a] and isinstance(outs[a], int)) for a in changed):
            self._check(self._lengths_agree(), message)
        if changed and 0 not in self.outs:
            message = "expected X with lengths >= 1"
            sized = positive_or_empty(b, [self.lengths[a] for a in changed], [self.outs[a] for a in changed], message)
            for axis, length in zip(changed, sized, strict=True):
                self.lengths[axis] = length
        axes = [] if 0 in self.outs or 0 in self.lengths else self._axes(changed, roi)
        return transpose(b, gradient, self.outs, axes, guarded(b, join(b, self.lengths), self.zero))

    def _check(self, condition: str, message: str) -> str:
        zero = self.b.require(condition, message)
        self.zero = zero if self.zero is None else self.b.Add(self.zero, zero)
        return zero

    # ----- scales and sizes ------------------------------------------------------------------------------------------

    def _read(self, scales: Tensor | None, sizes: Tensor | None) -> None:
        """Scales and sizes as they are known, or proven to be what they must be."""
        b, count = self.b, len(self.listed)
        one_of = f"expected {count} scales or sizes, not both, one per listed axis"
        if self.by_scale is None:
            assert scales is not None
            assert sizes is not None
            self._check(b.Equal(b.Min(b.Size(scales), b.Size(sizes)), b.int_scalar(0)), one_of)
            self.has_scales = b.Reshape(b.Greater(b.Size(scales), b.int_scalar(0)), b.ints([1]))
            both_inputs = b.Concat(scales, b.Cast(sizes, to=FLOAT), axis=0)
            values = b.entries(both_inputs, count, one_of)
            padded = b.Concat(b.Cast(sizes, to=INT64), b.ints([0] * count), axis=0)
            self.scales = self._positive(values)
            self.sizes = self._not_negative(b.Slice(padded, b.ints([0]), b.ints([count])))
            if self.attrs["keep_aspect_ratio_policy"] != "stretch":
                self._check(b.Not(self.has_scales), "expected sizes, as keep_aspect_ratio_policy wants, got scales")
            return
        self.has_scales = self.by_scale
        given, other = (scales, sizes) if self.by_scale else (sizes, scales)
        assert given is not None
        if other is not None and other.value is None:
            self._check(b.Equal(b.Size(other), b.int_scalar(0)), one_of)
        if given.value is not None and all(v is not None for v in given.value):
            if self.by_scale:
                self.scales = given.value
            else:
                self.sizes = given.value
            return
        name = "scales" if self.by_scale else "sizes"
        message = f"expected {count} {name}, one per listed axis"
        values = b.checked(given, b.ints([count]), (count,), message).name
        if self.by_scale:
            self.scales = self._positive(values)
        else:
            self.sizes = self._not_negative(b.Cast(values, to=INT64))

    def _positive(self, values: str) -> str:
        """Scales that depend on a check of them."""
        b = self.b
        valid = b.And(b.Greater(values, b.float_scalar(0)), b.Less(values, b.float_scalar(inf)))
        if isinstance(self.has_scales, str):
            valid = b.Or(valid, b.Not(self.has_scales))
        zero = b.require(valid, "expected positive, finite scales")
        return b.Gather(values, b.Add(b.ints(range(len(self.listed))), zero))

    def _not_negative(self, values: str) -> str:
        valid = self.b.GreaterOrEqual(values, self.b.int_scalar(0))
        return self.b.Add(values, self.b.require(valid, "expected sizes >= 0"))

    def _known_scale(self, axis: int) -> float | None:
        if self.by_scale is not True or not isinstance(self.scales, tuple):
            return None
        return self.scales[self.listed.index(axis)]

    def _listed_lengths(self, lengths: list[Length], to: int) -> str:
        values = join(self.b, [lengths[axis] for axis in self.listed])
        return values if to == INT64 else self.b.Cast(values, to=to)

    def _size_vector(self) -> str:
        assert self.sizes is not None
        return self.sizes if isinstance(self.sizes, str) else self.b.ints(self.sizes)

    def _lengths_agree(self) -> str:
        """Whether the listed lengths of dY follow from those of X."""
        b = self.b
        outs = self._listed_lengths(self.outs, INT64)
        answers: list[str] = []
        if self.has_scales is not False:
            assert self.scales is not None
            scales = self.scales if isinstance(self.scales, str) else b.constant(np.array(self.scales, np.float32))
            products = [
                b.Cast(b.Mul(self._listed_lengths(self.lengths, kind), b.Cast(scales, to=kind)), to=INT64)
                for kind in (FLOAT, DOUBLE)
            ]
            answers.append(b.Or(b.Equal(outs, products[0]), b.Equal(outs, products[1])))
        if self.has_scales is not True:
            answers.append(b.Equal(outs, self._lengths_of_sizes()))
        if len(answers) == 1:
            return answers[0]
        assert isinstance(self.has_scales, str)
        return b.Or(b.And(self.has_scales, answers[0]), b.And(b.Not(self.has_scales), answers[1]))

    def _lengths_of_sizes(self) -> str:
        """The listed lengths that sizes lead to; of an empty X, any."""
        b = self.b
        if self.attrs["keep_aspect_ratio_policy"] == "stretch":
            return self._size_vector()
        lengths = self._listed_lengths(self.lengths, FLOAT)
        scale = self._policy_scale()
        wanted = b.Mul(scale if isinstance(scale, str) else b.float_scalar(scale), lengths)
        wanted = b.Cast(b.Floor(b.Add(wanted, b.float_scalar(0.5))), to=INT64)
        empty = b.Equal(b.ReduceMin(lengths, keepdims=1), b.float_scalar(0))
        return b.Where(empty, self._listed_lengths(self.outs, INT64), wanted)

    def _policy_scale(self) -> Number:
        """The one scale of all listed axes, in float32."""
        policy, lengths = self.attrs["keep_aspect_ratio_policy"], [self.lengths[axis] for axis in self.listed]
        known = [n for n in lengths if isinstance(n, int) and n > 0]
        if isinstance(self.sizes, tuple) and len(known) == len(lengths):
            ratios = [np.float32(size) / np.float32(n) for size, n in zip(self.sizes, known, strict=True)]
            return float(policy_scale(policy, ratios))
        sizes = self.b.Cast(self._size_vector(), to=FLOAT)
        ratios = self.b.Div(sizes, self._listed_lengths(self.lengths, FLOAT))
        return self.b.emit("ReduceMin" if policy == "not_larger" else "ReduceMax", [ratios], {"keepdims": 1})[0]

    # ----- axes ------------------------------------------------------------------------------------------------------

    def _axes(self, changed: list[int], roi: Tensor | None) -> list[Axis]:
        attrs = self.attrs
        whole = self._all_lengths_equal(changed)
        if whole is True:
            return []
        scales = {axis: self._scale(axis) for axis in changed}
        common = ResizeAxis(
            length=0,
            out=0,
            scale=1.0,
            mode=attrs["mode"],
            coordinates=attrs["coordinate_transformation_mode"],
            nearest_mode=attrs["nearest_mode"],
            cubic_coeff_a=attrs["cubic_coeff_a"],
            exclude_outside=attrs["exclude_outside"] != 0,
            antialias=attrs["antialias"] != 0,
        )
        # cubic on (N, H, W, C), that is with axis 1 resized, runs on onnxruntime's kernels for antialias
        channels_last: Truth = False
        if common.mode == "cubic" and len(self.lengths) == 4 and 1 in scales:
            channels_last = self._negate(self._is_one(scales[1]))
        regions = self._regions(roi if common.coordinates == CROP else None)
        result: list[Axis] = []
        for axis in changed:
            copies = either(self.b, common.antialias, channels_last)
            copied = (
                copies if copies is False else both(self.b, copies, equal(self.b, self.lengths[axis], self.outs[axis]))
            )
            unchanged = either(self.b, whole, self._is_one(scales[axis]))
            rule = ResizeRule(common, scales[axis], regions[self.listed.index(axis)], unchanged, copied)
            result.append(Axis(axis, self.lengths[axis], rule))
        return result

    def _scale(self, axis: int) -> Number:
        b = self.b
        known = self._known_scale(axis)
        if known is not None:
            return float(known)
        if self.has_scales is False:
            return self._ratio(axis)
        assert isinstance(self.scales, str)
        given = b.Gather(self.scales, b.ints([self.listed.index(axis)]))
        if self.has_scales is True:
            return given
        ratio = self._ratio(axis)
        return b.Where(self.has_scales, given, ratio if isinstance(ratio, str) else b.float_scalar(ratio))

    def _ratio(self, axis: int) -> Number:
        """The scale that sizes lead to, in float32."""
        if self.attrs["keep_aspect_ratio_policy"] != "stretch":
            return self._policy_scale()
        length, out = self.lengths[axis], self.outs[axis]
        if isinstance(length, int) and isinstance(out, int):
            return float(np.float32(out) / np.float32(length))
        b = self.b
        return b.Div(b.Cast(vector(b, out), to=FLOAT), b.Cast(vector(b, length), to=FLOAT))

    def _all_lengths_equal(self, changed: list[int]) -> Truth:
        result: Truth = True
        for axis in sorted(changed, key=lambda a: isinstance(self.lengths[a], str) or isinstance(self.outs[a], str)):
            if result is False:
                return False
            result = both(self.b, result, equal(self.b, self.lengths[axis], self.outs[axis]))
        return result

    def _is_one(self, scale: Number) -> Truth:
        return self.b.Equal(scale, self.b.float_scalar(1)) if isinstance(scale, str) else scale == 1

    def _negate(self, truth: Truth) -> Truth:
        return self.b.Not(truth) if isinstance(truth, str) else not truth

    def _regions(self, roi: Tensor | None) -> list[tuple[Number, Number]]:
        """(start, end) of every listed axis; roi has two entries for each of them or for every axis of X."""
        b, count, rank = self.b, len(self.listed), len(self.lengths)
        if roi is None:
            return [(0.0, 1.0)] * count
        every = [*self.listed, *(rank + axis for axis in self.listed)]
        if roi.value is not None:
            values = roi.value if len(roi.value) == 2 * count else [roi.value[k] for k in every]
            return [(float(start), float(end)) for start, end in zip(values[:count], values[count:], strict=True)]
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
        return [(b.Gather(values, b.ints([k])), b.Gather(values, b.ints([count + k]))) for k in range(count)]
