"""Parameters of `winograd.kernel` and `winograd.weights` for the correlations that `tiles` serves. Plain Python."""

import math
from dataclasses import replace

from onnx_backprop.ort_ops.compiler.llvm import F32
from onnx_backprop.ort_ops.compiler.machine import VECTOR, matrix_tiles, processors
from onnx_backprop.ort_ops.convolution import block_sizes
from onnx_backprop.ort_ops.convolution.problem import Correlation, images_joined, shared_limit
from onnx_backprop.ort_ops.convolution.winograd import kernel, tiles, weights
from onnx_backprop.ort_ops.convolution.winograd.kernel import column_floats, odd_lines, plane_floats
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.runtime.stages import Plan
from onnx_backprop.ort_ops.runtime.workspace import rounds
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS
from onnx_backprop.ort_ops.vector.matrix_tiles import SIDE


def plan(c: Correlation, kind: int, *, adjoint: bool, bias: int = 0) -> Plan:
    """The correlation, or its data gradient; inputs 0 and 1 are data and weights, `bias` is an input or 0."""
    c = images_joined(c)
    r = tiles.number_tiles(c, kind, tiles.size_of(c.adjoint if adjoint else c), adjoint=adjoint)
    last = sum((n - 1) * step for n, step in zip(c.kernel, c.w_kernel, strict=True))
    c, elements, rows, outs, limit = r.c, r.elements, r.rows, math.ceil(r.c.d / ROWS), shared_limit(c, kind)
    panel = math.ceil((c.kernel[0] * r.ins * ROWS + kernel.WIDE) / 16) * 16
    of_tile = 4 * elements * panel
    groups, at_once = rounds(c.groups, outs, of_tile, limit)
    band = max(1, min(rows, max(tiles.tiles_aimed_at(elements, r.ins) // r.tiles_x - r.reach, r.reach)))
    band = max(range((band + 1) // 2, band + 1), key=lambda n: (n * r.tiles_x / _in_vectors(n * r.tiles_x), n))
    while band > 1 and kernel.thread_scratch(r, band, outs)[1] > POOL_BYTES:
        band -= 1
    bands = math.ceil(rows / band)
    items = c.batch * r.strips * bands * groups
    split = 1 if items >= 2 * processors() else min(at_once, math.ceil(2 * processors() / items))
    share = math.ceil(at_once / split)  # of the tiles of output channels
    offsets, per_thread = kernel.thread_scratch(r, band, share)
    columns = column_floats((band + r.reach) * r.tiles_x)
    parameters = kernel.Winograd(
        **vars(replace(r, lines=r.lines_of(band), plane=r.plane_of(band))), bias=bias, w_first=last if adjoint else 0,
        panel=panel, round_groups=groups, round_tiles=at_once, bands=bands, split=split, offsets=offsets,
        chunk=kernel.chunk(elements, share), columns=columns, element=odd_lines(r.ins * columns),
    )  # fmt: skip
    stages = (kernel.PACK, groups * at_once), (kernel.MULTIPLY, items * split)
    return Plan(parameters, stages, groups * at_once * of_tile, per_thread, (c.groups, groups), (outs, at_once))


def _in_vectors(count: int) -> int:
    return math.ceil(count / VECTOR) * VECTOR


def weights_plan(c: Correlation, kind: int, inputs: tuple[int, int]) -> Plan:
    """The weight gradient; `inputs` are source and destination.

    Sums are shared unless they need several rounds and the source, some of its channels at least, fits.
    """
    c = images_joined(c)
    size, taps = tiles.weights_size_of(c), c.kernel[0]
    r = replace(tiles.number_tiles(c, kind, size), ins=_in_vectors(c.s))
    elements, tiles_x, volumes, rows_of = r.elements, r.tiles_x, c.batch * r.strips, r.rows
    piece, columns = _in_vectors(size * r.run + 2), math.ceil(r.ins / COLUMNS) * COLUMNS
    rows, outs, limit = volumes * rows_of, math.ceil(c.d / ROWS), shared_limit(c, kind)
    p = weights.WinogradWeights(**vars(r), inputs=inputs, pitch=c.dilations[2] * piece, piece=piece)
    sums = elements * taps * c.groups * (outs * ROWS) * columns
    if 4 * sums > limit and volumes == taps == 1:
        other = _source_shared(p, limit)
        if other is not None:
            return other
    worth = min(rows, rows * tiles_x // block_sizes.PART_TILES, block_sizes.SUM_FLOATS // sums, limit // (4 * sums))
    parts = max(1, min(block_sizes.MAX_WINOGRAD_PARTS, worth))
    groups, at_once = rounds(c.groups, outs, 4 * elements * taps * parts * ROWS * columns, limit)
    p = replace(p, parts=parts, s_columns=columns, u_rows=at_once * ROWS, round_groups=groups, round_tiles=at_once)
    split = 1  # the least that fits: bands, and so sums, are the same for any number of processors
    while True:
        d = math.ceil(at_once / split) * ROWS
        band = max(block_sizes.MIN_TILES, block_sizes.TILES_FLOATS * 2 // (elements * (columns + d))) // tiles_x
        band = max(1, min(math.ceil(rows / parts), rows_of, max(band - r.reach, r.reach)))
        s_tiles, d_columns = (band + r.reach) * tiles_x, odd_lines(band * tiles_x + VECTOR)
        p = replace(
            p, band=band, lines=_lines(r.lines_of(band), size, p.pitch * columns),
            plane=plane_floats(size, band * tiles_x), s_panel=s_tiles * COLUMNS, s_element=odd_lines(s_tiles * columns),
            d_columns=d_columns, d_element=odd_lines(d * d_columns),
        )  # fmt: skip
        if weights.sum_scratch(p)[1] <= POOL_BYTES or split == at_once:
            break
        split += 1
    split = max(split, min(at_once, math.ceil(processors() / (parts * groups))))  # each transforms the source anew
    p = replace(p, split=split, d_element=odd_lines(math.ceil(at_once / split) * ROWS * p.d_columns))
    offsets, per_thread = weights.sum_scratch(p)
    stages = (weights.SUM, parts * groups * split), (weights.REDUCE, groups * at_once * ROWS)
    shared = 4 * elements * taps * parts * groups * at_once * ROWS * columns
    return Plan(replace(p, offsets=offsets), stages, shared, per_thread, (c.groups, groups), (outs, at_once))


def _lines(most: int, size: int, row: int) -> int:
    """Rows of tiles of the source that are turned at a time, of `row` floats a row of the image."""
    return max(1, min(most, block_sizes.TURNED_FLOATS // (size * row)))


def _source_shared(p: weights.WinogradWeights, limit: int) -> Plan | None:
    """None where not even a tile of channels fits, or a row of tiles is no pooled block."""
    c, tiles_x, rows = p.c, p.tiles_x, p.rows
    outs, panel = math.ceil(c.d / ROWS), rows * tiles_x * COLUMNS
    tiles_of_channels, of_tile = math.ceil(p.ins / COLUMNS), 4 * p.elements * (panel + 32)
    if of_tile > limit:
        return None
    groups, at_once = rounds(c.groups, tiles_of_channels, of_tile, limit)
    columns = at_once * COLUMNS
    band = max(1, min(rows, block_sizes.TILES_FLOATS // (p.elements * ROWS) // tiles_x))
    source_band = max(1, min(math.ceil(rows / (4 * processors())), block_sizes.MIN_TILES // tiles_x))
    d_columns = odd_lines(band * tiles_x + VECTOR)
    p = replace(
        p, band=band, source_band=source_band, lines=_lines(min(source_band, p.tiles_y), p.size, p.pitch * columns),
        plane=plane_floats(p.size, band * tiles_x), s_columns=columns, s_panel=panel,
        s_element=odd_lines(at_once * panel), d_columns=d_columns, d_element=odd_lines(ROWS * d_columns),
    )  # fmt: skip
    offsets, per_thread = weights.source_scratch(p)
    if per_thread > POOL_BYTES:
        return None
    stages = (weights.TRANSFORM, groups * math.ceil(rows / source_band)), (weights.MULTIPLY, groups * outs)
    shared = groups * at_once * of_tile
    return Plan(replace(p, offsets=offsets), stages, shared, per_thread, (c.groups, groups), (p.ins, columns))


def suits_weights(c: Correlation) -> bool:
    """As `tiles.suits`, sums that are not transformed back too often, and a row of tiles that fits a pooled block."""
    usual = min(c.s, c.d) > SIDE and c.s * c.d <= tiles.MANY_CHANNELS**2 and min(c.out_length[1:]) >= tiles.SMALL_IMAGE
    if matrix_tiles() and usual:
        return False
    few = c.s * c.d <= tiles.FEW_CHANNELS**2 and not tiles.enough(c)
    if few or not tiles.is_served(c) or tiles.sum_floats(c, tiles.weights_size_of(c)) > block_sizes.MAX_SUM_FLOATS:
        return False
    return weights_plan(c, F32, (0, 1)).per_thread <= POOL_BYTES
