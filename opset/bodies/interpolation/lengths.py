"""Lengths in bodies of the interpolation gradients: known ones are integers, others the names of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from onnx_backprop.opset.bodies.builder import INT64, Body, Tensor

Length = int | str
"""A length: known, or the name of a 1-D int64 tensor with one entry that holds it at run time."""


def join(b: Body, lengths: Sequence[Length]) -> str:
    """Lengths as 1-D int64."""
    if all(isinstance(length, int) for length in lengths):
        return b.ints([length for length in lengths if isinstance(length, int)])
    return b.Concat(*(vector(b, length) for length in lengths), axis=0)


def vector(b: Body, length: Length) -> str:
    """A length as 1-D int64."""
    return b.ints([length]) if isinstance(length, int) else length


def scalar(b: Body, length: Length) -> str:
    """A length as 0-D int64."""
    return b.int_scalar(length) if isinstance(length, int) else b.Squeeze(length)


def length_product(b: Body, lengths: Sequence[Length]) -> Length:
    """The product of lengths."""
    known = prod(length for length in lengths if isinstance(length, int))
    names = [length for length in lengths if isinstance(length, str)]
    if not names:
        return known
    result = names[0]
    for name in names[1:]:
        result = b.Mul(result, name)
    return result if known == 1 else b.Mul(result, b.ints([known]))


def lengths_of(b: Body, x: Tensor, rank: int, message: str) -> list[Length]:
    """The lengths of all axes of x; a run with another rank fails with the message."""
    if x.dims is not None:
        return [d if isinstance(d, int) else b.Shape(x, start=k, end=k + 1) for k, d in enumerate(x.dims)]
    return split(b, b.entries(b.Shape(x), rank, message), rank)


def split(b: Body, values: str, count: int) -> list[Length]:
    """The entries of a 1-D int64 tensor."""
    return [b.Gather(values, b.ints([k])) for k in range(count)]


def guarded(b: Body, value: str, zero: str | None) -> str:
    """The value, which now depends on the checks whose `require` gave zero."""
    return value if zero is None else b.Add(value, zero)


def positive_or_empty(b: Body, source: list[Length], out: list[Length], message: str) -> list[Length]:
    """The source's lengths, proven to be >= 1 where the destination is not empty along the axis, and never below 0."""
    if all(isinstance(length, int) and length > 0 for length in source):
        return source
    lengths = join(b, source)
    floor = b.Cast(b.Greater(join(b, out), b.ints([0])), to=INT64)
    lengths = b.Add(lengths, b.require(b.GreaterOrEqual(lengths, floor), message))
    checked = split(b, lengths, len(source))
    return [i if isinstance(i, int) and i > 0 else name for i, name in zip(source, checked, strict=True)]
