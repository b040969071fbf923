"""Large weights set aside while a model is checked, converted and inferred, none of which reads them.

So are those that lie in files, of any type: onnx's tools would look for the files.

onnx's tools work on serialised copies of a model; for hundreds of megabytes of weights these copies take longer than
everything else together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backprop.opset.core.mapped import is_mapped
from onnx_backprop.opset.graphs.edit import assign, copied, without_tensors
from onnx_backprop.opset.graphs.walk import is_standard

LARGE = 4096  # elements
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class LargeWeights:
    """The tensors that were set aside, the order of all initializers, and the inputs that stand for some of them."""

    tensors: dict[str, TensorProto]
    order: Sequence[str]
    declared: frozenset[str]

    def put_back(self, model: ModelProto) -> ModelProto:
        """The model, changed: with the weights in their places again; initializers that are new come last."""
        graph = model.graph
        present = {tensor.name: tensor for tensor in graph.initializer}
        ordered = [self.tensors.get(name, present.get(name)) for name in self.order]
        known = set(self.order)
        new = [tensor for tensor in graph.initializer if tensor.name not in known]
        merged = [tensor for tensor in ordered if tensor is not None] + new
        assign(graph.initializer, merged)
        assign(graph.input, [value for value in graph.input if value.name not in self.declared])
        return model


def set_aside(model: ModelProto) -> tuple[ModelProto, LargeWeights]:
    """A copy of a model with inputs of the same name, type and shape for its large tensors: floats, and those in files.

    Initializers themselves are not copied: they stay the model's own until they are put back. Constants of the main
    graph become initializers.
    """
    tensors = {t.name: t for t in model.graph.initializer if _is_large(t)}
    tensors |= dict(_constants(model.graph))
    light = without_tensors(model, tensors)
    inputs = {value.name for value in model.graph.input}
    light.graph.input.extend(
        helper.make_tensor_value_info(name, t.data_type, t.dims) for name, t in tensors.items() if name not in inputs
    )
    # before IR version 4 an initializer was always listed as an input too, which did not make it one
    declared = tensors.keys() if model.ir_version < 4 else tensors.keys() - inputs
    order = [t.name for t in model.graph.initializer]
    return light, LargeWeights(tensors, [*order, *(name for name in tensors if name not in order)], frozenset(declared))


def constant_of(node: NodeProto) -> TensorProto | None:
    """The float tensor of a Constant node."""
    if not is_standard(node, "Constant"):
        return None
    tensor = next((a.t for a in node.attribute if a.name == "value" and a.HasField("t")), None)
    return tensor if tensor is not None and tensor.data_type in FLOATS else None


def _constants(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    kept = {value.name for value in graph.output}
    for node in graph.node:
        tensor = constant_of(node)
        if tensor is not None and _is_large(tensor) and isinstance(node.output[0], str) and node.output[0] not in kept:
            named = copied(tensor)
            named.name = node.output[0]
            yield named.name, named


def _is_large(tensor: TensorProto) -> bool:
    return is_mapped(tensor) or (tensor.data_type in FLOATS and prod(tensor.dims) >= LARGE)
