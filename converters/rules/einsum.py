"""Gradient of Einsum."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import count_up, narrow, widen
from onnx_backprop.opset.core.shapes import Dim

ELLIPSIS = "..."


@gradient("Einsum", versions=(12,))
def einsum(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y[o] = Σ Π_j x_j[t_j] over letters not in o  =>  dx_i[t_i] = Σ dy[o] · Π_{j≠i} x_j[t_j] over those not in t_i.

    Letters that occur in t_i alone repeat the gradient; one that occurs twice in t_i puts it on a diagonal; an axis of
    x_i of length 1 that was broadcast sums it. Half types are computed in float32.
    Raises: UnsupportedError where an operand with an ellipsis has no known rank at conversion.
    """
    equation, values = _equation(node), node.every_input()
    wide, wide_dy = [widen(op, value) for value in values], widen(op, dy)
    grads: list[ir.Value | None] = []
    for n, value in enumerate(values):
        if not node.wants(n):  # the product of the others may be a large one
            grads.append(None)
            continue
        others = [(wide_dy, equation.output)]
        others += [(x, t) for m, (x, t) in enumerate(zip(wide, equation.terms, strict=True)) if m != n]
        operand = _Operand(op, value, equation.terms[n])
        g = operand.completed(_product(op, others, operand.letters), equation.reached(n, values))
        grads.append(narrow(op, operand.on_diagonals(g), value))
    return grads


@dataclass(frozen=True)
class _Equation:
    """One string of letters per input, and that of the output, without ellipses."""

    terms: list[str]
    output: str

    def reached(self, n: int, values: Sequence[ir.Value]) -> dict[str, list[Dim]]:
        """For each letter of an input the lengths it has among the factors of the gradient; absent: in none.

        The length in dy, where the letter is in the output, is that of the broadcast of all inputs.
        """
        lengths: dict[str, list[Dim]] = {}
        for m, (value, term) in enumerate(zip(values, self.terms, strict=True)):
            known = dims(value) or (None,) * len(term)
            for letter, d in zip(term, known, strict=True):
                if m != n or letter in self.output:
                    lengths.setdefault(letter, []).append(d)
        return lengths


def _equation(node: Forward) -> _Equation:
    """The equation, its output written out and every ellipsis replaced by letters of its own."""
    text = node.string("equation", "").replace(" ", "")
    left, arrow, output = text.partition("->")
    terms = left.split(",")
    ranks = [_ellipsis_rank(node, n, term) for n, term in enumerate(terms)]
    if not arrow:
        once = sorted(letter for letter in set(left) & set(ascii_letters) if left.count(letter) == 1)
        output = (ELLIPSIS if ELLIPSIS in left else "") + "".join(once)
    unused = "".join(letter for letter in ascii_letters if letter not in text)
    rank = max(ranks)
    if rank > len(unused):
        raise node.refuse("equation", text, f"with at most {len(ascii_letters)} letters and axes of an ellipsis")
    axes = unused[:rank]
    explicit = [term.replace(ELLIPSIS, axes[rank - length :]) for term, length in zip(terms, ranks, strict=True)]
    _check_terms(node, text, explicit)
    return _Equation(explicit, output.replace(ELLIPSIS, axes))


def _check_terms(node: Forward, text: str, terms: Sequence[str]) -> None:
    """One term for every input, a letter for each of its axes: onnx's inference does not look."""
    ranks = [None if (known := dims(value)) is None else len(known) for value in node.every_input()]
    letters = [len(term) for term in terms]
    if len(ranks) != len(letters) or any(rank not in (None, n) for rank, n in zip(ranks, letters, strict=True)):
        raise node.invalid(f"equation {text!r} has terms of {letters} axes, the inputs have {ranks}")


def _ellipsis_rank(node: Forward, n: int, term: str) -> int:
    if ELLIPSIS not in term:
        return 0
    return node.rank(n, f", because of the ellipsis in {term!r}") - (len(term) - len(ELLIPSIS))


def _product(op: Builder, factors: Sequence[tuple[ir.Value, str]], letters: str) -> tuple[ir.Value, str]:
    """The product of factors, summed over all letters but the given ones, and those of these that it has."""
    tensors = [(value, term) for value, term in factors if term]
    scalars = [value for value, term in factors if not term]
    kept = "".join(letter for letter in letters if any(letter in term for _, term in tensors))
    if tensors:
        equation = f"{','.join(term for _, term in tensors)}->{kept}"
        scalars.insert(0, op.Einsum(*(value for value, _ in tensors), equation=equation))
    product = scalars[0]
    for value in scalars[1:]:
        product = op.Mul(product, value)
    return product, kept


class _Operand:
    """An input x of Einsum: `letters` are the different ones of its term, in order."""

    def __init__(self, op: Builder, x: ir.Value, term: str) -> None:
        self._op, self._x, self._term = op, x, term
        self._known = dims(x) or (None,) * len(term)
        self.letters = "".join(dict.fromkeys(term))

    def completed(self, product: tuple[ir.Value, str], reached: dict[str, list[Dim]]) -> ir.Value:
        """The gradient by the letters of x, from a product that lacks some of them or has other lengths along them."""
        op, (g, kept) = self._op, product
        lacking = [axis for axis, letter in enumerate(self.letters) if letter not in kept]
        if lacking:
            g = op.Unsqueeze(g, lacking)
        summed: list[int] = []
        repeated = undecided = False
        for axis, letter in enumerate(self.letters):
            length = self._known[self._term.index(letter)]
            there = reached.get(letter, []) if letter in kept else [1]
            if length is not None and all(d == length for d in there):
                continue
            if length == 1:
                summed.append(axis)
            elif isinstance(length, int):
                repeated = repeated or length not in there
            elif letter not in kept:
                repeated = True
            else:
                undecided = True
        shape = self._shape()
        if repeated or undecided:
            g = op.Expand(g, shape)
        if undecided:
            return op.sum_stretched(g, shape, op.Shape(g))
        return op.ReduceSum(g, summed, keepdims=1) if summed else g

    def _shape(self) -> ir.Value:
        """The length of x along each of its letters."""
        shape = self._op.shape(self._x)
        if len(self.letters) == len(self._term):
            return shape
        return self._op.Gather(shape, [self._term.index(letter) for letter in self.letters])

    def on_diagonals(self, g: ir.Value) -> ir.Value:
        """The gradient by the axes of x: where letters occur again, that by the letters on a diagonal, else 0."""
        op, rank = self._op, len(self._term)
        again = [axis for axis, letter in enumerate(self._term) if self._term.index(letter) < axis]
        if not again:
            return g
        g = op.Unsqueeze(g, again)
        diagonal: ir.Value | None = None
        for axis in again:
            first = self._term.index(self._term[axis])
            numbers = count_up(op, op.length(self._x, axis))
            along = (op.Unsqueeze(numbers, [a for a in range(rank) if a != where]) for where in (first, axis))
            equal = op.Equal(*along)
            diagonal = equal if diagonal is None else op.And(diagonal, equal)
        return op.Where(diagonal, g, 0)
