"""A small kernel slid over a plane of one channel, as vector code: the correlation of a depthwise convolution.

    target[y, x] = Σ_{i, j} weights[i, j] · source[y + i, x + start_j]

Down a block of columns, every row of the source is loaded once and added to all the rows of the target that read it,
whose sums stay in registers. A row's products are summed first, from the left; then its sum is added, rows in order.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR, inner
from onnx_backprop.ort_ops.compiler.llvm import routine
from onnx_backprop.ort_ops.vector.emit import BYTES, I32, I64, IOTA, ITEM, LANES, VEC, ZERO, Value, blocks, carry

SIZES = (3, 5)  # of the kernels, square
_AHEAD = 3072  # bytes


def _stencil(size: int) -> Callable[[ir.Function], None]:
    def make(function: ir.Function) -> None:
        target, target_row, rows, starts, weights, count, lines, length = function.args
        entry, block, line, sums, finish, whole, part, step, further, leave = blocks(
            function, "entry block line sums finish whole part step further leave"
        )
        ends = entry.splat(entry.trunc(length, I32), LANES)
        firsts = [entry.word(entry.add(starts, I64(8 * j))) for j in range(size)]
        offsets = [entry.mul(first, I64(ITEM)) for first in firsts]
        place = [[entry.add(weights, I64(BYTES * (size * i + j))) for j in range(size)] for i in range(size)]
        few = size * size <= 16  # that fit the registers beside all else
        kept = [[entry.vector(at) for at in row] for row in place] if few else []
        entry.cbranch(entry.icmp_signed(">", count, I64(0)), block.block, leave.block)

        x = block.phi(I64)
        along = block.mul(x, I64(ITEM))
        masks = []
        for first in firsts:
            index = block.add(IOTA, block.splat(block.trunc(block.add(first, x), I32), LANES))
            masks.append(block.icmp_unsigned("<", index, ends))  # a negative index is a huge one
        writable = block.sub(count, x)
        block.branch(line.block)

        y, to = line.phi(I64), line.phi(I64)
        running: list[Value] = [line.phi(VEC) for _ in range(size - 1)]
        row = line.add(line.word(line.add(rows, line.shl(y, I64(3)))), along)
        values = [line.masked(line.add(row, at), mask) for at, mask in zip(offsets, masks, strict=True)]
        line.prefetch(line.add(row, I64(_AHEAD)), level=2)
        line.branch(sums.block)
        totals = []
        for i in range(size):
            total: Value = None
            for j, value in enumerate(values):
                weight = kept[i][j] if few else sums.vector(place[i][j])
                total = sums.fmul(weight, value) if j == 0 else sums.fma(weight, value, total)
            totals.append(sums.fadd(running[i - 1], total) if i else total)
        sums.cbranch(sums.icmp_signed(">=", y, I64(size - 1)), finish.block, step.block)
        at, after = finish.add(to, along), finish.add(to, target_row)
        finish.cbranch(finish.icmp_signed(">=", writable, I64(VECTOR)), whole.block, part.block)
        whole.put(totals[-1], at)  # AMD's masked stores are slow
        part.put(totals[-1], at, writable)

        to_next = step.phi(I64)
        to_next.add_incoming(to, sums.block)
        for stored in (whole, part):
            stored.branch(step.block)
            to_next.add_incoming(after, stored.block)
        y_next = step.add(y, I64(1))
        phis = [(phi, ZERO, total) for phi, total in zip(running, totals[:-1], strict=True)]
        carry([(y, I64(0), y_next), (to, target, to_next), *phis], block, step)
        step.cbranch(step.icmp_signed("<", y_next, lines), line.block, further.block)

        x_next = further.add(x, I64(VECTOR))
        carry([(x, I64(0), x_next)], entry, further)
        further.cbranch(further.icmp_signed("<", x_next, count), block.block, leave.block)
        leave.ret_void()

    return make


def _function(size: int) -> Any:
    @routine(_stencil(size), f"_{size}")
    def stencil(target, target_row, rows, starts, weights, count, lines, length): ...

    return stencil


_stencil_3, _stencil_5 = (_function(size) for size in SIZES)


@inner
def weigh_plane(size, target, target_row, rows, starts, weights, count, lines, length):
    """Rows of `count` float32 from `lines` rows of the source, size - 1 more than the target has.

    rows: the addresses of their cells that `starts` count from. starts: `size` words, the index in a source row that
    target[·, 0] reads with each column of weights; a source row has `length` < 2^31 elements, others count as zero and
    are not read. weights: a vector for each, a row after the other. target_row: bytes from row to row.
    """
    if size == 3:
        _stencil_3(target, target_row, rows, starts, weights, count, lines, length)
    else:
        _stencil_5(target, target_row, rows, starts, weights, count, lines, length)
