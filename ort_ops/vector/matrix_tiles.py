"""Products of float32 in the registers that hold whole matrices (AMX): c = Σ_k a·b, 32 rows by 32 columns at a time.

The registers multiply bfloat16 and add in float32. x = high + middle + low, three bfloat16, is x to its last bit. Of
the nine products of such parts six are summed; the others lie below 2^-25 of the whole. So a sum rounds as one of
float32 does, and takes a third of the time of fused multiply-adds.

Parts lie as the registers take them, a group for every DEPTH steps of k: of each part two tiles of 1 KiB, which are 16
rows of 16 pairs of steps of a, or 16 pairs of steps of 16 columns of b. Infinite numbers give NaN; parts below 2^-126
count as 0. Arguments are int64: addresses, steps in bytes, and counts, which may be more than there is room for, or
less than 0.
"""

from functools import partial
from itertools import islice

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import I8, choice, intrinsic, routine, store_i64
from onnx_backprop.ort_ops.compiler.values import INT
from onnx_backprop.ort_ops.vector.emit import BYTES, I32, I64, LANES, MASK, VEC, VECTOR, Block, Value, blocks, carry
from onnx_backprop.ort_ops.vector.registers import transposed

SIDE = 32  # rows and columns of a product
DEPTH = 32  # steps of k in a group
_TILE = 1024
_PART = 2 * _TILE
GROUP = 3 * _PART  # bytes
SUMS = 4 * SIDE * SIDE
CONFIGURATION = 64
_LINE = 64
_AHEAD = 3  # groups
UNITS = 8  # of a group, each a row of a tile of every part, that are split at a time
MOST_SHARES = 2
_HIGH, _MIDDLE, _LOW = range(3)
SPLIT_ROWS, SPLIT_PAIRS, MIRRORED = 1, 2, 3
TURNED, STREAMED = 1, 2
# each a load of one operand and products: the smallest first, and of each pair but one what the registers hold already
_ORDER = ((_LOW, _HIGH), (_MIDDLE, _HIGH), (_MIDDLE, _MIDDLE), (_HIGH, _MIDDLE), (_HIGH, _LOW), (_HIGH, _HIGH))


def _whole(number: int) -> Value:
    return ir.Constant(LANES, [number] * VECTOR)


def _parts(b: Block, x: Value) -> list[Value]:
    """High, middle and low, as bits of float32 of which the upper half counts."""
    parts = []
    for _ in range(2):
        bits = b.and_(b.add(b.bitcast(x, LANES), _whole(0x8000)), _whole(0xFFFF0000))
        parts.append(bits)
        x = b.fsub(x, b.bitcast(bits, VEC))
    return [*parts, b.bitcast(x, LANES)]


def _along(b: Block, x: Value, y: Value) -> Value:
    """The upper halves of x, then those of y."""
    halves = ir.VectorType(ir.IntType(16), 2 * VECTOR)
    odd = ir.Constant(ir.VectorType(I32, 2 * VECTOR), list(range(1, 4 * VECTOR, 2)))
    return b.bitcast(b.shuffle_vector(b.bitcast(x, halves), b.bitcast(y, halves), odd), LANES)


def _across(b: Block, x: Value, y: Value) -> Value:
    """In each lane the upper half of x, and above it that of y."""
    return b.or_(b.lshr(x, _whole(16)), b.and_(y, _whole(0xFFFF0000)))


def _put_unit(b: Block, target: Value, lines: list[Value], *, pairs: bool, part: Value) -> None:
    """Two vectors as a row of a tile of each part, `part` bytes apart."""
    for n, (x, y) in enumerate(zip(*(_parts(b, line) for line in lines), strict=True)):
        bits = _across(b, x, y) if pairs else _along(b, x, y)
        b.put(b.bitcast(bits, VEC), b.add(target, b.mul(part, I64(n))))


def _split(function: ir.Function, *, pairs: bool, turned: bool = False) -> None:
    """turned: what `rows` has as rows of tiles, as columns."""
    target, row_bytes, part_bytes, source, step, rows, length, ahead = function.args
    entry, whole, part = blocks(function, "entry whole part")
    most_rows, most_length = (DEPTH, VECTOR) if pairs else (VECTOR, DEPTH)
    fits = entry.and_(entry.icmp_signed(">=", rows, I64(most_rows)), entry.icmp_signed(">=", length, I64(most_length)))
    entry.cbranch(fits, whole.block, part.block)
    for b in (whole, part):
        masks = [part.below(length), part.below(part.sub(length, I64(VECTOR)))] if b is part else []
        line = partial(_line, b, source, step, rows, masks, ahead)
        if turned:
            halves = (transposed(b, [line(i, half) for i in range(VECTOR)]) for half in range(2))
            units = (half[i : i + 2] for half in halves for i in range(0, VECTOR, 2))
        else:
            units = ([line(*((2 * i + j, 0) if pairs else (i, j))) for j in range(2)] for i in range(VECTOR))
        for i, lines in enumerate(units):
            _put_unit(b, b.add(target, b.mul(row_bytes, I64(i))), lines, pairs=pairs or turned, part=part_bytes)
        b.ret_void()


def _line(
    b: Block, source: Value, step: Value, rows: Value, masks: list[Value], ahead: Value, row: int, offset: int
) -> Value:
    """A vector of a row; masks: where it is not whole."""
    place = b.add(b.add(source, b.mul(step, I64(row))), I64(BYTES * offset))
    if not masks:
        b.prefetch(b.add(place, ahead), level=2)
        return b.vector(place)
    # even a load without lanes looks its address up: never one far away
    within = b.icmp_signed("<", I64(row), rows)
    nothing = ir.Constant(MASK, [0] * VECTOR)
    return b.masked(b.select(within, place, source), b.select(within, masks[offset], nothing))


@routine(partial(_split, pairs=False))
def split_rows(target, row, part, source, step, rows, length, ahead):
    """A tile of each part of 16 rows of DEPTH numbers, `step` bytes apart: a row holds the pairs of a row.

    row, part: bytes from row to row of a tile, and to the next part. What lies `ahead` bytes further on is fetched.
    """


@routine(partial(_split, pairs=True))
def split_pairs(target, row, part, source, step, rows, length, ahead):
    """As `split_rows`, of DEPTH rows of 16 numbers: a row of a tile holds the columns of two rows.

    What lies `ahead` bytes further on is fetched.
    """


@routine(partial(_split, pairs=False, turned=True))
def split_turned(target, row, part, source, step, rows, length, ahead):
    """As `split_rows`, turned: a row of a tile holds the same pair of all 16 rows."""


def _tile_function(b: Block, name: str, *arguments: Value, to: ir.Type | None = None) -> Value:
    kinds = [argument.type for argument in arguments]
    return b.call(b.library(f"llvm.x86.{name}", to or ir.VoidType(), *kinds), list(arguments))


def _write(b: Block, sums: Value, row: Value, side: int = 2) -> None:
    for tile in range(4):
        lies = b.add(sums, b.add(b.mul(row, I64(16 * (tile // side))), I64(_LINE * (tile % side))))
        _tile_function(b, "tilestored64", I8(tile), b.pointer(lies, I8), row)


def _spare(entry: Block) -> Value:
    """Room for a tile on the stack."""
    tile = entry.alloca(ir.ArrayType(I64, _TILE // 8))
    tile.align = _LINE  # pyright: ignore[reportAttributeAccessIssue]
    return entry.ptrtoint(tile, I64)


def _relieve(b: Block, spare: Value) -> None:
    """Store a tile that nobody needs: a store behind more than 132 products without any takes 270 ns."""
    _tile_function(b, "tilestored64", I8(7), b.pointer(spare, I8), I64(_LINE))


def _multiply(
    function: ir.Function, *, mirrored: bool = False, pairs: bool | None = None, count: int = UNITS, side: bool = False
) -> None:
    """pairs: how `count` units are split meanwhile; None: none is. side: as for `multiply_columns`."""
    sums, sums_row, left, right, groups, target, source, step, second, further, fetched, again = function.args
    entry, first_time, group, write, store, leave = blocks(function, "entry first_time group write store leave")
    spare = _spare(entry)
    for n in range(2 * SIDE if side else 0):  # the sum takes longer than it takes to fetch what it is written to
        line = entry.add(entry.mul(sums_row, I64(n // 2)), I64(n % 2 * _LINE))
        entry.prefetch(entry.add(sums, line), writing=True)
    is_first = entry.icmp_signed("==", again, I64(0))
    for tile in range(4):
        _tile_function(first_time, "tilezero", I8(tile))
    first_time.branch(group.block)
    done, a, b, to, at, ahead = (group.phi(I64) for _ in range(6))
    held, units = {}, iter(range(count if pairs is not None else 0))
    for order in _ORDER:
        for first, place, part in zip((4, 6), (a, b), reversed(order) if mirrored else order, strict=True):
            if held.get(first) != part:
                held[first] = part
                for n in range(2):
                    lies = group.pointer(group.add(place, I64(part * _PART + n * _TILE)), I8)
                    _tile_function(group, "tileloadd64", I8(first + n), lies, I64(_LINE))
        for row in range(2):
            for column in range(2):
                _tile_function(group, "tdpbf16ps", I8(2 * row + column), I8(4 + row), I8(6 + column))
        if order == _ORDER[3]:
            _relieve(group, spare)
        for i in islice(units, -(-count // len(_ORDER))):  # as many as are on their way at a time
            row, half = divmod(i, 2) if pairs or side else (i, 0)  # what is adjacent in memory together
            skipped = group.add(group.mul(step, I64(row)), I64(half * _LINE * (1 if pairs else 2)))
            lines = []
            for n in range(2):
                line = group.add(skipped, group.mul(second, I64(n)))
                group.prefetch(group.add(ahead, line), level=2)
                lines.append(group.vector(group.add(at, line)))
            _put_unit(group, group.add(to, I64(row * _LINE + half * _TILE)), lines, pairs=bool(pairs), part=I64(_PART))
    following = group.add(done, I64(1))
    steps = [(done, I64(0), following), (a, left, group.add(a, I64(GROUP))), (b, right, group.add(b, I64(GROUP)))]
    steps += [(to, target, group.add(to, I64(GROUP))), (at, source, group.add(at, further))]
    first, near = fetched, group.add(ahead, further)
    if pairs and not side:  # lines of a column, few of which a cache has room for: one after the other, shortly before
        lies = entry.add(source, entry.mul(further, I64(_AHEAD)))
        first = entry.select(entry.icmp_signed(">", groups, I64(_AHEAD)), lies, fetched)
        near = group.select(group.icmp_signed("==", group.add(following, I64(_AHEAD)), groups), fetched, near)
    steps.append((ahead, first, near))
    entry.cbranch(is_first, first_time.block, group.block)
    carry(steps, entry, group)
    for phi, first, _ in steps:
        phi.add_incoming(first, first_time.block)
    group.cbranch(group.icmp_signed("<", following, groups), group.block, write.block)
    write.cbranch(write.icmp_signed("!=", sums, I64(0)), store.block, leave.block)
    _write(store, sums, sums_row)
    store.branch(leave.block)
    leave.ret_void()


@routine(
    choice(
        "multiply",
        {
            mirrored + split: partial(_multiply, mirrored=bool(mirrored), pairs=pairs)
            for mirrored in (0, MIRRORED)
            for split, pairs in ((0, None), (SPLIT_ROWS, False), (SPLIT_PAIRS, True))
        },
    )
)
def multiply(kind, sums, sums_row, left, right, groups, target, source, step, second, further, fetched, again):
    """sums (SIDE, SIDE) = Σ of left · right over so many groups, 1 or more; between `take_tiles` and `leave_tiles`.

    sums_row: bytes from row to row. sums may be 0, and is not written then. again: the last call's sum is part of it.

    kind: 0, SPLIT_ROWS or SPLIT_PAIRS, and MIRRORED, with which left and right may change places: sums are then turned,
    and have the same bits. Meanwhile UNITS units of every group at `source` become rows of tiles at `target`, as by
    `split_rows` and `split_pairs`, and those at `fetched` come into the second-level cache. A unit is two vectors that
    are `second` bytes apart; rows of units lie `step` bytes apart, two of pairs in each, and those of the next group
    `further` bytes further on. Multiplications wait for each other alone: splitting takes next to no time of its own.
    """


@routine(
    choice(
        "multiply_columns",
        {
            0: partial(_multiply, side=True),
            **{
                2 * shares + pairs: partial(_multiply, pairs=bool(pairs), count=SIDE // shares, side=True)
                for pairs in (0, 1)
                for shares in (1, MOST_SHARES)
            },
        },
    )
)
def multiply_columns(kind, sums, sums_row, left, right, groups, target, source, step, second, further, fetched, again):
    """`multiply`, not mirrored, where what is split is SIDE columns of right.

    kind: 0, or twice the number of calls, 1 or MOST_SHARES, that share the units, and 1 for pairs that are two rows of
    numbers, 0 for those along a row. Rows of units have two each, of 16 columns and the next 16.
    """


def _sum_segments(function: ir.Function, *, tall: bool = False) -> None:
    sums, sums_row, table, segments, groups, *rest = function.args
    operands = rest[:5], rest[5:]
    entry, segment, group, further, leave = blocks(function, "entry segment group further leave")
    spare = _spare(entry)
    for tile in range(4):
        _tile_function(entry, "tilezero", I8(tile))
    entry.branch(segment.block)
    number = segment.phi(I64)
    place = segment.add(table, segment.shl(number, I64(4)))
    starts = [segment.add(o[0], segment.word(segment.add(place, I64(8 * n)))) for n, o in enumerate(operands)]
    segment.branch(group.block)
    done, *at = (group.phi(I64) for _ in range(3))
    held = {}
    for part, of_right in _ORDER if tall else ():
        lies = group.add(at[1], group.mul(operands[1][3], I64(of_right)))
        if held.get(4) != of_right:
            held[4] = of_right
            _tile_function(group, "tileloadd64", I8(4), group.pointer(lies, I8), operands[1][1])
        lies = group.add(at[0], group.mul(operands[0][3], I64(part)))
        for n in range(4):  # as many sums as hide how long a product takes; loads take less time
            _tile_function(group, "tileloadd64", I8(5 + n % 3), group.pointer(lies, I8), operands[0][1])
            _tile_function(group, "tdpbf16ps", I8(n), I8(5 + n % 3), I8(4))
            lies = group.add(lies, operands[0][2])
    if tall:
        _relieve(group, spare)
    # whose right operands, which may cross lines, change less often
    for order in () if tall else (pair[::-1] for pair in _ORDER):
        for first, start, part, (_, row, tile, parts, _) in zip((4, 6), at, order, operands, strict=True):
            if held.get(first) != part:
                held[first] = part
                lies = group.add(start, group.mul(parts, I64(part)))
                for n in range(2):
                    _tile_function(group, "tileloadd64", I8(first + n), group.pointer(lies, I8), row)
                    lies = group.add(lies, tile)
        for row in range(2):
            for column in range(2):
                _tile_function(group, "tdpbf16ps", I8(2 * row + column), I8(4 + row), I8(6 + column))
        if order == _ORDER[3][::-1]:
            _relieve(group, spare)
    following, next_segment = group.add(done, I64(1)), further.add(number, I64(1))
    steps = [(a, start, group.add(a, o[4])) for a, start, o in zip(at, starts, operands, strict=True)]
    carry([(done, I64(0), following), *steps], segment, group)
    group.cbranch(group.icmp_signed("<", following, groups), group.block, further.block)
    carry([(number, I64(0), next_segment)], entry, further)
    further.cbranch(further.icmp_signed("<", next_segment, segments), segment.block, leave.block)
    _write(leave, sums, sums_row, 1 if tall else 2)
    leave.ret_void()


@routine(_sum_segments)
def sum_segments(
    sums, sums_row, table, segments, groups,
    left, left_row, left_tile, left_part, left_step,
    right, right_row, right_tile, right_part, right_step,
):  # fmt: skip
    """sums (SIDE, SIDE) = Σ over segments, 1 or more, and so many groups of each, of left · right.

    table: where each segment starts in left and right. Of these: the address, and bytes from row to row of a tile, to
    the second tile, to the next part and to the next group. Between `take_tiles` and `leave_tiles`.
    """


@routine(partial(_sum_segments, tall=True))
def sum_tall_segments(
    sums, sums_row, table, segments, groups,
    left, left_row, left_tile, left_part, left_step,
    right, right_row, right_tile, right_part, right_step,
):  # fmt: skip
    """`sum_segments` of 64 rows, in four tiles, and 16 columns."""


def _add(function: ir.Function) -> None:
    target, step, sums, rows, columns, add = function.args
    entry, row, leave = blocks(function, "entry row leave")
    masks = [entry.below(entry.sub(columns, I64(n * VECTOR))) for n in range(SIDE // VECTOR)]
    whole, nothing = (ir.Constant(MASK, [bit] * VECTOR) for bit in (1, 0))
    before = entry.select(entry.icmp_signed("!=", add, I64(0)), whole, nothing)
    entry.cbranch(entry.icmp_signed(">", rows, I64(0)), row.block, leave.block)
    left, to, at = (row.phi(I64) for _ in range(3))
    for n, mask in enumerate(masks):
        place = row.add(to, I64(n * BYTES))
        place = row.select(row.icmp_signed(">", columns, I64(n * VECTOR)), place, to)
        total = row.fadd(row.vector(row.add(at, I64(n * BYTES))), row.masked(place, row.and_(mask, before)))
        row.put_masked(total, place, mask)
    fewer = row.sub(left, I64(1))
    steps = [(left, rows, fewer), (to, target, row.add(to, step)), (at, sums, row.add(at, I64(4 * SIDE)))]
    carry(steps, entry, row)
    row.cbranch(row.icmp_signed(">", fewer, I64(0)), row.block, leave.block)
    leave.ret_void()


@routine(_add)
def add_sums(target, step, sums, rows, columns, add):
    """target[r, c] (+)= sums[r, c] for r < rows and c < columns; target's rows are `step` bytes apart."""


def _put(function: ir.Function, *, turned: bool = False, streamed: bool = False) -> None:
    target, step, sums = function.args
    (b,) = blocks(function, "entry")
    for n in range(4):  # squares of a tile's side
        row, column = VECTOR * (n // 2), VECTOR * (n % 2)
        at = b.add(sums, I64(4 * (SIDE * column + row if turned else SIDE * row + column)))
        rows = [b.vector(b.add(at, I64(4 * SIDE * i))) for i in range(VECTOR)]
        for i, line in enumerate(transposed(b, rows) if turned else rows):
            to = b.add(b.add(target, b.mul(step, I64(row + i))), I64(4 * column))
            (b.stream if streamed else b.put)(line, to)
    b.ret_void()


@routine(
    choice(
        "put_sums",
        {
            TURNED: partial(_put, turned=True),
            STREAMED: partial(_put, streamed=True),
            STREAMED + TURNED: partial(_put, turned=True, streamed=True),
        },
    )
)
def put_sums(kind, target, step, sums):
    """target (SIDE, SIDE) = sums, its rows `step` bytes apart. kind: TURNED, STREAMED past the caches, or their sum.

    Past the caches, target and step are multiples of a vector's bytes, and other threads see them after `fence`.
    """


@intrinsic(None, INT)
def _configure(builder, place):
    b = Block(builder.block)
    _tile_function(b, "ldtilecfg", b.pointer(place, I8))
    builder.position_at_end(b.block)


@intrinsic(None)
def leave_tiles(builder):
    """The registers are not used any more."""
    b = Block(builder.block)
    _tile_function(b, "tilerelease")
    builder.position_at_end(b.block)


@inner
def take_tiles(place):
    """Eight registers of 16 rows of 64 bytes, for this thread; place: CONFIGURATION bytes that nobody else uses."""
    for n in range(CONFIGURATION // 8):
        store_i64(place, n, 0)
    store_i64(place, 0, 1)
    for n in range(2, 4):
        store_i64(place, n, 0x0040004000400040)
    store_i64(place, 6, 0x1010101010101010)
    _configure(place)
