"""A training graph as a program: its nodes in the order they run in, the memory they pass on, and who reads it when."""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.recompute.sizes import Sizes
from onnx_backprop.converters.reverse.known import constant_value, dims, is_float
from onnx_backprop.opset.graphs.facts import DRAWS, FUSED_INTO_PRODUCTS, IN_PLACE, PRODUCTS, SHAPE, UNFUSED, VIEW
from onnx_backprop.opset.graphs.walk import subgraphs, values_read

_SMALL = 2000  # the share of all forward memory below which a tensor is small


class Buffer:
    """Memory that a node allocates: a value and the views of it."""

    def __init__(self, value: ir.Value, node: ir.Node, size: int) -> None:
        self.value, self.node, self.size = value, node, size
        self.members = [value]
        self.created: int = 0
        self.read: list[int] = []  # by nodes of the forward part, in order
        self.read_back: list[int] = []  # by those of the backward part


class GraphProgram:
    """Nodes and buffers, numbered. What lies in memory before a step, parameters, state and the batch, is no buffer.

    back: the position of the first node of the backward part; update: that of the first node behind it.
    """

    def __init__(
        self,
        graph: ir.Graph,
        nodes: Sequence[ir.Node],
        forward: Collection[ir.Node],
        backward: Collection[ir.Node],
        sizes: Sizes,
        gradients: Collection[ir.Value],
    ) -> None:
        self.graph, self.sizes, self.gradients = graph, sizes, gradients
        self.nodes = nodes
        self.position = {node: n for n, node in enumerate(self.nodes)}
        self.forward, self.backward = forward, backward
        self.readers: dict[ir.Value, int] = {}
        self.buffers: list[Buffer] = []
        self.buffer_of: dict[ir.Value, Buffer] = {}  # by value; nothing for what is there before a step, or has no size
        self._inputs: dict[Buffer, dict[Buffer, bool]] = {}
        self._allocate()
        self._note_readers(graph.outputs)
        total = sum(b.size for b in self.buffers if b.node in forward)
        self.small = total // _SMALL
        self.costs = {node: sizes.cost(node) for node in self.nodes if node in forward or node in backward}

    def _allocate(self) -> None:
        constant = set(self.graph.initializers.values())
        for node in self.nodes:
            read = values_read(node)
            if node.op_type == "Constant" or (read and read <= constant and not subgraphs(node)):
                constant.update(node.outputs)  # what is made of parameters alone is there whatever is chosen
                continue
            source = node.inputs[0] if node.inputs else None
            shared = node in VIEW
            for value in node.outputs:
                if shared and source is not None and not value.is_graph_output():
                    if source in self.buffer_of:
                        self.buffer_of[value] = self.buffer_of[source]
                        self.buffer_of[value].members.append(value)
                    continue
                counts = (node in self.forward or node in self.backward) and value not in self.gradients
                size = self.sizes.nbytes.get(value, 0) if counts else 0
                buffer = self.buffer_of[value] = Buffer(value, node, size)
                buffer.created = self.position[node]
                self.buffers.append(buffer)

    def _note_readers(self, kept: Iterable[ir.Value]) -> None:
        for n, node in enumerate(self.nodes):
            shapes = node in SHAPE
            view = node in self.forward and len(node.outputs) == 1 and self._is_view(node)
            for value in values_read(node):
                buffer = self.buffer_of.get(value)
                if buffer is None or shapes or (view and value is node.inputs[0]):
                    continue
                (buffer.read if node in self.forward else buffer.read_back).append(n)
        for value in kept:
            if value in self.buffer_of:
                self.buffer_of[value].read_back.append(len(self.nodes) - 1)

    def edges(self, value: ir.Value) -> int:
        """How many inputs of nodes read a value: two and more, or an output, keep onnxruntime from melting nodes."""
        return len(value.uses()) + 2 * value.is_graph_output()

    def _is_view(self, node: ir.Node) -> bool:
        output = self.buffer_of.get(node.outputs[0])
        return output is not None and output.value is not node.outputs[0]

    @cached_property
    def saved(self) -> frozenset[Buffer]:
        """What the forward part makes and the backward part alone reads afterwards."""
        return frozenset(
            b
            for b in self.buffers
            if b.node in self.forward
            and b.size > self.small
            and b.read_back
            and all(self.nodes[n] in self.backward for n in b.read_back)
            and all(r in self.position for v in b.members for r, _ in v.uses())
            and not any(v.is_graph_output() for v in b.members)
        )

    @cached_property
    def memory(self) -> np.ndarray:
        """The bytes that are there while each node runs, where nothing is computed again."""
        delta = np.zeros(len(self.nodes) + 1, np.int64)
        for buffer in self.buffers:
            delta[buffer.created] += buffer.size
            delta[self.end(buffer, self.last(buffer)) + 1] -= buffer.size
        return np.cumsum(delta)[:-1]

    @cached_property
    def large(self) -> np.ndarray:
        """Whether each node allocates much."""
        result = np.zeros(len(self.nodes), bool)
        result[[b.created for b in self.buffers if b.size > self.small]] = True
        return result

    def last(self, buffer: Buffer) -> int:
        """The position of the last node that reads a buffer."""
        return max((buffer.created, *buffer.read[-1:], *buffer.read_back[-1:]))

    def inputs_of(self, buffer: Buffer) -> dict[Buffer, bool]:
        """The buffers that must be there to make one again, and whether these must be made again themselves."""
        if buffer not in self._inputs:
            nodes = [buffer.node, *(p for v in buffer.members if (p := v.producer()) in self.forward and p is not None)]
            read: dict[Buffer, bool] = {}
            uses = [(node, v) for node in nodes for v in sorted(values_read(node), key=lambda v: str(v.name))]
            for reader, value in uses:  # by their names: a set has no order
                if value in self.buffer_of and self.buffer_of[value] is not buffer:
                    read[self.buffer_of[value]] = read.get(self.buffer_of[value], False) or self.melts(value, reader)
            self._inputs[buffer] = read
        return self._inputs[buffer]

    def melts(self, value: ir.Value, reader: ir.Node) -> bool:
        """Whether onnxruntime may make one node of that which makes a value and a reader, though others read it too."""
        producer = value.producer()
        return value in self.buffer_of and producer in FUSED_INTO_PRODUCTS and reader in PRODUCTS

    def can_copy(self, node: ir.Node) -> bool:
        """Whether a second run of a forward node gives the same numbers, in values whose rank is known."""
        if node not in self.forward or subgraphs(node) or node.op_type in DRAWS:
            return False
        if node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None:
            mode = constant_value(node.inputs[2])
            if mode is None or mode.any():
                return False
        return all(not v.name or (isinstance(v.type, ir.TensorType) and dims(v) is not None) for v in node.outputs)

    def can_hold(self, value: ir.Value) -> bool:
        """Whether a value can be read once more, later, without a change of what onnxruntime melts together."""
        if dims(value) is None or not isinstance(value.type, ir.TensorType):
            return False
        readers = [node for node, _ in value.uses()]
        return self.edges(value) > 1 or not is_float(value) or all(n.op_type in UNFUSED for n in readers)

    def end(self, buffer: Buffer, last: int) -> int:
        """The last position a buffer is there at, one before that of its last reader where that writes over it."""
        node = self.nodes[last]
        if last > buffer.created and node in IN_PLACE:
            output = self.buffer_of.get(node.outputs[0])
            if output is not None and output.size == buffer.size and not buffer.value.is_graph_output():
                return last - 1
        return last
