"""The weight gradient of a depthwise convolution, one channel per group on either side. Compiled.

    dw[c, t] = Σ_{n, o} dy[n, c, o] · x[n, c, o·S + shift(t)]

Data NCX: several taps share every vector of dy. Vectors go along rows of padded float32 copies, cells of equal residue
modulo the stride side by side; the lanes of a sum are added up in the end, in a fixed order. Data NXC have a module of
their own, `depthwise.weights_channels`.
"""

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import load_f32, store_f32, store_i64
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.gather.planes import image_of
from onnx_backprop.ort_ops.runtime.stages import stage
from onnx_backprop.ort_ops.vector.boxes import copy_line, copy_row
from onnx_backprop.ort_ops.vector.rows import clear, write_run
from onnx_backprop.ort_ops.vector.tap_sums import dot_taps


@inner
def _rows(p, x, dy, x_first, dy_first, z, y, lines, x_at, width, totals, shifts, gradient, image):
    """Some rows of one channel of one image, `width` cells from `x_at` on."""
    kind, taps = p.kind, p.taps
    step, low, high = p.c.strides, p.low, p.high
    s_stride, d_stride = p.c.source.cells, p.c.destination.cells
    length, pitch = p.c.source_length, (width + VECTOR - 1) // VECTOR * VECTOR
    for line in range(lines):
        row = dy_first + z * d_stride[0] + (y + line) * d_stride[1]
        copy_row(kind, gradient, line * pitch, dy, row, d_stride[2], x_at, pitch, x_at + width)
    first, last = low[2] // step[2], high[2] // step[2]
    wide, deep, tall = pitch + last - first, high[0] - low[0] + 1, (lines - 1) * step[1] + high[1] - low[1] + 1
    at = 0
    for residue in range(step[2]):
        end = (length[2] - residue + step[2] - 1) // step[2]
        for cell_z in range(z * step[0] + low[0], z * step[0] + low[0] + deep):
            for cell_y in range(y * step[1] + low[1], y * step[1] + low[1] + tall):
                stride, ends = (s_stride[0], s_stride[1], step[2] * s_stride[2]), (length[0], length[1], end)
                channel, cell = x_first + residue * s_stride[2], (cell_z, cell_y, first + x_at)
                copy_line(kind, image, at, x, channel, stride, cell, wide, ends)
                at += wide
    for t in range(taps):
        tap = view(par.CellsTap, p + par.TAPS_AT, t)
        shift = tap.shift[2]
        place = (shift % step[2]) * deep + tap.shift[0] - low[0]
        place = place * tall + tap.shift[1] - low[1]
        store_i64(shifts, t, 4 * (place * wide + shift // step[2] - first))
    a_line, b_line = 4 * pitch, 4 * step[1] * wide
    dot_taps(taps, totals, gradient, image, shifts, lines, a_line, b_line, pitch // VECTOR, 4 * VECTOR, 4 * VECTOR)


@inner
def _item(call, p, item, scratch):
    """All weights of one channel."""
    kind, taps = p.kind, p.taps
    out, (_, band_y, band_x) = p.c.out_length, p.band
    totals, shifts = scratch + p.offsets.sums, scratch + p.offsets.shifts
    gradient, image = scratch + p.offsets.gradient, scratch + p.offsets.source
    x = call.inputs[p.source]
    dy = call.inputs[p.dest]
    clear(totals, 0, VECTOR * taps)
    for n in range(p.c.batch):
        x_first, dy_first = image_of(p.c.source, n, item), image_of(p.c.destination, n, item)
        for z in range(out[0]):
            for y in range(0, out[1], band_y):
                lines = min(band_y, out[1] - y)
                for x_at in range(0, out[2], band_x):
                    width = min(band_x, out[2] - x_at)
                    _rows(p, x, dy, x_first, dy_first, z, y, lines, x_at, width, totals, shifts, gradient, image)
    result, w_d = call.output, p.c.w_d
    for t in range(taps):
        place = view(par.CellsTap, p + par.TAPS_AT, t).weight
        width = VECTOR
        while width > 1:
            width //= 2
            for i in range(t * VECTOR, t * VECTOR + width):
                store_f32(totals, i, load_f32(totals, i) + load_f32(totals, i + width))
        write_run(kind, result, place + item * w_d, w_d, totals, t * VECTOR, 1)


WORK = stage("weights_planes_work", par.Cells, _item)
