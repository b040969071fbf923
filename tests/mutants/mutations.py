"""What can be changed in a module: one Mutation for each entry, number, operator or condition.

Kinds: "entry" (of a table of names, left out), "number" (of a table, a threshold), "comparison" (< and <=, == and !=),
"arithmetic" (+ and -, * and /, op.Add and op.Sub), "sign", "axis", "extreme" (min and max), "not", "refusal" (never).
Docstrings, messages and annotations stay as they are.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

KINDS = ("entry", "number", "comparison", "arithmetic", "sign", "axis", "extreme", "not", "refusal")
_TOKENS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.NotIn: ("not in", "in"),
    ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
}
_PAIRS = [("Add", "Sub"), ("Mul", "Div"), ("add", "subtract"), ("multiply", "divide")]
_ARITHMETIC = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
_PAIRS = [("min", "max"), ("Min", "Max"), ("minimum", "maximum"), ("ReduceMin", "ReduceMax"), ("argmin", "argmax")]
_PAIRS += [("floor", "ceil"), ("Floor", "Ceil"), ("Less", "LessOrEqual"), ("Greater", "GreaterOrEqual")]
_EXTREME = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
_AXES = ("axis", "axes", "keepdims", "perm")
_LENGTHS = ("shape", "dims", "lengths", "sizes", "strides", "pads", "kernel", "dilations")
_NOT_TABLES = ("__all__", "__slots__", "_fields_")
_Range = tuple[int, int]


@dataclass(frozen=True)
class Mutation:
    """`text` in place of the bytes [start, end) of a file."""

    path: str  # from the root of the tree
    kind: str
    scope: str  # the function or method, or the name that a module assigns
    line: int
    start: int
    end: int
    text: str
    what: str  # in words
    source: str  # the line
    table: frozenset[str] = frozenset()  # the names in a table that loses one

    @property
    def key(self) -> str:
        """What the mutation does, whatever its line: the same for as long as the code that it changes is."""
        return f"{self.path} | {self.scope} | {self.what} | {self.source}"

    @property
    def room(self) -> str:
        """The folder at the top."""
        return self.path.partition("/")[0]

    @property
    def left_out(self) -> str:
        """The name that a table has lost."""
        return self.what.split("'")[1] if self.kind == "entry" and "'" in self.what else ""

    def applied(self, code: bytes) -> bytes:
        """The mutant's file."""
        return code[: self.start] + self.text.encode() + code[self.end :]


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, code: bytes) -> None:
        self.path, self.code, self.found = path, code, list[Mutation]()
        self.lines = code.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.scopes: list[str] = []
        self.function = False
        self.axes = 0  # how many expressions that hold axes are around

    def span(self, node: ast.AST) -> _Range:
        at = self.starts
        return at[node.lineno - 1] + node.col_offset, at[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def written(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.code[start:end].decode()

    def add(self, kind: str, node: ast.AST, span: _Range, text: str, what: str, table: frozenset[str] = frozenset()):
        line: int = node.lineno  # type: ignore[attr-defined]
        source = self.lines[line - 1].decode().strip()
        scope = ".".join(self.scopes) or "the module"
        self.found.append(Mutation(self.path, kind, scope, line, *span, text, what, source, table))

    def token(self, kind: str, node: ast.AST, left: ast.AST, right: ast.AST, operator: ast.AST) -> None:
        """Replace what stands between two operands."""
        if type(operator) not in _TOKENS:
            return
        old, new = _TOKENS[type(operator)]
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.code[start:end].find(old.encode())
        if at >= 0:
            self.add(kind, node, (start + at, start + at + len(old)), new, f"`{old}` -> `{new}`")

    # Scopes

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scopes.append(node.name)
        for child in (*node.decorator_list, *node.body):
            self.visit(child)
        self.scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scopes.append(node.name)
        for child in (*node.decorator_list, *node.args.defaults, *(d for d in node.args.kw_defaults if d)):
            self.visit(child)
        outside, self.function = self.function, True
        for child in node.body:
            self.visit(child)
        self.function = outside
        self.scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [name.id for t in node.targets for name in ast.walk(t) if isinstance(name, ast.Name)]
        several = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        for value in node.value.elts if several else [node.value]:  # type: ignore[attr-defined]
            self.assigned(names, value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.assigned([node.target.id] if isinstance(node.target, ast.Name) else [], node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.assigned([node.target.id] if isinstance(node.target, ast.Name) else [], node.value)

    def assigned(self, names: list[str], value: ast.expr) -> None:
        if self.function:
            self.visit(value)
        elif not any(name in _NOT_TABLES for name in names):
            self.scopes.append(names[0] if names else "")
            self.visit(value)
            self.scopes.pop()

    # What is no fact

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Messages; and Python 3.11 does not know the positions in them."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """For the reader."""

    # Tables

    def entries(self, node: ast.AST, elements: list[ast.expr], ends: list[ast.expr]) -> None:
        """Each entry left out, of a table of names or, in a decorator, of versions."""
        names = [e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str)]
        if len(elements) < 2 or len(names) < max(1, len(elements) - 2) or not all(map(_is_name, names)):
            return
        for n, (first, last) in enumerate(zip(elements, ends, strict=True)):
            if isinstance(first, ast.Constant):
                span = (self.span(first)[0], self.span(elements[n + 1])[0] if n + 1 < len(elements) else 0)
                if n + 1 == len(elements):
                    span = (self.span(ends[n - 1])[1], self.span(last)[1])
                left_alone = len(elements) == 2 and n == 1 and isinstance(node, ast.Tuple)
                self.add("entry", first, span, "," if left_alone else "", f"without {first.value!r}", frozenset(names))

    def words(self, node: ast.Constant, text: str) -> None:
        """Each word left out of a table that is written as a text."""
        names = text.split()
        for n, name in enumerate(names):
            rest = " ".join([*names[:n], *names[n + 1 :]])
            self.add("entry", node, self.span(node), f'"{rest}"', f"without {name!r}", frozenset(names))

    def visit_Set(self, node: ast.Set) -> None:
        self.entries(node, node.elts, node.elts)
        self.generic_visit(node)

    def visit_List(self, node: ast.List) -> None:
        self.entries(node, node.elts, node.elts)
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        self.entries(node, node.elts, node.elts)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        keys = [key for key in node.keys if key is not None]
        if not self.function and len(keys) == len(node.keys):
            self.entries(node, keys, node.values)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if self.axes:
            self.add(
                "axis", node, self.span(node), f"{1 - value}" if value in (0, 1) else "0", f"axis {value} -> other"
            )
        elif not self.function:
            self.number(node)

    def number(self, node: ast.Constant) -> None:
        value = node.value
        assert isinstance(value, (int, float))
        other = (
            value + 1 if isinstance(value, int) and value < 16 else value // 2 if isinstance(value, int) else 2 * value
        )
        other = other or 1.0
        self.add("number", node, self.span(node), repr(other), f"{self.written(node)} -> {other!r}")

    # Formulas

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right, operator in zip(operands, operands[1:], node.ops, strict=False):
            self.token(
                "not" if isinstance(operator, (ast.NotIn, ast.IsNot)) else "comparison", node, left, right, operator
            )
            number = right if isinstance(right, ast.Constant) else left
            if self.function and isinstance(number, ast.Constant) and type(number.value) in (int, float):
                self.number(number)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        joined = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, ast.Dict, ast.Set)
        texts = [s for s in (node.left, node.right) if isinstance(s, ast.Constant) and isinstance(s.value, str)]
        if not texts and not isinstance(node.left, joined) and not isinstance(node.right, joined):
            self.token("arithmetic", node, node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        operand = self.written(node.operand)
        if isinstance(node.op, ast.Not):
            self.add("not", node, self.span(node), f"({operand})", "`not` dropped")
        elif isinstance(node.op, ast.USub) and self.axes:
            self.add("axis", node, self.span(node), "0", f"axis {self.written(node)} -> 0")
            return
        elif isinstance(node.op, ast.USub):
            self.add("sign", node, self.span(node), operand, f"`-{operand}` -> `{operand}`")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        end = self.span(called)[1]
        span = (end - len(name.encode()), end)
        if name in _ARITHMETIC and isinstance(called, ast.Attribute):
            self.add("arithmetic", node, span, _ARITHMETIC[name], f"{name} -> {_ARITHMETIC[name]}")
        elif name in _EXTREME:
            self.add("extreme", node, span, _EXTREME[name], f"{name} -> {_EXTREME[name]}")
        elif name == "Neg":
            self.add("sign", node, span, "Identity", "Neg -> Identity")
        elif (
            name == "Fact"
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            self.words(node.args[0], node.args[0].value)
        elif name == "require":
            self.add("refusal", node, self.span(node), "None", "nothing required")
        self.visit(called)
        for child in (*node.args, *node.keywords):
            self.visit(child)

    def visit_keyword(self, node: ast.keyword) -> None:
        self.axes += node.arg in _AXES
        self.generic_visit(node)
        self.axes -= node.arg in _AXES

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        name = self.written(node.value).rpartition(".")[2]
        is_axis = self.function and any(word in name for word in _LENGTHS) and not isinstance(node.slice, ast.Slice)
        self.axes += is_axis
        self.visit(node.slice)
        self.axes -= is_axis

    def visit_If(self, node: ast.If) -> None:
        if any(isinstance(statement, ast.Raise) for statement in node.body):
            self.add("refusal", node, self.span(node.test), "False", "never refused")
        self.generic_visit(node)


def _is_name(text: str) -> bool:
    return text.replace("_", "a").replace(".", "a").replace(" ", "a").isalnum()


@cache
def candidates(path: str, code: bytes) -> tuple[Mutation, ...]:
    """All that can be changed in a file."""
    finder = _Finder(path, code)
    finder.visit(ast.parse(code))
    seen: Counter[str] = Counter()
    for n, mutation in enumerate(finder.found):
        seen[mutation.key] += 1
        if seen[mutation.key] > 1:  # on one line
            finder.found[n] = replace(mutation, what=f"{mutation.what}, number {seen[mutation.key]}")
    return tuple(finder.found)


def is_other_code(mutation: Mutation, code: bytes) -> bool:
    """Whether Python can read the mutant, and it differs from the module as it is."""
    try:
        return ast.dump(ast.parse(mutation.applied(code))) != ast.dump(ast.parse(code))
    except SyntaxError:
        return False
