"""What a training graph consists of, layer by layer: shapes, parameters, operations, memory, for given lengths."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.origins import origin_of
from onnx_backprop.converters.prepare.ir_models import to_ir
from onnx_backprop.converters.recompute.sizes import sizes
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.graphs.facts import SHAPE, VIEW
from onnx_backprop.opset.graphs.walk import values_read


@dataclass(frozen=True)
class Layer:
    """A node of the model that reads weights or multiplies matrices.

    shape: of its first output, None where it is not known. parameters: numbers that it is the first to read. trained:
    how many of these are trained. operations: multiplications and additions of its products.
    """

    name: str
    operator: str
    shape: tuple[int, ...] | None
    parameters: int
    trained: int
    operations: int


@dataclass(frozen=True)
class Layers:
    """layers: in the order of the graph. activations: bytes of what the backward part reads of the forward part.

    weights, state: bytes of the tensors that are trained, and of what else a step renews.
    """

    layers: tuple[Layer, ...]
    activations: int
    weights: int
    state: int


def layers_of(graph: TrainingGraph, lengths: Mapping[str, int]) -> Layers:
    """The layers of the model in a training graph. lengths: of its symbolic dimensions, as `training_graph` takes them.

    Errors: InvalidArgumentError for a symbolic dimension without a length.
    """
    model = to_ir(graph.model)
    known = sizes(model, lengths)
    forward = _leading(model, graph.loss)
    tensors = {tensor.name: tensor for tensor in graph.model.graph.initializer}
    seen: set[str] = set()
    layers: list[Layer] = []
    for node in model.graph:
        if node not in forward:
            continue
        values = dict.fromkeys([*filter(None, node.inputs), *sorted(values_read(node), key=lambda v: str(v.name))])
        read = [str(v.name) for v in values if v.name in graph.parameters or v.name in graph.frozen]
        read = [name for name in read if name in tensors and name not in seen]
        products = known.products(node)
        if not read and not products:
            continue
        seen.update(read)
        numbers = {name: prod(tensors[name].dims) for name in read}
        module = next((name for name in (origin_of(tensors[each]).name for each in read) if name), "")
        layers.append(
            Layer(
                name=module.rpartition(".")[0] or str(node.name or (read or [node.outputs[0].name])[0]),
                operator=node.op_type,
                shape=known.shapes.get(node.outputs[0]),
                parameters=sum(numbers.values()),
                trained=sum(count for name, count in numbers.items() if name in graph.parameters),
                operations=2 * products,
            )
        )
    residuals = {
        _source(value)
        for node in model.graph
        if node not in forward and node not in SHAPE  # which needs no numbers
        for value in values_read(node)
        if value.producer() in forward
    }
    of_weights = {value for value in model.graph.inputs if value.name in graph.parameters}
    renewed = {value for value in model.graph.inputs if value.name in graph.updates}
    return Layers(
        layers=tuple(layers),
        activations=sum(known.nbytes.get(v, 0) for v in residuals if v.producer() in forward),  # not the batch
        weights=sum(known.nbytes.get(value, 0) for value in of_weights),
        state=sum(known.nbytes.get(value, 0) for value in renewed - of_weights),
    )


def _leading(model: ir.Model, loss: str) -> set[ir.Node]:
    """The nodes that the loss depends on."""
    (value,) = (v for v in model.graph.outputs if v.name == loss)
    result: set[ir.Node] = set()
    waiting = [value.producer()]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in result:
            result.add(node)
            waiting += [value.producer() for value in values_read(node)]
    return result


def _source(value: ir.Value) -> ir.Value:
    """Whose memory a value lies in, where a view makes it."""
    node = value.producer()
    while node is not None and node in VIEW and node.inputs[0] is not None:
        value, node = node.inputs[0], node.inputs[0].producer()
    return value
