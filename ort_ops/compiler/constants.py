"""Expressions of the language that kernels are written in (see `language`), as far as they are known at compilation."""

import ast
import builtins
import operator
from types import ModuleType
from typing import Any

from onnx_backprop.ort_ops.compiler.values import Inner, Value

_FOLDED: dict[type[ast.AST], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.USub: operator.neg, ast.Not: operator.not_,
}  # fmt: skip
UNKNOWN = object()


class Constants:
    """What one function needs of the constants in its expressions while it is compiled."""

    inner: Inner
    variables: dict[str, Value]  # their places on the stack
    functions: dict[str, Any]  # that arguments are
    cells: dict[str, Any]

    def named(self, name: str) -> Any:
        """What a name that is not local stands for."""
        if name in self.functions:
            return self.functions[name]
        if name in self.cells:
            return self.cells[name].cell_contents
        value = self.inner.function.__globals__.get(name, UNKNOWN)
        return getattr(builtins, name, UNKNOWN) if value is UNKNOWN else value

    def static(self, node: ast.expr) -> Any:
        """The value of an expression that is known now, else UNKNOWN."""
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                return UNKNOWN if name in self.variables else self.named(name)
            case ast.Attribute(llvm, name):
                owner = self.static(llvm)
                return getattr(owner, name) if isinstance(owner, ModuleType) else UNKNOWN
            case ast.UnaryOp(op, operand):
                return self.folded(op, operand)
            case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):
                return self.folded(op, left, right)
            case ast.BoolOp(op, operands):
                for operand in operands:
                    value = self.static(operand)
                    if value is UNKNOWN or bool(value) == isinstance(op, ast.Or):
                        return value
                return isinstance(op, ast.And)
            case ast.Tuple(elements):
                values = [self.static(element) for element in elements]
                if all(value is not UNKNOWN for value in values):
                    return tuple(values)
            case ast.Subscript(llvm, index):
                whole, at = self.static(llvm), self.static(index)
                if isinstance(whole, tuple) and isinstance(at, int):
                    return whole[at]
        return UNKNOWN

    def folded(self, op: ast.AST, *operands: ast.expr) -> Any:
        """What is made of operands that are known now: numbers, or with `is` anything; else UNKNOWN."""
        values = [self.static(operand) for operand in operands]
        if isinstance(op, ast.Is) and all(value is not UNKNOWN for value in values):
            return values[0] is values[1]
        numbers = all(type(value) in (bool, int, float) for value in values)
        return _FOLDED[type(op)](*values) if numbers and type(op) in _FOLDED else UNKNOWN
