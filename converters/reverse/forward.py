"""What a gradient rule sees of the forward node it serves."""

import builtins
from collections.abc import Collection, Sequence
from typing import Any, overload

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.origins import operation_of
from onnx_backprop.converters.reverse.known import constant_value, dims
from onnx_backprop.opset.core.errors import InvalidModelError, UnsupportedAttributeError, UnsupportedError


def label(node: ir.Node) -> str:
    """What to call a node in messages: its name, or that of its first output."""
    return node.name or next((str(v.name) for v in node.outputs if v.name), "")


def unsupported(node: ir.Node, message: str) -> UnsupportedError:
    """The error for a node that cannot be differentiated; raise it."""
    return UnsupportedError(message, op_type=node.op_type, node=label(node))


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

    def is_torch(self, *operations: str) -> bool:
        """Whether the node comes from one of these operations of torch, as "max.dim"; a file may not say it."""
        return operation_of(self.node).removeprefix("torch.ops.aten.") in operations

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
            raise self.invalid(f"input {index} is missing")
        return value

    def optional(self, index: int) -> ir.Value | None:
        """An input that may be left out."""
        return self.node.inputs[index] if self.has(index) else None

    def every_input(self) -> list[ir.Value]:
        """The inputs of an operator that takes any number of them."""
        return [self.input(n) for n in range(len(self.node.inputs))]

    def output(self, index: int = 0) -> ir.Value:
        return self.node.outputs[index]

    def rank(self, index: int, why: str = "") -> int:
        """The rank of an input, for a rule that needs it at conversion; `why`: what for."""
        shape = dims(self.input(index))
        if shape is None:
            raise self.unsupported(
                f"the gradient needs the rank of input {index} ({self.input(index).name!r}) at conversion{why}, and "
                "shape inference does not find it. Give that value a shape"
            )
        return len(shape)

    def wants(self, index: int) -> bool:
        """Whether somebody asked for the gradient of an input.

        Nodes that only serve a gradient that nobody asked for are taken away; a rule need not ask for their sake.
        """
        return index < len(self.node.inputs) and self.node.inputs[index] in self._wanted

    @property
    def written(self) -> dict[str, Any]:
        """The values of the attributes that are written on the node."""
        return {name: attribute.value for name, attribute in self.node.attributes.items()}

    def given(self, name: str) -> bool:
        """Whether an attribute is written on the node."""
        return name in self.node.attributes

    def int(self, name: str, default: builtins.int) -> builtins.int:  # an annotation below would mean this method
        return self.node.attributes[name].as_int() if self.given(name) else default

    def axis(self, default: builtins.int, value: ir.Value | None = None) -> builtins.int:
        """The attribute axis, one of those that a value has, by default the first input, as far as that is known."""
        axis, known = self.int("axis", default), dims(value or self.input(0))
        if known is not None and not -len(known) <= axis < len(known):
            raise self.invalid(f"attribute axis: expected one of {len(known)} axes, got {axis}")
        return axis

    def float(self, name: str, default: builtins.float) -> builtins.float:
        """A float attribute. The default is rounded to float32, as attributes are stored; 0.9 is another number."""
        return self.node.attributes[name].as_float() if self.given(name) else builtins.float(np.float32(default))

    def string(self, name: str, default: str) -> str:
        return self.node.attributes[name].as_string() if self.given(name) else default

    def choice(self, name: str, default: str, handled: Collection[str]) -> str:
        """A string attribute; UnsupportedAttributeError for a value that the rule does not handle."""
        value = self.string(name, default)
        if value not in handled:
            *first, last = handled
            raise self.refuse(name, value, f"{', '.join(first)} and {last}")
        return value

    def one_of(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """A string attribute; InvalidModelError for a value that the operator's definition does not allow."""
        value = self.string(name, default)
        if value not in allowed:
            raise self.invalid(f"attribute {name}: expected one of {', '.join(allowed)}, got {value!r}")
        return value

    @overload
    def ints(self, name: str) -> list[builtins.int] | None: ...
    @overload
    def ints(self, name: str, default: Sequence[builtins.int]) -> list[builtins.int]: ...
    def ints(self, name: str, default: Sequence[builtins.int] | None = None) -> list[builtins.int] | None:
        if self.given(name):
            return list(self.node.attributes[name].as_ints())
        return None if default is None else list(default)

    def constant(self, index: builtins.int) -> np.ndarray | None:
        """The value of an input that no run can change, else None (also for an absent input)."""
        return constant_value(self.optional(index))

    def constant_list(self, index: builtins.int) -> np.ndarray | None:
        """The same of an input that must have one axis."""
        value = self.constant(index)
        if value is not None and value.ndim != 1:
            raise self.invalid(f"input {index}: expected one axis, got the shape {list(value.shape)}")
        return value

    def refuse(self, attribute: str, value: object, handled: str) -> UnsupportedAttributeError:
        """The error for an attribute value the rule does not handle; raise it."""
        return UnsupportedAttributeError(
            f"the gradient handles {attribute} {handled}; got {value!r}", op_type=self.op_type, node=self.name
        )

    def unsupported(self, message: str) -> UnsupportedError:
        """The error for a form of the operator that the rule does not handle; raise it."""
        return unsupported(self.node, message)

    def invalid(self, message: str) -> InvalidModelError:
        """The error for a node that the operator's definition does not allow; raise it."""
        return InvalidModelError(message, op_type=self.op_type, node=self.name)
