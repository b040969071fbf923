"""How the cells of a gather are cut into bands, and what of a band is copied into a thread's scratch. Plain Python."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnx_backprop.ort_ops.compiler.decorators import VECTOR
from onnx_backprop.ort_ops.compiler.machine import REGISTERS, matrix_tiles, processors
from onnx_backprop.ort_ops.convolution import block_sizes, problem
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather.phases import Sums
from onnx_backprop.ort_ops.convolution.problem import COPY_CYCLES, FUSED_CYCLES, SPLIT_CYCLES, SUM_CYCLES, TILE_CYCLES
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, WORD, band_of, workspace
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, TILE_ROWS
from onnx_backprop.ort_ops.vector.matrix_tiles import CONFIGURATION, DEPTH, GROUP, SIDE

DENSE: problem.Triple = (1, 1, 1)


@dataclass(frozen=True)
class Copy:
    """The copy of a band: the floats there may be, what no band is shorter than.

    pitch: floats from cell to cell. block: channels that are done together where they take the place of groups.
    """

    sums: Sums
    limit: int
    least: problem.Triple
    block: int = VECTOR

    @property
    def pitch(self) -> int:
        """An odd number of vectors, so that a cache holds neighbours apart."""
        channels, vectors = self.sums.c.s, math.ceil(self.sums.c.s / VECTOR)
        if not self.sums.as_cells and vectors * VECTOR != channels:
            return channels
        return VECTOR * (vectors + 1 - vectors % 2)

    def arrays(self, band: Sequence[int]) -> dict[str, int]:
        """Floats of the copy of a band of such lengths, at most, and of its results."""
        sums, reach, cells = self.sums, self.sums.reach, math.prod(band)
        box, read = reach.box(band, DENSE), math.prod(reach.box(band, sums.head.step))
        box[0] += -box[0] % sums.beside
        plane = math.prod(box) + reach.high[2] - reach.low[2] + COLUMNS + 32
        if sums.columns:
            return {"lines": DEPTH * SIDE, "copy": 2 * together(sums) * sums.panel_bytes // 4}
        if sums.matrices:  # three parts; rows of DEPTH channels of two residues before they are split, a turned tile
            copy = 3 * sums.depth // 2 * reach.residues * (plane + COLUMNS)
            return {"lines": 2 * DEPTH * line_of(box[2]) + GROUP // 4, "copy": copy}
        if sums.blocked and sums.as_cells:  # what is read or, later, the results as lines
            written = cells * math.prod(sums.head.out_step)
            return {"results": VECTOR * written, "copy": VECTOR * max(read, written + VECTOR)}
        if sums.blocked:  # a row of results; in place, what is in use for one row
            box = reach.box([1, 1, band[2]] if sums.in_place else band, sums.head.step)
            box = [min(n, length) for n, length in zip(box, sums.c.source_length, strict=True)]
            return {"results": self.block * band[2], "copy": self.block * math.prod(box)}
        if not sums.cells:
            return {"copy": sums.c.s * reach.residues * plane}
        turned = {"results": (cells + ROWS) * COLUMNS, "lines": VECTOR * (cells + VECTOR)} if sums.as_cells else {}
        return turned | {"copy": read * self.pitch}

    def floats(self, band: Sequence[int]) -> int:
        return sum(self.arrays(band).values())

    @property
    def groups(self) -> int:
        """How many groups, or blocks of channels, a band is computed for."""
        groups = self.sums.c.groups
        return math.ceil(groups / self.block) if self.sums.depthwise else groups


def copy_of(sums: Sums) -> Copy:
    """How the bands of these sums are copied."""
    least = sums.beside, 1, min(sums.count[2], VECTOR if sums.blocked else 2 * COLUMNS)
    limit, block = block_sizes.BAND_FLOATS, VECTOR
    if sums.blocked and sums.as_cells:
        limit = block_sizes.LANES_FLOATS
    elif sums.blocked:
        copy = Copy(sums, limit, least, _block(sums))
        while copy.block > block_sizes.LEAST_VECTORS * VECTOR and copy.floats(least) > limit:
            copy = replace(copy, block=VECTOR * math.ceil(copy.block / (2 * VECTOR)))
        return copy
    elif sums.depthwise:
        limit, block = block_sizes.STENCIL_FLOATS, max(1, block_sizes.STENCIL_CELLS // max(1, math.prod(sums.count)))
    elif sums.matrices:  # columns take as much of whatever band
        limit = block_sizes.THREAD_FLOATS if sums.columns else block_sizes.PARTS_FLOATS
    elif sums.all_taps == 1 and sums.c.s <= block_sizes.FEW_CHANNELS:
        limit //= 4
    return Copy(sums, limit, least, block)


def cut(copy: Copy, threads: int = 1) -> problem.Triple:
    """The lengths of a band; along the first axis that has several cells such that every thread has some."""
    count = copy.sums.count
    band, size = band_of(count, copy.floats, copy.limit, copy.least)
    if size > block_sizes.THREAD_FLOATS:
        band, _ = band_of(count, copy.floats, block_sizes.THREAD_FLOATS, DENSE)
    axis = next((axis for axis in range(3) if band[axis] > 1), 2)
    images = copy.sums.c.batch * copy.groups * math.prod(problem.bands_of(count, band))
    most = max(1, math.prod(band) // block_sizes.LEAST_CELLS)
    length = math.ceil(band[axis] / min(math.ceil(4 * threads / max(images, 1)), most))
    length += -length % copy.least[0] if axis == 0 else 0
    return problem.three([length if n == axis else band[n] for n in range(3)], 1)


def thread_scratch(copy: Copy, band: problem.Triple) -> tuple[par.GatherOffsets, int]:
    """Of a thread: tables of the taps, a tile or the weights of a block of channels, the copy of a band."""
    sums, taps = copy.sums, copy.sums.all_taps
    segments, tile = 2 * WORD * taps, 4 * max(ROWS, SIDE) * COLUMNS
    if sums.matrices:
        first = {"tile": FLOAT * tile, "segments": segments, "configuration": CONFIGURATION}
    elif not sums.depthwise:
        first = {"tile": FLOAT * tile, "rows": WORD * (ROWS + 2), "segments": segments, "reaching": segments}
    else:
        weights, start = FLOAT * taps * copy.block, FLOAT * copy.block
        first = {"weights": weights, "shifts": WORD * taps, "segments": segments, "start": start}
    if sums.stencil and not sums.cells:
        arrays = {"zeros": band[2] + sums.reach.high[2] - sums.reach.low[2] + VECTOR}
    else:
        arrays = {} if sums.in_place else copy.arrays(band)
    return workspace(par.GatherOffsets, **first, **{name: FLOAT * floats for name, floats in arrays.items()})


def _rows(count: int) -> int:
    """Of the tiles for so many."""
    return count // ROWS * ROWS + TILE_ROWS[count % ROWS]


def turning_pays(sums: Sums) -> bool:
    """Whether NCX data are computed as cells, on any number of threads: fewer vector operations, with the copies."""
    outs, ins, taps, count = sums.c.d, sums.c.s, sums.all_taps, sums.count
    shifts = [tap.shift[2] for phase in sums.phases for tap in phase.taps] or [0]
    spread = (max(shifts) - min(shifts)) // sums.head.step[2]

    def vectors(band: problem.Triple) -> int:
        return band[0] * math.ceil(band[1] * (band[2] + spread) / VECTOR)  # the gaps between rows are computed too

    turned = replace(sums, as_cells=True)
    band = cut(copy_of(sums))
    as_planes = taps * ins * _rows(outs) * vectors(band) * math.prod(problem.bands_of(count, band))
    band = cut(copy_of(turned))
    as_cells = taps * ins * math.ceil(outs / VECTOR) * _rows(math.prod(band)) * math.prod(problem.bands_of(count, band))
    copies = math.prod(count) * (math.prod(sums.head.step) * ins + len(sums.phases) * outs) // 3
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
    if c.depthwise or c.last or not matrix_tiles():
        return None
    sums, (planes, rows, length) = replace(sums, matrices=True), sums.count
    cells, pitch = planes * rows * length, length + sums.reach.high[2] - sums.reach.low[2]
    tiles = planes * min(math.ceil(rows * pitch / COLUMNS), rows * math.ceil(length / COLUMNS))
    if sums.beside > 1:
        tiles = planes * math.ceil(rows / 2) / sums.beside
    outs, fused = math.ceil(c.d / SIDE), FUSED_CYCLES * sums.all_taps * c.s * _rows(c.d) * cells / COLUMNS
    # weights are split once, and residues are copied apart before they are
    images, batch = (planes, planes) if c.source.n == 0 else (1, c.batch)  # that are counted here, that share weights
    packed = problem.PACK_CYCLES * sums.all_taps * sums.depth * outs * SIDE * images / max(problem.typical(batch), 1)
    split = (SPLIT_CYCLES + (COPY_CYCLES if len(sums.residues) > 1 else 0)) * cells * len(sums.residues) * sums.depth
    product = math.ceil(c.s / DEPTH) * sums.all_taps * TILE_CYCLES / (1 + sums.tall) + SUM_CYCLES
    cycles = outs * tiles * product + split + packed
    if sums.in_pairs:
        columns = replace(sums, columns=True)
        steps = sums.all_taps * columns.depth
        whole = c.s == columns.depth and length >= SIDE
        product = outs * (TILE_CYCLES * steps / DEPTH + SUM_CYCLES / 3)
        of_plane, split = rows * math.ceil(length / SIDE), SPLIT_CYCLES * steps * SIDE
        first = math.ceil(outs / at_once(columns)) * min(together(columns), of_plane) * split  # then while multiplying
        passed = planes * (of_plane * (product + (0 if whole else split)) + first) + packed
        cycles, sums = min((cycles, sums), (passed, columns), key=lambda choice: choice[0])
    return sums if cycles < fused else None


def lanes_pay(sums: Sums) -> bool:
    """Whether a depthwise convolution of NCX data has channels as lanes: there are enough, and no long dense rows.

    Rows are long from 1½ registers on; with a stride, where lanes take longer, from 2/5 on, as half of the rows lie
    beside the others, or from one on if there are more taps than registers.
    """
    length, least = sums.count[2], VECTOR if sums.all_taps > REGISTERS else 2 * VECTOR / 5
    long = length >= least if sums.head.out_step[2] > 1 else 2 * length >= 3 * VECTOR
    return problem.fill_lanes(sums.c.groups) and not (sums.stencil and long)


def _block(sums: Sums) -> int:
    """How many channels of NXC data an item has: wide pieces of a cell, and few weights; fewer where images are few."""
    vectors = math.ceil(sums.c.groups / VECTOR)
    bands = max(1, math.prod(sums.count) // block_sizes.LEAST_CELLS)
    wanted = math.ceil(vectors / math.ceil(4 * processors() / max(sums.c.batch * bands, 1)))
    most = min(block_sizes.MOST_VECTORS, max(1, block_sizes.LANES_WEIGHTS_FLOATS // (VECTOR * max(sums.all_taps, 1))))
    return VECTOR * min(vectors, most, max(wanted, block_sizes.LEAST_VECTORS))


def line_of(pitch: int) -> int:
    """Cells of the rows, of such a pitch at most, that are turned together: an odd number of lines of the cache."""
    lines = math.ceil(max(block_sizes.TURNED_CELLS, pitch) / 16)
    return 16 * (lines + 1 - lines % 2)
