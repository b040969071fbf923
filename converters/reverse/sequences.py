"""Gradients of sequences: a sequence of as many tensors, each the gradient of the element at its place.

That of an optional value is the gradient of what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import element_type

if TYPE_CHECKING:
    from onnx_backprop.converters.reverse.builder import Builder

Each = Callable[["Builder", ir.Value], ir.Value]  # of a builder and a position, 0-D: a tensor


def is_sequence(value: ir.Value) -> bool:
    """Whether a value is a sequence, or an optional one."""
    return isinstance(held_type(value), ir.SequenceType)


def is_optional(value: ir.Value) -> bool:
    return isinstance(value.type, ir.OptionalType)


def held_type(value: ir.Value) -> ir.TypeProtocol | None:
    """The type of a value, of what it holds where it is an optional one: that of its gradient."""
    return value.type.elem_type if isinstance(value.type, ir.OptionalType) else value.type


def sequence_type(dtype: ir.DataType) -> ir.SequenceType:
    """The type of a sequence of tensors."""
    return ir.SequenceType(ir.TensorType(dtype))


def length(op: Builder, sequence: ir.Value) -> ir.Value:
    """The number of elements, 0-D int64."""
    return op.typed(op.SequenceLength(sequence), _COUNT)


def at(op: Builder, sequence: ir.Value, position: ir.Value | int) -> ir.Value:
    """The element at a position."""
    result = op.SequenceAt(sequence, position)
    result.type = ir.TensorType(element_type(sequence))
    return result


def insert(op: Builder, sequence: ir.Value, element: ir.Value, position: ir.Value | None = None) -> ir.Value:
    """With an element more, at a position or the end."""
    return op.like(op.SequenceInsert(sequence, element, position), sequence)


def erase(op: Builder, sequence: ir.Value, position: ir.Value | int) -> ir.Value:
    """Without the element at a position."""
    return op.like(op.SequenceErase(sequence, position), sequence)


def from_start(op: Builder, position: ir.Value, count: ir.Value) -> ir.Value:
    """A position that may count from the end of so many elements, counted from the start, int64."""
    position = op.Cast(position, to=ir.DataType.INT64)
    return op.Where(op.Less(position, 0), op.Add(position, count), position)


def sequence_of(op: Builder, count: ir.Value, dtype: ir.DataType, each: Each) -> ir.Value:
    """The sequence of each(0), each(1), … each(count - 1)."""
    empty = op.SequenceEmpty(dtype=dtype)
    empty.type = sequence_type(dtype)
    (result,) = _run(op, count, [empty], lambda inner, n, states: [insert(inner, states[0], each(inner, n))])
    return op.like(result, empty)


def lengths_along(op: Builder, sequence: ir.Value, axis: int) -> ir.Value:
    """The length of every element along an axis, 1-D int64."""

    def step(inner: Builder, n: ir.Value, states: list[ir.Value]) -> list[ir.Value]:
        return [inner.Concat(states[0], inner.length(at(inner, sequence, n), axis), axis=0)]

    (result,) = _run(op, length(op, sequence), [op.Slice(op.ints([0]), [0], [0])], step)
    return result


def zeros_like(op: Builder, sequence: ir.Value) -> ir.Value:
    """A sequence of zeros of the shapes that the elements have."""

    def zeros(inner: Builder, n: ir.Value) -> ir.Value:
        element = at(inner, sequence, n)
        return inner.zeros(inner.Shape(element), element)

    return sequence_of(op, length(op, sequence), element_type(sequence), zeros)


def held(op: Builder, value: ir.Value) -> ir.Value:
    """What an optional value holds; an empty sequence where it could hold one and holds nothing."""
    if not is_sequence(value):
        return op.like(op.OptionalGetElement(value), value)
    some, none = op.inside(), op.inside()
    branches = (some, [some.OptionalGetElement(value)]), (none, [none.SequenceEmpty(dtype=element_type(value))])
    (result,) = op.choose(op.OptionalHasElement(value), [value], *branches)
    return result


def add(op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The sums of the elements at the same place."""

    def total(inner: Builder, n: ir.Value) -> ir.Value:
        return inner.Add(at(inner, a, n), at(inner, b, n))

    return sequence_of(op, length(op, a), element_type(a), total)


def _run(
    op: Builder,
    count: ir.Value,
    states: list[ir.Value],
    step: Callable[[Builder, ir.Value, list[ir.Value]], list[ir.Value]],
) -> list[ir.Value]:
    """A Loop of `count` steps: states = step(n, states)."""
    inner = op.inside()
    inner.prefix = f"{op.prefix}/each"
    n, go = (ir.Value(name=inner.unique(f"{inner.prefix}/{name}"), type=ir.TensorType(dtype), shape=ir.Shape([]))
             for name, dtype in (("n", ir.DataType.INT64), ("go", ir.DataType.BOOL)))  # fmt: skip
    before = [ir.Value(name=inner.unique(f"{inner.prefix}/state"), type=state.type) for state in states]
    after = [inner.Identity(go), *step(inner, n, before)]
    for value, like in zip(after[1:], before, strict=True):
        value.type = like.type
    body = ir.Graph([n, go, *before], after, nodes=inner.nodes, name=inner.unique(f"{inner.prefix}/body"))
    results = op.emit("Loop", [count, op.constant(np.array(True)), *states], {"body": body}, outputs=len(states))
    for result, state in zip(results, states, strict=True):
        result.type = state.type
    return list(results)


_COUNT = ir.Value(name="count", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
