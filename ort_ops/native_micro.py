"""The product that all convolutions end in, as vector code: c[i, j] (+)= Σ_e Σ_k a[i, e, k] · b[e, k, j].

Rows i are scalars that are broadcast, columns j fill whole vector registers; every accumulator stays in a register
until the sum is complete. The sum runs over a table of segments e, each a start in a and one in b, and within a
segment over k with a constant step in either. Written as LLVM IR, since no loop of Numba's is turned into this.
Nothing is reassociated: the order of each sum is that of the table, one fused multiply-add after the other.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from .native_llvm import intrinsic
from .native_source import REGISTERS, VECTOR

# Rows and vectors of the largest tile: all but a few of the registers hold accumulators.
ROWS = 12 if REGISTERS >= 32 else 6
VECTORS = 2
COLUMNS = VECTORS * VECTOR
_ROW_CHOICES = tuple(r for r in (1, 2, 4, 6, 8, 10, 12) if r <= ROWS)

_I64, _FLOAT = ir.IntType(64), ir.FloatType()
_VEC = ir.VectorType(_FLOAT, VECTOR)
_LANES = ir.VectorType(ir.IntType(32), VECTOR)
_ITEM = 4
Value = Any


def _pointer(b: ir.IRBuilder, address: Value, kind: ir.Type) -> Value:
    return b.inttoptr(address, kind.as_pointer())


def _vector(b: ir.IRBuilder, address: Value, j: int) -> Value:
    return _pointer(b, b.add(address, _I64(_ITEM * VECTOR * j)), _VEC)


def _fma(module: ir.Module) -> Value:
    name = f"llvm.fma.v{VECTOR}f32"
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(_VEC, [_VEC] * 3), name)


def _broadcast(b: ir.IRBuilder, scalar: Value) -> Value:
    nothing = ir.Constant(_VEC, ir.Undefined)
    return b.shuffle_vector(
        b.insert_element(nothing, scalar, ir.IntType(32)(0)), nothing, ir.Constant(_LANES, [0] * VECTOR)
    )


def _tile(module: ir.Module, rows: int, vectors: int) -> ir.Function:
    """The function of one tile size; its arguments are those of `multiply`."""
    name = f"onnx_backprop_tile_{rows}_{vectors}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 11), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    c, c_row, a, a_rows, b, segments, table, count, a_step, b_step, add = function.args
    entry, load, outer, inner, after, leave = (
        ir.IRBuilder(function.append_basic_block(n)) for n in ("entry", "load", "outer", "inner", "after", "leave")
    )
    cells = [(i, j) for i in range(rows) for j in range(vectors)]

    a_at = [entry.add(a, entry.load(_pointer(entry, entry.add(a_rows, _I64(8 * i)), _I64))) for i in range(rows)]
    c_at = [entry.add(c, entry.mul(c_row, _I64(i))) for i in range(rows)]
    entry.cbranch(entry.icmp_signed("!=", add, _I64(0)), load.block, outer.block)

    before = {(i, j): load.load(_vector(load, c_at[i], j), align=_ITEM) for i, j in cells}
    load.branch(outer.block)

    segment = outer.phi(_I64)
    sums = {cell: outer.phi(_VEC) for cell in cells}
    place = outer.add(table, outer.shl(segment, _I64(4)))
    a_start = outer.load(_pointer(outer, place, _I64))
    b_start = outer.add(b, outer.load(_pointer(outer, outer.add(place, _I64(8)), _I64)))
    outer.branch(inner.block)

    left, a_index, b_at = inner.phi(_I64), inner.phi(_I64), inner.phi(_I64)
    running = {cell: inner.phi(_VEC) for cell in cells}
    columns = [inner.load(_vector(inner, b_at, j), align=_ITEM) for j in range(vectors)]
    fma, result = _fma(module), {}
    for i in range(rows):
        scalar = _broadcast(inner, inner.load(_pointer(inner, inner.add(a_at[i], a_index), _FLOAT)))
        for j in range(vectors):
            result[i, j] = inner.call(fma, [scalar, columns[j], running[i, j]])
    fewer = inner.sub(left, _I64(1))
    steps = [(left, count, fewer), (a_index, a_start, inner.add(a_index, a_step))]
    steps += [(b_at, b_start, inner.add(b_at, b_step))]
    steps += [(running[cell], sums[cell], result[cell]) for cell in cells]
    for phi, first, following in steps:
        phi.add_incoming(first, outer.block)
        phi.add_incoming(following, inner.block)
    inner.cbranch(inner.icmp_signed(">", fewer, _I64(0)), inner.block, after.block)

    following = after.add(segment, _I64(1))
    zero = ir.Constant(_VEC, [0.0] * VECTOR)
    for block, start in ((entry.block, _I64(0)), (load.block, _I64(0)), (after.block, following)):
        segment.add_incoming(start, block)
    for cell in cells:
        sums[cell].add_incoming(zero, entry.block)
        sums[cell].add_incoming(before[cell], load.block)
        sums[cell].add_incoming(result[cell], after.block)
    after.cbranch(after.icmp_signed("<", following, segments), outer.block, leave.block)

    for i, j in cells:
        leave.store(result[i, j], _vector(leave, c_at[i], j), align=_ITEM)
    leave.ret_void()
    return function


def _dispatch(module: ir.Module) -> ir.Function:
    """(rows, vectors, …) -> the tile function; `rows` is one that `tile_rows` answered."""
    name = "onnx_backprop_tile"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 13), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    rows, vectors, *rest = function.args
    code = b.add(b.mul(rows, _I64(VECTORS + 1)), vectors)
    default = function.append_basic_block("default")
    switch = b.switch(code, default)
    for r in _ROW_CHOICES:
        for v in range(1, VECTORS + 1):
            case = ir.IRBuilder(function.append_basic_block(f"case_{r}_{v}"))
            case.call(_tile(module, r, v), rest)
            case.ret_void()
            switch.add_case(_I64(r * (VECTORS + 1) + v), case.block)
    ir.IRBuilder(default).ret_void()
    return function


@intrinsic
def multiply(_context, rows, vectors, c, c_row, a, a_rows, b, segments, table, count, a_step, b_step, add):
    """One tile of c, float32. All arguments are int64; steps and starts are in bytes.

    rows, vectors: size of the tile, `rows` one of TILE_ROWS. c: address of its first element, c_row: from row to row.
    a_rows: address of one start per row, added to a. table: address of `segments` pairs of starts in a and b; a
    segment has `count` >= 1 steps. add: whether c is added to (else overwritten).
    """

    def generate(target, builder, _signature, args):
        builder.call(_dispatch(builder.module), args)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 13), generate


def _row_table() -> tuple[int, ...]:
    return tuple(next((r for r in _ROW_CHOICES if r >= n), ROWS) for n in range(ROWS + 1))


TILE_ROWS = _row_table()  # how many rows the tile for n rows has


def _transpose(module: ir.Module) -> ir.Function:
    """Exchange, bit by bit, the bits of the row's index with those of the column's."""
    name = "onnx_backprop_transpose"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 4), name)
    function.linkage = "internal"
    b = ir.IRBuilder(function.append_basic_block("entry"))
    target, target_row, source, source_row = function.args
    rows: list[Value] = [
        b.load(_pointer(b, b.add(source, b.mul(source_row, _I64(i))), _VEC), align=_ITEM) for i in range(VECTOR)
    ]
    bit = 1
    while bit < VECTOR:
        low = ir.Constant(_LANES, [j if not j & bit else VECTOR + j - bit for j in range(VECTOR)])
        high = ir.Constant(_LANES, [j + bit if not j & bit else VECTOR + j for j in range(VECTOR)])
        for i in range(VECTOR):
            if not i & bit:
                pair = rows[i], rows[i + bit]
                rows[i], rows[i + bit] = b.shuffle_vector(*pair, low), b.shuffle_vector(*pair, high)
        bit *= 2
    for i, row in enumerate(rows):
        b.store(row, _pointer(b, b.add(target, b.mul(target_row, _I64(i))), _VEC), align=_ITEM)
    b.ret_void()
    return function


@intrinsic
def transpose_tile(_context, target, target_row, source, source_row):
    """A square of float32, as many rows as a register holds; addresses, and bytes from row to row."""

    def generate(target_context, builder, _signature, args):
        builder.call(_transpose(builder.module), args)
        return target_context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _gather(module: ir.Module) -> ir.Function:
    """The function behind `gather_columns`."""
    name = "onnx_backprop_gather"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 7), name)
    function.linkage = "internal"
    target, step, source, scale, starts, taps, count = function.args
    entry, column, tap, store, leave = (
        ir.IRBuilder(function.append_basic_block(n)) for n in ("entry", "column", "tap", "store", "leave")
    )
    entry.cbranch(entry.icmp_signed(">", count, _I64(0)), column.block, leave.block)

    i, place = column.phi(_I64), column.phi(_I64)
    start = column.add(starts, column.shl(i, _I64(3)))
    first = column.load(_pointer(column, start, _I64))
    last = column.load(_pointer(column, column.add(start, _I64(8)), _I64))
    zero = ir.Constant(_VEC, [0.0] * VECTOR)
    column.cbranch(column.icmp_signed("<", first, last), tap.block, store.block)

    t, total = tap.phi(_I64), tap.phi(_VEC)
    at = tap.add(taps, tap.shl(t, _I64(3)))
    index = tap.sext(tap.load(_pointer(tap, at, ir.IntType(32))), _I64)
    weight = _broadcast(tap, tap.load(_pointer(tap, tap.add(at, _I64(4)), _FLOAT)))
    value = tap.load(_pointer(tap, tap.add(source, tap.mul(index, scale)), _VEC), align=_ITEM)
    more = tap.call(_fma(module), [weight, value, total])
    following = tap.add(t, _I64(1))
    for phi, initial, later in ((t, first, following), (total, zero, more)):
        phi.add_incoming(initial, column.block)
        phi.add_incoming(later, tap.block)
    tap.cbranch(tap.icmp_signed("<", following, last), tap.block, store.block)

    result = store.phi(_VEC)
    result.add_incoming(zero, column.block)
    result.add_incoming(more, tap.block)
    store.store(result, _pointer(store, place, _VEC), align=_ITEM)
    next_i, next_place = store.add(i, _I64(1)), store.add(place, step)
    for phi, initial, later in ((i, _I64(0), next_i), (place, target, next_place)):
        phi.add_incoming(initial, entry.block)
        phi.add_incoming(later, store.block)
    store.cbranch(store.icmp_signed("<", next_i, count), column.block, leave.block)
    leave.ret_void()
    return function


@intrinsic
def gather_columns(_context, target, step, source, scale, starts, taps, count):
    """Vector i of target = Σ_t weight(t) · vector index(t) of source, t from starts[i] to starts[i + 1], in order.

    Addresses; step and scale are bytes from vector to vector. A tap is a word: index, an int32, and weight, a float32.
    """

    def generate(target_context, builder, _signature, args):
        builder.call(_gather(builder.module), args)
        return target_context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


DOT_TAPS = (9, 3, 1)  # how many sums `dot_taps` makes at once


def _dot(module: ir.Module, taps: int) -> ir.Function:
    """The function behind `dot_taps` for a number of taps."""
    name = f"onnx_backprop_dot_{taps}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 10), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step = function.args
    entry, outer, inner, after, leave = (
        ir.IRBuilder(function.append_basic_block(n)) for n in ("entry", "outer", "inner", "after", "leave")
    )
    places = [entry.load(_pointer(entry, entry.add(shifts, _I64(8 * t)), _I64)) for t in range(taps)]
    entry.branch(outer.block)
    line, a_start, b_start = (outer.phi(_I64) for _ in range(3))
    before = [outer.phi(_VEC) for _ in range(taps)]
    outer.branch(inner.block)
    left, a_at, b_at = (inner.phi(_I64) for _ in range(3))
    running = [inner.phi(_VEC) for _ in range(taps)]
    value = inner.load(_pointer(inner, a_at, _VEC), align=_ITEM)
    fma = _fma(module)
    result = [
        inner.call(fma, [value, inner.load(_pointer(inner, inner.add(b_at, place), _VEC), align=_ITEM), total])
        for place, total in zip(places, running, strict=True)
    ]
    fewer = inner.sub(left, _I64(1))
    steps = [(left, count, fewer), (a_at, a_start, inner.add(a_at, a_step)), (b_at, b_start, inner.add(b_at, b_step))]
    steps += list(zip(running, before, result, strict=True))
    for phi, first, following in steps:
        phi.add_incoming(first, outer.block)
        phi.add_incoming(following, inner.block)
    inner.cbranch(inner.icmp_signed(">", fewer, _I64(0)), inner.block, after.block)
    zero = ir.Constant(_VEC, [0.0] * VECTOR)
    rest = after.sub(line, _I64(1))
    steps = [(line, lines, rest), (a_start, a, after.add(a_start, a_line)), (b_start, b, after.add(b_start, b_line))]
    steps += [(total, zero, more) for total, more in zip(before, result, strict=True)]
    for phi, first, following in steps:
        phi.add_incoming(first, entry.block)
        phi.add_incoming(following, after.block)
    after.cbranch(after.icmp_signed(">", rest, _I64(0)), outer.block, leave.block)
    for t, total in enumerate(result):
        leave.store(total, _vector(leave, sums, t), align=_ITEM)
    leave.ret_void()
    return function


def _dot_function(taps: int) -> Any:
    @intrinsic
    def dot_taps(_context, sums, a, b, shifts, lines, a_line, b_line, count, a_step, b_step):
        """Vector sums[t] = Σ_{l, i} a[l, i] · b[l, i] at shifts[t]; addresses, steps in bytes; lines and count >= 1."""

        def generate(target_context, builder, _signature, args):
            builder.call(_dot(builder.module, taps), args)
            return target_context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return dot_taps


dot_9, dot_3, dot_1 = (_dot_function(taps) for taps in DOT_TAPS)
