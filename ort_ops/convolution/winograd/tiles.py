"""Which correlations are computed through Winograd's tiles, of which size, and how these are numbered. Plain Python."""

import math
from dataclasses import replace

from onnx_backprop.ort_ops.compiler.llvm import F32
from onnx_backprop.ort_ops.compiler.machine import matrix_tiles
from onnx_backprop.ort_ops.convolution import block_sizes
from onnx_backprop.ort_ops.convolution.problem import Correlation, three, typical
from onnx_backprop.ort_ops.convolution.winograd.kernel import TileRows, thread_scratch
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS
from onnx_backprop.ort_ops.vector.matrix_tiles import SIDE

MIN_CHANNELS = 16  # on either side of a group: below, the transforms outweigh what they save
# Below so many tiles, times the geometric mean of the channels, sums over taps are faster: transformed weights and rows
# of tiles that do not fill registers cost more than is saved (docs/notes/large_weights.md).
MIN_WORK = 14_000
WORK_SHARE = 8  # times as much, where there are registers of matrices
MOST_CHANNELS = 32  # whose square is that of the products of channels for a tile: transforming weights takes longer
FEW_CHANNELS = 64  # up to which MIN_WORK holds for weight gradients, which transform tiles alone
# Tiles of 4×4 cells are used for images of so many cells along either axis, and for weight gradients of fewer, of which
# there are at least so many tiles of 2×2 for one of them: at the end of a row, cells of tiles are not needed.
LARGE_IMAGE, LARGE_IMAGE_OF_WEIGHTS = 12, 7
# Smaller images, and more channels, have weight gradients by tiles where there are registers of matrices, too.
SMALL_IMAGE, MANY_CHANNELS = 4, 256
SMALL_TILES = 3.2
MOST_EMPTY = 4  # times the phases that have a cell: tiles are computed of all


def suits(c: Correlation, *, adjoint: bool = False) -> bool:
    """Two or three axes, along the last two 3×3, and channels and tiles enough; adjoint: for the data gradient."""
    if matrix_tiles() and (c.d if adjoint else c.s) >= SIDE:
        return False  # registers of matrices are as fast, and round less
    return is_served(c) and enough(c) and c.s * c.d <= MOST_CHANNELS**2 * _all_tiles(c)


def enough(c: Correlation) -> bool:
    """Whether there are tiles and channels enough."""
    return _all_tiles(c) * math.sqrt(c.s * c.d) >= MIN_WORK * (WORK_SHARE if matrix_tiles() else 1)


def _all_tiles(c: Correlation) -> int:
    return typical(c.batch) * c.out_length[0] * _phases(c) * math.prod(_tiles(c, 2))


def _phases(c: Correlation) -> int:
    """Of an image, those that have a cell."""
    return math.prod(min(d, n) for d, n in zip(c.dilations[1:], c.out_length[1:], strict=True))


def is_served(c: Correlation) -> bool:
    if c.last or c.kernel[1:] != (3, 3) or c.strides != (1, 1, 1) or min(c.s, c.d) < MIN_CHANNELS:
        return False
    if math.prod(c.dilations[1:]) > MOST_EMPTY * _phases(c):
        return False
    if matrix_tiles() and (*c.dilations[1:], c.kernel[0]) != (1, 1, 1):
        return False  # registers of matrices are faster
    # of a row of tiles; where it is no pooled block, the sum over taps is used, which cuts rows
    return _row_fits(c, 2)


def _row_fits(c: Correlation, size: int) -> bool:
    """Whether a thread's scratch for a row of tiles, of the correlation or of its adjoint, is a pooled block."""
    longer, most = tuple(map(max, c.source_length, c.out_length)), max(c.s, c.d)
    r = number_tiles(replace(c, out_length=longer, s=most, d=most), F32, size)
    return thread_scratch(r, 1, math.ceil(most / ROWS))[1] <= POOL_BYTES


def size_of(c: Correlation) -> int:
    """Cells of a tile along either axis; not told from the batch, as whether tiles are used is."""
    return 4 if _large_tiles_pay(c, LARGE_IMAGE) and _row_fits(c, 4) else 2


def weights_size_of(c: Correlation) -> int:
    large = _large_tiles_pay(c, LARGE_IMAGE_OF_WEIGHTS) and sum_floats(c, 4) <= block_sizes.MAX_SUM_FLOATS
    return 4 if large else 2


def _large_tiles_pay(c: Correlation, least: int) -> bool:
    small, large = (math.prod(_tiles(c, size)) for size in (2, 4))
    return min(_tiles(c, 1)) >= least and small >= SMALL_TILES * large


def sum_floats(c: Correlation, size: int) -> int:
    """Floats of a weight gradient before it is transformed back."""
    return (size + 2) ** 2 * c.kernel[0] * c.groups * c.d * c.s


def _tiles(c: Correlation, size: int) -> tuple[int, int]:
    """Along both axes of the longest phase's image."""
    y, x = (math.ceil(math.ceil(n / d) / size) for n, d in zip(c.out_length[1:], c.dilations[1:], strict=True))
    return y, x


def number_tiles(c: Correlation, kind: int, size: int, *, adjoint: bool = False) -> TileRows:
    """How the tiles are numbered of a correlation or, as a correlation of its own, of its data gradient."""
    dilations, taps, elements, strips = c.dilations, c.kernel[0], (size + 2) ** 2, 1
    if adjoint:
        pads = [(n - 1) * d - pad for n, d, pad in zip(c.kernel, dilations, c.pads, strict=True)]
        c = replace(c.adjoint, w_kernel=three([-n for n in c.w_kernel], 0), pads=three(pads, 0))
    tiles_y, run = _tiles(c, size)
    if taps > 1:
        aimed_at = tiles_aimed_at(elements, c.s) // (block_sizes.SLICES * dilations[1] * dilations[2] * run)
        strips = math.ceil(tiles_y / max(1, aimed_at))
        tiles_y = math.ceil(tiles_y / strips)
    tap = dilations[0] * dilations[1] * tiles_y
    return TileRows(
        kind=kind, c=c, size=size, elements=elements, ins=c.s, strips=strips, tiles_y=tiles_y,
        tiles_x=dilations[2] * run, run=run, tap=tap, reach=(taps - 1) * tap,
    )  # fmt: skip


def tiles_aimed_at(elements: int, ins: int) -> int:
    """Whose transforms stay in a second-level cache."""
    return max(COLUMNS, block_sizes.TILES_FLOATS // (elements * ins))
