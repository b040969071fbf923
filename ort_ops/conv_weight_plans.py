"""Plans of the weight gradient of a correlation, for `conv_weights` and `conv_depthwise`. Plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from . import conv_depthwise, conv_weights
from . import conv_parameters as par
from .conv_plans import BAND_FLOATS, Correlation, Triple, band_of, processors, three, three_words, words
from .native_bridge import Plan
from .native_micro import ROWS
from .native_source import VECTOR

MAX_PARTS = 16
ITEMS_PER_PROCESSOR = 4


def _dense_axes(c: Correlation) -> Correlation:
    """A kernel of one cell without padding takes every S-th cell: the others are no part of the image."""
    strides, lengths, cells = list(c.strides), list(c.source_length), list(c.source.cells)
    for axis in range(3):
        if c.kernel[axis] == 1 and c.pads[axis] == 0 and (c.out_length[axis] - 1) * strides[axis] < lengths[axis]:
            cells[axis] *= strides[axis]
            strides[axis], lengths[axis] = 1, c.out_length[axis]
    source = replace(c.source, cells=three(cells, 0))
    return replace(c, strides=three(strides, 1), source_length=three(lengths, 1), source=source)


def _turned(c: Correlation) -> bool:
    """Whether the source's channels become the columns: where more of the columns' lanes would do something."""

    def used(channels: int) -> float:
        return channels / (math.ceil(channels / VECTOR) * VECTOR)

    if math.prod(c.kernel) == 1:
        return (used(c.s), c.d) > (used(c.d), c.s)
    return used(c.s) > 1.9 * used(c.d)


def weights_plan(c: Correlation, kind: int, inputs: tuple[int, int]) -> Plan:
    """The plan of the gradient with respect to the weights; `inputs` are source and destination."""
    c = _dense_axes(c)
    if c.s == c.d == 1 and c.groups > 1:
        work, run = conv_depthwise.functions()
        return Plan(run.address, _depthwise(c, kind, inputs, work.address))
    work, reduce, run = conv_weights.functions()
    return Plan(run.address, _product(c, kind, inputs, (work.address, reduce.address)))


def _depthwise(c: Correlation, kind: int, inputs: tuple[int, int], worker: int) -> np.ndarray:
    """Bands are some rows; an item is a channel, or as many as a vector holds."""
    (low, high), table = _taps(c)
    deep, lines = high[0] - low[0] + 1, c.out_length[1]

    def floats(lines: int) -> int:
        tall = (lines - 1) * c.strides[1] + high[1] - low[1] + 1
        width = c.out_length[2]
        if c.last:
            return VECTOR * (lines * width + deep * tall * ((width - 1) * c.strides[2] + high[2] - low[2] + 1))
        width += VECTOR
        return lines * width + c.strides[2] * deep * tall * (width + (high[2] - low[2]) // c.strides[2] + 2)

    while lines > 1 and floats(lines) > BAND_FLOATS // 4:
        lines = math.ceil(lines / 2)
    head = _head(c, kind, inputs) | three_words(par.C_BAND_3, (1, lines, c.out_length[2]))
    head |= three_words(par.C_LOW_3, low) | three_words(par.C_HIGH_3, high)
    taps = math.prod(c.kernel)
    head |= {
        par.C_WORKER: worker,
        par.C_ITEMS: math.ceil(c.groups / VECTOR) if c.last else c.groups,
        par.C_LANE_BYTES: 8 * taps * (VECTOR + 1) + 64 + 4 * floats(lines),
    }
    return np.array([*words(head, par.C_WORDS), *table], np.int64)


def _taps(c: Correlation) -> tuple[tuple[Triple, Triple], list[int]]:
    """The least and the greatest shift, and the table of taps."""
    shifts = [[k * d - p for k in range(n)] for n, d, p in zip(c.kernel, c.dilations, c.pads, strict=True)]
    low, high = three([s[0] for s in shifts], 0), three([s[-1] for s in shifts], 0)
    table: list[int] = []
    for z, sz in enumerate(shifts[0]):
        for y, sy in enumerate(shifts[1]):
            for x, sx in enumerate(shifts[2]):
                table += [sum(k * s for k, s in zip((z, y, x), c.w_kernel, strict=True)), sz, sy, sx]
    return (low, high), table


def _head(c: Correlation, kind: int, inputs: tuple[int, int]) -> dict[int, int]:
    """What every plan states: types, sizes and strides."""
    head = {
        par.C_KIND: kind,
        par.C_BATCH: c.batch,
        par.C_GROUPS: c.groups,
        par.C_S: c.s,
        par.C_D: c.d,
        par.C_LAST: int(c.last),
        par.C_SOURCE: inputs[0],
        par.C_DEST: inputs[1],
        par.C_S_N: c.source.n,
        par.C_S_C: c.source.c,
        par.C_D_N: c.destination.n,
        par.C_D_C: c.destination.c,
        par.C_W_D: c.w_d,
        par.C_W_S: c.w_s,
        par.C_TAPS: math.prod(c.kernel),
        par.C_TAP_TABLE: par.C_WORDS,
    }
    for at, values in (
        (par.C_S_3, c.source.cells),
        (par.C_D_3, c.destination.cells),
        (par.C_LENGTH_3, c.source_length),
        (par.C_OUT_3, c.out_length),
        (par.C_STEP_3, c.strides),
    ):
        head |= three_words(at, values)
    return head


def _product(c: Correlation, kind: int, inputs: tuple[int, int], functions: tuple[int, int]) -> np.ndarray:
    """Bands are boxes; an item is a block of rows of the product and a part of the cells."""
    turned = _turned(c)
    taps = math.prod(c.kernel)
    (low, high), table = _taps(c)
    rows, columns = (c.d, c.s) if turned else (c.s, c.d)
    padded = math.ceil(columns / VECTOR) * VECTOR
    band, floats = _band(c, turned, padded, low, high)
    bands = three([math.ceil(n / b) for n, b in zip(c.out_length, band, strict=True)], 1)
    units = c.batch * math.prod(bands)
    row_lines = rows if turned else rows * taps
    per_row = padded * taps if turned else padded
    tensors = c.batch * c.groups * (c.s * math.prod(c.source_length) + c.d * math.prod(c.out_length))
    weights = c.groups * row_lines * per_row
    parts = max(1, min(MAX_PARTS, units, tensors // (16 * weights) if weights else 1))
    blocks = min(rows, math.ceil(ITEMS_PER_PROCESSOR * processors() / (parts * c.groups)), math.ceil(row_lines / ROWS))
    blocks = max(1, blocks)
    c_rows = row_lines + blocks * ROWS
    lane = 8 * (math.ceil(rows / blocks) * (1 if turned else taps) + ROWS) + 16 * band[0] * band[1] + 64 + 4 * floats
    head = _head(c, kind, inputs) | {
        par.C_WORKER: functions[0],
        par.C_REDUCER: functions[1],
        par.C_TURNED: int(turned),
        par.C_UNITS: units,
        par.C_ITEMS: blocks * parts * c.groups,
        par.C_DENSE: int(table[:: par.C_TAP_WORDS] == list(range(taps))),
        par.C_PARTS: parts,
        par.C_BLOCKS: blocks,
        par.C_COLUMNS: padded,
        par.C_ROWS: c_rows,
        par.C_PART_BYTES: 4 * parts * c.groups * c_rows * per_row,
        par.C_LANE_BYTES: lane,
    }
    for at, values in ((par.C_LOW_3, low), (par.C_HIGH_3, high), (par.C_BAND_3, band), (par.C_BANDS_3, bands)):
        head |= three_words(at, values)
    return np.array([*words(head, par.C_WORDS), *table], np.int64)


def _band(c: Correlation, turned: bool, padded: int, low: Triple, high: Triple) -> tuple[Triple, int]:
    """A box of destination cells, and how many floats the copies of both operands have at most."""

    def floats(band: list[int]) -> int:
        cells = math.prod(band)
        box = math.prod((b - 1) * s + 1 + h - lo for b, s, lo, h in zip(band, c.strides, low, high, strict=True))
        x = box * padded if turned else c.s * (box + 32)
        dy = c.d * (cells + 32) if turned else cells * padded
        return x + dy

    return band_of(c.out_length, floats, BAND_FLOATS, (1, 1, min(c.out_length[2], 64)))
