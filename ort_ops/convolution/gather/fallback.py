"""Bands of a gather whose sums reach so far that neither their weights nor what they read fits a scratch. Compiled.

One tap and some channels at a time: their part of the cells is copied cell by cell, zeros outside the image, their
weights are packed, and the product is added to the sums of a few cells by COLUMNS output channels, in float32. Every
thread does all of that for itself; copies are made anew for every tile of channels.
"""

from __future__ import annotations

from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.bias import add_to_columns, bias_address, bias_of
from onnx_backprop.ort_ops.convolution.gather.pixels import write_turned
from onnx_backprop.ort_ops.convolution.gather.planes import out_at, phase_size
from onnx_backprop.ort_ops.runtime.call import CALL_INPUTS, CALL_OUTPUT
from onnx_backprop.ort_ops.runtime.compile import VECTOR, inner
from onnx_backprop.ort_ops.runtime.llvm import load_i64, stack, store_i64
from onnx_backprop.ort_ops.vector.boxes import load3, turn_row
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, TILE_ROWS, multiply
from onnx_backprop.ort_ops.vector.rows import clear, read_run, scatter_run, write_run

_values = stack(COLUMNS)


@inner
def _copy(call, p, first, cell, own, shift, channels, target):
    """What one tap reads of some channels, cell by cell."""
    kind, stride, channel, pitch = (
        load_i64(p, par.KIND),
        load3(p, par.IN_3),
        load_i64(p, par.IN_C),
        load_i64(p, par.PITCH),
    )
    data, step, length = (
        load_i64(call, CALL_INPUTS + load_i64(p, par.DATA)),
        load3(p, par.STEP_3),
        load3(p, par.LENGTH_3),
    )
    low = cell[2] * step[2] + shift[2]
    start = min(own[2], (step[2] - 1 - low) // step[2] if low < 0 else 0)
    stop = max(start, min(own[2], (length[2] - low + step[2] - 1) // step[2]))
    at = 0
    for z in range(own[0]):
        for y in range(own[1]):
            cell_z, cell_y = (cell[0] + z) * step[0] + shift[0], (cell[1] + y) * step[1] + shift[1]
            if 0 <= cell_z < length[0] and 0 <= cell_y < length[1] and start < stop:
                clear(target, at * pitch, start * pitch)
                row = first + cell_z * stride[0] + cell_y * stride[1] + (low + start * step[2]) * stride[2]
                if load_i64(p, par.LAST):
                    for x in range(start, stop):
                        place = row + (x - start) * step[2] * stride[2]
                        read_run(kind, target, (at + x) * pitch, data, place, 1, channels)
                else:
                    to, apart = (at + start) * pitch, step[2] * stride[2]
                    turn_row(kind, target, to, pitch, data, row, channels, channel, apart, stop - start)
                clear(target, (at + stop) * pitch, (own[2] - stop) * pitch)
            else:
                clear(target, at * pitch, own[2] * pitch)
            at += own[2]


@inner
def gather_far(call, p, n, group, cell, size, begin, end, scratch):
    """The tiles [begin, end) of one band."""
    kind, channels, outs = load_i64(p, par.KIND), load_i64(p, par.INS), load_i64(p, par.OUTS)
    pitch, most = load_i64(p, par.PITCH), load_i64(p, par.CELLS) + ROWS
    rows = scratch
    results = rows + 8 * (ROWS + 2)
    copy = results + 4 * most * COLUMNS
    weights = copy + 4 * most * pitch
    lines = weights + 4 * pitch * COLUMNS
    for i in range(ROWS):
        store_i64(rows, i, 4 * i * pitch)
    store_i64(rows, ROWS, 0)
    store_i64(rows, ROWS + 1, 0)
    image = n * load_i64(p, par.IN_N) + group * channels * load_i64(p, par.IN_C)
    source, w_out, w_in = (
        load_i64(call, CALL_INPUTS + load_i64(p, par.WEIGHTS)),
        load_i64(p, par.W_OUT),
        load_i64(p, par.W_IN),
    )
    out, bias, values = load_i64(call, CALL_OUTPUT), bias_address(call, p), _values()
    for m in range(begin, end):
        columns = min(COLUMNS, outs - m * COLUMNS)
        vectors = 1 if columns <= VECTOR else 2
        bias_of(kind, bias, group * outs + m * COLUMNS, columns, values)
        clear(weights, 0, pitch * COLUMNS)
        for number in range(load_i64(p, par.PHASES)):
            phase = p + 8 * (load_i64(p, par.PHASE_TABLE) + par.PHASE_WORDS * number)
            own = phase_size(phase, cell, size)
            cells = own[0] * own[1] * own[2]
            if own[0] <= 0 or own[1] <= 0 or own[2] <= 0:
                continue
            clear(results, 0, cells * COLUMNS)
            for tap in range(load_i64(phase, par.TAPS)):
                entry = p + 8 * (load_i64(phase, par.TAP_TABLE) + par.TAP_WORDS * tap)
                first = group * load_i64(p, par.W_GROUP) + m * COLUMNS * w_out + load_i64(entry, par.TAP_WEIGHT)
                for c in range(0, channels, pitch):
                    count = min(pitch, channels - c)
                    shift = load3(entry, par.TAP_SHIFT_3)
                    _copy(call, p, image + c * load_i64(p, par.IN_C), cell, own, shift, count, copy)
                    for k in range(count):
                        scatter_run(kind, weights, k * COLUMNS, 1, source, first + (c + k) * w_in, w_out, columns)
                    for place in range(0, cells, ROWS):
                        multiply(
                            TILE_ROWS[min(ROWS, cells - place)],
                            vectors,
                            results + 4 * COLUMNS * place,
                            4 * COLUMNS,
                            copy + 4 * pitch * place,
                            rows,
                            weights,
                            1,
                            rows + 8 * ROWS,
                            count,
                            4,
                            4 * COLUMNS,
                            1,
                        )
            if bias:
                add_to_columns(results, 4 * COLUMNS, values, cells, columns)
            at, step = out_at(p, phase, n, group, cell)
            at += m * COLUMNS * load_i64(p, par.OUT_C)
            if load_i64(p, par.LAST):
                _write(kind, out, at, step, own, columns, results)
            else:
                write_turned(p, out, at, step, own, columns, results, COLUMNS, lines)


@inner
def _write(kind, out, at, step, own, columns, results):
    """Cells by channels, as they are."""
    done = 0
    for z in range(own[0]):
        for y in range(own[1]):
            for x in range(own[2]):
                to = at + z * step[0] + y * step[1] + x * step[2]
                write_run(kind, out, to, 1, results, done * COLUMNS, columns)
                done += 1
