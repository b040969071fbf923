"""A small kernel slid over a plane of one channel, as vector code: a depthwise correlation, or its data gradient.

    target[R·y + r, R·x + s] = Σ_{i, j} weights[r, s, i, j] · source[y + i, x + start_j]

for residues r and s < R, the stride of a data gradient, each with the i and j that a form lists. Down a block of
columns, every row of the source is loaded once and added to all the rows of the target that read it, whose sums stay in
registers. A row's products are summed first, from the left; then its sum is added, rows in order. With a stride, whose
rows have few products, these are added one after the other.
"""

from itertools import product

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.decorators import VECTOR
from onnx_backprop.ort_ops.compiler.llvm import Make, choice, routine
from onnx_backprop.ort_ops.vector.emit import (
    BYTES,
    FLOAT,
    I32,
    I64,
    IOTA,
    ITEM,
    LANES,
    VEC,
    ZERO,
    Block,
    Value,
    blocks,
    carry,
    woven_lanes,
)

# What a residue's cells read, of both axes alike: of square kernels of 3 and 5 cells, and of those with a stride of 2
# if the first cell is reached by the kernel's even ones (an even pad) or by its odd ones.
FORMS: dict[int, tuple[tuple[int, ...], ...]] = {
    3: ((0, 1, 2),),
    5: ((0, 1, 2, 3, 4),),
    13: ((0, 1), (1,)),
    15: ((0, 1, 2), (1, 2)),
    23: ((0,), (0, 1)),
    25: ((0, 1), (0, 1, 2)),
}
_AHEAD = 3072  # bytes


def _stencil(form: tuple[tuple[int, ...], ...]) -> Make:
    residues, reach = len(form), 1 + max(max(cells) for cells in form)
    taps = [(*of, i, j) for of in product(range(residues), repeat=2) for i in form[of[0]] for j in form[of[1]]]

    def make(function: ir.Function) -> None:
        target, target_row, source, source_row, low, reached, zeros, starts, weights, *others = function.args
        count, height, lines, length, second, apart, rest = others
        entry, block, line, other, sums, finish, step, further, leave = blocks(
            function, "entry block line other sums finish step further leave"
        )
        ends = entry.splat(entry.trunc(length, I32), LANES)
        firsts = [entry.word(entry.add(starts, I64(8 * j))) for j in range(reach)]
        offsets = [entry.mul(first, I64(ITEM)) for first in firsts]

        def weight_of(b: Block, number: int) -> Value:
            return b.splat(b.load(b.pointer(b.add(weights, I64(ITEM * number)), FLOAT)))

        few = len(taps) <= 16  # that fit the registers beside all else
        kept = [weight_of(entry, number) for number in range(len(taps) if few else 0)]
        halved = entry.icmp_signed("!=", second, I64(0))
        upper = entry.icmp_unsigned(">=", IOTA, entry.splat(entry.select(halved, I32(VECTOR // 2), I32(VECTOR)), LANES))
        entry.cbranch(entry.icmp_signed(">", count, I64(0)), block.block, leave.block)

        x = block.phi(I64)
        along = block.mul(x, I64(ITEM))
        masks, upper_masks = [], []
        for first in firsts:
            index = block.add(IOTA, block.splat(block.trunc(block.add(first, x), I32), LANES))
            inside = block.icmp_unsigned("<", index, ends)  # a negative index is a huge one
            masks.append(block.and_(inside, block.not_(upper)))
            inside = block.icmp_unsigned("<", block.sub(index, ir.Constant(LANES, [VECTOR // 2] * VECTOR)), ends)
            upper_masks.append(block.and_(inside, upper))
        left = block.sub(count, block.mul(x, I64(residues)))
        writable = left, block.select(halved, left, block.sub(left, I64(VECTOR)))
        block.branch(line.block)

        y = line.phi(I64)
        both = list(product(range(residues), repeat=2))
        running: dict[tuple[int, int, int], Value] = {
            (r, s, i): line.phi(VEC) for r, s in both for i in range(reach - 1)
        }

        def row_of(b: Block, number: Value) -> Value:
            index = b.add(low, number)  # negative ones are huge
            inside = b.icmp_unsigned("<", index, reached)
            return b.add(b.select(inside, b.add(source, b.mul(index, source_row)), zeros), along)

        row = row_of(line, y)
        values = [line.masked(line.add(row, at), mask) for at, mask in zip(offsets, masks, strict=True)]
        line.prefetch(line.add(row, I64(_AHEAD)), level=2)
        if residues > 1:
            line.cbranch(halved, other.block, sums.block)
            row = other.sub(row_of(other, other.add(y, second)), I64(BYTES // 2))
            lower, values = values, [sums.phi(VEC) for _ in values]
            for value, low, at, mask in zip(values, lower, offsets, upper_masks, strict=True):
                value.add_incoming(low, line.block)
                value.add_incoming(other.masked(other.add(row, at), mask, low), other.block)
        else:
            line.branch(sums.block)
        other.branch(sums.block)
        totals = dict[tuple[int, int, int], Value]()
        for number, (r, s, i, j) in enumerate(taps):
            weight = kept[number] if few else weight_of(sums, number)
            total = totals.get((r, s, i))
            if total is None and residues > 1 and i > form[r][0]:
                total = running[r, s, i - 1]
            totals[r, s, i] = sums.fma(weight, values[j], total) if total else sums.fmul(weight, values[j])
        for r, s, i in product(range(residues), range(residues), range(1, reach)):
            before, total = running[r, s, i - 1], totals.get((r, s, i))
            if total is None:
                totals[r, s, i] = before
            elif residues == 1 and i > form[r][0]:
                totals[r, s, i] = sums.fadd(before, total)
        sums.cbranch(sums.icmp_signed(">=", y, I64(reach - 1)), finish.block, step.block)

        place = finish.mul(finish.sub(y, I64(reach - 1)), I64(residues))
        to = finish.add(target, finish.add(finish.mul(place, target_row), finish.mul(along, I64(residues))))
        for r in range(residues):
            results = [totals[r, s, reach - 1] for s in range(residues)]
            if residues > 1:
                results = [finish.shuffle_vector(*results, ir.Constant(LANES, woven_lanes(half))) for half in range(2)]
            for half, result in enumerate(results):
                whole, part, onward = blocks(function, f"whole_{r}_{half} part_{r}_{half} onward_{r}_{half}")
                left, at = writable[half], finish.add(to, apart) if half else to
                if residues > 1:  # the last row may be one of the first residue
                    there = finish.icmp_signed("<", finish.add(place, I64(r)), rest if half else height)
                    left = finish.select(there, left, I64(0))
                finish.cbranch(finish.icmp_signed(">=", left, I64(VECTOR)), whole.block, part.block)
                whole.put(result, at)
                part.put(result, at, left)
                whole.branch(onward.block)
                part.branch(onward.block)
                finish = onward
            to = finish.add(to, target_row)
        finish.branch(step.block)

        y_next = step.add(y, I64(1))
        phis = [(phi, ZERO, totals.get(key, ZERO)) for key, phi in running.items()]
        carry([(y, I64(0), y_next), *phis], block, step)
        step.cbranch(step.icmp_signed("<", y_next, lines), line.block, further.block)

        following = further.add(x, I64(VECTOR))
        # the last block ends with the row and is partly computed again: AMD's masked stores are slow
        last = further.sub(further.sdiv(further.add(count, I64(residues - 1)), I64(residues)), I64(VECTOR))
        x_next = further.select(further.icmp_signed("<", following, last), following, last)
        carry([(x, I64(0), x_next)], entry, further)
        more = further.icmp_signed("<", further.mul(following, I64(residues)), count)
        further.cbranch(more, block.block, leave.block)
        leave.ret_void()

    return make


@routine(choice("stencil", {number: _stencil(form) for number, form in FORMS.items()}))
def weigh_plane(
    form, target, target_row, source, source_row, low, reached, zeros, starts, weights, count, height, lines, length,
    second, apart, rest,
):  # fmt: skip
    """`height` rows of `count` float32 from `lines` rows of the source, by one of FORMS.

    target_row, source_row: bytes from row to row. The source's first row, whose first element is at an address, is
    number 0, `low` the first one that is read; instead of those that are not below `reached` zeros are read. starts: of
    every j a word, the index in a row that target[·, 0] reads; a row has `length` < 2^31 elements, others count as zero
    and are not read. weights: float32, residue after residue, a row of each after the other. second: 0 or, with a
    stride and where a row takes half a register, how many rows further on the other half is computed from: `rest` rows,
    `apart` bytes behind the target. Without, `apart` is what a register has, `rest` as `height`.
    """
