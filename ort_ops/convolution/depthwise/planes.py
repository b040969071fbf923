"""Bands of a gather with one channel per group: a depthwise convolution, or its data gradient. Compiled.

    out[n, c, q·S' + r] = Σ_t w[c, t] · in[n, c, q·S + shift(t)]

Data NCX: an item is a channel. Small square kernels of float32 slide over planes where they lie; otherwise vectors go
along all rows of a band, in a padded float32 copy as in `gather.planes`.
Data NXC, and NCX where channels make better vectors: `depthwise.channels`.
"""

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, stack, store_i64
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import add_to_rows, bias_address, bias_of
from onnx_backprop.ort_ops.convolution.gather.planes import (
    box_of,
    copy_planes,
    image_of,
    out_at,
    phase_size,
    tap_of,
    write_cells,
)
from onnx_backprop.ort_ops.vector.boxes import dot, volume
from onnx_backprop.ort_ops.vector.rows import clear, scatter_run
from onnx_backprop.ort_ops.vector.stencil import weigh_plane
from onnx_backprop.ort_ops.vector.tap_sums import weigh_taps

_BYTES = 4 * VECTOR
_values = stack(VECTOR)


@inner
def _weights(call, p, phase, channel, target):
    """Vectors of the weights of a phase's taps, of one channel in all lanes."""
    for tap in range(phase.taps):
        first = channel * p.c.w_group + tap_of(p, phase, tap).weight
        scatter_run(p.kind, target, tap * VECTOR, 1, call.inputs[1], first, 0, VECTOR)


@inner
def _shifts(p, phase, stride, residue, target):
    """Where a phase's taps start in the copy, in bytes."""
    for tap in range(phase.taps):
        entry = tap_of(p, phase, tap)
        store_i64(target, tap, 4 * (entry.residue * residue + dot(entry.shift - p.low, stride)))


@inner
def gather_depthwise(call, p, n, block, cell, size, scratch):
    """All phases of one band."""
    weights, shifts = scratch + p.offsets.weights, scratch + p.offsets.shifts
    if p.stencil:
        _slide(call, p, n, block, cell, size, weights, shifts, scratch)
    else:
        _planes(call, p, n, block, cell, size, weights, shifts, scratch)


@inner
def _slide(call, p, n, channel, cell, size, weights, starts, scratch):
    """The only phase, whose steps are one, of a band."""
    phase, kernel = view(par.PhaseRecord, p + p.phase_table), p.stencil
    low, high, length = p.low, p.high, p.c.source_length
    in_z, in_y, _ = p.c.source.cells
    lines, table, zeros = size[1] + kernel - 1, scratch + p.offsets.table, scratch + p.offsets.zeros
    clear(zeros, 0, size[2] + high[2] - low[2] + VECTOR)
    data = call.inputs[0] + 4 * image_of(p.c.source, n, channel)
    at, step = out_at(p, phase, n, channel, cell)
    out, bias, value = call.output + 4 * at, bias_address(call, p), _values()
    if bias:
        bias_of(F32, bias, channel, 1, value)
    _weights(call, p, phase, channel, weights)
    for column in range(kernel):
        store_i64(starts, column, cell[2] + tap_of(p, phase, column).shift[2])
    for z in range(size[0]):
        place = cell[0] + low[0] + z
        for line in range(lines):
            y, row = cell[1] + low[1] + line, zeros - 4 * (cell[2] + low[2])
            if 0 <= place < length[0] and 0 <= y < length[1]:
                row = data + 4 * (place * in_z + y * in_y)
            store_i64(table, line, row)
        to = out + 4 * z * step[0]
        weigh_plane(kernel, to, 4 * step[1], table, starts, weights, size[2], lines, length[2])
        if bias:
            for y in range(size[1]):
                add_to_rows(to + 4 * y * step[1], 0, value, 1, size[2])


@inner
def _planes(call, p, n, channel, cell, size, weights, shifts, scratch):
    kind, out, copy = p.kind, call.output, scratch + p.offsets.copy
    box = box_of(p, cell, size)
    pitch, plane = box[2], volume(box) + p.high[2] - p.low[2] + VECTOR
    copy_planes(p, call.inputs[0], image_of(p.c.source, n, channel), copy, cell + p.low, box, plane)
    result, bias, values = scratch + p.offsets.results, bias_address(call, p), _values()
    if bias:
        bias_of(kind, bias, channel, 1, values)
    for number in range(p.phases):
        phase = view(par.PhaseRecord, p + p.phase_table, number)
        extent, taps = phase_size(phase, cell, size), phase.taps
        at, step = out_at(p, phase, n, channel, cell)
        cells = (extent[1] - 1) * pitch + extent[2]
        if extent[1] <= 0 or extent[2] <= 0:
            continue
        _weights(call, p, phase, channel, weights)
        _shifts(p, phase, (box[1] * pitch, pitch, 1), plane, shifts)
        for z in range(extent[0]):
            clear(result, 0, cells * (taps == 0))
            source, vectors = copy + 4 * z * box[1] * pitch, (cells + VECTOR - 1) // VECTOR
            weigh_taps(taps, result, _BYTES, source, _BYTES, shifts, weights, vectors)
            if bias:
                add_to_rows(result, 0, values, 1, cells)
            for y in range(extent[1]):
                write_cells(p, out, at + z * step[0] + y * step[1], step[2], result, y * pitch, extent[2])
