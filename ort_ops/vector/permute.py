"""Elements of a row picked into vector registers by tables: what `gather_windows` is for.

A permutation of two registers takes any lane from either in one instruction, where the processor has it (x86 from AVX2
on). `machine.PERMUTES` says whether that is so; nothing here may be compiled elsewhere.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import routine
from onnx_backprop.ort_ops.vector.emit import BYTES, I32, I64, ITEM, LANES, VEC, ZERO, Block, Value, blocks, carry

WINDOW = 2 * VECTOR  # elements that one permutation chooses from
ROWS = 4  # gathered by one reading of the tables
# a pattern: a byte per lane, its place in the window, then a float32 per lane, its weight
PATTERN_BYTES = 5 * VECTOR
_PLACES = ir.VectorType(ir.IntType(8), VECTOR)


def _permuted(b: Block, low: Value, high: Value, places: Value) -> Value:
    """Lane i is element places[i] of low and high, side by side."""
    if VECTOR == 16:
        return b.call(b.library("llvm.x86.avx512.vpermi2var.ps.512", VEC, VEC, LANES, VEC), [low, places, high])
    permute = b.library("llvm.x86.avx2.permps", VEC, VEC, LANES)
    above = b.icmp_signed(">=", places, ir.Constant(LANES, [VECTOR] * VECTOR))
    return b.select(above, b.call(permute, [high, places]), b.call(permute, [low, places]))


def _windows(rows: int, streaming: bool) -> Callable[[ir.Function], None]:
    def make(function: ir.Function) -> None:
        target, target_row, source, source_row, ends, entries, patterns, count = function.args
        head, block, entry, done, whole, part, following, leave = blocks(
            function, "head block entry done whole part following leave"
        )
        to_rows = [head.add(target, head.mul(target_row, I64(r))) for r in range(rows)]
        from_rows = [head.add(source, head.mul(source_row, I64(r))) for r in range(rows)]
        ahead = head.mul(target_row, I64(ROWS))
        first = head.word(ends)
        head.cbranch(head.icmp_signed(">", count, I64(0)), block.block, leave.block)

        k, left, e_first = block.phi(I64), block.phi(I64), block.phi(I64)
        e_last = block.word(block.add(ends, block.mul(block.add(k, I64(1)), I64(8))))
        block.cbranch(block.icmp_signed("<", e_first, e_last), entry.block, done.block)

        e = entry.phi(I64)
        totals = [entry.phi(VEC) for _ in range(rows)]
        place = entry.add(entries, entry.shl(e, I64(3)))
        offset = entry.mul(entry.sext(entry.load(entry.pointer(place, I32)), I64), I64(ITEM))
        number = entry.sext(entry.load(entry.pointer(entry.add(place, I64(4)), I32)), I64)
        pattern = entry.add(patterns, entry.mul(number, I64(PATTERN_BYTES)))
        places = entry.zext(entry.load(entry.pointer(pattern, _PLACES), align=1), LANES)
        weights = entry.load(entry.pointer(entry.add(pattern, I64(VECTOR))), align=1)
        used = entry.fcmp_unordered("!=", weights, ZERO)
        more = []
        for row, total in zip(from_rows, totals, strict=True):
            at = entry.add(row, offset)
            value = _permuted(entry, entry.vector(at), entry.vector(entry.add(at, I64(BYTES))), places)
            # A lane that this entry has nothing for keeps its sum: 0 times an infinity would not.
            more.append(entry.select(used, entry.fma(weights, value, total), total))
        further = entry.add(e, I64(1))
        carry([(e, e_first, further)], block, entry)
        carry([(total, ZERO, sum_) for total, sum_ in zip(totals, more, strict=True)], block, entry)
        entry.cbranch(entry.icmp_signed("<", further, e_last), entry.block, done.block)

        results = [done.phi(VEC) for _ in range(rows)]
        carry([(result, ZERO, sum_) for result, sum_ in zip(results, more, strict=True)], block, entry)
        column = done.mul(k, I64(BYTES))
        done.cbranch(done.icmp_signed(">=", left, I64(VECTOR)), whole.block, part.block)
        for to, result in zip(to_rows, results, strict=True):
            at = whole.add(to, column)
            if streaming:
                whole.stream(result, at)
            else:
                whole.prefetch(whole.add(at, ahead), writing=True)
                whole.put(result, at)
        whole.branch(following.block)
        for to, result in zip(to_rows, results, strict=True):
            part.put(result, part.add(to, column), left)
        part.branch(following.block)

        next_k, fewer = following.add(k, I64(1)), following.sub(left, I64(VECTOR))
        carry([(k, I64(0), next_k), (left, count, fewer), (e_first, first, e_last)], head, following)
        following.cbranch(following.icmp_signed(">", fewer, I64(0)), block.block, leave.block)
        leave.ret_void()

    return make


def _function(rows: int, *, streaming: bool) -> Any:
    @routine(_windows(rows, streaming), f"_{rows}_{streaming}")
    def gather(target, target_row, source, source_row, ends, entries, patterns, count): ...

    return gather


_gather_rows, _gather_row = _function(ROWS, streaming=False), _function(1, streaming=False)
_stream_rows, _stream_row = _function(ROWS, streaming=True), _function(1, streaming=True)


@inner
def gather_windows(rows, target, target_row, source, source_row, ends, entries, patterns, count, streaming):
    """Rows of `count` float32: target[r, i] = Σ_e weight · source[r, base + place], over the entries of i's block.

    A block is a vector of elements. Addresses and bytes from row to row. ends: words, the entries of block k are
    ends[k] to ends[k + 1]. An entry is a word: base and number of its pattern, int32. WINDOW elements from every base
    on must be there to be read; what a pattern gives no weight has no influence. At most ROWS rows.
    streaming: whether whole blocks are stored past the caches; their addresses are then multiples of a vector's bytes.
    """
    if rows == ROWS and streaming:
        _stream_rows(target, target_row, source, source_row, ends, entries, patterns, count)
    elif rows == ROWS:
        _gather_rows(target, target_row, source, source_row, ends, entries, patterns, count)
    else:
        for r in range(rows):
            at, behind = target + r * target_row, source + r * source_row
            if streaming:
                _stream_row(at, target_row, behind, source_row, ends, entries, patterns, count)
            else:
                _gather_row(at, target_row, behind, source_row, ends, entries, patterns, count)
