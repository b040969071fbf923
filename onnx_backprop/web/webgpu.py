"""A training step that a GPU runs through onnxruntime-web's WebGPU kernels, which are float32 kernels."""

from onnx import ModelProto, TensorProto

from onnx_backprop.converters.devices.adapt import adapted
from onnx_backprop.converters.devices.bounds import REFUSES
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.types import type_dims
from onnx_backprop.opset.graphs.walk import all_nodes, called, subgraphs
from onnx_backprop.providers.table import WEBGPU
from onnx_backprop.providers.watch import watch
from onnx_backprop.web.bundle import bundle

_ADVICE = "Use the site without --webgpu"


def webgpu_bundle(graph: TrainingGraph, forward: ModelProto) -> dict[str, bytes]:
    """What `bundle` gives, for WebGPU; see `webgpu_step`. forward: the inference model, its lengths as they came."""
    return bundle(graph, step=webgpu_step(graph), forward=forward)


def webgpu_step(graph: TrainingGraph) -> ModelProto:
    """The step of a training graph that is not inlined and whose lengths are all known, for WebGPU, see `adapted`.

    Errors: UnsupportedError for what a page has no form for: float64 parameters, branches, nodes for the CPU, as a
    MaxPool whose gradient goes by Indices or whose lengths are not known.
    """
    for value in graph.model.graph.input:
        if value.type.tensor_type.elem_type == TensorProto.DOUBLE and type_dims(value.type):
            raise UnsupportedError(f"WebGPU: {value.name!r} is float64. Convert the model to float32")
    model = copied(graph.model)
    watch(graph, model)
    result = adapted(model, WEBGPU)
    nodes = list(all_nodes(result.model.graph))
    for node in sorted(nodes, key=lambda node: node.name not in result.host):
        reason = result.host.get(node.name, REFUSES)  # onnxruntime-web has no kernel of that one either
        if reason != REFUSES:
            raise UnsupportedError(
                f"WebGPU: {node.op_type} {node.name!r}: {reason}. Expected known lengths, and a pool that "
                "MaxPoolBackward takes: float32, padding shorter than the kernel, no SAME with dilations. " + _ADVICE
            )
        if subgraphs(node):
            raise UnsupportedError(f"WebGPU: {node.op_type} {called(node)!r} has a branch. Leave accumulate at 1")
    return result.model
