"""Parameters of `conv_winograd` and `conv_winograd_weights`, and which correlations they serve. Plain Python."""

from __future__ import annotations

import math

import numpy as np

from . import conv_winograd as at
from . import conv_winograd_weights as of
from .conv_plans import Correlation, processors
from .native_bridge import Plan
from .native_micro import COLUMNS, ROWS
from .native_source import VECTOR

MIN_CHANNELS = 16  # on either side of a group: below, the transforms outweigh what they save
V_FLOATS = 128 << 10  # of transformed tiles, aimed at: half of a second-level cache
MAX_V_FLOATS = 1 << 20  # of one row of tiles; beyond, the sum over taps is used, which cuts rows
MAX_PARTS = 8  # of a weight gradient
MIN_TILES = 128  # that a sum is fetched and stored for
SUM_FLOATS = 2 << 20  # of the sums of all parts, aimed at
MAX_SUM_FLOATS = 16 << 20
_KERNEL, _ONES = (1, 3, 3), (1, 1, 1)


def suits(c: Correlation) -> bool:
    """Two axes, 3×3, no strides, dilations or channels last, and channels enough."""
    plain = c.kernel == _KERNEL and c.strides == _ONES and c.dilations == _ONES and not c.last
    flat = c.source_length[0] == c.out_length[0] == 1 and c.pads[0] == 0
    row = 16 * max(c.s, c.d) * (max(c.source_length[2], c.out_length[2]) // 2 + 1)
    return plain and flat and min(c.s, c.d) >= MIN_CHANNELS and row <= MAX_V_FLOATS


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
    blocks, tiles = math.ceil(rows / band) * c.groups, math.ceil(outs / ROWS)
    split = 1 if blocks >= 2 * processors() else min(tiles, math.ceil(2 * processors() / blocks))
    columns = _odd_lines(math.ceil(band * tiles_x / COLUMNS) * COLUMNS + VECTOR)
    pitch = 2 * math.ceil(tiles_x / VECTOR) * VECTOR + 2 * VECTOR
    panel = math.ceil((ins * ROWS + at.WIDE) / 16) * 16
    units = c.groups * tiles
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
        at.LANE_BYTES: 4 * (at.LANE_HEAD + (2 * band + 2) * pitch + 16 + 16 * ins * columns + 2 * VECTOR),
        at.PANEL: panel,
        at.V_COLUMNS: columns,
        at.PITCH: pitch,
    }
    return Plan(run.address, np.array([words[n] for n in range(at.WORDS)], np.int64))


def suits_weights(c: Correlation) -> bool:
    """The same, and sums that need not be held several times over."""
    return suits(c) and 16 * c.groups * c.d * c.s <= MAX_SUM_FLOATS


def weights_plan(c: Correlation, kind: int) -> Plan:
    """The weight gradient; inputs 0 and 1 are source and destination."""
    tiles_y, tiles_x = (math.ceil(n / 2) for n in c.out_length[1:])
    rows, tiles = c.batch * tiles_y, math.ceil(c.d / ROWS)
    columns = math.ceil(c.s / COLUMNS) * COLUMNS
    sums = 16 * c.groups * (tiles * ROWS) * columns
    parts = max(1, min(SUM_FLOATS // sums, MAX_PARTS, rows))
    split = min(tiles, math.ceil(processors() / (parts * c.groups)))  # each transforms the source anew
    channels = math.ceil(tiles / split) * ROWS
    band = max(MIN_TILES, V_FLOATS * 2 // (16 * (columns + channels))) // tiles_x
    band = max(1, min(math.ceil(rows / parts), band))
    pitch = 2 * math.ceil((tiles_x + 1) / VECTOR) * VECTOR + VECTOR
    d_columns = _odd_lines(band * tiles_x + VECTOR)
    turned = 2 * min(band, tiles_y) + 2
    lane = VECTOR * pitch + turned * pitch * columns + 16 * (band * tiles_x * columns + channels * d_columns) + VECTOR
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
        of.BAND: band,
        of.PARTS: parts,
        of.SPLIT: split,
        of.ITEMS: parts * c.groups * split,
        of.SUM_BYTES: 4 * parts * sums,
        of.LANE_BYTES: 4 * lane,
        of.PITCH: pitch,
        of.S_COLUMNS: columns,
        of.D_COLUMNS: d_columns,
        of.D_ROWS: channels,
        of.TURNED_ROWS: turned,
        of.U_ROWS: tiles * ROWS,
    }
    return Plan(run.address, np.array([words[n] for n in range(of.WORDS)], np.int64))


def _odd_lines(floats: int) -> int:
    """As many floats or more, an odd number of cache lines, so that rows do not compete for one place in the cache."""
    lines = math.ceil(floats / 16)
    return 16 * (lines + 1 - lines % 2)
