"""What of a quantised file stands for which floats: weights, and the scales of values that each run computes."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.converters.quantized.numbers import Array, Blocks, Range, packed, rounded
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.graphs.edit import replace_values
from onnx_backprop.opset.maths.packed import unpacked

_BITS: dict[int, int] = {TensorProto.INT4: -4, TensorProto.UINT4: 4, TensorProto.INT8: -8, TensorProto.UINT8: 8}
_BITS |= {TensorProto.INT16: -16, TensorProto.UINT16: 16, TensorProto.INT32: -32, TensorProto.UINT32: 32}
INTEGERS = frozenset(_BITS)
_AT_ONCE = 2**18  # numbers of several types that are held beside a tensor while it is made


def array_of(tensor: TensorProto) -> Array:
    """A tensor's numbers; those of integers in int64."""
    array = to_array(tensor)
    return array.astype(np.int64) if tensor.data_type in INTEGERS else array


def range_of(element: int) -> Range:
    """The range of an integer type."""
    bits = _BITS[element]
    return Range(-(1 << (-bits - 1)), (1 << (-bits - 1)) - 1) if bits < 0 else Range(0, (1 << bits) - 1)


@dataclass(eq=False)
class Activation:
    """A scale of the file for values that a run computes: `values`, their names in the float model.

    ints: the integers that a Clip leaves, None for all of the type.
    """

    scale: TensorProto
    zero: TensorProto | None
    element: int
    values: list[str] = field(default_factory=list)
    ints: Range | None = None

    @property
    def whole(self) -> Range:
        """The range of its integers' type."""
        return range_of(self.element)

    def zeros(self) -> Array:
        """The zero point, 0 where the file has none."""
        return np.zeros(1) if self.zero is None else array_of(self.zero)

    def write_zeros(self, zero: Array) -> None:
        """Put another zero point in the file."""
        assert self.zero is not None
        put(self.zero, zero)


@dataclass(eq=False)
class Weight:
    """Integers of the file and the float tensor `name` that they stand for.

    stored: None where the file has floats, and rounds them itself. perm: the axes of the float tensor among those of
    the integers. bits: of numbers that are packed along the last axis of `stored`, blocks of it beside each other.
    scale: None for a bias whose scale is the product of those of its input and its weight, times `factor`; `of`: these
    two, for a bias of any kind. readers: nodes of the file that read the integers, and as which input.
    """

    name: str
    stored: TensorProto | None
    scale: TensorProto | None
    zero: TensorProto | None
    blocks: Blocks
    element: int
    perm: tuple[int, ...] = ()
    bits: int = 0
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))
    of: "tuple[Activation, Weight] | None" = None
    factor: float = 1.0
    readers: list[tuple[NodeProto, int]] = field(default_factory=list)

    @property
    def whole(self) -> Range:
        """The range of its integers."""
        return Range(0, (1 << self.bits) - 1) if self.bits else range_of(self.element)

    def problem(self) -> str:
        """What does not fit together; "" where all does."""
        count = int(np.prod(self.blocks.counts))
        if not count:
            return f"{self.name!r} has no elements"
        rows, columns = self.blocks.counts if self.bits else (1, 1)
        fits = {1, count}
        packed_zeros = self.bits and self.zero is not None and self.zero.data_type == TensorProto.UINT8
        for what, tensor in (("scale", self.scale), ("zero point", self.zero)):
            if tensor is not None:
                size = int(np.prod(tensor.dims))
                expected = {rows * -(-columns * self.bits // 8)} if packed_zeros and tensor is self.zero else fits
                if size not in expected:
                    return f"{self.name!r} has {size} elements of its {what}, expected {max(expected)}"
        if self.scale is not None and self.scale.data_type not in FLOATS:
            return f"the scale of {self.name!r} is not of floats"
        if not np.all(np.isfinite(self.zeros())):
            return f"the zero point of {self.name!r} is not finite"
        if self.bits and self.stored is not None:
            rows, columns = self.blocks.shape
            size = int(np.prod(self.stored.dims))
            if not rows or size % rows or size // rows * 8 < columns * self.bits:
                return f"{self.name!r} has {size} bytes for {rows} rows of {columns} numbers"
        return ""

    def integers(self) -> Array:
        """The numbers of the file, unpacked, in their order there."""
        assert self.stored is not None
        array = array_of(self.stored)
        if self.bits:
            rows = array.astype(np.uint8).reshape(self.blocks.shape[0], -1)
            array = unpacked(rows, self.bits)[..., : self.blocks.shape[1]].astype(np.int64)
        return array.reshape(self.blocks.shape)

    def zeros(self) -> Array:
        """The zero points, one or one for each scale."""
        if self.zero is None:
            return np.array(1 << (self.bits - 1) if self.bits else 0)
        array = array_of(self.zero)
        if self.bits and self.zero.data_type == TensorProto.UINT8:
            rows, columns = self.blocks.counts
            return unpacked(array.astype(np.uint8).reshape(rows, -1), self.bits)[:, :columns].astype(np.int64)
        return array

    def scales(self) -> Array:
        """The scales of the file."""
        if self.scale is not None:
            return array_of(self.scale)
        assert self.of is not None
        return product_of(self.of, self.factor)

    def floats(self) -> Array:
        """(q - z) · s."""
        if self.bits and self.stored is not None and self.blocks.lengths[0] == 1:
            floats = self._packed_floats(to_array(self.stored).astype(np.uint8, copy=False))
        else:
            steps = self.integers() - self.blocks.spread(self.zeros())
            scale = self.blocks.spread(self.scales())
            floats = (steps.astype(np.float64) * scale.astype(np.float64)).astype(self.dtype)
        return floats.transpose(self.perm) if self.perm else floats

    def _packed_floats(self, stored: Array) -> Array:
        """Those of numbers packed along rows, some rows at a time: the longer types are of these alone."""
        rows, columns = self.blocks.shape
        zeros, scales = (
            np.broadcast_to(x, self.blocks.counts) if x.size == 1 else x.reshape(self.blocks.counts)
            for x in (self.zeros(), self.scales())
        )
        result = np.empty((rows, columns), self.dtype)
        stored, step = stored.reshape(rows, -1), max(1, _AT_ONCE // columns)
        for first in range(0, rows, step):
            some = slice(first, min(first + step, rows))
            blocks = Blocks((some.stop - first, columns), self.blocks.lengths)
            steps = unpacked(stored[some], self.bits)[:, :columns] - blocks.spread(zeros[some]).astype(np.float64)
            result[some] = steps * blocks.spread(scales[some])
        return result

    def as_stored(self, floats: Array) -> Array:
        """An array of the float tensor with the axes of the integers."""
        return floats.transpose(np.argsort(self.perm)) if self.perm else floats

    def rounded(self, floats: Array, scale: Array, zero: Array) -> Array:
        """The numbers of other floats as the file has them, packed, for a scale and a zero point."""
        array, zeros = self.as_stored(floats).astype(np.float64), self.blocks.spread(zero)
        q = rounded(array, self.blocks.spread(scale.astype(np.float64)), zeros, self.whole)
        if self.bits:
            assert self.stored is not None
            q = packed(q.astype(np.uint8), self.bits, int(np.prod(self.stored.dims)) // self.blocks.shape[0])
        return q

    def write_zeros(self, zero: Array) -> None:
        """Put other zero points in the file."""
        assert self.zero is not None
        if self.bits and self.zero.data_type == TensorProto.UINT8:
            rows, columns = self.blocks.counts
            zero = packed(zero.reshape(rows, columns).astype(np.uint8), self.bits, -(-columns * self.bits // 8))
        put(self.zero, zero)


@dataclass(frozen=True)
class Quantized:
    """A value of integers: the float value that it stands for, and the names of its scale and zero point."""

    value: str
    scale: str
    zero: str
    source: Activation | Weight | None = None


@dataclass(frozen=True)
class Product:
    """Sums of products of integers, before scales make floats of them.

    node: what has made them. scales: those of operands that runs quantise; the weight's is one more. factors: scales
    that they have been multiplied by. bias: floats that were added as integers, divided by the product of `divisor`.
    """

    node: NodeProto
    scales: tuple[str, ...]
    weighted: bool
    factors: tuple[str, ...] = ()
    bias: str = ""
    divisor: tuple[str, ...] = ()


def product_of(of: tuple[Activation, Weight], factor: float) -> Array:
    """The scale of a bias: that of the input times those of the weight."""
    x, weight = of
    return array_of(x.scale).astype(np.float64).reshape(()) * weight.scales().astype(np.float64).reshape(-1) * factor


def put(tensor: TensorProto, array: Array) -> None:
    """Give a tensor other numbers of its type, in its shape."""
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    with np.errstate(all="ignore"):
        held = np.asarray(array).astype(dtype)
    if tensor.data_type in FLOATS and not ((held != 0) & np.isfinite(held)).all(where=np.asarray(array) != 0):
        raise InvalidArgumentError(
            f"trained: {tensor.name!r} of type {dtype.name} cannot hold the scale that the trained numbers need. "
            "Keep the floats"
        )
    replace_values(tensor, held.reshape(tuple(tensor.dims)))
