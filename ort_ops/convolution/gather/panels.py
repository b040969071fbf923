"""Bands of a gather whose taps all read the cell itself: kernels of one cell, or as long as their stride. Compiled.

The product has cells as columns, as in `gather.planes`, but no tap shifts them. So the copy of a band holds, for each
tile of cells, what its sum reads in the order in which it is read: no tile touches a page for every channel.
"""

from __future__ import annotations

from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather.planes import SEGMENTS_AT, tiles_of_band
from onnx_backprop.ort_ops.runtime.call import CALL_INPUTS
from onnx_backprop.ort_ops.runtime.compile import inner
from onnx_backprop.ort_ops.runtime.llvm import F32, load_i64, store_i64
from onnx_backprop.ort_ops.vector.boxes import copy_row, load3
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS
from onnx_backprop.ort_ops.vector.registers import copy_rows, split_pairs
from onnx_backprop.ort_ops.vector.rows import clear


@inner
def _copy(p, data, first, low, size, band, row):
    """[z][panel][residue][channel][COLUMNS cells], zeros behind the last cell; `row` holds two planes of a channel."""
    kind, channels, pitch = load_i64(p, par.KIND), load_i64(p, par.INS), load_i64(p, par.PITCH)
    step, stride, length = load3(p, par.STEP_3), load3(p, par.IN_3), load3(p, par.LENGTH_3)
    residues, cells = load_i64(p, par.RESIDUES), size[1] * size[2]
    count = (cells + COLUMNS - 1) // COLUMNS
    second = row + 4 * count * COLUMNS
    clear(row, cells, count * COLUMNS - cells)
    clear(second, cells, count * COLUMNS - cells)
    inside = low[2] >= 0 and 2 * (low[2] + size[2]) <= length[2]
    pairs = kind == F32 and stride[2] == 1 and step[2] == 2 and inside
    for c in range(channels):
        for z in range(size[0]):
            n = 0
            while n < residues:  # innermost: those along x read the same lines, even and odd cells together
                residue = load3(p, load_i64(p, par.RESIDUE_TABLE) + par.RESIDUE_WORDS * n)
                pair = pairs and _odd_follows(p, n)
                end = (length[2] - residue[2] + step[2] - 1) // step[2]
                cell_z = (low[0] + z) * step[0] + residue[0]
                for y in range(size[1]):
                    cell_y, at = (low[1] + y) * step[1] + residue[1], y * size[2]
                    start = first + c * load_i64(p, par.IN_C) + cell_z * stride[0] + cell_y * stride[1]
                    if not (0 <= cell_z < length[0] and 0 <= cell_y < length[1]):
                        clear(row, at, size[2])
                        clear(second, at, size[2])
                    elif pair:
                        source = data + 4 * (start + 2 * low[2])
                        split_pairs(row + 4 * at, second + 4 * at, source, size[2], 4 * load_i64(p, par.IN_C))
                    else:
                        start += residue[2] * stride[2]
                        copy_row(kind, row, at, data, start, step[2] * stride[2], low[2], size[2], end)
                to = band + 4 * (z * count * pitch + (n * channels + c) * COLUMNS)
                copy_rows(to, 4 * pitch, row, 4 * COLUMNS, count, COLUMNS)
                if pair:
                    copy_rows(to + 4 * channels * COLUMNS, 4 * pitch, second, 4 * COLUMNS, count, COLUMNS)
                n += 2 if pair else 1


@inner
def _odd_follows(p, n):
    """Whether residue n has the even cells of its rows, and the next one their odd ones."""
    if n + 1 == load_i64(p, par.RESIDUES):
        return False
    table = load_i64(p, par.RESIDUE_TABLE) + par.RESIDUE_WORDS * n
    return load_i64(p, table + 2) == 0 and load_i64(p, table + par.RESIDUE_WORDS + 2) == 1


@inner
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


@inner
def gather_panels(call, p, packed, panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of one band; the packed weights of tile m are panel `panels` + m."""
    low, pitch, table = load3(p, par.LOW_3), load_i64(p, par.PITCH), scratch + SEGMENTS_AT
    count = (size[1] * size[2] + COLUMNS - 1) // COLUMNS
    row = (table + 16 * load_i64(p, par.ALL_TAPS) + 63) & -64
    band = row + 8 * count * COLUMNS
    data = load_i64(call, CALL_INPUTS + load_i64(p, par.DATA))
    first = n * load_i64(p, par.IN_N) + group * load_i64(p, par.INS) * load_i64(p, par.IN_C)
    _copy(p, data, first, (cell[0] + low[0], cell[1] + low[1], cell[2] + low[2]), size, band, row)
    _shifts(p, table)
    copy = (band, size[2], 4 * pitch * count, 4 * pitch, 4 * COLUMNS, 0)
    tiles_of_band(call, p, packed, panels, n, group, cell, size, begin, end, scratch, copy)
