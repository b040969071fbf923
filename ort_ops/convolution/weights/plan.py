"""Plans of the weight gradient of a correlation, for `weights.kernel` and the depthwise ones. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.depthwise import weights_channels, weights_planes
from onnx_backprop.ort_ops.convolution.problem import (
    BAND_FLOATS,
    LANE_FLOATS,
    Correlation,
    Triple,
    band_of,
    fill_lanes,
    rounds,
    shared_limit,
    three,
    three_words,
    words,
)
from onnx_backprop.ort_ops.convolution.weights import kernel as weights_kernel
from onnx_backprop.ort_ops.runtime.bridge import Plan
from onnx_backprop.ort_ops.runtime.compile import VECTOR
from onnx_backprop.ort_ops.runtime.llvm import F32, ITEM_SIZE
from onnx_backprop.ort_ops.runtime.machine import processors
from onnx_backprop.ort_ops.vector.gemm_tile import ROWS, SPARE_ROWS

MAX_PARTS = 16
ITEMS_PER_PROCESSOR = 4
_LEAST_VECTORS, _MOST_VECTORS = 4, 64  # of a block of channels: pieces of a cell that are read at once
_CELLS_FLOATS = 64 << 10  # of a band and what it reads: two of them stay in the second-level cache


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
        if not (c.last or fill_lanes(c.groups)):
            work, run = weights_planes.functions()
            parameters = _depthwise(c, kind, inputs, work.address)
            return Plan(run.address, parameters, 0, int(parameters[par.C_LANE_BYTES]))
        work, reduce, run = weights_channels.functions()
        parameters = _depthwise_cells(c, kind, inputs, (work.address, reduce.address))
    else:
        work, reduce, run = weights_kernel.functions()
        parameters = _product(c, kind, inputs, (work.address, reduce.address))
    return Plan(run.address, parameters, int(parameters[par.C_PART_BYTES]), int(parameters[par.C_LANE_BYTES]))


def _depthwise(c: Correlation, kind: int, inputs: tuple[int, int], worker: int) -> np.ndarray:
    """NCX data: bands are some rows; an item is a channel."""
    (low, high), table = _taps(c)
    deep, lines, width = high[0] - low[0] + 1, c.out_length[1], c.out_length[2]

    def floats(lines: int, width: int) -> int:
        tall = (lines - 1) * c.strides[1] + high[1] - low[1] + 1
        width += VECTOR
        return lines * width + c.strides[2] * deep * tall * (width + (high[2] - low[2]) // c.strides[2] + 2)

    while lines > 1 and floats(lines, width) > BAND_FLOATS // 4:
        lines = math.ceil(lines / 2)
    while width > VECTOR and floats(lines, width) > BAND_FLOATS:
        width = math.ceil(width / 2)
    head = _head(c, kind, inputs) | three_words(par.C_BAND_3, (1, lines, width))
    head |= three_words(par.C_LOW_3, low) | three_words(par.C_HIGH_3, high)
    taps = math.prod(c.kernel)
    head |= {
        par.C_WORKER: worker,
        par.C_ITEMS: c.groups,
        par.C_LANE_BYTES: 4 * taps * (VECTOR + 2) + 64 + 4 * floats(lines, width),
    }
    return np.array([*words(head, par.C_WORDS), *table], np.int64)


def _depthwise_cells(c: Correlation, kind: int, inputs: tuple[int, int], functions: tuple[int, int]) -> np.ndarray:
    """Channels as lanes: bands are some rows; an item is a part of the bands and a block of channels."""
    (low, high), table = _taps(c)
    taps, vectors, in_place = math.prod(c.kernel), math.ceil(c.groups / VECTOR), c.last and kind == F32
    reach = [h - lo + 1 for lo, h in zip(low, high, strict=True)]

    def cells(lines: int, width: int) -> int:
        """Of a band and of the part of the image that it reads."""
        sizes = [(n - 1) * s + r for n, s, r in zip((1, lines, width), c.strides, reach, strict=True)]
        return lines * width + math.prod(min(n, length) for n, length in zip(sizes, c.source_length, strict=True))

    # What a band reads stays in the second-level cache. It decides what is added up first, so it must depend on the
    # shape alone.
    lines, width, block = c.out_length[1], c.out_length[2], min(vectors, _MOST_VECTORS) if c.last else 1
    while lines > 1 and cells(lines, width) * block * VECTOR > _CELLS_FLOATS:
        lines = math.ceil(lines / 2)
    while width > VECTOR and cells(lines, width) * block * VECTOR > _CELLS_FLOATS:
        width = math.ceil(width / 2)
    bands = c.out_length[0], math.ceil(c.out_length[1] / lines), math.ceil(c.out_length[2] / width)
    units = c.batch * math.prod(bands)
    elements = c.batch * c.groups * (math.prod(c.source_length) + math.prod(c.out_length))
    parts = max(1, min(MAX_PARTS, units, elements * ITEM_SIZE[kind] // (64 * taps * c.groups)))
    wanted = math.ceil(vectors / math.ceil(ITEMS_PER_PROCESSOR * processors() / parts))
    block = min(block, max(wanted, _LEAST_VECTORS))
    limit = shared_limit(c, kind)
    while block > 1 and 4 * parts * taps * block * VECTOR > limit:
        block = math.ceil(block / 2)
    while block > 1 and not in_place and cells(lines, width) * block * VECTOR > LANE_FLOATS:
        block = math.ceil(block / 2)
    blocks = math.ceil(vectors / block)
    of_block = 4 * parts * taps * block * VECTOR
    _, at_once = rounds(1, blocks, of_block, limit)
    copies = 0 if in_place else cells(lines, width) * block * VECTOR
    head = _head(c, kind, inputs) | {
        par.C_WORKER: functions[0],
        par.C_REDUCER: functions[1],
        par.C_UNITS: units,
        par.C_PARTS: parts,
        par.C_BLOCKS: blocks,
        par.C_COLUMNS: block * VECTOR,
        par.C_ROUND_BLOCKS: at_once,
        par.C_ITEMS: parts * at_once,
        par.C_PART_BYTES: at_once * of_block,
        par.C_LANE_BYTES: 8 * taps + 64 + 4 * copies,
    }
    for at, values in (
        (par.C_LOW_3, low),
        (par.C_HIGH_3, high),
        (par.C_BAND_3, (1, lines, width)),
        (par.C_BANDS_3, bands),
        (par.C_KERNEL_3, c.kernel),
    ):
        head |= three_words(at, values)
    ordered = [
        word
        for x in range(c.kernel[2])
        for t in range(x, taps, c.kernel[2])
        for word in table[par.C_TAP_WORDS * t : par.C_TAP_WORDS * (t + 1)]
    ]  # taps of a column beside each other
    return np.array([*words(head, par.C_WORDS), *ordered], np.int64)


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
    band, (of_columns, of_channel) = _band(c, low, high, turned=turned)
    if turned and of_columns > LANE_FLOATS // 2:
        turned = False
        band, (of_columns, of_channel) = _band(c, low, high, turned=turned)
    rows, columns = (c.d, c.s) if turned else (c.s, c.d)
    padded = _padded(columns)
    bands = three([math.ceil(n / b) for n, b in zip(c.out_length, band, strict=True)], 1)
    units = c.batch * math.prod(bands)
    row_lines = rows if turned else rows * taps
    per_row = padded * taps if turned else padded
    tensors = c.batch * c.groups * (c.s * math.prod(c.source_length) + c.d * math.prod(c.out_length))
    weights = c.groups * row_lines * per_row
    parts = max(1, min(MAX_PARTS, units, tensors * ITEM_SIZE[kind] // (64 * weights) if weights else 1))
    limit, items = shared_limit(c, kind), ITEMS_PER_PROCESSOR * processors() / parts
    of_group, most = 4 * parts * (row_lines + SPARE_ROWS) * per_row, min(rows, math.ceil(row_lines / ROWS))
    groups = min(c.groups, max(1, limit // max(of_group, 1)))  # at a time; where one does not fit, some of its blocks
    blocks = max(1, min(most, math.ceil(items / groups) * math.ceil(of_group / limit)))
    if not turned:  # a block copies its own channels
        blocks = max(blocks, min(rows, math.ceil(rows / max(1, (LANE_FLOATS - of_columns) // of_channel))))
    own = math.ceil(rows / blocks)
    lines = own * (1 if turned else taps) + SPARE_ROWS
    groups, at_once = rounds(c.groups, blocks, 4 * parts * lines * per_row, limit)
    channels = math.ceil(at_once * rows / blocks)
    c_rows = (channels if turned else channels * taps) + at_once * SPARE_ROWS
    lane = 8 * (lines + ROWS) + 16 * band[0] * band[1] + 64 + 4 * (of_columns + own * of_channel)
    head = _head(c, kind, inputs) | {
        par.C_WORKER: functions[0],
        par.C_REDUCER: functions[1],
        par.C_TURNED: int(turned),
        par.C_UNITS: units,
        par.C_ITEMS: at_once * parts * groups,
        par.C_DENSE: int(table[:: par.C_TAP_WORDS] == list(range(taps))),
        par.C_PARTS: parts,
        par.C_BLOCKS: blocks,
        par.C_COLUMNS: padded,
        par.C_ROWS: c_rows,
        par.C_PART_BYTES: 4 * parts * groups * c_rows * per_row,
        par.C_LANE_BYTES: lane,
        par.C_ROUND_GROUPS: groups,
        par.C_ROUND_BLOCKS: at_once,
        par.C_ROUND_CHANNELS: channels,
    }
    for at, values in ((par.C_LOW_3, low), (par.C_HIGH_3, high), (par.C_BAND_3, band), (par.C_BANDS_3, bands)):
        head |= three_words(at, values)
    return np.array([*words(head, par.C_WORDS), *table], np.int64)


def _padded(columns: int) -> int:
    return math.ceil(columns / VECTOR) * VECTOR


def _band(c: Correlation, low: Triple, high: Triple, *, turned: bool) -> tuple[Triple, tuple[int, int]]:
    """A box of destination cells, and how many floats the copies have at most: of the columns, of a channel of rows."""

    def floats(band: Sequence[int]) -> tuple[int, int]:
        cells = math.prod(band)
        box = math.prod((b - 1) * s + 1 + h - lo for b, s, lo, h in zip(band, c.strides, low, high, strict=True))
        return (box * _padded(c.s), cells + 32) if turned else (cells * _padded(c.d), box + 32)

    def total(band: Sequence[int]) -> int:
        of_columns, of_channel = floats(band)
        return of_columns + (c.d if turned else c.s) * of_channel

    band, size = band_of(c.out_length, total, BAND_FLOATS, (1, 1, min(c.out_length[2], 64)))
    if size > LANE_FLOATS:
        band, _ = band_of(c.out_length, total, LANE_FLOATS, (1, 1, 1))
    return band, floats(band)
