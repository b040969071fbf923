"""`dequantize`: the float model that a quantised file stands for."""

from pathlib import Path

import onnx_ir as ir
from onnx import ModelProto, NodeProto

from onnx_backprop.converters.prepare.load import unfolded
from onnx_backprop.converters.quantized import dynamic, qdq, qoperator
from onnx_backprop.converters.quantized.walk import Handler, Walk, is_quantized
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.mapped import whole_if_possible
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.edit import without_imports
from onnx_backprop.opset.graphs.walk import all_nodes

_STANDARD = ("QLinearConv", "QLinearMatMul")
_HANDLERS: dict[tuple[str, str], Handler] = {("", name): f for name, f in qdq.HANDLERS.items()}
_HANDLERS |= {(dynamic.MICROSOFT, name): f for name, f in qoperator.HANDLERS.items()}
_HANDLERS |= {("", name): qoperator.HANDLERS[name] for name in _STANDARD}
_HANDLERS |= {(dynamic.MICROSOFT, name): qdq.HANDLERS[name] for name in ("QuantizeLinear", "DequantizeLinear")}
_HANDLERS |= dynamic.HANDLERS


def dequantize(model: ModelProto | ir.Model | str | Path) -> ModelProto:
    """The float model that a quantised one stands for, with x instead of (q - z) · s wherever it has integers.

        floats = ob.dequantize("model.int8.onnx")
        graph = ob.training_graph(floats, loss="mse", optimizer="adamw")
        trainer = ob.Trainer(graph)
        trainer.fit(batches, epochs=3)
        trainer.export("trained.onnx")
        back = ob.requantize("trained.onnx", "model.int8.onnx", calibration=batches)
        onnx.save(back, "trained.int8.onnx")

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed.

    Weights become float tensors of the type of their scales, under the names of the integers without the additions of
    quantisers, such as `_quantized`; so do biases of int32. These forms are handled: QuantizeLinear and
    DequantizeLinear, with scales per tensor, along an axis or in blocks; operators on integers (QLinearConv,
    QLinearMatMul, QGemm, QLinearAdd and others of com.microsoft); DynamicQuantizeLinear with MatMulInteger and
    ConvInteger; DynamicQuantizeMatMul, MatMulIntegerToFloat, DynamicQuantizeLSTM, QAttention, QEmbedLayerNormalization;
    MatMulNBits and GatherBlockQuantized; integer weights that Cast and Mul turn into floats.

    If a range of integers ends at 0 the file has no Relu, since rounding clips the values below. The float model gets
    the Relu back, and a Clip if the range is 0 to 6, 0 to 1 or -1 to 1; other ends of ranges clip nothing here. An
    output of integers becomes one of floats; an input of integers stays. For floats of more than 2 GB, if the integers
    lie in a file, the result refers to it, for this process; `save_model` writes it.

    Errors: InvalidArgumentError for a model without anything quantised; UnsupportedError, with operator and node, for
    what has no float form here; what `training_graph` raises for a file.
    """
    return whole_if_possible(walked(model).floats)


def walked(model: ModelProto | ir.Model | str | Path) -> Walk:
    """The walk through a model that makes the float one."""
    walk = Walk(unfolded(load(model, mapped=True)), _HANDLERS, _reason)
    if not walk.weights and not any(map(is_quantized, all_nodes(walk.model))):
        raise InvalidArgumentError("model: expected a quantised one, and nothing in it is. Train it as it is")
    left = {node.domain for node in all_nodes(walk.floats)}
    for domain in [o.domain for o in walk.floats.opset_import if o.domain not in ("", "ai.onnx", *left)]:
        without_imports(walk.floats, domain)
    return walk


def _reason(node: NodeProto) -> str:
    """Why an operator has no float form here; "" where nothing is said against it."""
    if (node.domain, node.op_type) in _HANDLERS or not is_quantized(node):
        return ""
    return "ob.dequantize has no float form of it. Dequantise the file with the tool that has quantised it"
