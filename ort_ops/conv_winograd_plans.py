"""Parameters of `conv_winograd` and `conv_winograd_weights`, and which correlations they serve. Plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from . import conv_winograd as at
from . import conv_winograd_weights as of
from .conv_plans import Correlation, processors, rounds, shared_limit
from .native_bridge import Plan
from .native_call import POOL_BYTES
from .native_llvm import F32
from .native_micro import COLUMNS, ROWS
from .native_source import VECTOR

MIN_CHANNELS = 16  # on either side of a group: below, the transforms outweigh what they save
V_FLOATS = 128 << 10  # of transformed tiles, aimed at: half of a second-level cache
MAX_PARTS = 8  # of a weight gradient
MIN_TILES = 128  # that a sum is fetched and stored for
SUM_FLOATS = 2 << 20  # of the sums of all parts, aimed at
MAX_SUM_FLOATS = 16 << 20
_KERNEL, _ONES = (1, 3, 3), (1, 1, 1)


def suits(c: Correlation) -> bool:
    """Two axes, 3×3, no strides, dilations or channels last, and channels enough."""
    plain = c.kernel == _KERNEL and c.strides == _ONES and c.dilations == _ONES and not c.last
    flat = c.source_length[0] == c.out_length[0] == 1 and c.pads[0] == 0
    if not (plain and flat and min(c.s, c.d) >= MIN_CHANNELS):
        return False
    # of a row of tiles; where it is no pooled block, the sum over taps is used, which cuts rows
    return _lane_bytes(max(c.s, c.d), 1, math.ceil(max(c.source_length[2], c.out_length[2]) / 2)) <= POOL_BYTES


def _pitch(tiles_x: int) -> int:
    """Floats of a row of the source."""
    return 2 * math.ceil(tiles_x / VECTOR) * VECTOR + 2 * VECTOR


def _columns(band: int, tiles_x: int) -> int:
    """Floats of a channel of the transformed tiles."""
    return _odd_lines(math.ceil(band * tiles_x / COLUMNS) * COLUMNS + VECTOR)


def _lane_bytes(ins: int, band: int, tiles_x: int) -> int:
    """Scratch of a thread that computes `band` rows of tiles."""
    transformed = 16 * ins * _columns(band, tiles_x)
    return 4 * (at.LANE_HEAD + (2 * band + 2) * _pitch(tiles_x) + 16 + transformed + 2 * VECTOR)


def plan(c: Correlation, kind: int, *, adjoint: bool, bias: int = 0) -> Plan:
    """The correlation, or its data gradient; inputs 0 and 1 are data and weights, `bias` is an input or 0."""
    data, out = (c.destination, c.source) if adjoint else (c.source, c.destination)
    length, out_length = (c.out_length, c.source_length) if adjoint else (c.source_length, c.out_length)
    outs, ins = (c.s, c.d) if adjoint else (c.d, c.s)
    pads = tuple(2 - p for p in c.pads) if adjoint else c.pads
    _, w_y, w_x = c.w_kernel
    tiles_y, tiles_x = (math.ceil(n / 2) for n in out_length[1:])
    rows = c.batch * tiles_y
    band = max(1, min(rows, max(COLUMNS, V_FLOATS // (16 * ins)) // tiles_x))
    panel = math.ceil((ins * ROWS + at.WIDE) / 16) * 16
    tiles = math.ceil(outs / ROWS)
    groups, at_once = rounds(c.groups, tiles, 4 * 16 * panel, shared_limit(c, kind))
    blocks, units = math.ceil(rows / band) * groups, groups * at_once
    split = 1 if blocks >= 2 * processors() else min(at_once, math.ceil(2 * processors() / blocks))
    pack, work, run = at.functions()
    words = {
        at.WORKER: work.address,
        at.PACKER: pack.address,
        at.KIND: kind,
        at.BATCH: c.batch,
        at.GROUPS: c.groups,
        at.OUTS: outs,
        at.INS: ins,
        at.DATA: 0,
        at.WEIGHTS: 1,
        at.BIAS: bias,
        at.IN_N: data.n,
        at.IN_C: data.c,
        at.IN_Y: data.cells[1],
        at.OUT_N: out.n,
        at.OUT_C: out.c,
        at.OUT_Y: out.cells[1],
        at.LENGTH_Y: length[1],
        at.LENGTH_X: length[2],
        at.OUT_LENGTH_Y: out_length[1],
        at.OUT_LENGTH_X: out_length[2],
        at.PAD_Y: pads[1],
        at.PAD_X: pads[2],
        at.W_FIRST: 2 * (w_y + w_x) if adjoint else 0,
        at.W_OUT: c.w_s if adjoint else c.w_d,
        at.W_IN: c.w_d if adjoint else c.w_s,
        at.W_GROUP: c.d * c.w_d,
        at.W_Y: -w_y if adjoint else w_y,
        at.W_X: -w_x if adjoint else w_x,
        at.TILES_Y: tiles_y,
        at.TILES_X: tiles_x,
        at.BAND: band,
        at.ITEMS: blocks * split,
        at.SPLIT: split,
        at.UNITS: units,
        at.PACK_BYTES: 4 * 16 * units * panel,
        at.LANE_BYTES: _lane_bytes(ins, band, tiles_x),
        at.PANEL: panel,
        at.V_COLUMNS: _columns(band, tiles_x),
        at.PITCH: _pitch(tiles_x),
        at.ROUND_GROUPS: groups,
        at.ROUND_TILES: at_once,
    }
    return Plan(
        run.address,
        np.array([words[n] for n in range(at.WORDS)], np.int64),
        words[at.PACK_BYTES],
        words[at.LANE_BYTES],
    )


@dataclass(frozen=True)
class _Weights:
    """How a weight gradient is cut: into parts of the tiles, channels of a round and of a thread, rows of a band."""

    columns: int  # the source's channels, in whole tiles
    parts: int
    groups: int  # of a round
    tiles: int  # of the destination's channels, of a round
    split: int
    channels: int
    band: int
    pitch: int
    d_columns: int
    turned: int
    sum_bytes: int
    lane_bytes: int


def _weights(c: Correlation, kind: int) -> _Weights:
    tiles_y, tiles_x = (math.ceil(n / 2) for n in c.out_length[1:])
    rows, tiles = c.batch * tiles_y, math.ceil(c.d / ROWS)
    columns = math.ceil(c.s / COLUMNS) * COLUMNS
    sums, limit = 16 * c.groups * (tiles * ROWS) * columns, shared_limit(c, kind)
    parts = max(1, min(SUM_FLOATS // sums, MAX_PARTS, rows, limit // (4 * sums)))
    groups, at_once = rounds(c.groups, tiles, 4 * 16 * parts * ROWS * columns, limit)
    pitch = 2 * math.ceil((tiles_x + 1) / VECTOR) * VECTOR + VECTOR
    split = min(at_once, math.ceil(processors() / (parts * groups)))  # each transforms the source anew
    while True:
        channels = math.ceil(at_once / split) * ROWS
        band = max(MIN_TILES, V_FLOATS * 2 // (16 * (columns + channels))) // tiles_x
        band = max(1, min(math.ceil(rows / parts), band))
        d_columns, turned = _odd_lines(band * tiles_x + VECTOR), 2 * min(band, tiles_y) + 2
        tiles_of_band = 16 * (band * tiles_x * columns + channels * d_columns)
        lane = 4 * (VECTOR * pitch + turned * pitch * columns + tiles_of_band + VECTOR)
        if lane <= POOL_BYTES or split == at_once:
            break
        split += 1
    sum_bytes = 4 * 16 * parts * groups * at_once * ROWS * columns
    return _Weights(
        columns, parts, groups, at_once, split, channels, band, pitch, d_columns, turned, sum_bytes, lane
    )  # fmt: skip


def suits_weights(c: Correlation) -> bool:
    """The same, sums that are not transformed back too often, and a row of tiles that fits a pooled block."""
    return suits(c) and 16 * c.groups * c.d * c.s <= MAX_SUM_FLOATS and _weights(c, F32).lane_bytes <= POOL_BYTES


def weights_plan(c: Correlation, kind: int) -> Plan:
    """The weight gradient; inputs 0 and 1 are source and destination."""
    cut = _weights(c, kind)
    tiles_y, tiles_x = (math.ceil(n / 2) for n in c.out_length[1:])
    work, reduce, run = of.functions()
    _, w_y, w_x = c.w_kernel
    words = {
        of.WORKER: work.address,
        of.REDUCER: reduce.address,
        of.KIND: kind,
        of.BATCH: c.batch,
        of.GROUPS: c.groups,
        of.D: c.d,
        of.S: c.s,
        of.SOURCE: 0,
        of.DEST: 1,
        of.S_N: c.source.n,
        of.S_C: c.source.c,
        of.S_Y: c.source.cells[1],
        of.D_N: c.destination.n,
        of.D_C: c.destination.c,
        of.D_Y: c.destination.cells[1],
        of.LENGTH_Y: c.source_length[1],
        of.LENGTH_X: c.source_length[2],
        of.OUT_LENGTH_Y: c.out_length[1],
        of.OUT_LENGTH_X: c.out_length[2],
        of.PAD_Y: c.pads[1],
        of.PAD_X: c.pads[2],
        of.W_D: c.w_d,
        of.W_S: c.w_s,
        of.W_Y: w_y,
        of.W_X: w_x,
        of.TILES_Y: tiles_y,
        of.TILES_X: tiles_x,
        of.BAND: cut.band,
        of.PARTS: cut.parts,
        of.SPLIT: cut.split,
        of.ITEMS: cut.parts * cut.groups * cut.split,
        of.SUM_BYTES: cut.sum_bytes,
        of.LANE_BYTES: cut.lane_bytes,
        of.PITCH: cut.pitch,
        of.S_COLUMNS: cut.columns,
        of.D_COLUMNS: cut.d_columns,
        of.D_ROWS: cut.channels,
        of.TURNED_ROWS: cut.turned,
        of.U_ROWS: cut.tiles * ROWS,
        of.ROUND_GROUPS: cut.groups,
        of.ROUND_TILES: cut.tiles,
    }
    return Plan(
        run.address,
        np.array([words[n] for n in range(of.WORDS)], np.int64),
        words[of.SUM_BYTES],
        words[of.LANE_BYTES],
    )


def _odd_lines(floats: int) -> int:
    """As many floats or more, an odd number of cache lines, so that rows do not compete for one place in the cache."""
    lines = math.ceil(floats / 16)
    return 16 * (lines + 1 - lines % 2)
