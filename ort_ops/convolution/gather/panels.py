"""Bands of a gather whose taps all read the cell itself: kernels of one cell, or as long as their stride. Compiled.

The product has cells as columns, as in `gather.planes`, but no tap shifts them. So the copy of a band holds, for each
tile of cells, what its sum reads in the order in which it is read: no tile touches a page for every channel.
"""

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.convolution.gather.planes import copy_residues, image_of, tap_starts, tiles_of_planes
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS
from onnx_backprop.ort_ops.vector.registers import copy_rows
from onnx_backprop.ort_ops.vector.rows import clear


@inner
def _copy(p, data, first, low, size, band, row):
    """[z][panel][residue][channel][COLUMNS cells], zeros behind the last cell; `row` holds two planes of a channel."""
    channels, pitch = p.c.s, p.pitch
    residues, cells = p.residues, size[1] * size[2]
    count = (cells + COLUMNS - 1) // COLUMNS
    second = row + 4 * count * COLUMNS
    clear(row, cells, count * COLUMNS - cells)
    clear(second, cells, count * COLUMNS - cells)
    for c in range(channels):
        for z in range(size[0]):
            n, corner = 0, (low[0] + z, low[1], low[2])
            while n < residues:  # innermost: those along x read the same lines, even and odd cells together
                planes = copy_residues(p, data, first + c * p.c.source.c, row, second, n, corner, (1, size[1], size[2]))
                for i in range(planes):
                    to = band + 4 * (z * count * pitch + ((n + i) * channels + c) * COLUMNS)
                    copy_rows(to, 4 * pitch, second if i else row, 4 * COLUMNS, count, COLUMNS)
                n += planes


@inner
def gather_panels(call, p, packed, panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of one band; the packed weights of tile m are panel `panels` + m."""
    pitch, band, row = p.pitch, scratch + p.offsets.copy, scratch + p.offsets.row
    count = (size[1] * size[2] + COLUMNS - 1) // COLUMNS
    _copy(p, call.inputs[0], image_of(p.c.source, n, group * p.c.s), cell + p.low, size, band, row)
    tap_starts(p, scratch + p.offsets.segments, 1, p.c.s * ROWS, p.c.s * COLUMNS, (0, 0, 0))
    copy = (band, size[2], 4 * pitch * count, 0, 4 * COLUMNS)
    tiles_of_planes(call, p, packed, panels, n, group, cell, size, begin, end, scratch, copy)
