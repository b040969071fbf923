"""`read`: a property in VNN-LIB as cases, each a box of inputs and linear inequalities of inputs and outputs."""

import re
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backprop.doors import library
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError

Array = np.ndarray[Any, Any]
Linear = dict[str, float]  # coefficients of X_0, …, Y_0, …, and of "" the constant
_LARGEST = 100_000  # cases


@dataclass(frozen=True)
class Case:
    """low <= x <= high and of_x · x + of_y · y <= limit."""

    low: Array
    high: Array
    of_x: Array
    of_y: Array
    limit: Array


def read(path: Path, inputs: int, outputs: int) -> list[Case]:
    """The cases of a property of so many inputs and outputs: it is their disjunction.

    Raises: InvalidArgumentError for a file that is none, of other variables, or without bounds of an input;
    UnsupportedError for what is not linear.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidArgumentError(f"cannot read {path}: {e}") from e
    if "(vnnlib-version" in text:
        return _second(path, inputs, outputs)
    text = re.sub(r";.*", "", text)
    assertions: list[list[list[Linear]]] = []
    try:
        for name, *rest in _lists(text, path):
            if name == "assert" and len(rest) == 1:
                assertions.append(_disjunction(rest[0]))
            elif name != "declare-const":
                raise UnsupportedError(f"{path}: expected declare-const and assert of one, got {name!r}")
    except RecursionError as e:
        raise UnsupportedError(f"{path} has expressions too deep in each other") from e
    return [_case(atoms, inputs, outputs, path) for atoms in _all(assertions)]


def _all(parts: list[list[list[Linear]]]) -> list[list[Linear]]:
    """The alternatives of a conjunction of disjunctions."""
    if (count := prod(map(len, parts))) > _LARGEST:
        raise UnsupportedError(f"VNN-LIB: the property has {count} cases, expected at most {_LARGEST}")
    return [[atom for part in chosen for atom in part] for chosen in product(*parts)]


def _lists(text: str, path: Path) -> list[Any]:
    """The S-expressions of a text."""
    stack: list[list[Any]] = [[]]
    for token in re.findall(r"[()]|[^\s()]+", text):
        if token == "(":
            stack.append([])
        elif token != ")":
            stack[-1].append(token)
        elif len(stack) > 1 and stack[-1]:
            inner = stack.pop()
            stack[-1].append(inner)
        else:
            raise InvalidArgumentError(f"{path} is no VNN-LIB file: a parenthesis closes nothing")
    if len(stack) > 1 or any(isinstance(one, str) for one in stack[0]):
        raise InvalidArgumentError(f"{path} is no VNN-LIB file: expected lists in parentheses")
    return stack[0]


def _disjunction(expression: Any) -> list[list[Linear]]:
    """A boolean expression as alternatives, each a list of what is to be at most 0."""
    name, *rest = expression
    if name == "or":
        return [case for one in rest for case in _disjunction(one)]
    if name == "and":
        return _all([_disjunction(one) for one in rest])
    if name in ("<=", ">=") and len(rest) == 2:
        left, right = map(_linear, rest if name == "<=" else rest[::-1])
        return [[_sum(left, right, -1)]]
    raise UnsupportedError(f"VNN-LIB: expected and, or, <= and >= of two, got {name!r}")


def _linear(expression: Any) -> Linear:
    if isinstance(expression, str):
        return {expression: 1.0} if re.fullmatch(r"[XY]_\d+", expression) else {"": _number(expression)}
    name, *rest = expression
    parts = [_linear(one) for one in rest]
    if name == "+":
        total: Linear = {}
        for part in parts:
            total = _sum(total, part, 1)
        return total
    if name == "-" and len(parts) in (1, 2):
        return _sum(parts[0] if len(parts) == 2 else {}, parts[-1], -1)
    if name == "*" and len(parts) == 2 and any(set(part) <= {""} for part in parts):
        number, other = sorted(parts, key=lambda part: bool(set(part) - {""}))
        return {variable: number.get("", 0.0) * value for variable, value in other.items()}
    raise UnsupportedError(f"VNN-LIB: expected a linear expression, got {name!r} of {len(rest)}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(f"VNN-LIB: expected a number, X_i or Y_i, got {text!r}") from None


def _sum(a: Linear, b: Linear, factor: float) -> Linear:
    return {name: a.get(name, 0.0) + factor * b.get(name, 0.0) for name in a | b}


def _case(atoms: list[Linear], inputs: int, outputs: int, path: Path) -> Case:
    low, high = np.full(inputs, -np.inf), np.full(inputs, np.inf)
    rows = np.zeros((len(atoms), inputs + outputs))
    limits = np.array([-atom.get("", 0.0) for atom in atoms])
    for row, atom in zip(rows, atoms, strict=True):
        for name in set(atom) - {""}:
            index, count = int(name[2:]), inputs if name[0] == "X" else outputs
            if index >= count:
                raise InvalidArgumentError(f"{path}: {name} is none of the {count} numbers of the model")
            row[index + (inputs if name[0] == "Y" else 0)] = atom[name]
    bounds = np.array([np.flatnonzero(row).size == 1 and row[:inputs].any() for row in rows], bool)
    for row, limit in zip(rows[bounds], limits[bounds], strict=True):
        (at,) = np.flatnonzero(row)
        if row[at] > 0:
            high[at] = min(high[at], limit / row[at])
        else:
            low[at] = max(low[at], limit / row[at])
    others = ~bounds
    return _bounded(Case(low, high, rows[others, :inputs], rows[others, inputs:], limits[others]), path)


def _bounded(case: Case, path: Path) -> Case:
    if unbounded := np.flatnonzero(~(np.isfinite(case.low) & np.isfinite(case.high))).tolist():
        raise InvalidArgumentError(f"{path}: X_{unbounded[0]} has no bounds from both sides")
    return case


def _second(path: Path, inputs: int, outputs: int) -> list[Case]:
    """Of version 2, by the standard's own package."""
    vnnlib = library("vnnlib", package="vnnlib")
    compat = library("vnnlib.compat", package="vnnlib")
    try:
        specifications = compat.transform(vnnlib.parse_query_file(str(path)))
    except vnnlib.VNNLibException as e:
        raise InvalidArgumentError(f"{path} is no VNN-LIB file that can be read: {e}") from e
    cases: list[Case] = []
    for one in specifications:
        low, high = np.array(one.input_box, np.float64).T
        for polytope in one.output_constraints:
            of_y = np.array(polytope.coeff_matrix, np.float64)
            if low.size != inputs or of_y.shape[-1] != outputs:
                raise InvalidArgumentError(
                    f"{path} has {low.size} inputs and {of_y.shape[-1]} outputs, the model others"
                )
            of_x = np.zeros((len(of_y), inputs))
            cases.append(_bounded(Case(low, high, of_x, of_y, np.array(polytope.rhs, np.float64)), path))
    return cases
