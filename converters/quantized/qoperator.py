"""Operators on integers that have the scales of their operands and of their result as inputs, as QLinearConv."""

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from onnx_backprop.converters.quantized.numbers import Blocks
from onnx_backprop.converters.quantized.qdq import inputs_of
from onnx_backprop.converters.quantized.records import Activation, Weight
from onnx_backprop.converters.quantized.walk import Handler, Walk
from onnx_backprop.opset.graphs.walk import attributes_of

_CLASSES_ALONE = 13  # the opset from which Softmax is along one axis alone


@dataclass(frozen=True)
class OperatorForm:
    """What an operator on integers is in floats.

    operands: where each has its integers, scale and zero point. result: where the scale and zero point of the result
    are. axes: along which the scales of an operand lie. others: inputs that are no numbers, in front.
    """

    op_type: str
    operands: tuple[int, ...]
    result: tuple[int, int]
    axes: tuple[int, ...] = ()
    others: tuple[int, ...] = ()


FORMS = {
    "QLinearAdd": OperatorForm("Add", (0, 3), (6, 7)),
    "QLinearAveragePool": OperatorForm("AveragePool", (0,), (3, 4)),
    "QLinearConv": OperatorForm("Conv", (0, 3), (6, 7), (1, 0)),
    "QLinearGlobalAveragePool": OperatorForm("GlobalAveragePool", (0,), (3, 4)),
    "QLinearLeakyRelu": OperatorForm("LeakyRelu", (0,), (3, 4)),
    "QLinearMatMul": OperatorForm("MatMul", (0, 3), (6, 7), (-2, -1)),
    "QLinearMul": OperatorForm("Mul", (0, 3), (6, 7)),
    "QLinearSigmoid": OperatorForm("Sigmoid", (0,), (3, 4)),
    "QLinearSoftmax": OperatorForm("Softmax", (0,), (3, 4)),
    "QLinearWhere": OperatorForm("Where", (1, 4), (7, 8), (), (0,)),
}


def operand(w: Walk, node: NodeProto, place: int, axis: int = 1) -> str:
    """The floats of an operand whose integers, scale and zero point are inputs one behind the other."""
    q, scale, zero = inputs_of(node, place + 3)[place:]
    return w.real(node, q, scale, zero, axis)


def linear(w: Walk, node: NodeProto) -> None:
    """f(x, …) of the floats, rounded to the scale of the result."""
    form, inputs = FORMS[node.op_type], inputs_of(node, 9)
    axes = form.axes or (1,) * len(form.operands)
    read = [w.alias.get(inputs[n], inputs[n]) for n in form.others]
    read += [operand(w, node, place, axis) for place, axis in zip(form.operands, axes, strict=True)]
    if form.op_type == "Conv" and inputs[8]:
        read.append(bias(w, node, inputs[8], inputs[0], read[1]))
    attributes = w.attributes(node)
    if form.op_type == "Softmax":
        alone = attributes.pop("opset", w.opset) >= _CLASSES_ALONE
        if alone != (w.opset >= _CLASSES_ALONE):
            raise w.refuse(node, f"its attribute 'opset' differs from the model's, {w.opset}, in what Softmax means")
    q, scale, zero = node.output[0], inputs[form.result[0]], inputs[form.result[1]]
    w.result(q, scale, zero, lambda y: w.emit(node, form.op_type, read, [y], **attributes))


def bias(w: Walk, node: NodeProto, q: str, x: str, weight: str, factor: float = 1.0) -> str:
    """A bias of int32 whose scale is that of the input times those of the weight."""
    if q in w.integers or not w.is_integers(q):
        raise w.refuse(node, f"the bias {q!r} is computed")
    shape = tuple(w.tensors[q].dims)
    source = w.integers[x].source if x in w.integers else None
    layer = w.sources.get(weight)
    if not isinstance(source, Activation) or not isinstance(layer, Weight):
        raise w.refuse(
            node, f"the scale of the bias {q!r} is that of {x!r} times that of the weight, which is computed"
        )
    several = layer.scales().size > 1
    lengths = (1,) * len(shape) if several else shape
    if several and int(np.prod(shape)) != layer.scales().size:
        raise w.refuse(node, f"the bias {q!r} of {shape} has {layer.scales().size} scales")
    blocks = Blocks(shape, lengths)
    return w.weight(node, q, "", "", blocks, of=(source, layer), factor=factor)


def gemm(w: Walk, node: NodeProto) -> None:
    """alpha · (A · B + C), C having the scale alpha · s_A · s_B; floats where no scale of the result is given."""
    inputs = inputs_of(node, 9)
    attributes = w.attributes(node)
    alpha = attributes.get("alpha", 1.0)
    read = [operand(w, node, 0), operand(w, node, 3, 0 if attributes.get("transB") else 1)]
    if inputs[6]:
        read.append(bias(w, node, inputs[6], inputs[0], read[1], float(alpha)))
    if inputs[7]:
        w.result(node.output[0], inputs[7], inputs[8], lambda y: w.emit(node, "Gemm", read, [y], **attributes))
    else:
        w.emit(node, "Gemm", read, node.output, **attributes)


def concat(w: Walk, node: NodeProto) -> None:
    """The floats one behind the other."""
    read = [operand(w, node, place) for place in range(2, len(node.input), 3)]
    scale, zero = node.input[:2]
    attributes = attributes_of(node)
    w.result(node.output[0], scale, zero, lambda y: w.emit(node, "Concat", read, [y], **attributes))


HANDLERS: dict[str, Handler] = dict.fromkeys(FORMS, linear) | {"QGemm": gemm, "QLinearConcat": concat}
