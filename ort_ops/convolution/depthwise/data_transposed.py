"""Bands of a gather with one channel per group, of NCX data whose channels become lanes. Compiled.

    out[n, c, q·S' + r] = Σ_t w[c, t] · in[n, c, q·S + shift(t)]

What a band of a vector of channels reads is turned into cells of channels, with zeros around the image; the results are
turned back. This pays where rows are short or vectors along them would not be dense: no lane is wasted, all phases are
written as whole rows.
"""

from __future__ import annotations

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import store_i64
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import bias_address, bias_of
from onnx_backprop.ort_ops.convolution.depthwise.data_channels import weights_of
from onnx_backprop.ort_ops.convolution.gather.pixels import write_turned
from onnx_backprop.ort_ops.convolution.gather.planes import phase_size
from onnx_backprop.ort_ops.vector.boxes import turn_box
from onnx_backprop.ort_ops.vector.pixel_tap_sums import TAP_BYTES, weigh_cells
from onnx_backprop.ort_ops.vector.rows import clear

_BYTES = 4 * VECTOR


@inner
def gather_depthwise_turned(call, p, n, block, cell, size, scratch):
    """All phases of one band of a vector of channels."""
    kind, all_taps, channel = p.kind, p.all_taps, block * VECTOR
    count = min(VECTOR, p.channels - channel)
    entries = scratch + _BYTES * all_taps
    start = (entries + TAP_BYTES * all_taps + 63) & -64
    results, bias = start + _BYTES, bias_address(call, p)
    if bias:
        bias_of(kind, bias, channel, count, start)
        clear(start, count, VECTOR - count)
    else:
        start = 0
    box = _written(p, cell, size)
    copy = results + _BYTES * box[0] * box[1] * box[2]
    stride = _read(call, p, n, channel, count, cell, size, copy)
    step, out_step = p.step, p.out_step
    for number in range(p.phases):
        phase = view(par.Phase, p + p.phase_table, number)
        own, first, taps = phase_size(phase, cell, size), phase.start, phase.taps
        if own[2] <= 0:
            continue
        weights_of(call, p, phase, 0, taps, channel, count, scratch)
        _entries(p, phase, stride, entries)
        for z in range(own[0]):
            for y in range(own[1]):
                at = ((first[0] + z * out_step[0]) * box[1] + first[1] + y * out_step[1]) * box[2] + first[2]
                source = copy + 4 * (z * step[0] * stride[0] + y * step[1] * stride[1])
                to, to_cell, at_cell = results + _BYTES * at, _BYTES * out_step[2], _BYTES * step[2]
                weigh_cells(
                    own[2], VECTOR, to, to_cell, source, at_cell, taps, entries, scratch, 0, start, (0, 0), False
                )
    out, step = p.out_stride, p.out_step
    at = n * p.out_n + channel * p.out_c
    for axis in range(3):
        at += cell[axis] * step[axis] * out[axis]
    write_turned(p, call.output, at, out, box, count, results, VECTOR, copy)


@inner
def _written(p, cell, size):
    """The lengths of the box of out cells that the phases of a band fill."""
    step, z, y, x = p.out_step, 0, 0, 0
    for number in range(p.phases):
        phase = view(par.Phase, p + p.phase_table, number)
        own, start = phase_size(phase, cell, size), phase.start
        z = max(z, start[0] + (own[0] - 1) * step[0] + 1)
        y = max(y, start[1] + (own[1] - 1) * step[1] + 1)
        x = max(x, start[2] + (own[2] - 1) * step[2] + 1)
    return z, y, x


@inner
def _read(call, p, n, channel, count, cell, size, copy):
    """Copy what a band reads; the strides of the axes."""
    step, stride, apart = p.step, p.in_stride, p.in_c
    low, high = p.low, p.high
    at = (cell[0] * step[0] + low[0], cell[1] * step[1] + low[1], cell[2] * step[2] + low[2])
    box = (
        (size[0] - 1) * step[0] + high[0] - low[0] + 1,
        (size[1] - 1) * step[1] + high[1] - low[1] + 1,
        (size[2] - 1) * step[2] + high[2] - low[2] + 1,
    )
    data, first = call.inputs[0], n * p.in_n + channel * apart
    length = p.length
    turn_box(p.kind, copy, VECTOR, data, first, count, apart, stride, at, box, length)
    return box[1] * box[2] * VECTOR, box[2] * VECTOR, VECTOR


@inner
def _entries(p, phase, stride, entries):
    """Of every tap: bytes from a band's first cell in the copy, and to its weights."""
    low = p.low
    for tap in range(phase.taps):
        shift, at = view(par.GatherTap, p + phase.tap_table, tap).shift, 0
        for axis in range(3):
            at += (shift[axis] - low[axis]) * stride[axis]
        store_i64(entries, 2 * tap, 4 * at)
        store_i64(entries, 2 * tap + 1, _BYTES * tap)
