"""Bands of a gather whose product has cells as columns: tiles of output channels by cells. NCX data. Compiled.

The copy of a band holds planes of one pitch, so that all its cells are one long row that a tap shifts. With a stride
there is a plane for every residue of the cells modulo the stride, so that its cells lie side by side.
"""
# pyright: reportIndexIssue=false
# max of two tuples is a tuple here, and to pyright an int

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, load_f32, stack, store_f32, store_i64
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import bias_address, bias_of
from onnx_backprop.ort_ops.vector.boxes import copy_line, copy_pairs, dense, dot, volume
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, TILE_ROWS, multiply, rows_apart
from onnx_backprop.ort_ops.vector.matrix_tiles import SIDE
from onnx_backprop.ort_ops.vector.registers import MOST_STEP, copy_every, copy_rows, merge_rows
from onnx_backprop.ort_ops.vector.rows import add_to_rows, clear, write_phase

_values = stack(COLUMNS)
_SUMS = max(ROWS, SIDE) * COLUMNS  # floats of a tile


@inner
def phase_size(phase, cell, size):
    """How many cells of a band a phase has along each axis; the last one may miss one."""
    return min(size, phase.count - cell)


@inner
def image_of(tensor, n, channel):
    """The element index of the first cell of a channel."""
    return n * tensor.n + channel * tensor.c


@inner
def tap_of(p, phase, n):
    """A tap of a phase."""
    return view(par.TapRecord, p + phase.tap_table, n)


@inner
def kernel_tap(p, n):
    """A tap of a weight gradient."""
    return view(par.TapRecord, p + par.TAPS_AT, n)


@inner
def out_at(p, phase, n, group, cell):
    """Element index in the output of a phase's first cell in a band, and the distance of its cells along each axis."""
    out, step = p.c.destination, p.out_step
    first = phase.start + cell * step
    return image_of(out, n, group * p.c.d) + dot(first, out.cells), step * out.cells


@inner
def copy_planes(p, source, first, target, low, size, plane):
    """For every residue and channel a plane of rows x, y, z; `first` is the image's first element.

    low, size: three first cells and lengths, in steps; a plane's cells are contiguous and end in zeros.
    """
    n, cells, residue = 0, volume(size), 4 * p.c.s * plane
    while n < p.residues:
        planes, of = paired(p, n), view(par.Residue, p + p.residue_table, n).of
        for c in range(p.c.s):
            at, to = first + c * p.c.source.c, target + 4 * (n * p.c.s + c) * plane
            if planes > 1:
                image = source + 4 * at, 16 * p.c.source.c, p.c.source.cells, p.c.source_length
                for z in range(size[0]):
                    row, cell = to + 4 * z * size[1] * size[2], (low[0] + z, low[1], 0) * p.step + of
                    copy_pairs(image, (cell[0], cell[1], low[2]), p.step[1], size[1], size[2], row, row + residue)
            else:
                copy_plane(p, source, at, to, of, low, size)
            for i in range(planes):
                clear(to + i * residue, cells, plane - cells)
        n += planes


@inner
def paired(p, n):
    """How many residues from the n-th on are read at once: two, of even and odd cells along x, or one."""
    if p.kind == F32 and p.c.source.cells[2] == 1 and p.step[2] == 2 and n + 1 < p.residues:
        of, following = (view(par.Residue, p + p.residue_table, n).of, view(par.Residue, p + p.residue_table, n + 1).of)
        if of[0] == following[0] and of[1] == following[1] and of[2] < following[2]:
            return 2
    return 1


@inner
def copy_plane(p, source, first, target, of, low, size):
    """The plane of a channel, whose first cell is element `first`, of one residue."""
    step, stride = p.step, p.c.source.cells
    ends, apart = (p.c.source_length - of + step - 1) // step, step[2] * stride[2]
    begin = min(max(low * -1, 0), size)
    box, first, row = max(min(ends - low, size), begin) - begin, first + dot(of, stride), size[2]
    low_z, low_y, low_x = low + begin
    if p.kind == F32 and apart <= MOST_STEP:
        if volume(box) < volume(size):
            clear(target, 0, volume(size))
        for z in range(box[0]):
            at = target + 4 * dot((begin[0] + z, begin[1], begin[2]), dense(size, 1))
            cells = source + 4 * (first + dot((low_z + z, low_y, low_x) * step, stride))
            copy_every(apart, at, 4 * row, cells, 4 * step[1] * stride[1], box[1], box[2])
        return
    for n in range(size[0] * size[1]):
        cell = low[0] + n // size[1], low[1] + n % size[1], low[2]
        copy_line(p.kind, target, n * row, source, first, step * stride, cell, row, ends)


@inner
def box_of(p, cell, size):
    """The lengths of the planes that a band reads.

    Rows have the shortest pitch: zeros behind one serve as zeros before the next one.
    """
    box, start, end = size + p.high - p.low, cell[2] + p.low[2], (p.c.source_length[2] + p.step[2] - 1) // p.step[2]
    return box[0], box[1], max(size[2], box[2] - max(0, -start), min(box[2], end - start))


@inner
def tap_starts(p, table, weights_first, panel, residue, stride):
    """Where each tap of each phase starts in the packed weights and in the copy, in bytes: pairs in that order or not.

    panel: floats of a tap's weights. residue: floats from one residue's cells to the next one's.
    """
    for n in range(p.phases):
        phase = view(par.PhaseRecord, p + p.phase_table, n)
        for tap in range(0, phase.taps, phase.run):
            entry = tap_of(p, phase, tap)
            store_i64(table, 1 - weights_first, 4 * tap * panel)
            store_i64(table, weights_first, 4 * (entry.residue * residue + dot(entry.shift - p.low, stride)))
            table += 16


@inner
def plane_of(p, box):
    """Floats of a plane, with what tiles read behind its cells: an odd number of cache lines."""
    plane = (volume(box) + p.high[2] - p.low[2] + p.columns + 15) // 16
    return 16 * (plane + 1 - plane % 2)


@inner
def gather_planes(call, p, packed, panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of one band; the packed weights of tile m are panel `panels` + m."""
    box, band, rows = box_of(p, cell, size), scratch + p.offsets.copy, scratch + p.offsets.rows
    pitch, plane = box[2], plane_of(p, box)
    copy_planes(p, call.inputs[0], image_of(p.c.source, n, group * p.c.s), band, cell + p.low, box, plane)
    tap_starts(p, scratch + p.offsets.segments, 1, p.c.s * p.tile, p.c.s * plane, (box[1] * pitch, pitch, 1))
    rows_apart(rows, 4)
    copy = band, pitch, 4 * box[1] * pitch, 4, 4 * plane
    of_band = packed, panels, (n, group, cell, size), (begin, end)
    tiles_of_band(call, p, of_band, scratch, copy, p.tile, p.c.s * p.tile, _fits, _multiply)


@inner
def _fits(lines, _columns):
    """Whether a tile has so many rows and columns."""
    return TILE_ROWS[lines] == lines


@inner
def _multiply(p, phase, lines, columns, c, panel, source, segments, from_channel, scratch):
    """A tile of a product, in fused multiply-adds."""
    steps, from_step = phase.run * p.c.s, from_channel
    if phase.run > 1:
        from_step = 4 * phase.run_step
    a, b = (panel, scratch + p.offsets.rows, 4 * p.tile), (source, from_step)
    multiply(lines, columns, c, a, b, segments, steps, 0)


@inner
def tiles_of_band(call, p, band, scratch, copy, width, panel, fits, product):
    """Some tiles of output channels by all cells of a band.

    band: the packed weights, which of their panels the first tile's is, the band, the tiles [begin, end). copy: what a
    band reads: its address, cells from row to row, bytes from plane to plane, from cell to cell, and what `product` is
    to know. width: rows of a tile; panel: floats of the weights of a tap; fits: whether a tile has so many rows and
    columns.
    """
    packed, panels, (n, group, cell, size), (begin, end) = band
    outs, values, bias, together = p.c.d, _values(), bias_address(call, p), 1
    if p.kind == F32 and p.phases > 1 and p.out_step[2] == 2 and p.c.destination.cells[2] == 1:
        together += _phase(p, 1).start[2]
    for m in range(begin, end):
        lines, segments = min(width, outs - m * width), scratch + p.offsets.segments
        if bias:
            bias_of(p.kind, bias, group * outs + m * width, lines, values)
        for number in range(0, p.phases, together):
            at, _ = out_at(p, _phase(p, number), n, group, cell)
            reads = number, together, segments, packed, (panels + m) * panel
            target = at + m * width * p.c.destination.c
            _tiles(call, p, target, (cell, size), lines, reads, copy, values if bias else 0, scratch, fits, product)
            for i in range(together):
                phase = _phase(p, number + i)
                segments += 16 * (phase.taps // phase.run)


@inner
def _phase(p, number):
    return view(par.PhaseRecord, p + p.phase_table, number)


@inner
def _tiles(call, p, target, cells_of_band, lines, reads, copy, values, scratch, fits, product):
    """Some output channels of a phase, or of two whose cells are neighbours along x: `target` is their first element.

    values: their biases or 0.
    """
    out, tile, (cell, size) = call.output, scratch + p.offsets.tile, cells_of_band
    number, together, table, packed, panels = reads
    band, row, from_plane, from_cell, from_channel = copy
    step, extent = p.out_step * p.c.destination.cells, phase_size(_phase(p, number), cell, size)
    second = phase_size(_phase(p, number + together - 1), cell, size)[2]
    whole = p.kind == F32 and step[2] == 1 and _phase(p, number).taps * p.c.s > 0
    cells = (extent[1] - 1) * row + extent[2]
    if extent[2] == row and step[1] == row * step[2]:  # rows that lie one behind the other are one
        extent, row, second = (extent[0], min(extent[1], 1), cells), cells, cells
    along, of_row, as_one = (extent[2] + p.columns - 1) // p.columns, extent[2], (cells + p.columns - 1) // p.columns
    tiles = extent[1] * along
    if tiles > as_one:  # fewer of all rows, and gaps, as a single one
        along, tiles, of_row = as_one, as_one, cells
    for z in range(extent[0] * (extent[1] > 0)):
        for t in range(tiles):
            done = t % along * p.columns
            place = t // along * row + done
            columns = min(p.columns, (of_row - done + VECTOR - 1) // VECTOR * VECTOR)
            y, x, segments = place // row, place % row, table
            c, c_row, source = tile, 4 * p.columns, band + z * from_plane + place * from_cell
            if whole and fits(lines, columns) and x + columns <= extent[2]:
                c, c_row = out + 4 * (target + dot((z, y, x), step)), 4 * p.c.destination.c
            for i in range(together):
                phase, to = _phase(p, number + i), c + 4 * i * _SUMS
                taps = phase.taps // phase.run
                if taps * p.c.s > 0:
                    panel = packed + 4 * (phase.pack_at + panels * phase.taps)
                    places = segments, taps
                    product(p, phase, lines, columns, (to, c_row), panel, source, places, from_channel, scratch)
                else:
                    clear(to, 0, _SUMS)
                if values:
                    add_to_rows(to, c_row, values, lines, columns)
                segments += 16 * taps
            if c == tile:
                at = target + z * step[0]
                _write_columns(p, out, at, step, tile, lines, y, x, columns, extent, row, together, second)


@inner
def _write_columns(p, out, target, step, tile, count, y, x, columns, size, pitch, together, second):
    """A tile, without the cells between image rows; or two, the other one's image rows of `second` cells."""
    done, channel = 0, p.c.destination.c
    while done < columns and y < size[1]:
        if x < size[2]:
            run = min(size[2] - x, columns - done)
            at = target + y * step[1] + x * step[2]
            if together > 1:
                pairs, odd = max(min(second - x, run), 0), tile + 4 * _SUMS
                merge_rows(out + 4 * at, 4 * channel, tile + 4 * done, odd + 4 * done, 4 * p.columns, count, pairs)
                for i in range(count * (run - pairs)):  # one row may have a cell more
                    store_f32(out, at + i * channel + 2 * pairs, load_f32(tile, i * p.columns + done + pairs))
            elif p.kind == F32 and step[2] == 1:
                copy_rows(out + 4 * at, 4 * channel, tile + 4 * done, 4 * p.columns, count, run)
            else:
                for i in range(count):  # the phases between its cells are the same thread's
                    write_phase(p.kind, out, at + i * channel, step[2], tile, i * p.columns + done, run)
        done, x, y = done + pitch - x, 0, y + 1
