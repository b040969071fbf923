"""Where the arrays of a plan's scratch lie: sizes are written once, offsets and the total follow. Plain Python.

And what is computed at a time, so that it fits.

    @dataclass(frozen=True, kw_only=True)
    class Offsets(Record):
        rows: int = 0
        sums: int = 0

    offsets, total = workspace(Offsets, rows=FLOAT * width, sums=FLOAT * taps)

The plan takes `total` bytes, compiled code finds an array at `scratch + p.offsets.rows`.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import TypeVar

from onnx_backprop.ort_ops.compiler.records import Record, Triple

LINE = 64  # bytes of a cache line, on which every array begins
FLOAT, DOUBLE, WORD = 4, 8, 8  # bytes of a float32, a float64 and an int64

R = TypeVar("R", bound=Record)


def workspace(record: type[R], **sizes: int) -> tuple[R, int]:
    """(the offset of each array in bytes, the end of the last one) of arrays of such sizes in bytes, in their order.

    Arrays that the record names and `sizes` does not have the offset 0 and are not used.
    """
    offsets: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        offsets[name] = -(-end // LINE) * LINE
        end = offsets[name] + size
    return record(**offsets), end


def rounds(groups: int, parts: int, part_bytes: int, limit: int) -> tuple[int, int]:
    """(groups, parts of a group) that are done at a time: all, some groups, or some parts of one, in even shares."""
    fit = max(1, limit // max(part_bytes, 1))
    if fit >= parts:
        return math.ceil(groups / math.ceil(groups / (fit // parts))), parts
    return 1, math.ceil(parts / math.ceil(parts / fit))


def band_of(count: Triple, floats: Callable[[list[int]], int], limit: int, least: Triple) -> tuple[Triple, int]:
    """The largest box of at most `limit` floats, cut along the first axes first, and its floats.

    floats: of a box of such lengths, at least as many for a longer one.
    """
    band = list(count)
    for axis in range(3):
        if floats(band) > limit and band[axis] > least[axis]:
            band[axis] = _cut_length(band, axis, floats, limit, least[axis])
    return (band[0], band[1], band[2]), floats(band)


def _cut_length(band: list[int], axis: int, floats: Callable[[list[int]], int], limit: int, least: int) -> int:
    """The length of one axis cut into as few even parts as are small enough, at least `least`."""

    def length(parts: int) -> int:
        return max(least, math.ceil(band[axis] / parts))

    def fits(parts: int) -> bool:
        return floats([*band[:axis], length(parts), *band[axis + 1 :]]) <= limit

    return length(2 + bisect_left(range(2, math.ceil(band[axis] / least)), True, key=fits))
