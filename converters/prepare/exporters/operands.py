"""What torch read where a node reads a tensor of the module, as far as the file says it."""

import re
from collections.abc import Mapping, Sequence
from itertools import permutations

import numpy as np
from onnx import NodeProto

from onnx_backprop.converters.prepare.exporters.origins import (
    BIASED,
    PLACES,
    Origin,
    arguments_of,
    is_operation,
    operation_of,
)
from onnx_backprop.opset.graphs.order import producers
from onnx_backprop.opset.graphs.walk import attributes_of, is_standard

COMPUTED = "computed"
_ARRANGED = 5  # axes of a tensor whose orders are tried
_TRANSPOSED = re.compile(r"(t|transpose|permute|numpy_t|mt|mh|h|adjoint|swapaxes|swapdims|movedim|moveaxis)(_\d+)*")
_COPIED = re.compile(r"(clone|contiguous|reshape|view|unsafe_view)(_\d+)*")  # perhaps of a transposed tensor


class Operands:
    """The nodes of a model.

    targets: what torch calls the parameters and buffers -> their names; origins_by_name: of the initializers.
    """

    def __init__(
        self, nodes: Sequence[NodeProto], targets: Mapping[str, str], origins_by_name: Mapping[str, Origin]
    ) -> None:
        self.targets, self.origins, self.producers = targets, origins_by_name, producers(nodes)

    def is_another(self, node: NodeProto, index: int) -> bool:
        """Whether the operation of torch reads another value that it computes where a node reads a tensor twice."""
        arguments = arguments_of(node)
        if len(arguments) != len(node.input) or node.input[index] not in arguments:
            return False
        return arguments[index] != node.input[index] and arguments[index] not in self.targets

    def computed(self, node: NodeProto, index: int) -> str:
        """What the operation of torch reads at an input, if it is no tensor of the module and nothing the file has."""
        arguments, values = arguments_of(node), [name for name in node.input if name]
        if len(arguments) != len(values) or any(
            place != index
            and argument != value
            and self.targets.get(argument) != self.origins.get(value, Origin()).name
            for place, (argument, value) in enumerate(zip(arguments, values, strict=True))
        ):
            return ""
        operand = arguments[index] if index < len(arguments) else ""
        return "" if operand in self.targets or operand in self.producers or operand == values[index] else operand

    def at(self, node: NodeProto, index: int) -> str:
        """What torch reads at an input of a product, a sum behind one or a normalisation, if the file says it."""
        arguments = arguments_of(node)
        if not is_standard(node, "Add", "MatMul", *BIASED, *PLACES):
            return ""
        if node.op_type == "Add":
            product = self.producers.get(node.input[1 - index])
            index = 2 if product is not None and product.op_type == "MatMul" else len(arguments)
        if re.search(r"\.b?addb?mm\.", operation_of(node)):  # whose bias comes first
            arguments = [*arguments[1:], *arguments[:1]]
        return arguments[index] if index < len(arguments) else ""

    def order(self, node: NodeProto, index: int, array: np.ndarray) -> Sequence[int] | str | None:
        """The order of axes in which torch reads a tensor that equals itself in that order; None for the first one.

        An exporter that merges equal tensors drops the Transpose between, as of an identity matrix. COMPUTED is what
        torch computes otherwise of the tensor, as relu(w) of numbers that are positive at first, or what may be it.
        """
        operand = self.at(node, index) or self.computed(node, index)
        if not operand or operand in self.producers:
            return None
        transposed = _TRANSPOSED.fullmatch(operand) is not None
        if operand not in self.targets and not transposed:
            copied = _COPIED.fullmatch(operand) and _orders(array)
            return COMPUTED if copied or is_operation(operand) else None
        if array.ndim == 2:
            transposed ^= index == 1 and operation_of(node).startswith("torch.ops.aten.linear.")
            transposed ^= is_standard(node, "Gemm") and bool(attributes_of(node).get(("transA", "transB", "")[index]))
        orders = _orders(array) if transposed else []
        return None if not orders else orders[0] if len(orders) == 1 else COMPUTED


def _orders(array: np.ndarray) -> list[list[int]]:
    """The orders of axes, other than the first one, in which an array is the same."""
    longer = [axis for axis, length in enumerate(array.shape) if length > 1]
    orders = []
    for moved in permutations(longer) if len(longer) <= _ARRANGED else ():
        order = list(range(array.ndim))
        for place, axis in zip(longer, moved, strict=True):
            order[place] = axis
        same = order != sorted(order) and array.transpose(order).shape == array.shape
        if same and np.array_equal(array.transpose(order), array):
            orders.append(order)
    return orders
