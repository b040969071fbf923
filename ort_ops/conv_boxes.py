"""Copies of boxes of an image in float32, zeros where a box leaves the image: as planes, as cells, or turned. Compiled.

An image is an address and the element index of its first cell, with a stride per channel and per axis; `low` and
`size` are three first cells and lengths of the box, `length` the lengths of the image.
"""

from __future__ import annotations

from numba import njit

from .conv_cells import copy_row
from .native_llvm import F32
from .native_micro import transpose_tile
from .native_rows import clear, read_run, scatter_run
from .native_source import VECTOR


@njit
def copy_box_planes(kind, target, plane, source, first, channels, channel, stride, low, size, length):
    """[channel][z][y][x], `plane` elements from channel to channel."""
    for c in range(channels):
        at = c * plane
        for z in range(size[0]):
            for y in range(size[1]):
                cell_z, cell_y = low[0] + z, low[1] + y
                if 0 <= cell_z < length[0] and 0 <= cell_y < length[1]:
                    row = first + c * channel + cell_z * stride[0] + cell_y * stride[1]
                    copy_row(kind, target, at, source, row, stride[2], low[2], size[2], length[2])
                else:
                    clear(target, at, size[2])
                at += size[2]


@njit
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


@njit
def turn_box(kind, target, columns, source, first, channels, channel, stride, low, size, length):
    """[z][y][x][channel] of channels that lie apart; as `copy_box_cells` otherwise."""
    at = 0
    for z in range(size[0]):
        for y in range(size[1]):
            cell_z, cell_y = low[0] + z, low[1] + y
            if 0 <= cell_z < length[0] and 0 <= cell_y < length[1]:
                start, stop = min(max(0, -low[2]), size[2]), max(min(size[2], length[2] - low[2]), 0)
                stop = max(start, stop)
                row = first + cell_z * stride[0] + cell_y * stride[1] + (low[2] + start) * stride[2]
                clear(target, at, start * columns)
                turn_row(
                    kind, target, at + start * columns, columns, source, row, channels, channel, stride[2], stop - start
                )
                clear(target, at + stop * columns, (size[2] - stop) * columns)
            else:
                clear(target, at, size[2] * columns)
            at += size[2] * columns


@njit
def turn_row(kind, target, to, columns, source, first, channels, channel, step, count):
    """target[to + i·columns + c] = source[first + c·channel + i·step], 0 for the columns from `channels` on."""
    c = 0
    if kind == F32 and step == 1:
        whole = count // VECTOR * VECTOR
        while c + VECTOR <= channels:
            for i in range(0, whole, VECTOR):
                transpose_tile(
                    target + 4 * (to + i * columns + c),
                    4 * columns,
                    source + 4 * (first + c * channel + i),
                    4 * channel,
                )
            for lane in range(c, c + VECTOR):
                begin = first + lane * channel + whole
                scatter_run(kind, target, to + whole * columns + lane, columns, source, begin, 1, count - whole)
            c += VECTOR
    for lane in range(c, channels):
        scatter_run(kind, target, to + lane, columns, source, first + lane * channel, step, count)
    if columns > channels:
        for i in range(count):
            clear(target, to + i * columns + channels, columns - channels)
