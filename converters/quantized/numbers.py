"""The numbers of quantised tensors: x = (q - z) · s, and the scales that numbers in floats ask for."""

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
_FEWEST = 60  # levels of a tensor below which its largest number says nothing of the range that was meant


@dataclass(frozen=True)
class Blocks:
    """Which numbers of a tensor share a scale: blocks of `lengths` elements along each axis.

    Scales have an axis for each of the tensor's, of as many entries as there are blocks, the last perhaps a short one.
    """

    shape: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many scales there are along each axis."""
        return tuple(
            -(-size // length) if length else size for size, length in zip(self.shape, self.lengths, strict=True)
        )

    def spread(self, values: Array) -> Array:
        """Scales or zero points, one or one for each block, as they stand beside each number."""
        if values.size == 1:
            return values.reshape(())
        values = values.reshape(self.counts)
        for axis, (size, length) in enumerate(zip(self.shape, self.lengths, strict=True)):
            if values.shape[axis] > 1 and length > 1:
                values = np.repeat(values, length, axis=axis).take(range(size), axis=axis)
        return values

    def extremes(self, array: Array) -> tuple[Array, Array]:
        """The least and the largest number of each block, with 0."""
        low = high = array.astype(np.float64)
        for axis, length in enumerate(self.lengths):
            if length > 1 and low.shape[axis]:
                starts = range(0, low.shape[axis], length)
                low = np.minimum.reduceat(low, starts, axis=axis)
                high = np.maximum.reduceat(high, starts, axis=axis)
        return np.minimum(low, 0), np.maximum(high, 0)


def blocks_along(shape: tuple[int, ...], scales: int, axis: int, length: int = 0) -> Blocks | None:
    """Blocks where there are some scales: one for all, one for each place along an axis, or for each few of these.

    None where the numbers do not fit. length: of the blocks along the axis; scales then are the number of all blocks.
    """
    if length:
        lengths = tuple(length if n == axis else 1 for n in range(len(shape)))
        blocks = Blocks(shape, lengths)
        return blocks if int(np.prod(blocks.counts)) == scales else None
    if scales == 1:
        return Blocks(shape, shape)
    if not -len(shape) <= axis < len(shape) or shape[axis] != scales:
        return None
    return Blocks(shape, tuple(1 if n == axis % len(shape) else size for n, size in enumerate(shape)))


def blocks_beside(shape: tuple[int, ...], scale: tuple[int, ...]) -> Blocks | None:
    """Blocks where scales broadcast to a tensor."""
    scale = (1,) * (len(shape) - len(scale)) + scale
    if len(scale) > len(shape) or any(n not in (1, size) for n, size in zip(scale, shape, strict=True)):
        return None
    return Blocks(shape, tuple(size if n == 1 else 1 for n, size in zip(scale, shape, strict=True)))


def packed(numbers: Array, bits: int, length: int) -> Array:
    """Numbers in `length` bytes along the last axis, zeros behind them."""
    each = 8 // bits
    padded = np.zeros((*numbers.shape[:-1], length * each), np.uint8)
    padded[..., : numbers.shape[-1]] = numbers
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(padded.reshape(*numbers.shape[:-1], length, each) << shifts, axis=-1)


@dataclass(frozen=True)
class Range:
    """The integers that numbers are rounded to: least to most, and the middle that stands for 0 where there is one."""

    least: int
    most: int

    @property
    def middle(self) -> int:
        """The zero point of a range that is symmetric."""
        return (self.least + self.most + 1) // 2


def used(integers: Array, zero: Array, whole: Range) -> Range:
    """The part of a type's range that a tensor was rounded to, with one zero point for 0 in its middle.

    7 bits of 8 are what quantisers use for processors whose sums saturate.
    """
    levels = int(np.abs(integers - zero).max(initial=0))
    if np.all(zero == whole.middle):
        levels = levels if levels >= min(_FEWEST, (whole.most - whole.middle) * 3 // 4) else whole.most - whole.middle
        return Range(max(whole.middle - levels, whole.least), min(whole.middle + levels, whole.most))
    low, high = int(integers.min(initial=zero.min())), int(integers.max(initial=zero.max()))  # with what stands for 0
    half = (whole.most - whole.least + 1) // 2
    return Range(low, high) if _FEWEST <= high - low <= half else whole


def scale_for(low: Array, high: Array, zero: Array | None, ints: Range) -> Array:
    """The least scale by which numbers from low to high fit, z being kept, or chosen afterwards where it is None."""
    if zero is None:
        return (high - low) / (ints.most - ints.least)
    up, down = ints.most - zero.astype(np.float64), zero.astype(np.float64) - ints.least
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.maximum(np.where(high > 0, high / up, 0), np.where(low < 0, -low / down, 0))
    return np.where(np.isfinite(needed), needed, 0)  # below a zero point at the end of the range everything is cut


def zero_for(low: Array, scale: Array, ints: Range) -> Array:
    """z, which makes 0 exact: the integer nearest to least - low / s."""
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(scale > 0, low / scale, 0)
    return np.clip(np.rint(ints.least - steps), ints.least, ints.most)


def rounded(array: Array, scale: Array, zero: Array, ints: Range) -> Array:
    """q = clip(round(x / s) + z), in int64; round(x / s + z) where z is no whole number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(scale != 0, array / scale, 0)
    return np.clip(np.rint(steps + zero % 1) + np.floor(zero), ints.least, ints.most).astype(np.int64)
