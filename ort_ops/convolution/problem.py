"""From attributes and shapes of the convolution operators to the parameters of compiled loops. Plain Python.

Everything is put in the terms of the correlation of `opset.correlation`: source (N, S, in…), destination (N, D, out…),
weights (D, S/g, k…), whatever layout the tensors have; three spatial axes, missing ones first, of length 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnx_backprop.opset.core.layout import Order, data_to_ncx
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.core.shapes import permute
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution import geometry, resolve
from onnx_backprop.ort_ops.compiler.llvm import ITEM_SIZE
from onnx_backprop.ort_ops.compiler.machine import VECTOR
from onnx_backprop.ort_ops.compiler.records import Record, Triple
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES

_DENSE: Triple = (1, 1, 1)
# Cycles of a core: a product of 32 x 32 x 32 in registers of matrices, splitting a number, copying one before that,
# packing a weight, adding 32 x 32 sums to those in memory, and fused products of one number and COLUMNS others
TILE_CYCLES, SPLIT_CYCLES, COPY_CYCLES, PACK_CYCLES, SUM_CYCLES, FUSED_CYCLES = 410, 1.6, 0.7, 4, 600, 1.7


@dataclass(frozen=True)
class Strides(Record):
    """Batch, channel and spatial strides in elements."""

    n: int
    c: int
    cells: Triple


@dataclass(frozen=True)
class Correlation(Record):
    """One correlation with the layouts of its tensors; `w_d` and `w_s` are the strides of D and S/g."""

    batch: int
    groups: int
    s: int  # channels per group
    d: int
    source_length: Triple
    out_length: Triple
    kernel: Triple
    strides: Triple
    dilations: Triple
    pads: Triple
    last: bool  # channels are the last axis
    source: Strides
    destination: Strides
    w_d: int
    w_s: int
    w_group: int
    w_kernel: Triple

    @property
    def depthwise(self) -> bool:
        """One channel per group on either side."""
        return self.s == self.d == 1 and self.groups > 1

    @property
    def adjoint(self) -> Correlation:
        """Source and destination exchanged, as for the data gradient; kernel, strides and pads are still its own."""
        return replace(
            self, s=self.d, d=self.s, source_length=self.out_length, out_length=self.source_length,
            source=self.destination, destination=self.source, w_d=self.w_s, w_s=self.w_d,
        )  # fmt: skip


def three(values: Sequence[int], fill: int) -> Triple:
    padded = (*[fill] * (3 - len(values)), *values)
    return padded[0], padded[1], padded[2]


def _strides(shape: Sequence[int], order: Order) -> tuple[int, int, Triple]:
    """Of a tensor whose axes that order takes to (batch, channels, cells), or to (D, S/g, kernel)."""
    strides = permute(tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))), order)
    n, c, *cells = (int(stride) for stride in strides if isinstance(stride, int))
    return n, c, three(cells, 0)


def correlation(
    attrs: Attributes, source: tuple[int, ...], destination: tuple[int, ...], weights: tuple[int, ...], order: Order, *,
    transposed: bool = False, infers: bool = False,
) -> Correlation:  # fmt: skip
    """Shapes in the operator's own layouts, already validated; `order` takes weights to (D, S/g, k…)."""
    x, y, w = spec.ncx(attrs, source), spec.ncx(attrs, destination), permute(weights, order)
    resolved = resolve(
        attrs, source=x, destination=None if infers else y, weights=w, names=("source", "destination", "weights"),
        transposed=transposed, infers_destination=infers,
    )  # fmt: skip
    assert resolved is not None
    geo = geometry(attrs, resolved)
    assert x is not None
    assert y is not None
    (n, s, *lengths), (_, d, *outs), (_, _, *kernel) = (
        [int(v) for v in dims if isinstance(v, int)] for dims in (x, y, w)
    )
    to_ncx = data_to_ncx(attrs["data_format"], len(source))
    w_d, w_s, w_kernel = _strides(weights, order)
    result = Correlation(
        batch=n, groups=geo.groups, s=s // geo.groups, d=d // geo.groups, source_length=three(lengths, 1),
        out_length=three(outs, 1), kernel=three(kernel, 1), strides=three(geo.strides, 1),
        dilations=three(geo.dilations, 1), pads=three(geo.pads_begin, 0), last=attrs["data_format"] == "NXC",
        source=Strides(*_strides(source, to_ncx)), destination=Strides(*_strides(destination, to_ncx)),
        w_d=w_d, w_s=w_s, w_group=d // geo.groups * w_d, w_kernel=w_kernel,
    )  # fmt: skip
    return _flattened(result)


def _flattened(c: Correlation) -> Correlation:
    """A kernel of one cell that takes every cell to itself knows no axes."""
    if c.kernel != _DENSE or c.strides != _DENSE or any(c.pads) or c.source_length != c.out_length:
        return c
    length = (1, 1, math.prod(c.source_length))
    source = replace(c.source, cells=(0, 0, c.source.cells[2]))
    destination = replace(c.destination, cells=(0, 0, c.destination.cells[2]))
    return replace(c, source_length=length, out_length=length, source=source, destination=destination)


def images_joined(c: Correlation) -> Correlation:
    """Images as a first axis, where that is free: bands then hold cells of several small ones."""
    free = c.kernel[0] == c.strides[0] == c.source_length[0] == c.out_length[0] == 1 and c.pads[0] == 0
    if not free or c.depthwise or c.batch < 2:
        return c

    def joined(tensor: Strides) -> Strides:
        return replace(tensor, n=0, cells=(tensor.n, *tensor.cells[1:]))

    return replace(
        c, batch=1, source_length=(c.batch, *c.source_length[1:]), out_length=(c.batch, *c.out_length[1:]),
        source=joined(c.source), destination=joined(c.destination),
    )  # fmt: skip


def fill_lanes(channels: int) -> bool:
    """Whether so many channels of NCX data fill enough of a vector's lanes to be turned into them."""
    return 4 * channels >= 3 * VECTOR


def typical(batch: int) -> int:
    """Images that a choice counts: then what is computed of one has the same bits, as where ranks divide a batch."""
    return 8 if 4 <= batch < 32 else batch


def shared_limit(c: Correlation, kind: int) -> int:
    """Bytes of scratch that a call may share between its threads: a pooled block and a part of what its tensors take.

    Tables of a plan, which are small beside the tensors unless a kernel is as large as an image, take the rest of
    a tenth.
    """
    images = c.batch * (c.s * math.prod(c.source_length) + c.d * math.prod(c.out_length))
    elements = c.groups * (images + c.d * c.s * math.prod(c.kernel))
    return POOL_BYTES + ITEM_SIZE[kind] * elements // 12


def bands_of(count: Triple, band: Triple) -> Triple:
    """How many bands there are along each axis."""
    return three([math.ceil(n / b) for n, b in zip(count, band, strict=True)], 1)
