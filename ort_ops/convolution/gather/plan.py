"""Plans of sums over taps, for `gather.kernel`: a correlation, or the data gradient of one. Plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather import kernel as gather_kernel
from onnx_backprop.ort_ops.convolution.gather.bands import (
    DENSE,
    Copy,
    bands_of,
    copy_of,
    cut,
    lane_bytes,
    lanes_pay,
    turning_pays,
)
from onnx_backprop.ort_ops.convolution.gather.phases import Phase, Sums, data_phases, forward_phase, shifts
from onnx_backprop.ort_ops.convolution.problem import (
    Correlation,
    Tensor,
    Triple,
    band_of,
    rounds,
    shared_limit,
    three,
    three_words,
    words,
)
from onnx_backprop.ort_ops.runtime.bridge import Plan
from onnx_backprop.ort_ops.runtime.call import POOL_BYTES
from onnx_backprop.ort_ops.runtime.compile import VECTOR
from onnx_backprop.ort_ops.runtime.machine import last_level_cache, processors
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS

FAR_CELLS, FAR_CHANNELS = 256, 15 * VECTOR  # of a band, and held at once, where sums reach too far for anything else


def data_gradient(c: Correlation, kind: int) -> Plan:
    """The gradient with respect to the source; inputs 0 and 1 are data and weights."""
    head = _head(c, kind, (c.s, c.d), c.destination, c.source, c.out_length)
    head |= three_words(par.STEP_3, DENSE) | three_words(par.OUT_STEP_3, c.strides)
    head |= {par.W_OUT: c.w_s, par.W_IN: c.w_d, par.W_GROUP: c.d * c.w_d}
    return _gather(_sums(c, head, data_phases(c), DENSE))


def forward(c: Correlation, kind: int, *, bias: int = 0) -> Plan:
    """The correlation itself; `bias` is the input that is added to it, 0: none."""
    head = _head(c, kind, (c.d, c.s), c.source, c.destination, c.source_length)
    head |= three_words(par.STEP_3, c.strides) | three_words(par.OUT_STEP_3, DENSE)
    head |= {par.W_OUT: c.w_d, par.W_IN: c.w_s, par.W_GROUP: c.d * c.w_d, par.BIAS: bias}
    return _gather(_sums(c, head, [forward_phase(c)], c.strides))


def _head(
    c: Correlation, kind: int, channels: tuple[int, int], data: Tensor, out: Tensor, length: Triple
) -> dict[int, int]:
    head = {par.KIND: kind}
    head |= {par.BATCH: c.batch, par.GROUPS: c.groups, par.OUTS: channels[0], par.INS: channels[1]}
    head |= {par.LAST: int(c.last), par.DATA: 0, par.WEIGHTS: 1}
    head |= {par.IN_N: data.n, par.IN_C: data.c, par.OUT_N: out.n, par.OUT_C: out.c}
    head |= three_words(par.IN_3, data.cells) | three_words(par.OUT_3, out.cells) | three_words(par.LENGTH_3, length)
    return head


def _sums(c: Correlation, head: dict[int, int], phases: list[Phase], steps: Triple) -> Sums:
    sums = Sums(c, head, phases, turned=False)
    turned = lanes_pay(sums) if sums.depthwise else turning_pays(phases, head[par.OUTS], head[par.INS], steps)
    return replace(sums, turned=turned and not c.last)


def _gather(sums: Sums) -> Plan:
    """The head, the phases, and the tables of taps and residues behind them."""
    copy = copy_of(sums)
    band = cut(sums, copy)
    lane = lane_bytes(sums, copy, band)
    if lane > POOL_BYTES or not _panel_fits(sums):
        return _far(sums)
    at_once = _at_once(sums, copy.groups(sums))
    records, tables = _records(sums, sums.shifted, sums.residues, math.prod(at_once))
    residue_table = par.GATHER_WORDS + par.PHASE_WORDS * len(records) + len(tables)
    head = sums.head | _shares(sums, band, at_once) | _ways(sums, copy, band)
    head |= {par.LANE_BYTES: lane, par.RESIDUES: len(sums.residues), par.RESIDUE_TABLE: residue_table}
    return _finished(sums, head, band, records, tables + [r for residue in sums.residues for r in residue])


def _panel_fits(sums: Sums) -> bool:
    """Whether threads may share the packed weights of a tile; those of a depthwise convolution are not packed."""
    return sums.depthwise or sums.panel_bytes <= shared_limit(sums.c, sums.head[par.KIND])


def _at_once(sums: Sums, groups: int) -> tuple[int, int]:
    """(groups, tiles of output channels of a group) whose weights are packed at a time."""
    tiles = math.ceil(sums.outs / sums.tile)
    if sums.depthwise:
        return groups, tiles
    return rounds(groups, tiles, sums.panel_bytes, shared_limit(sums.c, sums.head[par.KIND]))


def _shares(sums: Sums, band: Triple, at_once: tuple[int, int]) -> dict[int, int]:
    """What threads take: the bands of all images, and where these are few, parts of their tiles."""
    groups, tiles = at_once
    items = sums.c.batch * groups * math.prod(bands_of(sums.count, band))
    split = 1 if items >= 2 * processors() else min(tiles, math.ceil(4 * processors() / max(items, 1)))
    shared = 0 if sums.depthwise else groups * tiles * sums.panel_bytes
    return {
        par.ITEMS: items * split,
        par.SPLIT: split,
        par.PACK_BYTES: shared,
        par.UNITS: groups * tiles * len(sums.phases),
        par.ROUND_GROUPS: groups,
        par.ROUND_TILES: tiles,
    }


def _ways(sums: Sums, copy: Copy, band: Triple) -> dict[int, int]:
    """Which loops compute a band, and how they find what they read."""
    ways = {
        par.CELLS: math.prod(band) if sums.cells else 0,
        par.TURNED: int(sums.turned),
        par.PANELS: int(copy.panels),
        par.PITCH: copy.pitch,
        par.ALL_TAPS: sums.all_taps,
    }
    if sums.depthwise:
        ways |= {par.DEPTHWISE: sums.c.groups, par.GROUPS: copy.groups(sums)}
        ways |= {par.STENCIL: sums.stencil, par.BLOCK: copy.block, par.STREAMED: int(_exceeds_caches(sums.c))}
    return ways | three_words(par.LOW_3, sums.reach.low) | three_words(par.HIGH_3, sums.reach.high)


def _exceeds_caches(c: Correlation) -> bool:
    """Whether no cache holds what a depthwise convolution of float32 reads and writes."""
    return 4 * c.batch * c.groups * (math.prod(c.source_length) + math.prod(c.out_length)) > last_level_cache()


def _strategy(sums: Sums, head: dict[int, int]) -> str:
    """Whose loops compute a band."""
    if head.get(par.FAR):
        return "fallback"
    if sums.depthwise:
        return "depthwise channels" if sums.c.last else "depthwise transposed" if sums.turned else "depthwise"
    return "pixels" if sums.cells else "panels" if head[par.PANELS] else "planes"


def _far(sums: Sums) -> Plan:
    """For `gather.fallback`: bands of a few cells, all by themselves."""
    band, cells = band_of(sums.count, math.prod, FAR_CELLS, DENSE)
    groups, tiles = sums.c.groups, math.ceil(sums.outs / COLUMNS)
    pitch = min(FAR_CHANNELS, math.ceil(sums.ins / VECTOR) * VECTOR)
    shifted = [shifts(phase, sums.steps, quotients=False) for phase in sums.phases]
    records, tables = _records(sums, shifted, [(0, 0, 0)], 0)
    items = sums.c.batch * groups * math.prod(bands_of(sums.count, band)) * tiles
    lane = 8 * (ROWS + 2) + 4 * ((cells + ROWS) * (COLUMNS + pitch) + pitch * COLUMNS + VECTOR * (cells + VECTOR))
    head = sums.head | {par.FAR: 1, par.ITEMS: items, par.SPLIT: tiles, par.CELLS: cells, par.PITCH: pitch}
    head |= {par.ROUND_GROUPS: groups, par.ROUND_TILES: tiles, par.PACK_BYTES: 0, par.LANE_BYTES: lane}
    return _finished(sums, head, band, records, tables)


def _records(
    sums: Sums, shifted: list[list[tuple[Triple, Triple]]], residues: list[Triple], panels: int
) -> tuple[list[dict[int, int]], list[int]]:
    """The words of the phases and the tables of their taps; `panels` are packed at a time."""
    tables: list[int] = []
    records: list[dict[int, int]] = []
    pack = 0
    for n, (phase, of_taps) in enumerate(zip(sums.phases, shifted, strict=True)):
        record = {par.FIRST_UNIT: panels * n, par.TAPS: len(phase.taps), par.PACK_AT: pack}
        lengths = [len({tap.kernel[axis] for tap in phase.taps}) for axis in range(3)]
        record[par.TAP_TABLE] = par.GATHER_WORDS + par.PHASE_WORDS * len(sums.phases) + len(tables)
        record |= three_words(par.TAPS_3, three(lengths, 0))
        records.append(record | three_words(par.START_3, phase.start) | three_words(par.COUNT_3, phase.count))
        for tap, (shift, residue) in zip(phase.taps, of_taps, strict=True):
            place = sum(k * s for k, s in zip(tap.kernel, sums.c.w_kernel, strict=True))
            tables += [place, *shift, residues.index(residue)]
        pack += panels * len(phase.taps) * sums.ins * sums.tile
    return records, tables


def _finished(sums: Sums, head: dict[int, int], band: Triple, records: list[dict[int, int]], tables: list[int]) -> Plan:
    """The plan: all words in their places."""
    pack, strategies, run = gather_kernel.functions()
    head |= {par.PHASES: len(records), par.PHASE_TABLE: par.GATHER_WORDS}
    head |= {par.WORKER: strategies[_strategy(sums, head)].address}
    head |= {par.PACKER: pack.address if head[par.PACK_BYTES] else 0}
    head |= three_words(par.BAND_3, band) | three_words(par.BANDS_3, bands_of(sums.count, band))
    head |= three_words(par.ALL_CELLS_3, sums.count)
    blocks = [words(head, par.GATHER_WORDS), *(words(r, par.PHASE_WORDS) for r in records), tables]
    parameters = np.array([word for block in blocks for word in block], np.int64)
    return Plan(run.address, parameters, head[par.PACK_BYTES], head[par.LANE_BYTES])
