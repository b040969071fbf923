"""Types and values of the language that kernels are written in (see `language`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from llvmlite import ir

from onnx_backprop.ort_ops.compiler.records import Record

Type = Any  # a name below, a class of records, or a tuple of types
INT, INT32, BOOL, FLOAT, DOUBLE = "int64", "int32", "bool", "float32", "float64"
_LLVM: dict[Type, ir.Type] = {
    INT: ir.IntType(64),
    INT32: ir.IntType(32),
    BOOL: ir.IntType(1),
    FLOAT: ir.FloatType(),
    DOUBLE: ir.DoubleType(),
}
CASTS: dict[Any, str] = {
    np.int64: INT, np.int32: INT32, np.float32: FLOAT, np.float64: DOUBLE, int: INT, float: DOUBLE, bool: BOOL,
}  # fmt: skip
_SCALARS: dict[Any, str] = CASTS | {np.bool_: BOOL}
_RANKS: dict[Type, int] = {BOOL: 0, INT32: 1, INT: 2, FLOAT: 3, DOUBLE: 4}
REAL = (FLOAT, DOUBLE)


class CompileError(Exception):
    """What a kernel may not contain: a mistake of whoever wrote it."""


@dataclass(eq=False)
class Inner:
    """A function that compiled functions call.

    fast: flags of LLVM's floating point arithmetic. apart: it is called, never inlined. shared: the Exported of one
    that is no part of its callers' machine code.
    """

    function: Any  # a FunctionType
    fast: tuple[str, ...] = ()
    apart: bool = False
    shared: Any = None

    def __call__(self, *_: Any) -> Any:
        raise TypeError(f"{self.name} is called by compiled functions only")

    @property
    def name(self) -> str:
        return f"{self.function.__module__.partition('ort_ops.')[2]}.{self.function.__qualname__}"


@dataclass(frozen=True, eq=False)
class Intrinsic:
    """What the language cannot say: `generate(builder, *values)` writes LLVM for a call. A parameter None takes all."""

    result: Type | None
    parameters: tuple[Type | None, ...]
    generate: Callable[..., Any]

    def __call__(self, *_: Any) -> Any:
        raise TypeError(f"{self.generate.__qualname__} is called by compiled functions only")


class Value(NamedTuple):
    """A value of LLVM, or for a tuple the values of its elements."""

    type: Type
    llvm: Any


NOTHING = Value(None, None)


def is_record(kind: Type) -> TypeGuard[type[Record]]:
    """Whether a type is the address of a record."""
    return isinstance(kind, type)


def llvm_type(kind: Type) -> ir.Type:
    """Of what is no tuple."""
    return _LLVM[INT if is_record(kind) else kind]


def zero(kind: Type = INT) -> ir.Constant:
    return ir.Constant(llvm_type(kind), 0)


def integer(n: int) -> ir.Constant:
    return ir.Constant(llvm_type(INT), n)


def is_function(kind: Any) -> TypeGuard[Inner | Intrinsic]:
    """Functions may be handed to functions: such an argument is its own type, and has no value."""
    return isinstance(kind, (Inner, Intrinsic))


def leaves(kind: Type | None) -> list[Type]:
    """The types of the elements of nested tuples, in order; of nothing and of functions, none."""
    if isinstance(kind, tuple):
        return [leaf for element in kind for leaf in leaves(element)]
    return [] if kind is None or is_function(kind) else [kind]


def joined(one: Type, other: Type) -> Type:
    """The type of a variable that is assigned both: an integer for integers, the wider float for floats."""
    if one == other:
        return one
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(joined(a, b) for a, b in zip(one, other, strict=True))
    ranks = _RANKS.get(one, -1), _RANKS.get(other, -1)
    if min(ranks) < 0 or (min(ranks) <= _RANKS[INT]) != (max(ranks) <= _RANKS[INT]):
        raise CompileError(f"one variable of types {one} and {other}")
    return one if ranks[0] >= ranks[1] else other


def common(left: Value, right: Value) -> Type:
    """What both are converted to in arithmetic: int64, or a float that holds them."""
    kinds = {INT if is_record(kind) else kind for kind in (left.type, right.type)}
    if any(kind not in _RANKS for kind in kinds):
        raise CompileError(f"no arithmetic with {left.type} and {right.type}")
    if FLOAT in kinds and kinds <= {FLOAT, BOOL}:
        return FLOAT
    return DOUBLE if kinds & set(REAL) else INT


def flat(value: Value) -> list[Any]:
    if isinstance(value.type, tuple):
        return [leaf for v in value.llvm for leaf in flat(v)]
    return [] if is_function(value.type) else [value.llvm]


def unflat(kind: Type, values: Iterator[Any]) -> Value:
    if isinstance(kind, tuple):
        return Value(kind, tuple(unflat(element, values) for element in kind))
    if is_function(kind):
        return Value(kind, kind)
    return Value(kind, next(values))


def tuple_of(values: list[Value]) -> Value:
    return Value(tuple(v.type for v in values), tuple(values))


def pairs(left: Value, right: Value) -> list[tuple[Value, Value]]:
    """The elements of two tuples side by side; what is no tuple stands beside each element of the other."""
    count = len(left.type) if isinstance(left.type, tuple) else len(right.type)
    columns = [v.llvm if isinstance(v.type, tuple) else (v,) * count for v in (left, right)]
    if len(columns[0]) != len(columns[1]):
        raise CompileError(f"no arithmetic with {left.type} and {right.type}")
    return list(zip(*columns, strict=True))


def constant(value: Any) -> Value | None:
    """A constant of Python or NumPy as a value."""
    kind = _SCALARS.get(type(value))
    if kind is not None:
        return Value(kind, ir.Constant(llvm_type(kind), float(value) if kind in REAL else int(value)))
    if isinstance(value, tuple):
        elements = [constant(v) for v in value]
        return tuple_of([e for e in elements if e]) if all(elements) else None
    return None


def converted(b: ir.IRBuilder, value: Value, to: Type) -> Value:
    """As a value of another type."""
    kind, of = value
    if kind == to:
        return value
    if isinstance(kind, tuple) and isinstance(to, tuple) and len(kind) == len(to):
        return Value(to, tuple(converted(b, v, t) for v, t in zip(of, to, strict=True)))
    if is_record(kind):
        return converted(b, Value(INT, of), to)
    if kind not in _RANKS or to not in _RANKS:
        raise CompileError(f"expected {to}, got {kind}")
    if isinstance(of, ir.Constant) and to != BOOL and isinstance(of.constant, (int, float)):
        types: dict[Type, Any] = {INT: np.int64, INT32: np.int32, FLOAT: np.float32, DOUBLE: np.float64}
        cast = types[to](of.constant)
        return Value(to, ir.Constant(llvm_type(to), cast.item()))
    if to == BOOL:
        unlike = b.fcmp_unordered if kind in REAL else b.icmp_signed
        return Value(BOOL, unlike("!=", of, zero(kind)))
    return Value(to, _cast(b, kind, to)(of, llvm_type(to)))


def _cast(b: ir.IRBuilder, kind: Type, to: Type) -> Any:
    if to not in REAL:
        return b.fptosi if kind in REAL else b.zext if kind == BOOL else b.sext if to == INT else b.trunc
    if kind in REAL:
        return b.fpext if to == DOUBLE else b.fptrunc
    return b.uitofp if kind == BOOL else b.sitofp
