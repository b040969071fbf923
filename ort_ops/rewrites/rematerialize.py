"""Elementwise values that the backward pass computes again, in the place of keeping them until then.

    y = Gelu(x)  z = y · w   …   dw = yᵀ · dz  dx = Gelu'(x) · dy   ->   …   y' = Gelu(x)  dw = y'ᵀ · dz  …

Only of operands that are there anyway until y would have been freed, so that memory is saved whatever lengths there
are. The copy stands in front of its first reader, and runs there where a session keeps to the order of the nodes.
Operators are those that take about as long as a copy of memory.
"""

from collections import defaultdict
from collections.abc import Collection

from onnx import ModelProto, NodeProto

from onnx_backprop.opset.functions.native import NATIVE_DOMAIN
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.facts import CHEAP
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import positions
from onnx_backprop.opset.graphs.walk import reads
from onnx_backprop.ort_ops.elementwise.kernel import ELEMENTWISE


def rematerialize(model: ModelProto, ends: Collection[str]) -> ModelProto:
    """Let nodes behind those of the outputs `ends` of the forward pass read copies, in place; returns the model."""
    nodes = list(model.graph.node)
    produced = positions(nodes)
    end = max((produced[name] for name in ends if name in produced), default=len(nodes))
    readers: dict[str, list[int]] = defaultdict(list)
    for n, node in enumerate(nodes):
        for name in reads(node):
            readers[name].append(n)
    outputs = {value.name for value in model.graph.output}
    retained, freed = set[str](), set[str]()
    copies: dict[int, list[NodeProto]] = defaultdict(list)
    taken = used_names(model.graph)
    for node in nodes[: end + 1]:
        later = [n for name in node.output for n in readers[name] if n > end]
        if not later or not _is_cheap(node) or not outputs.isdisjoint(node.output):
            continue
        (y,) = node.output
        read = {name for name in node.input if name in produced}
        kept = all(max(readers[name]) > max(later) for name in read - outputs)
        if y in retained or not kept or not freed.isdisjoint(read) or any(y not in nodes[n].input for n in later):
            continue
        retained |= read
        freed.add(y)
        copy = copied(node)
        copy.name = copy.output[0] = unique(f"{y}/again", taken)
        copies[min(later)].append(copy)
        for n in later:
            nodes[n].input[:] = [copy.output[0] if name == y else name for name in nodes[n].input]
    if copies:
        assign(model.graph.node, [copied(m) for n, node in enumerate(nodes) for m in (*copies[n], node)])
    return model


def _is_cheap(node: NodeProto) -> bool:
    return (node.domain, node.op_type) == (NATIVE_DOMAIN, ELEMENTWISE) or node in CHEAP
