"""Bands of a gather in registers of whole matrices: tiles of cells by output channels, of either layout. Compiled.

As in `gather.planes`, a tap shifts a band's cells as one long row. The copy of a band is split into parts
(`vector.matrix_tiles`) once, and read for every tap and output channel: of a group of channels [cell][part][channel],
so that a tile is 16 cells from any one on. Channels fill up whole groups with zeros. NCX data and results are turned.
"""

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import block_sizes
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather.planes import (
    box_of,
    copy_pairs,
    image_of,
    plane_of,
    tap_starts,
    tiles_of_band,
)
from onnx_backprop.ort_ops.vector.boxes import copy_line, dot, volume
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS
from onnx_backprop.ort_ops.vector.matrix_tiles import (
    DEPTH,
    GROUP,
    SIDE,
    add_sums,
    leave_tiles,
    split_pairs,
    split_rows,
    sum_segments,
    sum_tall_segments,
    take_tiles,
)
from onnx_backprop.ort_ops.vector.registers import copy_rows, transpose_tile
from onnx_backprop.ort_ops.vector.rows import clear, read_run

_TILE, _PARTS, _LINE, _ROWS = 1024, 3, 64, 16
_CELL = _PARTS * _LINE  # bytes of a cell's group of channels
_AHEAD = 512  # bytes of a row that are fetched before they are split


@inner
def split_panel(target, panel, taps, channels, wide, turned, row):
    """Packed weights, SIDE output channels of every tap and channel, into parts: a group for DEPTH channels.

    wide: taps that are pairs, of which a group has half the channels; row: scratch for them. turned: whether output
    channels are rows.
    """
    for tap in range(0, taps, wide):
        for c in range(0, channels, DEPTH // wide):
            count, source = min(DEPTH // wide, channels - c), panel + 4 * SIDE * (tap * channels + c)
            if wide > 1:
                for i in range(wide):
                    from_tap = source + 4 * SIDE * channels * i
                    copy_rows(row + 4 * SIDE * i, 4 * SIDE * wide, from_tap, 4 * SIDE, count, SIDE)
                source = row
            for half in range(SIDE // _ROWS):
                to = target + _TILE * half
                split_pairs(to, _LINE, 2 * _TILE, source + 4 * _ROWS * half, 4 * SIDE, wide * count, _ROWS, 0)
                for part in range(_PARTS * turned):
                    transpose_tile(to + 2 * _TILE * part, _LINE, to + 2 * _TILE * part, _LINE)
            target += GROUP


@inner
def _split_turned(target, source, step, channels, count, tile):
    """Cells of planes, `step` bytes from channel to channel."""
    for i in range(0, count, _ROWS):
        split_pairs(tile, _LINE, 2 * _TILE, source + 4 * i, step, channels, count - i, _AHEAD)
        for part in range(_PARTS):
            transpose_tile(target + _CELL * i + _LINE * part, _CELL, tile + 2 * _TILE * part, _LINE)


@inner
def _copy_cells(p, data, first, channels, target, of, low, size, lines):
    """DEPTH channels at most, which lie together, of the cells of a residue; `first` is their first element."""
    length, step, stride, pitch = p.c.source_length, p.step, p.c.source.cells, size[2]
    start = min(max(0, -low[2]), pitch)
    stop = max(min(pitch, (length[2] - of[2] + step[2] - 1) // step[2] - low[2]), start)
    for n in range(size[0] * size[1]):
        cell_z, cell_y = (low[0] + n // size[1]) * step[0] + of[0], (low[1] + n % size[1]) * step[1] + of[1]
        begin, end = start, stop
        if not (0 <= cell_z < length[0] and 0 <= cell_y < length[1]):
            begin, end = pitch, pitch
        clear(target, 0, begin * _CELL // 4)
        row = first + cell_z * stride[0] + cell_y * stride[1] + (of[2] + (low[2] + begin) * step[2]) * stride[2]
        to, source, from_cell = target + begin * _CELL, data + 4 * row, 4 * step[2] * stride[2]
        for i in range(0, end - begin, _ROWS):
            count = end - begin - i
            if p.kind != F32:
                source, from_cell = lines - 4 * DEPTH * i, 4 * DEPTH
                for j in range(min(count, _ROWS)):
                    read_run(p.kind, lines, j * DEPTH, data, row + (i + j) * step[2] * stride[2], 1, channels)
            split_rows(to + _CELL * i, _CELL, _LINE, source + i * from_cell, from_cell, count, channels, _AHEAD)
        clear(target, end * _CELL // 4, (pitch - end) * _CELL // 4)
        target += pitch * _CELL


@inner
def _copy_planes(p, data, first, channels, target, of, low, size, lines, both):
    """As `_copy_cells` of channels that lie apart; also of the next residue along x, `both` bytes on.

    Rows are turned together, as one row.
    """
    tensor, length, step, pitch = p.c.source, p.c.source_length, p.step, size[2]
    stride, line, odd = tensor.cells, p.line, lines + 4 * DEPTH * p.line
    ends = length[0], length[1], (length[2] - of[2] + step[2] - 1) // step[2]
    strides, tile = (stride[0], stride[1], step[2] * stride[2]), odd + 4 * DEPTH * line
    in_place, at_once = p.kind == F32 and strides[2] == 1, max(1, line // pitch)
    start = min(max(0, -low[2]), pitch)
    stop = max(start, min(pitch, ends[2] - low[2]))
    if in_place:
        at_once = 1
    for z in range(size[0]):
        cell_z = (low[0] + z) * step[0] + of[0]
        for y in range(0, size[1], at_once):
            rows, cell = min(at_once, size[1] - y), (cell_z, (low[1] + y) * step[1] + of[1], low[2])
            if in_place:
                begin, end = start, stop
                if not (0 <= cell_z < length[0] and 0 <= cell[1] < length[1]):
                    begin, end = pitch, pitch
                clear(target, 0, begin * _CELL // 4)
                source = data + 4 * (first + dot(cell, strides) + begin)
                _split_turned(target + begin * _CELL, source, 4 * tensor.c, channels, end - begin, tile)
                clear(target, end * _CELL // 4, (pitch - end) * _CELL // 4)
            else:
                for i in range(channels):
                    image = data + 4 * (first + i * tensor.c), 16 * tensor.c, stride, length
                    if both:
                        copy_pairs(image, cell, step[1], rows, pitch, lines + 4 * i * line, odd + 4 * i * line)
                    else:
                        for n in range(rows):
                            place, at = (
                                (cell_z, cell[1] + n * step[1], low[2]),
                                first + i * tensor.c + of[2] * stride[2],
                            )
                            copy_line(p.kind, lines, i * line + n * pitch, data, at, strides, place, pitch, ends)
                if both:
                    _split_turned(target + both, odd, 4 * line, channels, rows * pitch, tile)
                _split_turned(target, lines, 4 * line, channels, rows * pitch, tile)
            target += rows * pitch * _CELL


@inner
def _copy(p, data, first, target, low, size, plane, lines):
    """For every residue and group of channels the cells of a band, and zeros."""
    groups, n, cells = (p.c.s + DEPTH - 1) // DEPTH, 0, volume(size)
    residue = groups * plane * _CELL
    while n < p.residues:
        of, planes = view(par.Residue, p + p.residue_table, n).of, 1
        if p.kind == F32 and not p.c.last and p.c.source.cells[2] == 1 and p.step[2] == 2 and n + 1 < p.residues:
            next_z, next_y, next_x = view(par.Residue, p + p.residue_table, n + 1).of
            if of[0] == next_z and of[1] == next_y and next_x - of[2] == 1:
                planes = 2
        for group in range(groups):
            to, channels = target + group * plane * _CELL, min(p.c.s - group * DEPTH, DEPTH)
            at = first + group * DEPTH * p.c.source.c
            if p.c.last:
                _copy_cells(p, data, at, channels, to, of, low, size, lines)
            else:
                _copy_planes(p, data, at, channels, to, of, low, size, lines, residue * (planes - 1))
            for i in range(planes):
                clear(to + i * residue, cells * _CELL // 4, (plane - cells) * _CELL // 4)
        target += planes * residue
        n += planes


@inner
def _fits(lines, columns):
    """Whether a tile has so many channels and cells."""
    return lines * columns == SIDE * COLUMNS


@inner
def _multiply(p, _phase, _lines, _columns, c, panel, source, segments, plane, scratch):
    """A tile of a product: the sum of MATRIX_STEPS steps, and then of others; tall ones have 64 cells."""
    (table, count), sums = segments, scratch + p.offsets.tile + 8 * SIDE * COLUMNS
    more, to, to_row = sums + 4 * SIDE * COLUMNS, sums, 4 * COLUMNS
    if p.c.last:
        to, to_row = c
    groups, most = (p.c.s + DEPTH - 1) // DEPTH, block_sizes.MATRIX_STEPS // DEPTH
    taps = max(1, most // groups)
    for tap in range(0, count, taps):
        for group in range(0, groups, most):
            again = tap + group > 0
            at, at_row = (more, 4 * COLUMNS) if again else (to, to_row)
            segments, number = (table + 16 * tap, min(taps, count - tap)), min(most, groups - group)
            left = source + group * plane * _CELL, _CELL, _ROWS * _CELL, _LINE, plane * _CELL
            right = panel + group * GROUP, _LINE, _TILE, 2 * _TILE, GROUP
            if p.columns > COLUMNS:
                sum_tall_segments(at, _LINE, *segments, number, *left, *right)
            else:
                sum_segments(at, at_row, *segments, number, *left, *right)
            if again:
                add_sums(to, to_row, more, SIDE, COLUMNS, 1)
    for i in range(4 * (p.columns > COLUMNS)):
        transpose_tile(c[0] + _LINE * i, c[1], sums + _TILE * i, _LINE)
    if not p.c.last and p.columns == COLUMNS:
        for i in range(2):
            for j in range(2):
                part, turned = _ROWS * (i * 4 * COLUMNS + 4 * j), _ROWS * (j * c[1] + 4 * i)
                transpose_tile(c[0] + turned, c[1], sums + part, 4 * COLUMNS)


@inner
def gather_matrices(call, p, packed, panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of one band; the packed weights of tile m are panel `panels` + m."""
    box, band = box_of(p, cell, size), scratch + p.offsets.copy
    pitch, plane, first = box[2], plane_of(p, box), image_of(p.c.source, n, group * p.c.s)
    take_tiles(scratch + p.offsets.configuration)
    _copy(p, call.inputs[0], first, band, cell + p.low, box, plane, scratch + p.offsets.lines)
    groups, words = (p.c.s + DEPTH - 1) // DEPTH, _CELL // 4
    stride = box[1] * pitch * words, pitch * words, words
    tap_starts(p, scratch + p.offsets.segments, 0, groups * GROUP // 4, groups * plane * words, stride)
    copy = (band, pitch, _CELL * box[1] * pitch, _CELL, plane)
    of_band = packed, panels, (n, group, cell, size), (begin, end)
    tiles_of_band(call, p, of_band, scratch, copy, SIDE, groups * GROUP // 4, _fits, _multiply)
    leave_tiles()
