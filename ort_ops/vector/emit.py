"""How vector code is written: a builder of LLVM IR for registers of float32, whose addresses are int64."""

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR

I1, I32, I64, FLOAT = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
VEC, LANES, MASK = (ir.VectorType(kind, VECTOR) for kind in (FLOAT, I32, I1))
ITEM = 4
BYTES = ITEM * VECTOR
MASKS = VECTOR >= 16  # AVX-512's registers of masks: without them a part of a vector takes long to store
ZERO = ir.Constant(VEC, [0.0] * VECTOR)
IOTA = ir.Constant(LANES, list(range(VECTOR)))
Value = Any


class Block(ir.IRBuilder):
    """Where code is to go. Arguments of int64 are addresses and numbers of elements."""

    def pointer(self, address: Value, kind: ir.Type = VEC) -> Value:
        return self.inttoptr(address, kind.as_pointer())

    def word(self, address: Value) -> Value:
        """The int64 at an address."""
        return self.load(self.pointer(address, I64))

    def splat(self, scalar: Value, kind: ir.VectorType = VEC) -> Value:
        """A vector whose lanes all hold a scalar."""
        nothing = ir.Constant(kind, ir.Undefined)
        one = self.insert_element(nothing, scalar, I32(0))
        return self.shuffle_vector(one, nothing, ir.Constant(LANES, [0] * VECTOR))

    def library(self, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
        """An intrinsic function of LLVM."""
        return self.module.globals.get(name) or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def below(self, count: Value) -> Value:
        """The mask of the first `count` lanes, any number."""
        least = self.select(self.icmp_signed("<", count, I64(VECTOR)), count, I64(VECTOR))
        least = self.select(self.icmp_signed(">", least, I64(0)), least, I64(0))
        return self.icmp_signed("<", IOTA, self.splat(self.trunc(least, I32), LANES))

    def masked(self, address: Value, mask: Value, other: Value = ZERO) -> Value:
        """The vector at an address; lanes outside the mask are another one's, zero, and are not read."""
        function = self.library(f"llvm.masked.load.v{VECTOR}f32.p0", VEC, VEC.as_pointer(), I32, MASK, VEC)
        return self.call(function, [self.pointer(address), I32(ITEM), mask, other])

    def put_masked(self, value: Value, address: Value, mask: Value) -> None:
        """Store a vector; lanes outside the mask are not written."""
        kinds = VEC, VEC.as_pointer(), I32, MASK
        function = self.library(f"llvm.masked.store.v{VECTOR}f32.p0", ir.VoidType(), *kinds)
        self.call(function, [value, self.pointer(address), I32(ITEM), mask])

    def vector(self, address: Value, left: Value | None = None) -> Value:
        """The vector at an address, or only so many of its elements, the others being zero."""
        return self.load(self.pointer(address), align=ITEM) if left is None else self.masked(address, self.below(left))

    def put(self, value: Value, address: Value, left: Value | None = None) -> None:
        """Store a vector, or only so many of its elements, which AMD's processors are slow at."""
        if left is None:
            self.store(value, self.pointer(address), align=ITEM)
        else:
            self.put_masked(value, address, self.below(left))

    def stream(self, value: Value, address: Value) -> None:
        """Store a vector past the caches, without the line being read first; the address is a multiple of its bytes.

        Other threads are to see it after `fence`.
        """
        stored = self.store(value, self.pointer(address), align=BYTES)
        stored.set_metadata("nontemporal", self.module.add_metadata([I32(1)]))

    def fma(self, x: Value, y: Value, z: Value) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        """x·y + z, rounded once."""
        return self.call(self.library(f"llvm.fma.v{VECTOR}f32", VEC, VEC, VEC, VEC), [x, y, z])

    def absolute(self, x: Value) -> Value:
        return self.call(self.library(f"llvm.fabs.v{VECTOR}f32", VEC, VEC), [x])

    def prefetch(self, address: Value, *, writing: bool = False, level: int = 1) -> None:
        """Fetch a line that will be needed later into the cache of this level; any address will do.

        The first level takes few lines at a time; a processor that waits for it waits for the memory.
        """
        function = self.library("llvm.prefetch.p0", ir.VoidType(), VEC.as_pointer(), I32, I32, I32)
        self.call(function, [self.pointer(address), I32(int(writing)), I32(4 - level), I32(1)])


def woven_lanes(half: int) -> list[int]:
    """Of two vectors whose elements alternate the lanes that make a half of that."""
    return [half * VECTOR // 2 + lane // 2 + VECTOR * (lane % 2) for lane in range(VECTOR)]


def blocks(function: ir.Function, names: str) -> list[Block]:
    """New blocks of a function."""
    return [Block(function.append_basic_block(name)) for name in names.split()]


def carry(values: Iterable[tuple[Value, Value, Value]], before: Block, again: Block) -> None:
    """Of every (phi, first, following) of a loop: what it is at first, and each time that the loop goes on."""
    for phi, first, following in values:
        phi.add_incoming(first, before.block)
        phi.add_incoming(following, again.block)


def vectors(
    function: ir.Function, count: Value, body: Callable[[Block, Value, Value | None], None], *, again: bool = False
) -> Any:
    """Call `body(builder, elements before, elements left or None for a whole vector)` to the end of a row.

    again: `body` may come to elements a second time, so that a row of a vector and more may end with a whole one. The
    block to start with is answered; the function returns behind the row.
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
    if again and not MASKS:
        behind, last = blocks(function, "behind last")
        rest.cbranch(rest.icmp_signed(">", left, I64(0)), behind.block, leave.block)
        behind.cbranch(behind.icmp_signed(">", done, I64(0)), last.block, part.block)
        body(last, last.sub(count, I64(VECTOR)), None)
        last.branch(leave.block)
    else:
        rest.cbranch(rest.icmp_signed(">", left, I64(0)), part.block, leave.block)
    body(part, done, left)
    part.branch(leave.block)
    leave.ret_void()
    return entry.block
