"""Sums over the cells of an image in registers of whole matrices, compiled: the weight gradient of a convolution.

As `weights.kernel` where the source's channels are the columns. Cells are the steps of the product, a band's as one
long row of a pitch that is even. Both tensors are split into parts (`vector.matrix_tiles`) once for a band: the
destination as tiles of SIDE channels; the source SIDE channels after the other, as pairs of cells, and shifted to pairs
that begin one cell further on where a tap needs these. So a tap starts at some pair, and no tile crosses lines of
the cache.
"""

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32, store_i64
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import block_sizes
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather.planes import image_of, kernel_tap
from onnx_backprop.ort_ops.convolution.weights.kernel import items_of
from onnx_backprop.ort_ops.runtime.stages import stage
from onnx_backprop.ort_ops.vector import matrix_tiles as amx
from onnx_backprop.ort_ops.vector.boxes import copy_line, copy_pairs, dot, nth, volume, within
from onnx_backprop.ort_ops.vector.matrix_parts import AHEAD, shift_pairs
from onnx_backprop.ort_ops.vector.matrix_tiles import DEPTH, GROUP, SIDE
from onnx_backprop.ort_ops.vector.registers import copy_between
from onnx_backprop.ort_ops.vector.rows import clear

_ROWS, _TILE, _PARTS, _LINE = 16, 1024, 3, 64


@inner
def _lines(p, data, first, tensor, channels, cell, rows, steps, length, lines, room):
    """Rows of cells of at most 16 channels, in place or copied: (address, bytes from row to row, cells).

    cell: the first one, in steps along x; rows: how many of the image, `steps` cells apart along y and x. `room` cells
    of a copy are zeros where there is no image.
    """
    stride, cells = (tensor.cells[0], tensor.cells[1], steps[1] * tensor.cells[2]), rows * p.pitch
    dense = p.kind == F32 and stride[2] == 1
    wide, follow = (1, True) if rows == 1 else (p.pitch, steps[0] == 1 and stride[1] == p.pitch)
    if dense and follow and within(cell, (1, rows, wide), length):
        return data + 4 * (first + dot(cell, stride)), 4 * tensor.c, length[2] - cell[2] if rows == 1 else cells
    for y in range(rows):
        place, to = (cell[0], cell[1] + y * steps[0], cell[2]), lines + 4 * y * p.pitch
        if dense:
            inside = 0 <= place[0] < length[0] and 0 <= place[1] < length[1]
            end = length[2] - cell[2] if inside else 0
            source = data + 4 * (first + dot(place, stride))
            copy_between(to, 4 * room, source, 4 * tensor.c, channels, p.pitch, -cell[2], end)
        else:
            for i in range(channels):
                copy_line(p.kind, to, i * room, data, first + i * tensor.c, stride, place, p.pitch, length)
    for i in range(channels):
        clear(lines, i * room + cells, room - cells)
    return lines, 4 * room, room


@inner
def _copy_gradient(p, data, n, group, begin, count, at, size, target, lines, groups):
    """[z][SIDE channels][group of cells] of the channels from `begin` on."""
    tensor, blocks = p.c.destination, (count + SIDE - 1) // SIDE
    end = p.c.out_length[0], p.c.out_length[1], at[2] + size[2]
    for z in range(size[0]):
        for row in range(0, SIDE * blocks, _ROWS):
            channels = max(min(count - row, _ROWS), 0)
            first = image_of(tensor, n, group * p.c.d + begin + min(row, count - 1))
            cell = at[0] + z, at[1], at[2]
            source, step, cells = _lines(
                p, data, first, tensor, channels, cell, size[1], (1, 1), end, lines, groups * DEPTH
            )
            to = target + ((z * blocks + row // SIDE) * groups * GROUP + row % SIDE // _ROWS * _TILE)
            for i in range(groups):
                row_source, left = source + 4 * DEPTH * i, cells - DEPTH * i
                amx.split_rows(to + i * GROUP, _LINE, 2 * _TILE, row_source, step, channels, left, AHEAD)


@inner
def _copy_source(p, data, n, group, begin, at, box, target, lines, room):
    """[residue and parity][part][16 channels][pair of cells] of SIDE channels."""
    tensor, step, low = p.c.source, p.c.strides, at + p.low
    pairs = p.kind == F32 and tensor.cells[2] == 1 and step[2] == 2
    for z in range(box[0]):
        for half in range(min(p.columns, SIDE) // _ROWS):
            channel = begin + half * _ROWS
            channels = max(min(p.c.s - channel, _ROWS), 0)
            first = image_of(tensor, n, group * p.c.s + min(channel, p.c.s - 1))
            source, from_row, cells, before = lines, 4 * p.room, p.room, -1
            for number in range(p.planes):
                plane = view(par.Residue, p + p.plane_table, number)
                of_z, of_y, of_x = plane.of
                cell = (low[0] + z) * step[0] + of_z, low[1] * step[1] + of_y, low[2]
                residue = (of_z * step[1] + of_y) * step[2] + (0 if pairs else of_x)
                if residue != before and pairs:
                    for i in range(channels):
                        even = lines + 4 * i * p.room
                        address = data + 4 * (first + i * tensor.c), 16 * tensor.c, tensor.cells, p.c.source_length
                        copy_pairs(address, cell, step[1], box[1], p.pitch, even, even + 4 * _ROWS * p.room)
                        clear(even, box[1] * p.pitch, p.room - box[1] * p.pitch)
                        clear(even, _ROWS * p.room + box[1] * p.pitch, p.room - box[1] * p.pitch)
                elif residue != before:
                    row = first + of_x * tensor.cells[2]
                    cells_along = (p.c.source_length[2] - of_x + step[2] - 1) // step[2]
                    end = p.c.source_length[0], p.c.source_length[1], cells_along
                    steps = step[1], step[2]
                    source, from_row, cells = _lines(
                        p, data, row, tensor, channels, cell, box[1], steps, end, lines, p.room
                    )
                before = residue
                if pairs:
                    source = lines + 4 * _ROWS * p.room * of_x
                to = target + _LINE // 2 * (room * (2 * _PARTS * number + half) + z * box[1] * p.pitch)
                stop = box[1] * p.pitch + DEPTH  # zeros behind the last one: taps shift
                pairs_of_row = rows = (stop + DEPTH - 1) // DEPTH * _ROWS
                if plane.odd > 2:
                    pairs_of_row = p.pitch // 2
                for part in range(_PARTS * (plane.odd > 1)):
                    shifted = to + _LINE * part * room
                    even = shifted - _LINE * _PARTS * room * max(plane.odd - 2, 1)
                    for i in range(0, rows, pairs_of_row):
                        some = min(pairs_of_row, rows - i)
                        shift_pairs(plane.odd > 3, shifted + _LINE * i, even + _LINE * i, some)
                for i in range(0, stop * (plane.odd < 2), DEPTH):
                    pair, row, left = to + _LINE // 2 * i, source + 4 * (i + plane.odd), cells - plane.odd - i
                    amx.split_turned(pair, _LINE, _LINE * room, row, from_row, channels, left, AHEAD)


@inner
def _starts(p, t, from_row):
    """Where the pairs of a tap start, in bytes."""
    tap = kernel_tap(p, t)
    return _LINE * (p.pairs * _PARTS * tap.residue + dot(tap.shift - p.low, (from_row, p.pitch, 1)) // 2)


@inner
def _unit(p, call, unit, group, begin, end, c, per_row, add, scratch):
    """One band of one image, of rows of the product from `begin` on."""
    n, at = unit // volume(p.bands), nth(p.bands, unit % volume(p.bands)) * p.band
    size = min(p.band, p.c.out_length - at)
    box, groups, count = size + p.high - p.low, (size[1] * p.pitch + DEPTH - 1) // DEPTH, end - begin
    x, dy, blocks, room = call.inputs[p.source], call.inputs[p.dest], (count + SIDE - 1) // SIDE, p.pairs
    gradient, source, lines = scratch + p.offsets.gradient, scratch + p.offsets.source, scratch + p.offsets.scalars
    table, sums, from_row = scratch + p.offsets.table, scratch + p.offsets.tile, box[1] * p.pitch
    at_once = max(1, block_sizes.MATRIX_CELLS // (DEPTH * groups))
    amx.take_tiles(scratch + p.offsets.configuration)
    _copy_gradient(p, dy, n, group, begin, count, at, size, gradient, lines, groups)
    for z in range(size[0]):
        store_i64(table, 2 * z, z * blocks * groups * GROUP)
        store_i64(table, 2 * z + 1, _LINE // 2 * z * from_row)
    taps = 2 if p.columns < SIDE else 1  # of few channels, side by side
    for s in range(0, p.c.s, SIDE):
        _copy_source(p, x, n, group, s, at, box, source, lines, room)
        for t in range(0, p.taps, taps):
            right, tile = source + _starts(p, t, from_row), _LINE // 2 * room
            if taps > 1:
                tile = _starts(p, min(t + 1, p.taps - 1), from_row) - _starts(p, t, from_row)
            for block in range(blocks):
                some, some_columns = min(SIDE, count - block * SIDE), min(SIDE, (p.taps - t) * p.columns - s)
                left, to = gradient + block * groups * GROUP, c + 4 * (block * SIDE * per_row + t * p.columns + s)
                for z in range(0, size[0], at_once):
                    amx.sum_segments(
                        sums, 4 * SIDE, table + 16 * z, min(at_once, size[0] - z), groups,
                        left, _LINE, _TILE, 2 * _TILE, GROUP,
                        right, _LINE, tile, _LINE * room, _LINE * DEPTH // 2,
                    )  # fmt: skip
                    amx.add_sums(to, 4 * per_row, sums, some, some_columns, add or z > 0)
    amx.leave_tiles()


WORK = stage("cells_matrices", par.Cells, items_of("matrices", _unit))
