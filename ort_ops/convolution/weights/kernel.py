"""Sums over the cells of an image, compiled: the weight gradient of a convolution.

    dw[d, s, t] = Σ_{n, o} dy[n, d, o] · x[n, s, o·S + shift(t)]

A product whose rows are scalars from one tensor and whose columns are channels of the other, which therefore must lie
together in every cell: dy with the columns d and rows (s, t) or, swapped, x with the columns s and rows d, tap by tap.
Data NCX are transposed band by band for that, once for all items where these may share so much. No image is unrolled.

The batch and its bands are cut into parts, as many as the shape says; each part's sum goes from cell to cell in the
order of memory and the parts are added up in order, so that threads change nothing. Those of a single part stay in the
cache of the thread that makes them; where those of several are large, a round makes those of some channels.
"""

from typing import Any

from onnx_backprop.ort_ops.compiler.decorators import compiled, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, store_i64
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather.planes import image_of, kernel_tap
from onnx_backprop.ort_ops.runtime.stages import stage
from onnx_backprop.ort_ops.vector import boxes
from onnx_backprop.ort_ops.vector.boxes import dot, volume
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, SPARE_ROWS, multiply_all
from onnx_backprop.ort_ops.vector.rows import add_run, clear, write_run

_PAGE = 4096
_SHORT = 64  # cells of a run whose beginning costs little beside it
TOGETHER = 8  # channels whose weights are finished together, as those lie behind one another


@inner
def _scalars(p, tensor, begin, channels, copy):
    """A box whose elements are read one by one: (address, channel's stride, strides of the axes); a copy if need be.

    Also where a tap is all that the kernel has and runs of cells are short: those of a copy are one run.
    """
    (data, first, channel, stride), low, size, length = tensor
    first += begin * channel
    short = p.taps == 1 and boxes.run_of(size, stride, stride)[0] < min(_SHORT, volume(size))
    if p.kind == F32 and boxes.within(low, size, length) and 4 * channel % _PAGE != 0 and not short:
        return data + 4 * (first + dot(low, stride)), channel, stride
    if p.c.last:
        boxes.copy_box_cells(p.kind, copy, channels, data, first, channels, stride, low, size, length)
        return copy, 1, boxes.dense(size, channels)
    plane = volume(size)
    plane += 16 - plane % 16
    plane += 16 * (1 - plane // 16 % 2)  # an odd number of cache lines
    boxes.copy_box_planes(p.kind, copy, plane, data, first, channels, channel, stride, low, size, length)
    return copy, plane, boxes.dense(size, 1)


@inner
def _columns(p, tensor, channels, copy, ready):
    """A box whose cells hold their channels together, in place or copied, if it is not ready.

    Answers (address, strides of the axes, bytes from tile to tile): channels that lie apart are copied tile by tile.
    """
    ((data, first, channel, stride), low, size, length), columns = tensor, p.columns
    if p.c.last:
        if p.kind == F32 and channels == columns and boxes.within(low, size, length):
            return data + 4 * (first + dot(low, stride)), stride, 4 * COLUMNS
        boxes.copy_box_cells(p.kind, copy, columns, data, first, channels, stride, low, size, length)
        return copy, boxes.dense(size, columns), 4 * COLUMNS
    width = min(columns, COLUMNS)
    tile = 4 * width * volume(size)
    for c in range(0, 0 if ready else channels, width):
        to, some = copy + c // width * tile, min(width, channels - c)
        boxes.turn_box(p.kind, to, width, data, first + c * channel, some, channel, stride, low, size, length)
    return copy, boxes.dense(size, width), tile


@inner
def _shift(p, tap, stride):
    """How far behind a band's first cell a tap starts."""
    return dot(kernel_tap(p, tap).shift - p.low, stride)


def items_of(name: str, unit: Any) -> Any:
    """One block of rows of one group over the cells of one part, whose bands `unit` sums up."""

    @compiled(f"weights_item_{name}")
    def item(call, p, item, scratch):
        blocks, parts, swapped = p.blocks, p.parts, p.swapped
        at_once, first_block = p.round_blocks, call.part
        block, item = first_block + item % at_once, item // at_once
        part, number = item % parts, item // parts
        group = call.group + number
        if block >= blocks or group >= p.c.groups:
            return
        channels = p.c.d if swapped else p.c.s
        begin, end = block * channels // blocks, (block + 1) * channels // blocks
        taps, columns = p.taps, p.columns
        per_row = columns * taps if swapped else columns
        first_row = begin - first_block * channels // blocks
        first_row = (first_row if swapped else first_row * taps) + (block - first_block) * SPARE_ROWS
        c = call.shared + 4 * ((part * p.round_groups + number) * p.rows + first_row) * per_row
        if p.direct:
            c = scratch + p.offsets.sums
        first, stop = part * p.units // parts, (part + 1) * p.units // parts
        if first == stop:  # no image
            clear(c, 0, (end - begin) * (1 if swapped else taps) * per_row)
        for n in range(first, stop):
            unit(p, call, n, group, begin, end, c, per_row, n > first, scratch)
        if p.direct:
            _finish(call, p, group, begin, end - begin, c)

    return item


@inner
def _tensors(call, p, unit, group):
    """(source, destination, cells) of one band of one image."""
    n, at = unit // volume(p.bands), boxes.nth(p.bands, unit % volume(p.bands)) * p.band
    size, step = min(p.band, p.c.out_length - at), p.c.strides
    x_first, dy_first = image_of(p.c.source, n, group * p.c.s), image_of(p.c.destination, n, group * p.c.d)
    of_x = call.inputs[p.source], x_first, p.c.source.c, p.c.source.cells
    of_dy = call.inputs[p.dest], dy_first, p.c.destination.c, p.c.destination.cells
    x = of_x, at * step + p.low, boxes.read_by(size, step, p.low, p.high), p.c.source_length
    return x, (of_dy, at, size, p.c.out_length), size


@inner
def _turn(call, p, item, _scratch):
    """The columns of one band, for all items."""
    x, dy, _ = _tensors(call, p, item % p.units, item // p.units)
    right, channels = (x, p.c.s) if p.swapped else (dy, p.c.d)
    _columns(p, right, channels, call.shared + 4 * item * p.turned, False)


@inner
def _unit(p, call, unit, group, begin, end, c, per_row, add, scratch):
    """One band of one image."""
    (x, dy, size), step, swapped = _tensors(call, p, unit, group), p.c.strides, p.swapped
    right, left, channels, row_taps = (x, dy, p.c.s, 1) if swapped else (dy, x, p.c.d, p.taps)
    rows, count = scratch + p.offsets.rows, (end - begin) * row_taps
    copy = call.shared + 4 * (group * p.units + unit) * p.turned if p.turned else scratch + p.offsets.columns
    b, b_stride, b_tile = _columns(p, right, channels, copy, p.turned)
    a, channel, a_stride = _scalars(p, left, begin, end - begin, scratch + p.offsets.scalars)
    for row in range(count + ROWS):  # behind the last one, where tiles read on, it is repeated
        at_row = min(row, count - 1)
        store_i64(rows, row, 4 * (at_row // row_taps * channel + _shift(p, at_row % row_taps, a_stride)))
    a_step, b_step = (a_stride, step * b_stride) if swapped else (step * a_stride, b_stride)
    segments, run = boxes.segments_of(size, a_step, b_step, scratch + p.offsets.table)
    for t in range(p.taps // row_taps):
        right_at = b + 4 * _shift(p, t, b_stride), 4 * b_step[2], b_tile
        to = c + 4 * t * p.columns, 4 * per_row
        multiply_all(to, count, channels, (a, rows, 4 * a_step[2]), right_at, segments, run, add, p.chunk)


@inner
def _reduce(call, p, index, _scratch):
    """Some channels of one group: add up the parts and write all their weights."""
    swapped, blocks = p.swapped, p.blocks
    channels, first_block = p.c.d if swapped else p.c.s, call.part
    units = (p.round_channels + TOGETHER - 1) // TOGETHER
    number, row = index // units, index % units * TOGETHER
    group, start = call.group + number, first_block * channels // blocks
    end = min(
        start + min(row + TOGETHER, p.round_channels), min(blocks, first_block + p.round_blocks) * channels // blocks
    )
    channel = start + row
    if group >= p.c.groups:
        return
    while channel < end:
        block = ((channel + 1) * blocks - 1) // channels
        run = min(end, (block + 1) * channels // blocks) - channel  # the sums of a block lie behind one another
        place = (channel - start) * (1 if swapped else p.taps) + (block - first_block) * SPARE_ROWS
        per_row = p.columns * p.taps if swapped else p.columns
        sums = call.shared + 4 * (number * p.rows + place) * per_row
        for part in range(1, p.parts):
            add_run(F32, sums, sums, part * p.round_groups * p.rows * per_row, p.columns * p.taps * run)
        _finish(call, p, group, channel, run, sums)
        channel += run


@inner
def _finish(call, p, group, channel, run, first):
    """Write the weights of some channels, whose sums lie behind one another."""
    kind, swapped, out = p.kind, p.swapped, call.output
    s, d, taps, columns, w_d, w_s = p.c.s, p.c.d, p.taps, p.columns, p.c.w_d, p.c.w_s
    if not swapped and p.dense and w_s == taps:
        boxes.write_transposed(kind, out, group * d * w_d + channel * w_s, w_d, first, columns, taps * run, d)
        return
    for i in range(run):
        source, at = first + 4 * i * columns * taps, group * d * w_d + (channel + i) * w_s
        if p.dense and swapped and taps > 1:
            boxes.write_transposed(kind, out, (group * d + channel + i) * w_d, w_s, source, columns, taps, s)
        elif p.dense and not swapped:
            boxes.write_transposed(kind, out, at, w_d, source, columns, taps, d)
        else:
            step, count = w_d, d
            if swapped:
                at, step, count = (group * d + channel + i) * w_d, w_s, s
            for t in range(taps):
                place = at + kernel_tap(p, t).weight
                write_run(kind, out, place, step, source, t * columns, count)


WORK = stage("cells_work", par.Cells, items_of("products", _unit))
TURN = stage("cells_turn", par.Cells, _turn)
REDUCE = stage("cells_reduce", par.Cells, _reduce)
