"""The product that all convolutions end in, as vector code: c[i, j] (+)= Σ_e Σ_k a[i, e, k] · b[e, k, j].

Rows i are scalars that are broadcast, columns j fill whole vector registers; every accumulator stays in a register
until the sum is complete. The sum runs over a table of segments e, each a start in a and one in b, and within a
segment over k with a constant step in either. Written as LLVM IR, since LLVM turns no loop into this.

The order of each sum is that of the table, one fused multiply-add after the other, from 0 for every chunk of steps,
whose sum is then added to c: rounding grows with the root of the steps of a chunk, not of all.
"""

from functools import partial

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import inner, shared
from onnx_backprop.ort_ops.compiler.llvm import choice, function_of, routine, store_i64
from onnx_backprop.ort_ops.compiler.machine import REGISTERS, VECTOR
from onnx_backprop.ort_ops.vector.emit import FLOAT, I1, I32, I64, ITEM, VEC, ZERO, Block, Value, blocks, carry

# Rows and vectors of the largest tile: all but a few of the registers hold accumulators.
ROWS = 12 if REGISTERS >= 32 else 6
VECTORS = 2
COLUMNS = VECTORS * VECTOR
CHUNK = 64  # steps: fewer round less, and every chunk loads and stores a tile of c
_ROW_CHOICES = tuple(r for r in (1, 2, 4, 6, 8, 10, 12) if r <= ROWS)


def _vector(b: Block, address: Value, j: int) -> Value:
    return b.pointer(b.add(address, I64(ITEM * VECTOR * j)))


def _tile(function: ir.Function, *, rows: int, vectors: int) -> None:
    """The function of one tile size; its arguments are those of `multiply`."""
    c, c_row, a, a_rows, b, segments, table, count, a_step, b_step, add, chunk = function.args
    entry, piece, inner, after, flush, write, add_up, empty, onward, further, leave = blocks(
        function, "entry piece inner after flush write add_up empty onward further leave"
    )
    cells = [(i, j) for i in range(rows) for j in range(vectors)]

    def starts(block: Block, segment: Value) -> tuple[Value, Value]:
        place = block.add(table, block.shl(segment, I64(4)))
        return block.word(place), block.add(b, block.word(block.add(place, I64(8))))

    a_at = [entry.add(a, entry.word(entry.add(a_rows, I64(8 * i)))) for i in range(rows)]
    c_at = [entry.add(c, entry.mul(c_row, I64(i))) for i in range(rows)]
    for i, j in cells:  # the sum takes longer than it takes to fetch what it is written to
        entry.prefetch(entry.add(c_at[i], I64(ITEM * VECTOR * j)), writing=True)
    first, added = starts(entry, I64(0)), entry.icmp_signed("!=", add, I64(0))
    entry.branch(piece.block)

    # steps of one segment, as many as there is room for until c takes the sums over
    segment, left, a_from, b_from, room = (piece.phi(I64) for _ in range(5))
    adding, sums = piece.phi(I1), {cell: piece.phi(VEC) for cell in cells}
    some = piece.select(piece.icmp_signed("<", left, room), left, room)
    piece.branch(inner.block)

    ahead, a_index, b_at = inner.phi(I64), inner.phi(I64), inner.phi(I64)
    running = {cell: inner.phi(VEC) for cell in cells}
    columns = [inner.load(_vector(inner, b_at, j), align=ITEM) for j in range(vectors)]
    result = {}
    for i in range(rows):
        scalar = inner.splat(inner.load(inner.pointer(inner.add(a_at[i], a_index), FLOAT)))
        for j in range(vectors):
            result[i, j] = inner.fma(scalar, columns[j], running[i, j])
    fewer, a_next, b_next = inner.sub(ahead, I64(1)), inner.add(a_index, a_step), inner.add(b_at, b_step)
    steps = [(ahead, some, fewer), (a_index, a_from, a_next), (b_at, b_from, b_next)]
    carry([*steps, *((running[cell], sums[cell], result[cell]) for cell in cells)], piece, inner)
    inner.cbranch(inner.icmp_signed(">", fewer, I64(0)), inner.block, after.block)

    rest, space, following = after.sub(left, some), after.sub(room, some), after.add(segment, I64(1))
    ended = after.icmp_signed("==", rest, I64(0))
    last = after.and_(ended, after.icmp_signed(">=", following, segments))
    after.cbranch(after.or_(last, after.icmp_signed("==", space, I64(0))), flush.block, onward.block)

    flush.cbranch(adding, add_up.block, write.block)
    for i, j in cells:
        to = _vector(add_up, c_at[i], j)
        add_up.store(add_up.fadd(add_up.load(to, align=ITEM), result[i, j]), to, align=ITEM)
        write.store(result[i, j], _vector(write, c_at[i], j), align=ITEM)
    add_up.branch(empty.block)
    write.branch(empty.block)
    empty.cbranch(last, leave.block, onward.block)

    kept, free, then_adding = {cell: onward.phi(VEC) for cell in cells}, onward.phi(I64), onward.phi(I1)
    emptied = [(free, space, chunk), (then_adding, adding, I1(1))]
    carry([*emptied, *((kept[cell], result[cell], ZERO) for cell in cells)], after, empty)
    onward.cbranch(ended, further.block, piece.block)
    behind = starts(further, following)
    further.branch(piece.block)

    at_first = (I64(0), count, *first, chunk, added, *[ZERO] * len(cells))
    carried = (free, then_adding, *kept.values())
    same, next_one = (segment, rest, a_next, b_next, *carried), (following, count, *behind, *carried)
    for n, phi in enumerate((segment, left, a_from, b_from, room, adding, *sums.values())):
        for value, source in ((at_first[n], entry), (same[n], onward), (next_one[n], further)):
            phi.add_incoming(value, source.block)
    leave.ret_void()


def _tiles(function: ir.Function) -> None:
    """(rows, vectors, …) -> the function of that size."""
    rows, vectors, *rest = function.args
    (b,) = blocks(function, "entry")
    sizes = {
        r * (VECTORS + 1) + v: partial(_tile, rows=r, vectors=v) for r in _ROW_CHOICES for v in range(1, VECTORS + 1)
    }
    chosen = function_of(function.module, "onnx_backprop_tiles", 13, choice("tile", sizes))
    b.call(chosen, [b.add(b.mul(rows, I64(VECTORS + 1)), vectors), *rest])
    b.ret_void()


@routine(_tiles)
def _multiply_tile(rows, vectors, c, c_row, a, a_rows, b, segments, table, count, a_step, b_step, add, chunk):
    """`multiply_tile`."""


@shared
def multiply_tile(rows, vectors, c, c_row, a, a_rows, b, segments, table, count, a_step, b_step, add, chunk):
    """`multiply` of whole vectors; `rows` is one of TILE_ROWS."""
    _multiply_tile(rows, vectors, c, c_row, a, a_rows, b, segments, table, count, a_step, b_step, add, chunk)


def _row_table() -> tuple[int, ...]:
    return tuple(next((r for r in _ROW_CHOICES if r >= n), ROWS) for n in range(ROWS + 1))


TILE_ROWS = _row_table()  # how many rows the tile for n rows has
SPARE_ROWS = max(tile - n for n, tile in enumerate(TILE_ROWS) if n)  # that a tile may write beyond the last


@inner
def multiply(rows, columns, c, a, b, table, count, add):
    """`multiply_in_chunks` of CHUNK steps."""
    multiply_in_chunks(rows, columns, c, a, b, table, count, add, CHUNK)


@inner
def multiply_in_chunks(rows, columns, c, a, b, table, count, add, chunk):
    """One tile of c, float32: at most ROWS rows and COLUMNS columns, more of either by TILE_ROWS and whole vectors.

    c: (address of its first element, step from row to row). a: (address, address of one start per row, step). b:
    (address, step). table: (address of pairs of starts in a and b, how many); of each, `count` >= 1 steps are summed.
    add: whether c is added to (else overwritten). chunk: steps after which it is. Steps and starts are in bytes.
    """
    vectors, (to, c_row), (left, a_rows, a_step), (right, b_step) = 1 if columns <= VECTOR else 2, c, a, b
    multiply_tile(
        TILE_ROWS[rows], vectors, to, c_row, left, a_rows, right, table[1], table[0], count, a_step, b_step, add, chunk
    )


@inner
def multiply_all(c, count, columns, a, b, table, length, add, chunk):
    """All tiles of `count` rows and of columns, in whole vectors; the offsets of the rows end with some of the last."""
    for column in range(0, columns, COLUMNS):
        for row in range(0, count, ROWS):
            to, rows, right = c[0] + c[1] * row + 4 * column, a[1] + 8 * row, (b[0] + column // COLUMNS * b[2], b[1])
            left, height = (a[0], rows, a[2]), min(ROWS, count - row)
            multiply_in_chunks(height, columns - column, (to, c[1]), left, right, table, length, add, chunk)


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
