"""Emitting nodes: `op.Mul(a, b)` appends a node of type Mul and returns its output; values go by their names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from onnx import NodeProto, helper, numpy_helper

from onnx_backprop.opset.graphs.names import rename, unique


class Emitter:
    """Collects nodes whose names begin with `prefix`, with a number where a name is in `taken`.

    A keyword that is None is left out; an operand that is None or "" is an absent optional input.
    """

    def __init__(self, prefix: str, taken: set[str]) -> None:
        self.prefix, self.taken = prefix, taken
        self.nodes: list[NodeProto] = []

    def __getattr__(self, op_type: str) -> Callable[..., str]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        return lambda *operands, **attributes: self.emit(op_type, operands, attributes)[0]

    def emit(
        self, op_type: str, operands: Sequence[Any], attributes: Mapping[str, Any], *, outputs: int = 1
    ) -> list[str]:
        """Append a node with any number of outputs; `name` and `domain` may stand among the attributes."""
        given = {name: value for name, value in attributes.items() if value is not None}
        inputs = [self.operand(value, operands) for value in operands]
        while inputs and not inputs[-1]:
            inputs.pop()
        name, results = self.names_of(op_type, given.pop("name", None), outputs)
        self.nodes.append(helper.make_node(op_type, inputs, results, name=name, **given))
        return results

    def operand(self, value: Any, _operands: Sequence[Any]) -> str:
        """The name of an operand, given all of a node."""
        return value or ""

    def names_of(self, op_type: str, name: str | None, outputs: int) -> tuple[str, list[str]]:
        """The name of a node and those of its outputs."""
        label = unique(f"{self.prefix}/{name or op_type}", self.taken)
        return label, [label, *(unique(f"{label}/{n}", self.taken) for n in range(1, outputs))]

    def constant(self, value: ArrayLike, dtype: type[np.generic] | None = None) -> str:
        """The name of an array."""
        return self.Constant(value=numpy_helper.from_array(np.asarray(value, dtype, order="C")))

    def finish(self, outputs: Mapping[str, str]) -> list[NodeProto]:
        """The nodes, the value of each output under its name; a copy where that is an input, or another output too."""
        produced = {name for node in self.nodes for name in node.output}
        names = {value: output for output, value in reversed([*outputs.items()]) if value in produced}
        for output, value in outputs.items():
            if names.get(value) != output:
                names[self.Identity(value)] = output
        for node in self.nodes:
            rename(node, names)
        return self.nodes
