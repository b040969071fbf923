"""Parameters of `winograd.kernel` and `winograd.weights`, and which correlations they serve. Plain Python."""

import math
from dataclasses import replace

from onnx_backprop.ort_ops.compiler.llvm import F32
from onnx_backprop.ort_ops.compiler.machine import VECTOR, processors
from onnx_backprop.ort_ops.convolution.problem import Correlation, images_joined, rounds, shared_limit, three
from onnx_backprop.ort_ops.convolution.winograd import kernel, weights
from onnx_backprop.ort_ops.convolution.winograd.rows import TileRows
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.runtime.stages import Plan
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS

MIN_CHANNELS = 16  # on either side of a group: below, the transforms outweigh what they save
# Below so many tiles, times the geometric mean of the channels, sums over taps are faster: transformed weights and rows
# of tiles that do not fill registers cost more than is saved (docs/notes/large_weights.md).
MIN_WORK = 14_000
# A batch of so many images, to the last but one, counts as one of TYPICAL: then what is computed of an image has the
# same bits in all of them, as where ranks divide a batch.
FEW, MANY, TYPICAL = 4, 32, 8
FEW_CHANNELS = 64  # up to which that holds for weight gradients, which transform tiles alone
LINE_FLOATS = 8 << 10  # of a source's rows that are transformed for all threads: as much as a first-level cache holds
V_FLOATS = 128 << 10  # of transformed tiles, aimed at: half of a second-level cache
PRODUCT_FLOATS = 128 << 10  # of products that are kept, aimed at
MAX_PARTS = 8  # of a weight gradient
PART_TILES = 48  # of a part at least
MIN_TILES = 64  # that a sum is fetched and stored for
TURNED_FLOATS = 64 << 10  # of the source's rows that are turned at a time, aimed at
SUM_FLOATS = 2 << 20  # of the sums of all parts, aimed at
MAX_SUM_FLOATS = 16 << 20
# Tiles of 4×4 cells are used for images of so many cells along either axis, and for weight gradients of fewer, of which
# there are at least so many tiles of 2×2 for one of them: at the end of a row, cells of tiles are not needed.
LARGE_IMAGE, LARGE_IMAGE_OF_WEIGHTS = 12, 7
SMALL_TILES = 3.2
SLICES = 6  # of a strip's source that are aimed at, so that those which two bands transform are few


STRIDED_SHARE = 0.6  # of the sum's products that tiles with a stride of 2 may have: 3×3 has 0.69, and gains nothing


def suits(c: Correlation) -> bool:
    """Two or three axes, along the last two 3×3, or 3×3 or 4×4 with stride 2, and channels and tiles enough."""
    return _is_served(c) and _work(c) >= MIN_WORK


def _work(c: Correlation) -> float:
    batch = TYPICAL if FEW <= c.batch < MANY else c.batch
    images = batch * c.out_length[0] * math.prod(c.dilations[1:])
    return images * math.prod(_tiles(c, 2)) * math.sqrt(c.s * c.d)


def _is_served(c: Correlation) -> bool:
    if c.last or min(c.s, c.d) < MIN_CHANNELS:
        return False
    # of a row of tiles; where it is no pooled block, the sum over taps is used, which cuts rows
    if c.strides == (1, 1, 1):
        return c.kernel[1:] == (3, 3) and _row_fits(c, 2)
    sums, products = math.prod(c.kernel[1:]) * math.prod(c.out_length[1:]), 4 * 25 * math.prod(_tiles(c, 4))
    halved = c.strides == (1, 2, 2) and c.dilations[1:] == (1, 1) and c.kernel[1:] in {(3, 3), (4, 4)}
    return halved and products <= STRIDED_SHARE * sums and _row_fits(c, 4)


def _row_fits(c: Correlation, size: int) -> bool:
    """Whether a thread's scratch for a row of tiles, of the correlation or of its adjoint, is a pooled block."""
    longer, most = tuple(map(max, c.source_length, c.out_length)), max(c.s, c.d)
    r = _rows(replace(c, out_length=longer, s=most, d=most), F32, size)
    return _thread_bytes(r, 1, math.prod(c.strides) * math.ceil(most / ROWS)) <= POOL_BYTES


def _size(c: Correlation) -> int:
    """Cells of a tile along either axis; not told from the batch, as whether tiles are used is."""
    return 4 if _is_halved(c) or (_large_tiles_pay(c, LARGE_IMAGE) and _row_fits(c, 4)) else 2


def _weights_size(c: Correlation) -> int:
    large = _large_tiles_pay(c, LARGE_IMAGE_OF_WEIGHTS) and _sums(c, 4) <= MAX_SUM_FLOATS
    return 4 if _is_halved(c) or large else 2


def _is_halved(c: Correlation) -> bool:
    """Whether it has a stride of 2."""
    return c.strides[2] == 2


def _large_tiles_pay(c: Correlation, least: int) -> bool:
    small, large = (math.prod(_tiles(c, size)) for size in (2, 4))
    return min(_lengths(c)) >= least and small >= SMALL_TILES * large


def _sums(c: Correlation, size: int) -> int:
    """Floats of a weight gradient before it is transformed back."""
    return _elements(c, size) * c.kernel[0] * c.groups * c.d * c.s * math.prod(c.strides)


def _lengths(c: Correlation) -> tuple[int, int]:
    """Of the longest phase's image."""
    y, x = (math.ceil(n / d) for n, d in zip(c.out_length[1:], c.dilations[1:], strict=True))
    return y, x


def _tiles(c: Correlation, size: int) -> tuple[int, int]:
    """Along both axes of a phase's image."""
    y, x = (math.ceil(n / size) for n in _lengths(c))
    return y, x


def _rows(c: Correlation, kind: int, size: int, *, adjoint: bool = False) -> TileRows:
    """How the tiles are numbered of a correlation or, as a correlation of its own, of its data gradient."""
    stride, dilations, kernel_taps = c.strides[2], c.dilations, _taps(c)
    strided, shift = three([s * d for s, d in zip(c.strides, dilations, strict=True)], 1), (0, 0, 0)
    # With a stride of 2 every kernel has four taps: a zero in front of three, or behind, so that a gradient's tiles
    # begin where its tensor does.
    spare = [0, *(kernel_taps * stride - n for n in c.kernel[1:])]
    front = [n and pad % 2 for n, pad in zip(spare, c.pads, strict=True)]
    ahead = [pad + n for pad, n in zip(c.pads, front, strict=True)]
    if adjoint:
        extents = [(n - 1) * d for n, d in zip((c.kernel[0], kernel_taps, kernel_taps), dilations, strict=True)]
        shift = three([n % s for n, s in zip(ahead, c.strides, strict=True)], 0)
        ahead = [extent - n // s for extent, n, s in zip(extents, ahead, c.strides, strict=True)]
        front = [n - f for n, f in zip(spare, front, strict=True)]
        c = replace(c.adjoint, w_kernel=three([-n for n in c.w_kernel], 0))
    steps = (dilations, strided) if adjoint else (strided, dilations)
    reached = zip(c.out_length, shift, steps[1], strict=True)
    _, tiles_y, run = (math.ceil(math.ceil((n + before) / step) / size) for n, before, step in reached)
    elements, ins = _elements(c, size), c.s * (1 if adjoint else stride**2)
    strips, taps = 1, c.kernel[0]
    if taps > 1:
        aimed_at = _tiles_aimed_at(elements, ins) // (SLICES * dilations[1] * dilations[2] * run)
        strips = math.ceil(tiles_y / max(1, aimed_at))
        tiles_y = math.ceil(tiles_y / strips)
    tap = dilations[0] * dilations[1] * tiles_y
    return TileRows(
        kind=kind, c=replace(c, pads=three(ahead, 0)), size=size, taps=kernel_taps, elements=elements, ins=ins,
        front=three(front, 0), source_step=steps[0], out_step=steps[1], shift=shift,
        source_residues=1 if adjoint else stride, out_residues=stride if adjoint else 1,
        strips=strips, tiles_y=tiles_y, tiles_x=dilations[2] * run, run=run, tap=tap, reach=(taps - 1) * tap,
    )  # fmt: skip


def _taps(c: Correlation) -> int:
    """Of a tile's kernel along either axis."""
    return 2 if _is_halved(c) else 3


def _tiles_aimed_at(elements: int, ins: int) -> int:
    """Whose transforms stay in a second-level cache."""
    return max(COLUMNS, V_FLOATS // (elements * ins))


def _elements(c: Correlation, size: int) -> int:
    """Products per tile."""
    return (size + _taps(c) - 1) ** 2


def _plane(size: int, tiles: int) -> int:
    """Floats of a plane of so many tiles, and of the cells that a register reads behind them."""
    return _odd_lines(size * (tiles + VECTOR) + 2)


def _columns(band: int, tiles_x: int) -> int:
    """Floats of a channel of the transformed tiles."""
    return _odd_lines(math.ceil(band * tiles_x / COLUMNS) * COLUMNS + VECTOR)


def _matrices(ins: int, band: int, tiles_x: int) -> dict[str, int]:
    """How transformed tiles lie."""
    columns = _columns(band, tiles_x)
    return {"columns": columns, "element": _odd_lines(ins * columns)}


def _thread_bytes(r: TileRows, band: int, tiles: int) -> int:
    """Scratch of a thread that computes `band` rows of tiles, for so many tiles of output channels."""
    transformed = r.elements * _odd_lines(r.ins * _columns(band + r.reach, r.tiles_x))
    rows = 2 * r.size * _plane(r.size, (_lines_of(r, band) + 1) * r.tiles_x)
    kept = kernel.products(r.elements, _chunk(r.elements, tiles))
    return 4 * (kernel.thread_head(r.size, r.c.kernel[0]) + rows + 16 + transformed + kept + 2 * VECTOR)


def _lines_of(r: TileRows, band: int) -> int:
    return min(band + r.reach, r.tiles_y)


def _chunk(elements: int, tiles: int) -> int:
    """Tiles of output channels, of so many, whose products are kept at a time."""
    return max(1, min(tiles, PRODUCT_FLOATS // kernel.products(elements, 1)))


def _panel(ins: int) -> int:
    """Floats of one of the panels of a tile of weights, for so many taps of channels."""
    return math.ceil((ins * ROWS + kernel.WIDE) / 16) * 16


def plan(c: Correlation, kind: int, *, adjoint: bool, bias: int = 0) -> Plan:
    """The correlation, or its data gradient; inputs 0 and 1 are data and weights, `bias` is an input or 0.

    Weights are shared unless they need several rounds and sharing the images makes less to transform.
    """
    c = images_joined(c)
    size, taps = _size(c.adjoint if adjoint else c), c.kernel[0]
    r = _rows(c, kind, size, adjoint=adjoint)
    last = sum((n - 1) * step for n, step in zip(c.kernel, c.w_kernel, strict=True))
    c, elements = r.c, r.elements
    volumes, rows = c.batch * r.strips, c.out_length[0] * c.dilations[1] * r.tiles_y
    tiles, limit = r.out_residues**2 * math.ceil(c.d / ROWS), shared_limit(c, kind)
    of_tile = 4 * elements * _panel(taps * r.ins)
    groups, at_once = rounds(c.groups, tiles, of_tile, limit)
    parameters = kernel.Winograd(
        **vars(r), bias=bias, w_first=last if adjoint else 0, head=kernel.thread_head(size, taps),
        chunk=_chunk(elements, tiles), panel=_panel(taps * r.ins), round_groups=groups, round_tiles=at_once,
    )  # fmt: skip
    if at_once < tiles and volumes == taps == 1:
        other = _images_shared(parameters, limit, math.ceil(tiles / at_once))
        if other is not None:
            return other
    band = max(1, min(rows, max(_tiles_aimed_at(elements, r.ins) // r.tiles_x - r.reach, r.reach)))
    band = max(range((band + 1) // 2, band + 1), key=lambda n: (n * r.tiles_x / _in_vectors(n * r.tiles_x), n))
    while band > 1 and _thread_bytes(r, band, tiles) > POOL_BYTES:
        band -= 1
    bands = math.ceil(rows / band)
    blocks = volumes * bands * groups
    split = 1 if blocks >= 2 * processors() else min(at_once, math.ceil(2 * processors() / blocks))
    parameters = replace(
        parameters, bands=bands, lines=_lines_of(r, band), plane=_plane(size, (_lines_of(r, band) + 1) * r.tiles_x),
        split=split, **_matrices(r.ins, band + r.reach, r.tiles_x),
    )  # fmt: skip
    stages = (kernel.PACK, groups * at_once), (kernel.MULTIPLY, blocks * split)
    per_thread = _thread_bytes(r, band, tiles)
    return Plan(parameters, stages, groups * at_once * of_tile, per_thread, (c.groups, groups), (tiles, at_once))


def _in_vectors(tiles: int) -> int:
    return math.ceil(tiles / VECTOR) * VECTOR


def _images_shared(p: kernel.Winograd, limit: int, repeats: int) -> Plan | None:
    """None where that does not fit, or costs more than transforming all images so many times."""
    c, tiles_x = p.c, p.tiles_x
    rows, of_tile = c.out_length[0] * c.dilations[1] * p.tiles_y, 4 * p.elements * p.panel
    tiles = p.out_residues**2 * math.ceil(c.d / ROWS)
    images, weights = rows * math.ceil(tiles_x / VECTOR) * VECTOR, tiles * kernel.WIDE  # for each channel and group

    def image_bytes(count: int) -> int:
        return 4 * p.elements * _odd_lines(p.ins * _columns(count, tiles_x))

    groups, at_once = rounds(c.groups, 1, image_bytes(rows), limit)[0], rows
    if image_bytes(rows) > limit:
        spare = 4 * p.elements * (p.ins * (COLUMNS + VECTOR + 32) + 32)
        groups, at_once = 1, rounds(1, rows, 4 * p.elements * p.ins * tiles_x, limit - spare)[1]
    shared = groups * image_bytes(at_once) + 8 * VECTOR
    of_tile += 4 * kernel.products(p.elements, 1)
    tile_fits = 4 * p.head + of_tile + 64 + 8 * VECTOR <= POOL_BYTES
    pays = math.ceil(rows / at_once) * weights + images < repeats * images + weights
    if not (shared <= limit and tile_fits and pays):
        return None
    lines = max(1, min(p.tiles_y, LINE_FLOATS // (2 * p.size**2 * tiles_x)))
    plane = _plane(p.size, (lines + 1) * tiles_x)
    parameters = replace(
        p, chunk=1, lines=lines, plane=plane, round_groups=groups, round_tiles=tiles, round_rows=at_once,
        **_matrices(p.ins, at_once, tiles_x),
    )  # fmt: skip
    per_thread = 4 * p.head + max(of_tile + 64, 8 * p.size * plane) + 8 * VECTOR
    stages = (kernel.TRANSFORM, groups * p.ins), (kernel.MULTIPLY_IMAGES, groups * tiles)
    return Plan(parameters, stages, shared, per_thread, (c.groups, groups), (rows, at_once))


def weights_plan(c: Correlation, kind: int, inputs: tuple[int, int]) -> Plan:
    """The weight gradient; `inputs` are source and destination.

    Sums are shared unless they need several rounds and the source, some of its channels at least, fits.
    """
    c = images_joined(c)
    size, taps, channels = _weights_size(c), c.kernel[0], math.ceil(c.s / VECTOR) * VECTOR
    r = _rows(c, kind, size)
    c, elements, ins = r.c, r.elements, r.source_residues**2 * channels
    piece, tiles_x = math.ceil((size * r.run + r.taps - 1) / VECTOR) * VECTOR, r.tiles_x
    volumes, rows_of = c.batch * r.strips, c.out_length[0] * c.dilations[1] * r.tiles_y
    rows, tiles, limit = volumes * rows_of, math.ceil(c.d / ROWS), shared_limit(c, kind)
    columns, pitch = math.ceil(ins / COLUMNS) * COLUMNS, c.dilations[2] * piece
    parameters = weights.WinogradWeights(**vars(r) | {"ins": ins}, inputs=inputs, channels=channels)
    sums = elements * taps * c.groups * (tiles * ROWS) * columns
    if 4 * sums > limit and volumes == taps == 1:
        other = _source_shared(replace(parameters, pitch=pitch, piece=piece), limit)
        if other is not None:
            return other
    parts = max(1, min(SUM_FLOATS // sums, MAX_PARTS, rows, rows * tiles_x // PART_TILES, limit // (4 * sums)))
    groups, at_once = rounds(c.groups, tiles, 4 * elements * taps * parts * ROWS * columns, limit)
    split = min(at_once, math.ceil(processors() / (parts * groups)))  # each transforms the source anew
    while True:
        outs = math.ceil(at_once / split) * ROWS
        band = max(MIN_TILES, V_FLOATS * 2 // (elements * (columns + outs))) // tiles_x
        band = max(1, min(math.ceil(rows / parts), rows_of, max(band - r.reach, r.reach)))
        d_columns, lines = _odd_lines(band * tiles_x + VECTOR), _lines(_lines_of(r, band), size, pitch * columns)
        s_tiles = (band + r.reach) * tiles_x
        s_element, d_element = _odd_lines(s_tiles * columns), _odd_lines(outs * d_columns)
        tiles_of_band = elements * (s_element + d_element)
        plane = _plane(size, band * tiles_x)
        head = max(VECTOR * pitch, size * plane)
        per_thread = 4 * (head + (size * lines + r.taps - 1) * pitch * columns + tiles_of_band + VECTOR)
        if per_thread <= POOL_BYTES or split == at_once:
            break
        split += 1
    parameters = replace(
        parameters, pitch=pitch, piece=piece, plane=plane, head=head, band=band, lines=lines, parts=parts, split=split,
        s_columns=columns, s_panel=s_tiles * COLUMNS, s_element=s_element, d_columns=d_columns, d_element=d_element,
        u_rows=at_once * ROWS, round_groups=groups, round_tiles=at_once,
    )  # fmt: skip
    stages = (weights.SUM, parts * groups * split), (weights.REDUCE, groups * at_once * ROWS)
    shared = 4 * elements * taps * parts * groups * at_once * ROWS * columns
    return Plan(parameters, stages, shared, per_thread, (c.groups, groups), (tiles, at_once))


def _lines(most: int, size: int, row: int) -> int:
    """Rows of tiles of the source that are turned at a time, of `row` floats a row of the image."""
    return max(1, min(most, TURNED_FLOATS // (size * row)))


def _source_shared(p: weights.WinogradWeights, limit: int) -> Plan | None:
    """None where not even a tile of channels fits, or a row of tiles is no pooled block."""
    c, tiles_x, pitch = p.c, p.tiles_x, p.pitch
    rows, tiles = c.out_length[0] * c.dilations[1] * p.tiles_y, math.ceil(c.d / ROWS)
    panel = rows * tiles_x * COLUMNS
    blocks, of_block = math.ceil(p.ins / COLUMNS), 4 * p.elements * (panel + 32)
    if of_block > limit:
        return None
    groups, at_once = rounds(c.groups, blocks, of_block, limit)
    columns = at_once * COLUMNS
    band = max(1, min(rows, V_FLOATS // (p.elements * ROWS) // tiles_x))
    source_band = max(1, min(math.ceil(rows / (4 * processors())), MIN_TILES // tiles_x))
    d_columns, lines = _odd_lines(band * tiles_x + VECTOR), _lines(min(source_band, p.tiles_y), p.size, pitch * columns)
    d_element = _odd_lines(ROWS * d_columns)
    own = max((p.size * lines + p.taps - 1) * pitch * columns, 9 * VECTOR + p.elements * (ROWS * columns + d_element))
    plane = _plane(p.size, band * tiles_x)
    head = max(VECTOR * pitch, p.size * plane)
    per_thread = 4 * (head + own + VECTOR)
    if per_thread > POOL_BYTES:
        return None
    parameters = replace(
        p, plane=plane, head=head, band=band, lines=lines, s_columns=columns, s_panel=panel,
        s_element=_odd_lines(at_once * panel), d_columns=d_columns, d_element=d_element, source_band=source_band,
    )  # fmt: skip
    stages = (weights.TRANSFORM, groups * math.ceil(rows / source_band)), (weights.MULTIPLY, groups * tiles)
    return Plan(parameters, stages, groups * at_once * of_block, per_thread, (c.groups, groups), (p.ins, columns))


def suits_weights(c: Correlation) -> bool:
    """The same, sums that are not transformed back too often, and a row of tiles that fits a pooled block."""
    few = c.s * c.d <= FEW_CHANNELS**2 and _work(c) < MIN_WORK
    if few or not _is_served(c) or _sums(c, _weights_size(c)) > MAX_SUM_FLOATS:
        return False
    return weights_plan(c, F32, (0, 1)).per_thread <= POOL_BYTES


def _odd_lines(floats: int) -> int:
    """As many floats or more, an odd number of cache lines, so that rows do not compete for one place in the cache."""
    lines = math.ceil(floats / 16)
    return 16 * (lines + 1 - lines % 2)
