"""The loss behind a model's outputs: what it reads, its inputs, and that it is one number."""

from functools import partial

import onnx_ir as ir

from onnx_backprop.converters.prepare.ir_models import to_ir, to_proto
from onnx_backprop.converters.prepare.load import infer, pick
from onnx_backprop.converters.prepare.submodel import with_outputs
from onnx_backprop.converters.reverse.expand import drop_unread
from onnx_backprop.converters.reverse.extending.arithmetic import arithmetic
from onnx_backprop.converters.reverse.known import dims, is_float, type_name
from onnx_backprop.converters.training.losses.base import Loss, LossBuilder, LossFunction
from onnx_backprop.converters.training.losses.compose import LossSum, emit_loss
from onnx_backprop.opset.core.errors import InvalidArgumentError, InvalidModelError, OnnxBackpropError
from onnx_backprop.opset.core.shapes import describe
from onnx_backprop.opset.graphs.names import used_names


def add_loss(
    ir_model: ir.Model, loss: Loss | LossSum | LossFunction | None, prediction: str | None
) -> tuple[ir.Model, str, LossBuilder]:
    """Emit the loss and make it the first output; the model, the loss, and the builder, which knows what it added."""
    graph = ir_model.graph
    if loss is None:
        y = _prediction(graph, prediction)
        _require_one_element(y)
        if y in graph.outputs:
            graph.outputs.remove(y)
        graph.outputs.insert(0, y)
        return ir_model, str(y.name), LossBuilder(set())
    op = LossBuilder(used_names(graph), {str(x.name): x for x in graph.inputs if not x.is_initializer()})
    with arithmetic(op):
        if isinstance(loss, Loss | LossSum):
            value = emit_loss(
                op, loss, lambda name: _prediction(graph, name or prediction), partial(_called, op, graph=graph)
            )
        else:
            op.prefix = getattr(loss, "__name__", "loss").strip("<>")
            value = _called(op, loss, graph)
    if op.blocks:
        drop_unread(op.nodes, [value])  # as what reads logits that are not needed whole
    if not isinstance(loss, Loss) or op.counted is None:
        op.counted = None
    else:
        op.counted.name = op.unique("counted")
    value.name = op.unique("loss")
    graph.extend(op.nodes)
    graph.inputs.extend(op.inputs)
    graph.outputs.insert(0, value)
    ir_model = typed(ir_model)
    value = ir_model.graph.outputs[0]
    _require_scalar(value)
    return ir_model, str(value.name), op


class _Outputs(dict[str, ir.Value]):
    """The outputs of the model by name; values inside it too, if they are asked for."""

    def __init__(self, graph: ir.Graph) -> None:
        super().__init__((str(output.name), output) for output in graph.outputs)
        self._graph = graph

    def __missing__(self, name: str) -> ir.Value:
        value = next((v for node in self._graph for v in node.outputs if v.name == name and v.name), None)
        if value is None:
            raise KeyError(name)
        return value


def _called(op: LossBuilder, loss: LossFunction, graph: ir.Graph) -> ir.Value:
    outputs = _Outputs(graph)
    try:
        value = loss(op, outputs)
    except OnnxBackpropError:
        raise
    except Exception as e:
        raise InvalidArgumentError(
            f"loss: the callable raised {type(e).__name__}: {str(e).rstrip('.')}. It emits nodes with op, as "
            f"op.Abs(a - b), from the outputs {', '.join(map(repr, outputs))}"
        ) from e
    if not isinstance(value, ir.Value):
        raise InvalidArgumentError(f"loss: the callable must return a value of the graph, got {value!r}")
    if value.producer() not in op.nodes:
        value = op.Identity(value)
    return value


def typed(ir_model: ir.Model) -> ir.Model:
    """The model with inferred types, when a node was emitted without them."""
    values = [value for node in ir_model.graph for value in node.outputs if value.name]
    if ir_model.graph.outputs[0].shape is not None and all(value.dtype is not None for value in values):
        return ir_model
    proto = to_proto(ir_model)
    for output in proto.graph.output:
        if not output.HasField("type"):
            known = {v.name: v for v in infer(with_outputs(proto, ())).graph.value_info}
            if output.name in known:
                output.CopyFrom(known[output.name])
    return to_ir(infer(proto))


def _prediction(graph: ir.Graph, name: str | None) -> ir.Value:
    """The value that the loss reads, or that is the loss; of ZipMap's maps, the tensor that it makes them of."""
    outputs = {str(value.name): _before_maps(value) for value in graph.outputs}
    if name is not None:
        inside = {str(v.name): v for node in graph for v in node.outputs if v.name}
        known = outputs if name in outputs else inside | outputs
        (value,) = pick([name], known, argument="prediction", what="a graph output, or of a value inside the graph")
        if not is_float(value):
            raise InvalidArgumentError(
                f"{name!r} has type {type_name(value)}; losses exist for floats only", "prediction"
            )
        return value
    floats = [value for value in outputs.values() if is_float(value)]
    if not floats:
        raise InvalidModelError(
            f"the model has no float output to compute a loss from; it has {', '.join(outputs) or 'none'}"
        )
    if len(floats) > 1:
        names = ", ".join(repr(value.name) for value in floats)
        raise InvalidArgumentError(
            f"the model has {len(floats)} float outputs, {names}. Name the one that the loss reads", "prediction"
        )
    return floats[0]


def _before_maps(output: ir.Value) -> ir.Value:
    node = output.producer()
    tensor = node.inputs[0] if node is not None and node.op_type == "ZipMap" else None
    return output if tensor is None else tensor


def _require_scalar(value: ir.Value) -> None:
    """Raise InvalidArgumentError unless what a callable returned is one float."""
    if (shape := dims(value)) is None or any(d != 1 for d in shape):
        raise InvalidArgumentError(
            f"loss: the callable returned a value of the shape {describe(shape)}, expected one element. Reduce it, "
            "as op.ReduceMean(value, keepdims=0) does"
        )
    if not is_float(value):
        raise InvalidArgumentError(f"loss: the callable returned a value of type {value.dtype}, expected a float")


def _require_one_element(value: ir.Value) -> None:
    """Raise InvalidArgumentError unless an output has one element."""
    shape = dims(value)
    if shape is None or any(d != 1 for d in shape):
        raise InvalidArgumentError(
            f"loss: with loss=None the output {value.name!r} is the loss and must have one element, "
            f"got shape {describe(shape)}. Name a loss, or reduce the output in the model"
        )
