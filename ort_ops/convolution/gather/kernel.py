"""Sums over the taps of a kernel, compiled: the data gradient of a convolution, and a correlation with a stride.

    out[n, m, q·S' + r] = Σ_{c, t} w[m, c, t] · in[n, c, q·S + shift(t)]

for every phase r. A correlation has one phase and S' = 1; the data gradient has S = 1 and one phase for every residue
of the source index modulo the stride S', each with the taps that reach it (`convolution.problem`). No image is
unrolled: a band of cells q, with all its phases, is computed from a float32 copy of the cells it reads, with zeros
around.

The product has cells as columns (`gather.planes`) or output channels as columns (`gather.pixels`); the weights are
packed once per call in the order in which its tiles read them. Where they are large beside the images, a round packs
some of them and computes the output channels they are for. One channel per group on either side makes no product
(`depthwise.data`). Sums that reach too far for all that have loops of their own (`gather.fallback`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import types

from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.depthwise.data import gather_depthwise
from onnx_backprop.ort_ops.convolution.depthwise.data_channels import gather_depthwise_cells
from onnx_backprop.ort_ops.convolution.depthwise.data_transposed import gather_depthwise_turned
from onnx_backprop.ort_ops.convolution.gather.fallback import gather_far
from onnx_backprop.ort_ops.convolution.gather.panels import gather_panels
from onnx_backprop.ort_ops.convolution.gather.pixels import gather_cells
from onnx_backprop.ort_ops.convolution.gather.planes import gather_planes
from onnx_backprop.ort_ops.runtime.bridge import keep
from onnx_backprop.ort_ops.runtime.call import (
    CALL_INPUTS,
    CALL_PARAMETERS,
    CALL_RUNTIME,
    acquire,
    no_memory,
    parallel,
    release,
)
from onnx_backprop.ort_ops.runtime.compile import compiled, exported, inner
from onnx_backprop.ort_ops.runtime.jobs import (
    JOB_CALL,
    JOB_GROUP,
    JOB_PART,
    JOB_SHARED,
    begin,
    begin_round,
    new_job,
    work_off,
    worker,
)
from onnx_backprop.ort_ops.runtime.llvm import load_i64
from onnx_backprop.ort_ops.vector.boxes import load3
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS
from onnx_backprop.ort_ops.vector.rows import clear, scatter_run


@inner
def _tiles(p):
    """Tiles of output channels, and how many channels one has."""
    width = COLUMNS if load_i64(p, par.CELLS) else ROWS
    return (load_i64(p, par.OUTS) + width - 1) // width, width


@inner
def _pack(job, unit):
    """One tile of the packed weights: for every tap and channel `width` output channels, zeros beyond the last."""
    call = load_i64(job, JOB_CALL)
    p = load_i64(call, CALL_PARAMETERS)
    phase = p + 8 * (load_i64(p, par.PHASE_TABLE) + par.PHASE_WORDS * (load_i64(p, par.PHASES) - 1))
    while load_i64(phase, par.FIRST_UNIT) > unit:
        phase -= 8 * par.PHASE_WORDS
    tiles, width = _tiles(p)
    unit -= load_i64(phase, par.FIRST_UNIT)
    group = load_i64(job, JOB_GROUP) + unit // load_i64(p, par.ROUND_TILES)
    tile = load_i64(job, JOB_PART) + unit % load_i64(p, par.ROUND_TILES)
    if group >= load_i64(p, par.GROUPS) or tile >= tiles:  # of the last round
        return
    source = load_i64(call, CALL_INPUTS + load_i64(p, par.WEIGHTS))
    kind, channels, taps = load_i64(p, par.KIND), load_i64(p, par.INS), load_i64(phase, par.TAPS)
    w_out, w_in = load_i64(p, par.W_OUT), load_i64(p, par.W_IN)
    target = load_i64(job, JOB_SHARED) + 4 * (load_i64(phase, par.PACK_AT) + unit * taps * channels * width)
    count = min(width, load_i64(p, par.OUTS) - tile * width)
    first = group * load_i64(p, par.W_GROUP) + tile * width * w_out
    table = p + 8 * load_i64(phase, par.TAP_TABLE)
    if count < width:
        clear(target, 0, taps * channels * width)
    for c in range(channels):
        for tap in range(taps):
            start = first + c * w_in + load_i64(table, par.TAP_WORDS * tap + par.TAP_WEIGHT)
            scatter_run(kind, target, (tap * channels + c) * width, 1, source, start, w_out, count)


def _item(name: str, gather: Any, *, packs: bool, tiled: bool) -> Any:
    """An item of a strategy: some tiles of output channels of one band of one image and group."""

    @compiled(f"conv_gather_item_{name}")
    def work(job, item, scratch):
        call = load_i64(job, JOB_CALL)
        p = load_i64(call, CALL_PARAMETERS)
        splits, groups, batch = load_i64(p, par.SPLIT), load_i64(p, par.ROUND_GROUPS), load_i64(p, par.BATCH)
        split, item = item % splits, item // splits
        number, item = item % groups, item // groups
        group, part = load_i64(job, JOB_GROUP) + number, load_i64(job, JOB_PART)
        if group >= load_i64(p, par.GROUPS):
            return
        n, item = item % batch, item // batch
        _, bands_y, bands_x = load3(p, par.BANDS_3)
        band, total = load3(p, par.BAND_3), load3(p, par.ALL_CELLS_3)
        cell = (item // (bands_x * bands_y) * band[0], item // bands_x % bands_y * band[1], item % bands_x * band[2])
        size = (min(band[0], total[0] - cell[0]), min(band[1], total[1] - cell[1]), min(band[2], total[2] - cell[2]))
        tiles, _ = _tiles(p)
        here = min(load_i64(p, par.ROUND_TILES), tiles - part)
        first, stop = part + split * here // splits, part + (split + 1) * here // splits
        packed, panel = load_i64(job, JOB_SHARED), number * load_i64(p, par.ROUND_TILES) - part
        if packs:
            gather(call, p, packed, panel, n, group, cell, size, first, stop, scratch)
        elif tiled:
            gather(call, p, n, group, cell, size, first, stop, scratch)
        else:
            gather(call, p, n, group, cell, size, scratch)

    return work


def _strategy(name: str, gather: Any, *, packs: bool = False, tiled: bool = False) -> Any:
    work_on = worker(f"conv_gather_{name}", _item(name, gather, packs=packs, tiled=tiled), par.ITEMS, par.LANE_BYTES)

    @exported(types.void(types.int64, types.int64))
    def work(job, lane):
        work_on(job, lane)

    return work


@inner
def _run(call):
    p, runtime = load_i64(call, CALL_PARAMETERS), load_i64(call, CALL_RUNTIME)
    job, size = new_job(), load_i64(p, par.PACK_BYTES)
    if size == 0:
        begin(job, call, 0)
        return work_off(job, load_i64(p, par.WORKER), load_i64(p, par.ITEMS))
    packed = acquire(runtime, size)
    if packed == 0:
        return no_memory(call)
    begin(job, call, packed)
    status, (tiles, _) = 0, _tiles(p)
    for group in range(0, load_i64(p, par.GROUPS), load_i64(p, par.ROUND_GROUPS)):
        for tile in range(0, tiles, load_i64(p, par.ROUND_TILES)):
            if status == 0:
                begin_round(job, group, tile)
                status = parallel(call, load_i64(p, par.PACKER), job, load_i64(p, par.UNITS))
            if status == 0:
                status = work_off(job, load_i64(p, par.WORKER), load_i64(p, par.ITEMS))
    release(runtime, packed, size)
    return status


def _build() -> tuple[Any, dict[str, Any], Any]:
    @exported(types.void(types.int64, types.int64))
    def pack(job, unit):
        _pack(job, unit)

    @exported(types.int64(types.int64))
    def run(call):
        return _run(call)

    strategies = {
        "planes": _strategy("planes", gather_planes, packs=True),
        "panels": _strategy("panels", gather_panels, packs=True),
        "pixels": _strategy("pixels", gather_cells, packs=True),
        "depthwise": _strategy("depthwise", gather_depthwise),
        "depthwise channels": _strategy("depthwise_channels", gather_depthwise_cells),
        "depthwise transposed": _strategy("depthwise_transposed", gather_depthwise_turned),
        "fallback": _strategy("fallback", gather_far, tiled=True),
    }
    return pack, strategies, run


@cache
def functions() -> tuple[Any, dict[str, Any], Any]:
    """(pack, work by the names of strategies, run), compiled when first used."""
    return keep(_build())
