"""How the tiles of Winograd's convolutions are numbered, and the rows that they are made of. Compiled.

A kernel's taps along z sum slices of one volume; where there is one tap, the images of a batch are slices. A dilation
makes of an image so many interleaved ones, its phases: the rows of a slice are those of its phases along y, one phase
after the other, and in a row its phases along x lie one after the other. A volume may be cut into strips, each with all
slices and some rows of every phase, which are volumes then.
"""

from dataclasses import dataclass

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.convolution.gather.planes import image_of
from onnx_backprop.ort_ops.convolution.problem import Correlation
from onnx_backprop.ort_ops.vector.boxes import copy_line


@dataclass(frozen=True, kw_only=True)
class TileRows(Record):
    """What all plans state."""

    kind: int
    c: Correlation
    size: int  # cells of a tile along either axis
    elements: int  # products per tile
    strips: int  # of a volume
    tiles_y: int  # rows of a strip's tiles, of one phase
    tiles_x: int  # tiles of a row
    run: int  # those of one phase
    tap: int  # rows of tiles from a tap to the next
    reach: int  # rows of tiles that the last tap reads further on than the first
    lines: int = 1  # rows of tiles of the source that are made at a time
    plane: int = 0  # floats of the rows of tiles that are transformed together, of every `size`-th row


@inner
def row_count(p):
    """Rows of tiles of a volume."""
    return p.c.out_length[0] * p.c.dilations[1] * p.tiles_y


@inner
def first_cell(p, volume, row):
    """The image of a row of tiles, and the source's slice and row where its tiles start, in the first tap."""
    phases, size = p.c.dilations[1], p.size
    tile, row = row % p.tiles_y, row // p.tiles_y
    y = row % phases + phases * size * (volume % p.strips * p.tiles_y + tile)
    return volume // p.strips, row // phases - p.c.pads[0], y - p.c.pads[1]


@inner
def source_row(p, data, channel, cell, phase, row, count):
    """`count` cells of a phase of a row of the source, from its pads on; cell: image, slice and row."""
    _row(p, data, p.c.source, channel, cell, phase - p.c.pads[2], row, count, p.c.source_length)


@inner
def destination_row(p, data, channel, cell, phase, row, count):
    """The same of the destination; `cell` is that of the source in the first tap."""
    cell += (0, p.c.pads[0], p.c.pads[1])
    _row(p, data, p.c.destination, channel, cell, phase, row, count, p.c.out_length)


@inner
def _row(p, data, tensor, channel, cell, x, row, count, length):
    step, (n, z, y), (stride_z, stride_y, stride_x) = p.c.dilations[2], cell, tensor.cells
    of, strides = x % step, (stride_z, stride_y, step * stride_x)
    ends = length[0], length[1], (length[2] - of + step - 1) // step
    first = image_of(tensor, n, channel) + of * stride_x
    copy_line(p.kind, row, 0, data, first, strides, (z, y, x // step), count, ends)
