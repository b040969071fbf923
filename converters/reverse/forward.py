"""What a gradient rule sees of the forward node it serves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_backprop.opset.core.errors import InvalidModelError, UnsupportedAttributeError


def label(node: ir.Node) -> str:
    """What to call a node in messages: its name, or that of its first output."""
    return node.name or next((str(v.name) for v in node.outputs if v.name), "")


class Forward:
    """A forward node: its values, attributes, constants, and which input gradients are wanted."""

    def __init__(self, node: ir.Node, wanted: set[ir.Value], version: int) -> None:
        self.node = node
        self.version = version
        self._wanted = wanted

    @property
    def op_type(self) -> str:
        return self.node.op_type

    @property
    def name(self) -> str:
        return label(self.node)

    @property
    def inputs(self) -> Sequence[ir.Value | None]:
        return self.node.inputs

    def has(self, index: int) -> bool:
        """Whether an optional input is connected."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def input(self, index: int) -> ir.Value:
        """An input that must be there."""
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        if value is None:
            raise InvalidModelError(f"input {index} is missing", op_type=self.op_type, node=self.name)
        return value

    def output(self, index: int = 0) -> ir.Value:
        return self.node.outputs[index]

    def wants(self, index: int) -> bool:
        """Whether somebody asked for the gradient of an input; a rule may skip the others."""
        return index < len(self.node.inputs) and self.node.inputs[index] in self._wanted

    def given(self, name: str) -> bool:
        """Whether an attribute is written on the node."""
        return name in self.node.attributes

    def int(self, name: str, default: int) -> int:
        return self.node.attributes[name].as_int() if self.given(name) else default

    def float(self, name: str, default: float) -> float:
        return self.node.attributes[name].as_float() if self.given(name) else default

    def string(self, name: str, default: str) -> str:
        return self.node.attributes[name].as_string() if self.given(name) else default

    def ints(self, name: str, default: Sequence[int] | None = None) -> list[int] | None:
        if self.given(name):
            return list(self.node.attributes[name].as_ints())
        return None if default is None else list(default)

    def constant(self, index: int) -> np.ndarray | None:
        """The value of an input that no run can change, else None (also for an absent input)."""
        return constant_value(self.node.inputs[index]) if self.has(index) else None

    def refuse(self, attribute: str, value: object, handled: str) -> UnsupportedAttributeError:
        """The error for an attribute value the rule does not handle; raise it."""
        return UnsupportedAttributeError(
            f"the gradient handles {attribute} {handled}; got {value!r}", op_type=self.op_type, node=self.name
        )


def constant_value(value: ir.Value | None) -> np.ndarray | None:
    """The array of an initializer or Constant node; None when a run may feed something else."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()
