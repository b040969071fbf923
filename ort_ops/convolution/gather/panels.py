"""Bands of a gather whose taps all read the cell itself: kernels of one cell, or as long as their stride. Compiled.

The product has cells as columns, as in `gather.planes`, but no tap shifts them. So the copy of a band holds, for each
tile of cells, what its sum reads in the order in which it is read: no tile touches a page for every channel.
"""

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather.planes import image_of, tap_starts, tiles_of_band
from onnx_backprop.ort_ops.vector.boxes import copy_row
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS
from onnx_backprop.ort_ops.vector.registers import copy_rows, split_pairs
from onnx_backprop.ort_ops.vector.rows import clear


@inner
def _copy(p, data, first, low, size, band, row):
    """[z][panel][residue][channel][COLUMNS cells], zeros behind the last cell; `row` holds two planes of a channel."""
    kind, channels, pitch = p.kind, p.c.s, p.pitch
    step, stride, length = p.step, p.c.source.cells, p.c.source_length
    residues, cells = p.residues, size[1] * size[2]
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
                residue = view(par.Residue, p + p.residue_table, n).of
                pair = pairs and _odd_follows(p, n)
                end = (length[2] - residue[2] + step[2] - 1) // step[2]
                cell_z = (low[0] + z) * step[0] + residue[0]
                for y in range(size[1]):
                    cell_y, at = (low[1] + y) * step[1] + residue[1], y * size[2]
                    start = first + c * p.c.source.c + cell_z * stride[0] + cell_y * stride[1]
                    if not (0 <= cell_z < length[0] and 0 <= cell_y < length[1]):
                        clear(row, at, size[2])
                        clear(second, at, size[2])
                    elif pair:
                        source = data + 4 * (start + 2 * low[2])
                        split_pairs(row + 4 * at, second + 4 * at, source, size[2], 4 * p.c.source.c)
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
    if n + 1 == p.residues:
        return False
    residues = p + p.residue_table
    return view(par.Residue, residues, n).of[2] == 0 and view(par.Residue, residues, n + 1).of[2] == 1


@inner
def gather_panels(call, p, packed, panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of one band; the packed weights of tile m are panel `panels` + m."""
    pitch, band, row = p.pitch, scratch + p.offsets.copy, scratch + p.offsets.row
    count = (size[1] * size[2] + COLUMNS - 1) // COLUMNS
    _copy(p, call.inputs[0], image_of(p.c.source, n, group * p.c.s), cell + p.low, size, band, row)
    tap_starts(p, scratch + p.offsets.segments, 1, ROWS, p.c.s * COLUMNS, (0, 0, 0))
    copy = (band, size[2], 4 * pitch * count, 4 * pitch, 4 * COLUMNS)
    tiles_of_band(call, p, packed, panels, n, group, cell, size, begin, end, scratch, copy)
