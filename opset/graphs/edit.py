"""Changing messages: copies, repeated fields, tensors, opset imports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, numpy_helper

Message = TypeVar("Message", ModelProto, GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto)


def copied(message: Message) -> Message:
    """A copy of a message."""
    result = type(message)()
    result.CopyFrom(message)
    return result


def replace_values(tensor: TensorProto, array: np.ndarray) -> None:
    """Give an initializer another array; its name and metadata stay."""
    metadata = list(tensor.metadata_props)
    name = tensor.name
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    tensor.metadata_props.extend(metadata)


def assign(field: Any, values: Iterable[Any]) -> None:
    """Put other values, some of its own among them, in the place of a repeated field's."""
    new = list(values)
    del field[:]
    field.extend(new)


def insert(graph: GraphProto, position: int, nodes: Sequence[NodeProto]) -> None:
    """Put nodes in front of the one at a position."""
    for node in reversed(nodes):
        graph.node.insert(position, node)


def add_import(target: ModelProto | FunctionProto, domain: str, version: int = 1) -> None:
    """Import an opset where the domain is not imported yet."""
    if all(o.domain != domain for o in target.opset_import):
        target.opset_import.add(domain=domain, version=version)


def without_imports(model: ModelProto, domain: str) -> None:
    """Take an opset import out of a model."""
    assign(model.opset_import, [o for o in model.opset_import if o.domain != domain])


def without(message: Message, *fields: str) -> Message:
    """A copy of a message without some of its fields, which are not copied meanwhile."""
    result = type(message)()
    for field, value in message.ListFields():
        if field.name not in fields:
            if hasattr(value, "MergeFrom"):
                getattr(result, field.name).MergeFrom(value)
            else:
                setattr(result, field.name, value)
    return result


def without_tensors(model: ModelProto, names: Collection[str]) -> ModelProto:
    """A copy of a model without the initializers and Constant nodes of given names, which are not copied meanwhile."""
    result = without(model, "graph")
    result.graph.MergeFrom(without(model.graph, "initializer", "node"))
    result.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name not in names)
    result.graph.node.extend(n for n in model.graph.node if n.op_type != "Constant" or n.output[0] not in names)
    return result


def without_numbers(model: ModelProto, names: Collection[str]) -> ModelProto:
    """A copy of a model whose initializers of given names have no numbers, which are not copied meanwhile."""
    numbers = ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data")
    numbers += ("external_data", "data_location")
    result = without(model, "graph")
    result.graph.MergeFrom(without(model.graph, "initializer"))
    result.graph.initializer.extend(without(t, *numbers) if t.name in names else t for t in model.graph.initializer)
    return result
