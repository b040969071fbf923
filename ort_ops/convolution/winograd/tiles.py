"""Which correlations are computed through Winograd's tiles, of which size, and how these are numbered. Plain Python."""

import math
from dataclasses import replace

from onnx_backprop.ort_ops.compiler.llvm import F32
from onnx_backprop.ort_ops.compiler.machine import matrix_tiles
from onnx_backprop.ort_ops.convolution import block_sizes
from onnx_backprop.ort_ops.convolution.problem import Correlation, three
from onnx_backprop.ort_ops.convolution.winograd.kernel import thread_scratch
from onnx_backprop.ort_ops.convolution.winograd.rows import TileRows
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS
from onnx_backprop.ort_ops.vector.matrix_tiles import SIDE

MIN_CHANNELS = 16  # on either side of a group: below, the transforms outweigh what they save
# Below so many tiles, times the geometric mean of the channels, sums over taps are faster: transformed weights and rows
# of tiles that do not fill registers cost more than is saved (docs/notes/large_weights.md).
MIN_WORK = 14_000
# A batch of so many images, to the last but one, counts as one of TYPICAL: then what is computed of an image has the
# same bits in all of them, as where ranks divide a batch.
FEW, MANY, TYPICAL = 4, 32, 8
WORK_SHARE = 4  # times as much, where there are registers of matrices
MATRICES_SHARE = 8  # times as much work, where weight gradients of few channels may have registers of matrices
FEW_CHANNELS = 64  # up to which that holds for weight gradients, which transform tiles alone
# Tiles of 4×4 cells are used for images of so many cells along either axis, and for weight gradients of fewer, of which
# there are at least so many tiles of 2×2 for one of them: at the end of a row, cells of tiles are not needed.
LARGE_IMAGE, LARGE_IMAGE_OF_WEIGHTS = 12, 7
SMALL_TILES = 3.2
MOST_EMPTY = 4  # times the phases that have a cell: tiles are computed of all
STRIDED_SHARE = 0.6  # of the sum's products that tiles with a stride of 2 may have: 3×3 has 0.69, and gains nothing


def suits(c: Correlation, *, adjoint: bool = False) -> bool:
    """Two or three axes, along the last two 3×3, or 3×3 or 4×4 with stride 2, and channels and tiles enough.

    adjoint: whether the data gradient is to be computed.
    """
    if matrix_tiles() and (c.d if adjoint else c.s) >= SIDE:
        return False  # registers of matrices are as fast, and round less
    return is_served(c) and work_of(c) >= MIN_WORK * (WORK_SHARE if matrix_tiles() else 1)


def work_of(c: Correlation) -> float:
    batch = TYPICAL if FEW <= c.batch < MANY else c.batch
    return batch * c.out_length[0] * _phases(c) * math.prod(_tiles(c, 2)) * math.sqrt(c.s * c.d)


def _phases(c: Correlation) -> int:
    """Of an image, those that have a cell."""
    return math.prod(min(d, n) for d, n in zip(c.dilations[1:], c.out_length[1:], strict=True))


def is_served(c: Correlation) -> bool:
    if matrix_tiles() and min(c.s, c.d) >= SIDE and (_is_halved(c) or c.dilations[1:] != (1, 1)):
        return False  # these save less than registers of matrices do
    if c.last or min(c.s, c.d) < MIN_CHANNELS or math.prod(c.dilations[1:]) > MOST_EMPTY * _phases(c):
        return False
    # of a row of tiles; where it is no pooled block, the sum over taps is used, which cuts rows
    if c.strides == (1, 1, 1):
        return c.kernel[1:] == (3, 3) and _row_fits(c, 2)
    sums, products = math.prod(c.kernel[1:]) * math.prod(c.out_length[1:]), 4 * 25 * math.prod(_tiles(c, 4))
    halved = c.strides == (1, 2, 2) and c.dilations[1:] == (1, 1) and c.kernel[1:] in {(3, 3), (4, 4)}
    return halved and products <= STRIDED_SHARE * sums and _row_fits(c, 4)


def _row_fits(c: Correlation, size: int) -> bool:
    """Whether a thread's scratch for a row of tiles, of the correlation or of its adjoint, is a pooled block."""
    longer, most = tuple(map(max, c.source_length, c.out_length)), max(c.s, c.d)
    r = number_tiles(replace(c, out_length=longer, s=most, d=most), F32, size)
    return thread_scratch(r, 1, math.prod(c.strides) * math.ceil(most / ROWS))[1] <= POOL_BYTES


def size_of(c: Correlation) -> int:
    """Cells of a tile along either axis; not told from the batch, as whether tiles are used is."""
    return 4 if _is_halved(c) or (_large_tiles_pay(c, LARGE_IMAGE) and _row_fits(c, 4)) else 2


def weights_size_of(c: Correlation) -> int:
    large = _large_tiles_pay(c, LARGE_IMAGE_OF_WEIGHTS) and sum_floats(c, 4) <= block_sizes.MAX_SUM_FLOATS
    return 4 if _is_halved(c) or large else 2


def _is_halved(c: Correlation) -> bool:
    """Whether it has a stride of 2."""
    return c.strides[2] == 2


def _large_tiles_pay(c: Correlation, least: int) -> bool:
    small, large = (math.prod(_tiles(c, size)) for size in (2, 4))
    return min(_lengths(c)) >= least and small >= SMALL_TILES * large


def sum_floats(c: Correlation, size: int) -> int:
    """Floats of a weight gradient before it is transformed back."""
    return _elements(c, size) * c.kernel[0] * c.groups * c.d * c.s * math.prod(c.strides)


def _lengths(c: Correlation) -> tuple[int, int]:
    """Of the longest phase's image."""
    y, x = (math.ceil(n / d) for n, d in zip(c.out_length[1:], c.dilations[1:], strict=True))
    return y, x


def _tiles(c: Correlation, size: int) -> tuple[int, int]:
    """Along both axes of a phase's image."""
    y, x = (math.ceil(n / size) for n in _lengths(c))
    return y, x


def number_tiles(c: Correlation, kind: int, size: int, *, adjoint: bool = False) -> TileRows:
    """How the tiles are numbered of a correlation or, as a correlation of its own, of its data gradient."""
    stride, dilations, kernel_taps = c.strides[2], c.dilations, _taps(c)
    strided, shift = three([s * d for s, d in zip(c.strides, dilations, strict=True)], 1), (0, 0, 0)
    # With a stride of 2 every kernel has four taps: a zero in front of three, or behind, so that a gradient's tiles
    # begin where its tensor does.
    spare = [0, *(kernel_taps * stride - n for n in c.kernel[1:])]
    front = [n and pad % 2 for n, pad in zip(spare, c.pads, strict=True)]
    ahead = [pad + n for pad, n in zip(c.pads, front, strict=True)]
    if adjoint:
        extents = [(n - 1) * d for n, d in zip((c.kernel[0], kernel_taps, kernel_taps), dilations, strict=True)]
        shift = three([n % s for n, s in zip(ahead, c.strides, strict=True)], 0)
        ahead = [extent - n // s for extent, n, s in zip(extents, ahead, c.strides, strict=True)]
        front = [n - f for n, f in zip(spare, front, strict=True)]
        c = replace(c.adjoint, w_kernel=three([-n for n in c.w_kernel], 0))
    steps = (dilations, strided) if adjoint else (strided, dilations)
    reached = zip(c.out_length, shift, steps[1], strict=True)
    _, tiles_y, run = (math.ceil(math.ceil((n + before) / step) / size) for n, before, step in reached)
    elements, ins = _elements(c, size), c.s * (1 if adjoint else stride**2)
    strips, taps = 1, c.kernel[0]
    if taps > 1:
        aimed_at = tiles_aimed_at(elements, ins) // (block_sizes.SLICES * dilations[1] * dilations[2] * run)
        strips = math.ceil(tiles_y / max(1, aimed_at))
        tiles_y = math.ceil(tiles_y / strips)
    tap = dilations[0] * dilations[1] * tiles_y
    return TileRows(
        kind=kind, c=replace(c, pads=three(ahead, 0)), size=size, taps=kernel_taps, elements=elements, ins=ins,
        front=three(front, 0), source_step=steps[0], out_step=steps[1], shift=shift,
        source_residues=1 if adjoint else stride, out_residues=stride if adjoint else 1,
        strips=strips, tiles_y=tiles_y, tiles_x=dilations[2] * run, run=run, tap=tap, reach=(taps - 1) * tap,
    )  # fmt: skip


def _taps(c: Correlation) -> int:
    """Of a tile's kernel along either axis."""
    return 2 if _is_halved(c) else 3


def tiles_aimed_at(elements: int, ins: int) -> int:
    """Whose transforms stay in a second-level cache."""
    return max(COLUMNS, block_sizes.TILES_FLOATS // (elements * ins))


def _elements(c: Correlation, size: int) -> int:
    """Products per tile."""
    return (size + _taps(c) - 1) ** 2
