"""Noise of the size of a quantised file's rounding, put into its float model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from onnx_backprop.converters.quantized.dequantize import walked
from onnx_backprop.converters.quantized.records import array_of, range_of
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.walk import all_nodes, subgraphs

_PRODUCTS = {"Conv", "MatMul", "LSTM", "Gemm", "Attention"}
_BY_RUNS = ("DynamicQuantize", "MatMulInteger", "ConvInteger")
_LEVELS = 255  # between the least and the largest number of what a run rounds to eight bits


def with_rounding(path: Path, seed: int) -> ModelProto:
    """The float model of a file, where each number that the file rounds has noise, even over one step of its scale.

    What a run quantises lies before a product with a weight of integers; the states inside an LSTM, between -1 and 1,
    get one draw for all times, as a part of its bias.
    """
    walk = walked(path)
    model = walk.floats
    noise = _Noise(model, seed)
    for one in walk.activations.values():
        scale, whole = abs(float(array_of(one.scale).reshape(()))), range_of(one.element)
        zero = 0 if one.zero is None else int(array_of(one.zero).reshape(-1)[0])
        ends = tuple((end - zero) * scale for end in (whole.least, whole.most))
        for value in dict.fromkeys(one.values):
            noise.everywhere(value, scale, ends)
    if any(node.op_type.startswith(_BY_RUNS) for node in all_nodes(walk.model)):
        noise.before_products({weight.name for weight in walk.weights.values()})
    return model


class _Noise:
    """Writes nodes into a model."""

    def __init__(self, model: ModelProto, seed: int) -> None:
        self.model, self.seed, self.count = model, seed, 0
        self.graphs = [model.graph, *(g for node in all_nodes(model) for g in subgraphs(node))]

    def _name(self) -> str:
        self.count += 1
        return f"rounding_{self.count}"

    def _constant(self, value: Any) -> str:
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), self._name()))
        return self.model.graph.initializer[-1].name

    def _node(self, to: list[NodeProto], op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        to.append(helper.make_node(op_type, inputs, [self._name()], **attributes))
        return to[-1].output[0]

    def _drawn(self, to: list[NodeProto], like: str) -> str:
        """Numbers between -1/2 and 1/2."""
        self.count += 1
        seed = float(self.seed * 10000 + self.count)
        return self._node(to, "RandomUniformLike", [like], low=-0.5, high=0.5, seed=seed)

    def everywhere(self, value: str, scale: float, ends: tuple[float, ...]) -> None:
        """Noise of one step, cut at the ends, for all that read a value."""
        graph = next((g for g in self.graphs if any(value in n.output for n in g.node)), self.model.graph)
        if any(value == output.name for output in graph.output):
            return
        nodes: list[NodeProto] = []
        moved = self._node(nodes, "Mul", [self._drawn(nodes, value), self._constant(np.float32(scale))])
        moved = self._node(nodes, "Add", [value, moved])
        low, high = (self._constant(np.float32(end)) for end in ends)
        cut = self._node(nodes, "Clip", [moved, low, high])
        for node in _inside(graph):
            node.input[:] = [cut if name == value else name for name in node.input]
        place = next((n + 1 for n, node in enumerate(graph.node) if value in node.output), 0)
        assign(graph.node, [*graph.node[:place], *nodes, *graph.node[place:]])

    def before_products(self, weights: set[str]) -> None:
        """Noise of one of 255 steps from the least to the largest number, where a product with a weight reads it."""
        for graph in self.graphs:
            written: list[NodeProto] = []
            for node in graph.node:
                if node.op_type in _PRODUCTS and len(node.input) > 1 and node.input[1] in weights:
                    x = node.input[0]
                    zero = self._constant(np.float32(0))
                    high = self._node(written, "Max", [self._node(written, "ReduceMax", [x], keepdims=0), zero])
                    low = self._node(written, "Min", [self._node(written, "ReduceMin", [x], keepdims=0), zero])
                    step = self._node(written, "Sub", [high, low])
                    step = self._node(written, "Div", [step, self._constant(np.float32(_LEVELS))])
                    moved = self._node(written, "Mul", [self._drawn(written, x), step])
                    node.input[0] = self._node(written, "Add", [x, moved])
                    if node.op_type == "LSTM":
                        self._states(written, node)
                written.append(node)
            assign(graph.node, written)

    def _states(self, to: list[NodeProto], node: NodeProto) -> None:
        """R · n in the bias (directions, 8·hidden), n being noise (directions, hidden, 1)."""
        rows = self._node(to, "Slice", [node.input[2], *(self._constant(np.array([k])) for k in (0, 1, 1))])
        drawn = self._node(to, "Mul", [self._drawn(to, rows), self._constant(np.float32(2 / _LEVELS))])
        turned = self._node(to, "Transpose", [drawn], perm=[0, 2, 1])
        moved = self._node(to, "MatMul", [node.input[2], turned])
        moved = self._node(to, "Gather", [moved, self._constant(np.array(0))], axis=2)
        half = self._node(to, "Mul", [moved, self._constant(np.float32(0))])
        whole = self._node(to, "Concat", [moved, half], axis=1)
        bias = node.input[3]
        node.input[3] = self._node(to, "Add", [bias, whole]) if bias else whole


def _inside(graph: GraphProto) -> list[NodeProto]:
    return [n for node in graph.node for n in (node, *(i for g in subgraphs(node) for i in _inside(g)))]
