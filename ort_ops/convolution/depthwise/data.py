"""Bands of a gather with one channel per group: a depthwise convolution, or its data gradient. Compiled.

    out[n, c, q·S' + r] = Σ_t w[c, t] · in[n, c, q·S + shift(t)]

Data NXC: an item is a block of channels, wide pieces of every cell, which are the vectors. float32 is read and written
where it lies, other types through float32 copies of whole rows. No zeros stand for what lies outside the image: every
cell has the list of the taps that reach it, and those of a row that all columns of taps reach have one list.

Data NCX: what a band of a vector of channels reads is turned into cells of channels, with zeros around the image; the
results are turned back. No lane is wasted where rows are short, and all phases are written as whole rows. Where
dense rows are long, an item is some channels, and small square kernels of float32 slide over planes where they lie.
"""

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, load_f32, load_i64, stack, store_f32, store_i64
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import bias_address, bias_of
from onnx_backprop.ort_ops.convolution.gather.pixels import write_transposed
from onnx_backprop.ort_ops.convolution.gather.planes import image_of, out_at, phase_size, tap_of
from onnx_backprop.ort_ops.vector.boxes import copy_box_within, dense, dot, reached, read_by, turn_box, within
from onnx_backprop.ort_ops.vector.pixel_tap_sums import weigh_cells
from onnx_backprop.ort_ops.vector.registers import fence
from onnx_backprop.ort_ops.vector.rows import add_to_rows, clear, scatter_run, write_run
from onnx_backprop.ort_ops.vector.stencil import weigh_plane

_BYTES = 4 * VECTOR
_values = stack(VECTOR)


@inner
def _weights(call, p, phase, before, taps, channel, count, target):
    """Vectors of the weights, [channels][taps], of a phase whose taps are preceded by so many of all."""
    kind, source, step = p.kind, call.inputs[1], p.c.w_group
    for vector in range(0, count, VECTOR):
        lanes = min(VECTOR, count - vector)
        for tap in range(phase.taps):
            place = vector * taps + (before + tap) * VECTOR
            first = (channel + vector) * step + tap_of(p, phase, tap).weight
            clear(target, place + lanes, VECTOR - lanes)
            scatter_run(kind, target, place, 1, source, first, step, lanes)


@inner
def _bias(call, p, channel, count, width, scratch):
    """The address of the bias of some channels and zeros up to a width; 0 if there is none."""
    bias, start = bias_address(call, p), scratch + p.offsets.start
    if bias == 0:
        return 0
    bias_of(p.kind, bias, channel, count, start)
    clear(start, count, width - count)
    return start


@inner
def gather_depthwise_cells(call, p, n, block, cell, size, scratch):
    """All phases of one band of a block of channels."""
    kind, width, all_taps = p.kind, p.block, p.all_taps
    channel = block * width
    count = min(width, p.c.groups - channel)
    weights, shifts, entries = scratch + p.offsets.weights, scratch + p.offsets.shifts, scratch + p.offsets.segments
    results, start = scratch + p.offsets.results, _bias(call, p, channel, count, width, scratch)
    step, stride, low, high = p.step, p.c.source.cells, p.low, p.high
    data, first, corner = call.inputs[0], n * p.c.source.n + channel, cell * step
    if kind == F32:
        data += 4 * first
    else:
        copy = scratch + p.offsets.copy
        box = read_by(size, step, low, high)
        data, stride = copy_box_within(kind, copy, data, first, count, stride, corner + low, box, p.c.source_length)
    data += 4 * dot(corner, stride)
    before = 0
    for number in range(p.phases):
        phase = view(par.PhaseRecord, p + p.phase_table, number)
        _weights(call, p, phase, before, all_taps, channel, count, weights)
        for tap in range(phase.taps):
            store_i64(shifts, before + tap, 4 * dot(tap_of(p, phase, tap).shift, stride))
        before += phase.taps
    out = call.output
    for z in range(size[0]):
        for y in range(size[1]):
            source, before = data + 4 * dot((z, y, 0) * step, stride), 0
            for number in range(p.phases):
                phase = view(par.PhaseRecord, p + p.phase_table, number)
                extent, (at, to) = phase_size(phase, cell, size), out_at(p, phase, n, 0, cell)
                if z < extent[0] and y < extent[1] and extent[2] > 0:
                    at += channel + z * to[0] + y * to[1]
                    target, target_cell = out + 4 * at, 4 * to[2]
                    aheads = 4 * to[1], 4 * (step[1] + high[1]) * stride[1]
                    if kind != F32:
                        target, target_cell, aheads = results, 4 * count, (0, 0)
                    place = corner + (z, y, 0) * step
                    factors, places = weights + _BYTES * before, shifts + 8 * before
                    operands = (source, 4 * step[2] * stride[2], factors, places, start, entries)
                    _row(p, phase, place, extent[2], target, target_cell, operands, count, aheads)
                    for x in range(extent[2] if kind != F32 else 0):
                        write_run(kind, out, at + x * to[2], 1, results, x * count, count)
                before += phase.taps
    fence()


@inner
def _row(p, phase, place, size, to, to_cell, operands, count, aheads):
    """A row of a phase; place: the cell of `in` at shift 0 from the first one, operands: its address first."""
    at, at_cell, weights, shifts, start, entries = operands
    length, step, columns = p.c.source_length, p.step, phase.taps_along[2]
    weights_step = _BYTES * p.all_taps
    streaming = p.streamed and p.kind == F32 and (to | to_cell) % _BYTES == 0
    begin, end = 0, size  # the cells that all columns of taps reach
    for column in range(min(columns, phase.taps)):
        reach = reached(place[2] + tap_of(p, phase, column).shift[2], 0, size, step[2], length[2])
        begin, end = max(begin, reach[0]), min(end, reach[1])
    x = 0
    while x < size:
        cells = end - x if begin <= x < end else 1
        taps = _reaching(p, phase, step * (0, 0, x) + place, length, shifts, entries)
        t, s = to + x * to_cell, at + x * at_cell
        weigh_cells(
            cells, count, t, to_cell, s, at_cell, taps, entries, weights, weights_step, start, aheads, streaming
        )
        x += cells


@inner
def _reaching(p, phase, cell, length, shifts, entries):
    """How many taps of a phase reach the image from a cell of `in`; their entries for `weigh_cells`."""
    count = 0
    for tap in range(phase.taps):
        if within(cell + tap_of(p, phase, tap).shift, (1, 1, 1), length):
            store_i64(entries, 2 * count, load_i64(shifts, tap))
            store_i64(entries, 2 * count + 1, _BYTES * tap)
            count += 1
    return count


@inner
def gather_depthwise_transposed(call, p, n, block, cell, size, scratch):
    """All phases of one band of a vector of channels."""
    kind, channel = p.kind, block * VECTOR
    count = min(VECTOR, p.c.groups - channel)
    weights, entries = scratch + p.offsets.weights, scratch + p.offsets.segments
    results, copy = scratch + p.offsets.results, scratch + p.offsets.copy
    start = _bias(call, p, channel, count, VECTOR, scratch)
    source, step, out_step = p.c.source, p.step, p.out_step
    data, first, read = call.inputs[0], image_of(source, n, channel), read_by(size, step, p.low, p.high)
    corner = cell * step + p.low
    turn_box(kind, copy, VECTOR, data, first, count, source.c, source.cells, corner, read, p.c.source_length)
    stride, box = dense(read, VECTOR), _written(p, cell, size)
    for number in range(p.phases):
        phase = view(par.PhaseRecord, p + p.phase_table, number)
        extent, taps = phase_size(phase, cell, size), phase.taps
        if extent[2] <= 0:
            continue
        _weights(call, p, phase, 0, taps, channel, count, weights)
        _entries(p, phase, stride, entries)
        for z in range(extent[0]):
            for y in range(extent[1]):
                at = dot(phase.start + (z, y, 0) * out_step, dense(box, 1))
                place = copy + 4 * dot((z, y, 0) * step, stride)
                to, to_cell, at_cell = results + _BYTES * at, _BYTES * out_step[2], _BYTES * step[2]
                weigh_cells(
                    extent[2], VECTOR, to, to_cell, place, at_cell, taps, entries, weights, 0, start, (0, 0), False
                )
    out = p.c.destination
    at = image_of(out, n, channel) + dot(cell * out_step, out.cells)
    write_transposed(p, call.output, at, out.cells, box, count, results, VECTOR, copy)


@inner
def _written(p, cell, size):
    """The lengths of the box of out cells that the phases of a band fill."""
    box = (0, 0, 0)
    for number in range(p.phases):
        phase = view(par.PhaseRecord, p + p.phase_table, number)
        box = max(box, phase.start + (phase_size(phase, cell, size) - 1) * p.out_step + 1)
    return box


@inner
def _entries(p, phase, stride, entries):
    """Of every tap: bytes from a band's first cell in the copy, and to its weights."""
    for tap in range(phase.taps):
        store_i64(entries, 2 * tap, 4 * dot(tap_of(p, phase, tap).shift - p.low, stride))
        store_i64(entries, 2 * tap + 1, _BYTES * tap)


@inner
def gather_depthwise(call, p, n, block, cell, size, scratch):
    """All phases of a band of some channels, whose taps lie one behind another along y and evenly apart along x."""
    low, high, starts = p.low, p.high, scratch + p.offsets.shifts
    reach, spread = high[1] - low[1], high[2] - low[2]
    clear(scratch + p.offsets.zeros, 0, size[2] + spread + VECTOR)
    start, apart = cell[2] + low[2], spread // reach
    for column in range(reach + 1):
        store_i64(starts, column, start)
        start += apart
    for channel in range(block * p.block, min((block + 1) * p.block, p.c.groups)):
        _plane(call, p, n, channel, cell, size, reach, starts, scratch)


@inner
def _plane(call, p, n, channel, cell, size, reach, starts, scratch):
    """A band of a channel."""
    low, length, out, step = cell + p.low, p.c.source_length, p.c.destination, p.out_step
    in_z, in_y, _ = p.c.source.cells
    weights, zeros = scratch + p.offsets.weights, scratch + p.offsets.zeros - 4 * low[2]
    halved = step[1] == 2 and 2 * size[2] <= VECTOR and size[1] > 1  # half the rows beside the others in registers
    lines = (size[1] + 1) // 2 if halved else size[1]
    size, first = size * step, cell * step
    data = call.inputs[0] + 4 * image_of(p.c.source, n, channel)
    (planes, height, width), bias, value = min(size, p.c.out_length - first), bias_address(call, p), _values()
    target, row = call.output + 4 * (image_of(out, n, channel) + dot(first, out.cells)), 4 * out.cells[1]
    here, second, apart, rest = height, 0, _BYTES, height
    if halved:
        here, second, apart = min(step[1] * lines, height), lines, step[1] * lines * row
        rest -= here
    if bias:
        bias_of(F32, bias, channel, 1, value)
    kernel, phase = call.inputs[1] + 4 * channel * p.c.w_group, view(par.PhaseRecord, p + p.phase_table)
    for tap in range(p.all_taps):  # those of the other phases lie behind the first one's
        store_f32(weights, tap, load_f32(kernel, tap_of(p, phase, tap).weight))
    for z in range(planes):
        plane, to = low[0] + z, target + 4 * z * out.cells[0]
        rows = length[1] if 0 <= plane < length[0] else 0
        weigh_plane(
            p.stencil, to, row, data + 4 * plane * in_z, 4 * in_y, low[1], rows, zeros, starts, weights, width, here,
            lines + reach, length[2], second, apart, rest,
        )  # fmt: skip
        if bias:
            for y in range(height):
                add_to_rows(to + y * row, 0, value, 1, width)
