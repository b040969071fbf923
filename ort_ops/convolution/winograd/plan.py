"""Parameters of `winograd.kernel` and `winograd.weights`, and which correlations they serve. Plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnx_backprop.ort_ops.compiler.llvm import F32
from onnx_backprop.ort_ops.compiler.machine import VECTOR, processors
from onnx_backprop.ort_ops.convolution.problem import Correlation, rounds, shared_limit
from onnx_backprop.ort_ops.convolution.winograd import kernel as at
from onnx_backprop.ort_ops.convolution.winograd import weights as of
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.runtime.stages import Plan
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS

MIN_CHANNELS = 16  # on either side of a group: below, the transforms outweigh what they save
LINE_FLOATS = 8 << 10  # of a source's rows that are transformed for all threads: as much as a first-level cache holds
V_FLOATS = 128 << 10  # of transformed tiles, aimed at: half of a second-level cache
MAX_PARTS = 8  # of a weight gradient
MIN_TILES = 128  # that a sum is fetched and stored for
SUM_FLOATS = 2 << 20  # of the sums of all parts, aimed at
MAX_SUM_FLOATS = 16 << 20
_KERNEL, _ONES = (1, 3, 3), (1, 1, 1)


def suits(c: Correlation) -> bool:
    """Two axes, 3×3, no strides, dilations or channels last, and channels enough."""
    plain = c.kernel == _KERNEL and c.strides == _ONES and c.dilations == _ONES and not c.last
    flat = c.source_length[0] == c.out_length[0] == 1 and c.pads[0] == 0
    if not (plain and flat and min(c.s, c.d) >= MIN_CHANNELS):
        return False
    # of a row of tiles; where it is no pooled block, the sum over taps is used, which cuts rows
    return _lane_bytes(max(c.s, c.d), 1, math.ceil(max(c.source_length[2], c.out_length[2]) / 2)) <= POOL_BYTES


def _pitch(tiles_x: int) -> int:
    """Floats of a row of the source."""
    return 2 * math.ceil(tiles_x / VECTOR) * VECTOR + 2 * VECTOR


def _columns(band: int, tiles_x: int) -> int:
    """Floats of a channel of the transformed tiles."""
    return _odd_lines(math.ceil(band * tiles_x / COLUMNS) * COLUMNS + VECTOR)


def _lane_bytes(ins: int, band: int, tiles_x: int) -> int:
    """Scratch of a thread that computes `band` rows of tiles."""
    transformed = 16 * ins * _columns(band, tiles_x)
    return 4 * (at.LANE_HEAD + (2 * band + 2) * _pitch(tiles_x) + 16 + transformed + 2 * VECTOR)


def _panel(ins: int) -> int:
    """Floats of one of the 16 panels of a tile of weights."""
    return math.ceil((ins * ROWS + at.WIDE) / 16) * 16


@dataclass(frozen=True)
class _Cut:
    """How a sum is cut. `round_rows` is 0 where the weights are shared, else the rows of tiles that are."""

    groups: int  # of a round
    tiles: int  # of output channels, of a round
    round_rows: int
    band: int  # rows of tiles of an item
    lines: int
    columns: int  # floats of a channel of transformed tiles
    units: int
    items: int
    split: int
    shared_bytes: int
    lane_bytes: int


def _cut(c: Correlation, kind: int, outs: int, ins: int, tiles_y: int, tiles_x: int) -> _Cut:
    """Weights are shared unless they need several rounds and sharing the images makes less to transform."""
    rows, tiles, limit = c.batch * tiles_y, math.ceil(outs / ROWS), shared_limit(c, kind)
    of_tile = 4 * 16 * _panel(ins)
    groups, at_once = rounds(c.groups, tiles, of_tile, limit)
    repeats = math.ceil(tiles / at_once)
    images, weights = rows * math.ceil(tiles_x / VECTOR) * VECTOR, tiles * at.WIDE  # for each channel and group

    def image_bytes(count: int) -> int:
        return 4 * 16 * ins * _columns(count, tiles_x)

    row_groups, round_rows = rounds(c.groups, 1, image_bytes(rows), limit)[0], rows
    if image_bytes(rows) > limit:
        spare = 4 * 16 * ins * (COLUMNS + VECTOR + 32)
        row_groups, round_rows = 1, rounds(1, rows, 4 * 16 * ins * tiles_x, limit - spare)[1]
    row_repeats = math.ceil(rows / round_rows)
    images_fit = row_groups * image_bytes(round_rows) + 8 * VECTOR <= limit
    tile_fits = 4 * at.LANE_HEAD + of_tile + 64 + 8 * VECTOR <= POOL_BYTES
    if repeats > 1 and images_fit and tile_fits and row_repeats * weights + images < repeats * images + weights:
        columns, lines = _columns(round_rows, tiles_x), max(1, min(tiles_y, LINE_FLOATS // _pitch(tiles_x)))
        lane = 4 * at.LANE_HEAD + max(of_tile + 64, 4 * (2 * lines + 2) * _pitch(tiles_x)) + 8 * VECTOR
        return _Cut(
            groups=row_groups,
            tiles=tiles,
            round_rows=round_rows,
            band=round_rows,
            lines=lines,
            columns=columns,
            units=row_groups * ins,
            items=row_groups * tiles,
            split=1,
            shared_bytes=row_groups * image_bytes(round_rows) + 8 * VECTOR,
            lane_bytes=lane,
        )
    band = max(1, min(rows, max(COLUMNS, V_FLOATS // (16 * ins)) // tiles_x))
    blocks = math.ceil(rows / band) * groups
    split = 1 if blocks >= 2 * processors() else min(at_once, math.ceil(2 * processors() / blocks))
    return _Cut(
        groups=groups,
        tiles=at_once,
        round_rows=0,
        band=band,
        lines=band,
        columns=_columns(band, tiles_x),
        units=groups * at_once,
        items=blocks * split,
        split=split,
        shared_bytes=groups * at_once * of_tile,
        lane_bytes=_lane_bytes(ins, band, tiles_x),
    )


def plan(c: Correlation, kind: int, *, adjoint: bool, bias: int = 0) -> Plan:
    """The correlation, or its data gradient; inputs 0 and 1 are data and weights, `bias` is an input or 0."""
    data, out = (c.destination, c.source) if adjoint else (c.source, c.destination)
    length, out_length = (c.out_length, c.source_length) if adjoint else (c.source_length, c.out_length)
    outs, ins = (c.s, c.d) if adjoint else (c.d, c.s)
    pads = tuple(2 - p for p in c.pads) if adjoint else c.pads
    _, w_y, w_x = c.w_kernel
    tiles_y, tiles_x = (math.ceil(n / 2) for n in out_length[1:])
    cut = _cut(c, kind, outs, ins, tiles_y, tiles_x)
    parameters = at.Winograd(
        kind=kind, batch=c.batch, groups=c.groups, outs=outs, ins=ins, bias=bias,
        in_n=data.n, in_c=data.c, in_y=data.cells[1], out_n=out.n, out_c=out.c, out_y=out.cells[1],
        length_y=length[1], length_x=length[2], out_length_y=out_length[1], out_length_x=out_length[2],
        pad_y=pads[1], pad_x=pads[2],
        w_first=2 * (w_y + w_x) if adjoint else 0, w_out=c.w_s if adjoint else c.w_d,
        w_in=c.w_d if adjoint else c.w_s, w_group=c.d * c.w_d,
        w_y=-w_y if adjoint else w_y, w_x=-w_x if adjoint else w_x,
        tiles_y=tiles_y, tiles_x=tiles_x, band=cut.band, split=cut.split, panel=_panel(ins), columns=cut.columns,
        pitch=_pitch(tiles_x), round_groups=cut.groups, round_tiles=cut.tiles, round_rows=cut.round_rows,
        lines=cut.lines,
    )  # fmt: skip
    stages, parts = ((at.PACK, cut.units), (at.MULTIPLY, cut.items)), (math.ceil(outs / ROWS), cut.tiles)
    if cut.round_rows:
        stages = (at.TRANSFORM, cut.units), (at.MULTIPLY_IMAGES, cut.items)
        parts = c.batch * tiles_y, cut.round_rows
    return Plan(parameters, stages, cut.shared_bytes, cut.lane_bytes, (c.groups, cut.groups), parts)


@dataclass(frozen=True)
class _Weights:
    """How a weight gradient is cut. `round_channels`: of the source, which is shared; 0 where sums are."""

    columns: int  # the source's channels of a round, in whole tiles
    parts: int
    groups: int  # of a round
    tiles: int  # of the destination's channels, of a round
    split: int
    channels: int  # of the destination, of an item
    band: int  # rows of tiles
    d_columns: int
    turned: int
    items: int
    shared_bytes: int
    lane_bytes: int
    round_channels: int = 0
    source_band: int = 1


def _weights(c: Correlation, kind: int) -> _Weights:
    """Sums are shared unless they need several rounds and the source, some of its channels at least, fits."""
    tiles_y, tiles_x = (math.ceil(n / 2) for n in c.out_length[1:])
    rows, tiles, limit = c.batch * tiles_y, math.ceil(c.d / ROWS), shared_limit(c, kind)
    columns = math.ceil(c.s / COLUMNS) * COLUMNS
    sums = 16 * c.groups * (tiles * ROWS) * columns
    if 4 * sums > limit:
        cut = _source_shared(c, limit, tiles_y, tiles_x)
        if cut is not None:
            return cut
    parts = max(1, min(SUM_FLOATS // sums, MAX_PARTS, rows, limit // (4 * sums)))
    groups, at_once = rounds(c.groups, tiles, 4 * 16 * parts * ROWS * columns, limit)
    split = min(at_once, math.ceil(processors() / (parts * groups)))  # each transforms the source anew
    while True:
        channels = math.ceil(at_once / split) * ROWS
        band = max(MIN_TILES, V_FLOATS * 2 // (16 * (columns + channels))) // tiles_x
        band = max(1, min(math.ceil(rows / parts), band))
        d_columns, turned = _odd_lines(band * tiles_x + VECTOR), 2 * min(band, tiles_y) + 2
        tiles_of_band = 16 * (band * tiles_x * columns + channels * d_columns)
        lane = 4 * (VECTOR * _d_pitch(tiles_x) + turned * _d_pitch(tiles_x) * columns + tiles_of_band + VECTOR)
        if lane <= POOL_BYTES or split == at_once:
            break
        split += 1
    return _Weights(
        columns=columns,
        parts=parts,
        groups=groups,
        tiles=at_once,
        split=split,
        channels=channels,
        band=band,
        d_columns=d_columns,
        turned=turned,
        items=parts * groups * split,
        shared_bytes=4 * 16 * parts * groups * at_once * ROWS * columns,
        lane_bytes=lane,
    )


def _d_pitch(tiles_x: int) -> int:
    """Floats of a row of either image."""
    return 2 * math.ceil((tiles_x + 1) / VECTOR) * VECTOR + VECTOR


def _source_shared(c: Correlation, limit: int, tiles_y: int, tiles_x: int) -> _Weights | None:
    """None where not even a tile of channels fits, or a row of tiles is no pooled block."""
    rows, tiles = c.batch * tiles_y, math.ceil(c.d / ROWS)
    blocks, of_block = math.ceil(c.s / COLUMNS), 4 * 16 * rows * tiles_x * COLUMNS
    if of_block > limit:
        return None
    groups, at_once = rounds(c.groups, blocks, of_block, limit)
    columns = at_once * COLUMNS
    band = max(1, min(rows, V_FLOATS // (16 * ROWS) // tiles_x))
    source_band = max(1, min(math.ceil(rows / (4 * processors())), MIN_TILES // tiles_x))
    d_columns, turned = _odd_lines(band * tiles_x + VECTOR), 2 * min(source_band, tiles_y) + 2
    pitch = _d_pitch(tiles_x)
    own = max(turned * pitch * columns, 9 * VECTOR + 16 * ROWS * (columns + d_columns))
    lane = 4 * (VECTOR * pitch + own + VECTOR)
    if lane > POOL_BYTES:
        return None
    return _Weights(
        columns=columns,
        parts=1,
        groups=groups,
        tiles=tiles,
        split=1,
        channels=ROWS,
        band=band,
        d_columns=d_columns,
        turned=turned,
        items=groups * tiles,
        shared_bytes=groups * at_once * of_block,
        lane_bytes=lane,
        round_channels=columns,
        source_band=source_band,
    )


def suits_weights(c: Correlation) -> bool:
    """The same, sums that are not transformed back too often, and a row of tiles that fits a pooled block."""
    return suits(c) and 16 * c.groups * c.d * c.s <= MAX_SUM_FLOATS and _weights(c, F32).lane_bytes <= POOL_BYTES


def weights_plan(c: Correlation, kind: int) -> Plan:
    """The weight gradient; inputs 0 and 1 are source and destination."""
    cut = _weights(c, kind)
    tiles_y, tiles_x = (math.ceil(n / 2) for n in c.out_length[1:])
    _, w_y, w_x = c.w_kernel
    parameters = of.WinogradWeights(
        kind=kind, batch=c.batch, groups=c.groups, d=c.d, s=c.s,
        s_n=c.source.n, s_c=c.source.c, s_y=c.source.cells[1],
        d_n=c.destination.n, d_c=c.destination.c, d_y=c.destination.cells[1],
        length_y=c.source_length[1], length_x=c.source_length[2],
        out_length_y=c.out_length[1], out_length_x=c.out_length[2], pad_y=c.pads[1], pad_x=c.pads[2],
        w_d=c.w_d, w_s=c.w_s, w_y=w_y, w_x=w_x, tiles_y=tiles_y, tiles_x=tiles_x,
        band=cut.band, parts=cut.parts, split=cut.split, pitch=_d_pitch(tiles_x),
        s_columns=cut.columns, d_columns=cut.d_columns, d_rows=cut.channels, turned_rows=cut.turned,
        u_rows=cut.tiles * ROWS, round_groups=cut.groups, round_tiles=cut.tiles, source_band=cut.source_band,
    )  # fmt: skip
    stages = (of.SUM, cut.items), (of.REDUCE, cut.groups * cut.tiles * ROWS)
    parts = math.ceil(c.d / ROWS), cut.tiles
    if cut.round_channels:
        source_items = cut.groups * math.ceil(c.batch * tiles_y / cut.source_band)
        stages, parts = ((of.TRANSFORM, source_items), (of.MULTIPLY, cut.items)), (c.s, cut.round_channels)
    return Plan(parameters, stages, cut.shared_bytes, cut.lane_bytes, (c.groups, cut.groups), parts)


def _odd_lines(floats: int) -> int:
    """As many floats or more, an odd number of cache lines, so that rows do not compete for one place in the cache."""
    lines = math.ceil(floats / 16)
    return 16 * (lines + 1 - lines % 2)
