"""Parameters of `winograd.kernel` and `winograd.weights`, and which correlations they serve. Plain Python."""

import math
from dataclasses import replace

from onnx_backprop.ort_ops.compiler.llvm import F32
from onnx_backprop.ort_ops.compiler.machine import VECTOR, processors
from onnx_backprop.ort_ops.convolution.problem import Correlation, rounds, shared_limit
from onnx_backprop.ort_ops.convolution.winograd import kernel, weights
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.runtime.stages import Plan
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS

MIN_CHANNELS = 16  # on either side of a group: below, the transforms outweigh what they save
# Below so many tiles, times the geometric mean of the channels, sums over taps are faster: transformed weights and rows
# of tiles that do not fill registers cost more than is saved (docs/performance.md).
MIN_WORK = 14_000
# A batch of so many images, to the last but one, counts as one of TYPICAL: then what is computed of an image has the
# same bits in all of them, as where ranks divide a batch.
FEW, MANY, TYPICAL = 4, 32, 8
FEW_CHANNELS = 64  # up to which that holds for weight gradients, which transform tiles alone
LINE_FLOATS = 8 << 10  # of a source's rows that are transformed for all threads: as much as a first-level cache holds
V_FLOATS = 128 << 10  # of transformed tiles, aimed at: half of a second-level cache
PRODUCT_FLOATS = 128 << 10  # of products that are kept, aimed at
MAX_PARTS = 8  # of a weight gradient
MIN_TILES = 64  # that a sum is fetched and stored for
TURNED_FLOATS = 64 << 10  # of the source's rows that are turned at a time, aimed at
SUM_FLOATS = 2 << 20  # of the sums of all parts, aimed at
MAX_SUM_FLOATS = 16 << 20
# Tiles of 4×4 cells are used for images of so many cells along either axis, and for weight gradients of fewer, of which
# there are at least so many tiles of 2×2 for one of them: at the end of a row, cells of tiles are not needed.
LARGE_IMAGE, LARGE_IMAGE_OF_WEIGHTS = 12, 7
SMALL_TILES = 3.2
_KERNEL, _ONES = (1, 3, 3), (1, 1, 1)


def suits(c: Correlation) -> bool:
    """Two axes, 3×3, no strides, dilations or channels last, and channels and tiles enough."""
    return _is_served(c) and _work(c) >= MIN_WORK


def _work(c: Correlation) -> float:
    batch = TYPICAL if FEW <= c.batch < MANY else c.batch
    return batch * math.prod(math.ceil(n / 2) for n in c.out_length) * math.sqrt(c.s * c.d)


def _is_served(c: Correlation) -> bool:
    plain = c.kernel == _KERNEL and c.strides == _ONES and c.dilations == _ONES and not c.last
    flat = c.source_length[0] == c.out_length[0] == 1 and c.pads[0] == 0
    if not (plain and flat and min(c.s, c.d) >= MIN_CHANNELS):
        return False
    # of a row of tiles; where it is no pooled block, the sum over taps is used, which cuts rows
    return _row_fits(c, 2)


def _row_fits(c: Correlation, size: int) -> bool:
    """Whether a thread's scratch for a row of tiles, of the correlation or of its adjoint, is a pooled block."""
    tiles_x = math.ceil(max(c.source_length[2], c.out_length[2]) / size)
    most = max(c.s, c.d)
    return _thread_bytes(most, math.ceil(most / ROWS), 1, tiles_x, size) <= POOL_BYTES


def _size(c: Correlation) -> int:
    """Cells of a tile along either axis; not told from the batch, as whether tiles are used is."""
    return 4 if _large_tiles_pay(c, LARGE_IMAGE) and _row_fits(c, 4) else 2


def _weights_size(c: Correlation) -> int:
    return 4 if _large_tiles_pay(c, LARGE_IMAGE_OF_WEIGHTS) and _sums(c, 4) <= MAX_SUM_FLOATS else 2


def _large_tiles_pay(c: Correlation, least: int) -> bool:
    small, large = (math.prod(_tiles(c, size)) for size in (2, 4))
    return min(c.out_length[1:]) >= least and small >= SMALL_TILES * large


def _sums(c: Correlation, size: int) -> int:
    """Floats of a weight gradient before it is transformed back."""
    return _elements(size) * c.groups * c.d * c.s


def _tiles(c: Correlation, size: int) -> tuple[int, int]:
    """Along both axes of an image."""
    y, x = (math.ceil(n / size) for n in c.out_length[1:])
    return y, x


def _elements(size: int) -> int:
    """Products per tile."""
    return (size + 2) ** 2


def _pitch(tiles_x: int, size: int) -> int:
    """Floats of a row of the source."""
    return size * math.ceil(tiles_x / VECTOR) * VECTOR + 2 * VECTOR


def _columns(band: int, tiles_x: int) -> int:
    """Floats of a channel of the transformed tiles."""
    return _odd_lines(math.ceil(band * tiles_x / COLUMNS) * COLUMNS + VECTOR)


def _matrices(ins: int, band: int, tiles_x: int) -> dict[str, int]:
    """How transformed tiles lie."""
    columns = _columns(band, tiles_x)
    return {"columns": columns, "element": _odd_lines(ins * columns)}


def _thread_bytes(ins: int, tiles: int, band: int, tiles_x: int, size: int) -> int:
    """Scratch of a thread that computes `band` rows of tiles, for so many tiles of output channels."""
    transformed = _elements(size) * _odd_lines(ins * _columns(band, tiles_x))
    rows = (size * band + 2) * _pitch(tiles_x, size)
    kept = kernel.products(_elements(size), _chunk(size, tiles))
    return 4 * (kernel.thread_head(size) + rows + 16 + transformed + kept + 2 * VECTOR)


def _chunk(size: int, tiles: int) -> int:
    """Tiles of output channels, of so many, whose products are kept at a time."""
    return max(1, min(tiles, PRODUCT_FLOATS // kernel.products(_elements(size), 1)))


def _panel(ins: int) -> int:
    """Floats of one of the panels of a tile of weights."""
    return math.ceil((ins * ROWS + kernel.WIDE) / 16) * 16


def plan(c: Correlation, kind: int, *, adjoint: bool, bias: int = 0) -> Plan:
    """The correlation, or its data gradient; inputs 0 and 1 are data and weights, `bias` is an input or 0.

    Weights are shared unless they need several rounds and sharing the images makes less to transform.
    """
    first = 0
    if adjoint:
        z, y, x = (2 - pad for pad in c.pads)
        _, w_y, w_x = c.w_kernel
        c, first = replace(c.adjoint, pads=(z, y, x), w_kernel=(0, -w_y, -w_x)), 2 * (w_y + w_x)
    size = _size(c)
    elements, (tiles_y, tiles_x) = _elements(size), _tiles(c, size)
    rows, tiles, limit = c.batch * tiles_y, math.ceil(c.d / ROWS), shared_limit(c, kind)
    of_tile = 4 * elements * _panel(c.s)
    groups, at_once = rounds(c.groups, tiles, of_tile, limit)
    parameters = kernel.Winograd(
        kind=kind, c=c, bias=bias, w_first=first, size=size, elements=elements, head=kernel.thread_head(size),
        chunk=_chunk(size, tiles), tiles_y=tiles_y, tiles_x=tiles_x, panel=_panel(c.s), pitch=_pitch(tiles_x, size),
        round_groups=groups, round_tiles=at_once,
    )  # fmt: skip
    if at_once < tiles:
        other = _images_shared(parameters, limit, math.ceil(tiles / at_once))
        if other is not None:
            return other
    band = max(1, min(rows, max(COLUMNS, V_FLOATS // (elements * c.s)) // tiles_x))
    blocks = math.ceil(rows / band) * groups
    split = 1 if blocks >= 2 * processors() else min(at_once, math.ceil(2 * processors() / blocks))
    parameters = replace(parameters, band=band, lines=band, split=split, **_matrices(c.s, band, tiles_x))
    stages = (kernel.PACK, groups * at_once), (kernel.MULTIPLY, blocks * split)
    per_thread = _thread_bytes(c.s, tiles, band, tiles_x, size)
    return Plan(parameters, stages, groups * at_once * of_tile, per_thread, (c.groups, groups), (tiles, at_once))


def _images_shared(p: kernel.Winograd, limit: int, repeats: int) -> Plan | None:
    """None where that does not fit, or costs more than transforming all images so many times."""
    c, tiles_y, tiles_x = p.c, p.tiles_y, p.tiles_x
    rows, tiles, of_tile = c.batch * tiles_y, math.ceil(c.d / ROWS), 4 * p.elements * p.panel
    images, weights = rows * math.ceil(tiles_x / VECTOR) * VECTOR, tiles * kernel.WIDE  # for each channel and group

    def image_bytes(count: int) -> int:
        return 4 * p.elements * _odd_lines(c.s * _columns(count, tiles_x))

    groups, at_once = rounds(c.groups, 1, image_bytes(rows), limit)[0], rows
    if image_bytes(rows) > limit:
        spare = 4 * p.elements * (c.s * (COLUMNS + VECTOR + 32) + 32)
        groups, at_once = 1, rounds(1, rows, 4 * p.elements * c.s * tiles_x, limit - spare)[1]
    shared = groups * image_bytes(at_once) + 8 * VECTOR
    of_tile += 4 * kernel.products(p.elements, 1)
    tile_fits = 4 * p.head + of_tile + 64 + 8 * VECTOR <= POOL_BYTES
    pays = math.ceil(rows / at_once) * weights + images < repeats * images + weights
    if not (shared <= limit and tile_fits and pays):
        return None
    lines = max(1, min(tiles_y, LINE_FLOATS // p.pitch))
    parameters = replace(
        p, chunk=1, band=at_once, lines=lines, round_groups=groups, round_tiles=tiles, round_rows=at_once,
        **_matrices(c.s, at_once, tiles_x),
    )  # fmt: skip
    per_thread = 4 * p.head + max(of_tile + 64, 4 * (p.size * lines + 2) * p.pitch) + 8 * VECTOR
    stages = (kernel.TRANSFORM, groups * c.s), (kernel.MULTIPLY_IMAGES, groups * tiles)
    return Plan(parameters, stages, shared, per_thread, (c.groups, groups), (rows, at_once))


def weights_plan(c: Correlation, kind: int) -> Plan:
    """The weight gradient; inputs 0 and 1 are source and destination.

    Sums are shared unless they need several rounds and the source, some of its channels at least, fits.
    """
    size = _weights_size(c)
    elements, (tiles_y, tiles_x) = _elements(size), _tiles(c, size)
    rows, tiles, limit = c.batch * tiles_y, math.ceil(c.d / ROWS), shared_limit(c, kind)
    columns, pitch = math.ceil(c.s / COLUMNS) * COLUMNS, _d_pitch(tiles_x, size)
    parameters = weights.WinogradWeights(
        kind=kind, c=c, size=size, elements=elements, tiles_y=tiles_y, tiles_x=tiles_x, pitch=pitch
    )
    sums = elements * c.groups * (tiles * ROWS) * columns
    if 4 * sums > limit:
        other = _source_shared(parameters, limit)
        if other is not None:
            return other
    parts = max(1, min(SUM_FLOATS // sums, MAX_PARTS, rows, limit // (4 * sums)))
    groups, at_once = rounds(c.groups, tiles, 4 * elements * parts * ROWS * columns, limit)
    split = min(at_once, math.ceil(processors() / (parts * groups)))  # each transforms the source anew
    while True:
        channels = math.ceil(at_once / split) * ROWS
        band = max(MIN_TILES, V_FLOATS * 2 // (elements * (columns + channels))) // tiles_x
        band = max(1, min(math.ceil(rows / parts), band))
        d_columns, lines = _odd_lines(band * tiles_x + VECTOR), _lines(min(band, tiles_y), size, pitch * columns)
        s_element, d_element = _odd_lines(band * tiles_x * columns), _odd_lines(channels * d_columns)
        tiles_of_band = elements * (s_element + d_element)
        per_thread = 4 * (VECTOR * pitch + (size * lines + 2) * pitch * columns + tiles_of_band + VECTOR)
        if per_thread <= POOL_BYTES or split == at_once:
            break
        split += 1
    parameters = replace(
        parameters, band=band, parts=parts, split=split, s_columns=columns, s_panel=band * tiles_x * COLUMNS,
        s_element=s_element, d_columns=d_columns, d_element=d_element, lines=lines, u_rows=at_once * ROWS,
        round_groups=groups, round_tiles=at_once,
    )  # fmt: skip
    stages = (weights.SUM, parts * groups * split), (weights.REDUCE, groups * at_once * ROWS)
    shared = 4 * elements * parts * groups * at_once * ROWS * columns
    return Plan(parameters, stages, shared, per_thread, (c.groups, groups), (tiles, at_once))


def _lines(most: int, size: int, row: int) -> int:
    """Rows of tiles of the source that are turned at a time, of `row` floats a row of the image."""
    return max(1, min(most, TURNED_FLOATS // (size * row)))


def _d_pitch(tiles_x: int, size: int) -> int:
    """Floats of a row of either image."""
    return size * math.ceil((tiles_x + 1) / VECTOR) * VECTOR + VECTOR


def _source_shared(p: weights.WinogradWeights, limit: int) -> Plan | None:
    """None where not even a tile of channels fits, or a row of tiles is no pooled block."""
    c, tiles_x, pitch = p.c, p.tiles_x, p.pitch
    rows, tiles = c.batch * p.tiles_y, math.ceil(c.d / ROWS)
    panel = rows * tiles_x * COLUMNS
    blocks, of_block = math.ceil(c.s / COLUMNS), 4 * p.elements * (panel + 32)
    if of_block > limit:
        return None
    groups, at_once = rounds(c.groups, blocks, of_block, limit)
    columns = at_once * COLUMNS
    band = max(1, min(rows, V_FLOATS // (p.elements * ROWS) // tiles_x))
    source_band = max(1, min(math.ceil(rows / (4 * processors())), MIN_TILES // tiles_x))
    d_columns, lines = _odd_lines(band * tiles_x + VECTOR), _lines(min(source_band, p.tiles_y), p.size, pitch * columns)
    d_element = _odd_lines(ROWS * d_columns)
    own = max((p.size * lines + 2) * pitch * columns, 9 * VECTOR + p.elements * (ROWS * columns + d_element))
    per_thread = 4 * (VECTOR * pitch + own + VECTOR)
    if per_thread > POOL_BYTES:
        return None
    parameters = replace(
        p, band=band, s_columns=columns, s_panel=panel, s_element=_odd_lines(at_once * panel), d_columns=d_columns,
        d_element=d_element, lines=lines, source_band=source_band,
    )  # fmt: skip
    stages = (weights.TRANSFORM, groups * math.ceil(rows / source_band)), (weights.MULTIPLY, groups * tiles)
    return Plan(parameters, stages, groups * at_once * of_block, per_thread, (c.groups, groups), (c.s, columns))


def suits_weights(c: Correlation) -> bool:
    """The same, sums that are not transformed back too often, and a row of tiles that fits a pooled block."""
    few = c.s * c.d <= FEW_CHANNELS**2 and _work(c) < MIN_WORK
    return not few and _is_served(c) and _sums(c, 2) <= MAX_SUM_FLOATS and weights_plan(c, F32).per_thread <= POOL_BYTES


def _odd_lines(floats: int) -> int:
    """As many floats or more, an odd number of cache lines, so that rows do not compete for one place in the cache."""
    lines = math.ceil(floats / 16)
    return 16 * (lines + 1 - lines % 2)
