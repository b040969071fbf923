"""How the cells of a gather are cut into bands, and what of a band is copied into a thread's scratch. Plain Python."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from onnx_backprop.ort_ops.compiler.decorators import VECTOR
from onnx_backprop.ort_ops.compiler.machine import matrix_tiles, processors
from onnx_backprop.ort_ops.convolution import block_sizes, problem
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather.phases import Reach, Sums
from onnx_backprop.ort_ops.convolution.problem import COPY_CYCLES, FUSED_CYCLES, SPLIT_CYCLES, SUM_CYCLES, TILE_CYCLES
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, WORD, workspace
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, TILE_ROWS
from onnx_backprop.ort_ops.vector.matrix_tiles import CONFIGURATION, DEPTH, GROUP, SIDE

DENSE: problem.Triple = (1, 1, 1)

Arrays = Callable[[Sequence[int]], dict[str, int]]  # floats of the copy of a band of such lengths, and of its results


@dataclass(frozen=True)
class Copy:
    """The copy of a band: its arrays, the floats there may be, what no band is shorter than.

    pitch: floats from cell to cell or from tile to tile. panels: copied tile by tile. block: channels that are done
    together where they take the place of groups.
    """

    arrays: Arrays
    limit: int
    least: problem.Triple
    pitch: int
    panels: bool = False
    block: int = VECTOR

    def floats(self, band: Sequence[int]) -> int:
        """Of a band of such lengths."""
        return sum(self.arrays(band).values())

    def groups(self, sums: Sums) -> int:
        """How many groups, or blocks of channels, a band is computed for."""
        return math.ceil(sums.c.groups / self.block) if sums.blocked else sums.c.groups


def copy_of(sums: Sums) -> Copy:
    """How the bands of these sums are copied."""
    least, pitch = (1, 1, min(sums.count[2], 2 * COLUMNS)), _pitch(sums.c.s, as_cells=sums.as_cells)
    if sums.blocked:
        return _copy_of_blocks(sums, pitch)
    if sums.depthwise:
        limit = block_sizes.STENCIL_FLOATS if sums.stencil else block_sizes.PLANE_FLOATS
        return Copy(_depthwise_arrays(sums.reach), limit, least, pitch)
    if sums.columns:
        copy = 2 * together(sums) * sums.panel_bytes // 4
        return Copy(lambda _: {"lines": DEPTH * SIDE, "copy": copy}, copy + DEPTH * SIDE, least, pitch)
    if sums.matrices:
        return Copy(_matrices_arrays(sums), block_sizes.PARTS_FLOATS, least, pitch)
    if not sums.cells and _panels_pay(sums):
        arrays = _panels_arrays(sums.reach, sums.c.s)
        return Copy(arrays, block_sizes.BAND_FLOATS, least, _panel_pitch(sums.reach, sums.c.s), panels=True)
    few = sums.all_taps == 1 and sums.c.s <= block_sizes.FEW_CHANNELS
    arrays = _cells_arrays(sums, pitch) if sums.cells else _planes_arrays(sums.reach, sums.c.s)
    return Copy(arrays, block_sizes.BAND_FLOATS // 4 if few else block_sizes.BAND_FLOATS, least, pitch)


def _copy_of_blocks(sums: Sums, pitch: int) -> Copy:
    """Fewer channels are done together where the shortest band would be too large."""
    least, block = (1, 1, min(sums.count[2], VECTOR)), _block(sums)
    if sums.as_cells:
        return Copy(_transposed_arrays(sums), block_sizes.LANES_FLOATS, least, pitch)
    copy = Copy(_blocks_arrays(sums, block), block_sizes.BAND_FLOATS, least, pitch, block=block)
    while block > block_sizes.LEAST_VECTORS * VECTOR and copy.floats(least) > block_sizes.BAND_FLOATS:
        block = VECTOR * math.ceil(block / (2 * VECTOR))
        copy = replace(copy, arrays=_blocks_arrays(sums, block), block=block)
    return copy


def cut(sums: Sums, copy: Copy) -> problem.Triple:
    """The lengths of a band."""
    band, size = problem.band_of(sums.count, copy.floats, copy.limit, copy.least)
    if size > block_sizes.THREAD_FLOATS:
        band, _ = problem.band_of(sums.count, copy.floats, block_sizes.THREAD_FLOATS, DENSE)
    return _cut_for_threads(band, sums.count, sums.c.batch * copy.groups(sums))


def bands_of(count: problem.Triple, band: problem.Triple) -> problem.Triple:
    """How many bands there are along each axis."""
    return problem.three([math.ceil(n / b) for n, b in zip(count, band, strict=True)], 1)


def _cut_for_threads(band: problem.Triple, count: problem.Triple, images: int) -> problem.Triple:
    """Smaller bands along the first axis that has several cells, so that every thread has some."""
    axis = next((axis for axis in range(3) if band[axis] > 1), 2)
    wanted = math.ceil(4 * processors() / max(images * math.prod(bands_of(count, band)), 1))
    most = max(1, math.prod(band) // block_sizes.LEAST_CELLS)
    length = math.ceil(band[axis] / min(wanted, most))
    return problem.three([length if n == axis else band[n] for n in range(3)], 1)


def thread_scratch(sums: Sums, copy: Copy, band: problem.Triple) -> tuple[par.GatherOffsets, int]:
    """Of a thread: tables of the taps, a tile or the weights of a block of channels, the copy of a band."""
    taps = sums.all_taps
    segments, tile = 2 * WORD * taps, 4 * max(ROWS, SIDE) * COLUMNS
    if sums.matrices:
        first = {"tile": FLOAT * tile, "segments": segments, "configuration": CONFIGURATION}
    elif not sums.depthwise:
        first = {"tile": FLOAT * tile, "rows": WORD * ROWS, "segments": segments, "reaching": segments}
    else:
        weights, start = FLOAT * taps * copy.block, FLOAT * copy.block
        first = {"weights": weights, "shifts": WORD * taps, "segments": segments, "start": start}
    if sums.stencil and not sums.cells:
        row = band[2] + sums.reach.high[2] - sums.reach.low[2] + VECTOR
        arrays = {"table": 2 * (band[1] + sums.stencil - 1), "zeros": row}
    else:
        arrays = {} if sums.in_place else copy.arrays(band)
    return workspace(par.GatherOffsets, **first, **{name: FLOAT * floats for name, floats in arrays.items()})


def _rows(count: int) -> int:
    """Of the tiles for so many."""
    return count // ROWS * ROWS + TILE_ROWS[count % ROWS]


def turning_pays(sums: Sums) -> bool:
    """Whether NCX data are computed as cells: fewer vector operations, the copies included."""
    outs, ins, taps = sums.c.d, sums.c.s, sums.all_taps
    shifts = [tap.shift[2] for phase in sums.phases for tap in phase.taps] or [0]
    spread = (max(shifts) - min(shifts)) // sums.steps[2]

    def vectors(band: problem.Triple) -> int:
        return band[0] * math.ceil(band[1] * (band[2] + spread) / VECTOR)  # the gaps between rows are computed too

    turned = replace(sums, as_cells=True)
    band = cut(sums, copy_of(sums))
    as_planes = taps * ins * _rows(outs) * vectors(band) * math.prod(bands_of(sums.count, band))
    band = cut(turned, copy_of(turned))
    as_cells = taps * ins * math.ceil(outs / VECTOR) * _rows(math.prod(band)) * math.prod(bands_of(sums.count, band))
    copies = math.prod(sums.count) * (math.prod(sums.steps) * ins + len(sums.phases) * outs) // 3
    return as_cells + copies < as_planes


def together(sums: Sums) -> int:
    """Tiles of cells that are split at a time; the parts of one take what those of a tile of weights take."""
    return max(1, block_sizes.TOGETHER_BYTES // max(1, sums.panel_bytes))


def at_once(sums: Sums) -> int:
    """Tiles of output channels whose weights every tile of cells meets before the next ones."""
    return max(1, block_sizes.WEIGHTS_BYTES // max(1, sums.panel_bytes))


def in_matrices(sums: Sums) -> Sums | None:
    """The sums in registers of whole matrices where that takes fewer cycles, in which parts are split included."""
    c = sums.c
    if c.depthwise or not matrix_tiles():
        return None
    cells, sums = math.prod(sums.count) / COLUMNS, replace(sums, matrices=True)
    tiles = math.ceil(c.s / DEPTH) * math.ceil(c.d / SIDE) / (1 + sums.tall)
    fused = sums.all_taps * c.s * _rows(c.d) * cells
    copied = math.prod(sums.count) * len(sums.residues) * math.ceil(c.s / DEPTH) * DEPTH
    split = SPLIT_CYCLES + (COPY_CYCLES if len(sums.residues) > 1 else 0)  # residues are copied apart first
    products = tiles * cells * sums.all_taps * TILE_CYCLES + SUM_CYCLES * math.ceil(c.d / SIDE) * cells
    cycles = products + split * copied
    if sums.in_pairs:
        columns = replace(sums, columns=True)
        steps = sums.all_taps * columns.depth
        whole = c.s == columns.depth and sums.count[2] >= SIDE
        product = math.ceil(c.d / SIDE) * (TILE_CYCLES * steps / DEPTH + SUM_CYCLES / 3)
        of_plane, split = sums.count[1] * math.ceil(sums.count[2] / SIDE), SPLIT_CYCLES * steps * SIDE
        rounds = math.ceil(math.ceil(c.d / SIDE) / at_once(columns))
        first = sums.count[0] * rounds * min(together(columns), of_plane) * split  # what is whole is split meanwhile
        passed = sums.count[0] * of_plane * (product + (0 if whole else split)) + first
        cycles, sums = min((cycles, sums), (passed, columns), key=lambda choice: choice[0])
    return sums if cycles < FUSED_CYCLES * fused else None


def lanes_pay(sums: Sums) -> bool:
    """Whether a depthwise convolution of NCX data has channels as lanes: there are enough, and no long dense rows."""
    return problem.fill_lanes(sums.c.groups) and not (sums.stencil and 2 * sums.count[2] >= 3 * VECTOR)


def _panels_pay(sums: Sums) -> bool:
    """Whether a band is copied tile by tile: no tap shifts, and several tiles fit."""
    reach = sums.reach
    return reach.low == reach.high and 8 * _panel_pitch(reach, sums.c.s) <= block_sizes.BAND_FLOATS


def _block(sums: Sums) -> int:
    """How many channels of NXC data an item has: wide pieces of a cell, and few weights; fewer where images are few."""
    vectors = math.ceil(sums.c.groups / VECTOR)
    bands = max(1, math.prod(sums.count) // block_sizes.LEAST_CELLS)
    wanted = math.ceil(vectors / math.ceil(4 * processors() / max(sums.c.batch * bands, 1)))
    most = min(block_sizes.MOST_VECTORS, max(1, block_sizes.LANES_WEIGHTS_FLOATS // (VECTOR * max(sums.all_taps, 1))))
    return VECTOR * min(vectors, most, max(wanted, block_sizes.LEAST_VECTORS))


def _pitch(channels: int, *, as_cells: bool) -> int:
    """Floats from cell to cell of a copy: an odd number of vectors, so that a cache holds neighbours apart."""
    vectors = math.ceil(channels / VECTOR)
    if not as_cells and vectors * VECTOR != channels:
        return channels
    return VECTOR * (vectors + 1 - vectors % 2)


def _panel_pitch(reach: Reach, channels: int) -> int:
    """Floats of a tile of cells, an odd number of cache lines."""
    return channels * reach.residues * COLUMNS + 16


def _planes_arrays(reach: Reach, channels: int) -> Arrays:
    """As planes, at most."""

    def arrays(band: Sequence[int]) -> dict[str, int]:
        plane = math.prod(reach.box(band, DENSE)) + (reach.high[2] - reach.low[2]) + COLUMNS + 32
        return {"copy": channels * reach.residues * plane}

    return arrays


def line_of(pitch: int) -> int:
    """Cells of the rows, of such a pitch at most, that are turned together: an odd number of lines of the cache."""
    lines = math.ceil(max(block_sizes.TURNED_CELLS, pitch) / 16)
    return 16 * (lines + 1 - lines % 2)


def _matrices_arrays(sums: Sums) -> Arrays:
    """Cells in three parts, rows of DEPTH channels of two residues before they are split, a tile that is turned."""

    def arrays(band: Sequence[int]) -> dict[str, int]:
        box = sums.reach.box(band, DENSE)
        plane = math.prod(box) + (sums.reach.high[2] - sums.reach.low[2]) + 2 * COLUMNS + 32
        copy = 3 * sums.depth // 2 * sums.reach.residues * plane
        return {"lines": 2 * DEPTH * line_of(box[2]) + GROUP // 4, "copy": copy}

    return arrays


def _panels_arrays(reach: Reach, channels: int) -> Arrays:
    """As tiles of cells, and two planes of one channel."""

    def arrays(band: Sequence[int]) -> dict[str, int]:
        tiles = math.ceil(band[1] * band[2] / COLUMNS)
        return {"row": tiles * 2 * COLUMNS, "copy": tiles * band[0] * _panel_pitch(reach, channels)}

    return arrays


def _cells_arrays(sums: Sums, pitch: int) -> Arrays:
    """As cells; turned ones have their results beside them, as cells and as lines."""

    def arrays(band: Sequence[int]) -> dict[str, int]:
        cells, copy = math.prod(band), math.prod(sums.reach.box(band, sums.steps)) * pitch
        if not sums.as_cells:
            return {"copy": copy}
        return {"results": (cells + ROWS) * COLUMNS, "lines": VECTOR * (cells + VECTOR), "copy": copy}

    return arrays


def _depthwise_arrays(reach: Reach) -> Arrays:
    """The copy for one channel and a row of results."""

    def arrays(band: Sequence[int]) -> dict[str, int]:
        box = reach.box(band, DENSE)
        plane = math.prod(box) + box[2] + 2 * VECTOR
        return {"copy": reach.residues * plane, "results": band[1] * box[2] + 2 * VECTOR}

    return arrays


def _transposed_arrays(sums: Sums) -> Arrays:
    """A vector of channels: the results, what is read or, later, the results as lines."""

    def arrays(band: Sequence[int]) -> dict[str, int]:
        written = math.prod(n * step for n, step in zip(band, sums.head.out_step, strict=True))
        read = math.prod(sums.reach.box(band, sums.steps))
        return {"results": VECTOR * written, "copy": VECTOR * max(read, written + VECTOR)}

    return arrays


def _blocks_arrays(sums: Sums, block: int) -> Arrays:
    """The copy for a block of channels and a row of results; in place, what is in use for one row."""
    reach, lengths = sums.reach, sums.c.source_length

    def arrays(band: Sequence[int]) -> dict[str, int]:
        rows = [1, 1, band[2]] if sums.in_place else band
        box = [min(n, length) for n, length in zip(reach.box(rows, reach.steps), lengths, strict=True)]
        return {"results": block * band[2], "copy": block * math.prod(box)}

    return arrays
