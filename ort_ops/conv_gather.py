"""Sums over the taps of a kernel, compiled: the data gradient of a convolution, and a correlation with a stride.

    out[n, m, q·S' + r] = Σ_{c, t} w[m, c, t] · in[n, c, q·S + shift(t)]

for every phase r. A correlation has one phase and S' = 1; the data gradient has S = 1 and one phase for every residue
of the source index modulo the stride S', each with the taps that reach it (`conv_plans`). No image is unrolled: a band
of output cells is computed from a float32 copy of the cells it reads, with zeros around.

Data NCX: the copy holds planes of one pitch, so that all cells of the band are one long row that a tap shifts; columns
of the tiles are cells, their rows output channels. Data NXC: the columns are output channels, the rows are cells. The
weights are packed once per call in the order in which the tiles read them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import njit, types

from . import conv_parameters as par
from .conv_cells import copy_cells, copy_planes
from .conv_epilogue import add_to_columns, add_to_rows, bias_of
from .native_bridge import keep
from .native_call import (
    CALL_INPUTS,
    CALL_OUTPUT,
    CALL_PARAMETERS,
    CALL_RUNTIME,
    acquire,
    lanes,
    no_memory,
    parallel,
    release,
    take,
)
from .native_llvm import F32, exchange, load_i64, stack, store_i64
from .native_micro import COLUMNS, ROWS, TILE_ROWS, multiply
from .native_rows import clear, scatter_run, write_run
from .native_source import VECTOR, exported

_PAGE = 4096
_job = stack(par.JOB_WORDS)
_bias = stack(COLUMNS)


@njit
def _get3(block, at):
    return load_i64(block, at), load_i64(block, at + 1), load_i64(block, at + 2)


@njit
def _phase_of(p, index, first):
    """The phase whose range of items or units, as entry `first` says, holds an index."""
    at = load_i64(p, par.PHASES) - 1
    phase = p + 8 * (load_i64(p, par.PHASE_TABLE) + par.PHASE_WORDS * at)
    while load_i64(phase, first) > index:
        phase -= 8 * par.PHASE_WORDS
    return phase


@njit
def _tiles(p):
    width = COLUMNS if load_i64(p, par.LAST) else ROWS
    return (load_i64(p, par.OUTS) + width - 1) // width, width


# ----- weights ------


@njit
def _pack(job, unit):
    """One tile of the packed weights: for every tap and channel `width` output channels, zeros beyond the last."""
    call = load_i64(job, par.JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    phase = _phase_of(p, unit, par.FIRST_UNIT)
    tiles, width = _tiles(p)
    unit -= load_i64(phase, par.FIRST_UNIT)
    group, tile = unit // tiles, unit % tiles
    source = load_i64(call, CALL_INPUTS + load_i64(p, par.WEIGHTS))
    kind, channels, taps = load_i64(p, par.KIND), load_i64(p, par.INS), load_i64(phase, par.TAPS)
    w_out, w_in = load_i64(p, par.W_OUT), load_i64(p, par.W_IN)
    target = load_i64(job, par.JOB_SHARED) + 4 * (load_i64(phase, par.PACK_AT) + unit * taps * channels * width)
    count = min(width, load_i64(p, par.OUTS) - tile * width)
    first = group * load_i64(p, par.W_GROUP) + tile * width * w_out
    table = p + 8 * load_i64(phase, par.TAP_TABLE)
    if count < width:
        clear(target, 0, taps * channels * width)
    for c in range(channels):
        for tap in range(taps):
            start = first + c * w_in + load_i64(table, par.TAP_WORDS * tap + par.TAP_WEIGHT)
            scatter_run(kind, target, (tap * channels + c) * width, 1, source, start, w_out, count)


# ----- bands ------


@njit
def _band(phase, item):
    """First out cells and lengths of a band."""
    _, bands_y, bands_x = _get3(phase, par.BANDS_3)
    size_z, size_y, size_x = _get3(phase, par.BAND_3)
    count_z, count_y, count_x = _get3(phase, par.COUNT_3)
    z, y, x = item // (bands_x * bands_y) * size_z, item // bands_x % bands_y * size_y, item % bands_x * size_x
    return (z, y, x), (min(size_z, count_z - z), min(size_y, count_y - y), min(size_x, count_x - x))


@njit
def _out_at(p, phase, n, group, cell):
    """Element index in the output of a band's first cell, and the distance of its cells along each axis."""
    start_z, start_y, start_x = _get3(phase, par.START_3)
    step_z, step_y, step_x = _get3(p, par.OUT_STEP_3)
    out_z, out_y, out_x = _get3(p, par.OUT_3)
    at = n * load_i64(p, par.OUT_N) + group * load_i64(p, par.OUTS) * load_i64(p, par.OUT_C)
    at += (start_z + cell[0] * step_z) * out_z + (start_y + cell[1] * step_y) * out_y
    return at + (start_x + cell[2] * step_x) * out_x, (step_z * out_z, step_y * out_y, step_x * out_x)


@njit
def _item(job, item, scratch):
    call = load_i64(job, par.JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    phase = _phase_of(p, item, par.FIRST_ITEM)
    item -= load_i64(phase, par.FIRST_ITEM)
    splits, groups, batch = load_i64(p, par.SPLIT), load_i64(p, par.GROUPS), load_i64(p, par.BATCH)
    split, item = item % splits, item // splits
    group, item = item % groups, item // groups
    n, item = item % batch, item // batch
    cell, size = _band(phase, item)
    tiles, width = _tiles(p)
    begin, end = split * tiles // splits, (split + 1) * tiles // splits
    data = load_i64(call, CALL_INPUTS + load_i64(p, par.DATA))
    first = n * load_i64(p, par.IN_N) + group * load_i64(p, par.INS) * load_i64(p, par.IN_C)
    out = load_i64(call, CALL_OUTPUT)
    at, step = _out_at(p, phase, n, group, cell)
    which, bias, own = load_i64(p, par.BIAS), 0, group * load_i64(p, par.OUTS)
    if which:
        bias = load_i64(call, CALL_INPUTS + which)
    per_tile = load_i64(phase, par.TAPS) * load_i64(p, par.INS) * width
    packed = load_i64(job, par.JOB_SHARED) + 4 * (load_i64(phase, par.PACK_AT) + group * tiles * per_tile)
    if per_tile == 0:
        _constants(p, out, at, step, size, bias, own, scratch)
    elif load_i64(p, par.LAST):
        _cells(p, phase, data, first, packed, out, at, step, cell, size, begin, end, bias, own, scratch)
    else:
        _planes(p, phase, data, first, packed, out, at, step, cell, size, begin, end, bias, own, scratch)


@njit
def _constants(p, out, at, step, size, bias, own, scratch):
    """A band that no tap reaches: the bias, from its entry `own` on, or zeros."""
    kind, channel = load_i64(p, par.KIND), load_i64(p, par.OUT_C)
    value = _bias()
    for c in range(load_i64(p, par.OUTS)):
        bias_of(kind, bias, own + c, 1, value)
        clear(scratch, 0, ROWS * COLUMNS)
        add_to_rows(scratch, 4 * COLUMNS, value, 1, ROWS * COLUMNS)
        for z in range(size[0]):
            for y in range(size[1]):
                row, x = at + c * channel + z * step[0] + y * step[1], 0
                while x < size[2]:
                    count = min(ROWS * COLUMNS, size[2] - x)
                    write_run(kind, out, row + x * step[2], step[2], scratch, 0, count)
                    x += count


@njit
def _pitch(size, low, high, cell, end):
    """The shortest row pitch: zeros behind a row serve as zeros before the next one."""
    spread, start = high - low, cell + low
    return max(size, size + spread - max(0, -start), min(size + spread, end - start))


@njit
def _in_place(p, phase, cell, box):
    """Whether a band is one row of the tensor itself, read by one tap without a shift or zeros."""
    z, y = cell[0] + load_i64(phase, par.LOW_3), cell[1] + load_i64(phase, par.LOW_3 + 1)
    length_z, length_y, length_x = _get3(p, par.LENGTH_3)
    step_z, step_y, step_x = _get3(p, par.STEP_3)
    one = load_i64(phase, par.TAPS) == 1 and box[0] == 1 and box[1] == 1 and load_i64(phase, par.LOW_3 + 2) == 0
    dense = load_i64(p, par.KIND) == F32 and load_i64(p, par.IN_3 + 2) == 1 and step_z == step_y == step_x == 1
    return one and dense and 0 <= z < length_z and 0 <= y < length_y and cell[2] + box[2] <= length_x


@njit
def _planes(p, phase, data, first, packed, out, at, step, cell, size, begin, end, bias, own, scratch):
    """One band of NCX data: tiles of output channels by cells."""
    kind, channels, outs, taps = (
        load_i64(p, par.KIND),
        load_i64(p, par.INS),
        load_i64(p, par.OUTS),
        load_i64(phase, par.TAPS),
    )
    low, high = _get3(phase, par.LOW_3), _get3(phase, par.HIGH_3)
    step_x = load_i64(p, par.STEP_3 + 2)
    pitch = _pitch(size[2], low[2], high[2], cell[2], (load_i64(p, par.LENGTH_3 + 2) + step_x - 1) // step_x)
    box = (size[0] + high[0] - low[0], size[1] + high[1] - low[1], pitch)
    tile, rows = scratch, scratch + 4 * ROWS * COLUMNS
    table = rows + 8 * ROWS
    band = table + 16 * taps
    plane = load_i64(p, par.IN_C)
    if size[2] >= COLUMNS and 4 * plane % _PAGE != 0 and _in_place(p, phase, cell, box):
        in_z, in_y, _ = _get3(p, par.IN_3)
        band, direct = data + 4 * (first + (cell[0] + low[0]) * in_z + (cell[1] + low[1]) * in_y + cell[2]), True
    else:
        plane, direct = box[0] * box[1] * pitch + high[2] - low[2] + COLUMNS, False
        plane = (plane + 15) // 16 * 16
        plane += 16 * (1 - plane // 16 % 2)  # an odd number of cache lines
        copy_planes(p, phase, data, first, band, (cell[0] + low[0], cell[1] + low[1], cell[2] + low[2]), box, plane)
    for i in range(ROWS):
        store_i64(rows, i, 4 * i)
    for tap in range(taps):
        entry = p + 8 * (load_i64(phase, par.TAP_TABLE) + par.TAP_WORDS * tap)
        shift = load_i64(entry, par.TAP_RESIDUE) * channels * plane
        shift += (load_i64(entry, par.TAP_SHIFT_3) - low[0]) * box[1] * pitch
        shift += (load_i64(entry, par.TAP_SHIFT_3 + 1) - low[1]) * pitch
        shift += load_i64(entry, par.TAP_SHIFT_3 + 2) - low[2]
        store_i64(table, 2 * tap, 4 * tap * channels * ROWS)
        store_i64(table, 2 * tap + 1, 4 * shift)
    channel, cells, values = load_i64(p, par.OUT_C), (size[1] - 1) * pitch + size[2], _bias()
    whole = kind == F32 and step[2] == 1
    for m in range(begin, end):
        panel, count = packed + 4 * m * taps * channels * ROWS, min(ROWS, outs - m * ROWS)
        full = whole and TILE_ROWS[count] == count
        if bias:
            bias_of(kind, bias, own + m * ROWS, count, values)
        for z in range(size[0]):
            place = 0
            while place < cells:
                if direct:
                    place = min(place, cells - COLUMNS)
                vectors = 1 if cells - place <= VECTOR else 2
                columns = vectors * VECTOR
                source = band + 4 * (z * box[1] * pitch + place)
                target = at + m * ROWS * channel + z * step[0]
                y, x = place // pitch, place % pitch
                if full and x + columns <= size[2]:
                    c, c_row = out + 4 * (target + y * step[1] + x), 4 * channel
                else:
                    c, c_row = tile, 4 * COLUMNS
                multiply(
                    TILE_ROWS[count],
                    vectors,
                    c,
                    c_row,
                    panel,
                    rows,
                    source,
                    taps,
                    table,
                    channels,
                    4 * ROWS,
                    4 * plane,
                    0,
                )
                if bias:
                    add_to_rows(c, c_row, values, count, columns)
                if c == tile:
                    for i in range(count):
                        _write_cells(kind, out, target + i * channel, step, tile, i, y, x, columns, size, pitch)
                place += columns


@njit
def _write_cells(kind, out, target, step, tile, row, y, x, columns, size, pitch):
    """One row of a tile, without the cells between image rows."""
    done = 0
    while done < columns and y < size[1]:
        if x < size[2]:
            count = min(size[2] - x, columns - done)
            write_run(kind, out, target + y * step[1] + x * step[2], step[2], tile, row * COLUMNS + done, count)
        done += pitch - x
        x = 0
        y += 1


@njit
def _cells(p, phase, data, first, packed, out, at, step, cell, size, begin, end, bias, own, scratch):
    """One band of NXC data: tiles of cells by output channels."""
    kind, channels, outs, taps = (
        load_i64(p, par.KIND),
        load_i64(p, par.INS),
        load_i64(p, par.OUTS),
        load_i64(phase, par.TAPS),
    )
    low, high = _get3(phase, par.LOW_3), _get3(phase, par.HIGH_3)
    step_z, step_y, step_x = _get3(p, par.STEP_3)
    from_z, from_y, from_x = cell[0] * step_z + low[0], cell[1] * step_y + low[1], cell[2] * step_x + low[2]
    box_z = (size[0] - 1) * step_z + high[0] - low[0] + 1
    box_y = (size[1] - 1) * step_y + high[1] - low[1] + 1
    box_x = (size[2] - 1) * step_x + high[2] - low[2] + 1
    tile, rows = scratch, scratch + 4 * ROWS * COLUMNS
    table = rows + 8 * ROWS
    band = table + 16 * taps
    in_z, in_y, in_x = _get3(p, par.IN_3)
    inside = from_z >= 0 and from_y >= 0 and from_x >= 0
    inside = inside and from_z + box_z <= load_i64(p, par.LENGTH_3) and from_y + box_y <= load_i64(p, par.LENGTH_3 + 1)
    if inside and from_x + box_x <= load_i64(p, par.LENGTH_3 + 2) and kind == F32:
        band = data + 4 * (first + from_z * in_z + from_y * in_y + from_x * in_x)
    else:
        copy_cells(p, data, first, band, (from_z, from_y, from_x), (box_z, box_y, box_x))
        in_x = channels
        in_y = in_x * box_x
        in_z = in_y * box_y
    for tap in range(taps):
        entry = p + 8 * (load_i64(phase, par.TAP_TABLE) + par.TAP_WORDS * tap)
        shift = (load_i64(entry, par.TAP_SHIFT_3) - low[0]) * in_z
        shift += (load_i64(entry, par.TAP_SHIFT_3 + 1) - low[1]) * in_y
        shift += (load_i64(entry, par.TAP_SHIFT_3 + 2) - low[2]) * in_x
        store_i64(table, 2 * tap, 4 * shift)
        store_i64(table, 2 * tap + 1, 4 * tap * channels * COLUMNS)
    cells, per_z, values = size[0] * size[1] * size[2], size[1] * size[2], _bias()
    for m in range(begin, end):
        panel, columns = packed + 4 * m * taps * channels * COLUMNS, min(COLUMNS, outs - m * COLUMNS)
        vectors = 1 if columns <= VECTOR else 2
        if bias:
            bias_of(kind, bias, own + m * COLUMNS, columns, values)
        place = 0
        while place < cells:
            count = min(ROWS, cells - place)
            for i in range(ROWS):
                q = place + min(i, count - 1)
                z, y, x = q // per_z, q % per_z // size[2], q % size[2]
                store_i64(rows, i, 4 * (z * step_z * in_z + y * step_y * in_y + x * step_x * in_x))
            multiply(
                TILE_ROWS[count],
                vectors,
                tile,
                4 * COLUMNS,
                band,
                rows,
                panel,
                taps,
                table,
                channels,
                4,
                4 * COLUMNS,
                0,
            )
            if bias:
                add_to_columns(tile, 4 * COLUMNS, values, count, columns)
            for i in range(count):
                q = place + i
                target = at + q // per_z * step[0] + q % per_z // size[2] * step[1] + q % size[2] * step[2]
                write_run(kind, out, target + m * COLUMNS, 1, tile, i * COLUMNS, columns)
            place += count


# ----- one call ------


@njit
def _work(job, _lane):
    """Take bands until none is left."""
    call = load_i64(job, par.JOB_CALL)
    p, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
    items, size, scratch = load_i64(p, par.ITEMS), load_i64(p, par.LANE_BYTES), 0
    while True:
        item = take(job + 8 * par.JOB_NEXT)
        if item >= items:
            break
        if scratch == 0:
            scratch = acquire(runtime, size)
            if scratch == 0:
                exchange(job + 8 * par.JOB_FAILED, 1)
                break
        _item(job, item, scratch)
    release(runtime, scratch, size)


@njit
def _run(call):
    p, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
    size = load_i64(p, par.PACK_BYTES)
    packed = acquire(runtime, size)
    if packed == 0:
        return no_memory(call)
    job = _job()
    store_i64(job, par.JOB_CALL, call)
    store_i64(job, par.JOB_NEXT, 0)
    store_i64(job, par.JOB_FAILED, 0)
    store_i64(job, par.JOB_SHARED, packed)
    status = parallel(call, load_i64(p, par.PACKER), job, load_i64(p, par.UNITS))
    if status == 0:
        status = parallel(call, load_i64(p, par.WORKER), job, min(lanes(call), load_i64(p, par.ITEMS)))
    release(runtime, packed, size)
    if status == 0 and load_i64(job, par.JOB_FAILED):
        return no_memory(call)
    return status


def _build() -> tuple[Any, Any, Any]:
    @exported(types.void(types.int64, types.int64))
    def pack(job, unit):
        _pack(job, unit)

    @exported(types.void(types.int64, types.int64))
    def work(job, lane):
        _work(job, lane)

    @exported(types.int64(types.int64))
    def run(call):
        return _run(call)

    return pack, work, run


@cache
def functions() -> tuple[Any, Any, Any]:
    """(pack, work, run), compiled."""
    return keep(_build())
