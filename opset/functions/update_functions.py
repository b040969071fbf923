"""Update functions, as `onnx_backprop.training::SGD`: which of their inputs and outputs belong to one tensor.

    SGD(learning_rate, step, *numbers, X_0, G_0, momentum_0, X_1, …) -> X_0_new, momentum_0_new, X_1_new, …

`formal_names` writes these names and `members` reads them, and nobody else does.
"""

from collections.abc import Sequence
from typing import NamedTuple

from onnx import FunctionProto

VALUE, GRADIENT = "X", "G"  # the kinds of tensors that come first


class Member(NamedTuple):
    """The positions of what belongs to one tensor.

    inputs: of its value, its gradient and its state; outputs: of the new value and the new state.
    """

    inputs: range
    outputs: range


def formal_names(kinds: Sequence[str], count: int) -> tuple[list[str], list[str]]:
    """The inputs and outputs of a function for `count` tensors. kinds: VALUE, GRADIENT, then those of state."""
    numbered = [(kind, f"{kind}_{n}") for n in range(count) for kind in kinds]
    return [name for _, name in numbered], [f"{name}_new" for kind, name in numbered if kind != GRADIENT]


def members(function: FunctionProto) -> list[Member]:
    """One for each tensor; none where the names are not those of `formal_names`."""
    inputs, outputs = list(function.input), list(function.output)
    if f"{VALUE}_0" not in inputs:
        return []
    first = inputs.index(f"{VALUE}_0")
    count = len(inputs) - first - len(outputs)  # as each tensor has one input more than outputs
    if count < 1:
        return []
    each = (len(inputs) - first) // count
    kinds = [name.removesuffix("_0") for name in inputs[first : first + each]]
    if formal_names(kinds, count) != (inputs[first:], outputs):
        return []
    return [
        Member(range(first + n * each, first + (n + 1) * each), range(n * (each - 1), (n + 1) * (each - 1)))
        for n in range(count)
    ]
