"""Bands of a gather whose sums reach so far that neither their weights nor what they read fits a scratch. Compiled.

One tap and some channels at a time: their part of the cells is copied cell by cell, zeros outside the image, their
weights are packed, and the product is added to the sums of a few cells by COLUMNS output channels, in float32. Every
thread does all of that for itself; copies are made anew for every tile of channels.
"""

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import stack
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import add_to_columns, bias_address, bias_of
from onnx_backprop.ort_ops.convolution.gather.pixels import write_transposed
from onnx_backprop.ort_ops.convolution.gather.planes import image_of, out_at, phase_size, tap_of
from onnx_backprop.ort_ops.vector.boxes import copy_box_cells, dot, nth, turn_box, volume
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, multiply, one_segment, rows_apart
from onnx_backprop.ort_ops.vector.rows import clear, scatter_run, write_run

_values = stack(COLUMNS)


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
        copy_box_cells(kind, target, pitch, data, first, channels, stride, low, extent, length)
    else:
        turn_box(kind, target, pitch, data, first, channels, source.c, stride, low, extent, length)


@inner
def gather_far(call, p, n, group, cell, size, begin, end, scratch):
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
