"""Elementwise formulas as text, and as compiled loops that read each tensor once and write each result once.

    3 2; Mul s0 t2; Mul s1 t1; Add v0 v1; Mul s2 v2; Sub t0 v3 -> v4 v2

is the update of SGD with momentum: 3 tensors in, 2 out; t0 … the tensors, s0 … the numbers, v0 … what the steps in
between made. Every step is float32 and rounded, as if it were an operator of ONNX.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from llvmlite import ir

from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.ort_ops.compiler.decorators import VECTOR, compiled, exported
from onnx_backprop.ort_ops.compiler.llvm import fetch_add, load_i64
from onnx_backprop.ort_ops.compiler.objects import Exported
from onnx_backprop.ort_ops.compiler.records import Record, offset, view
from onnx_backprop.ort_ops.compiler.values import INT, Intrinsic
from onnx_backprop.ort_ops.vector.emit import FLOAT, I64, ITEM, VEC, ZERO, Block, Value, vectors

PIECE = 1 << 14  # elements that a thread takes at a time


def _sqrt(b: Block, x: Value) -> Value:
    return b.call(b.library(f"llvm.sqrt.v{VECTOR}f32", VEC, VEC), [x])


def _sign(b: Block, x: Value) -> Value:
    one, less = (ir.Constant(VEC, [number] * VECTOR) for number in (1.0, -1.0))
    below = b.select(b.fcmp_ordered("<", x, ZERO), less, b.select(b.fcmp_unordered("uno", x, x), x, ZERO))
    return b.select(b.fcmp_ordered(">", x, ZERO), one, below)


def _where(b: Block, truth: Value, x: Value, y: Value) -> Value:
    return b.select(b.fcmp_unordered("!=", truth, ZERO), x, y)


# operator of ONNX -> (its operands, what it is in LLVM)
STEPS: dict[str, tuple[int, Callable[..., Value]]] = {
    "Add": (2, Block.fadd),
    "Sub": (2, Block.fsub),
    "Mul": (2, Block.fmul),
    "Div": (2, Block.fdiv),
    "Sqrt": (1, _sqrt),
    "Sign": (1, _sign),
    "Where": (3, _where),  # of a number that is 0 or 1
}


@dataclass(frozen=True)
class Program:
    """A formula: how many tensors it takes, its steps (operator, operands), and what it gives."""

    tensors: int
    steps: tuple[tuple[str, tuple[str, ...]], ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        steps = "".join(f"; {op} {' '.join(operands)}" for op, operands in self.steps)
        return f"{self.tensors} {len(self.results)}{steps} -> {' '.join(self.results)}"

    @classmethod
    def parse(cls, text: str) -> Program:
        """The formula that `str` has written; InvalidModelError for any other text."""
        body, _, results = text.partition(" -> ")
        counts, *steps = body.split("; ")
        try:
            tensors, outputs = map(int, counts.split())
            split = [step.split() for step in steps]
            made = tuple((op, tuple(operands)) for op, *operands in split)
            program = cls(tensors, made, tuple(results.split()))
            known = {f"t{n}" for n in range(tensors)}
            for n, (op, operands) in enumerate(made):
                if STEPS[op][0] != len(operands) or not all(o in known or _number(o) is not None for o in operands):
                    raise InvalidModelError(f"no formula: {text!r}")
                known.add(f"v{n}")
            if len(program.results) != outputs or not known.issuperset(program.results):
                raise InvalidModelError(f"no formula: {text!r}")
        except (ValueError, KeyError) as e:
            raise InvalidModelError(f"no formula: {text!r}") from e
        return program

    @property
    def numbers(self) -> int:
        """How many numbers it reads."""
        read = [n for _, operands in self.steps for o in operands if (n := _number(o)) is not None]
        return max(read, default=-1) + 1


def _number(operand: str) -> int | None:
    return int(operand[1:]) if operand[:1] == "s" and operand[1:].isdigit() else None


def _loop(program: Program, function: ir.Function) -> None:
    """(numbers …, addresses of tensors and results …, elements)."""
    numbers, rest = function.args[: program.numbers], function.args[program.numbers :]
    tensors, results, count = rest[: program.tensors], rest[program.tensors : -1], rest[-1]

    def body(b: Block, done: Value, left: Value | None) -> None:
        at = b.mul(done, I64(ITEM))
        known = {f"t{n}": b.vector(b.add(tensor, at), left) for n, tensor in enumerate(tensors)}
        known |= {f"s{n}": b.splat(number) for n, number in enumerate(numbers)}
        for n, (op, operands) in enumerate(program.steps):
            known[f"v{n}"] = STEPS[op][1](b, *(known[o] for o in operands))
        for name, result in zip(program.results, results, strict=True):
            b.put(known[name], b.add(result, at), left)

    vectors(function, count, body)


def _run(text: str, name: str, builder: ir.IRBuilder, *values: Value) -> None:
    """Call the loop: (address of the numbers, of the row of addresses, first element, elements)."""
    numbers, row, first, count = values
    program = Program.parse(text)
    b = Block(builder.block)  # of which the end is where the builder is
    words = program.tensors + len(program.results)
    module = builder.module
    if name not in module.globals:
        kinds = [*[FLOAT] * program.numbers, *[I64] * (words + 1)]
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        _loop(program, function)
    read = [b.load(b.pointer(b.add(numbers, I64(ITEM * n)), FLOAT)) for n in range(program.numbers)]
    skipped = b.mul(first, I64(ITEM))
    addresses = [b.add(b.word(b.add(row, I64(8 * n))), skipped) for n in range(words)]
    b.call(module.globals[name], [*read, *addresses, count])
    builder.position_at_end(b.block)


@dataclass(kw_only=True)
class Job(Record):
    """What threads work on: `pieces` in all, of `items` tensors each.

    table: of each item its elements, then the addresses of its tensors and results. starts: its first piece.
    """

    next: int
    pieces: int
    items: int
    row_words: int
    table: int
    starts: int
    numbers: int


_NEXT = offset(Job, "next")


@cache
def stage_of(text: str) -> Exported:
    """A C function (job, thread) that applies the formula to one piece after the other."""
    name = f"update_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    run = Intrinsic(None, (INT,) * 4, partial(_run, text, name))

    @exported(None, INT, INT)
    @compiled(name)
    def work(address, _thread):
        job = view(Job, address)
        while True:
            n = fetch_add(address + _NEXT, 1)
            if n >= job.pieces:
                break
            low, high = 0, job.items
            while high - low > 1:
                middle = (low + high) // 2
                if load_i64(job.starts, middle) <= n:
                    low = middle
                else:
                    high = middle
            row = job.table + 8 * job.row_words * low
            first = (n - load_i64(job.starts, low)) * PIECE
            run(job.numbers, row + 8, first, min(load_i64(row, 0) - first, PIECE))

    return work
