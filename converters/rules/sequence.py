"""Gradients of operators on sequences of tensors and on optional values; see `sequences` for what those are."""

import onnx_ir as ir

from onnx_backprop.converters.reverse import sequences
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient


@gradient("SequenceConstruct", versions=(11,))
def sequence_construct(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """S = (x_0, x_1, …)  =>  dx_i = dS_i."""
    return [sequences.at(op, dy, n) for n in range(len(node.inputs))]


@gradient("SequenceAt", versions=(11,))
def sequence_at(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = S_p  =>  dS = zeros with dy at p."""
    s = node.input(0)
    position = sequences.from_start(op, node.input(1), sequences.length(op, s))
    return sequences.insert(op, sequences.erase(op, sequences.zeros_like(op, s), position), dy, position)


@gradient("SequenceInsert", versions=(11,))
def sequence_insert(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = S with x put in front of the element at p, by default at the end  =>  dS = dY without its p-th, dx = dY_p."""
    position: ir.Value | int = -1
    if node.has(2):
        position = sequences.from_start(op, node.input(2), op.Sub(sequences.length(op, dy), 1))
    return sequences.erase(op, dy, position), sequences.at(op, dy, position)


@gradient("SequenceErase", versions=(11,))
def sequence_erase(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = S without its p-th, by default the last  =>  dS = dY with zeros put in at p."""
    s = node.input(0)
    last = op.Sub(sequences.length(op, s), 1)
    position = sequences.from_start(op, node.input(1), op.Add(last, 1)) if node.has(1) else last
    element = sequences.at(op, s, position)
    return sequences.insert(op, dy, op.zeros(op.Shape(element), element), position)


@gradient("ConcatFromSequence", versions=(11,))
def concat_from_sequence(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = S_0, S_1, … one after the other along an axis, or along a new one  =>  dS = dy split there."""
    s, axis = node.input(0), node.int("axis", 0)
    if node.int("new_axis", 0):
        return op.like(op.SplitToSequence(dy, axis=axis, keepdims=0), s)
    return op.like(op.SplitToSequence(dy, sequences.lengths_along(op, s, axis), axis=axis), s)


@gradient("SplitToSequence", versions=(11, 24))
def split_to_sequence(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """S = x cut along an axis, by default into slices of length 1  =>  dx = dS joined there."""
    squeezed = not node.has(1) and node.int("keepdims", 1) == 0
    return op.typed(op.ConcatFromSequence(dy, axis=node.int("axis", 0), new_axis=int(squeezed)), node.input(0))


@gradient("Optional", versions=(15, 28))
def optional(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = an optional value that holds x  =>  dx = dY, which is the gradient of what Y holds."""
    return op.like(op.Identity(dy), node.input(0))


@gradient("OptionalGetElement", versions=(18, 28))
def optional_get_element(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = what x holds  =>  dx = dy."""
    return op.like(op.Identity(dy), node.input(0))
