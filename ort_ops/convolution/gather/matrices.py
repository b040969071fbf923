"""Bands of a gather in registers of whole matrices, compiled.

As in `gather.planes`, a tap shifts a band's cells as one long row. The copy of a band is split into parts
(`vector.matrix_tiles`) once, and read for every tap and output channel: of a group of channels [cell][part][channel],
so that a tile is 16 cells from any one on. Channels fill up whole groups with zeros. Data and results, NCX, are turned.

Where all taps read the cell itself, cells are the columns of the product, and nothing is turned or copied: what a tile
of cells reads is split from where it lies, while the tile before is multiplied. Pairs are two channels or, where the
step along x is 2, two cells; a group of DEPTH steps is so many channels of a tap, or half as many of two.
"""

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import F32, stack
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import block_sizes
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import bias_address, bias_of
from onnx_backprop.ort_ops.convolution.gather import planes
from onnx_backprop.ort_ops.convolution.gather.planes import image_of, out_at, tap_of
from onnx_backprop.ort_ops.vector import matrix_tiles as amx
from onnx_backprop.ort_ops.vector.boxes import copy_line, copy_pairs, dot, volume
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS
from onnx_backprop.ort_ops.vector.matrix_parts import AHEAD, CELL, clear_cells, split_turned
from onnx_backprop.ort_ops.vector.matrix_tiles import DEPTH, GROUP, SIDE
from onnx_backprop.ort_ops.vector.registers import copy_every, transpose_tile
from onnx_backprop.ort_ops.vector.rows import add_to_rows, clear

_TILE, _LINE, _ROWS = 1024, 64, 16
_values = stack(SIDE)


@inner
def _beside(p, size):
    """The lengths of planes whose rows hold those of several images."""
    return (size[0] + p.beside - 1) // p.beside, size[1], size[2] * p.beside


@inner
def _copy_planes(p, data, first, channels, target, of, low, size, lines, both):
    """DEPTH channels at most of the cells of a residue; `first` is their first element. Of the next one too if `both`.

    both: how many bytes further on. Rows are turned together, as one row.
    """
    tensor, length, step, pitch = p.c.source, p.c.source_length, p.step, size[2]
    stride, line, odd = tensor.cells, p.line, lines + 4 * DEPTH * p.line
    ends = length[0], length[1], (length[2] - of[2] + step[2] - 1) // step[2]
    strides, tile = (stride[0], stride[1], step[2] * stride[2]), odd + 4 * DEPTH * line
    in_place, apart, first_target = p.kind == F32 and strides[2] == 1, p.beside * CELL, target
    at_once = 1 if in_place else max(1, line // pitch)
    start = min(max(0, -low[2]), pitch)
    stop = max(start, min(pitch, ends[2] - low[2]))
    for z in range(_beside(p, size)[0] * p.beside):
        cell_z = (low[0] + z) * step[0] + of[0]
        target = first_target + z // p.beside * size[1] * pitch * apart + z % p.beside * CELL
        for y in range(0, size[1], at_once):
            rows, cell = min(at_once, size[1] - y), (cell_z, (low[1] + y) * step[1] + of[1], low[2])
            if in_place:
                begin, end = start, stop
                if not (0 <= cell_z < length[0] and 0 <= cell[1] < length[1]):
                    begin, end = pitch, pitch
                clear_cells(target, apart, begin)
                source = data + 4 * (first + dot(cell, strides) + begin)
                split_turned(target + begin * apart, apart, source, 4 * tensor.c, channels, end - begin, tile)
                clear_cells(target + end * apart, apart, pitch - end)
            else:
                for i in range(channels):
                    image = data + 4 * (first + i * tensor.c), 16 * tensor.c, stride, length
                    if both:
                        copy_pairs(image, cell, step[1], rows, pitch, lines + 4 * i * line, odd + 4 * i * line)
                    else:
                        for n in range(rows):
                            place = cell_z, cell[1] + n * step[1], low[2]
                            at = first + i * tensor.c + of[2] * stride[2]
                            copy_line(p.kind, lines, i * line + n * pitch, data, at, strides, place, pitch, ends)
                if both:
                    split_turned(target + both, CELL, odd, 4 * line, channels, rows * pitch, tile)
                split_turned(target, CELL, lines, 4 * line, channels, rows * pitch, tile)
            target += rows * pitch * apart


@inner
def _copy(p, data, first, target, low, size, plane, lines):
    """For every residue and group of channels the cells of a band, and zeros."""
    groups, n, cells = (p.c.s + DEPTH - 1) // DEPTH, 0, volume(_beside(p, size))
    residue = groups * plane * CELL
    while n < p.residues:
        of, count = view(par.Residue, p + p.residue_table, n).of, planes.paired(p, n)
        for group in range(groups):
            to, channels = target + group * plane * CELL, min(p.c.s - group * DEPTH, DEPTH)
            at = first + group * DEPTH * p.c.source.c
            _copy_planes(p, data, at, channels, to, of, low, size, lines, residue * (count - 1))
            for i in range(count):
                clear(to + i * residue, cells * CELL // 4, (plane - cells) * CELL // 4)
        target += count * residue
        n += count


@inner
def _fits(lines, columns):
    """Whether a tile has so many channels and cells."""
    return lines * columns == SIDE * COLUMNS


@inner
def _multiply(p, _phase, _lines, _columns, c, panel, source, segments, apart, scratch):
    """A tile of a product: the sum of MATRIX_STEPS steps, and then of others; tall ones have 64 cells.

    apart: cells of a plane, bytes from the first 16 cells to the next ones.
    """
    plane, half = apart
    (table, count), sums = segments, scratch + p.offsets.tile + 8 * SIDE * COLUMNS
    more = sums + 4 * SIDE * COLUMNS
    groups, most = (p.c.s + DEPTH - 1) // DEPTH, block_sizes.MATRIX_STEPS // DEPTH
    taps = max(1, most // groups)
    for tap in range(0, count, taps):
        for group in range(0, groups, most):
            again = tap + group > 0
            at = more if again else sums
            segments, number = (table + 16 * tap, min(taps, count - tap)), min(most, groups - group)
            left = source + group * plane * CELL, CELL, half, _LINE, plane * CELL
            right = panel + group * GROUP, _LINE, _TILE, 2 * _TILE, GROUP
            if p.columns > COLUMNS:
                amx.sum_tall_segments(at, _LINE, *segments, number, *left, *right)
            else:
                amx.sum_segments(at, 4 * COLUMNS, *segments, number, *left, *right)
            if again:
                amx.add_sums(sums, 4 * COLUMNS, more, SIDE, COLUMNS, 1)
    for i in range(4 * (p.columns > COLUMNS)):
        transpose_tile(c[0] + _LINE * i, c[1], sums + _TILE * i, _LINE)
    if p.columns == COLUMNS:
        for i in range(2):
            for j in range(2):
                part, turned = _ROWS * (i * 4 * COLUMNS + 4 * j), _ROWS * (j * c[1] + 4 * i)
                transpose_tile(c[0] + turned, c[1], sums + part, 4 * COLUMNS)


@inner
def gather_matrices(call, p, packed, panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of one band; the packed weights of tile m are panel `panels` + m."""
    read, band = planes.box_of(p, cell, size), scratch + p.offsets.copy
    box = _beside(p, read)
    pitch, plane, first = box[2], planes.plane_of(p, box), planes.image_of(p.c.source, n, group * p.c.s)
    amx.take_tiles(scratch + p.offsets.configuration)
    _copy(p, call.inputs[0], first, band, cell + p.low, read, plane, scratch + p.offsets.lines)
    groups, words = (p.c.s + DEPTH - 1) // DEPTH, CELL // 4
    stride = box[1] * pitch * words, pitch * words, p.beside * words
    planes.tap_starts(p, scratch + p.offsets.segments, 0, groups * GROUP // 4, groups * plane * words, stride)
    copy = (band, pitch, CELL * box[1] * pitch, CELL, (plane, _ROWS * CELL))
    of_band = packed, panels, (n, group, cell, size), (begin, end)
    if p.beside > 1:
        _tiles_beside(call, p, of_band, scratch, copy, groups * GROUP)
    else:
        planes.tiles_of_band(call, p, of_band, scratch, copy, SIDE, groups * GROUP // 4, _fits, _multiply)
    amx.leave_tiles()


@inner
def _tiles_beside(call, p, of_band, scratch, copy, panel):
    """Tiles of two rows of as many images as lie beside one another, or of a band's only row."""
    (packed, panels, (n, group, cell, size), (begin, end)), beside, tile = of_band, p.beside, scratch + p.offsets.tile
    phase, (band, pitch, from_plane, _, (plane, _)) = view(par.PhaseRecord, p + p.phase_table), copy
    values, bias, channel, row, rows = _values(), bias_address(call, p), p.c.destination.c, 4 * COLUMNS, min(2, size[1])
    (at, step), of_taps = out_at(p, phase, n, group, cell), (scratch + p.offsets.segments, phase.taps)
    for m in range(begin, end):
        lines, weights = min(SIDE, p.c.d - m * SIDE), packed + (panels + m) * phase.taps * panel
        if bias:
            bias_of(F32, bias, group * p.c.d + m * SIDE, lines, values)
        for z in range(0, size[0], beside):
            for two in range(0, size[1], 2):
                y = min(two, size[1] - rows)
                source, apart = band + z // beside * from_plane + y * pitch * CELL, (plane, pitch * CELL)
                _multiply(p, phase, lines, COLUMNS, (tile, row), weights, source, of_taps, apart, scratch)
                if bias:
                    add_to_rows(tile, row, values, lines, COLUMNS)
                for image in range(min(beside, size[0] - z)):
                    for i in range(rows):
                        to, cells = at + m * SIDE * channel + dot((z + image, y + i, 0), step), i * _ROWS + image
                        copy_every(beside, call.output + 4 * to, 4 * channel, tile + 4 * cells, row, lines, size[2])


@inner
def _place(p, first, cell, size, n):
    """(element of the source, of the output) of a tile of a band: the last one of a row may begin earlier."""
    tiles = (size[2] + SIDE - 1) // SIDE
    row = n // tiles
    at = row // size[1], row % size[1], max(min(n % tiles * SIDE, size[2] - SIDE), 0)
    return first[0] + dot((cell + at) * p.step, p.c.source.cells), first[1] + dot(at, first[2])


@inner
def _tap_at(p, tap):
    """How many bytes behind its cell's first one a tap reads."""
    entry = tap_of(p, view(par.PhaseRecord, p + p.phase_table), tap)
    return 4 * dot(view(par.Residue, p + p.residue_table, entry.residue).of, p.c.source.cells)


@inner
def _split(p, data, cells, target, taps):
    """A tile of all taps and channels."""
    wide, channel = p.step[2], 4 * p.c.source.c
    for tap in range(0, taps, wide):
        source = data + _tap_at(p, tap)
        for c in range(0, p.c.s, DEPTH // wide):
            channels = min(DEPTH // wide, p.c.s - c)
            for half in range(SIDE // _ROWS):
                to, at, left = target + _TILE * half, source + channel * c + _LINE * wide * half, cells - _ROWS * half
                if wide > 1:
                    amx.split_rows(to, _LINE, 2 * _TILE, at, channel, channels, 2 * left, AHEAD)
                else:
                    amx.split_pairs(to, _LINE, 2 * _TILE, at, channel, channels, left, AHEAD)
            target += GROUP


@inner
def gather_columns(call, p, packed, panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of output channels of one band; the packed weights of tile m are panel `panels` + m."""
    phase, data, wide, channel = view(par.PhaseRecord, p + p.phase_table), call.inputs[0], p.step[2], 4 * p.c.source.c
    taps, depth, sums = phase.taps, DEPTH // wide, scratch + p.offsets.tile
    groups = (p.c.s + depth - 1) // depth
    block, together, c_row = taps // wide * groups * GROUP, p.together, 4 * p.c.destination.c
    here, following = scratch + p.offsets.copy, scratch + p.offsets.copy + together * block
    at, step = out_at(p, phase, n, group, cell)
    first = image_of(p.c.source, n, group * p.c.s), at, step
    tiles, cells = size[0] * size[1] * ((size[2] + SIDE - 1) // SIDE), min(size[2], SIDE)
    most, fused = block_sizes.MATRIX_STEPS // DEPTH, cells == SIDE and p.c.s % depth == 0
    # bytes from row to row of units, and to a unit's second vector
    row, second = (channel, _LINE) if wide > 1 else (2 * channel, channel)
    bias, values = bias_address(call, p), _values()
    amx.take_tiles(scratch + p.offsets.configuration)
    for start in range(begin, end, p.at_once):
        stop = min(start + p.at_once, end)
        shares = min(stop - start, amx.MOST_SHARES)
        for i in range(min(together, tiles)):
            source, _ = _place(p, first, cell, size, i)
            _split(p, data + 4 * source, cells, here + i * block, taps)
        for tile in range(0, tiles, together):
            for m in range(start, stop):
                share, rows, left = m - start, min(SIDE, p.c.d - m * SIDE), packed + (panels + m) * block
                if bias:
                    bias_of(F32, bias, group * p.c.d + m * SIDE, rows, values)
                for i in range(min(together, tiles - tile)):
                    _, target = _place(p, first, cell, size, tile + i)
                    out, count, add, kind = call.output + 4 * target + m * SIDE * c_row, 0, 0, 0
                    source, _ = _place(p, first, cell, size, min(tile + i + together, tiles - 1))
                    later, _ = _place(p, first, cell, size, min(tile + i + together + 1, tiles - 1))
                    if fused and share < shares and tile + i + together < tiles:
                        kind = 2 * shares + 2 - wide
                    skipped, split = row * (_ROWS // shares) * share, _LINE * (_ROWS // shares) * share
                    for tap in range(0, taps, wide):
                        behind = _tap_at(p, tap) + skipped
                        for some in range(0, groups, most):
                            number, place = min(most, groups - some), (tap // wide * groups + some) * GROUP
                            last = place + number * GROUP == block
                            ended = last or count + number + min(most, groups) > most
                            to, to_row = sums if ended else 0, 4 * SIDE
                            if last and add == 0 and rows == SIDE and cells == SIDE:
                                to, to_row = out, c_row
                            from_channel = data + behind + some * depth * channel
                            amx.multiply_columns(
                                kind, to, to_row, left + place, here + i * block + place, number,
                                following + i * block + place + split, 4 * source + from_channel,
                                row, second, depth * channel, 4 * later + from_channel, count,
                            )  # fmt: skip
                            count += number
                            if to == sums:
                                amx.add_sums(out, c_row, sums, rows, cells, add)
                                count, add = 0, 1
                    if bias:
                        add_to_rows(out, c_row, values, rows, cells)
            for i in range(min(together, tiles - tile - together) * (1 - fused)):
                source, _ = _place(p, first, cell, size, tile + together + i)
                _split(p, data + 4 * source, cells, following + i * block, taps)
            here, following = following, here
    amx.leave_tiles()
