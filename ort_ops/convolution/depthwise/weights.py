"""The weight gradient of a depthwise convolution, one channel per group on either side. Compiled.

    dw[c, t] = Σ_{n, o} dy[n, o, c] · x[n, o·S + shift(t), c]

A vector is some channels of a cell. Data NXC: float32 is read where it lies, other types from float32 copies of whole
rows. Data NCX: copies in which channels are turned into cells. No zeros stand for what lies outside the image: the
columns of a band are split into those that all taps reach and, for every column of taps, those that it reaches besides;
so are the rows. Parts are as in `weights.kernel`; an item of work is a part and a block of channels. What does not fit
the scratch is done in rounds of some blocks.
"""

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, store_i64
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather.planes import image_of, kernel_tap
from onnx_backprop.ort_ops.runtime.stages import stage
from onnx_backprop.ort_ops.vector.boxes import copy_box_within, dot, nth, reached, read_by, turn_box_within, volume
from onnx_backprop.ort_ops.vector.rows import add_run, clear, write_run
from onnx_backprop.ort_ops.vector.tap_sums import dot_taps

_BYTES = 4 * VECTOR


@inner
def _block(p, block):
    """(first channel, how many) of a block."""
    first = block * p.columns
    return first, min(p.columns, p.c.groups - first)


@inner
def _item(call, p, item, scratch):
    """The sums of one block of channels over one part."""
    at_once, parts, units = p.round_blocks, p.parts, p.units
    number, part = item % at_once, item // at_once
    block = call.part + number
    if block >= p.blocks:
        return
    floats = p.taps * p.columns
    sums = call.shared + 4 * (part * at_once + number) * floats
    clear(sums, 0, floats)
    channel, count = _block(p, block)
    for unit in range(part * units // parts, (part + 1) * units // parts):
        _unit(p, call, unit, channel, count, sums, scratch)


@inner
def _unit(p, call, unit, channel, count, sums, scratch):
    """One band of rows of one image."""
    kind, out, length, step = p.kind, p.c.out_length, p.c.source_length, p.c.strides
    n, at = unit // volume(p.bands), nth(p.bands, unit % volume(p.bands)) * p.band
    size = min(p.band, out - at)
    x, dy = call.inputs[p.source], call.inputs[p.dest]
    x_apart, dy_apart, x_cell, dy_cell = p.c.source.c, p.c.destination.c, p.c.source.cells, p.c.destination.cells
    x_first, dy_first = image_of(p.c.source, n, channel), image_of(p.c.destination, n, channel)
    first, box = at * step + p.low, read_by(size, step, p.low, p.high)
    gradient, source = scratch + p.offsets.gradient, scratch + p.offsets.source
    shifts, last = scratch + p.offsets.shifts, p.c.last
    if kind == F32 and last:
        x, dy = x + 4 * x_first, dy + 4 * dy_first
    elif last:
        dy, dy_cell = copy_box_within(kind, gradient, dy, dy_first, count, dy_cell, at, size, out)
        x, x_cell = copy_box_within(kind, source, x, x_first, count, x_cell, first, box, length)
    else:
        width = (count + VECTOR - 1) // VECTOR * VECTOR
        dy, dy_cell = turn_box_within(kind, gradient, width, dy, dy_first, count, dy_apart, dy_cell, at, size, out)
        x, x_cell = turn_box_within(kind, source, width, x, x_first, count, x_apart, x_cell, first, box, length)
    dy += 4 * dot(at, dy_cell)
    x += 4 * dot(at * step, x_cell)
    for tap in range(p.taps):
        store_i64(shifts, tap, 4 * dot(kernel_tap(p, tap).shift, x_cell))
    a_steps, b_steps = dy_cell[1:] * 4, (x_cell * step)[1:] * 4
    _band(p, at[0], at[1:], size[1:], dy, a_steps, x, b_steps, count, sums, shifts)


@inner
def _band(p, z, at, size, a, a_steps, b, b_steps, count, sums, shifts):
    """A band of `count` channels; a, b: the addresses of its first cell and of the cell at shift 0 from it."""
    length, step, kernel = p.c.source_length, p.c.strides, p.c.kernel
    taps, column = p.taps, kernel[0] * kernel[1]
    # which rows all taps reach, and which columns
    rows, cells = (0, size[0]), (0, size[1])
    for tap in range(kernel[1]):
        reach = reached(kernel_tap(p, tap).shift[1], at[0], size[0], step[1], length[1])
        rows = max(rows[0], reach[0]), min(rows[1], reach[1])
    for tap in range(kernel[2]):
        reach = reached(kernel_tap(p, tap * column).shift[2], at[1], size[1], step[2], length[2])
        cells = max(cells[0], reach[0]), min(cells[1], reach[1])
    for tap in range(kernel[0]):
        if not 0 <= z * step[0] + kernel_tap(p, tap * kernel[1]).shift[0] < length[0]:
            rows = (0, 0)
    if cells[0] >= cells[1]:
        cells = (0, 0)
    if p.bands[2] > 1:  # how far ahead lies what the next band reads, and this one does not
        aheads = size[1] * a_steps[1], size[1] * b_steps[1] + p.high[2] * (b_steps[1] // step[2])
    else:
        aheads = size[0] * a_steps[0], size[0] * b_steps[0] + p.high[1] * (b_steps[0] // step[1])
    if p.kind != F32 or not p.c.last:  # a copy
        aheads = 0, 0
    for vector in range(0, count, VECTOR):
        lanes, to = count - vector, sums + 4 * vector * taps
        v_a, v_b = a + 4 * vector, b + 4 * vector
        if rows[0] < rows[1]:
            _box(lanes, taps, to, v_a, a_steps, v_b, b_steps, shifts, rows, cells, aheads)
        for tap_x in range(kernel[2]):
            tap = tap_x * column
            reach = reached(kernel_tap(p, tap).shift[2], at[1], size[1], step[2], length[2])
            left, right = (reach[0], min(reach[1], cells[0])), (max(reach[0], cells[1]), reach[1])
            if rows[0] < rows[1]:
                t, s = to + _BYTES * tap, shifts + 8 * tap
                _box(lanes, column, t, v_a, a_steps, v_b, b_steps, s, rows, left, aheads)
                _box(lanes, column, t, v_a, a_steps, v_b, b_steps, s, rows, right, aheads)
            if rows[0] == 0 and rows[1] == size[0]:
                continue
            for tap_z in range(kernel[0]):
                if not 0 <= z * step[0] + kernel_tap(p, tap + tap_z * kernel[1]).shift[0] < length[0]:
                    continue
                for y in range(size[0]):
                    if rows[0] <= y < rows[1]:
                        continue
                    first, place = tap + tap_z * kernel[1], (at[0] + y) * step[1]
                    end = first + kernel[1]
                    while first < end and place + kernel_tap(p, first).shift[1] < 0:
                        first += 1
                    while first < end and place + kernel_tap(p, end - 1).shift[1] >= length[1]:
                        end -= 1
                    t, s = to + _BYTES * first, shifts + 8 * first
                    _box(lanes, end - first, t, v_a, a_steps, v_b, b_steps, s, (y, y + 1), reach, aheads)


@inner
def _box(lanes, taps, sums, a, a_steps, b, b_steps, shifts, rows, cells, aheads):
    """Some taps of some rows and columns, which all reach the image."""
    if taps > 0 and cells[0] < cells[1]:
        a += rows[0] * a_steps[0] + cells[0] * a_steps[1]
        b += rows[0] * b_steps[0] + cells[0] * b_steps[1]
        lines, count, (a_line, a_step), (b_line, b_step) = rows[1] - rows[0], cells[1] - cells[0], a_steps, b_steps
        dot_taps(lanes, taps, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step, *aheads)


@inner
def _reduce(call, p, index, _scratch):
    """Add up the parts of a block of channels and write its weights."""
    block = call.part + index
    if block >= p.blocks:
        return
    taps, floats = p.taps, p.taps * p.columns
    sums = call.shared + 4 * index * floats
    for part in range(1, p.parts):
        add_run(F32, sums, sums, part * p.round_blocks * floats, floats)
    channel, count = _block(p, block)
    kind, result, w_d = p.kind, call.output, p.c.w_d
    for tap in range(taps):
        place = kernel_tap(p, tap).weight + channel * w_d
        for vector in range(0, count, VECTOR):
            at = vector * taps + tap * VECTOR
            write_run(kind, result, place + vector * w_d, w_d, sums, at, min(VECTOR, count - vector))


WORK = stage("weights_channels_work", par.Cells, _item)
REDUCE = stage("weights_channels_reduce", par.Cells, _reduce)
