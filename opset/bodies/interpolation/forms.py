"""Wᵀ·x along one axis, in the form that suits the lengths.

- blocks: W repeats one small block along its diagonal (nearest by a whole factor, linear by an even one down). The
  axis is cut into such pieces by a Reshape, which copies nothing, and each is multiplied by the block.
- band: the source is cut into blocks of pixels, and every block needs a window of x only. Windows are gathered and
  multiplied by their part of W; the cost does not grow with the length of the axis.
- dense: all of W, for short axes.

Where the axis is the last, or little is behind it, the band is applied to the transposed tensor, so that the products
have long rows and windows are copied in long runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol

import numpy as np

from onnx_backprop.opset.bodies.builder import FLOAT, INT64, Body, Tensor
from onnx_backprop.opset.bodies.expressions import Expression, Numpy, Vector, join, product
from onnx_backprop.opset.maths.interpolation import Placed, Taps, destinations, matrix

CONSTANT_BYTES = 2**16
"""A larger constant is left to the session, which makes it from its rule when it starts: model files stay small."""

# Lengths of rows and blocks, and lengths from which a band is worth its copies; chosen by measurement
SHORT_ROW = 16
LONG_ROW = 32
BLOCK = 16
DENSE_INSIDE, DENSE_LAST = 25, 75
LONGEST = 2**20


class TapRule(Protocol):
    """Where an operator places the taps of one axis."""

    def taps(self, length: int, out: int) -> Taps | None:
        """The taps between known lengths; None when they depend on more than is known."""
        ...

    def place(self, length: Vector, out: Vector, xp: Numpy) -> Placed:
        """Source indices (int64) and weights of the taps at run time, (O, taps) both."""
        ...


@dataclass(frozen=True)
class PlacedBy:
    """The rule of an operator whose attributes say all: `rule` is given the two lengths, and numpy or `Numpy`."""

    rule: Callable[[Any, Any, Any], Placed]

    def place(self, length: Vector, out: Vector, xp: Numpy) -> Placed:
        return self.rule(length, out, xp)

    def taps(self, length: int, out: int) -> Taps | None:
        return Taps(*self.rule(length, out, np), length)


@dataclass(frozen=True)
class InterpolatedAxis:
    """One axis of the gradient: its place, the source's length, the rule of its taps, and whether W is the identity.

    `same` may be False where nobody looked.
    """

    index: int
    length: Vector
    rule: TapRule
    same: Vector


def one_axis(b: Body, x: Tensor | str, lengths: Sequence[Vector], axis: InterpolatedAxis) -> str:
    """Wᵀ·x along one axis, as a tensor of some shape with the same order of elements. X is not empty."""
    out, before = lengths[axis.index], lengths[: axis.index]
    behind = product(b, lengths[axis.index + 1 :])
    if axis.length.known and out.known:
        limit = DENSE_LAST if behind.value == 1 else DENSE_INSIDE
        taps = known_taps(axis, out)
        block = None if taps is None else repeated_block(taps)
        width = short_row(behind) or 1
        if block is not None and block.size * width * width * 4 <= CONSTANT_BYTES:
            return _blocks(b, x, block, axis.length.value, behind)
        if axis.length.value * out.value <= limit * (axis.length.value + out.value):
            return _dense(b, x, axis, out, behind)
    return _band(b, x, axis, out, before, behind)


def known_taps(axis: InterpolatedAxis, out: Vector) -> Taps | None:
    """The taps, where they are known and few enough to look at."""
    if axis.length.value is None or out.value is None or out.value > LONGEST:
        return None
    return axis.rule.taps(axis.length.value, out.value)


def short_row(behind: Vector) -> int | None:
    """The length of rows that are too short to work on; None for longer ones and unknown ones."""
    return behind.value if behind.known and behind.value < SHORT_ROW else None


def placed(b: Body, axis: InterpolatedAxis, out: Vector) -> tuple[Expression, Expression]:
    """The taps as nodes place them: indices (int64) and weights (float32), (O, taps)."""
    indices, weights = axis.rule.place(axis.length, out, Numpy(b))
    return indices, weights.cast(FLOAT)


def _dense(b: Body, x: Tensor | str, axis: InterpolatedAxis, out: Vector, behind: Vector) -> str:
    if behind.value == 1:
        return b.MatMul(b.Reshape(x, join(b, -1, out).name), _matrix(b, axis, out, transposed=False))
    return b.MatMul(_matrix(b, axis, out, transposed=True), b.Reshape(x, join(b, -1, out, behind).name))


def _matrix(b: Body, axis: InterpolatedAxis, out: Vector, *, transposed: bool) -> str:
    """W (O, I) or its transpose."""
    taps = known_taps(axis, out) if axis.length.value * out.value * 4 <= CONSTANT_BYTES else None
    if taps is not None:
        w = matrix(taps).astype(np.float32)
        return b.constant(np.ascontiguousarray(w.T) if transposed else w)
    indices, weights = placed(b, axis, out)
    zeros = b.Expand(b.float_scalar(0), join(b, out, axis.length).name)
    w = b.ScatterElements(zeros, indices.name, weights.name, axis=1, reduction="add")
    return b.Transpose(w, perm=[1, 0]) if transposed else w


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


def _blocks(b: Body, x: Tensor | str, block: np.ndarray, length: int, behind: Vector) -> str:
    rows, columns = block.shape
    if behind.known and behind.value >= 4 * LONG_ROW and columns == 1 and np.all(block == 1):
        return b.ReduceSum(b.Reshape(x, join(b, -1, rows, behind).name), b.ints([1]), keepdims=0)
    width = short_row(behind)
    # as many blocks side by side as make a product of a fair size
    count, size = length // columns, max(rows, columns) * (width or 1)
    wanted = max((BLOCK if width is None else LONG_ROW) // size, 1)
    together = max(n for n in range(1, min(wanted, count) + 1) if count % n == 0)
    w = np.kron(np.eye(together, dtype=np.float32), block)
    if width is not None:  # every entry of the short rows behind the axis by itself
        w = np.kron(w, np.eye(width, dtype=np.float32))
        return b.MatMul(b.Reshape(x, b.ints([-1, w.shape[0]])), b.constant(w))
    return b.MatMul(b.constant(np.ascontiguousarray(w.T)), b.Reshape(x, join(b, -1, w.shape[0], behind).name))


def _band(
    b: Body, x: Tensor | str, axis: InterpolatedAxis, out: Vector, before: Sequence[Vector], behind: Vector
) -> str:
    row = Vector(b, [1]) if short_row(behind) is None else _row(b, before)
    if row.value == 1:
        return _banded_product(b, x, axis, out, behind)
    transposed = b.Transpose(b.Reshape(x, join(b, -1, row, out * behind).name), perm=[0, 2, 1])
    result = _banded_product(b, transposed, axis, out, row * behind)
    return b.Transpose(b.Reshape(result, join(b, -1, axis.length * behind, row).name), perm=[0, 2, 1])


def _row(b: Body, before: Sequence[Vector]) -> Vector:
    """The product of as many lengths just before the axis as make a long row."""
    row = Vector(b, [1])
    for length in reversed(before):
        if row.value is None or row.value >= LONG_ROW:
            break
        row = row * length
    return row


def _banded_product(b: Body, x: Tensor | str, axis: InterpolatedAxis, out: Vector, behind: Vector) -> str:
    """Wᵀ·x of a tensor viewed as (…, O, behind)."""
    windows, bands, padded = _windows(b, axis, out)
    gathered = b.Gather(b.Reshape(x, join(b, -1, out, behind).name), windows, axis=1)
    result = b.Reshape(b.MatMul(bands, gathered), join(b, -1, padded, behind).name)
    if padded.known and padded.known == axis.length.known:
        return result
    return b.Slice(result, b.ints([0]), axis.length.name, b.ints([1]))


def _windows(b: Body, axis: InterpolatedAxis, out: Vector) -> tuple[str, str, Vector]:
    """Indices (n, w) into the axis, the part of Wᵀ (n, block, w) that each block needs of them, and n·block."""
    length = axis.length
    if length.known and out.known:
        block = block_length(length.value, out.value)
        taps = known_taps(axis, out) if length.value * 4 <= CONSTANT_BYTES else None
        if taps is not None:
            windows, bands = constant_windows(taps, block)
            if windows.nbytes + bands.nbytes <= CONSTANT_BYTES:
                return b.constant(windows), b.constant(bands), Vector(b, [len(windows) * block])
        return _placed_windows(b, axis, out, Vector(b, [block]))
    wanted = length * BLOCK // out
    return _placed_windows(b, axis, out, wanted.at_least(BLOCK // 4).at_most(BLOCK * 4))


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


def _placed_windows(b: Body, axis: InterpolatedAxis, out: Vector, block: Vector) -> tuple[str, str, Vector]:
    """The same from the taps as nodes place them. A tap of weight 0 goes to a block of its own, behind the last."""
    xp, flat = Numpy(b), b.ints([-1])
    count: Vector = (axis.length + block - 1) // block
    indices, weights = placed(b, axis, out)
    used = ~weights.equal(0.0)
    number = used.where(indices // block, count)
    o = destinations(out, xp)
    places = b.Reshape(number.name, flat)
    targets = b.Reshape(b.Expand(o.name, b.Shape(indices.name)), flat)

    def extreme(initial: Vector | int, reduction: str) -> Expression:
        empty = b.Expand(join(b, initial).name, (count + 1).name)
        extremes = b.ScatterElements(empty, places, targets, axis=0, reduction=reduction)
        return Expression(b, b.Slice(extremes, b.ints([0]), count.name), INT64)

    first, last = extreme(out, "min"), extreme(-1, "max")
    width = Vector(b, [None], b.Max(b.ReduceMax((last - first + 1).name, keepdims=1), b.ints([1])))
    first = xp.maximum(xp.minimum(first, out - width), 0)
    windows = xp.expand_dims(first, 1) + xp.expand_dims(xp.arange(width), 0)
    start = Expression(b, b.Gather(first.name, xp.minimum(number, count - 1).name), INT64)
    position = used.where(indices * width + o - start, 0)
    empty = b.Expand(b.float_scalar(0), (count * block * width).name)
    bands = b.ScatterElements(
        empty, b.Reshape(position.name, flat), b.Reshape(weights.name, flat), axis=0, reduction="add"
    )
    return windows.name, b.Reshape(bands, join(b, count, block, width).name), count * block
