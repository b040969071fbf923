"""Who wins each window of a pool, as vector code: the first greatest of some elements, for many windows at once.

Windows lie side by side, `step` elements apart, and all have the same cells, relative to their own. The champions and
their cells stay in registers until all taps have competed. Written as LLVM IR: LLVM turns no loop into this.
"""

from functools import partial

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import BF16, F16, F32, by_type, choice, load_i64, routine, store_i32
from onnx_backprop.ort_ops.vector.emit import Block, Value, blocks, carry

_I64, _I32, _I16, _FLOAT, _HALF = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType(), ir.HalfType()
_ELEMENTS = {F32: (_FLOAT, 4), F16: (_HALF, 2), BF16: (_I16, 2)}
WIDTHS = tuple(w for w in (16, 8, 4) if w <= max(VECTOR, 4))
COUNT = len(WIDTHS)


def _splat(b: Block, scalar: Value, width: int) -> Value:
    kind = ir.VectorType(scalar.type, width)
    nothing = ir.Constant(kind, ir.Undefined)
    lanes = ir.Constant(ir.VectorType(_I32, width), [0] * width)
    return b.shuffle_vector(b.insert_element(nothing, scalar, _I32(0)), nothing, lanes)


def _widened(b: Block, value: Value, kind: int, width: int) -> Value:
    """A vector of elements as float32."""
    if kind == F32:
        return value
    wide = ir.VectorType(_FLOAT, width)
    if kind == F16:
        return b.fpext(value, wide)
    integers = ir.VectorType(_I32, width)
    return b.bitcast(b.shl(b.zext(value, integers), ir.Constant(integers, [16] * width)), wide)


def _load(b: Block, address: Value, step: int, stride: Value, kind: int, width: int) -> Value:
    """Elements 0, step, 2·step … from an address; nothing beyond the last one is read. A step of 0 stands for any."""
    element, size = _ELEMENTS[kind]
    vector = ir.VectorType(element, width)
    if step == 1:
        return b.load(b.pointer(address, vector), align=size)
    if step == 2:
        low = b.load(b.pointer(address, vector), align=size)
        high = b.load(b.pointer(b.add(address, _I64(size * (width - 1))), vector), align=size)
        even = [*range(0, width, 2), *range(width + 1, 2 * width, 2)]
        return b.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, width), even))
    result = ir.Constant(vector, ir.Undefined)
    for lane in range(width):
        place = b.add(address, b.mul(stride, _I64(size * lane)))
        result = b.insert_element(result, b.load(b.pointer(place, element), align=size), _I32(lane))
    return result


def _winners(function: ir.Function, *, kind: int, step: int, width: int) -> None:
    """The function for windows a known step apart and some of them at once."""
    owner, source, table, taps, stride, owner_step, count = function.args
    entry, block, tap, done, leave = blocks(function, "entry block tap done leave")
    size, integers = _ELEMENTS[kind][1], ir.VectorType(_I32, width)
    last = entry.sub(count, _I64(width))
    iota = ir.Constant(integers, list(range(width)))
    apart = entry.mul(_splat(entry, entry.trunc(owner_step, _I32), width), iota)
    entry.branch(block.block)

    # the last block overlaps the one before where the windows do not fill it
    i = block.phi(_I64)
    begin = block.add(source, block.mul(i, block.mul(stride, _I64(size))))

    def entrant(b: Block, place: Value) -> tuple[Value, Value]:
        """The values of a tap, and its cell."""
        offset = b.load(b.pointer(place, _I64))
        cell = b.trunc(b.load(b.pointer(b.add(place, _I64(8)), _I64)), _I32)
        values = _load(b, b.add(begin, b.mul(offset, _I64(size))), step, stride, kind, width)
        return _widened(b, values, kind, width), _splat(b, cell, width)

    first, first_cell = entrant(block, table)
    block.cbranch(block.icmp_signed(">", taps, _I64(1)), tap.block, done.block)

    t, best, held = tap.phi(_I64), tap.phi(first.type), tap.phi(integers)
    value, cell = entrant(tap, tap.add(table, tap.shl(t, _I64(4))))
    wins = tap.fcmp_ordered(">", value, best)
    better, holder = tap.select(wins, value, best), tap.select(wins, cell, held)
    following = tap.add(t, _I64(1))
    carry([(t, _I64(1), following), (best, first, better), (held, first_cell, holder)], block, tap)
    tap.cbranch(tap.icmp_signed("<", following, taps), tap.block, done.block)

    winner = done.phi(integers)
    carry([(winner, first_cell, holder)], block, tap)
    shift = _splat(done, done.trunc(done.mul(i, owner_step), _I32), width)
    place = done.add(owner, done.shl(i, _I64(2)))
    done.store(done.add(winner, done.add(shift, apart)), done.pointer(place, integers), align=4)
    further = done.add(i, _I64(width))
    short = done.icmp_signed(">", further, last)
    following_i = done.select(short, last, further)
    carry([(i, _I64(0), following_i)], entry, done)
    done.cbranch(done.icmp_signed("<", i, last), block.block, leave.block)
    leave.ret_void()


_KINDS = (F32, F16, BF16)
_CHOICES = {
    (_KINDS.index(kind) * COUNT + n) * 3 + step: partial(_winners, kind=kind, step=step, width=width)
    for kind in _KINDS for n, width in enumerate(WIDTHS) for step in range(3)
}  # fmt: skip


@routine(choice("winners", _CHOICES))
def _winners_some(which, owner, source, table, taps, stride, owner_step, count):
    """One of _CHOICES."""


@inner
def _winners_few(load, _store, owner, source, table, taps, stride, owner_step, count):
    """Of fewer windows than the narrowest vector has lanes."""
    for i in range(count):
        best, cell = load(source, load_i64(table, 0) + i * stride), load_i64(table, 1)
        for t in range(1, taps):
            value = load(source, load_i64(table, 2 * t) + i * stride)
            if value > best:
                best, cell = value, load_i64(table, 2 * t + 1)
        store_i32(owner, i, cell + i * owner_step)


@inner
def winners(kind, owner, source, table, taps, stride, owner_step, count):
    """int32 owner[i] = cell(t) + i·owner_step, t the tap whose source[element(t) + i·stride] is the first greatest.

    Addresses. A tap is two words, element and cell; there is at least one. A later tap wins only if it is greater.
    """
    width = 0
    while width < COUNT and count < WIDTHS[width]:
        width += 1
    if width == COUNT:
        by_type(kind, _winners_few, owner, source, table, taps, stride, owner_step, count)
        return
    which = 0 if kind == F32 else 1 if kind == F16 else 2
    step = stride if stride == 1 or stride == 2 else 0
    _winners_some((which * COUNT + width) * 3 + step, owner, source, table, taps, stride, owner_step, count)
