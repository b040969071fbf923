"""Bands of a gather whose product has cells as columns: tiles of output channels by cells. NCX data. Compiled.

The copy of a band holds planes of one pitch, so that all its cells are one long row that a tap shifts. With a stride
there is a plane for every residue of the cells modulo the stride, so that its cells lie side by side.
"""

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, stack, store_i64
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import add_to_rows, bias_address, bias_of
from onnx_backprop.ort_ops.vector.boxes import copy_line, dot, volume
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, TILE_ROWS, multiply
from onnx_backprop.ort_ops.vector.registers import copy_rows
from onnx_backprop.ort_ops.vector.rows import clear, write_phase, write_run

_values = stack(COLUMNS)


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
    (step_z, step_y, step_x), (stride_z, stride_y, stride_x) = p.step, p.c.source.cells
    length, to, pitch = p.c.source_length, 0, size[2]
    for n in range(p.residues):
        residue = view(par.Residue, p + p.residue_table, n).of
        end = (length[2] - residue[2] + step_x - 1) // step_x
        for c in range(p.c.s):
            channel, at = first + c * p.c.source.c + residue[2] * stride_x, to
            for z in range(size[0]):
                for y in range(size[1]):
                    cell = ((low[0] + z) * step_z + residue[0], (low[1] + y) * step_y + residue[1], low[2])
                    stride, ends = (stride_z, stride_y, step_x * stride_x), (length[0], length[1], end)
                    copy_line(p.kind, target, at, source, channel, stride, cell, pitch, ends)
                    at += pitch
            clear(target, at, to + plane - at)
            to += plane


@inner
def box_of(p, cell, size):
    """The lengths of the planes that a band reads.

    Rows have the shortest pitch: zeros behind one serve as zeros before the next one.
    """
    box, start, end = size + p.high - p.low, cell[2] + p.low[2], (p.c.source_length[2] + p.step[2] - 1) // p.step[2]
    return box[0], box[1], max(size[2], box[2] - max(0, -start), min(box[2], end - start))


@inner
def tap_starts(p, table, weights_first, width, residue, stride):
    """Where each tap of each phase starts in the packed weights and in the copy, in bytes: pairs in that order or not.

    width: channels of a panel of weights. residue: floats from one residue's cells to the next one's.
    """
    for n in range(p.phases):
        phase = view(par.PhaseRecord, p + p.phase_table, n)
        for tap in range(0, phase.taps, phase.run):
            entry = tap_of(p, phase, tap)
            store_i64(table, 1 - weights_first, 4 * tap * p.c.s * width)
            store_i64(table, weights_first, 4 * (entry.residue * residue + dot(entry.shift - p.low, stride)))
            table += 16


@inner
def gather_planes(call, p, packed, panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of one band; the packed weights of tile m are panel `panels` + m."""
    box, band = box_of(p, cell, size), scratch + p.offsets.copy
    pitch = box[2]
    plane = volume(box) + p.high[2] - p.low[2] + COLUMNS
    plane = (plane + 15) // 16 * 16
    plane += 16 * (1 - plane // 16 % 2)  # an odd number of cache lines
    copy_planes(p, call.inputs[0], image_of(p.c.source, n, group * p.c.s), band, cell + p.low, box, plane)
    tap_starts(p, scratch + p.offsets.segments, 1, ROWS, p.c.s * plane, (box[1] * pitch, pitch, 1))
    copy = (band, pitch, 4 * box[1] * pitch, 4 * COLUMNS, 4 * plane)
    tiles_of_band(call, p, packed, panels, n, group, cell, size, begin, end, scratch, copy)


@inner
def tiles_of_band(call, p, packed, panels, n, group, cell, size, begin, end, scratch, copy):
    """The tiles [begin, end) of output channels by all cells of a band; the weights of tile m are panel `panels` + m.

    copy: what a band reads: its address, cells from row to row, bytes from plane to plane, from tile to tile and from
    channel to channel.
    """
    kind, channels, outs = p.kind, p.c.s, p.c.d
    band, row, from_plane, from_tile, from_channel = copy
    tile, rows = scratch + p.offsets.tile, scratch + p.offsets.rows
    values, bias = _values(), bias_address(call, p)
    for i in range(ROWS):
        store_i64(rows, i, 4 * i)
    for m in range(begin, end):
        lines, segments = min(ROWS, outs - m * ROWS), scratch + p.offsets.segments
        if bias:
            bias_of(kind, bias, group * outs + m * ROWS, lines, values)
        for number in range(p.phases):
            phase = view(par.PhaseRecord, p + p.phase_table, number)
            taps, extent = phase.taps, phase_size(phase, cell, size)
            at, step = out_at(p, phase, n, group, cell)
            panel = packed + 4 * (phase.pack_at + (panels + m) * taps * channels * ROWS)
            target = at + m * ROWS * p.c.destination.c
            run, from_step = phase.run, from_channel
            if run > 1:
                from_step = 4 * phase.run_step
            product = (panel, rows, taps // run, segments, run * channels)
            reads = (band, row, from_plane, from_tile, from_step)
            _tiles(call, p, target, step, extent, lines, product, reads, tile, values if bias else 0)
            segments += 16 * (taps // run)


@inner
def _tiles(call, p, target, step, extent, lines, product, copy, tile, values):
    """Some output channels of a phase; `target` is their first element, `values` their biases or 0."""
    kind, channel, out = p.kind, p.c.destination.c, call.output
    panel, rows, taps, segments, steps = product
    band, row, from_plane, from_tile, from_channel = copy
    whole = kind == F32 and step[2] == 1 and TILE_ROWS[lines] == lines and taps * steps > 0
    cells = (extent[1] - 1) * row + extent[2]
    if extent[2] == row and step[1] == row * step[2]:  # rows that lie one behind the other are one
        extent, row = (extent[0], min(extent[1], 1), cells), cells
    for z in range(extent[0] * (extent[1] > 0)):
        for number in range((cells + COLUMNS - 1) // COLUMNS):
            place, source = COLUMNS * number, band + z * from_plane + number * from_tile
            vectors = 1 if cells - place <= VECTOR else 2
            columns = vectors * VECTOR
            y, x = place // row, place % row
            c, c_row = tile, 4 * COLUMNS
            if whole and x + columns <= extent[2]:
                c, c_row = out + 4 * (target + z * step[0] + y * step[1] + x), 4 * channel
            if taps * steps > 0:
                a, b = (panel, rows, 4 * ROWS), (source, from_channel)
                multiply(lines, columns, (c, c_row), a, b, (segments, taps), steps, 0)
            else:
                clear(tile, 0, ROWS * COLUMNS)
            if values:
                add_to_rows(c, c_row, values, lines, columns)
            if c == tile:
                _write_columns(p, out, target + z * step[0], channel, step, tile, lines, y, x, columns, extent, row)


@inner
def _write_columns(p, out, target, channel, step, tile, count, y, x, columns, size, pitch):
    """A tile, without the cells between image rows."""
    done = 0
    while done < columns and y < size[1]:
        if x < size[2]:
            run = min(size[2] - x, columns - done)
            at = target + y * step[1] + x * step[2]
            if p.kind == F32 and step[2] == 1:
                copy_rows(out + 4 * at, 4 * channel, tile + 4 * done, 4 * COLUMNS, count, run)
            else:
                for i in range(count):
                    write_cells(p, out, at + i * channel, step[2], tile, i * COLUMNS + done, run)
        done += pitch - x
        x = 0
        y += 1


@inner
def write_cells(p, out, to, step, source, first, count):
    """A row of one phase of a band. The phases between its cells, in NCX, are the same thread's."""
    if p.c.last:
        write_run(p.kind, out, to, step, source, first, count)
    else:
        write_phase(p.kind, out, to, step, source, first, count)
