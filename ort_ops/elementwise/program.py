"""Elementwise formulas as text, and as compiled loops that read each tensor once and write each result once.

    3 2; Mul s0 t2; Mul s1 t1; Add v0 v1; Mul s2 v2; Sub t0 v3 -> v4 v2

is the update of SGD with momentum: 3 tensors in, 2 out; t0 … the tensors, s0 … the numbers, v0 … what the steps in
between made. Every step is float32 and rounded, as if it were an operator of ONNX: + - · / √ have its bits, Exp, Erf
and Sigmoid are within 3 units in the last place.
"""

import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.ort_ops.compiler.decorators import VECTOR, compiled, exported
from onnx_backprop.ort_ops.compiler.llvm import fetch_add, load_i64
from onnx_backprop.ort_ops.compiler.objects import Exported
from onnx_backprop.ort_ops.compiler.records import Record, offset, view
from onnx_backprop.ort_ops.compiler.values import INT, Intrinsic
from onnx_backprop.ort_ops.vector.emit import FLOAT, I64, ITEM, LANES, MASK, VEC, ZERO, Block, Value, vectors

_EXP_LEAST, _EXP_MOST = -104.0, 89.0  # beyond: 0, infinite
_LN2_HIGH = 0.693359375  # of few bits, so that its product with n is exact
_LN2_LOW = math.log(2) - _LN2_HIGH
# erf(x)/x in x² for |x| <= 1, and log erfc(x) for 1 <= x <= 4
_ERF_NEAR = 1.12837917, -0.376126269, 0.112835975, -0.0268543288, 0.00518931194, -0.000801885499, 7.8824971e-05
_LOG_ERFC = (
    *(0.000128397893, -1.12930167, -0.63375924, -0.107847064),
    *(0.0248531177, -0.00407532986, 0.000415875705, -1.95951797e-05),
)
_ROUNDING = 1.5 * 2.0**23  # added to a small number leaves the nearest whole one in the last bits
PIECE = 1 << 14  # elements that a thread takes at a time


def _sqrt(b: Block, x: Value) -> Value:
    return b.call(b.library(f"llvm.sqrt.v{VECTOR}f32", VEC, VEC), [x])


def _sign(b: Block, x: Value) -> Value:
    one, less = (ir.Constant(VEC, [number] * VECTOR) for number in (1.0, -1.0))
    below = b.select(b.fcmp_ordered("<", x, ZERO), less, b.select(b.fcmp_unordered("uno", x, x), x, ZERO))
    return b.select(b.fcmp_ordered(">", x, ZERO), one, below)


def exp(b: Block, x: Value) -> Value:
    """e^x = 2^n · e^r, |r| <= ln 2 / 2, by the Taylor series to r^7; 1 ulp. Subnormal, infinite and NaN as they are."""

    def all_lanes(number: float) -> Value:
        return ir.Constant(VEC, [number] * VECTOR)

    def whole(number: int) -> Value:
        return ir.Constant(LANES, [number] * VECTOR)

    for bound, sign in ((_EXP_LEAST, "<"), (_EXP_MOST, ">")):
        x = b.select(b.fcmp_ordered(sign, x, all_lanes(bound)), all_lanes(bound), x)
    shifted = b.fma(x, all_lanes(1 / math.log(2)), all_lanes(_ROUNDING))  # n in its last bits
    n = b.fsub(shifted, all_lanes(_ROUNDING))
    r = b.fma(n, all_lanes(-_LN2_LOW), b.fma(n, all_lanes(-_LN2_HIGH), x))
    result = polynomial(b, r, tuple(1 / math.factorial(k) for k in range(8)))
    power = b.sub(b.bitcast(shifted, LANES), whole(struct.unpack("<i", struct.pack("<f", _ROUNDING))[0]))
    half = b.ashr(power, whole(1))
    for part in (half, b.sub(power, half)):  # 2^n itself may be no number
        result = b.fmul(result, b.bitcast(b.shl(b.add(part, whole(127)), whole(23)), VEC))
    return result


def polynomial(b: Block, x: Value, coefficients: tuple[float, ...]) -> Value:
    """Σ_k coefficients[k] · x^k."""
    result: Value = ir.Constant(VEC, [coefficients[-1]] * VECTOR)
    for coefficient in coefficients[-2::-1]:
        result = b.fma(result, x, ir.Constant(VEC, [coefficient] * VECTOR))
    return result


def _erf(b: Block, x: Value) -> Value:
    """x · P(x²) up to 1, from there on ±(1 - e^Q(|x|)), with P and Q fitted on Chebyshev's nodes."""
    one, four = (ir.Constant(VEC, [number] * VECTOR) for number in (1.0, 4.0))
    negative = b.fcmp_ordered("<", x, ZERO)
    size = b.select(negative, b.fneg(x), x)
    near = b.fmul(x, polynomial(b, b.fmul(x, x), _ERF_NEAR))
    far = b.fsub(one, exp(b, polynomial(b, b.select(b.fcmp_ordered("<", size, four), size, four), _LOG_ERFC)))
    far = b.select(negative, b.fneg(far), far)
    return b.select(b.fcmp_ordered(">", size, one), far, near)


def _sigmoid(b: Block, x: Value) -> Value:
    """1 / (1 + e^-x), as e^x / (1 + e^x) below 0."""
    one = ir.Constant(VEC, [1.0] * VECTOR)
    below = b.fcmp_ordered("<", x, ZERO)
    power = exp(b, b.select(below, x, b.fneg(x)))
    return b.fdiv(b.select(below, power, one), b.fadd(one, power))


def _relu(b: Block, x: Value) -> Value:
    """A NaN and -0 stay, as they do in onnxruntime."""
    return b.select(b.fcmp_ordered("<", x, ZERO), ZERO, x)


def _hard_swish(b: Block, x: Value) -> Value:
    """x · max(0, min(1, x/6 + 1/2)), in the steps of onnxruntime."""
    one, sixth, half = (ir.Constant(VEC, [float(np.float32(number))] * VECTOR) for number in (1, 1 / 6, 0.5))
    share = b.fadd(b.fmul(x, sixth), half)
    share = b.select(b.fcmp_ordered(">", share, one), one, share)
    return b.fmul(x, _relu(b, share))


def _where(b: Block, truth: Value, x: Value, y: Value) -> Value:
    return b.select(truth if truth.type == MASK else b.fcmp_unordered("!=", truth, ZERO), x, y)


def _compared(sign: str) -> Callable[..., Value]:
    return lambda b, x, y: b.fcmp_ordered(sign, x, y)


# vectors of float32; of one bit, which no result can be; and one of these, or a number that is 0 or not
TENSOR, FLAG, CHOICE = "tensor", "flag", "choice"
_NUMBER = "number"
_TAKES = {TENSOR: (TENSOR, _NUMBER), FLAG: (FLAG,), CHOICE: (FLAG, _NUMBER)}


class ProgramStep(NamedTuple):
    """An operator: what its operands and its result are, and its code."""

    operands: tuple[str, ...]
    emit: Callable[..., Value]
    result: str = TENSOR


_TWO = (TENSOR, TENSOR)
STEPS = {
    "Add": ProgramStep(_TWO, Block.fadd),
    "Sub": ProgramStep(_TWO, Block.fsub),
    "Mul": ProgramStep(_TWO, Block.fmul),
    "Div": ProgramStep(_TWO, Block.fdiv),
    "Neg": ProgramStep((TENSOR,), Block.fneg),
    "Sqrt": ProgramStep((TENSOR,), _sqrt),
    "Exp": ProgramStep((TENSOR,), exp),
    "Sigmoid": ProgramStep((TENSOR,), _sigmoid),
    "Erf": ProgramStep((TENSOR,), _erf),
    "Sign": ProgramStep((TENSOR,), _sign),
    "Relu": ProgramStep((TENSOR,), _relu),
    "HardSwish": ProgramStep((TENSOR,), _hard_swish),
    "Less": ProgramStep(_TWO, _compared("<"), FLAG),
    "LessOrEqual": ProgramStep(_TWO, _compared("<="), FLAG),
    "Greater": ProgramStep(_TWO, _compared(">"), FLAG),
    "GreaterOrEqual": ProgramStep(_TWO, _compared(">="), FLAG),
    "And": ProgramStep((FLAG, FLAG), Block.and_, FLAG),
    "Or": ProgramStep((FLAG, FLAG), Block.or_, FLAG),
    "Not": ProgramStep((FLAG,), Block.not_, FLAG),
    "Where": ProgramStep((CHOICE, *_TWO), _where),
    "ReLUBackward": ProgramStep(_TWO, lambda b, y, dy: b.select(b.fcmp_ordered(">", y, ZERO), dy, ZERO)),
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
    def parse(cls, text: str) -> "Program":
        """The formula that `str` has written; InvalidModelError for any other text."""
        body, _, results = text.partition(" -> ")
        counts, *steps = body.split("; ")
        try:
            tensors, outputs = map(int, counts.split())
            split = [step.split() for step in steps]
            operations = tuple((op, tuple(operands)) for op, *operands in split)
            program = cls(tensors, operations, tuple(results.split()))
            known = {f"t{n}": TENSOR for n in range(tensors)}
            for n, (op, operands) in enumerate(operations):
                kinds = [_NUMBER if _number(o) is not None else known.get(o) for o in operands]
                wanted = STEPS[op].operands
                if len(kinds) != len(wanted) or any(f not in _TAKES[w] for f, w in zip(kinds, wanted, strict=True)):
                    raise InvalidModelError(f"no formula: {text!r}")
                known[f"v{n}"] = STEPS[op].result
            if len(program.results) != outputs or any(known.get(name) != TENSOR for name in program.results):
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
            known[f"v{n}"] = STEPS[op].emit(b, *(known[o] for o in operands))
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


def digest(text: str) -> str:
    """What functions for a formula are named after."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def runner(text: str) -> Intrinsic:
    """run(numbers, row of the addresses of tensors and results, first element, elements), for compiled code."""
    return Intrinsic(None, (INT,) * 4, partial(_run, text, f"update_{digest(text)}"))


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
    run = runner(text)

    @exported(None, INT, INT)
    @compiled(f"update_{digest(text)}")
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
