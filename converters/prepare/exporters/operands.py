"""What torch read where a node reads a tensor of the module, as far as the file says it."""

import re
from collections.abc import Mapping
from itertools import permutations
from typing import NamedTuple

import numpy as np
from onnx import GraphProto, NodeProto

from onnx_backprop.converters.prepare.exporters.origins import BIASED, PLACES, Origin, arguments_of, operation_of
from onnx_backprop.opset.graphs.order import producers
from onnx_backprop.opset.graphs.walk import attributes_of, is_standard

_MOST = 5  # axes of a tensor whose orders are tried
_TRANSPOSED = re.compile(r"(t|transpose|permute|numpy_t|mt|mh|h|adjoint|swapaxes|swapdims|movedim|moveaxis)(_\d+)*")
_SAME = re.compile(r"(alias|detach|(feature_|alpha_)*dropout|expand|to|_to_copy|type_as)(_\d+)*")  # the same numbers
_OTHER = re.compile(  # no product, as an attention, which is several
    r"torch\.ops\.(?!aten\.(linear|matmul|mm|bmm|mv|addmm|addbmm|baddbmm)\.)"
)
_BIAS_FIRST = re.compile(r"\.b?addb?mm\.")


class Reading(NamedTuple):
    """What torch read in the place of a tensor: the name of what it computed, and whether that is transposed."""

    operand: str = ""  # "" for the tensor itself, and where the file does not say it
    transposed: bool | None = None  # None: not known


class Operands:
    """The nodes of a graph.

    targets: what torch calls the parameters and buffers -> their names; origins_by_name: of the initializers.
    """

    def __init__(self, graph: GraphProto, targets: Mapping[str, str], origins_by_name: Mapping[str, Origin]) -> None:
        self.targets, self.origins, self.producers = targets, origins_by_name, producers(graph.node)
        self.inputs = {value.name for value in graph.input}

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
        arguments, operation = arguments_of(node), operation_of(node)
        if not is_standard(node, "Add", "MatMul", *BIASED, *PLACES):
            return ""
        if node.op_type in ("Add", "Gemm", "MatMul") and _OTHER.match(operation):
            return ""
        if node.op_type == "Add":
            product = self.producers.get(node.input[1 - index])
            index = 2 if product is not None and product.op_type == "MatMul" else len(arguments)
        if _BIAS_FIRST.search(operation):
            arguments = [*arguments[1:], *arguments[:1]]
        return arguments[index] if index < len(arguments) else ""

    def reading(self, node: NodeProto, index: int) -> Reading:
        """How torch reads a tensor of the module."""
        operand = self.at(node, index) or self.computed(node, index)
        if not operand or operand in self.producers or operand in self.inputs:
            return Reading()
        by_name = _TRANSPOSED.fullmatch(operand) is not None
        if operand not in self.targets and not by_name:
            return Reading() if operand == node.input[index] or _SAME.fullmatch(operand) else Reading(operand)
        by_linear = index == 1 and node.op_type != "Add" and operation_of(node).startswith("torch.ops.aten.linear.")
        by_gemm = is_standard(node, "Gemm") and bool(attributes_of(node).get(("transA", "transB", "")[index]))
        return Reading("" if operand in self.targets else operand, by_name ^ by_linear ^ by_gemm)

    def lost(self, node: NodeProto, name: str) -> str:
        """What torch read at a node, if that is neither a tensor of the name nor in the file: one of its arguments."""
        arguments = arguments_of(node)
        if any(self.targets.get(argument) == name for argument in arguments):
            return ""
        here = {*self.producers, *self.inputs, *self.targets, *node.input}
        names = [argument for argument in arguments if argument not in here]
        return next(filter(_TRANSPOSED.fullmatch, names), next(iter(names), ""))


def orders(array: np.ndarray) -> list[list[int]]:
    """The orders of axes, other than the first one, in which an array is the same."""
    longer = [axis for axis, length in enumerate(array.shape) if length > 1]
    same: list[list[int]] = []
    for moved in permutations(longer) if len(longer) <= _MOST else ():
        order = list(range(array.ndim))
        for place, axis in zip(longer, moved, strict=True):
            order[place] = axis
        if order != sorted(order) and array.transpose(order).shape == array.shape:
            same += [order] if np.array_equal(array.transpose(order), array) else []
    return same
