"""Convolutions by 3×3 with stride 1, channels first: Winograd's F(2×2, 3×3), compiled.

    out[n, m, y, x] = bias[m] + Σ_{c, i, j} w[m, c, i, j] · in[n, c, y + i - P, x + j - P']

takes 16 products per 2×2 cells and channel instead of 36. The data gradient is the same with the kernel mirrored
and pads of 2 - P. Tiles of the whole batch are numbered by rows. `in` is transformed into 16 matrices (channels ×
tiles), each multiplied by one of the weights', and the products transformed back while they are in the first-level
cache.

One side is transformed for all threads, the other by the thread that needs it: the weights, and an item of work is some
rows of tiles, or, where the weights are large, the images, and an item is a tile of output channels. What does not fit
is done in rounds: some groups at a time, or one group and some of its output channels or of its rows of tiles.
"""

from dataclasses import dataclass

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, stack
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.convolution.bias import bias_address, bias_of
from onnx_backprop.ort_ops.convolution.gather.planes import image_of
from onnx_backprop.ort_ops.convolution.problem import Correlation
from onnx_backprop.ort_ops.runtime.stages import stage
from onnx_backprop.ort_ops.vector.boxes import copy_line, turn_rows
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, multiply, one_segment, rows_apart
from onnx_backprop.ort_ops.vector.rows import clear, scatter_run, write_run
from onnx_backprop.ort_ops.vector.winograd_transforms import (
    ELEMENTS,
    transform_result,
    transform_source,
    transform_weights,
)

WIDE = -(-ROWS // VECTOR) * VECTOR  # lanes for the channels of one tile of weights
_GAP = ROWS * COLUMNS  # floats from one of the 16 products to the next
_LINE = 2 * COLUMNS  # cells of one row of a block of tiles

# scratch of a worker, in floats: products, finished rows, the product's tables, then the source's rows and `V`
_LINES = ELEMENTS * _GAP
_TABLES = _LINES + ROWS * 2 * _LINE
THREAD_HEAD = _TABLES + 2 * (ROWS + 2)


@dataclass(frozen=True, kw_only=True)
class Winograd(Record):
    """The numbers of a plan. Data and weights are inputs 0 and 1; the kernel's first cell lies at `w_first`."""

    kind: int
    c: Correlation  # of a data gradient the adjoint
    bias: int  # an input, 0: none
    w_first: int
    tiles_y: int
    tiles_x: int
    panel: int  # floats of one of the 16 panels of a tile of weights
    pitch: int  # floats of a row of the source
    round_groups: int
    round_tiles: int  # of output channels, where the weights are shared
    round_rows: int = 0  # of tiles, where the images are shared
    band: int = 0  # rows of tiles of an item
    lines: int = 0  # rows of tiles made at a time
    split: int = 1  # items that share a band's output channels
    columns: int = 0  # floats of a channel of transformed tiles


_kernels = stack(9 * WIDE)
_bias = stack(COLUMNS)


@inner
def _pack_tile(call, p, group, tile, target):
    """The transformed weights of one tile of channels: 16 panels, for every channel of `in` ROWS of `out`."""
    kind, source = p.kind, call.inputs[1]
    w_out, (_, w_y, w_x) = p.c.w_d, p.c.w_kernel
    first = p.w_first + group * p.c.w_group + tile * ROWS * w_out
    count, panel = min(ROWS, p.c.d - tile * ROWS), 4 * p.panel
    kernels, lies_dense = _kernels(), kind == F32 and w_y == 3 * w_x and w_x * w_x == 1
    clear(kernels, 0, 9 * WIDE)
    for c in range(p.c.s):
        start = first + c * p.c.w_s
        for lane in range(0, count if lies_dense else 0, VECTOR):
            rows, some = min(VECTOR, count - lane), start + lane * w_out
            if w_x > 0:
                turn_rows(kernels + 4 * lane, 4 * WIDE, source + 4 * some, 4 * w_out, rows, 9)
            else:  # mirrored: the last cell comes first
                last = kernels + 4 * (8 * WIDE + lane)
                turn_rows(last, -4 * WIDE, source + 4 * (some - 8), 4 * w_out, rows, 9)
        for i in range(0 if lies_dense else 9):
            scatter_run(kind, kernels, i * WIDE, 1, source, start + i // 3 * w_y + i % 3 * w_x, w_out, count)
        for part in range(WIDE // VECTOR):
            # what a register holds beyond ROWS is overwritten by the next channel
            at = 4 * VECTOR * part
            transform_weights(kernels + at, 4 * WIDE, target + 4 * ROWS * c + at, panel)


@inner
def _tiles(p):
    """Tiles of output channels."""
    return (p.c.d + ROWS - 1) // ROWS


@inner
def _pack(call, p, unit, _scratch):
    """The weights of one tile, for all threads."""
    group = call.group + unit // p.round_tiles
    tile = call.part + unit % p.round_tiles
    if group < p.c.groups and tile < _tiles(p):  # the last round may have fewer
        _pack_tile(call, p, group, tile, call.shared + 4 * ELEMENTS * unit * p.panel)


@inner
def all_rows(p):
    """Rows of tiles, of all images."""
    return p.c.batch * p.tiles_y


@inner
def source_row(p, data, n, channel, y, row):
    """Row y of a channel of the source, with its pads."""
    cell, source = (0, y, -p.c.pads[2]), p.c.source
    copy_line(p.kind, row, 0, data, image_of(source, n, channel), source.cells, cell, p.pitch, p.c.source_length)


@inner
def _transform(p, data, channel, count, first, last, rows, v, element):
    """Bᵀ d B of the tiles of rows first … last - 1, `count` channels from `channel` on; columns of `v` are tiles.

    `element` is the distance of the 16 matrices in bytes.
    """
    tiles_y, tiles_x, pitch = p.tiles_y, p.tiles_x, p.pitch
    columns = p.columns
    for c in range(count):
        at = first
        while at < last:
            n, tile_y = at // tiles_y, at % tiles_y
            lines = min(last - at, tiles_y - tile_y, p.lines)
            y = 2 * tile_y - p.c.pads[1]
            for i in range(2 * lines + 2):
                source_row(p, data, n, channel + c, y + i, rows + 4 * i * pitch)
            for i in range(lines):
                target = v + 4 * (c * columns + (at + i - first) * tiles_x)
                for x in range(0, tiles_x, VECTOR):
                    # lanes beyond the row are overwritten by the next one
                    transform_source(rows + 8 * (i * pitch + x), 4 * pitch, target + 4 * x, element)
            at += lines


@inner
def _item(call, p, item, scratch):
    """Weights shared: some rows of tiles, and all output channels of the round or a share of them."""
    splits, groups = p.split, p.round_groups
    split, item = item % splits, item // splits
    number, item = item % groups, item // groups
    group, part = call.group + number, call.part
    if group >= p.c.groups:
        return
    band, channels = p.band, p.c.s
    first = item * band
    last = min(first + band, all_rows(p))
    rows = scratch + 4 * THREAD_HEAD
    v = rows + 4 * (2 * band + 2) * p.pitch
    v = (v + 63) // 64 * 64
    data, element = call.inputs[0], 4 * channels * p.columns
    _transform(p, data, group * channels, channels, first, last, rows, v, element)
    here, panels = min(p.round_tiles, _tiles(p) - part), number * p.round_tiles - part
    for m in range(part + split * here // splits, part + (split + 1) * here // splits):
        packed = call.shared + 4 * ELEMENTS * (panels + m) * p.panel
        _outputs(call, p, group, m, packed, v, first, last, scratch)


@inner
def _source_item(call, p, item, scratch):
    """Images shared: one channel of the round."""
    channels, size = p.c.s, 4 * p.columns
    number, c = item // channels, item % channels
    group, first = call.group + number, call.part
    if group >= p.c.groups:
        return
    last = min(first + p.round_rows, all_rows(p))
    v = call.shared + size * (number * ELEMENTS * channels + c)
    data = call.inputs[0]
    _transform(p, data, group * channels + c, 1, first, last, scratch + 4 * THREAD_HEAD, v, size * channels)


@inner
def _weights_item(call, p, item, scratch):
    """Images shared: one tile of output channels, over the rows of the round."""
    number, m = item // _tiles(p), item % _tiles(p)
    group, first = call.group + number, call.part
    if group >= p.c.groups:
        return
    last = min(first + p.round_rows, all_rows(p))
    v = call.shared + 4 * number * ELEMENTS * p.c.s * p.columns
    packed = (scratch + 4 * THREAD_HEAD + 63) // 64 * 64
    _pack_tile(call, p, group, m, packed)
    _outputs(call, p, group, m, packed, v, first, last, scratch)


@inner
def _outputs(call, p, group, m, packed, v, first, last, scratch):
    """The output channels of tile m at the tiles of rows first … last - 1: products, transformed back and written."""
    outs, channels, columns = p.c.d, p.c.s, p.columns
    table, panel = scratch + 4 * _TABLES, 4 * p.panel
    rows_apart(table, 4)
    bias, values = bias_address(call, p), _bias()
    out, count_all = call.output, (last - first) * p.tiles_x
    count = min(ROWS, outs - m * ROWS)
    bias_of(p.kind, bias, group * outs + m * ROWS, count, values)
    for place in range(0, count_all, COLUMNS):
        vectors = 1 if count_all - place <= VECTOR else 2
        for e in range(ELEMENTS):
            c = scratch + 4 * e * _GAP, 4 * COLUMNS
            a, b = (packed + e * panel, table, 4 * ROWS), (v + 4 * (e * channels * columns + place), 4 * columns)
            multiply(count, count_all - place, c, a, b, one_segment(table), channels, 0)
        for i in range(count):
            line = scratch + 4 * (_LINES + 2 * _LINE * i)
            for part in range(vectors):
                at = scratch + 4 * (COLUMNS * i + VECTOR * part)
                top = line + 8 * VECTOR * part
                transform_result(at, 4 * _GAP, top, top + 4 * _LINE, values + 4 * i)
        _write(p, out, group * outs + m * ROWS, first, place, min(COLUMNS, count_all - place), count, scratch)


@inner
def _write(p, out, channel, first, place, tiles, count, scratch):
    """A block of tiles, row by row of the image."""
    kind, tiles_y, tiles_x = p.kind, p.tiles_y, p.tiles_x
    destination, (_, length_y, length_x) = p.c.destination, p.c.out_length
    done = 0
    while done < tiles:
        row, x = first + (place + done) // tiles_x, (place + done) % tiles_x
        run = min(tiles - done, tiles_x - x)
        n, y = row // tiles_y, 2 * (row % tiles_y)
        width = min(2 * run, length_x - 2 * x)
        for i in range(count):
            at = image_of(destination, n, channel + i) + y * destination.cells[1] + 2 * x
            line = scratch + 4 * (_LINES + 2 * _LINE * i)
            write_run(kind, out, at, 1, line, 2 * done, width)
            if y + 1 < length_y:
                write_run(kind, out, at + destination.cells[1], 1, line, _LINE + 2 * done, width)
        done += run


PACK = stage("winograd_pack", Winograd, _pack)
MULTIPLY = stage("winograd_multiply", Winograd, _item)
TRANSFORM = stage("winograd_transform_images", Winograd, _source_item)
MULTIPLY_IMAGES = stage("winograd_multiply_images", Winograd, _weights_item)
