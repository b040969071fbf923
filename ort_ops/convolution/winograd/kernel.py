"""Convolutions by 3×3 with stride 1, channels first: Winograd's F(2×2, 3×3), compiled.

    out[n, m, y, x] = bias[m] + Σ_{c, i, j} w[m, c, i, j] · in[n, c, y + i - P, x + j - P']

takes 16 products per 2×2 cells and channel instead of 36. The data gradient is the same with the kernel turned round
and pads of 2 - P. Tiles of the whole batch are numbered by rows. `in` is transformed into 16 matrices (channels ×
tiles), each multiplied by one of the weights', and the products transformed back while they are in the first-level
cache.

One side is transformed for all threads, the other by the thread that needs it: the weights, and an item of work is some
rows of tiles, or, where the weights are large, the images, and an item is a tile of output channels. What does not fit
is done in rounds: some groups at a time, or one group and some of its output channels or of its rows of tiles.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import types

from onnx_backprop.ort_ops.convolution.bias import bias_of
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
from onnx_backprop.ort_ops.vector.rows import clear, read_run, scatter_run, write_run
from onnx_backprop.ort_ops.vector.winograd_transforms import (
    ELEMENTS,
    transform_result,
    transform_source,
    transform_weights,
)

# parameters
(
    WORKER, PACKER, KIND, BATCH, GROUPS, OUTS, INS, DATA, WEIGHTS, BIAS, IN_N, IN_C, IN_Y, OUT_N, OUT_C, OUT_Y,
    LENGTH_Y, LENGTH_X, OUT_LENGTH_Y, OUT_LENGTH_X, PAD_Y, PAD_X, W_FIRST, W_OUT, W_IN, W_GROUP, W_Y, W_X,
    TILES_Y, TILES_X, BAND, ITEMS, SPLIT, UNITS, SHARED_BYTES, LANE_BYTES, PANEL, V_COLUMNS, PITCH, ROUND_GROUPS,
    ROUND_TILES, ROUND_ROWS, LINES,
) = range(43)  # fmt: skip
WORDS = 43  # ROUND_ROWS: rows of tiles whose images are shared, 0 where the weights are; LINES: rows made at a time

WIDE = -(-ROWS // VECTOR) * VECTOR  # lanes for the channels of one tile of weights
_GAP = ROWS * COLUMNS  # floats from one of the 16 products to the next
_LINE = 2 * COLUMNS  # cells of one row of a block of tiles

# scratch of a worker, in floats: products, finished rows, the product's tables, then the source's rows and `V`
_LINES = ELEMENTS * _GAP
_TABLES = _LINES + ROWS * 2 * _LINE
LANE_HEAD = _TABLES + 2 * (ROWS + 2)

_kernels = stack(9 * WIDE)
_bias = stack(COLUMNS)


@inner
def _pack_tile(call, p, group, tile, target):
    """The transformed weights of one tile of channels: 16 panels, for every channel of `in` ROWS of `out`."""
    kind, source = load_i64(p, KIND), load_i64(call, CALL_INPUTS + load_i64(p, WEIGHTS))
    w_out, w_in, w_y, w_x = load_i64(p, W_OUT), load_i64(p, W_IN), load_i64(p, W_Y), load_i64(p, W_X)
    first = load_i64(p, W_FIRST) + group * load_i64(p, W_GROUP) + tile * ROWS * w_out
    count, panel = min(ROWS, load_i64(p, OUTS) - tile * ROWS), 4 * load_i64(p, PANEL)
    kernels = _kernels()
    clear(kernels, 0, 9 * WIDE)
    for c in range(load_i64(p, INS)):
        for i in range(3):
            for j in range(3):
                start = first + c * w_in + i * w_y + j * w_x
                scatter_run(kind, kernels, (3 * i + j) * WIDE, 1, source, start, w_out, count)
        for part in range(WIDE // VECTOR):
            # what a register holds beyond ROWS is overwritten by the next channel
            at = 4 * VECTOR * part
            transform_weights(kernels + at, 4 * WIDE, target + 4 * ROWS * c + at, panel)


@inner
def _tiles(p):
    """Tiles of output channels."""
    return (load_i64(p, OUTS) + ROWS - 1) // ROWS


@inner
def _pack(job, unit):
    """The weights of one tile, for all threads."""
    call = load_i64(job, JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    group = load_i64(job, JOB_GROUP) + unit // load_i64(p, ROUND_TILES)
    tile = load_i64(job, JOB_PART) + unit % load_i64(p, ROUND_TILES)
    if group < load_i64(p, GROUPS) and tile < _tiles(p):  # the last round may have fewer
        _pack_tile(call, p, group, tile, load_i64(job, JOB_SHARED) + 4 * ELEMENTS * unit * load_i64(p, PANEL))


@inner
def _copy_row(p, data, image, y, row):
    """Row y of a channel with its pads; `image` is the element index of the channel."""
    pitch, length, pad = load_i64(p, PITCH), load_i64(p, LENGTH_X), load_i64(p, PAD_X)
    begin, end = max(0, pad), min(pitch, length + pad)
    if y < 0 or y >= load_i64(p, LENGTH_Y) or begin >= end:
        clear(row, 0, pitch)
    else:
        clear(row, 0, begin)
        read_run(load_i64(p, KIND), row, begin, data, image + y * load_i64(p, IN_Y) + begin - pad, 1, end - begin)
        clear(row, end, pitch - end)


@inner
def _transform(p, data, channel, count, first, last, rows, v, element):
    """Bᵀ d B of the tiles of rows first … last - 1, `count` channels from `channel` on; columns of `v` are tiles.

    `element` is the distance of the 16 matrices in bytes.
    """
    tiles_y, tiles_x, pitch = load_i64(p, TILES_Y), load_i64(p, TILES_X), load_i64(p, PITCH)
    columns = load_i64(p, V_COLUMNS)
    for c in range(count):
        plane = (channel + c) * load_i64(p, IN_C)
        at = first
        while at < last:
            n, tile_y = at // tiles_y, at % tiles_y
            lines = min(last - at, tiles_y - tile_y, load_i64(p, LINES))
            y = 2 * tile_y - load_i64(p, PAD_Y)
            for i in range(2 * lines + 2):
                _copy_row(p, data, n * load_i64(p, IN_N) + plane, y + i, rows + 4 * i * pitch)
            for i in range(lines):
                target = v + 4 * (c * columns + (at + i - first) * tiles_x)
                for x in range(0, tiles_x, VECTOR):
                    # lanes beyond the row are overwritten by the next one
                    transform_source(rows + 8 * (i * pitch + x), 4 * pitch, target + 4 * x, element)
            at += lines


@inner
def _item(job, item, scratch):
    """Weights shared: some rows of tiles, and all output channels of the round or a share of them."""
    call = load_i64(job, JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    splits, groups = load_i64(p, SPLIT), load_i64(p, ROUND_GROUPS)
    split, item = item % splits, item // splits
    number, item = item % groups, item // groups
    group, part = load_i64(job, JOB_GROUP) + number, load_i64(job, JOB_PART)
    if group >= load_i64(p, GROUPS):
        return
    band, channels = load_i64(p, BAND), load_i64(p, INS)
    first = item * band
    last = min(first + band, load_i64(p, BATCH) * load_i64(p, TILES_Y))
    rows = scratch + 4 * LANE_HEAD
    v = rows + 4 * (2 * band + 2) * load_i64(p, PITCH)
    v = (v + 63) // 64 * 64
    data, element = load_i64(call, CALL_INPUTS + load_i64(p, DATA)), 4 * channels * load_i64(p, V_COLUMNS)
    _transform(p, data, group * channels, channels, first, last, rows, v, element)
    here, panels = min(load_i64(p, ROUND_TILES), _tiles(p) - part), number * load_i64(p, ROUND_TILES) - part
    for m in range(part + split * here // splits, part + (split + 1) * here // splits):
        packed = load_i64(job, JOB_SHARED) + 4 * ELEMENTS * (panels + m) * load_i64(p, PANEL)
        _outputs(call, p, group, m, packed, v, first, last, scratch)


@inner
def _source_item(job, item, scratch):
    """Images shared: one channel of the round."""
    call = load_i64(job, JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    channels, size = load_i64(p, INS), 4 * load_i64(p, V_COLUMNS)
    number, c = item // channels, item % channels
    group, first = load_i64(job, JOB_GROUP) + number, load_i64(job, JOB_PART)
    if group >= load_i64(p, GROUPS):
        return
    last = min(first + load_i64(p, ROUND_ROWS), load_i64(p, BATCH) * load_i64(p, TILES_Y))
    v = load_i64(job, JOB_SHARED) + size * (number * ELEMENTS * channels + c)
    data = load_i64(call, CALL_INPUTS + load_i64(p, DATA))
    _transform(p, data, group * channels + c, 1, first, last, scratch + 4 * LANE_HEAD, v, size * channels)


@inner
def _weights_item(job, item, scratch):
    """Images shared: one tile of output channels, over the rows of the round."""
    call = load_i64(job, JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    number, m = item // _tiles(p), item % _tiles(p)
    group, first = load_i64(job, JOB_GROUP) + number, load_i64(job, JOB_PART)
    if group >= load_i64(p, GROUPS):
        return
    last = min(first + load_i64(p, ROUND_ROWS), load_i64(p, BATCH) * load_i64(p, TILES_Y))
    v = load_i64(job, JOB_SHARED) + 4 * number * ELEMENTS * load_i64(p, INS) * load_i64(p, V_COLUMNS)
    packed = (scratch + 4 * LANE_HEAD + 63) // 64 * 64
    _pack_tile(call, p, group, m, packed)
    _outputs(call, p, group, m, packed, v, first, last, scratch)


@inner
def _outputs(call, p, group, m, packed, v, first, last, scratch):
    """The output channels of tile m at the tiles of rows first … last - 1: products, transformed back and written."""
    outs, channels, columns = load_i64(p, OUTS), load_i64(p, INS), load_i64(p, V_COLUMNS)
    table, panel = scratch + 4 * _TABLES, 4 * load_i64(p, PANEL)
    for i in range(ROWS):
        store_i64(table, i, 4 * i)
    store_i64(table, ROWS, 0)
    store_i64(table, ROWS + 1, 0)
    which, bias, values = load_i64(p, BIAS), 0, _bias()
    if which:
        bias = load_i64(call, CALL_INPUTS + which)
    out, count_all = load_i64(call, CALL_OUTPUT), (last - first) * load_i64(p, TILES_X)
    count = min(ROWS, outs - m * ROWS)
    bias_of(load_i64(p, KIND), bias, group * outs + m * ROWS, count, values)
    for place in range(0, count_all, COLUMNS):
        vectors = 1 if count_all - place <= VECTOR else 2
        for e in range(ELEMENTS):
            multiply(
                TILE_ROWS[count],
                vectors,
                scratch + 4 * e * _GAP,
                4 * COLUMNS,
                packed + e * panel,
                table,
                v + 4 * (e * channels * columns + place),
                1,
                table + 8 * ROWS,
                channels,
                4 * ROWS,
                4 * columns,
                0,
            )
        for i in range(count):
            line = scratch + 4 * (_LINES + 2 * _LINE * i)
            for part in range(vectors):
                at = scratch + 4 * (COLUMNS * i + VECTOR * part)
                top = line + 8 * VECTOR * part
                transform_result(at, 4 * _GAP, top, top + 4 * _LINE, values + 4 * i)
        channel = (group * outs + m * ROWS) * load_i64(p, OUT_C)
        _write(p, out, channel, first, place, min(COLUMNS, count_all - place), count, scratch)


@inner
def _write(p, out, channel, first, place, tiles, count, scratch):
    """A block of tiles, row by row of the image."""
    kind, tiles_y, tiles_x = load_i64(p, KIND), load_i64(p, TILES_Y), load_i64(p, TILES_X)
    length_y, length_x = load_i64(p, OUT_LENGTH_Y), load_i64(p, OUT_LENGTH_X)
    done = 0
    while done < tiles:
        row, x = first + (place + done) // tiles_x, (place + done) % tiles_x
        run = min(tiles - done, tiles_x - x)
        n, y = row // tiles_y, 2 * (row % tiles_y)
        width = min(2 * run, length_x - 2 * x)
        for i in range(count):
            at = n * load_i64(p, OUT_N) + channel + i * load_i64(p, OUT_C) + y * load_i64(p, OUT_Y) + 2 * x
            line = scratch + 4 * (_LINES + 2 * _LINE * i)
            write_run(kind, out, at, 1, line, 2 * done, width)
            if y + 1 < length_y:
                write_run(kind, out, at + load_i64(p, OUT_Y), 1, line, _LINE + 2 * done, width)
        done += run


_work = worker("conv_winograd_work", _item, ITEMS, LANE_BYTES)
_transform_all = worker("conv_winograd_transform", _source_item, UNITS, LANE_BYTES)
_multiply_all = worker("conv_winograd_multiply", _weights_item, ITEMS, LANE_BYTES)


@inner
def _run(call):
    p, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
    size, images = load_i64(p, SHARED_BYTES), load_i64(p, ROUND_ROWS)
    shared = acquire(runtime, size)
    if shared == 0:
        return no_memory(call)
    job = new_job()
    begin(job, call, shared)
    status, parts, step = 0, _tiles(p), load_i64(p, ROUND_TILES)
    if images:
        parts, step = load_i64(p, BATCH) * load_i64(p, TILES_Y), images
    for group in range(0, load_i64(p, GROUPS), load_i64(p, ROUND_GROUPS)):
        for part in range(0, parts, step):
            begin_round(job, group, part)
            if status == 0 and images:
                status = work_off(job, load_i64(p, PACKER), load_i64(p, UNITS))
                begin_round(job, group, part)
            elif status == 0:
                status = parallel(call, load_i64(p, PACKER), job, load_i64(p, UNITS))
            if status == 0:
                status = work_off(job, load_i64(p, WORKER), load_i64(p, ITEMS))
    release(runtime, shared, size)
    return status


def _build() -> tuple[Any, ...]:
    @exported(types.void(types.int64, types.int64))
    def pack(job, unit):
        _pack(job, unit)

    @exported(types.void(types.int64, types.int64))
    def work(job, lane):
        _work(job, lane)

    @exported(types.void(types.int64, types.int64))
    def transform_all(job, lane):
        _transform_all(job, lane)

    @exported(types.void(types.int64, types.int64))
    def multiply_all(job, lane):
        _multiply_all(job, lane)

    @exported(types.int64(types.int64))
    def run(call):
        return _run(call)

    return pack, work, transform_all, multiply_all, run


@cache
def functions() -> tuple[Any, ...]:
    """(pack, work) with the weights shared, (transform, multiply) with the images shared, run; compiled."""
    return keep(_build())
