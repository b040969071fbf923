"""Copies of boxes of an image in float32, zeros where a box leaves the image: as planes, as cells, or turned. Compiled.

An image is an address and the element index of its first cell, with a stride per channel and per axis; `low` and
`size` are three first cells and lengths of the box, `length` the lengths of the image.
"""
# pyright: reportIndexIssue=false
# max of two tuples is a tuple here, and to pyright an int

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, apart, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, load_f32, stack, store_f32, store_i64
from onnx_backprop.ort_ops.vector.registers import copy_even_odd, transpose_part, transpose_tile
from onnx_backprop.ort_ops.vector.rows import clear, read_run, write_run

_square = stack(VECTOR * VECTOR // 2)


@inner
def dot(cell, strides):
    """How far a cell lies from the first one."""
    return cell[0] * strides[0] + cell[1] * strides[1] + cell[2] * strides[2]


@inner
def volume(size):
    """The cells of a box."""
    return size[0] * size[1] * size[2]


@inner
def nth(size, n):
    """The n-th cell of a box."""
    return n // (size[1] * size[2]), n // size[2] % size[1], n % size[2]


@inner
def following(cell, size):
    """The cell of a box behind one of its cells."""
    z, y, x = cell
    if x + 1 < size[2]:
        return z, y, x + 1
    return (z, y + 1, 0) if y + 1 < size[1] else (z + 1, 0, 0)


@inner
def run_of(size, a, b):
    """Of cells so far apart along the axes in two operands: (how many follow one another in both, planes, rows)."""
    if a[1] != size[2] * a[2] or b[1] != size[2] * b[2]:
        return size[2], size[0], size[1]
    if a[0] != size[1] * a[1] or b[0] != size[1] * b[1]:
        return size[1] * size[2], size[0], 1
    return volume(size), 1, 1


@inner
def segments_of(size, a, b, table):
    """The runs of cells of a band, where each starts in either operand: ((table, how many), cells of each)."""
    length, planes, rows = run_of(size, a, b)
    for z in range(planes):
        for y in range(rows):
            entry = 2 * (z * rows + y)
            store_i64(table, entry, 4 * dot((z, y, 0), a))
            store_i64(table, entry + 1, 4 * dot((z, y, 0), b))
    return (table, planes * rows), length


@inner
def dense(size, columns):
    """The strides of a box whose cells, of so many elements, follow one another."""
    return size[1] * size[2] * columns, size[2] * columns, columns


@inner
def within(low, size, length):
    """Whether a box does not leave the image."""
    return min(*low, *(length - low - size)) >= 0


@inner
def read_by(size, step, low, high):
    """The lengths of what a box of cells reads that are `step` apart, each from its least to its greatest shift."""
    return (size - 1) * step + high - low + 1


@apart
def copy_row(kind, target, to, source, first, step, low, count, end):
    """target[to + i] = source[first + (low + i)·step] for i < count, 0 where low + i is not in [0, end)."""
    start, stop = min(max(0, -low), count), max(min(count, end - low), 0)
    stop = max(start, stop)
    clear(target, to, start)
    read_run(kind, target, to + start, source, first + (low + start) * step, step, stop - start)
    clear(target, to + stop, count - stop)


@inner
def copy_line(kind, target, to, source, first, stride, cell, count, length):
    """`count` cells of a row of the image, from a cell on."""
    z, y, x = cell
    if 0 <= z < length[0] and 0 <= y < length[1]:
        copy_row(kind, target, to, source, first + z * stride[0] + y * stride[1], stride[2], x, count, length[2])
    else:
        clear(target, to, count)


@inner
def copy_box_planes(kind, target, plane, source, first, channels, channel, stride, low, size, length):
    """[channel][z][y][x], `plane` elements from channel to channel."""
    for c in range(channels):
        at = c * plane
        for z in range(size[0]):
            for y in range(size[1]):
                cell = low[0] + z, low[1] + y, low[2]
                copy_line(kind, target, at, source, first + c * channel, stride, cell, size[2], length)
                at += size[2]


@apart
def copy_box_cells(kind, target, columns, source, first, channels, stride, low, size, length):
    """[z][y][x][channel] of channels that lie together; `columns` elements from cell to cell, zeros at their end."""
    at = 0
    for z in range(size[0]):
        for y in range(size[1]):
            cell_z, cell_y = low[0] + z, low[1] + y
            inside = 0 <= cell_z < length[0] and 0 <= cell_y < length[1]
            row = first + cell_z * stride[0] + cell_y * stride[1]
            for x in range(size[2]):
                cell = low[2] + x
                if inside and 0 <= cell < length[2]:
                    read_run(kind, target, at, source, row + cell * stride[2], 1, channels)
                    clear(target, at + channels, columns - channels)
                else:
                    clear(target, at, columns)
                at += columns


@inner
def copy_box_within(kind, target, source, first, channels, stride, low, size, length):
    """The part of a box within the image, [z][y][x][channel] of channels that lie together.

    Answers the address that the image's first cell would have beside it and the strides of the axes, as if the copy
    were of the whole image.
    """
    begin, end = max(low, 0), min(low + size, length)
    box, at = max(end - begin, 0), 0
    step, cells = dense(box, channels), box[2]
    for z in range(begin[0], end[0]):
        for y in range(begin[1], end[1]):
            row = first + z * stride[0] + y * stride[1] + begin[2] * stride[2]
            if stride[2] == channels:
                read_run(kind, target, at, source, row, 1, cells * channels)
            else:
                for x in range(cells):
                    read_run(kind, target, at + x * channels, source, row + x * stride[2], 1, channels)
            at += cells * channels
    return target - 4 * dot(begin, step), step


@inner
def turn_box_within(kind, target, columns, source, first, channels, channel, stride, low, size, length):
    """As `copy_box_within`, of channels that lie apart: `columns` elements, whole vectors, from cell to cell."""
    begin = max(low, 0)
    box = max(min(low + size, length) - begin, 0)
    turn_box(kind, target, columns, source, first, channels, channel, stride, begin, box, length)
    step = dense(box, columns)
    return target - 4 * dot(begin, step), step


@inner
def reached(shift, at, size, step, length):
    """Which i < size have 0 <= (at + i)·step + shift < length: a first one and an end, alike where there are none."""
    first, last = -(shift + at * step), length - (shift + at * step)
    begin = min(max(-(-first // step), 0), size)
    return begin, max(min(-(-last // step), size), begin)


@apart
def turn_box(kind, target, columns, source, first, channels, channel, stride, low, size, length):
    """[z][y][x][channel] of channels that lie apart; as `copy_box_cells` otherwise, `columns` whole vectors."""
    rows, count, end = size[1], size[2], length[2]
    whole = low[2] == 0 and count == end and stride[1] == count * stride[2]
    if whole and low[1] >= 0 and low[1] + rows <= length[1]:  # they are one long row
        rows, count, end = 1, rows * count, rows * count
    at = 0
    for z in range(size[0]):
        for y in range(rows):
            cell_z, cell_y = low[0] + z, low[1] + y
            if 0 <= cell_z < length[0] and 0 <= cell_y < length[1]:
                start = min(max(0, -low[2]), count)
                stop = max(start, min(count, end - low[2]))
                row = first + cell_z * stride[0] + cell_y * stride[1] + (low[2] + start) * stride[2]
                clear(target, at, start * columns)
                to = at + start * columns
                turn_row(kind, target, to, columns, source, row, channels, channel, stride[2], stop - start)
                clear(target, at + stop * columns, (count - stop) * columns)
            else:
                clear(target, at, count * columns)
            at += count * columns


@apart
def turn_row(kind, target, to, columns, source, first, channels, channel, step, count):
    """target[to + i·columns + c] = source[first + c·channel + i·step], 0 for the columns from `channels` on."""
    direct = kind == F32 and step == 1
    for c in range(0, channels, VECTOR):
        rows = min(VECTOR, channels - c)
        for i in range(0, count, VECTOR):
            cells, place = min(VECTOR, count - i), target + 4 * (to + i * columns + c)
            if direct:
                start = source + 4 * (first + c * channel + i)
                transpose(place, 4 * columns, start, 4 * channel, rows, cells)
            else:
                square = _square()
                for lane in range(rows):
                    start = first + (c + lane) * channel + i * step
                    read_run(kind, square, lane * VECTOR, source, start, step, cells)
                transpose(place, 4 * columns, square, 4 * VECTOR, rows, cells)


@apart
def transpose(target, target_row, source, source_row, rows, columns):
    """As `transpose_part`, of 1 to a vector's length of rows and columns."""
    if rows == VECTOR and columns == VECTOR:
        transpose_tile(target, target_row, source, source_row)
    else:
        transpose_part(target, target_row, source, source_row, rows, columns)


@inner
def transpose_rows(target, target_row, source, source_row, rows, columns):
    """As `transpose_part`, of up to a vector's length of rows and of any number of columns."""
    for j in range(0, columns, VECTOR):
        transpose_part(target + j * target_row, target_row, source + 4 * j, source_row, rows, min(VECTOR, columns - j))


@inner
def copy_pairs(image, cell, step, rows, count, even, odd):
    """Even and odd cells of `rows` rows, `step` apart, of a channel of float32, `count` of either from a pair on.

    image: the address of the first cell, how far on to fetch, strides, lengths. cell: the first one, x in pairs.
    """
    data, channel, (stride_z, stride_y, _), length = image
    begin, at = min(max(0, -cell[2]), count), 0
    end = max(begin, min(count, length[2] // 2 - cell[2]))
    for n in range(rows):
        y = cell[1] + n * step
        inside = 0 <= cell[0] < length[0] and 0 <= y < length[1]
        start, stop = (begin, end) if inside else (0, 0)
        row = data + 4 * (cell[0] * stride_z + y * stride_y + 2 * cell[2])
        clear(even, at, start)
        clear(odd, at, start)
        clear(even, at + stop, count - stop)
        clear(odd, at + stop, count - stop)
        copy_even_odd(even + 4 * (at + start), odd + 4 * (at + start), row + 8 * start, stop - start, channel)
        if inside and stop < count and 0 <= 2 * (cell[2] + stop) < length[2]:  # the last cell of an odd number
            store_f32(even, at + stop, load_f32(row, 2 * stop))
        at += count


@inner
def write_transposed(kind, out, at, step, source, columns, rows, count):
    """out[at + i·step + j] = source[j, i]: what lies together is written together, not across the whole tensor."""
    square = _square()
    for i in range(0, count, VECTOR):
        cells = min(VECTOR, count - i)
        for j in range(0, rows, VECTOR):
            if kind == F32 and rows >= VECTOR:
                begin = min(j, rows - VECTOR)  # the last ones, some of them once more: whole vectors are written
                to, part = out + 4 * (at + i * step + begin), source + 4 * (begin * columns + i)
                transpose_part(to, 4 * step, part, 4 * columns, VECTOR, cells)
            else:
                some = min(VECTOR, rows - j)
                transpose_part(square, 4 * VECTOR, source + 4 * (j * columns + i), 4 * columns, some, cells)
                for cell in range(cells):
                    write_run(kind, out, at + (i + cell) * step + j, 1, square, cell * VECTOR, some)
