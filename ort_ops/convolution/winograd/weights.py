"""Weight gradients of convolutions by 3×3 with stride 1, channels first, through Winograd's tiles, compiled.

    dw[d, s] = Gᵀ · [ Σ_tiles (A dY[d] Aᵀ) ⊙ (Bᵀ x[s] B) ] · G

the adjoint of `winograd.kernel`: (m+2)² products (destination channels × tiles) · (tiles × source channels). The tiles
are cut into parts, as many as the shape says; the products of a part are summed from band to band, and the parts are
added up in order, so that threads change nothing. An item of work is a part and some of the destination's channels.

Where such sums are large beside the images, the source is transformed for all threads instead, and an item is a tile of
the destination's channels: its sums stay with the thread, which transforms them back and writes them. What does not fit
is done in rounds: some groups at a time, or one group and some of its source's (else, destination's) channels.
"""

from dataclasses import dataclass

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import stack
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.convolution.gather.planes import image_of
from onnx_backprop.ort_ops.convolution.problem import Correlation
from onnx_backprop.ort_ops.convolution.winograd.kernel import all_rows, source_row
from onnx_backprop.ort_ops.runtime.stages import stage
from onnx_backprop.ort_ops.vector.boxes import copy_line, dot
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, multiply, one_segment, rows_apart
from onnx_backprop.ort_ops.vector.registers import transpose_tile
from onnx_backprop.ort_ops.vector.rows import add_run, clear, write_run
from onnx_backprop.ort_ops.vector.winograd_transforms import (
    MOST_ELEMENTS,
    transform_cells,
    transform_gradient,
    transform_kernel,
)


@dataclass(frozen=True, kw_only=True)
class WinogradWeights(Record):
    """The numbers of a plan. Source and destination are inputs 0 and 1."""

    kind: int
    c: Correlation
    size: int  # cells of a tile along either axis
    elements: int  # products per tile
    tiles_y: int
    tiles_x: int
    pitch: int  # floats of a row of either image
    band: int = 0  # rows of tiles
    parts: int = 1
    split: int = 1
    s_columns: int = 0  # the source's channels of a round, in whole tiles
    s_panel: int = 0  # floats of COLUMNS of them for all tiles
    s_element: int = 0  # floats of a matrix, of odd lines, as a tile is written to all of them
    d_columns: int = 0  # floats of a channel of the destination's transformed tiles
    d_element: int = 0  # the same as of the source
    lines: int = 1  # rows of tiles of the source that are turned at a time
    u_rows: int = 0  # the destination's channels of a round, where sums are shared
    round_groups: int = 0
    round_tiles: int = 0
    source_band: int = 1  # rows transformed at a time, where the source is shared


_tables = stack(ROWS + 2)
_sums = stack((MOST_ELEMENTS + 9) * VECTOR)


@inner
def _source_tiles(p, data, group, channel, first, last, rows, turned, v):
    """Bᵀ x B of the tiles of some rows: v[e][panel][tile][channel], `s_columns` channels from `channel` on."""
    tiles_y, tiles_x, pitch, size = p.tiles_y, p.tiles_x, p.pitch, p.size
    columns, element = p.s_columns, 4 * p.s_element
    channels = min(p.c.s - channel, columns)
    at = first
    while at < last:
        n, tile_y = at // tiles_y, at % tiles_y
        count = min(last - at, tiles_y - tile_y, p.lines)
        y, start = size * tile_y - p.c.pads[1], group * p.c.s + channel
        for c in range(0, channels, VECTOR):
            for i in range(size * count + 2):
                for lane in range(VECTOR):
                    row = rows + 4 * lane * pitch
                    if c + lane < channels:
                        source_row(p, data, n, start + c + lane, y + i, row)
                    else:
                        clear(row, 0, pitch)
                for x in range(0, size * tiles_x + 2, VECTOR):
                    target = turned + 4 * ((i * pitch + x) * columns + c)
                    transpose_tile(target, 4 * columns, rows + 4 * x, 4 * pitch)
        for i in range(count):
            for x in range(tiles_x):
                source = turned + 4 * size * (i * pitch + x) * columns
                target = v + 4 * ((at + i - first) * tiles_x + x) * COLUMNS
                for c in range(0, channels, VECTOR):
                    to = target + 4 * (c // COLUMNS * p.s_panel + c % COLUMNS)
                    transform_cells(source + 4 * c, 4 * pitch * columns, 4 * columns, to, element, size)
        at += count


@inner
def _gradient_tiles(p, data, channel, count, first, last, rows, u):
    """A dY Aᵀ of the tiles of some rows, `count` channels from `channel` on: u[e][channel][tile]."""
    tiles_y, tiles_x, pitch, size = p.tiles_y, p.tiles_x, p.pitch, p.size
    columns, lengths, tensor = p.d_columns, p.c.out_length, p.c.destination
    element = 4 * p.d_element
    for i in range(count):
        for at in range(first, last):
            n, y = at // tiles_y, size * (at % tiles_y)
            for line in range(size):
                to, cell, plane = line * pitch, (0, y + line, 0), image_of(tensor, n, channel + i)
                copy_line(p.kind, rows, to, data, plane, tensor.cells, cell, pitch, lengths)
            target = u + 4 * (i * columns + (at - first) * tiles_x)
            for x in range(0, tiles_x, VECTOR):
                # lanes beyond the row are overwritten by the next one
                transform_gradient(rows + 4 * size * x, 4 * pitch, target + 4 * x, element, size)


@inner
def _item(call, p, item, scratch):
    splits, groups, parts = p.split, p.round_groups, p.parts
    split, item = item % splits, item // splits
    number, part = item % groups, item // groups
    group, tile = call.group + number, call.part
    if group >= p.c.groups:
        return
    d, columns = p.c.d, p.s_columns
    tiles = min(p.round_tiles, (d + ROWS - 1) // ROWS - tile)
    begin, end = (tile + split * tiles // splits) * ROWS, min((tile + (split + 1) * tiles // splits) * ROWS, d)
    first, last = part * all_rows(p) // parts, (part + 1) * all_rows(p) // parts
    tiles_x, band, pitch = p.tiles_x, p.band, p.pitch
    rows = scratch
    turned = rows + 4 * VECTOR * pitch
    v = turned + 4 * (p.size * p.lines + 2) * pitch * columns
    u = v + 4 * p.elements * p.s_element
    channels = p.c.s
    d_columns, u_rows = p.d_columns, p.u_rows
    sums = call.shared + 4 * (part * groups + number) * p.elements * u_rows * columns
    source, dest = call.inputs[0], call.inputs[1]
    table = _tables()
    rows_apart(table, 4 * p.d_columns)
    for at in range(first, last, band):
        stop = min(at + band, last)
        _source_tiles(p, source, group, 0, at, stop, rows, turned, v)
        _gradient_tiles(p, dest, group * d + begin, end - begin, at, stop, rows, u)
        tiles_here = (stop - at) * tiles_x
        for e in range(p.elements):
            for m in range(begin, end, ROWS):
                line = sums + 4 * (e * u_rows + m - tile * ROWS) * columns
                left = u + 4 * (e * p.d_element + (m - begin) * d_columns)
                right = v + 4 * e * p.s_element
                _multiply(p, line, channels, left, table, min(ROWS, end - m), right, tiles_here, at != first)


@inner
def _multiply(p, sums, channels, left, table, rows, right, tiles, add):
    """sums[i][c] (+)= Σ_tiles left[i][tile] · right[tile][c] for `rows` of the destination's channels."""
    for c in range(0, channels, COLUMNS):
        c_at, a = (sums + 4 * c, 4 * p.s_columns), (left, table, 4)
        b = (right + 4 * (c // COLUMNS) * p.s_panel, 4 * COLUMNS)
        multiply(rows, channels - c, c_at, a, b, one_segment(table), tiles, add)


@inner
def _reduce(call, p, unit, _scratch):
    """Add the parts up for one destination channel, transform back, write."""
    d, s, groups, columns = p.c.d, p.c.s, p.round_groups, p.s_columns
    number, row = unit // p.u_rows, unit % p.u_rows
    group, m = call.group + number, call.part * ROWS + row
    if group >= p.c.groups or m >= d:
        return
    element = p.u_rows * columns
    total, out = _sums(), call.output
    lines = total + 4 * p.elements * VECTOR
    for c in range(0, s, VECTOR):
        clear(total, 0, p.elements * VECTOR)
        for part in range(p.parts):
            place = (part * groups + number) * p.elements * element + row * columns + c
            for e in range(p.elements):
                add_run(1, total + 4 * e * VECTOR, call.shared, place + e * element, VECTOR)
        _write(p, out, group, m, c, total, 4 * VECTOR, lines)


@inner
def _write(p, out, group, m, c, source, step, lines):
    """The weights of a destination's channel and a vector of the source's from the elements, `step` bytes apart."""
    transform_kernel(source, step, lines, 4 * VECTOR, p.size)
    start = (group * p.c.d + m) * p.c.w_d + c * p.c.w_s
    count = min(VECTOR, p.c.s - c)
    for i in range(3):
        for j in range(3):
            to = start + dot((0, i, j), p.c.w_kernel)
            write_run(p.kind, out, to, p.c.w_s, lines, (3 * i + j) * VECTOR, count)


@inner
def _source_item(call, p, item, scratch):
    """One band of one group of the round."""
    band, rows = p.source_band, all_rows(p)
    bands = (rows + band - 1) // band
    number, first = item // bands, item % bands * band
    group, last = call.group + number, min(first + band, rows)
    if group >= p.c.groups:
        return
    v = call.shared + 4 * (number * p.elements * p.s_element + first * p.tiles_x * COLUMNS)
    source = call.inputs[0]
    turned = scratch + 4 * VECTOR * p.pitch
    _source_tiles(p, source, group, call.part, first, last, scratch, turned, v)


@inner
def _tile_item(call, p, item, scratch):
    """ROWS of the destination's channels: all their weights for the source's channels of the round."""
    d, columns, c0 = p.c.d, p.s_columns, call.part
    tiles = (d + ROWS - 1) // ROWS
    number, begin = item // tiles, item % tiles * ROWS
    group, count = call.group + number, min(ROWS, d - begin)
    if group >= p.c.groups:
        return
    tiles_x, band = p.tiles_x, p.band
    dest, out = call.inputs[1], call.output
    channels = min(columns, p.c.s - c0)
    rows = scratch
    lines = rows + 4 * VECTOR * p.pitch
    sums = lines + 4 * 9 * VECTOR
    u = sums + 4 * p.elements * ROWS * columns
    v, table = call.shared + 4 * number * p.elements * p.s_element, _tables()
    rows_apart(table, 4 * p.d_columns)
    for at in range(0, all_rows(p), band):
        stop = min(at + band, all_rows(p))
        _gradient_tiles(p, dest, group * d + begin, count, at, stop, rows, u)
        for e in range(p.elements):
            line, left = sums + 4 * e * ROWS * columns, u + 4 * e * p.d_element
            right = v + 4 * (e * p.s_element + at * tiles_x * COLUMNS)
            _multiply(p, line, channels, left, table, count, right, (stop - at) * tiles_x, at != 0)
    for i in range(count):
        for c in range(0, channels, VECTOR):
            _write(p, out, group, begin + i, c0 + c, sums + 4 * (i * columns + c), 4 * ROWS * columns, lines)


SUM = stage("winograd_weights_sum", WinogradWeights, _item)
REDUCE = stage("winograd_weights_reduce", WinogradWeights, _reduce)
TRANSFORM = stage("winograd_weights_transform", WinogradWeights, _source_item)
MULTIPLY = stage("winograd_weights_multiply", WinogradWeights, _tile_item)
