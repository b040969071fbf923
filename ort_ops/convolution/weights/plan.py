"""Plans of the weight gradient of a correlation, for `weights.kernel` and the depthwise ones. Plain Python."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from onnx_backprop.ort_ops.compiler.llvm import F32, ITEM_SIZE
from onnx_backprop.ort_ops.compiler.machine import VECTOR, matrix_tiles, processors
from onnx_backprop.ort_ops.compiler.objects import Exported
from onnx_backprop.ort_ops.compiler.records import size as size_of
from onnx_backprop.ort_ops.convolution import block_sizes, problem
from onnx_backprop.ort_ops.convolution import parameters as par
from onnx_backprop.ort_ops.convolution.depthwise import weights as depthwise_weights
from onnx_backprop.ort_ops.convolution.gather.phases import forward_phase, per_axis, shifts
from onnx_backprop.ort_ops.convolution.problem import FUSED_CYCLES, SPLIT_CYCLES, SUM_CYCLES, TILE_CYCLES
from onnx_backprop.ort_ops.convolution.weights import kernel as weights_kernel
from onnx_backprop.ort_ops.convolution.weights import matrices
from onnx_backprop.ort_ops.runtime.scratch import POOL_BYTES
from onnx_backprop.ort_ops.runtime.stages import Plan
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, WORD, band_of, rounds, workspace
from onnx_backprop.ort_ops.vector.gemm_tile import CHUNK, COLUMNS, ROWS, SPARE_ROWS
from onnx_backprop.ort_ops.vector.matrix_tiles import CONFIGURATION, DEPTH, GROUP, SIDE, SUMS

# Nanoseconds of one thread: a product of vectors, a float copied as a column, one of cells apart (by each block
# of rows), a float written along rows, and across
_PRODUCT, _COPY, _COPY_APART, _WRITE, _WRITE_ACROSS = 0.5, 1.0, 4.0, 0.3, 1.0


def _dense_axes(c: problem.Correlation) -> problem.Correlation:
    """A kernel of one cell without padding takes every S-th cell: the others are no part of the image."""
    strides, lengths, cells = list(c.strides), list(c.source_length), list(c.source.cells)
    for axis in range(3):
        if c.kernel[axis] == 1 and c.pads[axis] == 0 and (c.out_length[axis] - 1) * strides[axis] < lengths[axis]:
            cells[axis] *= strides[axis]
            strides[axis], lengths[axis] = 1, c.out_length[axis]
    source = replace(c.source, cells=problem.three(cells, 0))
    return replace(c, strides=problem.three(strides, 1), source_length=problem.three(lengths, 1), source=source)


def _swapped(c: problem.Correlation) -> bool:
    """Whether the source's channels become the columns: for one tap where that is faster, else for fuller lanes.

    A row of the product then is one of the weights; otherwise each of its elements has a line of the cache to itself.
    """

    def lanes(channels: int) -> int:
        return math.ceil(channels / VECTOR) * VECTOR

    if math.prod(c.kernel) > 1:
        return c.s / lanes(c.s) > 1.9 * c.d / lanes(c.d)
    cells = c.batch * math.prod(c.out_length)
    apart = _COPY_APART * max(1.0, c.s * c.d / block_sizes.DIRECT_FLOATS)
    of_source = _COPY if c.last or c.source.cells[2] == 1 else apart

    def cost(rows: int, columns: int, copy: float, write: float) -> float:
        return cells * lanes(columns) * (rows * _PRODUCT / VECTOR + copy) + write * c.s * c.d

    return cost(c.d, c.s, of_source, _WRITE) < cost(c.s, c.d, _COPY, _WRITE_ACROSS)


def weights_plan(c: problem.Correlation, kind: int, inputs: tuple[int, int]) -> Plan:
    """The plan of the gradient with respect to the weights; `inputs` are source and destination."""
    c = problem.images_joined(_dense_axes(c))
    head, taps = _head(c, kind, inputs)
    if not c.depthwise:
        return _in_matrices(c, head, taps) or _product(c, head, taps)
    return _depthwise(c, head, taps)


def _table(taps: Sequence[par.TapRecord]) -> list[int]:
    return [word for tap in taps for word in tap.words()]


def _head(c: problem.Correlation, kind: int, inputs: tuple[int, int]) -> tuple[par.Cells, list[par.TapRecord]]:
    """What every plan states; and the table of taps."""
    taps = [
        par.TapRecord(weight=sum(k * s for k, s in zip(tap.kernel, c.w_kernel, strict=True)), shift=tap.shift)
        for tap in forward_phase(c).taps
    ]
    low, high = taps[0].shift, taps[-1].shift
    return par.Cells(kind=kind, c=c, source=inputs[0], dest=inputs[1], taps=len(taps), low=low, high=high), taps


def _depthwise(c: problem.Correlation, head: par.Cells, taps: list[par.TapRecord]) -> Plan:
    """Channels as lanes: bands are some rows; an item is a part of the bands and a block of channels."""
    count, vectors, in_place = len(taps), math.ceil(c.groups / VECTOR), c.last and head.kind == F32
    reach = [h - lo + 1 for lo, h in zip(head.low, head.high, strict=True)]

    def cells(band: Sequence[int]) -> tuple[int, int]:
        """Of a band, and of the part of the image that it reads."""
        sizes = [(n - 1) * s + r for n, s, r in zip(band, c.strides, reach, strict=True)]
        return math.prod(band), math.prod(min(n, length) for n, length in zip(sizes, c.source_length, strict=True))

    # What a band reads stays in the second-level cache. It decides what is added up first, so it must depend on the
    # shape alone.
    block, rows = min(vectors, block_sizes.MOST_VECTORS) if c.last else 1, (1, *c.out_length[1:])
    most = block_sizes.CELLS_FLOATS // (block * VECTOR)
    band, _ = band_of(rows, lambda band: sum(cells(band)), most, (1, 1, min(VECTOR, rows[2])))
    bands = problem.bands_of(c.out_length, band)
    units = c.batch * math.prod(bands)
    elements = c.batch * c.groups * (math.prod(c.source_length) + math.prod(c.out_length))
    parts = max(1, min(block_sizes.MAX_PARTS, units, elements * ITEM_SIZE[head.kind] // (64 * count * c.groups)))
    wanted = math.ceil(vectors / math.ceil(block_sizes.ITEMS_PER_PROCESSOR * processors() / parts))
    block, limit = min(block, max(wanted, block_sizes.LEAST_VECTORS)), problem.shared_limit(c, head.kind)
    copied = 0 if in_place else sum(cells(band)) * VECTOR
    while block > 1 and (4 * parts * count * block * VECTOR > limit or copied * block > block_sizes.THREAD_FLOATS):
        block = math.ceil(block / 2)
    blocks, of_block = math.ceil(vectors / block), 4 * parts * count * block * VECTOR
    _, at_once = rounds(1, blocks, of_block, limit)
    gradient, source = (0 if in_place else FLOAT * n * block * VECTOR for n in cells(band))
    offsets, per_thread = workspace(par.CellsOffsets, shifts=WORD * count, gradient=gradient, source=source)
    head = replace(
        head, offsets=offsets, band=band, bands=bands, units=units, parts=parts, blocks=blocks, columns=block * VECTOR,
        round_blocks=at_once,
    )  # fmt: skip
    by_column = [taps[t] for x in range(c.kernel[2]) for t in range(x, count, c.kernel[2])]
    stages = (depthwise_weights.WORK, parts * at_once), (depthwise_weights.REDUCE, at_once)
    return Plan(head, stages, at_once * of_block, per_thread, parts=(blocks, at_once), tables=_table(by_column))


def _product(c: problem.Correlation, head: par.Cells, taps: list[par.TapRecord]) -> Plan:
    """Bands are boxes; an item is a block of rows of the product and a part of the cells."""
    swapped, count = _swapped(c), len(taps)
    band, (of_columns, of_channel) = _band(c, head.low, head.high, swapped=swapped)
    if swapped and of_columns > block_sizes.THREAD_FLOATS // 2:
        swapped = False
        band, (of_columns, of_channel) = _band(c, head.low, head.high, swapped=swapped)
    rows, columns = (c.d, c.s) if swapped else (c.s, c.d)
    padded = _padded(columns)
    bands = problem.bands_of(c.out_length, band)
    units = c.batch * math.prod(bands)
    row_lines = rows if swapped else rows * count
    per_row = padded * count if swapped else padded
    tensors = c.batch * c.groups * (c.s * math.prod(c.source_length) + c.d * math.prod(c.out_length))
    weights = c.groups * row_lines * per_row
    worth = tensors * ITEM_SIZE[head.kind] // (64 * weights) if weights else 1
    parts = max(1, min(block_sizes.MAX_PARTS, units, worth))
    head = replace(
        head, band=band, bands=bands, swapped=swapped, units=units, parts=parts, columns=padded,
        dense=[tap.weight for tap in taps] == list(range(count)), turned=0 if c.last else of_columns,
        chunk=CHUNK if count > 1 else max(block_sizes.LEAST_CHUNK, min(CHUNK, c.batch * math.prod(c.out_length) // 8)),
    )  # fmt: skip
    most = max(1, (block_sizes.THREAD_FLOATS - of_columns) // of_channel)  # channels of a block, which copies them
    least = 1 if swapped else min(rows, math.ceil(rows / most))
    lines_of_row = 1 if swapped else count

    def scratch_of(block_rows: int, sums: int) -> tuple[par.CellsOffsets, int]:
        """Of an item of so many channels, and of so many sums if they are not shared."""
        return workspace(
            par.CellsOffsets, sums=FLOAT * sums, rows=WORD * (block_rows * lines_of_row + ROWS),
            table=2 * WORD * band[0] * band[1], columns=FLOAT * of_columns, scalars=FLOAT * block_rows * of_channel,
        )  # fmt: skip

    items, most = block_sizes.ITEMS_PER_PROCESSOR * processors(), min(rows, math.ceil(row_lines / ROWS))
    return _in_blocks(
        head, weights_kernel.WORK, _table(taps), (rows, lines_of_row, per_row), items, (least, most), scratch_of
    )


def _in_blocks(
    head: par.Cells, work: Exported, tables: list[int], sums: problem.Triple, items: int, limits: tuple[int, int],
    scratch_of: Callable[[int, int], tuple[par.CellsOffsets, int]],
) -> Plan:  # fmt: skip
    """The plan of so many items or more, if rows may be cut into so many blocks: the least, the most.

    sums: channels that are rows, rows of each, floats of a row. scratch_of: an item's scratch, of its channels, and of
    its sums if they are not shared.
    """
    c, parts, (rows, lines_of_row, per_row), (least, most) = head.c, head.parts, sums, limits
    row_lines, wanted = rows * lines_of_row, items / parts
    if parts == 1:
        blocks = max(math.ceil(wanted / c.groups), math.ceil(row_lines * per_row / block_sizes.DIRECT_FLOATS))
        blocks = max(1, min(most, blocks), least)
        if head.pitch:  # of whole tiles, where that takes fewer
            blocks = min(range(blocks, blocks // 2, -1), key=lambda n: n * math.ceil(rows / n / SIDE))
        block_rows = math.ceil(rows / blocks)
        lines = block_rows * lines_of_row + SPARE_ROWS
        offsets, per_thread = scratch_of(block_rows, lines * per_row)
        if per_thread <= POOL_BYTES:
            bands, turned = c.groups * head.units, head.turned if blocks > 1 else 0
            turned *= 4 * bands * turned <= problem.shared_limit(c, head.kind)
            head = replace(
                head, offsets=offsets, direct=True, blocks=blocks, rows=lines, round_groups=c.groups,
                round_blocks=blocks, turned=turned,
            )  # fmt: skip
            turning = [(weights_kernel.TURN, bands)] if turned else []
            stages = (*turning, (work, blocks * c.groups))
            return Plan(head, stages, 4 * bands * turned, per_thread, tables=tables)
    head = replace(head, turned=0)
    limit, of_group = problem.shared_limit(c, head.kind), 4 * parts * (row_lines + SPARE_ROWS) * per_row
    groups = min(c.groups, max(1, limit // max(of_group, 1)))  # at a time; where one does not fit, some of its blocks
    blocks = max(1, min(most, math.ceil(wanted / groups) * math.ceil(of_group / limit)), least)
    block_rows = math.ceil(rows / blocks)
    lines = block_rows * lines_of_row + SPARE_ROWS
    groups, at_once = rounds(c.groups, blocks, 4 * parts * lines * per_row, limit)
    channels = math.ceil(at_once * rows / blocks)
    offsets, per_thread = scratch_of(block_rows, 0)
    head = replace(
        head, offsets=offsets, blocks=blocks, rows=channels * lines_of_row + at_once * SPARE_ROWS, round_groups=groups,
        round_blocks=at_once, round_channels=channels,
    )  # fmt: skip
    finish = groups * math.ceil(channels / weights_kernel.TOGETHER)
    stages, of_row = ((work, at_once * parts * groups), (weights_kernel.REDUCE, finish)), 4 * parts * groups * per_row
    return Plan(head, stages, head.rows * of_row, per_thread, (c.groups, groups), (blocks, at_once), tables)


def _planes(c: problem.Correlation) -> tuple[list[problem.Triple], list[tuple[problem.Triple, int]]]:
    """Of every tap in registers of matrices its shift, and the plane that it reads: `Residue`."""
    split, length = shifts(forward_phase(c), c.strides, quotients=True), c.out_length[2]
    three = (c.kernel[2], c.strides, c.dilations[2], c.pads[2]) == (3, (1, 1, 1), 1, 1)
    if three and length == c.source_length[2] <= 64 and length % 2 == 0:
        return [(z, y, 0) for (z, y, _), _ in split], [(of, (0, par.NEXT, par.LAST)[x]) for (_, _, x), of in split]
    first = min(shift[2] for shift, _ in split)
    planes = [(of, (shift[2] - first) % 2) for shift, of in split]
    return [shift for shift, _ in split], [(of, odd << ((of, 0) in planes)) for of, odd in planes]


def _in_matrices(c: problem.Correlation, head: par.Cells, taps: list[par.TapRecord]) -> Plan | None:
    """In registers of whole matrices; None where there are none, or that takes longer or too much memory."""
    if c.last or not matrix_tiles():
        return None
    rows, columns, count = c.d, 16 if c.s <= 16 else math.ceil(c.s / SIDE) * SIDE, len(taps)
    split, planes = _planes(c)
    low, high, kinds = per_axis(min, split), per_axis(max, split), sorted(set(planes))
    taps = [
        replace(tap, shift=shift, residue=kinds.index(plane))
        for tap, shift, plane in zip(taps, split, planes, strict=True)
    ]

    def floats(band: Sequence[int]) -> dict[str, int]:
        """Of a band's parts, and of the rows of 16 channels, of two residues."""
        box, pitch = [n + h - lo for n, h, lo in zip(band, high, low, strict=True)], _pitch(band)
        room = math.ceil(box[1] * pitch / DEPTH) * DEPTH + DEPTH
        pairs = math.ceil((math.prod(box[:2]) * pitch + box[2]) / DEPTH) * DEPTH + 2 * DEPTH
        gradient = band[0] * math.ceil(rows / SIDE) * math.ceil(band[1] * pitch / DEPTH) * GROUP // 4
        return {"gradient": gradient, "source": len(kinds) * 48 * pairs, "scalars": 32 * room}

    def _pitch(band: Sequence[int]) -> int:
        return math.ceil((band[2] + high[2] - low[2]) / 2) * 2

    least = (1, 1, min(c.out_length[2], 64))

    def total(band: Sequence[int]) -> int:
        """Floats, or steps of a plane where these are too many for one sum, in the same measure."""
        steps = band[1] * _pitch(band) * block_sizes.PARTS_FLOATS // block_sizes.MATRIX_CELLS
        return max(sum(floats(band).values()), steps)

    band, _ = band_of(c.out_length, total, block_sizes.PARTS_FLOATS, least)
    bands = problem.bands_of(c.out_length, band)
    arrays, pitch, units = floats(band), _pitch(band), c.batch * math.prod(bands)
    cells, of_part = c.batch * math.prod(c.out_length), 4 * rows * columns * count
    limit = problem.shared_limit(c, head.kind)
    parts = max(1, min(block_sizes.MAX_PARTS, units, cells // block_sizes.PART_CELLS, limit // of_part))
    parts = 1 << parts.bit_length() - 1  # so that as many threads end together
    head = replace(
        head, low=low, high=high, band=band, bands=bands, swapped=True, units=units, parts=parts, columns=columns,
        dense=[tap.weight for tap in taps] == list(range(count)), pitch=pitch, planes=len(kinds),
        room=arrays["scalars"] // 32, pairs=arrays["source"] // (48 * len(kinds)),
        plane_table=par.TAPS_AT + 8 * size_of(par.TapRecord) * count,
    )  # fmt: skip

    def scratch_of(_rows: int, sums: int) -> tuple[par.CellsOffsets, int]:
        return workspace(
            par.CellsOffsets, sums=FLOAT * sums, table=2 * WORD * band[0], tile=SUMS, configuration=CONFIGURATION,
            **{name: FLOAT * n for name, n in arrays.items()},
        )  # fmt: skip

    tables = _table(taps) + [word for of, odd in kinds for word in par.Residue(of=of, odd=odd).words()]
    blocks = 1, math.ceil(rows / SIDE)
    plan = _in_blocks(head, matrices.WORK, tables, (rows, 1, columns * count), processors(), blocks, scratch_of)
    fused = cells * count * min(c.s * math.ceil(c.d / VECTOR), c.d * math.ceil(c.s / VECTOR)) * VECTOR / COLUMNS
    planes = math.ceil(band[1] * pitch / DEPTH) * DEPTH
    padded = units * band[0] * planes
    sums = units * math.ceil(band[0] / max(1, block_sizes.MATRIX_CELLS // planes))
    tiles = math.ceil(count * columns / SIDE) * math.ceil(rows / SIDE)
    # whatever the processors
    copies = 1 if parts > 1 else math.ceil(rows * columns * count / block_sizes.DIRECT_FLOATS)
    channels = rows + min(copies, blocks[1]) * len({of for of, _ in kinds}) * columns
    split_numbers = units * math.prod(band[:2]) * pitch * channels
    cycles = tiles * (TILE_CYCLES * padded / DEPTH + SUM_CYCLES * sums) + SPLIT_CYCLES * split_numbers
    return plan if plan.per_thread <= POOL_BYTES and cycles <= FUSED_CYCLES * fused else None


def _padded(columns: int) -> int:
    vectors = math.ceil(columns / VECTOR)
    return (vectors + (vectors >= 8 and vectors % 2 == 0)) * VECTOR


def _band(
    c: problem.Correlation, low: problem.Triple, high: problem.Triple, *, swapped: bool
) -> tuple[problem.Triple, tuple[int, int]]:
    """A box of destination cells, and how many floats the copies have at most: of the columns, of a channel of rows."""

    def floats(band: Sequence[int]) -> tuple[int, int]:
        cells = math.prod(band)
        box = math.prod((b - 1) * s + 1 + h - lo for b, s, lo, h in zip(band, c.strides, low, high, strict=True))
        return (box * copied(c.s), cells + 32) if swapped else (cells * copied(c.d), box + 32)

    def copied(channels: int) -> int:
        """Of a cell: in tiles, or as they lie together."""
        padded = _padded(channels)
        return padded if c.last or padded <= COLUMNS else math.ceil(channels / COLUMNS) * COLUMNS

    rows, columns = (c.d, _padded(c.s)) if swapped else (c.s, _padded(c.d))
    tiled = math.prod(c.kernel) == 1 and not c.last  # columns, one tile after the other
    if math.prod(c.kernel) == 1:  # no more rows are a block's, whose sums are not shared
        rows = min(rows, max(ROWS, block_sizes.DIRECT_FLOATS // columns))
    cells = max(block_sizes.LEAST_CELLS, c.batch * math.prod(c.out_length) // block_sizes.MAX_PARTS)

    def total(band: Sequence[int]) -> int:
        of_columns, of_channel = floats(band)
        if tiled and of_columns <= block_sizes.THREAD_FLOATS // 2:
            of_columns = min(of_columns, COLUMNS * math.prod(band))
        return max(of_columns + rows * of_channel, math.prod(band) * block_sizes.BAND_FLOATS // cells)

    band, size = band_of(c.out_length, total, block_sizes.BAND_FLOATS, (1, 1, min(c.out_length[2], 64)))
    if size > block_sizes.THREAD_FLOATS:
        band, _ = band_of(c.out_length, total, block_sizes.THREAD_FLOATS, (1, 1, 1))
    return band, floats(band)
