"""Weight gradients of convolutions by 3×3 with stride 1, channels first, through Winograd's tiles, compiled.

    dw[d, s] = Gᵀ · [ Σ_tiles (A dY[d] Aᵀ) ⊙ (Bᵀ x[s] B) ] · G

the adjoint of `winograd.kernel`: 16 products (destination channels × tiles) · (tiles × source channels). The tiles are
cut into parts, as many as the shape says; the products of a part are summed from band to band, and the parts are added
up in order, so that threads change nothing. An item of work is a part and some of the destination's channels.

Where such sums are large beside the images, the source is transformed for all threads instead, and an item is a tile of
the destination's channels: its sums stay with the thread, which transforms them back and writes them. What does not fit
is done in rounds: some groups at a time, or one group and some of its source's (else, destination's) channels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import types

from onnx_backprop.ort_ops.runtime.bridge import keep
from onnx_backprop.ort_ops.runtime.call import (
    CALL_INPUTS,
    CALL_OUTPUT,
    CALL_PARAMETERS,
    CALL_RUNTIME,
    acquire,
    no_memory,
    parallel,
    release,
)
from onnx_backprop.ort_ops.runtime.compile import VECTOR, exported, inner
from onnx_backprop.ort_ops.runtime.jobs import (
    JOB_CALL,
    JOB_GROUP,
    JOB_PART,
    JOB_SHARED,
    begin,
    begin_round,
    new_job,
    work_off,
    worker,
)
from onnx_backprop.ort_ops.runtime.llvm import load_i64, stack, store_i64
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, TILE_ROWS, multiply
from onnx_backprop.ort_ops.vector.registers import transpose_tile
from onnx_backprop.ort_ops.vector.rows import add_run, clear, read_run, write_run
from onnx_backprop.ort_ops.vector.winograd_transforms import (
    ELEMENTS,
    transform_cells,
    transform_gradient,
    transform_kernel,
)

# parameters
(
    WORKER, REDUCER, KIND, BATCH, GROUPS, D, S, SOURCE, DEST, S_N, S_C, S_Y, D_N, D_C, D_Y, LENGTH_Y, LENGTH_X,
    OUT_LENGTH_Y, OUT_LENGTH_X, PAD_Y, PAD_X, W_D, W_S, W_Y, W_X, TILES_Y, TILES_X, BAND, PARTS, SPLIT, ITEMS,
    SHARED_BYTES, LANE_BYTES, PITCH, S_COLUMNS, D_COLUMNS, D_ROWS, TURNED_ROWS, U_ROWS, ROUND_GROUPS, ROUND_TILES,
    ROUND_CHANNELS, SOURCE_BAND, SOURCE_ITEMS,
) = range(44)  # fmt: skip
WORDS = 44  # ROUND_CHANNELS: of the source, which is shared, 0 where sums are; SOURCE_BAND: rows transformed at a time

_tables = stack(ROWS + 2)
_sums = stack((ELEMENTS + 9) * VECTOR)


@inner
def _copy_row(kind, data, image, y, step, lengths, pad, pitch, row):
    """Row y of a channel with its pads, zeros outside; `image` is the element index of the channel."""
    begin, end = max(0, pad), min(pitch, lengths[1] + pad)
    if y < 0 or y >= lengths[0] or begin >= end:
        clear(row, 0, pitch)
    else:
        clear(row, 0, begin)
        read_run(kind, row, begin, data, image + y * step + begin - pad, 1, end - begin)
        clear(row, end, pitch - end)


@inner
def _source_tiles(p, data, group, channel, first, last, rows, turned, v, element):
    """Bᵀ x B of the tiles of some rows: v[e][tile][channel], S_COLUMNS channels from `channel` on.

    `element` is the distance of the 16 matrices in bytes.
    """
    tiles_y, tiles_x, pitch = load_i64(p, TILES_Y), load_i64(p, TILES_X), load_i64(p, PITCH)
    columns = load_i64(p, S_COLUMNS)
    channels = min(load_i64(p, S) - channel, columns)
    lengths = load_i64(p, LENGTH_Y), load_i64(p, LENGTH_X)
    kind, step = load_i64(p, KIND), load_i64(p, S_Y)
    at = first
    while at < last:
        n, tile_y = at // tiles_y, at % tiles_y
        count = min(last - at, tiles_y - tile_y)
        y = 2 * tile_y - load_i64(p, PAD_Y)
        image = n * load_i64(p, S_N) + (group * load_i64(p, S) + channel) * load_i64(p, S_C)
        for c in range(0, channels, VECTOR):
            for i in range(2 * count + 2):
                for lane in range(VECTOR):
                    row = rows + 4 * lane * pitch
                    if c + lane < channels:
                        plane = image + (c + lane) * load_i64(p, S_C)
                        _copy_row(kind, data, plane, y + i, step, lengths, load_i64(p, PAD_X), pitch, row)
                    else:
                        clear(row, 0, pitch)
                for x in range(0, 2 * tiles_x + 2, VECTOR):
                    target = turned + 4 * ((i * pitch + x) * columns + c)
                    transpose_tile(target, 4 * columns, rows + 4 * x, 4 * pitch)
        for i in range(count):
            for x in range(tiles_x):
                source = turned + 8 * (i * pitch + x) * columns
                target = v + 4 * ((at + i - first) * tiles_x + x) * columns
                for c in range(0, channels, VECTOR):
                    transform_cells(source + 4 * c, 4 * pitch * columns, 4 * columns, target + 4 * c, element)
        at += count


@inner
def _gradient_tiles(p, data, channel, count, first, last, rows, u):
    """A dY Aᵀ of the tiles of some rows, `count` channels from `channel` on: u[e][channel][tile]."""
    tiles_y, tiles_x, pitch = load_i64(p, TILES_Y), load_i64(p, TILES_X), load_i64(p, PITCH)
    columns, kind, step = load_i64(p, D_COLUMNS), load_i64(p, KIND), load_i64(p, D_Y)
    lengths = load_i64(p, OUT_LENGTH_Y), load_i64(p, OUT_LENGTH_X)
    element = 4 * load_i64(p, D_ROWS) * columns
    for i in range(count):
        for at in range(first, last):
            n, y = at // tiles_y, 2 * (at % tiles_y)
            plane = n * load_i64(p, D_N) + (channel + i) * load_i64(p, D_C)
            _copy_row(kind, data, plane, y, step, lengths, 0, pitch, rows)
            _copy_row(kind, data, plane, y + 1, step, lengths, 0, pitch, rows + 4 * pitch)
            target = u + 4 * (i * columns + (at - first) * tiles_x)
            for x in range(0, tiles_x, VECTOR):
                # lanes beyond the row are overwritten by the next one
                transform_gradient(rows + 8 * x, 4 * pitch, target + 4 * x, element)


@inner
def _item(job, item, scratch):
    call = load_i64(job, JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    splits, groups, parts = load_i64(p, SPLIT), load_i64(p, ROUND_GROUPS), load_i64(p, PARTS)
    split, item = item % splits, item // splits
    number, part = item % groups, item // groups
    group, tile = load_i64(job, JOB_GROUP) + number, load_i64(job, JOB_PART)
    if group >= load_i64(p, GROUPS):
        return
    d, columns = load_i64(p, D), load_i64(p, S_COLUMNS)
    tiles = min(load_i64(p, ROUND_TILES), (d + ROWS - 1) // ROWS - tile)
    begin, end = (tile + split * tiles // splits) * ROWS, min((tile + (split + 1) * tiles // splits) * ROWS, d)
    all_rows = load_i64(p, BATCH) * load_i64(p, TILES_Y)
    first, last = part * all_rows // parts, (part + 1) * all_rows // parts
    tiles_x, band, pitch = load_i64(p, TILES_X), load_i64(p, BAND), load_i64(p, PITCH)
    rows = scratch
    turned = rows + 4 * VECTOR * pitch
    v = turned + 4 * load_i64(p, TURNED_ROWS) * pitch * columns
    u = v + 4 * ELEMENTS * band * tiles_x * columns
    channels = load_i64(p, S)
    d_columns, d_rows, u_rows = load_i64(p, D_COLUMNS), load_i64(p, D_ROWS), load_i64(p, U_ROWS)
    sums = load_i64(job, JOB_SHARED) + 4 * (part * groups + number) * ELEMENTS * u_rows * columns
    source, dest = (
        load_i64(call, CALL_INPUTS + load_i64(p, SOURCE)),
        load_i64(call, CALL_INPUTS + load_i64(p, DEST)),
    )
    table = _tables()
    _tables_of(p, table)
    at = first
    while at < last:
        stop = min(at + band, last)
        _source_tiles(p, source, group, 0, at, stop, rows, turned, v, 4 * band * tiles_x * columns)
        _gradient_tiles(p, dest, group * d + begin, end - begin, at, stop, rows, u)
        tiles_here = (stop - at) * tiles_x
        for e in range(ELEMENTS):
            for m in range(begin, end, ROWS):
                line = sums + 4 * (e * u_rows + m - tile * ROWS) * columns
                left = u + 4 * (e * d_rows + m - begin) * d_columns
                right = v + 4 * e * band * tiles_x * columns
                _multiply(line, columns, channels, left, table, min(ROWS, end - m), right, tiles_here, at != first)
        at = stop


@inner
def _tables_of(p, table):
    """What `_multiply` is told of a thread's scratch: the distances of the destination's channels, one segment."""
    for i in range(ROWS):
        store_i64(table, i, 4 * i * load_i64(p, D_COLUMNS))
    store_i64(table, ROWS, 0)
    store_i64(table, ROWS + 1, 0)


@inner
def _multiply(sums, columns, channels, left, table, rows, right, tiles, add):
    """sums[i][c] (+)= Σ_tiles left[i][tile] · right[tile][c] for `rows` of the destination's channels."""
    for c in range(0, channels, COLUMNS):
        multiply(
            TILE_ROWS[rows],
            1 if channels - c <= VECTOR else 2,
            sums + 4 * c,
            4 * columns,
            left,
            table,
            right + 4 * c,
            1,
            table + 8 * ROWS,
            tiles,
            4,
            4 * columns,
            add,
        )


@inner
def _reduce(job, unit):
    """Add the parts up for one destination channel, transform back, write."""
    call = load_i64(job, JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    d, s, groups, columns = load_i64(p, D), load_i64(p, S), load_i64(p, ROUND_GROUPS), load_i64(p, S_COLUMNS)
    number, row = unit // load_i64(p, U_ROWS), unit % load_i64(p, U_ROWS)
    group, m = load_i64(job, JOB_GROUP) + number, load_i64(job, JOB_PART) * ROWS + row
    if group >= load_i64(p, GROUPS) or m >= d:
        return
    element = load_i64(p, U_ROWS) * columns
    total, out = _sums(), load_i64(call, CALL_OUTPUT)
    lines = total + 4 * ELEMENTS * VECTOR
    for c in range(0, s, VECTOR):
        clear(total, 0, ELEMENTS * VECTOR)
        for part in range(load_i64(p, PARTS)):
            place = (part * groups + number) * ELEMENTS * element + row * columns + c
            for e in range(ELEMENTS):
                add_run(1, total + 4 * e * VECTOR, load_i64(job, JOB_SHARED), place + e * element, VECTOR)
        _write(p, out, group, m, c, total, 4 * VECTOR, lines)


@inner
def _write(p, out, group, m, c, source, step, lines):
    """The weights of a destination's channel and a vector of the source's from 16 vectors, `step` bytes apart."""
    transform_kernel(source, step, lines, 4 * VECTOR)
    start = (group * load_i64(p, D) + m) * load_i64(p, W_D) + c * load_i64(p, W_S)
    count = min(VECTOR, load_i64(p, S) - c)
    for i in range(3):
        for j in range(3):
            to = start + i * load_i64(p, W_Y) + j * load_i64(p, W_X)
            write_run(load_i64(p, KIND), out, to, load_i64(p, W_S), lines, (3 * i + j) * VECTOR, count)


# ----- the source transformed for all threads ------


@inner
def _all_tiles(p):
    return load_i64(p, BATCH) * load_i64(p, TILES_Y) * load_i64(p, TILES_X)


@inner
def _source_item(job, item, scratch):
    """One band of one group of the round."""
    call = load_i64(job, JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    band, columns, all_rows = (
        load_i64(p, SOURCE_BAND),
        load_i64(p, S_COLUMNS),
        load_i64(p, BATCH) * load_i64(p, TILES_Y),
    )
    bands = (all_rows + band - 1) // band
    number, first = item // bands, item % bands * band
    group, last = load_i64(job, JOB_GROUP) + number, min(first + band, all_rows)
    if group >= load_i64(p, GROUPS):
        return
    element = 4 * _all_tiles(p) * columns
    v = load_i64(job, JOB_SHARED) + number * ELEMENTS * element + 4 * first * load_i64(p, TILES_X) * columns
    source = load_i64(call, CALL_INPUTS + load_i64(p, SOURCE))
    turned = scratch + 4 * VECTOR * load_i64(p, PITCH)
    _source_tiles(p, source, group, load_i64(job, JOB_PART), first, last, scratch, turned, v, element)


@inner
def _tile_item(job, item, scratch):
    """ROWS of the destination's channels: all their weights for the source's channels of the round."""
    call = load_i64(job, JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    d, columns, c0 = load_i64(p, D), load_i64(p, S_COLUMNS), load_i64(job, JOB_PART)
    tiles = (d + ROWS - 1) // ROWS
    number, begin = item // tiles, item % tiles * ROWS
    group, count = load_i64(job, JOB_GROUP) + number, min(ROWS, d - begin)
    if group >= load_i64(p, GROUPS):
        return
    tiles_x, band, d_columns = load_i64(p, TILES_X), load_i64(p, BAND), load_i64(p, D_COLUMNS)
    dest, out = load_i64(call, CALL_INPUTS + load_i64(p, DEST)), load_i64(call, CALL_OUTPUT)
    channels, all_rows = min(columns, load_i64(p, S) - c0), load_i64(p, BATCH) * load_i64(p, TILES_Y)
    rows = scratch
    lines = rows + 4 * VECTOR * load_i64(p, PITCH)
    sums = lines + 4 * 9 * VECTOR
    u = sums + 4 * ELEMENTS * ROWS * columns
    element = 4 * _all_tiles(p) * columns
    v, table = load_i64(job, JOB_SHARED) + number * ELEMENTS * element, _tables()
    _tables_of(p, table)
    for at in range(0, all_rows, band):
        stop = min(at + band, all_rows)
        _gradient_tiles(p, dest, group * d + begin, count, at, stop, rows, u)
        for e in range(ELEMENTS):
            line, left = sums + 4 * e * ROWS * columns, u + 4 * e * ROWS * d_columns
            right = v + e * element + 4 * at * tiles_x * columns
            _multiply(line, columns, channels, left, table, count, right, (stop - at) * tiles_x, at != 0)
    for i in range(count):
        for c in range(0, channels, VECTOR):
            _write(p, out, group, begin + i, c0 + c, sums + 4 * (i * columns + c), 4 * ROWS * columns, lines)


_work = worker("conv_winograd_weights_work", _item, ITEMS, LANE_BYTES)
_transform_all = worker("conv_winograd_weights_transform", _source_item, SOURCE_ITEMS, LANE_BYTES)
_multiply_all = worker("conv_winograd_weights_multiply", _tile_item, ITEMS, LANE_BYTES)


@inner
def _run(call):
    p, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
    size, source = load_i64(p, SHARED_BYTES), load_i64(p, ROUND_CHANNELS)
    shared = acquire(runtime, size)
    if shared == 0:
        return no_memory(call)
    job = new_job()
    begin(job, call, shared)
    status, parts, step = 0, (load_i64(p, D) + ROWS - 1) // ROWS, load_i64(p, ROUND_TILES)
    if source:
        parts, step = load_i64(p, S), source
    for group in range(0, load_i64(p, GROUPS), load_i64(p, ROUND_GROUPS)):
        for part in range(0, parts, step):
            begin_round(job, group, part)
            if status == 0 and source:
                status = work_off(job, load_i64(p, REDUCER), load_i64(p, SOURCE_ITEMS))
                begin_round(job, group, part)
            if status == 0:
                status = work_off(job, load_i64(p, WORKER), load_i64(p, ITEMS))
            if status == 0 and source == 0:
                status = parallel(call, load_i64(p, REDUCER), job, load_i64(p, ROUND_GROUPS) * load_i64(p, U_ROWS))
    release(runtime, shared, size)
    return status


def _build() -> tuple[Any, ...]:
    @exported(types.void(types.int64, types.int64))
    def work(job, lane):
        _work(job, lane)

    @exported(types.void(types.int64, types.int64))
    def reduce(job, unit):
        _reduce(job, unit)

    @exported(types.void(types.int64, types.int64))
    def transform_all(job, lane):
        _transform_all(job, lane)

    @exported(types.void(types.int64, types.int64))
    def multiply_all(job, lane):
        _multiply_all(job, lane)

    @exported(types.int64(types.int64))
    def run(call):
        return _run(call)

    return work, reduce, transform_all, multiply_all, run


@cache
def functions() -> tuple[Any, ...]:
    """(work, reduce) with the sums shared, (transform, multiply) with the source shared, run; compiled."""
    return keep(_build())
