"""The language that kernels are written in, and its compiler: Python functions to one module of LLVM.

A function has parameters and local variables that are int64, int32, bool, float32, float64 or tuples of these; it has
assignments, if, while, `for … in range`, return, arithmetic, comparisons, calls of other such functions and of
intrinsics (`llvm.intrinsic`). Names that are not local are constants of the time of compilation. There are no
objects, no exceptions, no recursion. Anything else is refused with the line that holds it.

int64 wraps around; // and % round down as Python's do, and a divisor is never zero. A bool becomes an integer, and an
integer with a float a float64, as in NumPy. A tuple may be indexed by a variable where its elements are of one type,
which must lie in it. min and max take the later argument where a NaN makes comparing them false.

Much of a kernel is small functions, so each becomes a function of LLVM for each combination of argument types, private
to the module, and LLVM inlines them.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

Type = Any  # a name below, or a tuple of types
INT, INT32, BOOL, FLOAT, DOUBLE = "int64", "int32", "bool", "float32", "float64"
LLVM: dict[Type, ir.Type] = {
    INT: ir.IntType(64),
    INT32: ir.IntType(32),
    BOOL: ir.IntType(1),
    FLOAT: ir.FloatType(),
    DOUBLE: ir.DoubleType(),
}
NUMBA: dict[Type, Any] = {
    INT: types.int64,
    INT32: types.int32,
    BOOL: types.boolean,
    FLOAT: types.float32,
    DOUBLE: types.float64,
}
_OF_NUMBA = {of: name for name, of in NUMBA.items()}
_CASTS: dict[Any, str] = {
    np.int64: INT,
    np.int32: INT32,
    np.float32: FLOAT,
    np.float64: DOUBLE,
    int: INT,
    float: DOUBLE,
    bool: BOOL,
}
_SCALARS: dict[Any, str] = {np.bool_: BOOL, bool: BOOL, int: INT, float: DOUBLE} | {
    kind: name for kind, name in _CASTS.items() if kind not in (int, float, bool)
}
_RANKS: dict[Type, int] = {BOOL: 0, INT32: 1, INT: 2, FLOAT: 3, DOUBLE: 4}


class CompileError(Exception):
    """What a kernel may not contain: a mistake of whoever wrote it."""


@dataclass(eq=False)
class Inner:
    """A function that compiled functions call. `options`: fastmath, LLVM's flags of its floating point arithmetic."""

    function: Any  # a FunctionType
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.function.__module__.partition('ort_ops.')[2]}.{self.function.__qualname__}"


class Value(NamedTuple):
    """A value of LLVM, or for a tuple the values of its elements."""

    type: Type
    of: Any


class _Retyped(Exception):  # noqa: N818 - a signal, not an error
    """A variable, or the result (None), turns out to be of another type: start again."""


@dataclass(eq=False)
class Module:
    """A module of LLVM that grows by what is compiled into it."""

    of: ir.Module
    functions: dict[tuple[Inner, tuple[Type, ...]], tuple[ir.Function, Type]] = field(default_factory=dict)
    tables: dict[tuple[int, ...], ir.GlobalVariable] = field(default_factory=dict)

    def function(self, inner: Inner, arguments: tuple[Type, ...]) -> tuple[ir.Function, Type]:
        """The function for some types of arguments, and the type of its result, None for none."""
        key = (inner, arguments)
        if key not in self.functions:
            self.functions[key] = _compiled(self, inner, arguments)
        return self.functions[key]

    def export(self, inner: Inner, arguments: Sequence[Type], result: Type | None, name: str) -> None:
        """A C function of that name."""
        own, own_result = self.function(inner, tuple(arguments))
        kind = ir.FunctionType(LLVM[result] if result else ir.VoidType(), [LLVM[a] for a in arguments])
        outer = ir.Function(self.of, kind, name)
        builder = ir.IRBuilder(outer.append_basic_block("entry"))
        answer = builder.call(own, outer.args)
        if result is None:
            builder.ret_void()
        else:
            builder.ret(_converted(builder, Value(own_result, answer), result).of)

    def table(self, values: tuple[int, ...]) -> ir.GlobalVariable:
        """Constants in memory."""
        if values not in self.tables:
            kind = ir.ArrayType(LLVM[INT], len(values))
            table = ir.GlobalVariable(self.of, kind, f"table_{len(self.tables)}")
            table.initializer, table.global_constant, table.linkage = ir.Constant(kind, values), True, "private"
            self.tables[values] = table
        return self.tables[values]


# ----- types ------


def leaves(kind: Type | None) -> list[Type]:
    """The types of the elements of nested tuples, in order; of nothing, none."""
    if isinstance(kind, tuple):
        return [leaf for element in kind for leaf in leaves(element)]
    return [] if kind is None else [kind]


def _numba(kind: Type) -> Any:
    return types.Tuple([_numba(k) for k in kind]) if isinstance(kind, tuple) else NUMBA[kind]


def _joined(one: Type, other: Type) -> Type:
    """The type of a variable that is assigned both: an integer for integers, the wider float for floats."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(_joined(a, b) for a, b in zip(one, other, strict=True))
    ranks = _RANKS.get(one, -1), _RANKS.get(other, -1)
    if min(ranks) < 0 or (min(ranks) <= _RANKS[INT]) != (max(ranks) <= _RANKS[INT]):
        raise CompileError(f"one variable of types {one} and {other}")
    return one if ranks[0] >= ranks[1] else other


def _flat(value: Value) -> list[Any]:
    return [leaf for v in value.of for leaf in _flat(v)] if isinstance(value.type, tuple) else [value.of]


def _unflat(kind: Type, flat: Iterator[Any]) -> Value:
    if isinstance(kind, tuple):
        return Value(kind, tuple(_unflat(element, flat) for element in kind))
    return Value(kind, next(flat))


def _constant(value: Any) -> Value | None:
    """A constant of Python or NumPy as a value."""
    kind = _SCALARS.get(type(value))
    if kind is not None:
        return Value(kind, ir.Constant(LLVM[kind], float(value) if kind in (FLOAT, DOUBLE) else int(value)))
    if isinstance(value, tuple):
        elements = [_constant(v) for v in value]
        if all(elements):
            return Value(tuple(e.type for e in elements if e), tuple(elements))
    return None


def _converted(b: ir.IRBuilder, value: Value, to: Type) -> Value:
    """As a value of another type."""
    kind, of = value
    if kind == to:
        return value
    if isinstance(kind, tuple) and isinstance(to, tuple) and len(kind) == len(to):
        return Value(to, tuple(_converted(b, v, t) for v, t in zip(of, to, strict=True)))
    if isinstance(kind, tuple) or isinstance(to, tuple) or kind is None:
        raise CompileError(f"expected {to}, got {kind}")
    if isinstance(of, ir.Constant) and to != BOOL and isinstance(of.constant, (int, float)):
        cast = {INT: np.int64, INT32: np.int32, FLOAT: np.float32, DOUBLE: np.float64}[to](of.constant)
        return Value(to, ir.Constant(LLVM[to], cast.item()))
    if to == BOOL:
        zero = ir.Constant(LLVM[kind], 0)
        real = kind in (FLOAT, DOUBLE)
        return Value(BOOL, b.fcmp_unordered("!=", of, zero) if real else b.icmp_signed("!=", of, zero))
    target = LLVM[to]
    if to in (INT, INT32):
        if kind in (FLOAT, DOUBLE):
            return Value(to, b.fptosi(of, target))
        if kind == BOOL:
            return Value(to, b.zext(of, target))
        return Value(to, b.sext(of, target) if to == INT else b.trunc(of, target))
    if kind == BOOL:
        return Value(to, b.uitofp(of, target))
    if kind in (INT, INT32):
        return Value(to, b.sitofp(of, target))
    return Value(to, b.fpext(of, target) if to == DOUBLE else b.fptrunc(of, target))


# ----- source ------


@cache
def _parsed(filename: str) -> tuple[dict[tuple[str, int], ast.FunctionDef], dict[tuple[str, int], CodeType]]:
    """The functions of a file, as trees and as bytecode, by name and first line."""
    text = "".join(linecache.getlines(filename))
    tree = ast.parse(text)
    functions = {
        (node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])): node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    codes: dict[tuple[str, int], CodeType] = {}
    waiting = [compile(text, filename, "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        codes[code.co_name, code.co_firstlineno] = code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return functions, codes


def tree_of(function: FunctionType) -> ast.FunctionDef:
    """The source of a function, which must still be what the running code was made from."""
    code = function.__code__
    functions, codes = _parsed(code.co_filename)
    key = (code.co_name, code.co_firstlineno)
    if key not in functions or codes[key].co_code != code.co_code:
        raise CompileError(f"{code.co_filename} has changed since it was imported; start again")
    return functions[key]


# ----- a function ------

_BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_STATIC_COMPARISONS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_NOT_STATIC = object()


def _compiled(module: Module, inner: Inner, arguments: tuple[Type, ...]) -> tuple[ir.Function, Type]:
    tree = tree_of(inner.function)
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(tree))
    known: dict[str | None, Type] = {None: INT if returns else None}
    while True:
        name = module.of.get_unique_name(inner.name)
        try:
            return _Function(module, inner, tree, arguments, known, name).compiled()
        except _Retyped:
            del module.of.globals[name]


class _Function:
    """One function while it is compiled. `known`: types of variables that differ from what is seen first."""

    def __init__(
        self,
        module: Module,
        inner: Inner,
        tree: ast.FunctionDef,
        arguments: tuple[Type, ...],
        known: dict[str | None, Type],
        name: str,
    ) -> None:
        self.module, self.inner, self.tree, self.known = module, inner, tree, known
        self.fast = tuple(inner.options.get("fastmath", ()))
        results = [LLVM[leaf] for leaf in leaves(known[None])]
        result = ir.VoidType() if not results else results[0] if len(results) == 1 else ir.LiteralStructType(results)
        kind = ir.FunctionType(result, [LLVM[leaf] for a in arguments for leaf in leaves(a)])
        self.of: Any = ir.Function(module.of, kind, name)
        self.of.linkage = "private"
        self.entry: Any = ir.IRBuilder(self.of.append_basic_block("entry"))
        self.b: Any = ir.IRBuilder(self.of.append_basic_block("body"))
        self.start = self.b.block
        self.variables: dict[str, Value] = {}
        self.loops: list[tuple[ir.Block, ir.Block]] = []  # (where continue goes, where break goes)
        function = inner.function
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if len(tree.args.args) != len(arguments):
            raise self.refused(tree, f"called with {len(arguments)} arguments")
        flat = iter(self.of.args)
        for argument, type_ in zip(tree.args.args, arguments, strict=True):
            self.assign(argument.arg, _unflat(type_, flat))

    def compiled(self) -> tuple[ir.Function, Type]:
        self.block(self.tree.body)
        if not self.b.block.is_terminated:
            if self.known[None] is None:
                self.b.ret_void()
            else:
                self.b.unreachable()
        self.entry.position_at_end(self.entry.block)
        self.entry.branch(self.start)
        return self.of, self.known[None]

    def refused(self, node: Any, what: str) -> CompileError:
        code = self.inner.function.__code__
        line = getattr(node, "lineno", code.co_firstlineno)
        return CompileError(f"{code.co_filename}:{line}: {self.inner.name}: {what}: {ast.unparse(node)[:200]}")

    # ----- statements ------

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if self.b.block.is_terminated:
                return
            try:
                self.statement(statement)
            except CompileError as e:
                raise e if ".py:" in str(e) else self.refused(statement, str(e)) from e

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(ast.Constant()) | ast.Pass():
                pass
            case ast.Expr(ast.Call() as call):
                self.call(call)
            case ast.Assign():
                value = self.value(node.value)
                for target in node.targets:
                    self.unpack(target, value)
            case ast.AugAssign(ast.Name(name), op, right):
                self.assign(name, self.binary(type(op), self.read(name, node), self.value(right)))
            case ast.If():
                self.if_(node)
            case ast.While():
                self.while_(node)
            case ast.For(ast.Name(), ast.Call(ast.Name("range"))):
                self.for_range(node)
            case ast.For():
                self.for_constants(node)
            case ast.Return():
                self.return_(node)
            case ast.Continue():
                self.b.branch(self.loops[-1][0])
            case ast.Break():
                self.b.branch(self.loops[-1][1])
            case _:
                raise self.refused(node, "not in this language")

    def unpack(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(name):
                self.assign(name, value)
            case ast.Tuple(elements):
                if not isinstance(value.type, tuple) or len(value.type) != len(elements):
                    raise self.refused(target, f"cannot be taken from {value.type}")
                for element, part in zip(elements, value.of, strict=True):
                    self.unpack(element, part)
            case _:
                raise self.refused(target, "cannot be assigned")

    def assign(self, name: str, value: Value) -> None:
        if value.type is None:
            raise CompileError(f"{name} is assigned nothing")
        if name not in self.variables:
            kind = self.known.get(name, value.type)
            places = [self.place(leaf, name) for leaf in leaves(kind)]
            self.variables[name] = _unflat(kind, iter(places))
        variable = self.variables[name]
        joined = _joined(variable.type, value.type)
        if joined != variable.type:
            self.known[name] = joined
            raise _Retyped
        for place, part in zip(_flat(variable), _flat(_converted(self.b, value, joined)), strict=True):
            self.b.store(part, place)

    def place(self, kind: Type, name: str) -> Any:
        """A place on the stack; intrinsics reserve theirs in the same block."""
        self.entry.position_at_end(self.entry.block)
        return self.entry.alloca(LLVM[kind], name=name)

    def if_(self, node: ast.If) -> None:
        test = self.static(node.test)
        if test is not _NOT_STATIC:
            self.block(node.body if test else node.orelse)
            return
        then, after = (self.of.append_basic_block(name) for name in ("then", "after"))
        other = self.of.append_basic_block("else") if node.orelse else after
        self.condition(node.test, then, other)
        for block, body in ((then, node.body), (other, node.orelse)):
            if body:
                self.b.position_at_end(block)
                self.block(body)
                if not self.b.block.is_terminated:
                    self.b.branch(after)
        self.b.position_at_end(after)

    def while_(self, node: ast.While) -> None:
        if node.orelse:
            raise self.refused(node, "else of a loop")
        head, body, after = (self.of.append_basic_block(name) for name in ("while", "do", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.condition(node.test, body, after)
        self.loop(body, node.body, head, after)

    def loop(self, body: ir.Block, statements: list[ast.stmt], again: ir.Block, after: ir.Block) -> None:
        self.loops.append((again, after))
        self.b.position_at_end(body)
        self.block(statements)
        if not self.b.block.is_terminated:
            self.b.branch(again)
        self.loops.pop()
        self.b.position_at_end(after)

    def for_range(self, node: ast.For) -> None:
        """The counter is a variable of its own, as Python's is."""
        assert isinstance(node.iter, ast.Call)
        assert isinstance(node.target, ast.Name)
        if node.orelse or node.iter.keywords:
            raise self.refused(node, "else of a loop")
        limits = [_converted(self.b, self.value(a), INT).of for a in node.iter.args]
        zero, one = ir.Constant(LLVM[INT], 0), ir.Constant(LLVM[INT], 1)
        start, stop, step = [*((zero,) if len(limits) == 1 else ()), *limits, *((one,) if len(limits) < 3 else ())]
        counter = self.place(INT, "counter")
        self.b.store(start, counter)
        head, body, further, after = (
            self.of.append_basic_block(name) for name in ("range", "body", "further", "finished")
        )
        self.b.branch(head)
        self.b.position_at_end(head)
        count = self.b.load(counter)
        if isinstance(step, ir.Constant):
            going = self.b.icmp_signed("<" if step.constant > 0 else ">", count, stop)
        else:
            upwards = self.b.icmp_signed("<", count, stop)
            downwards = self.b.icmp_signed(">", count, stop)
            going = self.b.select(self.b.icmp_signed(">", step, zero), upwards, downwards)
        self.b.cbranch(going, body, after)
        self.b.position_at_end(further)
        self.b.store(self.b.add(self.b.load(counter), step, flags=("nsw",)), counter)
        self.b.branch(head)
        self.b.position_at_end(body)
        self.assign(node.target.id, Value(INT, count))
        self.loop(self.b.block, node.body, further, after)

    def for_constants(self, node: ast.For) -> None:
        """Over a tuple of constants: one body after the other."""
        values = self.static(node.iter)
        if not isinstance(values, tuple) or node.orelse or not isinstance(node.target, ast.Name):
            raise self.refused(node, "a loop is over range(…) or a tuple of constants")
        after = self.of.append_basic_block("finished")
        for value in values:
            constant = _constant(value)
            assert constant is not None
            body, again = self.of.append_basic_block("body"), self.of.append_basic_block("further")
            self.b.branch(body)
            self.b.position_at_end(body)
            self.assign(node.target.id, constant)
            self.loops.append((again, after))
            self.block(node.body)
            if not self.b.block.is_terminated:
                self.b.branch(again)
            self.loops.pop()
            self.b.position_at_end(again)
        self.b.branch(after)
        self.b.position_at_end(after)

    def return_(self, node: ast.Return) -> None:
        value = self.value(node.value) if node.value else Value(None, None)
        known = self.known[None]
        if value.type != known:
            joined = value.type
            # INT is the first guess only
            if "returned" in self.known:
                joined = _joined(known, value.type)
            if joined != known:
                self.known |= {None: joined, "returned": joined}
                raise _Retyped
        self.known["returned"] = known
        flat = _flat(_converted(self.b, value, known)) if known is not None else []
        if not flat:
            self.b.ret_void()
        elif len(flat) == 1:
            self.b.ret(flat[0])
        else:
            whole = ir.Constant(self.of.ftype.return_type, ir.Undefined)
            for n, part in enumerate(flat):
                whole = self.b.insert_value(whole, part, n)
            self.b.ret(whole)

    # ----- constants ------

    def named(self, name: str) -> Any:
        """What a name that is not local stands for."""
        if name in self.cells:
            return self.cells[name].cell_contents
        found = self.inner.function.__globals__.get(name, _NOT_STATIC)
        return getattr(builtins, name, _NOT_STATIC) if found is _NOT_STATIC else found

    def static(self, node: ast.expr) -> Any:
        """The value of an expression that is known now, else _NOT_STATIC."""
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                return _NOT_STATIC if name in self.variables else self.named(name)
            case ast.Attribute(of, name):
                owner = self.static(of)
                return getattr(owner, name) if isinstance(owner, ModuleType) else _NOT_STATIC
            case ast.UnaryOp(ast.USub(), operand):
                value = self.static(operand)
                return -value if isinstance(value, (int, float)) else _NOT_STATIC
            case ast.UnaryOp(ast.Not(), operand):
                value = self.static(operand)
                return not value if isinstance(value, (bool, int)) else _NOT_STATIC
            case ast.BinOp(left, op, right):
                one, other = self.static(left), self.static(right)
                if type(one) in (int, float) and type(other) in (int, float) and type(op) in _BINARY:
                    return _BINARY[type(op)](one, other)
            case ast.Compare(left, [op], [right]):
                one, other = self.static(left), self.static(right)
                if type(one) in (int, float) and type(other) in (int, float):
                    return _STATIC_COMPARISONS[_COMPARISONS[type(op)]](one, other)
            case ast.Tuple(elements):
                values = [self.static(element) for element in elements]
                if all(value is not _NOT_STATIC for value in values):
                    return tuple(values)
            case ast.Subscript(of, index):
                whole, at = self.static(of), self.static(index)
                if isinstance(whole, tuple) and isinstance(at, int):
                    return whole[at]
        return _NOT_STATIC

    # ----- expressions ------

    def value(self, node: ast.expr) -> Value:
        known = self.static(node)
        if known is not _NOT_STATIC:
            constant = _constant(known)
            if constant is None:
                raise self.refused(node, f"not a number: {known!r}")
            return constant
        match node:
            case ast.Name(name):
                return self.read(name, node)
            case ast.Tuple(elements):
                values = tuple(self.value(element) for element in elements)
                return Value(tuple(v.type for v in values), values)
            case ast.BinOp(left, op, right):
                return self.binary(type(op), self.value(left), self.value(right))
            case ast.UnaryOp(ast.USub(), operand):
                return self.negative(self.value(operand))
            case ast.UnaryOp(ast.Not(), operand):
                return Value(BOOL, self.b.not_(_converted(self.b, self.value(operand), BOOL).of))
            case ast.Compare() | ast.BoolOp():
                return self.truth(node)
            case ast.IfExp(test, body, orelse):
                return self.if_expression(test, body, orelse)
            case ast.Subscript():
                return self.subscript(node)
            case ast.Call():
                return self.call(node)
        raise self.refused(node, "not in this language")

    def read(self, name: str, node: Any) -> Value:
        if name not in self.variables:
            raise self.refused(node, f"{name} is not known here")
        variable = self.variables[name]
        return _unflat(variable.type, iter([self.b.load(place) for place in _flat(variable)]))

    def negative(self, value: Value) -> Value:
        if value.type in (FLOAT, DOUBLE):
            return Value(value.type, self.b.fneg(value.of, flags=self.fast))
        return Value(INT, self.b.neg(_converted(self.b, value, INT).of))

    def common(self, left: Value, right: Value) -> Type:
        """What both are converted to: int64, or a float that holds them."""
        kinds = {left.type, right.type}
        if any(kind not in _RANKS for kind in kinds):
            raise CompileError(f"no arithmetic with {left.type} and {right.type}")
        if kinds == {FLOAT} or kinds == {FLOAT, BOOL}:
            return FLOAT
        return DOUBLE if kinds & {FLOAT, DOUBLE} else INT

    def binary(self, op: type[ast.operator], left: Value, right: Value) -> Value:
        if op in (ast.BitAnd, ast.BitOr, ast.BitXor) and left.type == right.type == BOOL:
            kind: Type = BOOL
        else:
            kind = DOUBLE if op is ast.Div and self.common(left, right) == INT else self.common(left, right)
        b, x, y = self.b, _converted(self.b, left, kind).of, _converted(self.b, right, kind).of
        if kind in (FLOAT, DOUBLE):
            make = {ast.Add: b.fadd, ast.Sub: b.fsub, ast.Mult: b.fmul, ast.Div: b.fdiv}.get(op)
            if make is None:
                raise CompileError(f"{op.__name__} of floats")
            return Value(kind, make(x, y, flags=self.fast))
        if op in (ast.FloorDiv, ast.Mod):
            return Value(kind, self.divided(x, y, remainder=op is ast.Mod))
        return Value(
            kind,
            {
                ast.Add: b.add, ast.Sub: b.sub, ast.Mult: b.mul, ast.BitAnd: b.and_, ast.BitOr: b.or_,
                ast.BitXor: b.xor, ast.LShift: b.shl, ast.RShift: b.ashr,
            }[op](x, y),
        )  # fmt: skip

    def divided(self, x: Any, y: Any, *, remainder: bool) -> Any:
        """Rounded down; by a power of two that is a shift, and the remainder a mask."""
        b, zero = self.b, ir.Constant(LLVM[INT], 0)
        if isinstance(y, ir.Constant) and y.constant > 0 and y.constant & (y.constant - 1) == 0:
            if remainder:
                return b.and_(x, ir.Constant(LLVM[INT], y.constant - 1))
            return b.ashr(x, ir.Constant(LLVM[INT], y.constant.bit_length() - 1))
        rest = b.srem(x, y)
        below = b.and_(b.icmp_signed("!=", rest, zero), b.icmp_signed("<", b.xor(rest, y), zero))
        if remainder:
            return b.select(below, b.add(rest, y), rest)
        return b.sub(b.sdiv(x, y), b.zext(below, LLVM[INT]))

    def compare(self, sign: str, left: Value, right: Value) -> Any:
        if isinstance(left.type, tuple) and isinstance(right.type, tuple) and sign in ("==", "!="):
            pairs = zip(_flat(left), _flat(right), strict=True)  # of integers, or they are refused here
            equal = [self.b.icmp_signed("==", x, y) for x, y in pairs]
            every = functools.reduce(self.b.and_, equal)
            return every if sign == "==" else self.b.not_(every)
        kind = self.common(left, right)
        x, y = _converted(self.b, left, kind).of, _converted(self.b, right, kind).of
        if kind not in (FLOAT, DOUBLE):
            return self.b.icmp_signed(sign, x, y)
        unordered = sign == "!="
        make = self.b.fcmp_unordered if unordered else self.b.fcmp_ordered
        return make(sign, x, y, flags=self.fast)

    def truth(self, node: ast.expr) -> Value:
        """A comparison, `and`, `or`: a bool."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sign = _COMPARISONS.get(type(node.ops[0]))
            if sign is None:
                raise self.refused(node, "not in this language")
            return Value(BOOL, self.compare(sign, self.value(node.left), self.value(node.comparators[0])))
        yes, no, after = (self.of.append_basic_block(name) for name in ("yes", "no", "decided"))
        self.condition(node, yes, no)
        for block in (yes, no):
            ir.IRBuilder(block).branch(after)
        self.b.position_at_end(after)
        result = self.b.phi(LLVM[BOOL])
        result.add_incoming(ir.Constant(LLVM[BOOL], 1), yes)
        result.add_incoming(ir.Constant(LLVM[BOOL], 0), no)
        return Value(BOOL, result)

    def condition(self, node: ast.expr, yes: ir.Block, no: ir.Block) -> None:
        """Go one of two ways; what need not be evaluated is not."""
        match node:
            case ast.BoolOp(op, values):
                for value in values[:-1]:
                    following = self.of.append_basic_block("also")
                    self.condition(value, *((following, no) if isinstance(op, ast.And) else (yes, following)))
                    self.b.position_at_end(following)
                self.condition(values[-1], yes, no)
            case ast.UnaryOp(ast.Not(), operand):
                self.condition(operand, no, yes)
            case ast.Compare(left, ops, comparators) if len(ops) > 1:
                before = self.value(left)
                for op, comparator in zip(ops, comparators, strict=True):
                    after = self.value(comparator)
                    holds, before = self.compare(_COMPARISONS[type(op)], before, after), after
                    following = yes if comparator is comparators[-1] else self.of.append_basic_block("also")
                    self.b.cbranch(holds, following, no)
                    if following is not yes:
                        self.b.position_at_end(following)
            case _:
                self.b.cbranch(_converted(self.b, self.value(node), BOOL).of, yes, no)

    def if_expression(self, test: ast.expr, body: ast.expr, orelse: ast.expr) -> Value:
        known = self.static(test)
        if known is not _NOT_STATIC:
            return self.value(body if known else orelse)
        then, other, after = (self.of.append_basic_block(name) for name in ("then", "else", "chosen"))
        self.condition(test, then, other)
        self.b.position_at_end(then)
        one = self.value(body)
        then = self.b.block
        self.b.position_at_end(other)
        two = self.value(orelse)
        kind = one.type if one.type == two.type else _joined(one.type, two.type)
        two, other = _converted(self.b, two, kind), self.b.block
        self.b.branch(after)
        self.b.position_at_end(then)
        one = _converted(self.b, one, kind)
        self.b.branch(after)
        self.b.position_at_end(after)
        merged = []
        for x, y in zip(_flat(one), _flat(two), strict=True):
            phi = self.b.phi(x.type)
            phi.add_incoming(x, then)
            phi.add_incoming(y, other)
            merged.append(phi)
        return _unflat(kind, iter(merged))

    def subscript(self, node: ast.Subscript) -> Value:
        table = self.static(node.value)
        if isinstance(table, tuple) and all(type(n) is int for n in table):
            index = _converted(self.b, self.value(node.slice), INT).of
            place = self.b.gep(self.module.table(table), [ir.Constant(LLVM[INT], 0), index], inbounds=True)
            return Value(INT, self.b.load(place))
        whole = self.value(node.value)
        if not isinstance(whole.type, tuple):
            raise self.refused(node, "not a tuple")
        if isinstance(node.slice, ast.Slice):
            ends = [self.static(e) if e else None for e in (node.slice.lower, node.slice.upper, node.slice.step)]
            if any(end is not None and not isinstance(end, int) for end in ends):
                raise self.refused(node, "ends must be constants")
            return Value(whole.type[slice(*ends)], whole.of[slice(*ends)])
        index = self.value(node.slice)
        if isinstance(index.of, ir.Constant):
            return whole.of[index.of.constant]
        if len({v.type for v in whole.of}) != 1 or isinstance(whole.type[0], tuple):
            raise self.refused(node, "elements must be of one type")
        at, (chosen, *others) = _converted(self.b, index, INT).of, [v.of for v in whole.of]
        for n, other in enumerate(others, start=1):
            chosen = self.b.select(self.b.icmp_signed("==", at, ir.Constant(LLVM[INT], n)), other, chosen)
        return Value(whole.type[0], chosen)

    # ----- calls ------

    def call(self, node: ast.Call) -> Value:
        function = self.static(node.func)
        if function is _NOT_STATIC or node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            raise self.refused(node, "no such call")
        arguments = [self.value(argument) for argument in node.args]
        if isinstance(function, Inner):
            return self.call_inner(function, arguments)
        definition = getattr(function, "definition", None)
        if definition is not None:
            return self.call_intrinsic(definition, arguments)
        if function in (min, max) and len(arguments) >= 2:
            return self.extreme("<" if function is min else ">", arguments)
        if function in _CASTS and len(arguments) == 1:
            return _converted(self.b, arguments[0], _CASTS[function])
        if function is np.sqrt and arguments[0].type in (FLOAT, DOUBLE):
            kind = LLVM[arguments[0].type]
            root = self.module.of.declare_intrinsic("llvm.sqrt", [kind])
            return Value(arguments[0].type, self.b.call(root, [arguments[0].of], fastmath=self.fast))
        raise self.refused(node, f"no call of {function!r}")

    def call_inner(self, inner: Inner, arguments: list[Value]) -> Value:
        function, kind = self.module.function(inner, tuple(a.type for a in arguments))
        answer = self.b.call(function, [leaf for a in arguments for leaf in _flat(a)])
        parts = leaves(kind)
        if len(parts) <= 1:
            return _unflat(kind, iter([answer])) if parts else Value(None, None)
        return _unflat(kind, iter([self.b.extract_value(answer, n) for n in range(len(parts))]))

    def call_intrinsic(self, definition: Callable[..., Any], arguments: list[Value]) -> Value:
        """What a definition for Numba generates; tuples of one type are arrays there."""
        signature, generate = definition(None, *(_numba(a.type) for a in arguments))
        given = []
        for argument, wanted in zip(arguments, signature.args, strict=True):
            if isinstance(argument.type, tuple):
                kinds = [LLVM[leaf] for leaf in leaves(argument.type)]
                packed = ir.Constant(ir.ArrayType(kinds[0], len(kinds)), ir.Undefined)
                for n, leaf in enumerate(_flat(argument)):
                    packed = self.b.insert_value(packed, leaf, n)
                given.append(packed)
            else:
                given.append(_converted(self.b, argument, _OF_NUMBA[wanted]).of)
        answer = generate(_Target, self.b, signature, given)
        result = signature.return_type
        return Value(None, None) if result == types.void else Value(_OF_NUMBA[result], answer)

    def extreme(self, sign: str, arguments: list[Value]) -> Value:
        best = arguments[0]
        for value in arguments[1:]:
            kind = self.common(best, value)
            x, y = _converted(self.b, best, kind), _converted(self.b, value, kind)
            best = Value(kind, self.b.select(self.compare(sign, x, y), x.of, y.of))
        return best


class _Target:
    """What an intrinsic asks of Numba's target."""

    @staticmethod
    def get_dummy_value() -> None:
        return None
