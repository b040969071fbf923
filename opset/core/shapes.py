"""Arithmetic on shapes whose dimensions may be unknown: integers in, integers out, nothing of ONNX.

A dimension (`Dim`) is an int, a symbol's name (str) or None when nothing is known about it. Functions
return None for what they cannot tell and raise only on a true contradiction.
"""

from collections.abc import Sequence
from math import prod

from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.graphs.types import Dim as Dim
from onnx_backprop.opset.graphs.types import Dims as Dims


def merge(a: Dim, b: Dim, *, op: str, subject: str) -> Dim:
    """Return what two statements about one dimension say together; ShapeError when both are ints and differ.

    A number beats a symbol, a symbol beats nothing; of two symbols the first stays.
    """
    if isinstance(a, int) and isinstance(b, int) and a != b:
        raise ShapeError(f"{subject} must agree, got {a} and {b}", op_type=op)
    if isinstance(a, int):
        return a
    if isinstance(b, int):
        return b
    return a if a is not None else b


def times(a: Dim, factor: int) -> Dim:
    """A * factor, where known."""
    if factor == 1:
        return a
    return a * factor if isinstance(a, int) else None


def product(dims: Dims) -> Dim:
    """The number of elements, where known."""
    return prod(d for d in dims if isinstance(d, int)) if all(isinstance(d, int) for d in dims) else None


def require_rank(dims: Sequence[object], low: int, high: int, *, op: str, subject: str) -> None:
    """Raise ShapeError unless low <= rank <= high."""
    if not low <= len(dims) <= high:
        wanted = str(low) if low == high else f"{low} to {high}"
        raise ShapeError(f"{subject}: expected rank {wanted}, got {len(dims)} with shape {show(dims)}", op_type=op)


def require_length(values: Sequence[object], length: int, *, op: str, subject: str) -> None:
    """Raise ShapeError unless a list has one entry per spatial axis (or whatever `length` counts)."""
    if len(values) != length:
        raise ShapeError(f"{subject}: expected {length} entries, got {len(values)} in {list(values)}", op_type=op)


def require_at_least(values: Sequence[Dim], low: int, *, op: str, subject: str) -> None:
    """Raise ShapeError unless every known entry is >= low."""
    if any(isinstance(v, int) and v < low for v in values):
        raise ShapeError(f"{subject}: expected values >= {low}, got {list(values)}", op_type=op)


def stated_shape(dims: Dims | None, value: Dims | None, low: int, high: int, *, op: str, subject: str) -> Dims | None:
    """What a shape-carrying input of the given `dims` and `value` says; entries are None if only their number is known.

    Raises ShapeError unless it is 1-D with `low` to `high` entries that are >= 0.
    """
    if dims is not None:
        require_rank(dims, 1, 1, op=op, subject=subject)
    count = len(value) if value is not None else dims[0] if dims else None
    if not isinstance(count, int):
        return value
    if not low <= count <= high:
        wanted = str(low) if low == high else f"{low} to {high}"
        raise ShapeError(f"{subject}: expected {wanted} entries, got {count}", op_type=op)
    if value is None:
        return (None,) * count
    require_at_least(value, 0, op=op, subject=subject)
    return value


def show(dims: Sequence[object]) -> str:
    """(2, N, ?) for messages."""
    return "(" + ", ".join("?" if d is None else str(d) for d in dims) + ")"


def permute(dims: Dims, order: Sequence[int]) -> Dims:
    """Dims in another axis order, as numpy.transpose does with an array."""
    return tuple(dims[i] for i in order)


def describe(shape: Dims | None) -> str:
    """A shape for a message: (N, 3, ?)."""
    if shape is None:
        return "of unknown rank"
    return f"({', '.join('?' if d is None else str(d) for d in shape)})"
