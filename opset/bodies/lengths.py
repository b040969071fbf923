"""Arithmetic on lengths inside a function body: folded where they are known, emitted as nodes where they are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from onnx_backprop.opset.bodies.builder import Body
from onnx_backprop.opset.core.shapes import Dims

Entry = int | None
Fold = Callable[[int, int], int]


class Ints:
    """A 1-D int64 vector of known length: those of its entries that are known, and a tensor if not all of them are.

    Operators work entry by entry; a vector of one entry goes with any.
    """

    def __init__(self, b: Body, entries: Sequence[Entry], name: str = "") -> None:
        self.body = b
        self.entries = tuple(None if v is None else int(v) for v in entries)
        self._name = name
        assert name or None not in self.entries, "a tensor holds what is not known"

    def on(self, b: Body) -> Ints:
        """The same vector for nodes of a branch, which sees the tensors around it."""
        return Ints(b, self.entries, self._name)

    @property
    def known(self) -> tuple[int, ...] | None:
        """The entries when all are known."""
        known = tuple(v for v in self.entries if v is not None)
        return known if len(known) == len(self.entries) else None

    @property
    def count(self) -> int:
        return len(self.entries)

    @property
    def name(self) -> str:
        """The tensor that holds the vector."""
        return self._name if self.known is None else self.body.ints(self.known)

    @property
    def dims(self) -> Dims:
        """The entries as dimensions of a shape."""
        return self.entries

    def _apply(self, other: Ints | int, op_type: str, fold: Fold, always: dict[int, int] | None = None) -> Ints:
        """`always`: what an entry is whatever the left operand, for right operands that decide it alone."""
        other = Ints(self.body, [other]) if isinstance(other, int) else other
        count = max(self.count, other.count)
        entries: list[Entry] = []
        for a, c in zip(self.spread(count), other.spread(count), strict=True):
            if a is not None and c is not None:
                entries.append(fold(a, c))
            else:
                entries.append(None if c is None or always is None else always.get(c))
        name = getattr(self.body, op_type)(self.name, other.name) if None in entries else ""
        return Ints(self.body, entries, name)

    def spread(self, count: int) -> tuple[Entry, ...]:
        """The entries, a single one repeated."""
        return self.entries * (count // self.count) if self.count == 1 else self.entries

    def __add__(self, other: Ints | int) -> Ints:
        return self._apply(other, "Add", lambda a, c: a + c)

    def __sub__(self, other: Ints | int) -> Ints:
        return self._apply(other, "Sub", lambda a, c: a - c)

    def __mul__(self, other: Ints | int) -> Ints:
        return self._apply(other, "Mul", lambda a, c: a * c)

    def __mod__(self, other: Ints | int) -> Ints:
        """The remainder has the sign of the divisor, in Python as in ONNX."""
        return self._apply(other, "Mod", lambda a, c: a % c, always={1: 0})

    def __floordiv__(self, other: Ints | int) -> Ints:
        """Rounded down; ONNX's Div rounds toward zero, so the remainder is taken off first."""
        if (other.known if isinstance(other, Ints) else (other,)) == (1,):
            return self
        return (self - self % other)._apply(other, "Div", lambda a, c: a // c)

    def at_least(self, low: int) -> Ints:
        return self._apply(low, "Max", max)

    def take(self, positions: Sequence[int]) -> Ints:
        """The entries at some positions, in that order."""
        entries = [self.entries[p] for p in positions]
        if None not in entries:
            return Ints(self.body, entries)
        if list(positions) == list(range(self.count)):
            return self
        return Ints(self.body, entries, self.body.Gather(self.name, self.body.ints(positions)))

    def where_zero(self, then: Ints, otherwise: Ints) -> Ints:
        """`then` where an entry is 0, else `otherwise`."""
        choices = zip(self.entries, then.spread(self.count), otherwise.spread(self.count), strict=True)
        entries = [None if v is None else t if v == 0 else o for v, t, o in choices]
        if None not in entries:
            return Ints(self.body, entries)
        is_zero = self.body.Equal(self.name, self.body.ints([0]))
        return Ints(self.body, entries, self.body.Where(is_zero, then.name, otherwise.name))

    def product(self) -> Ints:
        """The product of all entries, one entry; 1 of none."""
        if self.known is not None:
            return Ints(self.body, [prod(self.known)])
        if self.count == 1:
            return self
        return Ints(self.body, [None], self.body.ReduceProd(self.name, keepdims=1))


def join(b: Body, *parts: Ints) -> Ints:
    """The entries of several vectors, one after the other."""
    parts = tuple(p for p in parts if p.count)
    entries = [v for p in parts for v in p.entries]
    if len(parts) == 1 or None not in entries:
        return Ints(b, entries, parts[0].name if None in entries else "")
    return Ints(b, entries, b.Concat(*(p.name for p in parts), axis=0))
