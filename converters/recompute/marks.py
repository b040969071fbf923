"""Marks of nodes whose first output stands for another value, which is read in its place without a backward part."""

from collections.abc import Iterator

import onnx_ir as ir

# in a node's metadata, each with the name of the value that is stood for
ROUNDED = "onnx_backprop.stands_for"  # rounded, or as it is, in the forward part
DROPPED = "onnx_backprop.dropout_of"  # with elements dropped
VIEW = "onnx_backprop.passes"  # as it is, read when other values have come


def originals(graph: ir.Graph, *marks: str) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Every node with one of some marks, and the value that its first output stands for; the last node first.

    So that where that value is one that stands for another, all that reads either comes to read the other.
    """
    values = {str(v.name): v for node in graph for v in node.outputs}
    values |= {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    for node in reversed(list(graph)):
        name = next((node.metadata_props[mark] for mark in marks if node.metadata_props.get(mark)), None)
        if name is not None:
            yield node, values[name]
