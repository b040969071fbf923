"""Bands of a gather whose taps all read the cell itself: kernels of one cell, or as long as their stride. Compiled.

The product has cells as columns, as in `conv_planes`, but no tap shifts them. So the copy of a band holds, for each
tile of cells, what its sum reads in the order in which it is read: no tile touches a page for every channel.
"""

from __future__ import annotations

from numba import njit

from . import conv_parameters as par
from .conv_boxes import copy_row, load3
from .conv_planes import SEGMENTS_AT, tiles_of_band
from .native_call import CALL_INPUTS
from .native_llvm import load_i64, store_i64
from .native_micro import COLUMNS, ROWS
from .native_rows import clear
from .native_vectors import copy_rows


@njit
def _copy(p, data, first, low, size, band, row):
    """[z][panel][residue][channel][COLUMNS cells], zeros behind the last cell; `row` holds a plane of one channel."""
    kind, channels, pitch = load_i64(p, par.KIND), load_i64(p, par.INS), load_i64(p, par.PITCH)
    step, stride, length = load3(p, par.STEP_3), load3(p, par.IN_3), load3(p, par.LENGTH_3)
    cells = size[1] * size[2]
    count = (cells + COLUMNS - 1) // COLUMNS
    clear(row, cells, count * COLUMNS - cells)
    for c in range(channels):
        for z in range(size[0]):
            for n in range(load_i64(p, par.RESIDUES)):  # innermost: those along x read the same lines
                residue = load3(p, load_i64(p, par.RESIDUE_TABLE) + par.RESIDUE_WORDS * n)
                end = (length[2] - residue[2] + step[2] - 1) // step[2]
                cell_z = (low[0] + z) * step[0] + residue[0]
                for y in range(size[1]):
                    cell_y = (low[1] + y) * step[1] + residue[1]
                    if 0 <= cell_z < length[0] and 0 <= cell_y < length[1]:
                        start = first + c * load_i64(p, par.IN_C) + cell_z * stride[0] + cell_y * stride[1]
                        start += residue[2] * stride[2]
                        copy_row(kind, row, y * size[2], data, start, step[2] * stride[2], low[2], size[2], end)
                    else:
                        clear(row, y * size[2], size[2])
                to = band + 4 * (z * count * pitch + (n * channels + c) * COLUMNS)
                copy_rows(to, 4 * pitch, row, 4 * COLUMNS, count, COLUMNS)


@njit
def _shifts(p, table):
    """Where each tap of each phase starts in the packed weights and in a panel, in bytes."""
    channels = load_i64(p, par.INS)
    for n in range(load_i64(p, par.PHASES)):
        phase = p + 8 * (load_i64(p, par.PHASE_TABLE) + par.PHASE_WORDS * n)
        taps, entries = load_i64(phase, par.TAPS), load_i64(phase, par.TAP_TABLE)
        for tap in range(taps):
            residue = load_i64(p, entries + par.TAP_WORDS * tap + par.TAP_RESIDUE)
            store_i64(table, 0, 4 * tap * channels * ROWS)
            store_i64(table, 1, 4 * residue * channels * COLUMNS)
            table += 16


@njit
def gather_panels(call, p, packed, panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of one band; the packed weights of tile m are panel `panels` + m."""
    low, pitch, table = load3(p, par.LOW_3), load_i64(p, par.PITCH), scratch + SEGMENTS_AT
    count = (size[1] * size[2] + COLUMNS - 1) // COLUMNS
    row = (table + 16 * load_i64(p, par.ALL_TAPS) + 63) & -64
    band = row + 4 * count * COLUMNS
    data = load_i64(call, CALL_INPUTS + load_i64(p, par.DATA))
    first = n * load_i64(p, par.IN_N) + group * load_i64(p, par.INS) * load_i64(p, par.IN_C)
    _copy(p, data, first, (cell[0] + low[0], cell[1] + low[1], cell[2] + low[2]), size, band, row)
    _shifts(p, table)
    copy = (band, size[2], 4 * pitch * count, 4 * pitch, 4 * COLUMNS, 0)
    tiles_of_band(call, p, packed, panels, n, group, cell, size, begin, end, scratch, copy)
