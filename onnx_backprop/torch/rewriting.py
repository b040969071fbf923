"""What torch's exporter has written, rewritten for a training: ties, marks and names."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.torch_metadata import (
    ALIASES,
    KIND,
    NO_GRADIENT,
    PARAMETER,
    REQUIRES_GRAD,
    TIES,
)
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.torch.memory import memory_key
from onnx_backprop.torch.modules import torch


def tie(graph: ir.Graph, tensors: Sequence[tuple[str, Any]]) -> None:
    """Make one initializer of what is one tensor of the module under several names, and say that this is so."""
    graph.metadata_props[TIES] = "stated"
    names: dict[object, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(memory_key(tensor), []).append(name)
    for first, *aliases in (group for group in names.values() if len(group) > 1):
        stored = [graph.initializers[name] for name in (first, *aliases) if name in graph.initializers]
        if not stored:
            continue
        kept = stored[0]
        for other in stored[1:]:
            other.replace_all_uses_with(kept, replace_graph_outputs=True)
            del graph.initializers[str(other.name)]
        if kept.name != first:
            del graph.initializers[str(kept.name)]
            kept.name = first
            graph.register_initializer(kept)
        kept.metadata_props[ALIASES] = json.dumps(aliases)


def mark(graph: ir.Graph, parameters: Sequence[tuple[str, Any]]) -> None:
    """Say which parameters require no gradient, and add those that nothing reads, which torch leaves out."""
    frozen = [name for name, parameter in parameters if not parameter.requires_grad]
    if frozen:  # an optimizer that takes one out leaves this
        graph.metadata_props[NO_GRADIENT] = json.dumps(frozen)
    aliases = {alias for value in graph.initializers.values() for alias in _aliases(value)}
    for name, parameter in parameters:
        if name in aliases:
            continue
        if name not in graph.initializers:
            tensor = ir.tensor(array(parameter), name=name)
            shape = ir.Shape([int(n) for n in parameter.shape])
            value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
            value.metadata_props[KIND] = PARAMETER
            graph.register_initializer(value)
        if not parameter.requires_grad:
            graph.initializers[name].metadata_props[REQUIRES_GRAD] = "False"


def _aliases(value: ir.Value) -> list[str]:
    return json.loads(value.metadata_props.get(ALIASES, "[]"))


def drop_unread(graph: ir.Graph, kept: set[str]) -> None:
    """Remove nodes and initializers that nothing reads, parameters aside."""
    for node in reversed(list(graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if name not in kept and not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def name_apart(graph: ir.Graph) -> dict[str, str]:
    """Let no result of a node have the name of an input or an initializer, as a buffer `mean` and a call of mean.

    Nor an input that of an initializer: {such a name: what it is called now}.
    """
    reserved, renamed = used_names(graph), {}
    for value in graph.inputs:
        name = str(value.name)
        if graph.initializers.get(name, value) is not value:
            value.name = renamed[name] = unique(name, reserved)
    stored = {str(v.name) for v in (*graph.inputs, *graph.initializers.values())}
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in stored and value.name:
                value.name = unique(value.name, reserved)
    return renamed


def in_order(module: Any, shapes: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
    """Dynamic shapes of args and kwargs, in their order."""
    if not isinstance(shapes, Mapping):
        return list(shapes or ())
    bound = inspect.signature(module.forward).bind_partial(*args).arguments
    result: list[Any] = []
    for name in bound:
        spec = shapes.get(name)
        several = inspect.signature(module.forward).parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        result += list(spec or ()) if several else [spec]
    return [*result, *(shapes.get(name) for name in named)]


def leaf_shapes(values: Any, specs: Any) -> Iterator[Any]:
    """The dynamic shape of each tensor among some values, None for those without one."""
    if isinstance(values, torch.Tensor):
        yield specs
    elif isinstance(values, Mapping):
        for name, value in values.items():
            yield from leaf_shapes(value, specs.get(name) if isinstance(specs, Mapping) else None)
    elif isinstance(values, list | tuple):
        for n, value in enumerate(values):
            yield from leaf_shapes(value, specs[n] if isinstance(specs, list | tuple) and n < len(specs) else None)


def name_dimensions(graph: ir.Graph, specs: Iterator[Any]) -> None:
    """Give symbolic lengths the names of their `torch.export.Dim`."""
    names: dict[str, str] = {}
    for value, spec in zip(graph.inputs, specs, strict=False):
        axes = spec.items() if isinstance(spec, Mapping) else enumerate(spec if isinstance(spec, list | tuple) else ())
        for axis, dim in axes:
            length = None if value.shape is None else value.shape[axis]
            name = getattr(dim, "__name__", "")
            if isinstance(length, ir.SymbolicDim) and length.value and name.isidentifier():
                names.setdefault(length.value, name)
    if names:
        symbols = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in names))
        for value in (*graph.inputs, *(v for node in graph.all_nodes() for v in node.outputs)):
            if value.shape is not None:
                value.shape = ir.Shape(
                    symbols.sub(lambda m: names[m[0]], d.value) if isinstance(d, ir.SymbolicDim) and d.value else d
                    for d in value.shape
                )


def name_loss(graph: ir.Graph, names: Sequence[str] | None) -> None:
    loss = graph.outputs[0]
    if loss.shape is None or any(length != 1 for length in loss.shape):
        raise InvalidArgumentError(f"loss: expected one number, got a tensor {loss.shape}. Use reduction='mean'")
    if names is None:
        reserved = {str(v.name) for v in (*graph.inputs, *graph.initializers.values())}
        reserved |= {str(v.name) for node in graph for v in node.outputs} - {str(loss.name)}
        loss.name = unique("loss", reserved)


def array(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
