"""Wᵀ·x along one axis, in the form that suits the lengths.

- blocks: W repeats one small block along its diagonal (nearest by a whole factor, linear by an even one down). The
  axis is cut into such pieces by a Reshape, which copies nothing, and each is multiplied by the block.
- band: the source is cut into blocks of pixels, and every block needs a window of x only. Windows are gathered and
  multiplied by their part of W; the cost does not grow with the length of the axis.
- dense: all of W, for short axes.

Where the axis is the last, or little is behind it, the band is applied to the transposed tensor, so that the products
have long rows and windows are copied in long runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol

import numpy as np

from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.interpolation.lengths import Length, join, length_product, scalar, vector
from onnx_backprop.opset.maths.interpolation import Taps, matrix

CONSTANT_BYTES = 2**16
"""A larger constant is left to the session, which makes it from its rule when it starts: model files stay small."""

# Lengths of rows and blocks, and lengths from which a band is worth its copies; chosen by measurement
SHORT_ROW = 16
LONG_ROW = 32
BLOCK = 16
DENSE_INSIDE, DENSE_LAST = 25, 75
LONGEST = 2**20


Truth = bool | str
"""Known, or the name of a bool tensor with one entry."""


class TapRule(Protocol):
    """Where an operator places the taps of one axis."""

    def same(self, b: Body, length: Length, out: Length, /) -> Truth:
        """Whether W is the identity. False may also mean that nobody looked."""
        ...

    def taps(self, length: int, out: int) -> Taps | None:
        """The taps between known lengths; None when they depend on more than is known."""
        ...

    def emit(self, b: Body, length: Length, out: Length, along: int) -> tuple[str, str]:
        """Source indices (int64) and weights (float32) of the taps at run time, both of the same 2-D shape.

        Destination indices run on the axis `along`, the taps of one on the other.
        """
        ...


@dataclass(frozen=True)
class Axis:
    """One axis of the gradient: its place, the source's length and the rule of its taps."""

    index: int
    length: Length
    rule: TapRule


def one_axis(b: Body, x: Tensor | str, lengths: Sequence[Length], axis: Axis) -> str:
    """Wᵀ·x along one axis, as a tensor of some shape with the same order of elements. X is not empty."""
    out, before = lengths[axis.index], lengths[: axis.index]
    behind = length_product(b, lengths[axis.index + 1 :])
    if isinstance(axis.length, int) and isinstance(out, int):
        limit = DENSE_LAST if behind == 1 else DENSE_INSIDE
        taps = known_taps(axis, out)
        block = None if taps is None else repeated_block(taps)
        width = short_row(behind) or 1
        if block is not None and block.size * width * width * 4 <= CONSTANT_BYTES:
            return _blocks(b, x, block, axis.length, behind)
        if axis.length * out <= limit * (axis.length + out):
            return _dense(b, x, axis, out, behind)
    return _band(b, x, axis, out, before, behind)


def known_taps(axis: Axis, out: Length) -> Taps | None:
    """The taps, where they are known and few enough to look at."""
    if not isinstance(axis.length, int) or not isinstance(out, int) or out > LONGEST:
        return None
    return axis.rule.taps(axis.length, out)


def short_row(behind: Length) -> int | None:
    """The length of rows that are too short to work on; None for longer ones and unknown ones."""
    return behind if isinstance(behind, int) and behind < SHORT_ROW else None


# ----- dense ---------------------------------------------------------------------------------------------------------


def _dense(b: Body, x: Tensor | str, axis: Axis, out: Length, behind: Length) -> str:
    if behind == 1:
        return b.MatMul(b.Reshape(x, join(b, [-1, out])), _matrix(b, axis, out, transposed=False))
    return b.MatMul(_matrix(b, axis, out, transposed=True), b.Reshape(x, join(b, [-1, out, behind])))


def _matrix(b: Body, axis: Axis, out: Length, *, transposed: bool) -> str:
    """W (O, I) or its transpose."""
    if isinstance(axis.length, int) and isinstance(out, int) and axis.length * out * 4 <= CONSTANT_BYTES:
        taps = known_taps(axis, out)
        if taps is not None:
            w = matrix(taps).astype(np.float32)
            return b.constant(np.ascontiguousarray(w.T) if transposed else w)
    along = 1 if transposed else 0
    indices, weights = axis.rule.emit(b, axis.length, out, along)
    order = (axis.length, out) if transposed else (out, axis.length)
    zeros = b.Expand(b.float_scalar(0), join(b, order))
    return b.ScatterElements(zeros, indices, weights, axis=1 - along, reduction="add")


# ----- blocks --------------------------------------------------------------------------------------------------------


def repeated_block(taps: Taps) -> np.ndarray | None:
    """The smallest block (O/n, I/n), float32, that W repeats along its diagonal; None if there is no small one."""
    out, length = len(taps.indices), taps.length
    count = gcd(out, length)
    rows, columns = out // count, length // count
    if count == 1 or rows * columns > DENSE_INSIDE * (rows + columns) or rows * columns * 4 > CONSTANT_BYTES:
        return None
    weights = taps.weights.astype(np.float32)
    number = np.arange(out)[:, None] // rows
    used = weights != 0
    if np.any(used & (taps.indices // columns != number)):
        return None
    inside = np.where(used, taps.indices - number * columns, 0).reshape(count, rows, -1)
    weights = weights.reshape(count, rows, -1)
    if np.any(inside != inside[0]) or np.any(weights != weights[0]):
        return None
    return matrix(Taps(inside[0], weights[0].astype(np.float64), columns)).astype(np.float32)


def _blocks(b: Body, x: Tensor | str, block: np.ndarray, length: int, behind: Length) -> str:
    rows, columns = block.shape
    if isinstance(behind, int) and behind >= 4 * LONG_ROW and columns == 1 and np.all(block == 1):
        return b.ReduceSum(b.Reshape(x, b.ints([-1, rows, behind])), b.ints([1]), keepdims=0)
    width = short_row(behind)
    # as many blocks side by side as make a product of a fair size
    count, size = length // columns, max(rows, columns) * (width or 1)
    wanted = max((BLOCK if width is None else LONG_ROW) // size, 1)
    together = max(n for n in range(1, min(wanted, count) + 1) if count % n == 0)
    w = np.kron(np.eye(together, dtype=np.float32), block)
    if width is not None:  # every entry of the short rows behind the axis by itself
        w = np.kron(w, np.eye(width, dtype=np.float32))
        return b.MatMul(b.Reshape(x, b.ints([-1, w.shape[0]])), b.constant(w))
    return b.MatMul(b.constant(np.ascontiguousarray(w.T)), b.Reshape(x, join(b, [-1, w.shape[0], behind])))


# ----- band ----------------------------------------------------------------------------------------------------------


def _band(b: Body, x: Tensor | str, axis: Axis, out: Length, before: Sequence[Length], behind: Length) -> str:
    row = 1 if short_row(behind) is None else _row(b, before)
    if row == 1:
        return _banded_product(b, x, axis, out, behind)
    across = length_product(b, [out, behind])
    turned = b.Transpose(b.Reshape(x, join(b, [-1, row, across])), perm=[0, 2, 1])
    product = _banded_product(b, turned, axis, out, length_product(b, [row, behind]))
    shape = join(b, [-1, length_product(b, [axis.length, behind]), row])
    return b.Transpose(b.Reshape(product, shape), perm=[0, 2, 1])


def _row(b: Body, before: Sequence[Length]) -> Length:
    """The product of as many lengths just before the axis as make a long row."""
    row: Length = 1
    for length in reversed(before):
        if isinstance(row, str) or row >= LONG_ROW:
            break
        row = length_product(b, [row, length])
    return row


def _banded_product(b: Body, x: Tensor | str, axis: Axis, out: Length, behind: Length) -> str:
    """Wᵀ·x of a tensor viewed as (…, O, behind)."""
    windows, bands, padded = _windows(b, axis, out)
    gathered = b.Gather(b.Reshape(x, join(b, [-1, out, behind])), windows, axis=1)
    product = b.Reshape(b.MatMul(bands, gathered), join(b, [-1, padded, behind]))
    if padded == axis.length:
        return product
    return b.Slice(product, b.ints([0]), vector(b, axis.length), b.ints([1]))


def _windows(b: Body, axis: Axis, out: Length) -> tuple[str, str, Length]:
    """Indices (n, w) into the axis, the part of Wᵀ (n, block, w) that each block needs of them, and n·block."""
    length = axis.length
    if isinstance(length, int) and isinstance(out, int):
        block = block_length(length, out)
        taps = known_taps(axis, out) if length * 4 <= CONSTANT_BYTES else None
        if taps is not None:
            windows, bands = constant_windows(taps, block)
            if windows.nbytes + bands.nbytes <= CONSTANT_BYTES:
                return b.constant(windows), b.constant(bands), len(windows) * block
        return _emitted_windows(b, axis, out, block, -(-length // block))
    sixteen = b.Mul(b.int_scalar(BLOCK), scalar(b, length))
    wanted = b.Div(sixteen, scalar(b, out))
    name = b.Reshape(b.Min(b.Max(wanted, b.int_scalar(BLOCK // 4)), b.int_scalar(BLOCK * 4)), b.ints([1]))
    one = b.ints([1])
    count = b.Div(b.Sub(b.Add(vector(b, length), name), one), name)
    return _emitted_windows(b, axis, out, name, count)


def block_length(length: int, out: int) -> int:
    """How many source pixels share a window: so many that they and the window are about BLOCK long.

    A divisor of the length if one is near.
    """
    wanted = min(max(BLOCK * length // out, BLOCK // 4), BLOCK * 4, length)
    near = [n for n in range(max(wanted // 2, 1), min(2 * wanted, length) + 1) if length % n == 0]
    return min(near, key=lambda n: max(n / wanted, wanted / n)) if near else wanted


def constant_windows(taps: Taps, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (n, w) and the parts of Wᵀ (n, block, w), float32."""
    out, count = len(taps.indices), -(-taps.length // block)
    o = np.broadcast_to(np.arange(out)[:, None], taps.indices.shape)
    used = taps.weights != 0
    o, indices, weights = o[used], taps.indices[used], taps.weights[used]
    first, last = np.full(count, out), np.full(count, -1)
    np.minimum.at(first, indices // block, o)
    np.maximum.at(last, indices // block, o)
    width = max(int((last - first).max()) + 1, 1)
    first = np.clip(first, 0, out - width)
    bands = np.zeros((count, block, width))
    np.add.at(bands, (indices // block, indices % block, o - first[indices // block]), weights)
    return first[:, None] + np.arange(width), bands.astype(np.float32)


def _emitted_windows(b: Body, axis: Axis, out: Length, block: Length, count: Length) -> tuple[str, str, Length]:
    """The same from the taps as nodes make them. A tap of weight 0 goes to a block of its own, behind the last."""
    zero, one = b.int_scalar(0), b.int_scalar(1)
    indices, weights = axis.rule.emit(b, axis.length, out, 1)
    used = b.Not(b.Equal(weights, b.float_scalar(0)))
    n, size = scalar(b, count), scalar(b, out)
    number = b.Where(used, b.Div(indices, scalar(b, block)), n)
    flat = b.ints([-1])
    o = b.Unsqueeze(b.Range(zero, size, one), b.ints([0]))
    places, destinations = b.Reshape(number, flat), b.Reshape(b.Expand(o, b.Shape(indices)), flat)
    slots = join(b, [count + 1]) if isinstance(count, int) else b.Add(count, b.ints([1]))

    def extreme(initial: str, reduction: str) -> str:
        found = b.ScatterElements(b.Expand(initial, slots), places, destinations, axis=0, reduction=reduction)
        return b.Slice(found, b.ints([0]), vector(b, count))

    first, last = extreme(size, "min"), extreme(b.int_scalar(-1), "max")
    width = b.Max(b.ReduceMax(b.Add(b.Sub(last, first), one), keepdims=0), one)
    first = b.Max(b.Min(first, b.Sub(size, width)), zero)
    windows = b.Add(b.Unsqueeze(first, b.ints([1])), b.Unsqueeze(b.Range(zero, width, one), b.ints([0])))
    start = b.Gather(first, b.Min(number, b.Sub(n, one)))
    cell = b.Where(used, b.Sub(b.Add(b.Mul(indices, width), o), start), zero)
    padded = length_product(b, [count, block])
    wide = b.Reshape(width, b.ints([1]))
    cells = b.Expand(b.float_scalar(0), b.Mul(vector(b, padded), wide))
    bands = b.ScatterElements(cells, b.Reshape(cell, flat), b.Reshape(weights, flat), axis=0, reduction="add")
    shape = b.Concat(vector(b, count), vector(b, block), wide, axis=0)
    return windows, b.Reshape(bands, shape), padded
