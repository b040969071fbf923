"""Hiding nodes from onnx's inference and its version converter, which take a node of an unknown domain as it is."""

from collections.abc import Iterable

from onnx import ModelProto, NodeProto

from onnx_backprop.opset.graphs.edit import add_import, without_imports
from onnx_backprop.opset.graphs.walk import all_nodes


def hide(model: ModelProto, nodes: Iterable[NodeProto], domain: str) -> None:
    """Move standard nodes of a model, in place, to a domain that nobody knows."""
    for node in nodes:
        node.domain = domain
    add_import(model, domain)


def show(model: ModelProto, domain: str) -> None:
    """Move what was hidden back, in place, as far as nothing else has taken its place meanwhile."""
    for node in all_nodes(model):
        if node.domain == domain:
            node.domain = ""
    without_imports(model, domain)
