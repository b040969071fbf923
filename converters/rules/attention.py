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

MASKED = ("BiasRowMaxAxes", "BiasRowMax", "FloatNegInfT", "RowAllMasked")  # nodes of the body


@amends("Attention")
def attention_body(body: onnx.FunctionProto, node: ir.Node) -> None:
    """Queries that may look nowhere have no gradient to their scores.

    Where all of a row of the mask is -inf, the body takes the softmax of -inf alone, whose NaN it replaces by 0
    afterwards: in the gradient the NaN would come back. Here the scores are replaced before the softmax as well.

    Where the best of a row is the lowest finite number, in which every score is lost, the answer depends on who
    computes it: onnxruntime's kernel puts out 0, and the body the mean of the values. onnxruntime uses the body for
    types and versions that it has no kernel for, such as float64 and, since 1.32, Attention of opset 25. The training
    graph therefore asks an Attention of one key, which is folded when a session is made.
    """
    dtype = None if node.inputs[0] is None else element_type(node.inputs[0])
    nodes = {inner.output[0]: inner for inner in map(copied, body.node)}
    softmax = next((inner for inner in nodes.values() if inner.op_type == "Softmax"), None)
    if softmax is None or dtype is None or not nodes.keys() >= set(MASKED):
        raise unsupported(node, "the function body that onnx defines for it is not one that this version knows")
    *earlier, _ = [nodes.pop(name) for name in MASKED]
    scores, softmax.input[0] = softmax.input[0], "ScoresOrNone"
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    del body.node[:]
    for inner in nodes.values():
        if inner is softmax:
            body.node.extend([*earlier, *_masked_rows(dtype, None if mask is None else element_type(mask), scores)])
        body.node.append(inner)


def _masked_rows(dtype: ir.DataType, mask: ir.DataType | None, scores: str) -> list[onnx.NodeProto]:
    """RowAllMasked, for the rows that put out 0, and ScoresOrNone, which depends on no score where none counts."""
    return [
        *_constant("Lowest", dtype, [dtype.min]),
        helper.make_node("CastLike", ["Lowest", "BiasRowMax"], ["LowestT"]),
        helper.make_node("Equal", ["BiasRowMax", "FloatNegInfT"], ["RowAllInfinite"]),
        helper.make_node("LessOrEqual", ["BiasRowMax", "LowestT"], ["RowWithoutScores"]),
        *_zero_or_mean(dtype, mask),
        helper.make_node("Equal", ["AttnBiasT", "FloatNegInfT"], ["KeyMasked"]),
        helper.make_node("Not", ["RowAllInfinite"], ["RowHasKeys"]),
        helper.make_node("And", ["KeyMasked", "RowHasKeys"], ["KeyOutOfMean"]),
        *_constant("Zero0", dtype, [0]),
        helper.make_node("CastLike", ["Zero0", scores], ["NoScore"]),
        helper.make_node("CastLike", ["FloatNegInf", scores], ["NoKey"]),
        helper.make_node("Where", ["KeyOutOfMean", "NoKey", "NoScore"], ["SameScores"]),
        helper.make_node("Where", ["RowWithoutScores", "SameScores", scores], ["ScoresOrNone"]),
    ]


def _zero_or_mean(dtype: ir.DataType, mask: ir.DataType | None) -> list[onnx.NodeProto]:
    """RowAllMasked by what this onnxruntime puts out where the mask is the lowest number: 0, or the mean (here 1)."""
    if mask is None or not mask.is_floating_point():
        return [helper.make_node("Identity", ["RowAllInfinite"], ["RowAllMasked"])]
    return [
        *_constant("AskQ", dtype, [[[[0]]]]),
        *_constant("AskV", dtype, [[[[1]]]]),
        *_constant("AskMask", mask, [[mask.min]]),
        helper.make_node("Attention", ["AskQ", "AskQ", "AskV", "AskMask"], ["Answer"]),
        helper.make_node("Cast", ["Answer"], ["AnswerIsMean"], to=onnx.TensorProto.BOOL),
        helper.make_node("Not", ["AnswerIsMean"], ["AnswerIsZero"]),
        helper.make_node("And", ["RowWithoutScores", "AnswerIsZero"], ["RowPutsOutZero"]),
        helper.make_node("Or", ["RowPutsOutZero", "RowAllInfinite"], ["RowAllMasked"]),
    ]


def _constant(name: str, dtype: ir.DataType, values: object) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(values).astype(dtype.numpy())))
    ]
