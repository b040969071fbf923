"""Copies of float32 in whole vector registers, the last one masked: rows, every other element, squares turned round.

Written as LLVM IR, since loops that LLVM turns into vectors spend the time of short rows before and after these. No
element beyond the ends is read or written. Arguments are int64: addresses, steps in bytes and numbers of elements.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR
from onnx_backprop.ort_ops.compiler.llvm import function_of, intrinsic, routine

I1, I32, I64, FLOAT = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
VEC, LANES, MASK = (ir.VectorType(kind, VECTOR) for kind in (FLOAT, I32, I1))
ITEM = 4
BYTES = ITEM * VECTOR
_AHEAD, _LINE = 4096, 64  # bytes
ZERO = ir.Constant(VEC, [0.0] * VECTOR)
IOTA = ir.Constant(LANES, list(range(VECTOR)))
Value = Any


def pointer(b: ir.IRBuilder, address: Value, kind: ir.Type = VEC) -> Value:
    return b.inttoptr(address, kind.as_pointer())


def splat(b: ir.IRBuilder, scalar: Value, kind: ir.VectorType = VEC) -> Value:
    """A vector whose lanes all hold a scalar."""
    nothing = ir.Constant(kind, ir.Undefined)
    return b.shuffle_vector(b.insert_element(nothing, scalar, I32(0)), nothing, ir.Constant(LANES, [0] * VECTOR))


def blocks(function: ir.Function, names: str) -> list[ir.IRBuilder]:
    """New blocks of a function, where code is to go."""
    return [ir.IRBuilder(function.append_basic_block(name)) for name in names.split()]


def carry(values: Iterable[tuple[Value, Value, Value]], before: ir.IRBuilder, again: ir.IRBuilder) -> None:
    """Of every (phi, first, following) of a loop: what it is at first, and each time that the loop goes on."""
    for phi, first, following in values:
        phi.add_incoming(first, before.block)
        phi.add_incoming(following, again.block)


def library(b: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
    """An intrinsic function of LLVM."""
    return b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(result, arguments), name)


def below(b: ir.IRBuilder, count: Value) -> Value:
    """The mask of the first `count` lanes, an int64 from 0 to any number."""
    least = b.select(b.icmp_signed("<", count, I64(VECTOR)), count, I64(VECTOR))
    least = b.select(b.icmp_signed(">", least, I64(0)), least, I64(0))
    return b.icmp_signed("<", IOTA, splat(b, b.trunc(least, I32), LANES))


def load_masked(b: ir.IRBuilder, address: Value, mask: Value) -> Value:
    """Lanes outside the mask are zero and are not read."""
    function = library(b, f"llvm.masked.load.v{VECTOR}f32.p0", VEC, VEC.as_pointer(), I32, MASK, VEC)
    return b.call(function, [pointer(b, address), I32(ITEM), mask, ZERO])


def store_masked(b: ir.IRBuilder, value: Value, address: Value, mask: Value) -> None:
    """Lanes outside the mask are not written."""
    function = library(b, f"llvm.masked.store.v{VECTOR}f32.p0", ir.VoidType(), VEC, VEC.as_pointer(), I32, MASK)
    b.call(function, [value, pointer(b, address), I32(ITEM), mask])


def fma(b: ir.IRBuilder, x: Value, y: Value, z: Value) -> Value:
    """x·y + z, rounded once."""
    return b.call(library(b, f"llvm.fma.v{VECTOR}f32", VEC, VEC, VEC, VEC), [x, y, z])


def load(b: ir.IRBuilder, address: Value, left: Value | None = None) -> Value:
    """A vector, or only so many of its elements, the others being zero."""
    return b.load(pointer(b, address), align=ITEM) if left is None else load_masked(b, address, below(b, left))


def store(b: ir.IRBuilder, value: Value, address: Value, left: Value | None = None) -> None:
    """A vector, or only so many of its elements."""
    if left is None:
        b.store(value, pointer(b, address), align=ITEM)
    else:
        store_masked(b, value, address, below(b, left))


def stream(b: ir.IRBuilder, value: Value, address: Value) -> None:
    """Store a vector past the caches, without the line being read first; the address is a multiple of its bytes.

    Other threads are to see it after `settle`.
    """
    b.store(value, pointer(b, address), align=BYTES).set_metadata("nontemporal", b.module.add_metadata([I32(1)]))


def prefetch(b: ir.IRBuilder, address: Value, *, writing: bool = False, level: int = 1) -> None:
    """Fetch a line that will be needed later into the cache of this level; any address will do.

    The first level takes few lines at a time; a processor that waits for it waits for the memory.
    """
    function = library(b, "llvm.prefetch.p0", ir.VoidType(), VEC.as_pointer(), I32, I32, I32)
    b.call(function, [pointer(b, address), I32(int(writing)), I32(4 - level), I32(1)])


def vectors(function: ir.Function, count: Value, body: Callable[[ir.IRBuilder, Value, Value | None], None]) -> Any:
    """Call `body(builder, elements before, elements left or None for a whole vector)` to the end of a row.

    The block to start with is answered; the function returns behind the row.
    """
    entry, check, whole, rest, part, leave = blocks(function, "entry check whole rest part leave")
    entry.branch(check.block)
    done = check.phi(I64)
    following = check.add(done, I64(VECTOR))
    check.cbranch(check.icmp_signed("<=", following, count), whole.block, rest.block)
    body(whole, done, None)
    whole.branch(check.block)
    carry([(done, I64(0), following)], entry, whole)
    left = rest.sub(count, done)
    rest.cbranch(rest.icmp_signed(">", left, I64(0)), part.block, leave.block)
    body(part, done, left)
    part.branch(leave.block)
    leave.ret_void()
    return entry.block


def _copy(function: ir.Function, *, ahead: bool = True) -> None:
    target, source, count = function.args

    def body(b: ir.IRBuilder, done: Value, left: Value | None) -> None:
        offset = b.mul(done, I64(ITEM))
        to, at = b.add(target, offset), b.add(source, offset)
        # Rows mostly follow one another, and the next ones are too far in the instructions to be fetched by themselves.
        if ahead:
            prefetch(b, b.add(at, I64(_AHEAD)), level=2)
            prefetch(b, b.add(to, I64(_AHEAD)), writing=True)
        store(b, load(b, at, left), to, left)

    vectors(function, count, body)


def _clear(function: ir.Function) -> None:
    target, count = function.args

    def body(b: ir.IRBuilder, done: Value, left: Value | None) -> None:
        store(b, ZERO, b.add(target, b.mul(done, I64(ITEM))), left)

    vectors(function, count, body)


def _copy_even(function: ir.Function) -> None:
    target, source, count = function.args
    even = ir.Constant(LANES, [2 * lane for lane in range(VECTOR)])

    def body(b: ir.IRBuilder, done: Value, left: Value | None) -> None:
        offset = b.mul(done, I64(ITEM))
        to, at = b.add(target, offset), b.add(source, b.mul(offset, I64(2)))
        # The element behind the last even one may lie beyond the end.
        cells = I64(2 * VECTOR - 1) if left is None else b.sub(b.mul(left, I64(2)), I64(1))
        low = load(b, at, None if left is None else cells)
        high = load(b, b.add(at, I64(BYTES)), b.sub(cells, I64(VECTOR)))
        store(b, b.shuffle_vector(low, high, even), to, left)

    vectors(function, count, body)


def _split_pairs(function: ir.Function) -> None:
    even, odd, source, count, ahead = function.args

    def body(b: ir.IRBuilder, done: Value, left: Value | None) -> None:
        offset = b.mul(done, I64(ITEM))
        at = b.add(source, b.mul(offset, I64(2)))
        cells = None if left is None else b.mul(left, I64(2))
        halves = []
        for half in range(2):
            prefetch(b, b.add(at, ahead), level=2)
            halves.append(load(b, at, None if cells is None else b.sub(cells, I64(half * VECTOR))))
            at = b.add(at, I64(BYTES))
        low, high = halves
        for first, target in enumerate((even, odd)):
            value = b.shuffle_vector(low, high, ir.Constant(LANES, [2 * lane + first for lane in range(VECTOR)]))
            store(b, value, b.add(target, offset), left)

    vectors(function, count, body)


def _spread_even(function: ir.Function) -> None:
    target, source, count = function.args
    halves = [ir.Constant(LANES, [half * VECTOR // 2 + lane // 2 for lane in range(VECTOR)]) for half in range(2)]
    even = ir.Constant(MASK, [1 - lane % 2 for lane in range(VECTOR)])

    def body(b: ir.IRBuilder, done: Value, left: Value | None) -> None:
        offset = b.mul(done, I64(ITEM))
        to, at = b.add(target, b.mul(offset, I64(2))), b.add(source, offset)
        value = load(b, at, left)
        for half, lanes in enumerate(halves):
            mask = even
            if left is not None:
                mask = b.and_(even, below(b, b.sub(b.mul(left, I64(2)), I64(half * VECTOR))))
            store_masked(b, b.shuffle_vector(value, ZERO, lanes), b.add(to, I64(half * BYTES)), mask)

    vectors(function, count, body)


def _copy_rows(function: ir.Function) -> None:
    target, target_row, source, source_row, rows, count = function.args
    one = partial(_copy, ahead=False)  # they are short, and in caches on one side
    row_of = function_of(function.module, "onnx_backprop_copy_row", 3, one, "alwaysinline")
    entry, row, leave = blocks(function, "entry row leave")
    entry.cbranch(entry.icmp_signed(">", rows, I64(0)), row.block, leave.block)
    left, to, at = (row.phi(I64) for _ in range(3))
    row.call(row_of, [to, at, count])
    fewer = row.sub(left, I64(1))
    steps = [(left, rows, fewer), (to, target, row.add(to, target_row)), (at, source, row.add(at, source_row))]
    carry(steps, entry, row)
    row.cbranch(row.icmp_signed(">", fewer, I64(0)), row.block, leave.block)
    leave.ret_void()


def _fetch(function: ir.Function) -> None:
    address, size = function.args
    entry, line, leave = blocks(function, "entry line leave")
    entry.cbranch(entry.icmp_signed(">", size, I64(0)), line.block, leave.block)
    at = line.phi(I64)
    prefetch(line, line.add(address, at), level=2)
    further = line.add(at, I64(_LINE))
    carry([(at, I64(0), further)], entry, line)
    line.cbranch(line.icmp_signed("<", further, size), line.block, leave.block)
    leave.ret_void()


def turned(b: ir.IRBuilder, rows: list[Value]) -> list[Value]:
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
    b = ir.IRBuilder(function.append_basic_block("entry"))
    rows = [load(b, b.add(source, b.mul(source_row, I64(i)))) for i in range(VECTOR)]
    for i, row in enumerate(turned(b, rows)):
        store(b, row, b.add(target, b.mul(target_row, I64(i))))
    b.ret_void()


def _transpose_part(function: ir.Function) -> None:
    target, target_row, source, source_row, rows, columns = function.args
    b = ir.IRBuilder(function.append_basic_block("entry"))
    nothing, whole = ir.Constant(MASK, [0] * VECTOR), below(b, columns)
    values = []
    for i in range(VECTOR):
        within = b.icmp_signed("<", I64(i), rows)
        # Even a load without lanes looks its address up: never one far away.
        place = b.select(within, b.add(source, b.mul(source_row, I64(i))), source)
        values.append(load_masked(b, place, b.select(within, whole, nothing)))
    values = turned(b, values)
    # Store the last column first and fall through to the first one.
    blocks = [function.append_basic_block(f"column_{j}") for j in range(VECTOR)]
    leave = function.append_basic_block("leave")
    choice = b.switch(columns, blocks[-1])
    choice.add_case(I64(0), leave)
    for j, block in enumerate(blocks):
        choice.add_case(I64(j + 1), block)
        column = ir.IRBuilder(block)
        store(column, values[j], column.add(target, column.mul(target_row, I64(j))))
        column.branch(blocks[j - 1] if j else leave)
    ir.IRBuilder(leave).ret_void()


@routine(_clear)
def clear_run(target, count):
    """target[i] = 0 for i < count."""


@routine(_copy)
def copy_run(target, source, count):
    """target[i] = source[i] for i < count."""


@routine(_copy_even)
def copy_even(target, source, count):
    """target[i] = source[2i] for i < count."""


@routine(_split_pairs)
def split_pairs(even, odd, source, count, ahead):
    """even[i] = source[2i] and odd[i] = source[2i + 1] for i < count; what lies `ahead` bytes further on is fetched."""


@routine(_spread_even)
def spread_even(target, source, count):
    """target[2i] = source[i] for i < count; what lies between them stays."""


@routine(_copy_rows)
def copy_rows(target, target_row, source, source_row, rows, count):
    """target[r, i] = source[r, i] for r < rows and i < count."""


@routine(_fetch)
def fetch(address, size):
    """Fetch so many bytes into the second-level cache for later; any address will do."""


@intrinsic(None)
def settle(builder):
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
