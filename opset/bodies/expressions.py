"""Arithmetic inside a function body, with numpy's operators: folded where values are known, nodes where they are not.

The functions of `maths` that place taps run on arrays and on the tensors of a body alike: `Numpy` has, for the latter,
those functions of numpy that they call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from onnx_backprop.opset.bodies.builder import BOOL, DOUBLE, FLOAT, INT64, Body, Tensor
from onnx_backprop.opset.core.shapes import Dims

Number = int | float | bool
_TYPES: dict[int, Callable[[Any], Any]] = {FLOAT: np.float32, DOUBLE: float, INT64: int, BOOL: bool}
_FOLDS: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Mod": operator.mod,
    "Max": max,
    "Min": min,
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "And": operator.and_,
    "Or": operator.or_,
    "Not": operator.not_,
    "Abs": abs,
    "Floor": math.floor,
    "Ceil": math.ceil,
}
_NEUTRAL = {("Add", 0), ("Sub", 0), ("Mul", 1), ("Div", 1), ("And", True), ("Or", False)}
_DECIDES = {("Mod", 1): 0, ("And", False): False, ("Or", True): True}  # as right operands, whatever the left one is


def _operator(op_type: str, dtype: int | None = None, *, reflected: bool = False) -> Callable[[Any, Any], Any]:
    """A method that applies an operator; its result has the type of the operands or the given one."""

    def apply(self: Expression, other: Any) -> Any:
        left, right = (self._operand(other, self.dtype), self) if reflected else (self, other)
        return left._binary(op_type, right, dtype)

    return apply


class Expression:
    """A tensor inside a body, of one of the types above; what is computed of it are nodes. A number takes its type."""

    def __init__(self, b: Body, name: str, dtype: int) -> None:
        self.body, self.dtype, self._name = b, dtype, name

    @property
    def name(self) -> str:
        """The tensor."""
        return self._name

    def _operand(self, other: Expression | Number, dtype: int) -> Expression:
        return other if isinstance(other, Expression) else Vector(self.body, [other], dtype=dtype)

    def _binary(self, op_type: str, other: Expression | Number, dtype: int | None = None) -> Expression:
        result = getattr(self.body, op_type)(self.name, self._operand(other, self.dtype).name)
        return Expression(self.body, result, self.dtype if dtype is None else dtype)

    def unary(self, op_type: str) -> Expression:
        return Expression(self.body, getattr(self.body, op_type)(self.name), self.dtype)

    def cast(self, dtype: int) -> Expression:
        return self if dtype == self.dtype else Expression(self.body, self.body.Cast(self.name, to=dtype), dtype)

    def where(self, then: Expression | Number, otherwise: Expression | Number) -> Expression:
        """`then` where this holds, else `otherwise`; one of them may be a number."""
        dtype = next(x.dtype for x in (then, otherwise) if isinstance(x, Expression))
        names = (self._operand(x, dtype).name for x in (then, otherwise))
        return Expression(self.body, self.body.Where(self.name, *names), dtype)

    def sum(self, *, axis: int, keepdims: bool) -> Expression:
        b = self.body
        return Expression(b, b.ReduceSum(self.name, b.ints([axis]), keepdims=int(keepdims)), self.dtype)

    def require(self, message: str) -> Vector:
        """0; a run in which this does not hold everywhere fails with the message, if its result depends on the 0."""
        return Vector(self.body, [None], self.body.require(self.name, message))

    def __floordiv__(self, other: Any) -> Any:
        """Rounded down; ONNX's Div rounds toward zero, so the remainder is taken off first."""
        return (self - self % other)._binary("Div", other)

    def __invert__(self) -> Any:
        return self.unary("Not")

    def __abs__(self) -> Any:
        return self.unary("Abs")

    __add__, __radd__ = _operator("Add"), _operator("Add", reflected=True)
    __sub__, __rsub__ = _operator("Sub"), _operator("Sub", reflected=True)
    __mul__, __rmul__ = _operator("Mul"), _operator("Mul", reflected=True)
    __truediv__, __rtruediv__ = _operator("Div"), _operator("Div", reflected=True)
    __mod__ = _operator("Mod")  # of the sign of the divisor, in numpy as in ONNX
    __and__, __or__ = _operator("And"), _operator("Or")
    __lt__, __le__ = _operator("Less", BOOL), _operator("LessOrEqual", BOOL)
    __gt__, __ge__ = _operator("Greater", BOOL), _operator("GreaterOrEqual", BOOL)
    equal = _operator("Equal", BOOL)


class Vector(Expression):
    """A 1-D vector of known length: those of its entries that are known, and a tensor if not all of them are.

    Operators on vectors work entry by entry; a vector of one entry goes with any.
    """

    def __init__(self, b: Body, entries: Sequence[Any], name: str = "", dtype: int = INT64) -> None:
        super().__init__(b, name, dtype)
        self.entries = tuple(None if v is None else _value(v, dtype) for v in entries)
        assert name or None not in self.entries, "a tensor holds what is not known"

    @property
    def known(self) -> tuple[Any, ...] | None:
        """The entries when all are known."""
        return None if None in self.entries else self.entries

    @property
    def value(self) -> Any:
        """The one entry, None when it is not known."""
        (entry,) = self.entries
        return entry

    @property
    def count(self) -> int:
        return len(self.entries)

    @property
    def name(self) -> str:
        if self.known is None:
            return self._name
        if self.dtype == BOOL:
            return self.body.Cast(self.body.ints(self.known), to=BOOL)
        return self.body.constant(np.array(self.known, {FLOAT: "f4", DOUBLE: "f8", INT64: "i8"}[self.dtype]))

    @property
    def scalar(self) -> str:
        """The one entry as a 0-D tensor."""
        return self.body.Squeeze(self.name) if self.value is None else self.body.int_scalar(self.value)

    @property
    def dims(self) -> Dims:
        """The entries as dimensions of a shape."""
        return self.entries

    def __getitem__(self, where: int | slice | Sequence[int]) -> Vector:
        """One entry, some in a row, or those at some positions in that order."""
        if isinstance(where, int):
            where = [where]
        positions = range(self.count)[where] if isinstance(where, slice) else [p % self.count for p in where]
        entries = [self.entries[p] for p in positions]
        if None not in entries or list(positions) == list(range(self.count)):
            return Vector(self.body, entries, self._name if None in entries else "", self.dtype)
        return Vector(self.body, entries, self.body.Gather(self._name, self.body.ints(positions)), self.dtype)

    def knowing(self, entries: Sequence[Any]) -> Vector:
        """The same vector, of which somebody knows these entries; checks that its tensor depends on may be lost."""
        merged = [v if entry is None else entry for entry, v in zip(self.entries, entries, strict=True)]
        return Vector(self.body, merged, self._name, self.dtype)

    def _spread(self, count: int) -> tuple[Any, ...]:
        return self.entries * count if self.count == 1 else self.entries

    def _binary(self, op_type: str, other: Expression | Number, dtype: int | None = None) -> Expression:
        other, result = self._operand(other, self.dtype), self.dtype if dtype is None else dtype
        if not isinstance(other, Vector):
            return super()._binary(op_type, other, dtype)
        count = max(self.count, other.count)
        pairs = list(zip(self._spread(count), other._spread(count), strict=True))
        entries = [self._fold(op_type, a, c) for a, c in pairs]
        if None not in entries:
            return Vector(self.body, entries, dtype=result)
        if self.count == count and all((op_type, c) in _NEUTRAL for _, c in pairs):
            return self
        commutes = op_type in ("Add", "Mul", "And", "Or")
        if commutes and other.count == count and all((op_type, a) in _NEUTRAL for a, _ in pairs):
            return other
        return Vector(self.body, entries, getattr(self.body, op_type)(self.name, other.name), result)

    def _fold(self, op_type: str, a: Any, c: Any) -> Any:
        if a is not None and c is not None:
            convert = _TYPES[self.dtype]
            with np.errstate(all="ignore"):  # as in any kernel
                if op_type == "Div":
                    return convert(a) // convert(c) if self.dtype == INT64 else np.divide(convert(a), convert(c))
                return _FOLDS[op_type](convert(a), convert(c))
        if (op_type, c) in _DECIDES:
            return _DECIDES[op_type, c]
        return _DECIDES[op_type, a] if op_type in ("And", "Or") and (op_type, a) in _DECIDES else None

    def unary(self, op_type: str) -> Expression:
        if self.known is None:
            return Vector(self.body, [None] * self.count, super().unary(op_type).name, self.dtype)
        return Vector(self.body, [_FOLDS[op_type](v) for v in self.known], dtype=self.dtype)

    def cast(self, dtype: int) -> Vector:
        if dtype == self.dtype:
            return self
        return Vector(self.body, self.entries, "" if self.known else super().cast(dtype).name, dtype)

    def where(self, then: Any, otherwise: Any) -> Any:
        if self.count == 1 and self.value is not None:
            return then if self.value else otherwise
        dtype = next(x.dtype for x in (then, otherwise) if isinstance(x, Expression))
        then, otherwise = self._operand(then, dtype), self._operand(otherwise, dtype)
        if not isinstance(then, Vector) or not isinstance(otherwise, Vector):
            return super().where(then, otherwise)
        count = max(self.count, then.count, otherwise.count)
        choices = zip(self._spread(count), then._spread(count), otherwise._spread(count), strict=True)
        entries = [None if v is None else t if v else o for v, t, o in choices]
        name = super().where(then, otherwise).name if None in entries else ""
        return Vector(self.body, entries, name, dtype)

    def require(self, message: str) -> Vector:
        return Vector(self.body, [0]) if self.known and all(self.known) else super().require(message)

    def at_least(self, low: int) -> Vector:
        return _vector(self._binary("Max", low))

    def at_most(self, high: int) -> Vector:
        return _vector(self._binary("Min", high))

    def product(self) -> Vector:
        """The product of all entries, one entry; 1 of none."""
        return self._reduced("ReduceProd", math.prod)

    def least(self) -> Vector:
        return self._reduced("ReduceMin", min)

    def greatest(self) -> Vector:
        return self._reduced("ReduceMax", max)

    def _reduced(self, op_type: str, fold: Callable[..., Any]) -> Vector:
        if self.known is not None:
            return Vector(self.body, [fold(self.known)], dtype=self.dtype)
        if self.count == 1:
            return self
        return Vector(self.body, [None], getattr(self.body, op_type)(self.name, keepdims=1), self.dtype)


def _value(v: Any, dtype: int) -> Any:
    result = _TYPES[dtype](v)
    return float(result) if dtype == FLOAT else result


def _vector(x: Expression) -> Vector:
    assert isinstance(x, Vector)
    return x


def join(b: Body, *parts: Vector | int) -> Vector:
    """The entries of several vectors, one after the other."""
    vectors = [Vector(b, [p]) if isinstance(p, int) else p for p in parts]
    vectors = [v for v in vectors if v.count]
    entries = [v for part in vectors for v in part.entries]
    if len(vectors) == 1:
        return vectors[0]
    name = b.Concat(*(v.name for v in vectors), axis=0) if None in entries else ""
    return Vector(b, entries, name, vectors[0].dtype if vectors else INT64)


def product(b: Body, lengths: Sequence[Vector]) -> Vector:
    """The product of vectors of one entry; 1 of none."""
    return reduce(operator.mul, lengths, Vector(b, [1]))


def shape(b: Body, x: Tensor) -> Vector:
    """The shape of a tensor of known rank."""
    assert x.dims is not None, f"the rank of {x.name} is known here"
    entries = [d if isinstance(d, int) else None for d in x.dims]
    return Vector(b, entries, b.Shape(x) if None in entries else "")


class Numpy:
    """Functions of numpy for the tensors of a body, under their names there."""

    def __init__(self, b: Body) -> None:
        self._body = b

    def _expression(self, x: Any, dtype: int) -> Expression:
        return x if isinstance(x, Expression) else Vector(self._body, [x], dtype=dtype)

    def arange(self, stop: Any) -> Expression:
        b, count = self._body, self._expression(stop, INT64)
        end = count.scalar if isinstance(count, Vector) else b.Reshape(count.name, b.ints([]))
        return Expression(b, b.Range(b.int_scalar(0), end, b.int_scalar(1)), INT64)

    def expand_dims(self, x: Expression, axis: int) -> Expression:
        return Expression(self._body, self._body.Unsqueeze(x.name, self._body.ints([axis])), x.dtype)

    def concatenate(self, parts: Sequence[Expression], axis: int) -> Expression:
        return Expression(self._body, self._body.Concat(*(x.name for x in parts), axis=axis), parts[0].dtype)

    def ones_like(self, x: Expression, **_dtype: object) -> Expression:
        """In float32."""
        b = self._body
        return Expression(b, b.Expand(b.float_scalar(1), b.Shape(x.name)), FLOAT)

    def floor(self, x: Any) -> Expression:
        return self._expression(x, DOUBLE).unary("Floor")

    def ceil(self, x: Any) -> Expression:
        return self._expression(x, DOUBLE).unary("Ceil")

    def minimum(self, x: Expression, y: Any) -> Expression:
        return x._binary("Min", y)

    def maximum(self, x: Expression, y: Any) -> Expression:
        return x._binary("Max", y)

    def equal(self, x: Expression, y: Any) -> Expression:
        return x.equal(y)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return self._expression(condition, BOOL).where(x, y)

    def float32(self, x: Any) -> Expression:
        return self._expression(x, FLOAT).cast(FLOAT)

    def float64(self, x: Any) -> Expression:
        return self._expression(x, DOUBLE).cast(DOUBLE)

    def int64(self, x: Any) -> Expression:
        return self._expression(x, INT64).cast(INT64)
