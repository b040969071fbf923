"""Weight gradients of what `winograd.kernel` computes, compiled.

    dw[d, s] = Gᵀ · [ Σ_tiles (A dY[d] Aᵀ) ⊙ (Bᵀ x[s] B) ] · G

the adjoint of `winograd.kernel`: as many products (destination channels × tiles) · (tiles × source channels), for each
tap along z with tiles of the source so many slices further on. The tiles are cut into parts, as many as the shape says;
the products of a part are summed from band to band, and the parts are added up in order, so that threads change
nothing. An item of work is a part and some of the destination's channels.

Where such sums are large beside the images, the source is transformed for all threads instead, and an item is a tile of
the destination's channels: its sums stay with the thread, which transforms them back and writes them. What does not fit
is done in rounds: some groups at a time, or one group and some of its source's (else, destination's) channels.
"""

from dataclasses import dataclass, replace

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import stack
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.convolution.winograd import kernel
from onnx_backprop.ort_ops.convolution.winograd.kernel import TileRows
from onnx_backprop.ort_ops.runtime.stages import stage
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, workspace
from onnx_backprop.ort_ops.vector import winograd_transforms as transforms
from onnx_backprop.ort_ops.vector.boxes import dot
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, multiply, one_segment, rows_apart
from onnx_backprop.ort_ops.vector.registers import transpose_tile
from onnx_backprop.ort_ops.vector.rows import add_run, clear, write_run
from onnx_backprop.ort_ops.vector.winograd_transforms import MOST_ELEMENTS

_CELLS = 9  # of a kernel


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    """Of a thread's scratch."""

    rows: int = 0  # of either tensor that are transformed or turned together
    turned: int = 0  # the source's, as cells of channels
    source: int = 0  # its transformed tiles
    gradient: int = 0  # those of the destination
    sums: int = 0
    kernels: int = 0  # transformed back


@dataclass(frozen=True, kw_only=True)
class WinogradWeights(TileRows):
    """The numbers of a plan."""

    inputs: tuple[int, int]  # source and destination
    pitch: int = 0  # floats of a row of the source
    piece: int = 0  # those of one phase
    offsets: Offsets = Offsets()
    band: int = 0  # rows of tiles
    parts: int = 1
    split: int = 1
    s_columns: int = 0  # the source's channels of a round, in whole tiles
    s_panel: int = 0  # floats of COLUMNS of them for all tiles
    s_element: int = 0  # floats of a matrix, of odd lines, as a tile is written to all of them
    d_columns: int = 0  # floats of a channel of the destination's transformed tiles
    d_element: int = 0  # the same as of the source
    u_rows: int = 0  # the destination's channels of a round, where sums are shared
    round_groups: int = 0
    round_tiles: int = 0
    source_band: int = 1  # rows transformed at a time, where the source is shared


def _row_bytes(p: WinogradWeights) -> int:
    return FLOAT * max(VECTOR * p.pitch, p.size * p.plane)


def _turned_bytes(p: WinogradWeights) -> int:
    return FLOAT * (p.size * p.lines + 2) * p.pitch * p.s_columns


def sum_scratch(p: WinogradWeights) -> tuple[Offsets, int]:
    """Of a thread that adds up the products of a part in shared sums."""
    gradient, source = FLOAT * p.elements * p.d_element, FLOAT * p.elements * p.s_element
    return workspace(Offsets, rows=_row_bytes(p), turned=_turned_bytes(p), source=source, gradient=gradient)


def source_scratch(p: WinogradWeights) -> tuple[Offsets, int]:
    """Of a thread that transforms the source for all or, later, sums up a tile of the destination's channels."""
    transforms, before = workspace(Offsets, rows=_row_bytes(p), turned=_turned_bytes(p))
    multiplies, behind = workspace(
        Offsets, rows=_row_bytes(p), kernels=FLOAT * _CELLS * VECTOR,
        sums=FLOAT * p.elements * ROWS * p.s_columns, gradient=FLOAT * p.elements * p.d_element,
    )  # fmt: skip
    return replace(multiplies, turned=transforms.turned), max(before, behind)


_tables = stack(ROWS + 2)
_sums = stack((MOST_ELEMENTS + _CELLS) * VECTOR)


@inner
def _source_tiles(p, data, group, channel, volume, first, last, rows, turned, v):
    """Bᵀ x B of the tiles of some rows: v[e][panel][tile][channel], `s_columns` channels from `channel` on."""
    pitch, size, columns, element = p.pitch, p.size, p.s_columns, 4 * p.s_element
    channels = min(p.ins - channel, columns)
    at = first
    while at < last:
        cell = kernel.first_cell(p, volume, at)
        count = min(last - at, p.tiles_y - at % p.tiles_y, p.lines)
        for c in range(0, channels, VECTOR):
            start = channel + c
            for i in range(size * count + 2):
                for phase in range(p.c.dilations[2]):
                    for lane in range(VECTOR):
                        row = rows + 4 * (lane * pitch + phase * p.piece)
                        if start + lane < p.c.s:
                            at_channel = group * p.c.s + start + lane
                            kernel.source_row(p, data, at_channel, cell, i, phase, row, p.piece)
                        else:
                            clear(row, 0, p.piece)
                    for x in range(phase * p.piece, phase * p.piece + size * p.run + 2, VECTOR):
                        target = turned + 4 * ((i * pitch + x) * columns + c)
                        transpose_tile(target, 4 * columns, rows + 4 * x, 4 * pitch)
        for i in range(count):
            for x in range(p.tiles_x):
                place = size * i * pitch + x // p.run * p.piece + size * (x % p.run)
                source = turned + 4 * place * columns
                target = v + 4 * ((at + i - first) * p.tiles_x + x) * COLUMNS
                for c in range(0, channels, VECTOR):
                    to = target + 4 * (c // COLUMNS * p.s_panel + c % COLUMNS)
                    from_c, row = source + 4 * c, 4 * pitch * columns
                    transforms.transform_cells(from_c, row, 4 * columns, to, element, p.elements)
        at += count


@inner
def _gradient_tiles(p, data, channel, count, volume, first, last, rows, u):
    """A dY Aᵀ of the tiles of some rows, `count` channels from `channel` on: u[e][channel][tile]."""
    size, columns, element, plane, piece = p.size, p.d_columns, 4 * p.d_element, 4 * p.plane, p.size * p.run
    for i in range(count):
        for at in range(first, last):
            cell, row = kernel.first_cell(p, volume, at), rows + 4 * (at - first) * size * p.tiles_x
            for line in range(size):
                for phase in range(p.c.dilations[2]):
                    to = row + line * plane + 4 * phase * piece
                    kernel.destination_row(p, data, channel + i, cell, line, phase, to, piece)
        for x in range(0, (last - first) * p.tiles_x, VECTOR):
            # lanes beyond these tiles are overwritten by the next channel
            transforms.transform_gradient(rows + 4 * size * x, plane, u + 4 * (i * columns + x), element, p.elements)


@inner
def _item(call, p, item, scratch):
    splits, groups, parts = p.split, p.round_groups, p.parts
    split, item = item % splits, item // splits
    number, part = item % groups, item // groups
    group, tile = call.group + number, call.part
    if group >= p.c.groups:
        return
    d, columns = p.c.d, p.s_columns
    tiles = min(p.round_tiles, (d + ROWS - 1) // ROWS - tile)
    begin, end = (tile + split * tiles // splits) * ROWS, min((tile + (split + 1) * tiles // splits) * ROWS, d)
    rows_of, taps = kernel.row_count(p), p.c.kernel[0]
    every = p.c.batch * p.strips * rows_of
    first, last = part * every // parts, (part + 1) * every // parts
    tiles_x = p.tiles_x
    rows, turned = scratch + p.offsets.rows, scratch + p.offsets.turned
    v, u = scratch + p.offsets.source, scratch + p.offsets.gradient
    channels = p.ins
    d_columns, u_rows = p.d_columns, p.u_rows
    sums = call.shared + 4 * (part * groups + number) * taps * p.elements * u_rows * columns
    source, dest = call.inputs[p.inputs[0]], call.inputs[p.inputs[1]]
    table = _tables()
    rows_apart(table, 4 * p.d_columns)
    at = first
    while at < last:
        volume, row = at // rows_of, at % rows_of
        stop = min(row + p.band, rows_of, row + last - at)
        _source_tiles(p, source, group, 0, volume, row, stop + p.reach, rows, turned, v)
        _gradient_tiles(p, dest, group * d + begin, end - begin, volume, row, stop, rows, u)
        count = (stop - row) * tiles_x
        for number in range(taps * p.elements):
            tap, e = number // p.elements, number % p.elements
            for m in range(begin, end, ROWS):
                line = sums + 4 * (number * u_rows + m - tile * ROWS) * columns
                left = u + 4 * (e * p.d_element + (m - begin) * d_columns)
                right = v + 4 * (e * p.s_element + tap * p.tap * tiles_x * COLUMNS)
                _multiply(p, line, channels, left, table, min(ROWS, end - m), right, count, at != first)
        at += stop - row


@inner
def _multiply(p, sums, channels, left, table, rows, right, tiles, add):
    """sums[i][c] (+)= Σ_tiles left[i][tile] · right[tile][c] for `rows` of the destination's channels."""
    for c in range(0, channels, COLUMNS):
        c_at, a = (sums + 4 * c, 4 * p.s_columns), (left, table, 4)
        b = (right + 4 * (c // COLUMNS) * p.s_panel, 4 * COLUMNS)
        multiply(rows, channels - c, c_at, a, b, one_segment(table), tiles, add)


@inner
def _reduce(call, p, unit, _scratch):
    """Add the parts up for one destination channel, transform back, write."""
    d, groups, columns = p.c.d, p.round_groups, p.s_columns
    number, row = unit // p.u_rows, unit % p.u_rows
    group, m = call.group + number, call.part * ROWS + row
    if group >= p.c.groups or m >= d:
        return
    element, taps = p.u_rows * columns, p.c.kernel[0]
    total, out = _sums(), call.output
    lines = total + 4 * p.elements * VECTOR
    for c in range(0, p.ins, VECTOR):
        for tap in range(taps):
            clear(total, 0, p.elements * VECTOR)
            for part in range(p.parts):
                place = ((part * groups + number) * taps + tap) * p.elements * element + row * columns + c
                for e in range(p.elements):
                    add_run(1, total + 4 * e * VECTOR, call.shared, place + e * element, VECTOR)
            _write(p, out, group, m, c, tap, total, 4 * VECTOR, lines)


@inner
def _write(p, out, group, m, c, tap, source, step, lines):
    """The weights of a destination's channel and a vector of the source's from the elements, `step` bytes apart."""
    transforms.transform_kernel(source, step, lines, 4 * VECTOR, p.elements)
    start, count = (group * p.c.d + m) * p.c.w_d + c * p.c.w_s, min(VECTOR, p.c.s - c)
    for i in range(_CELLS):
        to = start + dot((tap, i // 3, i % 3), p.c.w_kernel)
        write_run(p.kind, out, to, p.c.w_s, lines, i * VECTOR, count)


@inner
def _source_item(call, p, item, scratch):
    """One band of one group of the round."""
    band, count = p.source_band, kernel.row_count(p)
    bands = (count + band - 1) // band
    number, first = item // bands, item % bands * band
    group, last = call.group + number, min(first + band, count)
    if group >= p.c.groups:
        return
    v = call.shared + 4 * (number * p.elements * p.s_element + first * p.tiles_x * COLUMNS)
    source = call.inputs[p.inputs[0]]
    rows, turned = scratch + p.offsets.rows, scratch + p.offsets.turned
    _source_tiles(p, source, group, call.part, 0, first, last, rows, turned, v)


@inner
def _tile_item(call, p, item, scratch):
    """ROWS of the destination's channels: all their weights for the source's channels of the round."""
    d, columns, c0 = p.c.d, p.s_columns, call.part
    tiles = (d + ROWS - 1) // ROWS
    number, begin = item // tiles, item % tiles * ROWS
    group, count = call.group + number, min(ROWS, d - begin)
    if group >= p.c.groups:
        return
    tiles_x, band = p.tiles_x, p.band
    dest, out = call.inputs[p.inputs[1]], call.output
    channels = min(columns, p.ins - c0)
    rows, lines = scratch + p.offsets.rows, scratch + p.offsets.kernels
    sums, u = scratch + p.offsets.sums, scratch + p.offsets.gradient
    v, table = call.shared + 4 * number * p.elements * p.s_element, _tables()
    rows_apart(table, 4 * p.d_columns)
    for at in range(0, kernel.row_count(p), band):
        stop = min(at + band, kernel.row_count(p))
        _gradient_tiles(p, dest, group * d + begin, count, 0, at, stop, rows, u)
        for e in range(p.elements):
            line, left = sums + 4 * e * ROWS * columns, u + 4 * e * p.d_element
            right = v + 4 * (e * p.s_element + at * tiles_x * COLUMNS)
            _multiply(p, line, channels, left, table, count, right, (stop - at) * tiles_x, at != 0)
    for i in range(count):
        for c in range(0, channels, VECTOR):
            _write(p, out, group, begin + i, c0 + c, 0, sums + 4 * (i * columns + c), 4 * ROWS * columns, lines)


SUM = stage("winograd_weights_sum", WinogradWeights, _item)
REDUCE = stage("winograd_weights_reduce", WinogradWeights, _reduce)
TRANSFORM = stage("winograd_weights_transform", WinogradWeights, _source_item)
MULTIPLY = stage("winograd_weights_multiply", WinogradWeights, _tile_item)
