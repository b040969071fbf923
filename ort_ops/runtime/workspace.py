"""Where the arrays of a plan's scratch lie: sizes are written once, offsets and the total follow. Plain Python.

    @dataclass(frozen=True, kw_only=True)
    class Offsets(Record):
        rows: int = 0
        sums: int = 0

    offsets, total = workspace(Offsets, rows=FLOAT * width, sums=FLOAT * taps)

The plan takes `total` bytes, compiled code finds an array at `scratch + p.offsets.rows`.
"""

from typing import TypeVar

from onnx_backprop.ort_ops.compiler.records import Record

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
