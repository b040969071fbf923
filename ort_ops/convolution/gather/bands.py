"""How the cells of a gather are cut into bands, and what of a band is copied into a thread's scratch. Plain Python."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from onnx_backprop.ort_ops.compiler.decorators import VECTOR
from onnx_backprop.ort_ops.compiler.machine import processors
from onnx_backprop.ort_ops.convolution import problem
from onnx_backprop.ort_ops.convolution.gather.phases import Reach, Sums
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, TILE_ROWS

DENSE: problem.Triple = (1, 1, 1)
_FEW_CHANNELS = 64  # of a kernel of one cell, whose bands are shorter
_DEPTHWISE_FLOATS = 6 << 10  # that stay in the first-level cache
_STENCIL_FLOATS = 48 << 10
_TURNED_FLOATS = 48 << 10
_WEIGHTS_FLOATS = 32 << 10  # of a block of channels-last data
_LEAST_VECTORS, _MOST_VECTORS = 4, 64  # of channels of them that are done together
_LEAST_CELLS = 8 * COLUMNS  # of a band that is cut for the sake of more threads

Floats = Callable[[Sequence[int]], int]  # of the copy of a band of such lengths


@dataclass(frozen=True)
class Copy:
    """The copy of a band: its floats, how many there may be, what no band is shorter than.

    pitch: floats from cell to cell or from tile to tile. panels: copied tile by tile. block: channels that are done
    together where they take the place of groups.
    """

    floats: Floats
    limit: int
    least: problem.Triple
    pitch: int
    panels: bool = False
    block: int = VECTOR

    def groups(self, sums: Sums) -> int:
        """How many groups, or blocks of channels, a band is computed for."""
        return math.ceil(sums.c.groups / self.block) if sums.blocked else sums.c.groups


def copy_of(sums: Sums) -> Copy:
    """How the bands of these sums are copied."""
    least, pitch = (1, 1, min(sums.count[2], 2 * COLUMNS)), _pitch(sums.c.s, turned=sums.turned)
    if sums.blocked:
        return _copy_of_blocks(sums, pitch)
    if sums.depthwise:
        limit = _STENCIL_FLOATS if sums.stencil else _DEPTHWISE_FLOATS
        return Copy(_depthwise_floats(sums.reach), limit, least, pitch)
    if not sums.cells and _panels_pay(sums):
        floats = _panels_floats(sums.reach, sums.c.s)
        return Copy(floats, problem.BAND_FLOATS, least, _panel_pitch(sums.reach, sums.c.s), panels=True)
    limit = problem.BAND_FLOATS // 4 if sums.all_taps == 1 and sums.c.s <= _FEW_CHANNELS else problem.BAND_FLOATS
    if sums.cells:
        return Copy(_cells_floats(sums.reach, sums.c.s, turned=sums.turned), limit, least, pitch)
    return Copy(_planes_floats(sums.reach, sums.c.s), limit, least, pitch)


def _copy_of_blocks(sums: Sums, pitch: int) -> Copy:
    """Fewer channels are done together where the shortest band would be too large."""
    least, block = (1, 1, min(sums.count[2], VECTOR)), _block(sums)
    if sums.turned:
        return Copy(_turned_floats(sums), _TURNED_FLOATS, least, pitch)
    while block > _LEAST_VECTORS * VECTOR and _blocks_floats(sums, block)(least) > problem.BAND_FLOATS:
        block = VECTOR * math.ceil(block / (2 * VECTOR))
    return Copy(_blocks_floats(sums, block), problem.BAND_FLOATS, least, pitch, block=block)


def cut(sums: Sums, copy: Copy) -> problem.Triple:
    """The lengths of a band."""
    band, size = problem.band_of(sums.count, copy.floats, copy.limit, copy.least)
    if size > problem.THREAD_FLOATS:
        band, _ = problem.band_of(sums.count, copy.floats, problem.THREAD_FLOATS, DENSE)
    return _cut_for_threads(band, sums.count, sums.c.batch * copy.groups(sums))


def bands_of(count: problem.Triple, band: problem.Triple) -> problem.Triple:
    """How many bands there are along each axis."""
    return problem.three([math.ceil(n / b) for n, b in zip(count, band, strict=True)], 1)


def _cut_for_threads(band: problem.Triple, count: problem.Triple, images: int) -> problem.Triple:
    """Smaller bands along the first axis that has several cells, so that every thread has some."""
    axis = next((axis for axis in range(3) if band[axis] > 1), 2)
    wanted = math.ceil(4 * processors() / max(images * math.prod(bands_of(count, band)), 1))
    most = max(1, math.prod(band) // _LEAST_CELLS)
    length = math.ceil(band[axis] / min(wanted, most))
    return problem.three([length if n == axis else band[n] for n in range(3)], 1)


def thread_bytes(sums: Sums, copy: Copy, band: problem.Triple) -> int:
    """Scratch of a thread: a tile and its rows, tables or weights of the taps, a row of a block, the copy."""
    for_taps = (24 + 4 * copy.block if sums.depthwise else 32) * sums.all_taps
    floats = 0 if sums.in_place else copy.floats(band)
    return 4 * ROWS * COLUMNS + 8 * ROWS + for_taps + 4 * copy.block + 4 * floats


def turning_pays(sums: Sums) -> bool:
    """Whether NCX data are computed as cells: fewer vector operations, the copies included."""
    outs, ins, taps = sums.c.d, sums.c.s, sums.all_taps
    shifts = [tap.shift[2] for phase in sums.phases for tap in phase.taps] or [0]
    spread = (max(shifts) - min(shifts)) // sums.steps[2]

    def vectors(band: problem.Triple) -> int:
        return band[0] * math.ceil(band[1] * (band[2] + spread) / VECTOR)  # the gaps between rows are computed too

    def rows(count: int) -> int:
        return count // ROWS * ROWS + TILE_ROWS[count % ROWS]

    turned = replace(sums, turned=True)
    band = cut(sums, copy_of(sums))
    as_planes = taps * ins * rows(outs) * vectors(band) * math.prod(bands_of(sums.count, band))
    band = cut(turned, copy_of(turned))
    as_cells = taps * ins * math.ceil(outs / VECTOR) * rows(math.prod(band)) * math.prod(bands_of(sums.count, band))
    copies = math.prod(sums.count) * (math.prod(sums.steps) * ins + len(sums.phases) * outs) // 3
    return as_cells + copies < as_planes


def lanes_pay(sums: Sums) -> bool:
    """Whether a depthwise convolution of NCX data has channels as lanes: there are enough, and no long dense rows."""
    return problem.fill_lanes(sums.c.groups) and not (sums.stencil and 2 * sums.count[2] >= 3 * VECTOR)


def _panels_pay(sums: Sums) -> bool:
    """Whether a band is copied tile by tile: no tap shifts, and several tiles fit."""
    reach = sums.reach
    return reach.low == reach.high and 8 * _panel_pitch(reach, sums.c.s) <= problem.BAND_FLOATS


def _block(sums: Sums) -> int:
    """How many channels of NXC data an item has: wide pieces of a cell, and few weights; fewer where images are few."""
    vectors = math.ceil(sums.c.groups / VECTOR)
    bands = max(1, math.prod(sums.count) // _LEAST_CELLS)
    wanted = math.ceil(vectors / math.ceil(4 * processors() / max(sums.c.batch * bands, 1)))
    most = min(_MOST_VECTORS, max(1, _WEIGHTS_FLOATS // (VECTOR * max(sums.all_taps, 1))))
    return VECTOR * min(vectors, most, max(wanted, _LEAST_VECTORS))


def _pitch(channels: int, *, turned: bool) -> int:
    """Floats from cell to cell of a copy: an odd number of vectors, so that a cache holds neighbours apart."""
    vectors = math.ceil(channels / VECTOR)
    if not turned and vectors * VECTOR != channels:
        return channels
    return VECTOR * (vectors + 1 - vectors % 2)


def _panel_pitch(reach: Reach, channels: int) -> int:
    """Floats of a tile of cells, an odd number of cache lines."""
    return channels * reach.residues * COLUMNS + 16


def _planes_floats(reach: Reach, channels: int) -> Floats:
    """As planes, at most."""

    def floats(band: Sequence[int]) -> int:
        plane = math.prod(reach.box(band, DENSE)) + (reach.high[2] - reach.low[2]) + COLUMNS + 32
        return channels * reach.residues * plane

    return floats


def _panels_floats(reach: Reach, channels: int) -> Floats:
    """As tiles of cells, and two planes of one channel."""

    def floats(band: Sequence[int]) -> int:
        tiles = math.ceil(band[1] * band[2] / COLUMNS)
        return tiles * (band[0] * _panel_pitch(reach, channels) + 2 * COLUMNS) + 16

    return floats


def _cells_floats(reach: Reach, channels: int, *, turned: bool) -> Floats:
    """As cells; turned ones are followed by their results, as cells and as lines."""

    def floats(band: Sequence[int]) -> int:
        cells = math.prod(band)
        results = (cells + ROWS) * COLUMNS + VECTOR * (cells + VECTOR) if turned else 0
        return math.prod(reach.box(band, reach.steps)) * _pitch(channels, turned=turned) + results

    return floats


def _depthwise_floats(reach: Reach) -> Floats:
    """The copy for one channel and a row of results."""

    def floats(band: Sequence[int]) -> int:
        box = reach.box(band, DENSE)
        return reach.residues * (math.prod(box) + box[2] + 2 * VECTOR) + band[1] * box[2] + 2 * VECTOR

    return floats


def _turned_floats(sums: Sums) -> Floats:
    """A vector of channels: the results, what is read or, later, the results as lines."""
    steps = sums.head.out_step

    def floats(band: Sequence[int]) -> int:
        written = math.prod(n * step for n, step in zip(band, steps, strict=True))
        return VECTOR * (written + max(math.prod(sums.reach.box(band, sums.steps)), written + VECTOR))

    return floats


def _blocks_floats(sums: Sums, block: int) -> Floats:
    """The copy for a block of channels and a row of results; in place, what is in use for one row."""
    reach, lengths = sums.reach, sums.c.source_length

    def floats(band: Sequence[int]) -> int:
        rows = [1, 1, band[2]] if sums.in_place else band
        box = [min(n, length) for n, length in zip(reach.box(rows, reach.steps), lengths, strict=True)]
        return block * (math.prod(box) + band[2])

    return floats
