"""Bands of a gather with one channel per group, of NCX data whose channels become lanes. Compiled.

    out[n, c, q·S' + r] = Σ_t w[c, t] · in[n, c, q·S + shift(t)]

What a band of a vector of channels reads is turned into cells of channels, with zeros around the image; the results are
turned back. This pays where rows are short or vectors along them would not be dense: no lane is wasted, all phases are
written as whole rows.
"""

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import store_i64
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import bias_address, bias_of
from onnx_backprop.ort_ops.convolution.depthwise.data_channels import weights_of
from onnx_backprop.ort_ops.convolution.gather.pixels import write_turned
from onnx_backprop.ort_ops.convolution.gather.planes import image_of, phase_size, tap_of
from onnx_backprop.ort_ops.vector.boxes import dense, dot, read_by, turn_box
from onnx_backprop.ort_ops.vector.pixel_tap_sums import weigh_cells
from onnx_backprop.ort_ops.vector.rows import clear

_BYTES = 4 * VECTOR


@inner
def gather_depthwise_turned(call, p, n, block, cell, size, scratch):
    """All phases of one band of a vector of channels."""
    kind, channel = p.kind, block * VECTOR
    count = min(VECTOR, p.c.groups - channel)
    weights, entries = scratch + p.offsets.weights, scratch + p.offsets.segments
    start, results, bias = scratch + p.offsets.start, scratch + p.offsets.results, bias_address(call, p)
    if bias:
        bias_of(kind, bias, channel, count, start)
        clear(start, count, VECTOR - count)
    else:
        start = 0
    box = _written(p, cell, size)
    copy = scratch + p.offsets.copy
    stride = _read(call, p, n, channel, count, cell, size, copy)
    step, out_step = p.step, p.out_step
    for number in range(p.phases):
        phase = view(par.Phase, p + p.phase_table, number)
        own, taps = phase_size(phase, cell, size), phase.taps
        if own[2] <= 0:
            continue
        weights_of(call, p, phase, 0, taps, channel, count, weights)
        _entries(p, phase, stride, entries)
        for z in range(own[0]):
            for y in range(own[1]):
                at = dot(phase.start + (z, y, 0) * out_step, dense(box, 1))
                source = copy + 4 * dot((z, y, 0) * step, stride)
                to, to_cell, at_cell = results + _BYTES * at, _BYTES * out_step[2], _BYTES * step[2]
                weigh_cells(
                    own[2], VECTOR, to, to_cell, source, at_cell, taps, entries, weights, 0, start, (0, 0), False
                )
    out = p.c.destination
    at = image_of(out, n, channel) + dot(cell * out_step, out.cells)
    write_turned(p, call.output, at, out.cells, box, count, results, VECTOR, copy)


@inner
def _written(p, cell, size):
    """The lengths of the box of out cells that the phases of a band fill."""
    box = (0, 0, 0)
    for number in range(p.phases):
        phase = view(par.Phase, p + p.phase_table, number)
        box = max(box, phase.start + (phase_size(phase, cell, size) - 1) * p.out_step + 1)
    return box


@inner
def _read(call, p, n, channel, count, cell, size, copy):
    """Copy what a band reads; the strides of the axes."""
    source, length, box = p.c.source, p.c.source_length, read_by(size, p.step, p.low, p.high)
    data, first, at = call.inputs[0], image_of(source, n, channel), cell * p.step + p.low
    turn_box(p.kind, copy, VECTOR, data, first, count, source.c, source.cells, at, box, length)
    return dense(box, VECTOR)


@inner
def _entries(p, phase, stride, entries):
    """Of every tap: bytes from a band's first cell in the copy, and to its weights."""
    for tap in range(phase.taps):
        store_i64(entries, 2 * tap, 4 * dot(tap_of(p, phase, tap).shift - p.low, stride))
        store_i64(entries, 2 * tap + 1, _BYTES * tap)
