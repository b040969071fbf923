"""Copies of boxes of an image in float32, with zeros where the box leaves the image. Compiled."""

from __future__ import annotations

from numba import njit

from .conv_parameters import IN_3, IN_C, INS, KIND, LENGTH_3, RESIDUE_TABLE, RESIDUE_WORDS, RESIDUES, STEP_3
from .native_llvm import load_i64
from .native_rows import clear, read_run


@njit
def copy_row(kind, target, to, source, first, step, low, count, end):
    """target[to + i] = source[first + (low + i)·step] for i < count, 0 where low + i is not in [0, end)."""
    start, stop = min(max(0, -low), count), max(min(count, end - low), 0)
    stop = max(start, stop)
    clear(target, to, start)
    read_run(kind, target, to + start, source, first + (low + start) * step, step, stop - start)
    clear(target, to + stop, count - stop)


@njit
def copy_planes(p, phase, source, first, target, low, size, plane):
    """NCX: for every residue and channel a plane of rows x, y, z; `first` is the image's first element.

    low, size: three first cells and lengths, in steps; a plane's cells are contiguous and end in zeros.
    """
    kind = load_i64(p, KIND)
    sz, sy, sx = load_i64(p, STEP_3), load_i64(p, STEP_3 + 1), load_i64(p, STEP_3 + 2)
    iz, iy, ix = load_i64(p, IN_3), load_i64(p, IN_3 + 1), load_i64(p, IN_3 + 2)
    length_z, length_y, length_x = load_i64(p, LENGTH_3), load_i64(p, LENGTH_3 + 1), load_i64(p, LENGTH_3 + 2)
    to, pitch = 0, size[2]
    for residue in range(load_i64(phase, RESIDUES)):
        table = p + 8 * (load_i64(phase, RESIDUE_TABLE) + RESIDUE_WORDS * residue)
        rz, ry, rx = load_i64(table, 0), load_i64(table, 1), load_i64(table, 2)
        end = (length_x - rx + sx - 1) // sx
        for c in range(load_i64(p, INS)):
            channel, at = first + c * load_i64(p, IN_C), to
            for z in range(size[0]):
                cell_z = (low[0] + z) * sz + rz
                for y in range(size[1]):
                    cell_y = (low[1] + y) * sy + ry
                    if 0 <= cell_z < length_z and 0 <= cell_y < length_y:
                        row = channel + cell_z * iz + cell_y * iy + rx * ix
                        copy_row(kind, target, at, source, row, sx * ix, low[2], pitch, end)
                    else:
                        clear(target, at, pitch)
                    at += pitch
            clear(target, at, to + plane - at)
            to += plane


@njit
def copy_cells(p, source, first, target, low, size):
    """NXC: the cells of a box, each with its channels together; low, size in cells of the image."""
    kind, channels = load_i64(p, KIND), load_i64(p, INS)
    iz, iy, ix = load_i64(p, IN_3), load_i64(p, IN_3 + 1), load_i64(p, IN_3 + 2)
    length_z, length_y, length_x = load_i64(p, LENGTH_3), load_i64(p, LENGTH_3 + 1), load_i64(p, LENGTH_3 + 2)
    at, row = 0, size[2] * channels
    for z in range(size[0]):
        cell_z = low[0] + z
        for y in range(size[1]):
            cell_y = low[1] + y
            if 0 <= cell_z < length_z and 0 <= cell_y < length_y:
                start = first + cell_z * iz + cell_y * iy
                if ix == channels:
                    copy_row(kind, target, at, source, start, 1, low[2] * channels, row, length_x * channels)
                else:
                    _copy_groups(kind, target, at, source, start, ix, low[2], size[2], length_x, channels)
            else:
                clear(target, at, row)
            at += row


@njit
def _copy_groups(kind, target, at, source, start, step, low, count, length, channels):
    for x in range(count):
        cell = low + x
        if 0 <= cell < length:
            read_run(kind, target, at, source, start + cell * step, 1, channels)
        else:
            clear(target, at, channels)
        at += channels
