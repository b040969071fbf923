"""Sums over the taps of a kernel, compiled: the data gradient of a convolution, and a correlation with a stride.

    out[n, m, q·S' + r] = Σ_{c, t} w[m, c, t] · in[n, c, q·S + shift(t)]

for every phase r. A correlation has one phase and S' = 1; the data gradient has S = 1 and one phase for every residue
of the source index modulo the stride S', each with the taps that reach it. No image is unrolled: a band of cells q,
with all its phases, is computed from a float32 copy of the cells it reads, with zeros around.

The product has cells as columns (`planes`, `matrices`) or output channels (`pixels`); the weights are packed once per
call in the order in which its tiles read them. Where they are large beside the images, a round packs some of them and
computes the output channels they are for. One channel per group on either side makes no product (`depthwise.data`).
"""

from typing import Any

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, compiled, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, stack
from onnx_backprop.ort_ops.compiler.records import view
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.depthwise import data as depthwise
from onnx_backprop.ort_ops.convolution.gather.matrices import gather_columns, gather_matrices
from onnx_backprop.ort_ops.convolution.gather.pixels import gather_cells, gather_far
from onnx_backprop.ort_ops.convolution.gather.planes import gather_planes, tap_of
from onnx_backprop.ort_ops.runtime.stages import stage
from onnx_backprop.ort_ops.vector.boxes import nth, transpose_rows
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS
from onnx_backprop.ort_ops.vector.matrix_parts import split_panel
from onnx_backprop.ort_ops.vector.matrix_tiles import DEPTH, GROUP
from onnx_backprop.ort_ops.vector.registers import fetch
from onnx_backprop.ort_ops.vector.rows import clear, copy_narrow, fetch_kernels, scatter_run

_SPAN = 2 * VECTOR  # cells of a kernel that are turned together
_PITCH = max(COLUMNS, -(-ROWS // VECTOR) * VECTOR)  # numbers of a turned cell: a tile's channels, in whole vectors
_AHEAD = 8  # channels whose kernels are fetched before they are needed
_kernels = stack(_SPAN * _PITCH)


@inner
def _pack(call, p, unit, _scratch):
    """One tile of the packed weights: for every tap and channel `width` output channels, zeros beyond the last."""
    phase = _phase_of(p, unit)
    number = unit - phase.first_unit
    _panel(call, p, phase, number, 0, p.c.s, call.shared + 4 * (phase.pack_at + number * phase.taps * p.c.s * p.tile))


@inner
def _pack_parts(call, p, unit, scratch):
    """As `_pack`, in parts for registers of matrices; of a data gradient what a first-level cache holds at a time."""
    phase, panel = _phase_of(p, unit), scratch + p.offsets.copy
    wide, number = p.step[2] if p.at_once else 1, unit - phase.first_unit
    depth, taps = DEPTH // wide, phase.taps
    at_once, of_taps = depth if p.c.w_d < p.c.w_s else p.c.s, (p.c.s + depth - 1) // depth * GROUP
    target = call.shared + 4 * phase.pack_at + number * taps // wide * of_taps
    for c in range(0, p.c.s, at_once):
        channels, to = min(at_once, p.c.s - c), target + c // depth * GROUP
        _panel(call, p, phase, number, c, channels, panel)
        split_panel(to, of_taps, panel, taps, channels, wide, p.at_once > 0, scratch + p.offsets.lines)


@inner
def _phase_of(p, unit):
    """The phase that a tile of weights is of."""
    number = p.phases - 1
    while view(par.PhaseRecord, p + p.phase_table, number).first_unit > unit:
        number -= 1
    return view(par.PhaseRecord, p + p.phase_table, number)


@inner
def _panel(call, p, phase, unit, begin, channels, target):
    """Packed weights of a tile, the phase's `unit`-th one, at an address, of some channels that are summed."""
    kind, width, taps, w_s, w_out = p.kind, p.tile, phase.taps, p.c.w_s, p.c.w_d
    group, tile = call.group + unit // p.round_tiles, call.part + unit % p.round_tiles
    count, first = min(width, p.c.d - tile * width), group * p.c.w_group + tile * width * w_out + begin * w_s
    if group >= p.groups or count <= 0:  # of the last round
        return
    low = high = tap_of(p, phase, 0).weight if taps else 0
    for tap in range(taps):
        low, high = min(low, tap_of(p, phase, tap).weight), max(high, tap_of(p, phase, tap).weight)
    span = high - low + 1  # from the first of the taps in a kernel to the last one
    if kind == F32 and w_out > 1 and span <= _SPAN:
        straight = taps == span and w_out < w_s and width % VECTOR == 0  # in place, as taps follow one another
        together = 1 if straight else max(1, (_SPAN - span) // w_s + 1)  # channels whose kernels are turned as one
        turned, row = _kernels(), 4 * _PITCH
        if straight:
            row = 4 * channels * width * (1 - 2 * (tap_of(p, phase, 0).weight > low))
        for c in range(0, channels, together):
            some, at = min(together, channels - c), call.inputs[1] + 4 * (first + low + c * w_s)
            if straight:
                turned = target + 4 * c * width + max(0, -row) * (taps - 1)
            fetch_kernels(at, max(together, _AHEAD), together, w_s, w_out, span, count)
            for i in range(0, width, VECTOR):
                rows, of_channels = max(0, min(VECTOR, count - i)), at + 4 * min(i, count - 1) * w_out
                transpose_rows(turned + 4 * i, row, of_channels, 4 * w_out, rows, (some - 1) * w_s + span)
            for tap in range(0 if straight else taps):
                place, to = tap_of(p, phase, tap).weight - low, target + 4 * (tap * channels + c) * width
                copy_narrow(to, width, turned + 4 * _PITCH * place, _PITCH * w_s, some, channels - c, width)
        return
    if count < width:
        clear(target, 0, taps * channels * width)
    for c in range(0, channels, _AHEAD):
        some = min(_AHEAD, channels - c)
        for tap in range(taps):
            place = first + c * w_s + tap_of(p, phase, tap).weight
            number = (tap * channels + c) * width
            if kind == F32 and w_out == 1:
                at = call.inputs[1] + 4 * place
                for i in range(_AHEAD, _AHEAD + some):
                    fetch(at + 4 * i * w_s, 4 * count)
                copy_narrow(target + 4 * number, width, at, w_s, some, channels - c, count)
            else:
                for i in range(some):
                    at = place + i * w_s
                    scatter_run(kind, target, number + i * width, 1, call.inputs[1], at, w_out, count)


def _strategy(name: str, gather: Any, *, depthwise: bool = False) -> Any:
    """A stage whose items are some tiles of output channels of one band of one image and group."""

    @compiled(f"gather_item_{name}")
    def work(call, p, item, scratch):
        split, item = item % p.split, item // p.split
        number, item = item % p.round_groups, item // p.round_groups
        group, part = call.group + number, call.part
        if group >= p.groups:
            return
        n, item = item % p.c.batch, item // p.c.batch
        cell = nth(p.bands, item) * p.band
        size = min(p.band, p.all_cells - cell)
        here = min(p.round_tiles, (p.c.d + p.tile - 1) // p.tile - part)
        first, stop = part + split * here // p.split, part + (split + 1) * here // p.split
        if depthwise:
            gather(call, p, n, group, cell, size, scratch)
        else:
            panels = number * p.round_tiles - part
            gather(call, p, call.shared, panels, n, group, cell, size, first, stop, scratch)

    return stage(f"gather_{name}", par.Gather, work)


PACK = stage("gather_pack", par.Gather, _pack)
PACK_PARTS = stage("gather_pack_parts", par.Gather, _pack_parts)
COLUMNS_IN_PLACE = _strategy("columns", gather_columns)
MATRICES = _strategy("matrices", gather_matrices)
PLANES = _strategy("planes", gather_planes)
PIXELS = _strategy("pixels", gather_cells)
DEPTHWISE = _strategy("depthwise", depthwise.gather_depthwise, depthwise=True)
DEPTHWISE_CHANNELS = _strategy("depthwise_channels", depthwise.gather_depthwise_cells, depthwise=True)
DEPTHWISE_TRANSPOSED = _strategy("depthwise_transposed", depthwise.gather_depthwise_transposed, depthwise=True)
FALLBACK = _strategy("fallback", gather_far)
