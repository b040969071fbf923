"""The product that all convolutions end in, as vector code: c[i, j] (+)= Σ_e Σ_k a[i, e, k] · b[e, k, j].

Rows i are scalars that are broadcast, columns j fill whole vector registers; every accumulator stays in a register
until the sum is complete. The sum runs over a table of segments e, each a start in a and one in b, and within a
segment over k with a constant step in either. Written as LLVM IR, since LLVM turns no loop into this.
Nothing is reassociated: the order of each sum is that of the table, one fused multiply-add after the other.
"""

from functools import partial

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import choice, function_of, routine, store_i64
from onnx_backprop.ort_ops.compiler.machine import REGISTERS, VECTOR
from onnx_backprop.ort_ops.vector.emit import FLOAT, I32, I64, ITEM, VEC, ZERO, Block, Value, blocks, carry

# Rows and vectors of the largest tile: all but a few of the registers hold accumulators.
ROWS = 12 if REGISTERS >= 32 else 6
VECTORS = 2
COLUMNS = VECTORS * VECTOR
_ROW_CHOICES = tuple(r for r in (1, 2, 4, 6, 8, 10, 12) if r <= ROWS)


def _vector(b: Block, address: Value, j: int) -> Value:
    return b.pointer(b.add(address, I64(ITEM * VECTOR * j)))


def _tile(function: ir.Function, *, rows: int, vectors: int) -> None:
    """The function of one tile size; its arguments are those of `multiply`."""
    c, c_row, a, a_rows, b, segments, table, count, a_step, b_step, add = function.args
    entry, load, outer, inner, after, leave = blocks(function, "entry load outer inner after leave")
    cells = [(i, j) for i in range(rows) for j in range(vectors)]

    a_at = [entry.add(a, entry.word(entry.add(a_rows, I64(8 * i)))) for i in range(rows)]
    c_at = [entry.add(c, entry.mul(c_row, I64(i))) for i in range(rows)]
    for i, j in cells:  # the sum takes longer than it takes to fetch what it is written to
        entry.prefetch(entry.add(c_at[i], I64(ITEM * VECTOR * j)), writing=True)
    entry.cbranch(entry.icmp_signed("!=", add, I64(0)), load.block, outer.block)

    before = {(i, j): load.load(_vector(load, c_at[i], j), align=ITEM) for i, j in cells}
    load.branch(outer.block)

    segment = outer.phi(I64)
    sums = {cell: outer.phi(VEC) for cell in cells}
    place = outer.add(table, outer.shl(segment, I64(4)))
    a_start = outer.word(place)
    b_start = outer.add(b, outer.word(outer.add(place, I64(8))))
    outer.branch(inner.block)

    left, a_index, b_at = inner.phi(I64), inner.phi(I64), inner.phi(I64)
    running = {cell: inner.phi(VEC) for cell in cells}
    columns = [inner.load(_vector(inner, b_at, j), align=ITEM) for j in range(vectors)]
    result = {}
    for i in range(rows):
        scalar = inner.splat(inner.load(inner.pointer(inner.add(a_at[i], a_index), FLOAT)))
        for j in range(vectors):
            result[i, j] = inner.fma(scalar, columns[j], running[i, j])
    fewer = inner.sub(left, I64(1))
    steps = [(left, count, fewer), (a_index, a_start, inner.add(a_index, a_step))]
    steps += [(b_at, b_start, inner.add(b_at, b_step))]
    steps += [(running[cell], sums[cell], result[cell]) for cell in cells]
    carry(steps, outer, inner)
    inner.cbranch(inner.icmp_signed(">", fewer, I64(0)), inner.block, after.block)

    following = after.add(segment, I64(1))
    segment.add_incoming(I64(0), load.block)
    for cell in cells:
        sums[cell].add_incoming(before[cell], load.block)
    carry([(segment, I64(0), following), *((sums[cell], ZERO, result[cell]) for cell in cells)], entry, after)
    after.cbranch(after.icmp_signed("<", following, segments), outer.block, leave.block)

    for i, j in cells:
        leave.store(result[i, j], _vector(leave, c_at[i], j), align=ITEM)
    leave.ret_void()


def _tiles(function: ir.Function) -> None:
    """(rows, vectors, …) -> the function of that size."""
    rows, vectors, *rest = function.args
    (b,) = blocks(function, "entry")
    sizes = {
        r * (VECTORS + 1) + v: partial(_tile, rows=r, vectors=v) for r in _ROW_CHOICES for v in range(1, VECTORS + 1)
    }
    chosen = function_of(function.module, "onnx_backprop_tiles", 12, choice("tile", sizes))
    b.call(chosen, [b.add(b.mul(rows, I64(VECTORS + 1)), vectors), *rest])
    b.ret_void()


@routine(_tiles)
def multiply_tile(rows, vectors, c, c_row, a, a_rows, b, segments, table, count, a_step, b_step, add):
    """`multiply` of whole vectors; `rows` is one of TILE_ROWS."""


def _row_table() -> tuple[int, ...]:
    return tuple(next((r for r in _ROW_CHOICES if r >= n), ROWS) for n in range(ROWS + 1))


TILE_ROWS = _row_table()  # how many rows the tile for n rows has
SPARE_ROWS = max(tile - n for n, tile in enumerate(TILE_ROWS) if n)  # that a tile may write beyond the last


@inner
def multiply(rows, columns, c, a, b, table, count, add):
    """One tile of c, float32: at most ROWS rows and COLUMNS columns, more of either by TILE_ROWS and whole vectors.

    c: (address of its first element, step from row to row). a: (address, address of one start per row, step). b:
    (address, step). table: (address of pairs of starts in a and b, how many); of each, `count` >= 1 steps are summed.
    add: whether c is added to (else overwritten). Steps and starts are in bytes.
    """
    vectors = 1 if columns <= VECTOR else 2
    multiply_tile(TILE_ROWS[rows], vectors, c[0], c[1], a[0], a[1], b[0], table[1], table[0], count, a[2], b[1], add)


@inner
def rows_apart(table, step):
    """ROWS starts, `step` bytes apart, and behind them the table of a single segment that starts where a and b do."""
    for i in range(ROWS):
        store_i64(table, i, i * step)
    store_i64(table, ROWS, 0)
    store_i64(table, ROWS + 1, 0)


@inner
def one_segment(table):
    """The table behind the starts of `rows_apart`."""
    return table + 8 * ROWS, 1


def _gather(function: ir.Function, *, streaming: bool) -> None:
    """The function behind `gather_columns` and `stream_columns`: column after column, and the vectors of each."""
    target, step, source, scale, width, starts, taps, count = function.args
    entry, column, vector, tap, store, further, leave = blocks(function, "entry column vector tap store further leave")
    final = entry.sub(width, I64(ITEM * VECTOR))  # where the last vector starts, which may overlap the one before
    entry.cbranch(entry.icmp_signed(">", count, I64(0)), column.block, leave.block)

    i, place = column.phi(I64), column.phi(I64)
    start = column.add(starts, column.shl(i, I64(3)))
    first = column.word(start)
    last = column.word(column.add(start, I64(8)))
    some = column.icmp_signed("<", first, last)
    column.branch(vector.block)

    offset = vector.phi(I64)
    begin = vector.add(source, offset)
    vector.cbranch(some, tap.block, store.block)

    t, total = tap.phi(I64), tap.phi(VEC)
    at = tap.add(taps, tap.shl(t, I64(3)))
    index = tap.sext(tap.load(tap.pointer(at, I32)), I64)
    weight = tap.splat(tap.load(tap.pointer(tap.add(at, I64(4)), FLOAT)))
    value = tap.load(tap.pointer(tap.add(begin, tap.mul(index, scale)), VEC), align=ITEM)
    more = tap.fma(weight, value, total)
    following = tap.add(t, I64(1))
    carry([(t, first, following), (total, ZERO, more)], vector, tap)
    tap.cbranch(tap.icmp_signed("<", following, last), tap.block, store.block)

    result = store.phi(VEC)
    carry([(result, ZERO, more)], vector, tap)
    to = store.add(place, offset)
    if streaming:
        store.stream(result, to)
    else:
        store.store(result, store.pointer(to, VEC), align=ITEM)
    behind = store.add(offset, I64(ITEM * VECTOR))
    behind = store.select(store.icmp_signed("<", behind, final), behind, final)
    carry([(offset, I64(0), behind)], column, store)
    store.cbranch(store.icmp_signed("<", offset, final), vector.block, further.block)

    next_i = further.add(i, I64(1))
    carry([(i, I64(0), next_i), (place, target, further.add(place, step))], entry, further)
    further.cbranch(further.icmp_signed("<", next_i, count), column.block, leave.block)
    leave.ret_void()


@routine(partial(_gather, streaming=False))
def gather_columns(target, step, source, scale, width, starts, taps, count):
    """Column i of target = Σ_t weight(t) · column index(t) of source, t from starts[i] to starts[i + 1], in order.

    Columns are `width` bytes, a vector or more; addresses, step and scale are bytes from column to column. A tap is a
    word: index, an int32, and weight, a float32.
    """


@routine(partial(_gather, streaming=True))
def stream_columns(target, step, source, scale, width, starts, taps, count):
    """As `gather_columns`, stored past the caches: target, step and width are multiples of a vector's bytes."""
