"""Convolutions by 3×3 or k×3×3 with stride 1, channels first: Winograd's F(m×m, 3×3), compiled; m = 2 or 4.

    out[n, m, y, x] = bias[m] + Σ_{c, i, j} w[m, c, i, j] · in[n, c, y + i - P, x + j - P']

takes (m+2)² products per m×m cells and channel instead of 9m². The data gradient is the same with the kernel mirrored
and pads of 2 - P. `in` is transformed into (m+2)² matrices (channels × tiles), each multiplied by one of the weights',
for some tiles of output channels, and the products transformed back while they are in the caches.

A kernel's taps along z sum slices of one volume; where there is one tap, the images of a batch are slices. A dilation
makes of an image so many interleaved ones, its phases: the rows of a slice are those of its phases along y, one phase
after the other, and in a row its phases along x lie one after the other. A volume may be cut into strips, each with all
slices and some rows of every phase, which are volumes then.

The weights are transformed for all threads, the source by the thread that needs it; an item of work is some rows of
tiles. What does not fit is done in rounds: some groups at a time, or one group and some of its output channels.
"""

import math
from dataclasses import dataclass

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, stack, store_i64
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.convolution import block_sizes
from onnx_backprop.ort_ops.convolution.bias import bias_address, bias_of
from onnx_backprop.ort_ops.convolution.gather.planes import image_of
from onnx_backprop.ort_ops.convolution.problem import Correlation
from onnx_backprop.ort_ops.runtime.stages import stage
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, WORD, workspace
from onnx_backprop.ort_ops.vector import winograd_transforms as transforms
from onnx_backprop.ort_ops.vector.boxes import copy_line, dot, transpose_rows
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, multiply, one_segment, rows_apart
from onnx_backprop.ort_ops.vector.registers import copy_rows, fetch
from onnx_backprop.ort_ops.vector.rows import clear, scatter_run, write_run

WIDE = -(-ROWS // VECTOR) * VECTOR  # lanes for the channels of one tile of weights
_GAP = ROWS * COLUMNS  # floats from one of a tile's products to the next
_CHANNELS_AHEAD = 8  # whose kernels are fetched
_EDGE, _CELLS = 3, 9  # of a kernel


@dataclass(frozen=True, kw_only=True)
class TileRows(Record):
    """What all plans state."""

    kind: int
    c: Correlation
    size: int  # cells of a tile along either axis
    elements: int  # products per tile
    ins: int  # channels of the source
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


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    """Of a thread's scratch."""

    finished: int = 0  # rows of a tile's results
    table: int = 0  # of the products
    rows: int = 0  # of the source
    transformed: int = 0  # tiles
    products: int = 0


@dataclass(frozen=True, kw_only=True)
class Winograd(TileRows):
    """The numbers of a plan; `c` is the adjoint of a data gradient's.

    Data and weights are inputs 0 and 1; the kernel's first cell lies at `w_first`.
    """

    bias: int  # an input, 0: none
    w_first: int
    offsets: Offsets = Offsets()
    chunk: int = 1  # tiles of output channels whose products are kept at a time
    panel: int  # floats of one of the panels of a tile of weights, one for every element
    round_groups: int
    round_tiles: int  # of output channels
    bands: int = 0  # of a volume's rows, each an item
    split: int = 1  # items that share a band's output channels
    columns: int = 0  # floats of a channel of transformed tiles
    element: int = 0  # floats of such a matrix, an odd number of lines, as a tile is written to all of them


def chunk(elements: int, tiles: int) -> int:
    """Tiles of output channels, of so many, whose products are kept at a time."""
    return max(1, min(tiles, block_sizes.PRODUCT_FLOATS // (elements * _GAP)))


def thread_scratch(r: TileRows, band: int, tiles: int) -> tuple[Offsets, int]:
    """Of a thread that computes `band` rows of tiles for so many tiles of output channels."""
    columns = column_floats((band + r.reach) * r.tiles_x)
    return workspace(
        Offsets, finished=FLOAT * r.size**2 * _GAP, table=WORD * (ROWS + 2 * r.c.kernel[0]),
        rows=FLOAT * 2 * r.size * r.plane_of(band),
        transformed=FLOAT * r.elements * odd_lines(r.ins * columns),
        products=FLOAT * r.elements * chunk(r.elements, tiles) * _GAP,
    )  # fmt: skip


_kernels = stack(_CELLS * WIDE)
_bias = stack(COLUMNS)


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
def source_row(p, data, channel, first, i, phase, row, count):
    """`count` cells, from its pads on, of a phase of the row that lies i cells behind the first one of tiles."""
    n, z, y, cell = first
    place = n, z, y + p.c.dilations[1] * (cell + i) - p.c.pads[1]
    _row(p, data, p.c.source, place, channel, phase - p.c.pads[2], row, count, p.c.source_length)


@inner
def destination_row(p, data, channel, first, i, phase, row, count):
    """The same of the destination."""
    n, z, y, cell = first
    place = n, z + p.c.pads[0], y + p.c.dilations[1] * (cell + i)
    _row(p, data, p.c.destination, place, channel, phase, row, count, p.c.out_length)


@inner
def _row(p, data, tensor, place, channel, x, row, count, length):
    (n, z, y), (stride_z, stride_y, stride_x), step = place, tensor.cells, p.c.dilations[2]
    of = x % step
    ends = length[0], length[1], (length[2] - of + step - 1) // step
    first = image_of(tensor, n, channel) + of * stride_x
    copy_line(p.kind, row, 0, data, first, (stride_z, stride_y, step * stride_x), (z, y, x // step), count, ends)


@inner
def _pack(call, p, unit, _scratch):
    """The transformed weights of one tile of channels: panels, for every tap and channel of `in` ROWS of `out`."""
    group, tile = call.group + unit // p.round_tiles, call.part + unit % p.round_tiles
    if group >= p.c.groups or tile * ROWS >= p.c.d:  # the last round may have fewer
        return
    target, kind, source = call.shared + 4 * p.elements * unit * p.panel, p.kind, call.inputs[1]
    w_out, (w_z, w_y, w_x) = p.c.w_d, p.c.w_kernel
    first = p.w_first + group * p.c.w_group + tile * ROWS * w_out
    count, panel = min(ROWS, p.c.d - tile * ROWS), 4 * p.panel
    lies_dense, kernels = kind == F32 and w_y == _EDGE * w_x and w_x * w_x == 1, _kernels()
    clear(kernels, 0, _CELLS * WIDE)
    for number in range(p.c.kernel[0] * p.c.s):
        c = number % p.c.s
        start = first + number // p.c.s * w_z + c * p.c.w_s
        if w_out == _CELLS:  # one kernel behind the other, but those of the next channel elsewhere
            fetch(source + 4 * (start - _CELLS + 1 + _CHANNELS_AHEAD * p.c.w_s), 4 * (_CELLS * (ROWS + 1) - 1))
        elif c % _CHANNELS_AHEAD == 0:
            for row in range(count):
                fetch(source + 4 * (start + row * w_out + _CHANNELS_AHEAD * p.c.w_s), 4 * _CELLS * _CHANNELS_AHEAD)
        for lane in range(0, count if lies_dense else 0, VECTOR):
            # mirrored, the last cell comes first
            to, step, at = (0, 4 * WIDE, 0) if w_x > 0 else (4 * (_CELLS - 1) * WIDE, -4 * WIDE, 1 - _CELLS)
            of_lane = source + 4 * (start + lane * w_out + at)
            transpose_rows(kernels + to + 4 * lane, step, of_lane, 4 * w_out, min(VECTOR, count - lane), _CELLS)
        for i in range(0 if lies_dense else _CELLS):
            cell = start + i // _EDGE * w_y + i % _EDGE * w_x
            scatter_run(kind, kernels, i * WIDE, 1, source, cell, w_out, count)
        for lane in range(0, WIDE, VECTOR):
            # what a register holds beyond ROWS is overwritten by the next channel
            place = target + 4 * (ROWS * number + lane)
            transforms.transform_weights(kernels + 4 * lane, 4 * _EDGE * WIDE, 4 * WIDE, place, panel, p.elements)


@inner
def _transform(p, data, group, volume, first, last, rows, v):
    """Bᵀ d B of the tiles of rows first … last - 1; columns of `v` are tiles.

    Tiles follow one another, those of several rows and phases: every row of the source is appended to one of `size`
    planes, and what lies `size` cells further on, which at the end of a run is not the next tile's, to one of others.
    """
    size, plane, further = p.size, 4 * p.plane, _EDGE - 1
    piece, edge = size * p.run, size * plane
    for c in range(p.c.s):
        at = first
        while at < last:
            cell = first_cell(p, volume, at)
            lines = min(last - at, p.tiles_y - at % p.tiles_y, p.lines)
            for i in range(size * lines + further):
                row = rows + i % size * plane + 4 * (i // size * size * p.tiles_x)
                for phase in range(p.c.dilations[2]):
                    source_row(p, data, group * p.c.s + c, cell, i, phase, row, piece + further)
                    copy_rows(row + edge, 0, row + 4 * size, 0, 1, piece + further - size)
                    row += 4 * piece
            target = v + 4 * (c * p.columns + (at - first) * p.tiles_x)
            for x in range(0, lines * p.tiles_x, VECTOR):
                # lanes beyond these tiles are overwritten by the next ones
                source, to = rows + 4 * size * x, target + 4 * x
                transforms.transform_source(source, plane, 4 * size * p.tiles_x, edge, to, 4 * p.element, p.elements)
            at += lines


@inner
def _item(call, p, item, scratch):
    """Some rows of tiles, and all output channels of the round or a share of them."""
    splits, groups, rows_of = p.split, p.round_groups, row_count(p)
    split, item = item % splits, item // splits
    number, item = item % groups, item // groups
    volume, item = item // p.bands, item % p.bands
    group, part = call.group + number, call.part
    if group >= p.c.groups:
        return
    first, last = item * rows_of // p.bands, (item + 1) * rows_of // p.bands
    rows, v = scratch + p.offsets.rows, scratch + p.offsets.transformed
    _transform(p, call.inputs[0], group, volume, first, last + p.reach, rows, v)
    here, panels = min(p.round_tiles, (p.c.d + ROWS - 1) // ROWS - part), number * p.round_tiles - part
    begin, end = part + split * here // splits, part + (split + 1) * here // splits
    packed = call.shared + 4 * p.elements * panels * p.panel
    _outputs(call, p, group, begin, end, packed, v, volume, first, last, scratch)


@inner
def _outputs(call, p, group, begin, end, packed, v, volume, first, last, scratch):
    """Tiles begin … end - 1 of output channels at the tiles of rows first … last - 1: products, then results.

    What is multiplied by all weights stays in the first-level cache meanwhile. packed: the panels of tile 0.
    """
    count_all, at_once, kept = (last - first) * p.tiles_x, p.chunk, scratch + p.offsets.products
    for place in range(0, count_all, COLUMNS):
        for m in range(begin, end, at_once):
            stop = min(m + at_once, end)
            _products(p, m, stop, packed, v, kept, place, count_all - place, scratch)
            for tile in range(m, stop):
                block = kept + 4 * (tile - m) * p.elements * _GAP
                tiles = min(COLUMNS, count_all - place)
                _results(call, p, group, tile, block, volume, first, place, tiles, scratch)


@inner
def _products(p, begin, end, packed, v, kept, place, tiles, scratch):
    """Those of tiles begin … end - 1 of output channels for at most COLUMNS tiles of the image."""
    taps, table, panel = p.c.kernel[0], scratch + p.offsets.table, 4 * p.panel
    rows_apart(table, 4)
    segments = one_segment(table)[0], taps
    for tap in range(taps):
        store_i64(segments[0], 2 * tap, 4 * tap * p.ins * ROWS)
        store_i64(segments[0], 2 * tap + 1, 4 * tap * p.tap * p.tiles_x)
    for e in range(p.elements):
        b = (v + 4 * (e * p.element + place), 4 * p.columns)
        for m in range(begin, end):
            c = kept + 4 * ((m - begin) * p.elements + e) * _GAP, 4 * COLUMNS
            a = (packed + (m * p.elements + e) * panel, table, 4 * ROWS)
            multiply(min(ROWS, p.c.d - m * ROWS), tiles, c, a, b, segments, p.ins, 0)


@inner
def _results(call, p, group, tile, block, volume, first, place, tiles, scratch):
    """Transformed back and written: the output channels of a tile."""
    outs, size = p.c.d, p.size
    bias, values = bias_address(call, p), _bias()
    count = min(ROWS, outs - tile * ROWS)
    bias_of(p.kind, bias, group * outs + tile * ROWS, count, values)
    for i in range(count):
        for part in range(1 if tiles <= VECTOR else 2):
            at = block + 4 * (COLUMNS * i + VECTOR * part)
            target = _finished(p, scratch, i) + 4 * size * VECTOR * part
            transforms.transform_result(at, 4 * _GAP, target, 4 * size * COLUMNS, values + 4 * i, p.elements)
    _write(p, call.output, group * outs + tile * ROWS, volume, first, place, tiles, count, scratch)


@inner
def _finished(p, scratch, channel):
    """The rows of a block of tiles for one output channel."""
    return scratch + p.offsets.finished + 4 * p.size * p.size * COLUMNS * channel


@inner
def _write(p, out, channel, volume, first, place, tiles, count, scratch):
    """A block of tiles, row by row of the image."""
    size, destination, (_, dilation_y, dilation_x) = p.size, p.c.destination, p.c.dilations
    (_, length_y, length_x), done = p.c.out_length, 0
    while done < tiles:
        row, x = first + (place + done) // p.tiles_x, (place + done) % p.tiles_x
        phase, x = x // p.run, x % p.run
        run = min(tiles - done, p.run - x)
        n, z, y, cell = first_cell(p, volume, row)
        z, y, x = z + p.c.pads[0], y + dilation_y * cell, phase + dilation_x * size * x
        width = min(size * run, (length_x - x + dilation_x - 1) // dilation_x)
        for i in range(count):
            line = _finished(p, scratch, i)
            for j in range(min(size, (length_y - y + dilation_y - 1) // dilation_y)):
                at = image_of(destination, n, channel + i) + dot((z, y + j * dilation_y, x), destination.cells)
                write_run(p.kind, out, at, dilation_x, line, size * (COLUMNS * j + done), width)
        done += run


PACK = stage("winograd_pack", Winograd, _pack)
MULTIPLY = stage("winograd_multiply", Winograd, _item)
