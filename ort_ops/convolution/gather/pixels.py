"""Bands of a gather whose product has output channels as columns: tiles of cells by channels. Compiled.

The channels of a cell lie together: NXC data, in place or copied with zeros around, or NCX data turned round for it,
which pays where the rows of an image are short, since no tile holds a cell that is not wanted. Cells that the same taps
reach are computed together, so that few products are with the zeros around.

Where sums reach so far that neither their weights nor what they read fits a scratch, it is one tap and some channels at
a time: their part of the cells is copied cell by cell, their weights are packed, and the product is added to the sums
of a few cells, in float32. Every thread does all of that for itself, anew for every tile of channels.
"""

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, load_i64, stack, store_i64
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import bias_address, bias_of
from onnx_backprop.ort_ops.convolution.gather import planes
from onnx_backprop.ort_ops.convolution.gather.planes import image_of, out_at, phase_size, tap_of
from onnx_backprop.ort_ops.vector import boxes
from onnx_backprop.ort_ops.vector.boxes import dot, following, nth, volume
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, TILE_ROWS, multiply, one_segment, rows_apart
from onnx_backprop.ort_ops.vector.registers import copy_rows
from onnx_backprop.ort_ops.vector.rows import add_to_columns, clear, scatter_run, write_phase, write_run

_ALIAS = 2048  # cells so many bytes apart fall on the same lines of the cache
_values = stack(COLUMNS)


@inner
def _band(call, p, n, group, cell, size, band):
    """The cells that a band reads: (address, strides of the axes), in place or copied."""
    kind, channels, source = p.kind, p.c.s, p.c.source
    length, stride = p.c.source_length, source.cells
    corner, box = cell * p.step + p.low, boxes.read_by(size, p.step, p.low, p.high)
    data, first, pitch = call.inputs[0], planes.image_of(source, n, group * channels), p.pitch
    if p.as_cells:
        boxes.turn_box(kind, band, pitch, data, first, channels, source.c, stride, corner, box, length)
    else:
        if kind == F32 and 4 * stride[2] % _ALIAS != 0 and boxes.within(corner, box, length):
            return data + 4 * (first + dot(corner, stride)), stride
        boxes.copy_box_cells(kind, band, pitch, data, first, channels, stride, corner, box, length)
    return band, boxes.dense(box, pitch)


@inner
def gather_cells(call, p, packed, panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of one band; the packed weights of tile m are panel `panels` + m."""
    channels, outs = p.c.s, p.c.d
    tile, rows = scratch + p.offsets.tile, scratch + p.offsets.rows
    table, chosen = scratch + p.offsets.segments, scratch + p.offsets.reaching
    results, lines = scratch + p.offsets.results, scratch + p.offsets.lines
    data, stride = _band(call, p, n, group, cell, size, scratch + p.offsets.copy)
    planes.tap_starts(p, table, 0, channels * COLUMNS, 0, stride)
    bias = bias_address(call, p)
    for m in range(begin, end):
        segments, columns, values = table, min(COLUMNS, outs - m * COLUMNS), 0
        if bias:
            values = _values()
            bias_of(p.kind, bias, group * outs + m * COLUMNS, columns, values)
        for number in range(p.phases):
            phase = view(par.PhaseRecord, p + p.phase_table, number)
            taps, extent = phase.taps, planes.phase_size(phase, cell, size)
            at, step = planes.out_at(p, phase, n, group, cell)
            at += m * COLUMNS * p.c.destination.c
            panel = packed + 4 * (phase.pack_at + (panels + m) * taps * channels * COLUMNS)
            out, places = call.output, (segments, chosen)
            _tiles(
                p, out, at, step, extent, columns, data, stride, panel, phase, cell, places, values, rows, tile, results
            )
            if p.as_cells:
                write_transposed(p, out, at, step, extent, columns, results, COLUMNS, lines)
            segments += 16 * (taps // phase.run)


@inner
def _until(p, phase, cell, first, end, unit):
    """The end of the cells from `first` on along an axis, whose direction is `unit`, that the same taps reach."""
    step, length, at, last, alike = dot(p.step, unit), dot(p.c.source_length, unit), dot(cell, unit), first, 1
    while alike and last < end:
        for tap in range(phase.taps):
            shift = dot(planes.tap_of(p, phase, tap).shift, unit)
            if (0 <= (at + first) * step + shift < length) != (0 <= (at + last) * step + shift < length):
                alike = 0
        last += alike
    return last


@inner
def _reaching(p, phase, at, places):
    """The taps that reach the image from a cell, along x only where that is `exact`: (their table, how many)."""
    (segments, chosen), count = places, 0
    for tap in range(0, phase.taps, phase.run):
        z, y, x = at * p.step + planes.tap_of(p, phase, tap).shift
        if boxes.within((z, y, x if p.exact else 0), (1, 1, 1), p.c.source_length):
            entry = tap // phase.run
            store_i64(chosen, 2 * count, load_i64(segments, 2 * entry))
            store_i64(chosen, 2 * count + 1, load_i64(segments, 2 * entry + 1))
            count += 1
    return chosen, count


@inner
def _tiles(p, out, at, step, size, columns, data, stride, panel, phase, cell, places, values, rows, tile, results):
    """All cells of one phase, by some output channels: those together that the same taps reach."""
    z = y = x = 0
    while z < size[0]:
        end_z, y = _until(p, phase, cell, z, size[0], (1, 0, 0)), 0
        while y < size[1]:
            end_y, x = _until(p, phase, cell, y, size[1], (0, 1, 0)), 0
            while x < size[2]:
                end_x = _until(p, phase, cell, x, size[2], (0, 0, 1)) if p.exact else size[2]
                first, box = (z, y, x), (end_z - z, end_y - y, end_x - x)
                sums = panel, _reaching(p, phase, cell + first, places), values, rows, tile
                _box(p, out, at, step, size, columns, data, stride, phase, first, box, sums, results)
                x = end_x
            y = end_y
        z = end_z


@inner
def _box(p, out, at, step, size, columns, data, stride, phase, corner, box, sums, results):
    """A box of cells that the same taps reach: into the output or, turned, into `results`."""
    kind, turned, apart, run = p.kind, p.as_cells, p.step * stride, phase.run
    panel, (segments, taps), values, rows, tile = sums
    steps, from_step = run * p.c.s, 4
    if run > 1:
        from_step = 4 * phase.run_step * stride[2]
    vectors, cell, lines = 1 if columns <= VECTOR else 2, (0, 0, 0), boxes.dense(size, 1)
    whole = kind == F32 and columns == vectors * VECTOR and taps * steps > 0
    behind = box[2] == size[2] and (box[1] == size[1] or box[0] == 1)  # cells of `results` that follow one another
    for place in range(0, volume(box), ROWS):
        count, first = min(ROWS, volume(box) - place), cell
        for i in range(count):
            store_i64(rows, i, 4 * dot(corner + cell, apart))
            cell = following(cell, box)
        for i in range(count, ROWS):
            store_i64(rows, i, load_i64(rows, count - 1))
        c, c_row = tile, 4 * COLUMNS
        if turned and behind:
            c = results + 4 * COLUMNS * dot(corner + first, lines)
        elif not turned and whole and first[2] + count <= box[2] and TILE_ROWS[count] == count:
            c, c_row = out + 4 * (at + dot(corner + first, step)), 4 * step[2]
        if taps * steps > 0:
            a, b = (data, rows, from_step), (panel, 4 * COLUMNS)
            multiply(count, columns, (c, c_row), a, b, (segments, taps), steps, 0)
        else:
            for i in range(count):
                clear(c + i * c_row, 0, vectors * VECTOR)
        if values:
            add_to_columns(c, c_row, values, count, columns)
        done = 0
        while c == tile and done < count:
            some, source = min(count - done, box[2] - first[2]), tile + 4 * done * COLUMNS
            if turned:
                to = results + 4 * COLUMNS * dot(corner + first, lines)
                copy_rows(to, 4 * COLUMNS, source, 4 * COLUMNS, some, vectors * VECTOR)
            else:
                for i in range(some):
                    write_run(kind, out, at + dot(corner + first, step) + i * step[2], 1, source, i * COLUMNS, columns)
            first, done = following((first[0], first[1], first[2] + some - 1), box), done + some


@inner
def write_transposed(p, out, at, step, size, columns, results, pitch, lines):
    """Cells by channels, `pitch` floats from cell to cell, into the output's channels by cells.

    lines: scratch for a vector of channels.
    """
    channel = p.c.destination.c
    cells, runs, length = volume(size), size[1], size[2]
    line = (cells + VECTOR - 1) // VECTOR * VECTOR
    if step[1] == size[2] * step[2]:  # whole rows are one long row
        runs, length = 1, size[1] * size[2]
    for block in range(0, columns, VECTOR):
        lanes = min(VECTOR, columns - block)
        for i in range(0, cells, VECTOR):
            source = results + 4 * (pitch * i + block)
            boxes.transpose(lines + 4 * i, 4 * line, source, 4 * pitch, min(VECTOR, cells - i), lanes)
        for lane in range(lanes):
            to, done = at + (block + lane) * channel, lane * line
            for z in range(size[0]):
                for y in range(runs):
                    write_phase(p.kind, out, to + z * step[0] + y * step[1], step[2], lines, done, length)
                    done += length


@inner
def _copy(call, p, first, cell, extent, shift, channels, target):
    """What one tap reads of some channels, as cells."""
    kind, data, source, pitch = p.kind, call.inputs[0], p.c.source, p.pitch
    start = cell * p.step + shift
    low = start // p.step
    residue = start - low * p.step  # of an image that has every step-th cell
    first, stride = first + dot(residue, source.cells), p.step * source.cells
    length = (p.c.source_length - residue + p.step - 1) // p.step
    if p.c.last:
        boxes.copy_box_cells(kind, target, pitch, data, first, channels, stride, low, extent, length)
    else:
        boxes.turn_box(kind, target, pitch, data, first, channels, source.c, stride, low, extent, length)


@inner
def gather_far(call, p, _packed, _panels, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of one band."""
    kind, channels, outs = p.kind, p.c.s, p.c.d
    pitch, rows, results = p.pitch, scratch + p.offsets.rows, scratch + p.offsets.results
    copy, weights, lines = scratch + p.offsets.copy, scratch + p.offsets.weights, scratch + p.offsets.lines
    rows_apart(rows, 4 * pitch)
    image = image_of(p.c.source, n, group * channels)
    source, w_out, w_in = call.inputs[1], p.c.w_d, p.c.w_s
    out, bias, values = call.output, bias_address(call, p), _values()
    for m in range(begin, end):
        columns = min(COLUMNS, outs - m * COLUMNS)
        bias_of(kind, bias, group * outs + m * COLUMNS, columns, values)
        clear(weights, 0, pitch * COLUMNS)
        for number in range(p.phases):
            phase = view(par.PhaseRecord, p + p.phase_table, number)
            extent = phase_size(phase, cell, size)
            cells = volume(extent)
            if min(*extent) <= 0:
                continue
            clear(results, 0, cells * COLUMNS)
            for tap in range(phase.taps):
                entry = tap_of(p, phase, tap)
                first = group * p.c.w_group + m * COLUMNS * w_out + entry.weight
                for c in range(0, channels, pitch):
                    count = min(pitch, channels - c)
                    _copy(call, p, image + c * p.c.source.c, cell, extent, entry.shift, count, copy)
                    for k in range(count):
                        scatter_run(kind, weights, k * COLUMNS, 1, source, first + (c + k) * w_in, w_out, columns)
                    for place in range(0, cells, ROWS):
                        sums = results + 4 * COLUMNS * place, 4 * COLUMNS
                        a, b = (copy + 4 * pitch * place, rows, 4), (weights, 4 * COLUMNS)
                        multiply(min(ROWS, cells - place), columns, sums, a, b, one_segment(rows), count, 1)
            if bias:
                add_to_columns(results, 4 * COLUMNS, values, cells, columns)
            at, step = out_at(p, phase, n, group, cell)
            at += m * COLUMNS * p.c.destination.c
            if p.c.last:
                for done in range(cells):
                    write_run(kind, out, at + dot(nth(extent, done), step), 1, results, done * COLUMNS, columns)
            else:
                write_transposed(p, out, at, step, extent, columns, results, COLUMNS, lines)
