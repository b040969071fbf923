"""The models inside a training graph: for evaluation, and the plain one."""

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.prepare.ir_models import to_ir, to_proto
from onnx_backprop.converters.prepare.load import infer_large
from onnx_backprop.converters.recompute.marks import ROUNDED, originals
from onnx_backprop.converters.reverse.expand import drop_dead
from onnx_backprop.converters.reverse.loops.rows import drop_row_gradients
from onnx_backprop.converters.reverse.loops.steps import drop_stacks
from onnx_backprop.converters.training.metadata import METADATA
from onnx_backprop.converters.training.modes import infer_mode
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.whole_decoder import KEPT
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.core.op import UPDATE_DOMAIN
from onnx_backprop.opset.functions.overloads import refuse_older_runtimes
from onnx_backprop.opset.graphs.edit import assign


def part(whole: TrainingGraph, outputs: list[str], graph_name: str | None, *, keep_inputs: bool) -> ModelProto:
    """What computes some outputs of the model, in inference mode.

    keep_inputs: of the state; else it is constant.
    """
    model = to_ir(whole.model)
    graph = model.graph
    by_name = {str(value.name): value for node in graph for value in node.outputs}
    by_name |= {str(value.name): value for value in graph.outputs}
    unknown = [name for name in outputs if name not in by_name]
    if unknown:
        raise InvalidArgumentError(
            f"outputs: expected names of tensors of the model, got {unknown[0]!r}{near(unknown[0], by_name)}"
        )
    kept = [by_name[name] for name in outputs]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    drop_dead(graph)
    for node, value in originals(graph, ROUNDED):
        node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
    infer_mode(graph)
    drop_stacks(graph)
    drop_row_gradients(graph)
    drop_dead(graph)
    needed = {value for value in graph.outputs if value.producer() is None}
    for value in list(graph.inputs):
        used = bool(value.uses()) or value in needed
        if not _is_kept(whole, value, used=used, outputs=outputs, state=keep_inputs):
            graph.inputs.remove(value)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in needed:
            del graph.initializers[name]
    proto = to_proto(model)
    if graph_name is not None:
        proto.graph.name = f"{whole.model.graph.name}_{graph_name}"
    _drop_unused(proto)
    assign(proto.metadata_props, [entry for entry in proto.metadata_props if entry.key not in (METADATA, KEPT)])
    return infer_large(proto)


def _is_kept(whole: TrainingGraph, value: ir.Value, *, used: bool, outputs: list[str], state: bool) -> bool:
    """Whether a part has an input: data always, targets with the loss, state where it is read and asked for."""
    if value.is_initializer():
        return used and (state or value.name in whole.optional)
    name = str(value.name)
    target = whole.loss not in outputs and name in whole.options.loss_inputs
    return used or (name in whole.inputs and not target)


def _drop_unused(proto: ModelProto) -> None:
    """Functions and opset imports that no node needs any more."""
    used = {node.domain for node in proto.graph.node}
    for entries in (proto.functions, proto.opset_import):
        assign(
            entries, [entry for entry in entries if entry.domain not in (DOMAIN, UPDATE_DOMAIN) or entry.domain in used]
        )
    refuse_older_runtimes(proto)
