"""Copies of float32 in whole vector registers, the last one masked: rows, every other element, squares turned round.

Written as LLVM IR, since loops that LLVM turns into vectors spend the time of short rows before and after these. No
element beyond the ends is read or written. Arguments are int64: addresses, steps in bytes and numbers of elements.
"""

from functools import partial

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR
from onnx_backprop.ort_ops.compiler.llvm import Make, choice, function_of, intrinsic, routine
from onnx_backprop.ort_ops.vector.emit import (
    BYTES,
    I64,
    ITEM,
    LANES,
    MASK,
    MASKS,
    VEC,
    ZERO,
    Block,
    Value,
    blocks,
    carry,
    vectors,
    woven_lanes,
)

_PREFETCH_BYTES, _LINE = 4096, 64  # bytes
MOST_STEP = 4


def _copy(function: ir.Function, *, prefetch: bool = True) -> None:
    target, source, count = function.args

    def body(b: Block, done: Value, left: Value | None) -> None:
        offset = b.mul(done, I64(ITEM))
        to, at = b.add(target, offset), b.add(source, offset)
        # Rows mostly follow one another, and the next ones are too far in the instructions to be fetched by themselves.
        if prefetch:
            b.prefetch(b.add(at, I64(_PREFETCH_BYTES)), level=2)
            b.prefetch(b.add(to, I64(_PREFETCH_BYTES)), writing=True)
        b.put(b.vector(at, left), to, left)

    vectors(function, count, body, again=True)


def _clear(function: ir.Function) -> None:
    target, count = function.args

    def body(b: Block, done: Value, left: Value | None) -> None:
        b.put(ZERO, b.add(target, b.mul(done, I64(ITEM))), left)

    vectors(function, count, body, again=True)


def _copy_every(function: ir.Function, *, step: int) -> None:
    target, source, count = function.args

    def body(b: Block, done: Value, left: Value | None) -> None:
        offset = b.mul(done, I64(ITEM))
        to, at = b.add(target, offset), b.add(source, b.mul(offset, I64(step)))
        # The elements behind the last one of these may lie beyond the end.
        cells = b.sub(I64(step * VECTOR) if left is None else b.mul(left, I64(step)), I64(step - 1))
        value: Value = ZERO
        for n in range(step):
            some = None if left is None and n < step - 1 else b.sub(cells, I64(n * VECTOR))
            lanes = [VECTOR + step * i % VECTOR if step * i // VECTOR == n else i for i in range(VECTOR)]
            loaded = b.vector(b.add(at, I64(n * BYTES)), some)
            value = b.shuffle_vector(value, loaded, ir.Constant(LANES, lanes))
        b.put(value, to, left)

    vectors(function, count, body, again=True)


def _copy_even_odd(function: ir.Function) -> None:
    even, odd, source, count, ahead = function.args

    def body(b: Block, done: Value, left: Value | None) -> None:
        offset = b.mul(done, I64(ITEM))
        at = b.add(source, b.mul(offset, I64(2)))
        cells = None if left is None else b.mul(left, I64(2))
        halves = []
        for half in range(2):
            b.prefetch(b.add(at, ahead), level=2)
            halves.append(b.vector(at, None if cells is None else b.sub(cells, I64(half * VECTOR))))
            at = b.add(at, I64(BYTES))
        low, high = halves
        for first, target in enumerate((even, odd)):
            value = b.shuffle_vector(low, high, ir.Constant(LANES, [2 * lane + first for lane in range(VECTOR)]))
            b.put(value, b.add(target, offset), left)

    vectors(function, count, body, again=True)


def _spread_even(function: ir.Function, *, between: bool) -> None:
    target, source, count = function.args
    halves = [ir.Constant(LANES, [half * VECTOR // 2 + lane // 2 for lane in range(VECTOR)]) for half in range(2)]
    even = ir.Constant(MASK, [1 - lane % 2 for lane in range(VECTOR)])

    def body(b: Block, done: Value, left: Value | None) -> None:
        offset = b.mul(done, I64(ITEM))
        to, at = b.add(target, b.mul(offset, I64(2))), b.add(source, offset)
        value = b.vector(at, left)
        if left is None and between:  # to the last even element: the second vector begins where the first one ends
            places = to, b.add(to, I64(BYTES - ITEM))
            old = [b.vector(place) for place in places]
            for half, place in enumerate(places):
                lanes = [VECTOR + lane if (lane + half) % 2 else (half * VECTOR + lane) // 2 for lane in range(VECTOR)]
                b.put(b.shuffle_vector(value, old[half], ir.Constant(LANES, lanes)), place)
            return
        for half, lanes in enumerate(halves):
            mask = even
            if left is not None:
                mask = b.and_(even, b.below(b.sub(b.mul(left, I64(2)), I64(half * VECTOR))))
            b.put_masked(b.shuffle_vector(value, ZERO, lanes), b.add(to, I64(half * BYTES)), mask)

    vectors(function, count, body, again=True)


def _merge(function: ir.Function) -> None:
    target, even, odd, count = function.args

    def body(b: Block, done: Value, left: Value | None) -> None:
        offset = b.mul(done, I64(ITEM))
        to, values = b.add(target, b.mul(offset, I64(2))), [b.vector(b.add(at, offset), left) for at in (even, odd)]
        for half in range(2):
            more = None if left is None else b.sub(b.mul(left, I64(2)), I64(half * VECTOR))
            b.put(
                b.shuffle_vector(values[0], values[1], ir.Constant(LANES, woven_lanes(half))),
                b.add(to, I64(half * BYTES)),
                more,
            )

    vectors(function, count, body, again=True)


def _rows(function: ir.Function, *, name: str, one: Make) -> None:
    """(target, its row, every source, their row, rows, count): `one` of each row."""
    target, target_row, *sources, source_row, rows, count = function.args
    row_of = function_of(function.module, f"onnx_backprop_{name}_row", len(sources) + 2, one, "alwaysinline")
    entry, row, leave = blocks(function, "entry row leave")
    entry.cbranch(entry.icmp_signed(">", rows, I64(0)), row.block, leave.block)
    left, to, *at = (row.phi(I64) for _ in range(2 + len(sources)))
    row.call(row_of, [to, *at, count])
    fewer = row.sub(left, I64(1))
    steps = [(left, rows, fewer), (to, target, row.add(to, target_row))]
    steps += [(phi, source, row.add(phi, source_row)) for phi, source in zip(at, sources, strict=True)]
    carry(steps, entry, row)
    row.cbranch(row.icmp_signed(">", fewer, I64(0)), row.block, leave.block)
    leave.ret_void()


def _copy_between(function: ir.Function) -> None:
    target, target_row, source, source_row, rows, count, begin, end = function.args
    entry, vector, row, further, leave = blocks(function, "entry vector row further leave")
    some = entry.and_(entry.icmp_signed(">", rows, I64(0)), entry.icmp_signed(">", count, I64(0)))
    entry.cbranch(some, vector.block, leave.block)
    x = vector.phi(I64)
    offset = vector.mul(x, I64(ITEM))
    before, inside, stored = (vector.below(vector.sub(n, x)) for n in (begin, end, count))
    loaded = vector.and_(inside, vector.not_(before))
    to_first, at_first = vector.add(target, offset), vector.add(source, offset)
    vector.branch(row.block)
    left, to, at = (row.phi(I64) for _ in range(3))
    row.prefetch(row.add(at, I64(_PREFETCH_BYTES // 4)), level=2)
    row.put_masked(row.masked(at, loaded), to, stored)
    fewer = row.sub(left, I64(1))
    steps = [(left, rows, fewer), (to, to_first, row.add(to, target_row)), (at, at_first, row.add(at, source_row))]
    carry(steps, vector, row)
    row.cbranch(row.icmp_signed(">", fewer, I64(0)), row.block, further.block)
    following = further.add(x, I64(VECTOR))
    carry([(x, I64(0), following)], entry, further)
    further.cbranch(further.icmp_signed("<", following, count), vector.block, leave.block)
    leave.ret_void()


def _fetch(function: ir.Function) -> None:
    address, size = function.args
    entry, line, leave = blocks(function, "entry line leave")
    entry.cbranch(entry.icmp_signed(">", size, I64(0)), line.block, leave.block)
    at = line.phi(I64)
    line.prefetch(line.add(address, at), level=2)
    further = line.add(at, I64(_LINE))
    carry([(at, I64(0), further)], entry, line)
    line.cbranch(line.icmp_signed("<", further, size), line.block, leave.block)
    leave.ret_void()


def transposed(b: Block, rows: list[Value]) -> list[Value]:
    """The columns of a square of registers: exchange, bit by bit, the bits of row and column."""
    rows = list(rows)
    bit = 1
    while bit < VECTOR:
        low = ir.Constant(LANES, [j if not j & bit else VECTOR + j - bit for j in range(VECTOR)])
        high = ir.Constant(LANES, [j + bit if not j & bit else VECTOR + j for j in range(VECTOR)])
        for i in range(VECTOR):
            if not i & bit:
                pair = rows[i], rows[i + bit]
                rows[i], rows[i + bit] = b.shuffle_vector(*pair, low), b.shuffle_vector(*pair, high)
        bit *= 2
    return rows


def _transpose(function: ir.Function) -> None:
    target, target_row, source, source_row = function.args
    (b,) = blocks(function, "entry")
    rows = [b.vector(b.add(source, b.mul(source_row, I64(i)))) for i in range(VECTOR)]
    for i, row in enumerate(transposed(b, rows)):
        b.put(row, b.add(target, b.mul(target_row, I64(i))))
    b.ret_void()


def _transpose_part(function: ir.Function) -> None:
    target, target_row, source, source_row, rows, columns = function.args
    entry, every, some, b = blocks(function, "entry every some turn")
    nothing, whole = ir.Constant(MASK, [0] * VECTOR), entry.below(columns)
    entry.cbranch(entry.icmp_signed(">=", rows, I64(VECTOR)), every.block, some.block)
    values = [b.phi(VEC) for _ in range(VECTOR)]
    for i, value in enumerate(values):
        value.add_incoming(every.masked(every.add(source, every.mul(source_row, I64(i))), whole), every.block)
        within = some.icmp_signed("<", I64(i), rows)
        # Even a load without lanes looks its address up: never one far away.
        place = some.select(within, some.add(source, some.mul(source_row, I64(i))), source)
        value.add_incoming(some.masked(place, some.select(within, whole, nothing)), some.block)
    every.branch(b.block)
    some.branch(b.block)
    values = transposed(b, values)
    # Store the last column first and fall through to the first one.
    leave, *stores = blocks(function, " ".join(["leave", *(f"column_{j}" for j in range(VECTOR))]))
    cases = b.switch(columns, stores[-1].block)
    cases.add_case(I64(0), leave.block)
    for j, column in enumerate(stores):
        cases.add_case(I64(j + 1), column.block)
        column.put(values[j], column.add(target, column.mul(target_row, I64(j))))
        column.branch((stores[j - 1] if j else leave).block)
    leave.ret_void()


@routine(_clear)
def clear_run(target, count):
    """target[i] = 0 for i < count."""


@routine(_copy)
def copy_run(target, source, count):
    """target[i] = source[i] for i < count."""


def _rows_of_every(step: int) -> Make:
    one = _copy if step == 1 else partial(_copy_every, step=step)
    return partial(_rows, name=f"copy_every_{step}", one=one)


@routine(choice("copy_every", {step: _rows_of_every(step) for step in range(1, MOST_STEP + 1)}))
def copy_every(step, target, target_row, source, source_row, rows, count):
    """target[r, i] = source[r, step·i] for r < rows and i < count; step: 1 to MOST_STEP."""


@routine(_copy_even_odd)
def copy_even_odd(even, odd, source, count, ahead):
    """even[i] = source[2i] and odd[i] = source[2i + 1] for i < count; what lies `ahead` bytes further on is fetched."""


@routine(partial(_spread_even, between=False))
def spread_even(target, source, count):
    """target[2i] = source[i] for i < count; what lies between them stays."""


@routine(partial(_spread_even, between=not MASKS))
def blend_even(target, source, count):
    """As `spread_even` where no other thread writes between them: that is read and written too."""


@routine(partial(_rows, name="copy", one=partial(_copy, prefetch=False)))  # short, and in caches on one side
def copy_rows(target, target_row, source, source_row, rows, count):
    """target[r, i] = source[r, i] for r < rows and i < count."""


@routine(_copy_between)
def copy_between(target, target_row, source, source_row, rows, count, begin, end):
    """target[r, i] = source[r, i] for r < rows and begin <= i < end, 0 for the other i < count."""


@routine(partial(_rows, name="merge", one=_merge))
def merge_rows(target, target_row, even, odd, source_row, rows, count):
    """target[r, 2i] = even[r, i] and target[r, 2i + 1] = odd[r, i] for r < rows and i < count."""


@routine(_fetch)
def fetch(address, size):
    """Fetch so many bytes into the second-level cache for later; any address will do."""


@intrinsic(None)
def fence(builder):
    """Nothing that was stored, past the caches either, is still on its way."""
    builder.fence("seq_cst")


@routine(_transpose)
def transpose_tile(target, target_row, source, source_row):
    """A square of float32, as many rows as a register holds; addresses, and bytes from row to row."""


@routine(_transpose_part)
def transpose_part(target, target_row, source, source_row, rows, columns):
    """Row j < columns of target = column j of source: a whole vector, zero behind `rows` elements.

    rows and columns are from 0 to a vector's length.
    """
