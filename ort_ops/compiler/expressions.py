"""Expressions of the language that kernels are written in (see `language`), as code of LLVM."""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir

from onnx_backprop.ort_ops.compiler.constants import UNKNOWN, Constants
from onnx_backprop.ort_ops.compiler.records import Field, Record, layout, size, view
from onnx_backprop.ort_ops.compiler.values import (
    BOOL,
    CASTS,
    DOUBLE,
    INT,
    NOTHING,
    REAL,
    CompileError,
    Inner,
    Intrinsic,
    Type,
    Value,
    common,
    constant,
    converted,
    flat,
    integer,
    is_function,
    is_record,
    joined,
    leaves,
    llvm_type,
    pairs,
    tuple_of,
    unflat,
    zero,
)

if TYPE_CHECKING:
    from onnx_backprop.ort_ops.compiler.language import Module

# what LLVM calls an operator for floats and for integers
_BINARY = {
    ast.Add: ("fadd", "add"), ast.Sub: ("fsub", "sub"), ast.Mult: ("fmul", "mul"), ast.Div: ("fdiv", ""),
    ast.FloorDiv: ("", ""), ast.Mod: ("", ""), ast.BitAnd: ("", "and_"), ast.BitOr: ("", "or_"),
    ast.BitXor: ("", "xor"), ast.LShift: ("", "shl"), ast.RShift: ("", "ashr"),
}  # fmt: skip
_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


class Expressions(Constants):
    """What one function needs of its expressions while it is compiled."""

    module: Module
    llvm: Any  # the ir.Function
    b: Any  # the ir.IRBuilder where code goes
    fast: tuple[str, ...]

    def refused(self, node: Any, what: str) -> CompileError:
        code = self.inner.function.__code__
        line = getattr(node, "lineno", code.co_firstlineno)
        return CompileError(f"{code.co_filename}:{line}: {self.inner.name}: {what}: {ast.unparse(node)[:200]}")

    def value(self, node: ast.expr) -> Value:
        known = self.static(node)
        if known is not UNKNOWN:
            number = constant(known)
            if number is None:
                raise self.refused(node, f"not a number: {known!r}")
            return number
        match node:
            case ast.Name(name):
                return self.read(name, node)
            case ast.Tuple(elements):
                return tuple_of([self.value(element) for element in elements])
            case ast.BinOp(left, op, right):
                return self.binary(type(op), self.value(left), self.value(right))
            case ast.UnaryOp(ast.USub(), operand):
                return self.negative(self.value(operand))
            case ast.UnaryOp(ast.Not(), operand):
                return Value(BOOL, self.b.not_(converted(self.b, self.value(operand), BOOL).llvm))
            case ast.Compare() | ast.BoolOp():
                return self.truth(node)
            case ast.IfExp(test, body, orelse):
                return self.if_expression(test, body, orelse)
            case ast.Subscript():
                return self.subscript(node)
            case ast.Attribute():
                return self.field(node)
            case ast.Call():
                return self.call(node)
        raise self.refused(node, "not in this language")

    def read(self, name: str, node: Any) -> Value:
        if name not in self.variables:
            raise self.refused(node, f"{name} is not known here")
        variable = self.variables[name]
        return unflat(variable.type, iter([self.b.load(place) for place in flat(variable)]))

    def negative(self, value: Value) -> Value:
        if value.type in REAL:
            return Value(value.type, self.b.fneg(value.llvm, flags=self.fast))
        return Value(INT, self.b.neg(converted(self.b, value, INT).llvm))

    def binary(self, op: type[ast.operator], left: Value, right: Value) -> Value:
        if isinstance(left.type, tuple) or isinstance(right.type, tuple):
            return tuple_of([self.binary(op, *pair) for pair in pairs(left, right)])
        if op in (ast.BitAnd, ast.BitOr, ast.BitXor) and left.type == right.type == BOOL:
            kind: Type = BOOL
        else:
            kind = DOUBLE if op is ast.Div and common(left, right) == INT else common(left, right)
        b, x, y = self.b, converted(self.b, left, kind).llvm, converted(self.b, right, kind).llvm
        if op in (ast.FloorDiv, ast.Mod) and kind not in REAL:
            return Value(kind, self.divided(x, y, remainder=op is ast.Mod))
        of_floats, of_integers = _BINARY.get(op, ("", ""))
        make = getattr(b, of_floats if kind in REAL else of_integers, None)
        if make is None:
            raise CompileError(f"{op.__name__} of {kind}")
        return Value(kind, make(x, y, flags=self.fast if kind in REAL else ()))

    def divided(self, x: Any, y: Any, *, remainder: bool) -> Any:
        """Rounded down; by a power of two that is a shift, and the remainder a mask."""
        b = self.b
        if isinstance(y, ir.Constant) and y.constant > 0 and y.constant & (y.constant - 1) == 0:
            if remainder:
                return b.and_(x, integer(y.constant - 1))
            return b.ashr(x, integer(y.constant.bit_length() - 1))
        rest = b.srem(x, y)
        below = b.and_(b.icmp_signed("!=", rest, zero()), b.icmp_signed("<", b.xor(rest, y), zero()))
        if remainder:
            return b.select(below, b.add(rest, y), rest)
        return b.sub(b.sdiv(x, y), b.zext(below, llvm_type(INT)))

    def compare(self, op: type[ast.cmpop], left: Value, right: Value) -> Any:
        sign = _COMPARISONS.get(op)
        if sign is None:
            raise CompileError(f"no such comparison: {op.__name__}")
        if isinstance(left.type, tuple) and isinstance(right.type, tuple) and sign in ("==", "!="):
            elements = zip(flat(left), flat(right), strict=True)  # of integers, or they are refused here
            every = functools.reduce(self.b.and_, [self.b.icmp_signed("==", x, y) for x, y in elements])
            return every if sign == "==" else self.b.not_(every)
        kind = common(left, right)
        x, y = converted(self.b, left, kind).llvm, converted(self.b, right, kind).llvm
        if kind not in REAL:
            return self.b.icmp_signed(sign, x, y)
        unordered = sign == "!="
        make = self.b.fcmp_unordered if unordered else self.b.fcmp_ordered
        return make(sign, x, y, flags=self.fast)

    def truth(self, node: ast.expr) -> Value:
        """A comparison, `and`, `or`: a bool."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return Value(BOOL, self.compare(type(node.ops[0]), self.value(node.left), self.value(node.comparators[0])))
        yes, no, after = (self.llvm.append_basic_block(name) for name in ("yes", "no", "decided"))
        self.condition(node, yes, no)
        for block in (yes, no):
            ir.IRBuilder(block).branch(after)
        self.b.position_at_end(after)
        result = self.b.phi(llvm_type(BOOL))
        result.add_incoming(ir.Constant(llvm_type(BOOL), 1), yes)
        result.add_incoming(ir.Constant(llvm_type(BOOL), 0), no)
        return Value(BOOL, result)

    def condition(self, node: ast.expr, yes: ir.Block, no: ir.Block) -> None:
        """Go one of two ways; what need not be evaluated is not."""
        match node:
            case ast.BoolOp(op, values):
                for value in values[:-1]:
                    following = self.llvm.append_basic_block("also")
                    self.condition(value, *((following, no) if isinstance(op, ast.And) else (yes, following)))
                    self.b.position_at_end(following)
                self.condition(values[-1], yes, no)
            case ast.UnaryOp(ast.Not(), operand):
                self.condition(operand, no, yes)
            case ast.Compare(left, ops, comparators) if len(ops) > 1:
                before = self.value(left)
                for op, comparator in zip(ops, comparators, strict=True):
                    after = self.value(comparator)
                    holds, before = self.compare(type(op), before, after), after
                    following = yes if comparator is comparators[-1] else self.llvm.append_basic_block("also")
                    self.b.cbranch(holds, following, no)
                    if following is not yes:
                        self.b.position_at_end(following)
            case _:
                self.b.cbranch(converted(self.b, self.value(node), BOOL).llvm, yes, no)

    def if_expression(self, test: ast.expr, body: ast.expr, orelse: ast.expr) -> Value:
        known = self.static(test)
        if known is not UNKNOWN:
            return self.value(body if known else orelse)
        then, other, after = (self.llvm.append_basic_block(name) for name in ("then", "else", "chosen"))
        self.condition(test, then, other)
        self.b.position_at_end(then)
        one = self.value(body)
        then = self.b.block
        self.b.position_at_end(other)
        two = self.value(orelse)
        kind = joined(one.type, two.type)
        two, other = converted(self.b, two, kind), self.b.block
        self.b.branch(after)
        self.b.position_at_end(then)
        one = converted(self.b, one, kind)
        self.b.branch(after)
        self.b.position_at_end(after)
        merged = []
        for x, y in zip(flat(one), flat(two), strict=True):
            phi = self.b.phi(x.type)
            phi.add_incoming(x, then)
            phi.add_incoming(y, other)
            merged.append(phi)
        return unflat(kind, iter(merged))

    # ----- records ------

    def word(self, record: Value, at: Any, kind: Type = INT) -> Any:
        """The pointer to a word of a record."""
        place = self.b.inttoptr(record.llvm, llvm_type(kind).as_pointer())
        return self.b.gep(place, [at], source_etype=llvm_type(kind))

    def place(self, node: ast.Attribute) -> tuple[Value, Field]:
        """A record and a field of it."""
        record = self.value(node.value)
        field = layout(record.type).get(node.attr) if is_record(record.type) else None
        if field is None:
            raise self.refused(node, f"no such field of {record.type}")
        return record, field

    def field(self, node: ast.Attribute) -> Value:
        record, field = self.place(node)
        if field.record:
            return Value(field.record, self.b.add(record.llvm, integer(8 * field.first_word)))
        kind = DOUBLE if field.real else INT
        words = [
            Value(kind, self.b.load(self.word(record, integer(field.first_word + n), kind))) for n in range(field.words)
        ]
        return tuple_of(words) if field.length else words[0]

    def element(self, node: ast.Attribute, index: Value) -> Value:
        """One word of a field that is a tuple."""
        record, field = self.place(node)
        at = self.b.add(converted(self.b, index, INT).llvm, integer(field.first_word))
        return Value(INT, self.b.load(self.word(record, at)))

    def view(self, node: ast.Call) -> Value:
        """view(record, address) or view(record, address, index)."""
        record = self.static(node.args[0])
        if not (isinstance(record, type) and issubclass(record, Record)):
            raise self.refused(node, "not a class of records")
        address, *index = (converted(self.b, self.value(a), INT).llvm for a in node.args[1:])
        for n in index:
            address = self.b.add(address, self.b.mul(n, integer(8 * size(record))))
        return Value(record, address)

    # ----- elements ------

    def subscript(self, node: ast.Subscript) -> Value:
        table = self.static(node.value)
        if isinstance(table, tuple) and all(type(n) is int for n in table):
            index = converted(self.b, self.value(node.slice), INT).llvm
            place = self.b.gep(self.module.table(table), [zero(), index], inbounds=True)
            return Value(INT, self.b.load(place))
        if isinstance(node.value, ast.Attribute) and not isinstance(node.slice, ast.Slice):
            return self.element(node.value, self.value(node.slice))
        whole = self.value(node.value)
        if not isinstance(whole.type, tuple):
            raise self.refused(node, "not a tuple")
        if isinstance(node.slice, ast.Slice):
            ends = [self.static(e) if e else None for e in (node.slice.lower, node.slice.upper, node.slice.step)]
            if any(end is not None and not isinstance(end, int) for end in ends):
                raise self.refused(node, "ends must be constants")
            return Value(whole.type[slice(*ends)], whole.llvm[slice(*ends)])
        index = self.value(node.slice)
        if isinstance(index.llvm, ir.Constant):
            return whole.llvm[index.llvm.constant]
        if len({v.type for v in whole.llvm}) != 1 or isinstance(whole.type[0], tuple):
            raise self.refused(node, "elements must be of one type")
        at, (chosen, *others) = converted(self.b, index, INT).llvm, [v.llvm for v in whole.llvm]
        for n, other in enumerate(others, start=1):
            chosen = self.b.select(self.b.icmp_signed("==", at, integer(n)), other, chosen)
        return Value(whole.type[0], chosen)

    # ----- calls ------

    def call(self, node: ast.Call) -> Value:
        function = self.static(node.func)
        if function is UNKNOWN or node.keywords:
            raise self.refused(node, "no such call")
        if function is view:
            return self.view(node)
        arguments = [value for argument in node.args for value in self.argument(argument)]
        if isinstance(function, Inner):
            return self.call_inner(function, arguments)
        if isinstance(function, Intrinsic):
            return self.call_intrinsic(function, arguments)
        if function in (min, max) and len(arguments) >= 2:
            return functools.reduce(functools.partial(self.extreme, ast.Lt if function is min else ast.Gt), arguments)
        if function in CASTS and len(arguments) == 1:
            return converted(self.b, arguments[0], CASTS[function])
        if function is np.sqrt and arguments[0].type in REAL:
            kind = llvm_type(arguments[0].type)
            root = self.module.llvm.declare_intrinsic("llvm.sqrt", [kind])
            return Value(arguments[0].type, self.b.call(root, [arguments[0].llvm], fastmath=self.fast))
        raise self.refused(node, f"no call of {function!r}")

    def argument(self, node: ast.expr) -> list[Value]:
        """What an argument of a call stands for: with a star, all elements of a tuple."""
        if isinstance(node, ast.Starred):
            return list(self.value(node.value).llvm)
        known = self.static(node)
        return [Value(known, known) if is_function(known) else self.value(node)]

    def call_inner(self, inner: Inner, arguments: list[Value]) -> Value:
        if inner.shared:
            self.b.call(self.module.elsewhere(inner), [converted(self.b, a, INT).llvm for a in arguments])
            return NOTHING
        function, kind = self.module.function(inner, tuple(a.type for a in arguments))
        answer = self.b.call(function, [leaf for a in arguments for leaf in flat(a)])
        parts = leaves(kind)
        if len(parts) <= 1:
            return unflat(kind, iter([answer])) if parts else NOTHING
        return unflat(kind, iter([self.b.extract_value(answer, n) for n in range(len(parts))]))

    def call_intrinsic(self, intrinsic: Intrinsic, arguments: list[Value]) -> Value:
        given = [
            flat(argument) if wanted is None else converted(self.b, argument, wanted).llvm
            for argument, wanted in zip(arguments, intrinsic.parameters, strict=True)
        ]
        answer = intrinsic.generate(self.b, *given)
        return Value(intrinsic.result, answer) if intrinsic.result else NOTHING

    def extreme(self, op: type[ast.cmpop], best: Value, value: Value) -> Value:
        if isinstance(best.type, tuple) or isinstance(value.type, tuple):
            return tuple_of([self.extreme(op, *pair) for pair in pairs(best, value)])
        kind = common(best, value)
        x, y = converted(self.b, best, kind), converted(self.b, value, kind)
        return Value(kind, self.b.select(self.compare(op, x, y), x.llvm, y.llvm))
