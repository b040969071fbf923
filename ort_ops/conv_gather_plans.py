"""Plans of sums over taps, for `conv_gather`: a correlation, or the data gradient of one. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from . import conv_gather
from . import conv_parameters as par
from .conv_planes import FEW_CHANNELS
from .conv_plans import (
    BAND_FLOATS,
    LANE_FLOATS,
    Correlation,
    Tensor,
    Triple,
    band_of,
    last_level_cache,
    processors,
    rounds,
    shared_limit,
    three,
    three_words,
    words,
)
from .native_bridge import Plan
from .native_call import POOL_BYTES
from .native_llvm import F32
from .native_micro import COLUMNS, ROWS, TILE_ROWS
from .native_source import VECTOR
from .native_stencil import SIZES

_DENSE: Triple = (1, 1, 1)
_DEPTHWISE_FLOATS = 6 << 10  # that stay in the first-level cache
_STENCIL_FLOATS = 48 << 10
FAR_CELLS, FAR_CHANNELS = 256, 15 * VECTOR  # of a band, and held at once, where sums reach too far for anything else
_WEIGHTS_FLOATS = 32 << 10  # of a block of channels-last data
_LEAST_VECTORS, _MOST_VECTORS = 4, 64  # of channels of them that are done together
_LEAST_CELLS = 8 * COLUMNS  # of a band that is cut for the sake of more threads


@dataclass(frozen=True)
class _Tap:
    kernel: Triple
    shift: Triple


@dataclass(frozen=True)
class _Phase:
    start: Triple
    count: Triple
    taps: tuple[_Tap, ...]


def _axis_phases(c: Correlation, axis: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """(first source cell, number of cells, [(kernel cell, shift of the destination cell)]) per residue."""
    stride, dilation, pad = c.strides[axis], c.dilations[axis], c.pads[axis]
    length = c.source_length[axis]
    result = []
    for r in range(min(stride, length)):
        reach = [(k, r + pad - k * dilation) for k in range(c.kernel[axis])]
        taps = [(k, at // stride) for k, at in reach if at % stride == 0]
        result.append((r, (length - r + stride - 1) // stride, taps))
    return result


def _data_phases(c: Correlation) -> list[_Phase]:
    """The source cells of equal residues, with the kernel cells that reach them."""
    phases = []
    for z, y, x in product(*(_axis_phases(c, axis) for axis in range(3))):
        taps = tuple(
            _Tap((kz, ky, kx), (oz, oy, ox))
            for (kz, oz), (ky, oy), (kx, ox) in product(z[2][::-1], y[2][::-1], x[2][::-1])  # shifts ascend
        )
        phases.append(_Phase((z[0], y[0], x[0]), (z[1], y[1], x[1]), taps))
    return phases


def _forward_phase(c: Correlation) -> _Phase:
    axes = [[(k, k * d - p) for k in range(n)] for n, d, p in zip(c.kernel, c.dilations, c.pads, strict=True)]
    taps = tuple(_Tap((kz, ky, kx), (oz, oy, ox)) for (kz, oz), (ky, oy), (kx, ox) in product(*axes))
    return _Phase((0, 0, 0), c.out_length, taps)


def data_gradient(c: Correlation, kind: int) -> Plan:
    """The gradient with respect to the source; inputs 0 and 1 are data and weights."""
    head = _head(c, kind, (c.s, c.d), c.destination, c.source, c.out_length)
    head |= three_words(par.STEP_3, _DENSE) | three_words(par.OUT_STEP_3, c.strides)
    head |= {par.W_OUT: c.w_s, par.W_IN: c.w_d, par.W_GROUP: c.d * c.w_d}
    return _gather(c, head, _data_phases(c), _DENSE)


def forward(c: Correlation, kind: int, *, bias: int = 0) -> Plan:
    """The correlation itself; `bias` is the input that is added to it, 0: none."""
    head = _head(c, kind, (c.d, c.s), c.source, c.destination, c.source_length)
    head |= three_words(par.STEP_3, c.strides) | three_words(par.OUT_STEP_3, _DENSE)
    head |= {par.W_OUT: c.w_d, par.W_IN: c.w_s, par.W_GROUP: c.d * c.w_d, par.BIAS: bias}
    return _gather(c, head, [_forward_phase(c)], c.strides)


def _head(
    c: Correlation, kind: int, channels: tuple[int, int], data: Tensor, out: Tensor, length: Triple
) -> dict[int, int]:
    pack, work, _ = conv_gather.functions()
    head = {par.PACKER: pack.address, par.WORKER: work.address, par.KIND: kind}
    head |= {par.BATCH: c.batch, par.GROUPS: c.groups, par.OUTS: channels[0], par.INS: channels[1]}
    head |= {par.LAST: int(c.last), par.DATA: 0, par.WEIGHTS: 1}
    head |= {par.IN_N: data.n, par.IN_C: data.c, par.OUT_N: out.n, par.OUT_C: out.c}
    head |= three_words(par.IN_3, data.cells) | three_words(par.OUT_3, out.cells) | three_words(par.LENGTH_3, length)
    return head


@dataclass(frozen=True)
class _Reach:
    """What a band reads: least and greatest shift, residues of the cells modulo the step, the step."""

    low: Triple
    high: Triple
    residues: int
    steps: Triple

    def box(self, band: Sequence[int], steps: Triple) -> list[int]:
        """Lengths of what a band of such lengths reads."""
        return [(b - 1) * s + 1 + h - lo for b, s, lo, h in zip(band, steps, self.low, self.high, strict=True)]


def _gather(c: Correlation, head: dict[int, int], phases: list[_Phase], steps: Triple) -> Plan:
    """The head, the phases, and the tables of taps and residues behind them."""
    outs, ins = head[par.OUTS], head[par.INS]
    count = _per_axis(max, [phase.count for phase in phases])
    depthwise = c.s == c.d == 1 and c.groups > 1
    stencil = _stencil(head, phases) if depthwise else 0
    turned = not (c.last or depthwise) and _turning_pays(phases, outs, ins, count, steps)
    cells = c.last or turned
    shifted = [_shifts(phase, steps, quotients=not cells) for phase in phases]
    residues = list(dict.fromkeys(residue for taps in shifted for _, residue in taps)) or [(0, 0, 0)]
    every = [shift for taps in shifted for shift, _ in taps]
    reach = _Reach(_per_axis(min, every), _per_axis(max, every), len(residues), steps)
    all_taps = sum(len(phase.taps) for phase in phases)
    block = _block(c, count, all_taps) if depthwise and c.last else VECTOR
    least = 1, 1, min(count[2], 2 * COLUMNS)
    panels = not (cells or depthwise) and _panels_pay(head, reach)
    if panels:
        limit, floats = BAND_FLOATS, _panels_floats(reach, ins)
    elif depthwise and c.last:
        limit, least, in_place = BAND_FLOATS, (1, 1, min(count[2], VECTOR)), head[par.KIND] == F32
        lengths = [head[par.LENGTH_3 + axis] for axis in range(3)]
        floats = _depthwise_cells_floats(reach, lengths, block, in_place=in_place)
        while block > _LEAST_VECTORS * VECTOR and floats(least) > limit:
            block = VECTOR * math.ceil(block / (2 * VECTOR))
            floats = _depthwise_cells_floats(reach, lengths, block, in_place=in_place)
    elif depthwise:
        limit = _STENCIL_FLOATS if stencil else _DEPTHWISE_FLOATS
        floats = _depthwise_floats(reach)
    else:
        floats = (_cells_floats if cells else _planes_floats)(reach, ins, turned=turned)
        limit = BAND_FLOATS // 4 if all_taps == 1 and ins <= FEW_CHANNELS else BAND_FLOATS
    band, size = band_of(count, floats, limit, least)
    if size > LANE_FLOATS:
        band, _ = band_of(count, floats, LANE_FLOATS, _DENSE)
    groups = math.ceil(c.groups / block) if depthwise and c.last else c.groups
    band = _cut_for_threads(band, count, c.batch * groups)
    bands = three([math.ceil(n / b) for n, b in zip(count, band, strict=True)], 1)
    width = COLUMNS if cells else ROWS
    for_taps = (24 + 4 * block if depthwise else 32) * all_taps
    copies = 0 if depthwise and c.last and head[par.KIND] == F32 else floats(list(band))
    lane = 4 * ROWS * COLUMNS + 8 * ROWS + for_taps + 4 * block + 4 * copies
    per_panel = 4 * all_taps * ins * width
    if lane > POOL_BYTES or (not depthwise and per_panel > shared_limit(c, head[par.KIND])):
        return _far(c, head, phases, steps, count)
    tiles = math.ceil(outs / width)
    items = c.batch * groups * math.prod(bands)
    at_once = c.groups, tiles
    if not depthwise:
        at_once = rounds(c.groups, tiles, per_panel, shared_limit(c, head[par.KIND]))
        items = items // groups * at_once[0]
    split = 1 if items >= 2 * processors() else min(at_once[1], math.ceil(4 * processors() / max(items, 1)))
    at_a_time = math.prod(at_once)
    records, tables = _records(c, phases, shifted, residues, (width, at_a_time, ins))
    residue_table = par.GATHER_WORDS + par.PHASE_WORDS * len(phases) + len(tables)
    if depthwise:
        per_panel, head[par.DEPTHWISE], head[par.GROUPS], at_once = 0, c.groups, groups, (groups, tiles)
        head |= {par.STENCIL: stencil, par.BLOCK: block, par.STREAMED: int(_exceeds_caches(c))}
    head |= {par.ITEMS: items * split, par.SPLIT: split, par.PACK_BYTES: at_a_time * per_panel}
    head |= {par.UNITS: at_a_time * len(phases), par.ROUND_GROUPS: at_once[0], par.ROUND_TILES: at_once[1]}
    head |= {par.ALL_TAPS: all_taps, par.RESIDUES: len(residues), par.RESIDUE_TABLE: residue_table}
    pitch = _panel_pitch(reach, ins) if panels else _pitch(ins, turned=turned)
    head |= {par.TURNED: int(turned), par.CELLS: math.prod(band) if cells else 0, par.PITCH: pitch}
    head[par.PANELS] = int(panels)
    head |= three_words(par.LOW_3, reach.low) | three_words(par.HIGH_3, reach.high) | {par.LANE_BYTES: lane}
    return _finished(head, (band, bands, count), records, tables + [r for residue in residues for r in residue])


def _finished(
    head: dict[int, int], boxes: tuple[Triple, Triple, Triple], records: list[dict[int, int]], tables: list[int]
) -> Plan:
    """The plan; boxes: lengths of a band, bands and cells along every axis."""
    head |= {par.PHASES: len(records), par.PHASE_TABLE: par.GATHER_WORDS}
    for at, values in zip((par.BAND_3, par.BANDS_3, par.ALL_CELLS_3), boxes, strict=True):
        head |= three_words(at, values)
    blocks = [words(head, par.GATHER_WORDS), *(words(r, par.PHASE_WORDS) for r in records), tables]
    parameters = np.array([word for block in blocks for word in block], np.int64)
    return Plan(conv_gather.functions()[2].address, parameters, head[par.PACK_BYTES], head[par.LANE_BYTES])


def _far(c: Correlation, head: dict[int, int], phases: list[_Phase], steps: Triple, count: Triple) -> Plan:
    """For `conv_far`: bands of a few cells, all by themselves."""
    outs, ins = head[par.OUTS], head[par.INS]
    band, cells = band_of(count, math.prod, FAR_CELLS, _DENSE)
    bands = three([math.ceil(n / b) for n, b in zip(count, band, strict=True)], 1)
    pitch, tiles = min(FAR_CHANNELS, math.ceil(ins / VECTOR) * VECTOR), math.ceil(outs / COLUMNS)
    shifted = [_shifts(phase, steps, quotients=False) for phase in phases]
    records, tables = _records(c, phases, shifted, [(0, 0, 0)], (COLUMNS, 0, ins))
    head |= {par.FAR: 1, par.PACK_BYTES: 0, par.ROUND_GROUPS: c.groups, par.ROUND_TILES: tiles, par.SPLIT: tiles}
    head |= {par.ITEMS: c.batch * c.groups * math.prod(bands) * tiles, par.CELLS: cells, par.PITCH: pitch}
    lane = 8 * (ROWS + 2) + 4 * ((cells + ROWS) * (COLUMNS + pitch) + pitch * COLUMNS + VECTOR * (cells + VECTOR))
    head[par.LANE_BYTES] = lane
    return _finished(head, (band, bands, count), records, tables)


def _records(
    c: Correlation,
    phases: list[_Phase],
    shifted: list[list[tuple[Triple, Triple]]],
    residues: list[Triple],
    sizes: tuple[int, int, int],
) -> tuple[list[dict[int, int]], list[int]]:
    """The words of the phases and the tables of their taps; sizes: channels and number of panels, channels of in."""
    width, panels, ins = sizes
    tables: list[int] = []
    records: list[dict[int, int]] = []
    pack = 0
    for n, (phase, shifts) in enumerate(zip(phases, shifted, strict=True)):
        record = {par.FIRST_UNIT: panels * n, par.TAPS: len(phase.taps), par.PACK_AT: pack}
        record |= three_words(
            par.TAPS_3, three([len({tap.kernel[axis] for tap in phase.taps}) for axis in range(3)], 0)
        )
        record[par.TAP_TABLE] = par.GATHER_WORDS + par.PHASE_WORDS * len(phases) + len(tables)
        records.append(record | three_words(par.START_3, phase.start) | three_words(par.COUNT_3, phase.count))
        for tap, (shift, residue) in zip(phase.taps, shifts, strict=True):
            place = sum(k * s for k, s in zip(tap.kernel, c.w_kernel, strict=True))
            tables += [place, *shift, residues.index(residue)]
        pack += panels * len(phase.taps) * ins * width
    return records, tables


def _stencil(head: dict[int, int], phases: list[_Phase]) -> int:
    """The size of the kernel, if `native_stencil` can slide it over the planes as they lie in memory."""
    steps = [head[at + axis] for at in (par.STEP_3, par.OUT_STEP_3) for axis in range(3)]
    dense = head[par.KIND] == F32 and head[par.IN_3 + 2] == head[par.OUT_3 + 2] == 1
    if not dense or set(steps) != {1} or head[par.LENGTH_3 + 2] >= 2**31:
        return 0
    (phase,) = phases
    z, y, x = (sorted({tap.shift[axis] for tap in phase.taps}) for axis in range(3))
    close = len(z) == 1 and len(y) == len(x) and y == list(range(y[0], y[0] + len(y)))
    return len(y) if close and len(y) in SIZES else 0


def _per_axis(choose: Callable[..., int], triples: Sequence[Triple]) -> Triple:
    return three([choose(column) for column in zip(*triples, strict=True)] if triples else [], 0)


def _shifts(phase: _Phase, steps: Triple, *, quotients: bool) -> list[tuple[Triple, Triple]]:
    """(shift, residue) of every tap; as quotients the cells of a residue modulo the step lie in planes of their own."""
    if not quotients:
        return [(tap.shift, (0, 0, 0)) for tap in phase.taps]
    pairs = [[divmod(shift, step) for shift, step in zip(tap.shift, steps, strict=True)] for tap in phase.taps]
    return [(three([q for q, _ in tap], 0), three([r for _, r in tap], 0)) for tap in pairs]


def _planes_floats(reach: _Reach, channels: int, *, turned: bool) -> Callable[[Sequence[int]], int]:
    """How many floats the copy of what a band reads has at most, as planes."""
    assert not turned

    def floats(band: Sequence[int]) -> int:
        plane = math.prod(reach.box(band, _DENSE)) + (reach.high[2] - reach.low[2]) + COLUMNS + 32
        return channels * reach.residues * plane

    return floats


def _panels_pay(head: dict[int, int], reach: _Reach) -> bool:
    """Whether a band is copied tile by tile: no tap shifts, several tiles fit, and it is not read in place instead."""
    fits = reach.low == reach.high and 8 * _panel_pitch(reach, head[par.INS]) <= BAND_FLOATS
    dense = head[par.KIND] == F32 and head[par.IN_3 + 2] == 1 and reach.steps == _DENSE
    return fits and not (dense and head[par.INS] > FEW_CHANNELS)


def _panel_pitch(reach: _Reach, channels: int) -> int:
    """Floats of a tile of cells, an odd number of cache lines."""
    return channels * reach.residues * COLUMNS + 16


def _panels_floats(reach: _Reach, channels: int) -> Callable[[Sequence[int]], int]:
    """As tiles of cells, and a plane of one channel."""

    def floats(band: Sequence[int]) -> int:
        tiles = math.ceil(band[1] * band[2] / COLUMNS)
        return tiles * (band[0] * _panel_pitch(reach, channels) + COLUMNS) + 16

    return floats


def _cells_floats(reach: _Reach, channels: int, *, turned: bool) -> Callable[[Sequence[int]], int]:
    """As cells; turned ones are followed by their results, as cells and as lines."""

    def floats(band: Sequence[int]) -> int:
        cells = math.prod(band)
        results = (cells + ROWS) * COLUMNS + VECTOR * (cells + VECTOR) if turned else 0
        return math.prod(reach.box(band, reach.steps)) * _pitch(channels, turned=turned) + results

    return floats


def _depthwise_floats(reach: _Reach) -> Callable[[Sequence[int]], int]:
    """The copy for one channel and a row of results."""

    def floats(band: Sequence[int]) -> int:
        box = reach.box(band, _DENSE)
        return reach.residues * (math.prod(box) + box[2] + 2 * VECTOR) + band[1] * box[2] + 2 * VECTOR

    return floats


def _depthwise_cells_floats(
    reach: _Reach, lengths: Sequence[int], block: int, *, in_place: bool
) -> Callable[[Sequence[int]], int]:
    """The copy for a block of channels and a row of results; in place, what is in use for one row."""

    def floats(band: Sequence[int]) -> int:
        rows = [1, 1, band[2]] if in_place else band
        box = [min(n, length) for n, length in zip(reach.box(rows, reach.steps), lengths, strict=True)]
        return block * (math.prod(box) + band[2])

    return floats


def _block(c: Correlation, count: Triple, taps: int) -> int:
    """How many channels of NXC data an item has: wide pieces of a cell, and few weights; fewer where images are few."""
    vectors = math.ceil(c.groups / VECTOR)
    bands = max(1, math.prod(count) // _LEAST_CELLS)
    wanted = math.ceil(vectors / math.ceil(4 * processors() / max(c.batch * bands, 1)))
    most = min(_MOST_VECTORS, max(1, _WEIGHTS_FLOATS // (VECTOR * max(taps, 1))))
    return VECTOR * min(vectors, most, max(wanted, _LEAST_VECTORS))


def _exceeds_caches(c: Correlation) -> bool:
    """Whether no cache holds what a depthwise convolution of float32 reads and writes."""
    return 4 * c.batch * c.groups * (math.prod(c.source_length) + math.prod(c.out_length)) > last_level_cache()


def _pitch(channels: int, *, turned: bool) -> int:
    """Floats from cell to cell of a copy: an odd number of vectors, so that a cache holds neighbours apart."""
    vectors = math.ceil(channels / VECTOR)
    if not turned and vectors * VECTOR != channels:
        return channels
    return VECTOR * (vectors + 1 - vectors % 2)


def _turning_pays(phases: list[_Phase], outs: int, ins: int, count: Triple, steps: Triple) -> bool:
    """Whether NCX data are computed as cells: fewer vector operations, the copies included."""
    taps = sum(len(phase.taps) for phase in phases)
    cells, rows = math.prod(count), math.prod(count[:2])
    shifts = [tap.shift[2] for phase in phases for tap in phase.taps] or [0]
    spread = (max(shifts) - min(shifts)) // steps[2]
    long_row = rows * (count[2] + spread)  # the gaps between rows are computed too
    tile_rows = outs // ROWS * ROWS + TILE_ROWS[outs % ROWS]
    planes = taps * ins * tile_rows * math.ceil(long_row / VECTOR)
    turned = taps * ins * (cells // ROWS * ROWS + TILE_ROWS[cells % ROWS]) * math.ceil(outs / VECTOR)
    copies = (math.prod(steps) * cells * ins + len(phases) * cells * outs) // 3
    return turned + copies < planes


def _cut_for_threads(band: Triple, count: Triple, images: int) -> Triple:
    """Smaller bands along the first axis that has several cells, so that every thread has some."""
    axis = next((axis for axis in range(3) if band[axis] > 1), 2)
    bands = math.prod(math.ceil(n / b) for n, b in zip(count, band, strict=True))
    wanted = math.ceil(4 * processors() / max(images * bands, 1))
    most = max(1, math.prod(band) // _LEAST_CELLS)
    length = math.ceil(band[axis] / min(wanted, most))
    return three([length if n == axis else band[n] for n in range(3)], 1)
