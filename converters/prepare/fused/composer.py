"""Writes one operator as a composition of standard ones, in a form that reads like the mathematics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.prepare.fused.known import Known
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.graphs.names import unique
from onnx_backprop.opset.graphs.order import producers
from onnx_backprop.opset.graphs.walk import attributes_of, called, is_standard, subgraphs

_DEFINES = "onnx_backprop.defines"  # a node's metadata, which `defined_by` writes and `defined` reads
SCALE = "quantization scale"  # what integers of a file are multiplied by
HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
Operand = str | float | Sequence[int] | np.ndarray | None


class Composer(Emitter):
    """Emits the nodes that stand for one, `op.Mul(a, b)` a node of type Mul; values go by their names.

    Operands may be numbers, which get the type of the first named operand, lists of int64, and arrays. Each node is
    named after the one it stands for. What the function never asks for, an attribute or an input, is refused.
    """

    def __init__(self, node: NodeProto, known: Known, taken: set[str], read: set[str]) -> None:
        super().__init__(called(node), taken)
        self.node = node
        self.known = known
        self.parameters: list[TensorProto] = []
        self._read = read
        self._attributes = attributes_of(node)
        self._unasked = set(self._attributes)
        self._inputs_asked: set[int] = set()

    def emit(
        self, op_type: str, operands: Sequence[Operand], attributes: Mapping[str, Any], *, outputs: int = 1
    ) -> list[str]:
        """Append a node and note what is known of its outputs."""
        results = super().emit(op_type, operands, attributes, outputs=outputs)
        self.known.learn(self.nodes[-1])
        return results

    def several(self, op_type: str, outputs: int, *operands: Operand, **attributes: Any) -> list[str]:
        """Emit a node with several outputs."""
        return self.emit(op_type, operands, attributes, outputs=outputs)

    def fresh(self, name: str) -> str:
        """A name that nothing has, for a value of a sub-graph."""
        return unique(f"{self.prefix}/{name}", self.taken)

    def defined_by(self, result: str, index: int, what: str) -> str:
        """`result`, the node that makes it saying that its input at `index` is no parameter to train, but `what`."""
        maker = next(node for node in self.nodes if result in node.output)
        maker.metadata_props.add(key=_DEFINES, value=f"{index}: {what} of {self.node.op_type}")
        return result

    def parameter(self, attribute: str, array: np.ndarray) -> str:
        """The name of an initializer `<node>/<attribute>`: numbers that were learned, and can be again."""
        name = unique(f"{self.prefix}/{attribute}", self.taken)
        tensor = numpy_helper.from_array(np.asarray(array, order="C"), name)
        self.parameters.append(tensor)
        self.known.learn_tensor(name, tensor)
        return name

    def number(self, value: float, like: str) -> str:
        """A 0-D constant of the type of `like`."""
        element = self.known.element(like)
        if not element:
            return self.CastLike(self.constant(np.array(value, np.float32)), like)  # onnxruntime folds it
        return self.Constant(value=helper.make_tensor("", element, [], [value]))

    def input(self, index: int) -> str:
        """The name of an input, "" where it is left out."""
        self._inputs_asked.add(index)
        return self.node.input[index] if index < len(self.node.input) else ""

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value of an attribute, texts as str."""
        self._unasked.discard(name)
        value = self._attributes.get(name, default)
        value = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
        kinds = (int, float) if isinstance(default, float) else type(default)
        if default is not None and not isinstance(value, kinds):
            raise self.refuse(f"the attribute {name!r}: expected a value like {default!r}, got {value!r}")
        return value

    def count(self, name: str) -> int:
        """An attribute that must be there and counts something."""
        value = self.attribute(name, 0)
        if value < 1:
            raise self.refuse(f"the attribute {name!r}: expected a number of 1 or more, got {value}")
        return value

    def wants(self, index: int) -> bool:
        """Whether anything reads an output."""
        return index < len(self.node.output) and self.node.output[index] in self._read

    def rank(self, name: str, why: str) -> int:
        """The number of axes of a value; UnsupportedError where it is unknown."""
        rank = self.known.rank(name)
        if rank is None:
            raise self.refuse(f"the number of axes of {name!r} must be known {why}. Declare the shapes of graph inputs")
        return rank

    def is_half(self, name: str) -> bool:
        """Whether a value is float16 or bfloat16."""
        return self.known.element(name) in HALVES

    def typed_as(self, like: str, name: str) -> str:
        """The value in the type of another."""
        element = self.known.element(like)
        return self.Cast(name, to=element) if element else self.CastLike(name, like)

    def as_float32(self, name: str) -> str:
        """The value in float32."""
        return name if self.known.element(name) == TensorProto.FLOAT else self.Cast(name, to=TensorProto.FLOAT)

    def length(self, name: str, axis: int) -> str:
        """The length of an axis as a list of one int64."""
        end = axis + 1 or None
        return self.Shape(name, start=axis, end=end)

    def joined(self, *lengths: str | int) -> str:
        """A shape, as an int64 tensor, of numbers and of lists of one."""
        parts = [self.constant(np.array([n], np.int64)) if isinstance(n, int) else n for n in lengths]
        return self.Concat(*parts, axis=0)

    def refuse(self, sentence: str) -> UnsupportedError:
        """The error that says what is not handled and what to do."""
        domain = f"{self.node.domain}::" if self.node.domain else ""
        return UnsupportedError(sentence, op_type=f"{domain}{self.node.op_type}", node=called(self.node))

    def replace(self, results: Sequence[str | None]) -> list[NodeProto]:
        """The nodes, the results under the names that the node gave its outputs."""
        self.check_all_asked(len(results))
        pairs = zip(self.node.output, results, strict=False)
        for node in self.finish({output: result for output, result in pairs if result and output}):
            self.known.learn(node)
        return self.nodes

    def check_all_asked(self, results: int) -> None:
        """Refuse attributes, inputs and outputs that the function has not asked for, of `results` outputs."""
        if self._unasked:
            raise self.refuse(
                f"the attribute {min(self._unasked)!r} is not handled. Leave it out if it changes nothing"
            )
        for index, name in enumerate(self.node.input):
            if name and index not in self._inputs_asked:
                raise self.refuse(f"input {index}, {name!r}, is not handled. Export the model without it")
        for index in range(results, len(self.node.output)):
            if self.wants(index):
                raise self.refuse(f"output {index}, {self.node.output[index]!r}, is not handled. Read another value")

    def operand(self, value: Operand, operands: Sequence[Operand]) -> str:
        """The name of an operand; numbers get the type of the first that is named."""
        if value is None or isinstance(value, str):
            return value or ""
        like = next((o for o in operands if isinstance(o, str) and o), None)
        if isinstance(value, int | float) and like is not None:
            return self.number(value, like)
        return self.constant(value, None if isinstance(value, np.ndarray) else np.int64)


Expansion = Callable[[Composer], str | Sequence[str | None] | None]  # None: the node stays and has a gradient rule
Table = Mapping[tuple[str, str], Expansion]


def defined(node: ir.Node, index: int) -> str | None:
    """What `defined_by` says of the input at `index` of a node, float but no parameter; None where it says nothing."""
    stated, _, what = node.metadata_props.get(_DEFINES, "").partition(": ")
    return what if stated == str(index) else None


def mark_branches(graph: GraphProto) -> None:
    """Say of what the branches of an If hand out what `defined_by` says of the result, as of one of two caches."""
    makers = producers(graph.node)
    for node in graph.node:
        for stated, _, what in (p.value.partition(": ") for p in node.metadata_props if p.key == _DEFINES):
            name = node.input[int(stated)]
            chosen = makers.get(name)
            if chosen is None or not is_standard(chosen, "If"):
                continue
            for branch in subgraphs(chosen):
                given = branch.output[list(chosen.output).index(name)].name
                for inner in (inner for inner in branch.node if given in inner.output):
                    inner.metadata_props.add(key=_DEFINES, value=f"0: {what}")
