"""How the tiles of Winograd's convolutions are numbered, and the rows that they are made of. Compiled.

A kernel's taps along z sum slices of one volume; where there is one tap, the images of a batch are slices. A dilation
makes of an image so many interleaved ones, its phases: the rows of a slice are those of its phases along y, one phase
after the other, and in a row its phases along x lie one after the other. A volume may be cut into strips, each with all
slices and some rows of every phase, which are volumes then.

A stride of 2 makes of an image four, its residues, each with every other of the kernel's taps. What is read of all of
them is summed: they are further channels. What is written is apart: further output channels.
"""

import math
from dataclasses import dataclass

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.records import Record, Triple
from onnx_backprop.ort_ops.convolution.gather.planes import image_of
from onnx_backprop.ort_ops.convolution.problem import Correlation
from onnx_backprop.ort_ops.vector.boxes import copy_line
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS


@dataclass(frozen=True, kw_only=True)
class TileRows(Record):
    """What all plans state."""

    kind: int
    c: Correlation
    size: int  # cells of a tile along either axis
    taps: int  # of a tile's kernel along either axis
    elements: int  # products per tile
    front: Triple  # zeros in front of a kernel, so that every residue has so many taps
    source_step: Triple  # from cell to cell of a tile
    out_step: Triple
    source_residues: int  # along either axis
    out_residues: int
    shift: Triple  # how many cells the first tile begins before the destination
    ins: int  # channels of the source, of all its residues
    strips: int  # of a volume
    tiles_y: int  # rows of a strip's tiles, of one phase
    tiles_x: int  # tiles of a row
    run: int  # those of one phase
    tap: int  # rows of tiles from a tap to the next
    reach: int  # rows of tiles that the last tap reads further on than the first
    lines: int = 1  # rows of tiles of the source that are made at a time
    plane: int = 0  # floats of the rows of tiles that are transformed together, of every `size`-th row

    @property
    def rows(self) -> int:
        """Rows of tiles of a volume."""
        return self.c.out_length[0] * self.c.dilations[1] * self.tiles_y

    def lines_of(self, band: int) -> int:
        """Rows of tiles of the source that a band of so many makes at a time."""
        return min(band + self.reach, self.tiles_y)

    def plane_of(self, band: int) -> int:
        """The plane of such a band."""
        return plane_floats(self.size, (self.lines_of(band) + 1) * self.tiles_x)


def plane_floats(size: int, tiles: int) -> int:
    """Of a plane of so many tiles, and of the cells that a register reads behind them."""
    return odd_lines(size * (tiles + VECTOR) + 2)


def column_floats(tiles: int) -> int:
    """Of a channel of so many transformed tiles, which are written in whole vectors."""
    return odd_lines(math.ceil(tiles / COLUMNS) * COLUMNS + VECTOR)


def odd_lines(floats: int) -> int:
    """As many floats or more, an odd number of cache lines, so that rows do not compete for one place in the cache."""
    lines = math.ceil(floats / 16)
    return 16 * (lines + 1 - lines % 2)


@inner
def row_count(p):
    """Rows of tiles of a volume."""
    return p.c.out_length[0] * p.c.dilations[1] * p.tiles_y


@inner
def first_cell(p, volume, row):
    """Of a row of tiles: the image, the source's slice in the first tap, the phase, and the cell in it."""
    phases, tile, row = p.c.dilations[1], row % p.tiles_y, row // p.tiles_y
    cell = p.size * (volume % p.strips * p.tiles_y + tile)
    return volume // p.strips, row // phases - p.c.pads[0], row % phases, cell


@inner
def source_row(p, data, channel, residue, first, i, phase, row, count):
    """`count` cells, from its pads on, of a phase of the row that lies i cells behind the first one of tiles."""
    (n, z, y, cell), residues = first, p.source_residues
    y += residue // residues + p.source_step[1] * (cell + i) - p.c.pads[1]
    x, step = phase + residue % residues - p.c.pads[2], p.source_step[2]
    _row(p, data, p.c.source, (n, z, y), channel, x, step, row, count, p.c.source_length)


@inner
def destination_row(p, data, channel, first, i, phase, row, count):
    """The same of a destination that has no residues."""
    n, z, y, cell = first
    place = n, z + p.c.pads[0], y + p.out_step[1] * (cell + i)
    _row(p, data, p.c.destination, place, channel, phase, p.out_step[2], row, count, p.c.out_length)


@inner
def _row(p, data, tensor, place, channel, x, step, row, count, length):
    (n, z, y), (stride_z, stride_y, stride_x) = place, tensor.cells
    of, strides = x % step, (stride_z, stride_y, step * stride_x)
    ends = length[0], length[1], (length[2] - of + step - 1) // step
    first = image_of(tensor, n, channel) + of * stride_x
    copy_line(p.kind, row, 0, data, first, strides, (z, y, x // step), count, ends)
