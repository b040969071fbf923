"""The language that kernels are written in, and its compiler: Python functions to one module of LLVM.

A function has parameters and local variables that are int64, int32, bool, float32, float64 or tuples of these; it has
assignments, if, while, `for … in range`, return, arithmetic, comparisons, fields of records (`records.view`), calls of
other such functions and of intrinsics (`llvm.intrinsic`). Names that are not local are constants of the time of
compilation; a function may be handed such a name of another function. There are no objects, no exceptions, no
recursion. Anything else is refused with the line that holds it.

Arithmetic, min and max of tuples are those of their elements, one by one: (1, 2) + (3, 4) is (4, 6), and (1, 2) - 1 is
(0, 1).

int64 wraps around; // and % round down as Python's do, and a divisor is never zero. A bool becomes an integer, and an
integer with a float a float64, as in NumPy. A tuple may be indexed by a variable where its elements are of one type,
which must lie in it. min and max take the later argument where a NaN makes comparing them false.

Much of a kernel is small functions, so each becomes a function of LLVM for each combination of argument types, private
to the module, and LLVM inlines them.
"""

import ast
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from llvmlite import ir

from onnx_backprop.ort_ops.compiler.constants import UNKNOWN
from onnx_backprop.ort_ops.compiler.expressions import Expressions
from onnx_backprop.ort_ops.compiler.values import (
    INT,
    NOTHING,
    CompileError,
    Inner,
    Type,
    Value,
    constant,
    converted,
    flat,
    integer,
    is_function,
    joined,
    leaves,
    llvm_type,
    unflat,
    zero,
)


@dataclass(eq=False)
class Module:
    """A module of LLVM that grows by what is compiled into it.

    symbol: of an Exported, what other modules call it.
    """

    llvm: ir.Module
    symbol: Callable[[Any], str]
    functions: dict[tuple[Inner, tuple[Type, ...]], tuple[ir.Function, Type]] = field(default_factory=dict)
    tables: dict[tuple[int, ...], ir.GlobalVariable] = field(default_factory=dict)

    def function(self, inner: Inner, arguments: tuple[Type, ...]) -> tuple[ir.Function, Type]:
        """The function for some types of arguments, and the type of its result, None for none."""
        key = (inner, arguments)
        if key not in self.functions:
            self.functions[key] = _compiled(self, inner, arguments)
        return self.functions[key]

    def elsewhere(self, inner: Inner) -> ir.Function:
        """A shared function, which is compiled by itself."""
        name, count = self.symbol(inner.shared), inner.function.__code__.co_argcount
        if name not in self.llvm.globals:
            ir.Function(self.llvm, ir.FunctionType(ir.VoidType(), [llvm_type(INT)] * count), name)
        return self.llvm.globals[name]

    def export(self, inner: Inner, arguments: Sequence[Type], result: Type | None, name: str) -> None:
        """A C function of that name."""
        callee, callee_result = self.function(inner, tuple(arguments))
        kind = ir.FunctionType(llvm_type(result) if result else ir.VoidType(), [llvm_type(a) for a in arguments])
        outer = ir.Function(self.llvm, kind, name)
        builder = ir.IRBuilder(outer.append_basic_block("entry"))
        answer = builder.call(callee, outer.args)
        if result is None:
            builder.ret_void()
        else:
            builder.ret(converted(builder, Value(callee_result, answer), result).llvm)

    def table(self, values: tuple[int, ...]) -> ir.GlobalVariable:
        """Constants in memory."""
        if values not in self.tables:
            kind = ir.ArrayType(llvm_type(INT), len(values))
            table: Any = ir.GlobalVariable(self.llvm, kind, f"table_{len(self.tables)}")
            table.initializer, table.global_constant, table.linkage = ir.Constant(kind, values), True, "private"
            self.tables[values] = table
        return self.tables[values]


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


def _compiled(module: Module, inner: Inner, arguments: tuple[Type, ...]) -> tuple[ir.Function, Type]:
    tree = tree_of(inner.function)
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(tree))
    known: dict[str | None, Type] = {None: INT if returns else None}
    while True:
        name = module.llvm.get_unique_name(inner.name)
        try:
            return _Function(module, inner, tree, arguments, known, name).compiled()
        except _Retyped:
            del module.llvm.globals[name]


class _Retyped(Exception):  # noqa: N818 - a signal, not an error
    """A variable, or the result (None), turns out to be of another type: start again."""


class _Function(Expressions):
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
        self.fast = inner.fast
        results = [llvm_type(leaf) for leaf in leaves(known[None])]
        result = ir.VoidType() if not results else results[0] if len(results) == 1 else ir.LiteralStructType(results)
        kind = ir.FunctionType(result, [llvm_type(leaf) for a in arguments for leaf in leaves(a)])
        self.llvm: Any = ir.Function(module.llvm, kind, name)
        self.llvm.linkage = "private"
        if inner.apart:
            self.llvm.attributes.add("noinline")
        self.entry: Any = ir.IRBuilder(self.llvm.append_basic_block("entry"))
        self.b: Any = ir.IRBuilder(self.llvm.append_basic_block("body"))
        self.start = self.b.block
        self.variables: dict[str, Value] = {}
        self.loops: list[tuple[ir.Block, ir.Block]] = []  # (where continue goes, where break goes)
        function = inner.function
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        names, others = [argument.arg for argument in tree.args.args], tree.args.vararg
        if others and len(arguments) >= len(names):
            names.append(others.arg)
            arguments = (*arguments[: len(names) - 1], arguments[len(names) - 1 :])
        if len(names) != len(arguments):
            raise self.refused(tree, f"called with {len(arguments)} arguments")
        self.functions = {n: kind for n, kind in zip(names, arguments, strict=True) if is_function(kind)}
        given = iter(self.llvm.args)
        for argument, type_ in zip(names, arguments, strict=True):
            if argument not in self.functions:
                self.assign(argument, unflat(type_, given))

    def compiled(self) -> tuple[ir.Function, Type]:
        self.block(self.tree.body)
        if not self.b.block.is_terminated:
            if self.known[None] is None:
                self.b.ret_void()
            else:
                self.b.unreachable()
        self.entry.position_at_end(self.entry.block)
        self.entry.branch(self.start)
        return self.llvm, self.known[None]

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
                for element, part in zip(elements, value.llvm, strict=True):
                    self.unpack(element, part)
            case ast.Attribute():
                record, field = self.place(target)
                if field.length or field.real or field.record:
                    raise self.refused(target, "cannot be assigned")
                place = self.word(record, integer(field.first_word))
                self.b.store(converted(self.b, value, INT).llvm, place)
            case _:
                raise self.refused(target, "cannot be assigned")

    def assign(self, name: str, value: Value) -> None:
        if value.type is None:
            raise CompileError(f"{name} is assigned nothing")
        if name not in self.variables:
            kind = self.known.get(name, value.type)
            places = [self.reserve(leaf, name) for leaf in leaves(kind)]
            self.variables[name] = unflat(kind, iter(places))
        variable = self.variables[name]
        kind = joined(variable.type, value.type)
        if kind != variable.type:
            self.known[name] = kind
            raise _Retyped
        for place, part in zip(flat(variable), flat(converted(self.b, value, kind)), strict=True):
            self.b.store(part, place)

    def reserve(self, kind: Type, name: str) -> Any:
        """A place on the stack; intrinsics reserve theirs in the same block."""
        self.entry.position_at_end(self.entry.block)
        return self.entry.alloca(llvm_type(kind), name=name)

    def if_(self, node: ast.If) -> None:
        test = self.static(node.test)
        if test is not UNKNOWN:
            self.block(node.body if test else node.orelse)
            return
        then, after = (self.llvm.append_basic_block(name) for name in ("then", "after"))
        other = self.llvm.append_basic_block("else") if node.orelse else after
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
        head, body, after = (self.llvm.append_basic_block(name) for name in ("while", "do", "done"))
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
        limits = [converted(self.b, self.value(a), INT).llvm for a in node.iter.args]
        one = integer(1)
        start, stop, step = [*((zero(),) if len(limits) == 1 else ()), *limits, *((one,) if len(limits) < 3 else ())]
        counter = self.reserve(INT, "counter")
        self.b.store(start, counter)
        head, body, further, after = (
            self.llvm.append_basic_block(name) for name in ("range", "body", "further", "finished")
        )
        self.b.branch(head)
        self.b.position_at_end(head)
        count = self.b.load(counter)
        if isinstance(step, ir.Constant):
            going = self.b.icmp_signed("<" if step.constant > 0 else ">", count, stop)
        else:
            upwards = self.b.icmp_signed("<", count, stop)
            downwards = self.b.icmp_signed(">", count, stop)
            going = self.b.select(self.b.icmp_signed(">", step, zero()), upwards, downwards)
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
        after = self.llvm.append_basic_block("finished")
        for value in values:
            number = constant(value)
            assert number is not None
            body, again = self.llvm.append_basic_block("body"), self.llvm.append_basic_block("further")
            self.b.branch(body)
            self.b.position_at_end(body)
            self.assign(node.target.id, number)
            self.loops.append((again, after))
            self.block(node.body)
            if not self.b.block.is_terminated:
                self.b.branch(again)
            self.loops.pop()
            self.b.position_at_end(again)
        self.b.branch(after)
        self.b.position_at_end(after)

    def return_(self, node: ast.Return) -> None:
        value = self.value(node.value) if node.value else NOTHING
        known = self.known[None]
        # INT is the first guess only
        kind = joined(known, value.type) if "returned" in self.known else value.type
        if kind != known:
            self.known |= {None: kind, "returned": kind}
            raise _Retyped
        self.known["returned"] = known
        parts = flat(converted(self.b, value, known)) if known is not None else []
        if not parts:
            self.b.ret_void()
        elif len(parts) == 1:
            self.b.ret(parts[0])
        else:
            whole = ir.Constant(self.llvm.ftype.return_type, ir.Undefined)
            for n, part in enumerate(parts):
                whole = self.b.insert_value(whole, part, n)
            self.b.ret(whole)
