"""The weight gradient of a correlation in standard ONNX operators: matrix products over all the pixels.

    dw[d,s,k] = Σ_{n,o} dy[n,d,o] · x[n,s,o·S+k·D-P]

is a product of a matrix that has the channels of dy as rows and one with the channels of x as columns. Each kernel
position pairs other pixels, so one of the two has to be copied once per kernel position. On a leading axis of stride 1
the sum may run over the pixels i = o + k·D - P of the source as well, and then it is dy that is copied. With k =
(a, b), a being the kernel's positions along those axes:

    dw[(d,a),(b,s)] = Σ_{n,i,o} dy[n,d,i+P-a·D,o] · x[n,s,i,o·S+b·D-P]

For a kernel of 3 × 3 positions that is 3 copies of either tensor instead of 9 of one. Where the copies of x are whole
channels, each has a product of its own, so that they need not be put together, and the middle one is x itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.convolution import CorrelationLengths, destination_lengths, framed, padded
from onnx_backprop.opset.bodies.expressions import Vector, join

# Below this many channels per group the runs that a gather copies from a channels-last tensor are short and slow
FEW_CHANNELS = 16
# From this many on a product with the channels of one kernel position alone is fast
MANY_CHANNELS = 64
# Above this many kernel positions along an axis a slice for each is too many nodes
MANY_CELLS = 16
# A larger constant is left to the session, which makes it from its formula when it starts: model files stay small
CONSTANT_BYTES = 2**16
# What a kernel's length is taken for where it is not known
USUAL_KERNEL = 3


def backward_weights(c: CorrelationLengths, x: Tensor, dy: Tensor) -> str:
    """Adjoint wrt the weights: x (N, S, in…), dy (N, D, out…) -> (D, S/g, k…)."""
    b = c.b
    if _of_patches(c):
        return _patches_as_pixels(c, x, dy)
    factors = _Factors(c, destination_lengths(c, dy), _leading_axes(c))
    rows = factors.rows(dy)
    if factors.shifts:
        dw = factors.products(rows, factors.shifted_columns(x))
    elif factors.slices:
        dw = factors.products(rows, [factors.sliced_columns(x)])
    else:
        dw = factors.product(rows, factors.gathered_columns(x))
    order = factors.order
    sizes = [*(c.kernel[axis] for axis in range(c.axes)), factors.s, factors.d]
    dw = b.Reshape(dw, join(b, c.groups, *(sizes[axis] for axis in order)).name, allowzero=1)
    dw = b.Transpose(dw, perm=[0, *(1 + order.index(axis) for axis in (c.axes + 1, c.axes, *range(c.axes)))])
    return b.Reshape(dw, join(b, c.destination_channels, factors.s, c.kernel).name, allowzero=1)


def _of_patches(c: CorrelationLengths) -> bool:
    """Whether windows lie side by side, so that each pixel meets one cell of the kernel."""
    strides, single = tuple(c.attrs["strides"]), (1,) * c.axes
    return (
        c.kernel.known == strides != single
        and max(strides) <= MANY_CELLS
        and tuple(c.attrs["dilations"]) == single
        and c.groups == 1
        and c.attrs["data_format"] == "NCX"
    )


def _patches_as_pixels(c: CorrelationLengths, x: Tensor, dy: Tensor) -> str:
    """Each patch becomes a pixel with as many more channels, and the kernel has one cell."""
    b, axes, strides, out = c.b, c.axes, c.attrs["strides"], destination_lengths(c, dy)
    name, channels = padded(c, x, c.begin, out * c.strides - c.begin - c.source).name, c.source_channels
    for axis in reversed(range(axes)):
        shape = join(b, c.batch, channels, (out * c.strides)[:axis], out[axis], strides[axis], out[axis + 1 :])
        name, cell = b.Reshape(name, shape.name, allowzero=1), 3 + axis
        if axis == axes - 1:  # pixel by pixel Split is several times as fast as Transpose
            name = b.Concat(
                *b.emit("Split", [name], {"axis": -1, "num_outputs": strides[axis]}, outputs=strides[axis]), axis=1
            )
        else:
            name = b.Transpose(name, perm=[0, cell, *(i for i in range(1, 3 + axes) if i != cell)])
        channels = channels * strides[axis]
    patches, none, single = join(b, c.batch, channels, out), Vector(b, [0] * axes), Vector(b, [1] * axes)
    lengths = {"source": out, "kernel": single, "begin": none, "end": none, "extent": single, "destination": out}
    attrs = c.attrs.having(strides=(1,) * axes)
    pixels = Tensor(b.Reshape(name, patches.name, allowzero=1), patches.dims)
    dw = backward_weights(replace(c, attrs=attrs, source_channels=channels, **lengths), pixels, dy)
    dw = b.Reshape(dw, join(b, c.destination_channels, c.strides, c.source_channels).name, allowzero=1)
    return b.Transpose(dw, perm=[0, 1 + axes, *range(1, 1 + axes)])


def _leading_axes(c: CorrelationLengths) -> int:
    """How many leading axes to copy dy for: the number that copies least; the last axis always goes with x."""
    kernel = [USUAL_KERNEL if k is None else k for k in c.kernel.entries]
    s, d = (c.source_channels // c.groups).known, (c.destination_channels // c.groups).known
    s, d = (s[0], d[0]) if s and d else (1, 1)
    allowed = [m for m in range(c.axes) if all(stride == 1 for stride in c.attrs["strides"][:m])]
    return min(allowed, key=lambda m: prod(kernel[:m]) * d + prod(kernel[m:]) * s)


@dataclass(frozen=True)
class _Factors:
    """The two factors of the product; `leading` axes of the kernel go with dy, the others with x."""

    c: CorrelationLengths
    out: Vector
    leading: int

    @property
    def first(self) -> range:
        """The leading axes."""
        return range(self.leading)

    @property
    def rest(self) -> range:
        """The axes behind them."""
        return range(self.leading, self.c.axes)

    @property
    def s(self) -> Vector:
        """Channels of x per group."""
        return self.c.source_channels // self.c.groups

    @property
    def d(self) -> Vector:
        """Channels of dy per group."""
        return self.c.destination_channels // self.c.groups

    @property
    def pixels(self) -> Vector:
        """How many pixels the sum runs over per batch entry."""
        return join(self.c.b, self.c.source[self.first], self.out[self.rest]).product()

    @property
    def shifts(self) -> bool:
        """Whether x is copied by a Pad for each position of the kernel, and not at all for the middle one."""
        kernel, s, strides = self.c.kernel[self.rest].known, self.s.value, self.c.attrs["strides"]
        return (
            kernel is not None
            and prod(kernel) <= USUAL_KERNEL
            and (prod(kernel) == 1 or s == 1 or (s is not None and s >= MANY_CHANNELS))
            and all(strides[axis] == 1 for axis in self.rest)
            and self.c.attrs["data_format"] == "NCX"
            and not self.folds_batch
        )

    @property
    def slices(self) -> bool:
        """Whether x is copied by slices, which copy runs along the last axis and not along the channels."""
        kernel, s = self.c.kernel[self.rest].known, self.s.known
        if kernel is None or max(kernel) > MANY_CELLS or self.folds_batch or self.shifts:
            return False
        return s is not None and s[0] < FEW_CHANNELS

    @property
    def columns_first(self) -> bool:
        """Whether columns stand on the left: onnxruntime multiplies a longer factor faster there, and a single row."""
        if not self.slices and not self.shifts:
            return False
        columns, rows = self.s, self.c.kernel[self.first].product() * self.d
        if self.slices:
            columns = columns * self.c.kernel[self.rest].product()
        counts = join(self.c.b, columns, rows).known
        return counts is not None and (counts[0] > counts[1] or (self.shifts and counts[0] == 1))

    @property
    def folds_batch(self) -> bool:
        """Whether to sum over the batch inside the product.

        That costs another copy of the rows, where a sum behind the product reads one result per batch entry.
        """
        c = self.c
        if c.groups > 1 or c.batch.known == (1,):
            return False
        sizes = join(c.b, c.kernel[self.rest], self.s, self.pixels).known
        return sizes is not None and prod(sizes[:-1]) > sizes[-1]

    @property
    def order(self) -> list[int]:
        """The axes of the product: those of the kernel by their number, behind the last those of S/g and of D/g."""
        last, s, d = self.c.axes - 1, self.c.axes, self.c.axes + 1
        rows = [d, *self.first]
        columns = [last, s, *range(last)] if self.slices and not self.leading else [*self.rest, s]
        return columns + rows if self.columns_first else rows + columns

    def product(self, rows: str, columns: str) -> str:
        """(g · D/g · a, b · S/g)."""
        b = self.c.b
        if self.folds_batch:  # (D·a, N·pixels) · (N·pixels, b·S)
            return b.MatMul(b.Flatten(b.Transpose(rows, perm=[1, 0, 2]), axis=1), b.Flatten(columns, axis=2))
        return b.ReduceSum(b.MatMul(rows, columns), b.ints([0]), keepdims=0)

    def products(self, rows: str, columns: Sequence[str]) -> str:
        """The same of columns of pixels, in parts; if `columns_first`, (g · b · S/g, D/g · a)."""
        b, channels, first = self.c.b, self._channels, self.columns_first
        turned = [*range(channels), channels + 1, channels]
        factors = ((part, rows) if first else (rows, part) for part in columns)
        parts = [b.MatMul(left, b.Transpose(right, perm=turned)) for left, right in factors]
        dw = parts[0] if len(parts) == 1 else b.Concat(*parts, axis=channels if first else channels + 1)
        return b.ReduceSum(dw, b.ints([0]), keepdims=0)

    def rows(self, dy: Tensor) -> str:
        """(N, g, D/g · a, pixels)."""
        c, b = self.c, self.c.b
        name = dy.name
        if self.leading:
            # the pixel of dy that meets i under kernel position a is i + P - a·D; padding moves it to i + (A-1-a)·D
            source, kernel, extents = (v[self.first] for v in (c.source, c.kernel, c.extent))
            begin, end = c.begin[self.first], c.end[self.first]
            none = Vector(b, [0] * len(self.rest))
            before, behind = (join(b, extents - 1 - pad, none) for pad in (begin, end))
            name = padded(c, dy, before, behind).name
            lengths = source + extents - 1
            if self.leading > 1:
                name = self._reshaped(name, c.destination_channels, lengths.product(), self.out[self.rest])
            steps = _steps(b, lengths)
            dilated = self._attribute("dilations", self.first) * steps
            meets = _grid(b, [(kernel, dilated * -1), (source, steps)], (kernel - 1) * dilated)
            name = b.Gather(name, meets, axis=2)
        return self._reshaped(name, *self._group, self.d * c.kernel[self.first].product(), self.pixels)

    def gathered_columns(self, x: Tensor) -> str:
        """(N, g, pixels, b · S/g), gathered from x with the channels last."""
        c, b = self.c, self.c.b
        name, needed = self._source(x)
        channels, rank = self._channels, self._channels + 1 + c.axes
        name = b.Transpose(name, perm=[*range(channels), *range(channels + 1, rank), channels])
        kernel = c.kernel[self.rest]
        if self._copies(self.rest):
            if len(self.rest) > 1:
                name = self._reshaped(name, *self._group, c.source[self.first], needed.product(), self.s)
            meets = _grid(b, self._met(self.rest, needed))
            name = b.Gather(name, meets, axis=channels + self.leading)
        return self._reshaped(name, *self._group, self.pixels, kernel.product() * self.s)

    def shifted_columns(self, x: Tensor) -> list[str]:
        """(N, g, S/g, pixels) for each position of the kernel."""
        c, b, none = self.c, self.c.b, Vector(self.c.b, [0] * self.leading)
        out, result = self.out[self.rest], []
        for position in np.ndindex(*(c.kernel[self.rest].known or ())):
            shift = c.begin[self.rest] - Vector(b, position) * self._attribute("dilations", self.rest)
            name = framed(c, x, join(b, none, shift), c.source, join(b, c.source[self.first], out)).name
            result.append(self._reshaped(name, *self._group, self.s, self.pixels))
        return result

    def sliced_columns(self, x: Tensor) -> str:
        """(N, g, b · S/g, pixels), of slices of x."""
        c, b = self.c, self.c.b
        name, needed = self._source(x)
        channels, last = self._channels, [c.axes - 1]
        for axis in reversed(self.rest if self.leading else last):
            if self._copies([axis]):
                name = self._sliced(name, axis, needed)
        others = range(0 if self.leading else c.axes - 1)
        if others and self._copies(others):
            # whole rows along the last axis, which a gather copies faster than slices and their concatenation
            lengths = needed[others]
            if len(others) > 1:
                row = c.kernel[last] * self.s
                name = self._reshaped(name, *self._group, row, lengths.product(), self.out[last])
            pixels, kernel = self._met(others, lengths)
            name = b.Gather(name, _grid(b, [kernel, pixels]), axis=channels + 1)
        return self._reshaped(name, *self._group, c.kernel[self.rest].product() * self.s, self.pixels)

    def _sliced(self, name: str, axis: int, needed: Vector) -> str:
        """The pixels that meet each of the kernel's along one axis, in the axis of the channels before them."""
        c, b = self.c, self.c.b
        stride, dilation = c.attrs["strides"][axis], c.attrs["dilations"][axis]
        along, last = self._channels + 1 + axis, axis == c.axes - 1
        starts, names = [k * dilation for k in range(c.kernel.entries[axis] or 1)], [name]
        if split := last and 1 < stride <= MANY_CELLS:
            # a Slice with a step copies pixels one by one; Split takes all phases of the stride at once
            lengths = join(b, c.source[self.first], needed[:-1], needed[-1] // stride, stride)
            phases = self._reshaped(name, *self._group, self.s, lengths)
            names = b.emit("Split", [phases], {"axis": along + 1, "num_outputs": stride}, outputs=stride)
        step = 1 if split else stride
        reach = (self.out[axis] - 1) * step + 1
        pieces = []
        for start in starts:
            phase, offset = names[start % len(names)], start // len(names)
            pieces.append(b.Slice(phase, b.ints([offset]), (reach + offset).name, b.ints([along]), b.ints([step])))
        name = pieces[0] if len(pieces) == 1 else b.Concat(*pieces, axis=self._channels)
        return b.Squeeze(name, b.ints([along + 1])) if split else name

    def _source(self, x: Tensor) -> tuple[str, Vector]:
        """X (N, g, S/g, …) with just the pixels that dy meets along the axes that go with it, and their number."""
        c, b = self.c, self.c.b
        needed = (self.out[self.rest] - 1) * self._attribute("strides", self.rest) + c.extent[self.rest]
        if self.slices:  # in whole strides along the last axis
            stride = c.attrs["strides"][-1]
            needed = join(b, needed[:-1], (self.out[-1] + (c.extent[-1] - 1) // stride) * stride)
        begin, source = c.begin[self.rest], c.source[self.rest]
        none = Vector(b, [0] * self.leading)
        name = padded(c, x, join(b, none, begin), join(b, none, needed - begin - source)).name
        if c.groups > 1:
            name = self._reshaped(name, *self._group, self.s, c.source[self.first], needed)
        return name, needed

    def _copies(self, axes: Sequence[int]) -> bool:
        """Whether along these axes the pixels that meet dy are not just those of the source in their order."""
        return self.c.kernel[axes].known != (1,) * len(axes) or any(self.c.attrs["strides"][a] > 1 for a in axes)

    def _met(self, axes: Sequence[int], lengths: Vector) -> list[tuple[Vector, Vector]]:
        """How far pixels of dy and positions of the kernel move what they meet, in pixels of axes of these lengths."""
        steps = _steps(self.c.b, lengths)
        return [
            (self.out[axes], self._attribute("strides", axes) * steps),
            (self.c.kernel[axes], self._attribute("dilations", axes) * steps),
        ]

    def _attribute(self, name: str, axes: Sequence[int]) -> Vector:
        return Vector(self.c.b, [self.c.attrs[name][axis] for axis in axes])

    @property
    def _group(self) -> list[Vector]:
        """The axis of the groups, where there are several."""
        return [Vector(self.c.b, [self.c.groups])] if self.c.groups > 1 else []

    @property
    def _channels(self) -> int:
        """The axis of the channels behind batch and group."""
        return 1 + len(self._group)

    def _reshaped(self, x: str | Tensor, *lengths: Vector) -> str:
        """X with these lengths behind its batch axis."""
        b, behind = self.c.b, join(self.c.b, *lengths)
        if self.c.batch.known is None and behind.known is not None and 0 not in behind.known:
            return b.Reshape(x, join(b, Vector(b, [0]), behind).name)  # 0: as it is
        return b.Reshape(x, join(b, self.c.batch, behind).name, allowzero=1)


def _steps(b: Body, lengths: Vector) -> Vector:
    """How far apart the neighbours along each axis are when the axes are merged."""
    return join(b, *(lengths[range(axis + 1, lengths.count)].product() for axis in range(lengths.count)))


def _grid(b: Body, runs: Sequence[tuple[Vector, Vector]], offsets: Vector | None = None) -> str:
    """Σ_r i_r · step_r + Σ offsets as a tensor with one axis for each i_r = 0 … count_r - 1; a run is of several r."""
    axes = [(counts[n], steps[n]) for counts, steps in runs for n in range(counts.count)]
    start = Vector(b, [0])
    for n in range(offsets.count if offsets else 0):
        start = start + (offsets or start)[n]
    sizes = join(b, *(count for count, _ in axes)).known
    numbers = join(b, start, *(step for _, step in axes)).known
    if sizes is not None and numbers is not None and prod(sizes) * 8 <= CONSTANT_BYTES:
        return b.constant(np.array(numbers[0] + np.tensordot(numbers[1:], np.indices(sizes), axes=1), np.int64))
    total = start.name
    for n, (count, step) in enumerate(axes):
        values = b.Mul(b.Range(b.int_scalar(0), b.Squeeze(count.name), b.int_scalar(1)), step.name)
        behind = len(axes) - 1 - n
        total = b.Add(total, b.Unsqueeze(values, b.ints(list(range(1, 1 + behind)))) if behind else values)
    return total
