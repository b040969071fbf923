"""Gradients of float16 and bfloat16 models are computed in float32.

Below 6e-8 float16 has nothing and below 6e-5 few bits; the gradient of a mean over many elements begins there, and
bfloat16 keeps 8 bits of every sum. So the rules are shown the forward nodes as if they computed in float32, with the
values that the model has computed, and only what is asked for is rounded, once, to the type of what it belongs to.
"""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_backprop.converters.reverse import sequences
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import constant_value
from onnx_backprop.opset.graphs.facts import COMPARED
from onnx_backprop.opset.graphs.walk import is_standard, subgraphs

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_SMALL = 1024  # elements of a constant that rules may look at


class Widened:
    """Stand-ins in float32 for the half-precision values around nodes, and for those nodes.

    They live while rules are applied; `replace_stand_ins` puts casts of the real values in their place.
    """

    def __init__(self, nodes: Sequence[ir.Node], op: Builder) -> None:
        self._op = op
        self._stand_ins: dict[ir.Value, ir.Value] = {}
        self._real: dict[ir.Value, ir.Value] = {}
        half = any(map(_is_half, nodes))
        self.nodes = [self._node(node) if half and not _stays(node) else node for node in nodes]
        self._replaced = [(new, old) for new, old in zip(self.nodes, nodes, strict=True) if new is not old]

    def of(self, value: ir.Value) -> ir.Value:
        """What stands for a value."""
        return self._stand_ins.get(value, value)

    def _node(self, node: ir.Node) -> ir.Node:
        inputs = [None if x is None else self._stand_in(x) if x.dtype in HALF else self.of(x) for x in node.inputs]
        attributes = [_wide_target(attribute) for attribute in node.attributes.values()]
        outputs = [self._stand_in(y) for y in node.outputs]
        more = {"outputs": outputs, "name": node.name, "metadata_props": dict(node.metadata_props)}
        return ir.Node(node.domain, node.op_type, inputs, attributes, **more)

    def _stand_in(self, value: ir.Value) -> ir.Value:
        if value not in self._stand_ins:
            half = value.dtype in HALF
            known = constant_value(value) if half else None
            result = ir.Value(
                name=value.name and self._op.unique(f"{value.name}_float32"),
                type=_wide_type(value) if half else value.type,
                shape=value.shape,
                const_value=None if known is None or known.size > _SMALL else ir.tensor(known.astype("float32")),
            )
            self._stand_ins[value], self._real[result] = result, value
        return self._stand_ins[value]

    def replace_stand_ins(self, gradients: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
        """Replace the stand-ins in all that was emitted; the gradients of the real values, in their types."""
        for node, old in self._replaced:
            old.resize_outputs(len(node.outputs))  # rules read outputs that were left out
            for y, real in zip(node.outputs, old.outputs, strict=True):
                self._real[y] = real
                _name(real, y, next((x.dtype for x in old.inputs if x and x.dtype in HALF), None))
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
        if self._real:
            emitted, self._op.nodes[:] = list(self._op.nodes), []
            casts: dict[ir.Value, ir.Value] = {}
            for node in emitted:
                self._replace(node, casts)
                self._op.nodes.append(node)
        real = {self._real.get(x, x): self._real.get(g, g) for x, g in gradients.items()}
        return {x: self.cast(g, x) for x, g in real.items()}

    def _replace(self, node: ir.Node, casts: dict[ir.Value, ir.Value]) -> None:
        """Casts come before the first node that needs them, which is as late as they can."""
        for index, x in enumerate(node.inputs):
            if x in self._real:
                real = node.op_type in ("SequenceLength", "Shape", "Size")
                node.replace_input_with(index, self._real[x] if real else self._value(x, casts))
        for graph in subgraphs(node):
            for inner in graph:
                self._replace(inner, casts)
            graph.outputs[:] = [self._real.get(y, y) for y in graph.outputs]

    def _value(self, x: ir.Value, values: dict[ir.Value, ir.Value]) -> ir.Value:
        """What a stand-in stands for: what the model has computed, or that again from what it was computed of."""
        if x not in values:
            real = self._real.get(x, x)
            node = real.producer()
            if node is None or real.dtype not in HALF or node not in COMPARED:
                values[x] = self.cast(real, x)
            else:
                inputs = [None if v is None else self._value(self.of(v), values) for v in node.inputs]
                attributes = {name: attribute.value for name, attribute in node.attributes.items()}
                values[x] = self._op.emit(node.op_type, inputs, attributes)[0]
                values[x].type, values[x].shape = x.type, x.shape
        return values[x]

    def cast(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """A gradient in the type of what it belongs to; of an integer that carries one, as it is."""
        if like.dtype is None or not like.dtype.is_floating_point() or value.dtype == like.dtype:
            return value
        if sequences.is_sequence(value):
            to = like.dtype
            count = sequences.length(self._op, value)
            return sequences.sequence_of(self._op, count, to, lambda op, n: op.Cast(sequences.at(op, value, n), to=to))
        result = self._op.Cast(value, to=like.dtype)
        result.shape = value.shape
        return result


def _wide_type(value: ir.Value) -> ir.TypeProtocol:
    return (sequences.sequence_type if sequences.is_sequence(value) else ir.TensorType)(ir.DataType.FLOAT)


def _name(real: ir.Value, y: ir.Value, half: ir.DataType | None) -> None:
    """An output that was left out and that a rule has named because it reads it."""
    if y.name and not real.name:
        real.name, real.shape = y.name, y.shape
        real.type = ir.TensorType(half) if half and y.dtype == ir.DataType.FLOAT else y.type


def _stays(node: ir.Node) -> bool:
    """Branches read values from outside by themselves; what Attention masks depends on its type's lowest number."""
    return bool(subgraphs(node)) or is_standard(node, "Attention")


def _is_half(node: ir.Node) -> bool:
    return any(value is not None and value.dtype in HALF for value in (*node.inputs, *node.outputs))


def _wide_target(attribute: ir.Attr) -> ir.Attr:
    """`to` of a Cast and `dtype` of a node that makes values."""
    if attribute.name in ("to", "dtype", "stash_type") and attribute.value in [t.value for t in HALF]:
        return ir.AttrInt64(attribute.name, ir.DataType.FLOAT.value)
    return attribute
