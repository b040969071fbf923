"""Convolutions by 3×3 or k×3×3 with stride 1, channels first: Winograd's F(m×m, 3×3), compiled; m = 2 or 4.

    out[n, m, y, x] = bias[m] + Σ_{c, i, j} w[m, c, i, j] · in[n, c, y + i - P, x + j - P']

takes (m+2)² products per m×m cells and channel instead of 9m². The data gradient is the same with the kernel mirrored
and pads of 2 - P. `in` is transformed into (m+2)² matrices (channels × tiles), each multiplied by one of the weights',
for some tiles of output channels, and the products transformed back while they are in the caches. Taps along z are
further terms of these products, tiles so many slices further on. `rows` says how tiles are numbered, dilated ones too,
and what a stride of 2 is: kernels of 3×3 and 4×4 become four of 2×2, F(4×4, 2×2) with 25 products.

One side is transformed for all threads, the other by the thread that needs it: the weights, and an item of work is some
rows of tiles, or, where the weights are large, the images, and an item is a tile of output channels. What does not fit
is done in rounds: some groups at a time, or one group and some of its output channels or of its rows of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, stack, store_i64
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.convolution import block_sizes
from onnx_backprop.ort_ops.convolution.bias import bias_address, bias_of
from onnx_backprop.ort_ops.convolution.gather.planes import image_of
from onnx_backprop.ort_ops.convolution.winograd.rows import (
    TileRows,
    column_floats,
    first_cell,
    odd_lines,
    row_count,
    source_row,
)
from onnx_backprop.ort_ops.runtime.stages import stage
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, WORD, workspace
from onnx_backprop.ort_ops.vector.boxes import dot, transpose_rows
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, multiply, one_segment, rows_apart
from onnx_backprop.ort_ops.vector.registers import copy_rows, fetch
from onnx_backprop.ort_ops.vector.rows import clear, scatter_run, write_run
from onnx_backprop.ort_ops.vector.winograd_transforms import transform_result, transform_source, transform_weights

WIDE = -(-ROWS // VECTOR) * VECTOR  # lanes for the channels of one tile of weights
_GAP = ROWS * COLUMNS  # floats from one of a tile's products to the next
_CHANNELS_AHEAD = 8  # whose kernels are fetched


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    """Of a thread's scratch."""

    finished: int = 0  # rows of a tile's results
    table: int = 0  # of the products
    rows: int = 0  # of the source
    transformed: int = 0  # tiles
    packed: int = 0  # weights
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
    round_tiles: int  # of output channels, where the weights are shared
    round_rows: int = 0  # of tiles, where the images are shared
    bands: int = 0  # of a volume's rows, each an item
    split: int = 1  # items that share a band's output channels
    columns: int = 0  # floats of a channel of transformed tiles
    element: int = 0  # floats of such a matrix, an odd number of lines, as a tile is written to all of them


def chunk(elements: int, tiles: int) -> int:
    """Tiles of output channels, of so many, whose products are kept at a time."""
    return max(1, min(tiles, block_sizes.PRODUCT_FLOATS // (elements * _GAP)))


def _finishing(r: TileRows) -> dict[str, int]:
    """Bytes of what results go through."""
    return {"finished": FLOAT * r.size**2 * _GAP, "table": WORD * (ROWS + 2 * r.c.kernel[0])}


def thread_scratch(r: TileRows, band: int, tiles: int) -> tuple[Offsets, int]:
    """Of a thread that computes `band` rows of tiles for so many tiles of output channels, whose weights are shared."""
    columns = column_floats((band + r.reach) * r.tiles_x)
    return workspace(
        Offsets,
        **_finishing(r),
        rows=FLOAT * 2 * r.size * r.plane_of(band),
        transformed=FLOAT * r.elements * odd_lines(r.ins * columns),
        products=FLOAT * r.elements * chunk(r.elements, tiles) * _GAP,
    )


def images_scratch(p: Winograd) -> tuple[Offsets, int]:
    """Of a thread that transforms rows of the source for all or, later, multiplies them by a tile of weights."""
    transforms, before = workspace(Offsets, rows=FLOAT * 2 * p.size * p.plane)
    packed, products = FLOAT * p.elements * p.panel, FLOAT * p.elements * _GAP
    multiplies, behind = workspace(Offsets, **_finishing(p), packed=packed, products=products)
    return replace(multiplies, rows=transforms.rows), max(before, behind)


_kernels = stack(16 * WIDE)
_bias = stack(COLUMNS)


@inner
def _pack_tile(call, p, group, tile, target):
    """The transformed weights of one tile of channels: panels, for every tap and channel of `in` ROWS of `out`."""
    kind, source, (taps, edge, _) = p.kind, call.inputs[1], p.c.kernel
    w_out, (w_z, w_y, w_x) = p.c.w_d, p.c.w_kernel
    tile, residue = _tile_of(p, tile)
    first = p.w_first + group * p.c.w_group + tile * ROWS * w_out
    count, panel, cells = min(ROWS, p.c.d - tile * ROWS), 4 * p.panel, edge * edge
    # A line of the kernel is `line` cells, as many of its cells lie together in their order as `run` says, if all do.
    step = p.source_residues * p.out_residues
    line, lies_dense = step * p.taps, kind == F32 and w_y == edge * w_x and w_x * w_x == 1
    run = cells if line == edge else edge
    kernels = _kernels()
    clear(kernels, 0, 16 * WIDE)
    for number in range(taps * p.c.s):
        c = number % p.c.s
        start = first + number // p.c.s * w_z + c * p.c.w_s
        if w_out * w_out == cells * cells:  # one kernel behind the other, but those of the next channel elsewhere
            fetch(source + 4 * (start - cells + 1 + _CHANNELS_AHEAD * p.c.w_s), 4 * (cells * (ROWS + 1) - 1))
        elif c % _CHANNELS_AHEAD == 0:
            for row in range(count):
                fetch(source + 4 * (start + row * w_out + _CHANNELS_AHEAD * p.c.w_s), 4 * cells * _CHANNELS_AHEAD)
        for lane in range(0, count if lies_dense else 0, VECTOR):
            rows = min(VECTOR, count - lane)
            for i in range(0, cells, run):
                at, some = (i // edge + p.front[1]) * line + p.front[2], start + lane * w_out + i * w_x
                if w_x > 0:
                    transpose_rows(kernels + 4 * (at * WIDE + lane), 4 * WIDE, source + 4 * some, 4 * w_out, rows, run)
                else:  # mirrored: the last cell comes first
                    last = kernels + 4 * ((at + run - 1) * WIDE + lane)
                    transpose_rows(last, -4 * WIDE, source + 4 * (some - run + 1), 4 * w_out, rows, run)
        for i in range(0 if lies_dense else cells):
            at = (i // edge + p.front[1]) * line + i % edge + p.front[2]
            scatter_run(kind, kernels, at * WIDE, 1, source, start + i // edge * w_y + i % edge * w_x, w_out, count)
        for part in range(p.ins // p.c.s):
            at = residue + part  # one of these is 0
            at = at // step * line + at % step
            place = target + 4 * ROWS * (number * p.ins // p.c.s + part)
            for lane in range(0, WIDE, VECTOR):
                # what a register holds beyond ROWS is overwritten by the next channel
                start = kernels + 4 * (at * WIDE + lane)
                transform_weights(start, 4 * step * line * WIDE, 4 * step * WIDE, place + 4 * lane, panel, p.elements)


@inner
def _tiles(p):
    """Tiles of output channels, for each of all residues."""
    return (p.c.d + ROWS - 1) // ROWS * p.out_residues * p.out_residues


@inner
def _tile_of(p, number):
    """Which tile of output channels, and of which residue of the kernel, which is mirrored if there are several."""
    residues = p.out_residues * p.out_residues
    return number // residues, number % residues


@inner
def _pack(call, p, unit, _scratch):
    """The weights of one tile, for all threads."""
    group = call.group + unit // p.round_tiles
    tile = call.part + unit % p.round_tiles
    if group < p.c.groups and tile < _tiles(p):  # the last round may have fewer
        _pack_tile(call, p, group, tile, call.shared + 4 * p.elements * unit * p.panel)


@inner
def _transform(p, data, group, begin, end, volume, first, last, rows, v):
    """Bᵀ d B of the tiles of rows first … last - 1, of the channels begin … end - 1; columns of `v` are tiles.

    Tiles follow one another, those of several rows and phases: every row of the source is appended to one of `size`
    planes, and what lies `size` cells further on, which at the end of a run is not the next tile's, to one of others.
    """
    size, further, plane, residues = p.size, p.taps - 1, 4 * p.plane, p.ins // p.c.s
    piece, edge = size * p.run, size * plane
    for c in range(begin, end):
        channel, residue = group * p.c.s + c // residues, c % residues
        at = first
        while at < last:
            cell = first_cell(p, volume, at)
            lines = min(last - at, p.tiles_y - at % p.tiles_y, p.lines)
            for i in range(size * lines + further):
                row = rows + i % size * plane + 4 * (i // size * size * p.tiles_x)
                for phase in range(p.c.dilations[2]):
                    source_row(p, data, channel, residue, cell, i, phase, row, piece + further)
                    copy_rows(row + edge, 0, row + 4 * size, 0, 1, piece + further - size)
                    row += 4 * piece
            target = v + 4 * ((c - begin) * p.columns + (at - first) * p.tiles_x)
            for x in range(0, lines * p.tiles_x, VECTOR):
                # lanes beyond these tiles are overwritten by the next ones
                source, to = rows + 4 * size * x, target + 4 * x
                transform_source(source, plane, 4 * size * p.tiles_x, edge, to, 4 * p.element, p.elements)
            at += lines


@inner
def _item(call, p, item, scratch):
    """Weights shared: some rows of tiles, and all output channels of the round or a share of them."""
    splits, groups, rows_of = p.split, p.round_groups, row_count(p)
    split, item = item % splits, item // splits
    number, item = item % groups, item // groups
    volume, item = item // p.bands, item % p.bands
    group, part = call.group + number, call.part
    if group >= p.c.groups:
        return
    first, last = item * rows_of // p.bands, (item + 1) * rows_of // p.bands
    rows, v = scratch + p.offsets.rows, scratch + p.offsets.transformed
    _transform(p, call.inputs[0], group, 0, p.ins, volume, first, last + p.reach, rows, v)
    here, panels = min(p.round_tiles, _tiles(p) - part), number * p.round_tiles - part
    begin, end = part + split * here // splits, part + (split + 1) * here // splits
    packed = call.shared + 4 * p.elements * panels * p.panel
    _outputs(call, p, group, begin, end, packed, v, volume, first, last, scratch)


@inner
def _source_item(call, p, item, scratch):
    """Images shared: one channel of the round."""
    number, c = item // p.ins, item % p.ins
    group, first = call.group + number, call.part
    if group >= p.c.groups:
        return
    last = min(first + p.round_rows, row_count(p))
    v = call.shared + 4 * (number * p.elements * p.element + c * p.columns)
    _transform(p, call.inputs[0], group, c, c + 1, 0, first, last, scratch + p.offsets.rows, v)


@inner
def _weights_item(call, p, item, scratch):
    """Images shared: one tile of output channels, over the rows of the round."""
    number, m = item // _tiles(p), item % _tiles(p)
    group, first = call.group + number, call.part
    if group >= p.c.groups:
        return
    last = min(first + p.round_rows, row_count(p))
    v = call.shared + 4 * number * p.elements * p.element
    packed = scratch + p.offsets.packed
    _pack_tile(call, p, group, m, packed)
    _outputs(call, p, group, m, m + 1, packed - 4 * m * p.elements * p.panel, v, 0, first, last, scratch)


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
            multiply(min(ROWS, p.c.d - _tile_of(p, m)[0] * ROWS), tiles, c, a, b, segments, p.ins, 0)


@inner
def _results(call, p, group, tile, block, volume, first, place, tiles, scratch):
    """Transformed back and written: the output channels of a tile."""
    outs, size, (tile, residue) = p.c.d, p.size, _tile_of(p, tile)
    residue = p.out_residues * p.out_residues - 1 - residue
    bias, values = bias_address(call, p), _bias()
    count = min(ROWS, outs - tile * ROWS)
    bias_of(p.kind, bias, group * outs + tile * ROWS, count, values)
    for i in range(count):
        for part in range(1 if tiles <= VECTOR else 2):
            at = block + 4 * (COLUMNS * i + VECTOR * part)
            target = _finished(p, scratch, i) + 4 * size * VECTOR * part
            transform_result(at, 4 * _GAP, target, 4 * size * COLUMNS, values + 4 * i, p.elements)
    _write(p, call.output, group * outs + tile * ROWS, residue, volume, first, place, tiles, count, scratch)


@inner
def _finished(p, scratch, channel):
    """The rows of a block of tiles for one output channel."""
    return scratch + p.offsets.finished + 4 * p.size * p.size * COLUMNS * channel


@inner
def _write(p, out, channel, residue, volume, first, place, tiles, count, scratch):
    """A block of tiles, row by row of the image."""
    kind, size, tiles_x, runs, destination = p.kind, p.size, p.tiles_x, p.run, p.c.destination
    (_, length_y, length_x), (_, step_y, step_x), (_, shift_y, shift_x) = p.c.out_length, p.out_step, p.shift
    residue_y, residue_x = residue // p.out_residues, residue % p.out_residues
    done = 0
    while done < tiles:
        row, x = first + (place + done) // tiles_x, (place + done) % tiles_x
        phase, x = x // runs, x % runs
        run = min(tiles - done, runs - x)
        n, z, y, cell = first_cell(p, volume, row)
        z, y = z + p.c.pads[0], y + residue_y - shift_y + step_y * cell
        x = phase + residue_x - shift_x + step_x * size * x
        before = int(x < 0)  # the cell that lies there
        width = min(size * run, (length_x - x + step_x - 1) // step_x) - before
        for i in range(count):
            line = _finished(p, scratch, i)
            for j in range(int(y < 0), min(size, (length_y - y + step_y - 1) // step_y)):
                to = z, y + j * step_y, x + before * step_x
                at = image_of(destination, n, channel + i) + dot(to, destination.cells)
                write_run(kind, out, at, step_x, line, size * (COLUMNS * j + done) + before, width)
        done += run


PACK = stage("winograd_pack", Winograd, _pack)
MULTIPLY = stage("winograd_multiply", Winograd, _item)
TRANSFORM = stage("winograd_transform_images", Winograd, _source_item)
MULTIPLY_IMAGES = stage("winograd_multiply_images", Winograd, _weights_item)
