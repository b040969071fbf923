"""Attention, which like RotaryEmbedding has no rule: it is differentiated through its function body."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from onnx_backprop.converters.prepare.graphs import copied
from onnx_backprop.converters.reverse.expand import amends
from onnx_backprop.converters.reverse.forward import unsupported
from onnx_backprop.converters.reverse.known import element_type


@amends("Attention")
def attention_body(body: onnx.FunctionProto, node: ir.Node) -> None:
    """Queries that may look nowhere put out 0 and have no gradient, as in onnxruntime.

    The body takes the softmax of -inf alone for them, whose NaN it replaces by 0 afterwards: in the gradient the NaN
    would come back. Here the scores are replaced before the softmax as well. And onnxruntime counts a query as masked
    where no entry of its mask is above the lowest finite number, the body only where all are -inf.
    """
    dtype = None if node.inputs[0] is None else element_type(node.inputs[0])
    copies = [copied(inner) for inner in body.node]
    nodes = {inner.output[0]: inner for inner in copies}
    softmax = next((inner for inner in copies if inner.op_type == "Softmax"), None)
    if softmax is None or dtype is None or not {"BiasRowMaxAxes", "BiasRowMax", "RowAllMasked"} <= nodes.keys():
        raise unsupported(node, "the function body that onnx defines for it is not one that this version knows")
    lowest = numpy_helper.from_array(np.array([dtype.min]).astype(dtype.numpy()))
    scores = softmax.input[0]
    softmax.input[0] = "ScoresOrNone"
    known = [nodes.pop(name) for name in ("BiasRowMaxAxes", "BiasRowMax")]
    del nodes["RowAllMasked"]
    del body.node[:]
    for inner in nodes.values():
        if inner is softmax:
            body.node.extend(known)
            body.node.extend(
                [
                    helper.make_node("Constant", [], ["Lowest"], value=lowest),
                    helper.make_node("CastLike", ["Lowest", "BiasRowMax"], ["LowestT"]),
                    helper.make_node("LessOrEqual", ["BiasRowMax", "LowestT"], ["RowAllMasked"]),
                    helper.make_node("Constant", [], ["NoScore"], value_float=0.0),
                    helper.make_node("CastLike", ["NoScore", scores], ["NoScoreT"]),
                    helper.make_node("Where", ["RowAllMasked", "NoScoreT", scores], ["ScoresOrNone"]),
                ]
            )
        body.node.append(inner)
