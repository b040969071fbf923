"""Attention: by the operator of our domain in its usual forms, else through its function body, as RotaryEmbedding."""

import onnx
import onnx_ir as ir
from onnx import helper, parser

from onnx_backprop.converters.reverse.expand import amends
from onnx_backprop.converters.reverse.forward import unsupported
from onnx_backprop.converters.reverse.known import dims, element_type
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.maths.attention import TOP_LEFT

MASKED = ("BiasRowMaxAxes", "BiasRowMax", "FloatNegInfT", "RowAllMasked")  # nodes of the body
# RowAllMasked, for the rows that put out 0, and ScoresOrNone, which depends on no score where none counts
ROWS = """
    LowestT = CastLike(Lowest, BiasRowMax)
    RowAllInfinite = Equal(BiasRowMax, FloatNegInfT)
    RowWithoutScores = LessOrEqual(BiasRowMax, LowestT)
    AnswerIsMean = Cast<to = 9>(Answer)
    AnswerIsZero = Not(AnswerIsMean)
    RowPutsOutZero = And(RowWithoutScores, AnswerIsZero)
    RowAllMasked = Or(RowPutsOutZero, RowAllInfinite)
    KeyMasked = Equal(AttnBiasT, FloatNegInfT)
    RowHasKeys = Not(RowAllInfinite)
    KeyOutOfMean = And(KeyMasked, RowHasKeys)
    NoScore = CastLike(AskQ, Scores)
    NoKey = CastLike(FloatNegInf, Scores)
    SameScores = Where(KeyOutOfMean, NoKey, NoScore)
    ScoresOrNone = Where(RowWithoutScores, SameScores, Scores)
"""
OFFSET = """
    OneD = Constant<value_ints = [1]>()
    LastIsSeenT = Reshape(LastIsSeen4D, OneD)
    LastIsSeen = Cast<to = 9>(LastIsSeenT)
    IsOneQuery = Equal(QSeqLen, OneD)
    IsWithPast = GreaterOrEqual(PastKVSeqLen, OneD)
    OneQueryWithPast = And(IsOneQuery, IsWithPast)
    SeesAll = And(OneQueryWithPast, LastIsSeen)
    CausalOffset = Where(SeesAll, NewKVSeqLen, PastKVSeqLen)
"""


_HANDLED = {"is_causal", "scale", "q_num_heads", "kv_num_heads", "qk_matmul_output_mode", "softmax_precision"}
_INPUTS = 4  # queries, keys, values and a mask


def _is_served(node: ir.Node) -> bool:
    """Whether it is attention of known ranks in float32 without a past, masked by bools and causality alone.

    A mask of floats may hold the lowest of them, see `attention_body`; since opset 24 one that is too short hides keys.
    """
    given = [*node.inputs, *[None] * 7]
    query, key, value, mask = given[:_INPUTS]
    if any(v is None or v.dtype != ir.DataType.FLOAT or len(dims(v) or ()) not in (3, 4) for v in (query, key, value)):
        return False
    numbers = {n: a for n, a in node.attributes.items() if n not in _HANDLED}
    neutral = all(a.type == ir.AttributeType.FLOAT and a.as_float() == 0 for a in numbers.values())
    precise = "softmax_precision" not in node.attributes or node.attributes.get_int("softmax_precision") == 1
    scaled = "scale" not in node.attributes or node.attributes["scale"].as_float() > 0  # 0 is 1/√D to the domain
    others = any(v.name and (v.uses() or v.is_graph_output()) for v in node.outputs[1:])
    if not neutral or not precise or not scaled or others or any(given[_INPUTS:]):
        return False
    if mask is None:
        return True
    assert key is not None
    shape, keys = dims(mask), (dims(key) or (None, None))[-2]
    long_enough = shape is not None and 2 <= len(shape) <= 4 and shape[-1] == keys and keys not in (None, 1)
    return mask.dtype == ir.DataType.BOOL and long_enough


@gradient("Attention", versions=(23, 24, 25), serves=_is_served)
def attention(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = softmax(scale·q·kᵀ + mask)·v  =>  AttentionBackward, with the sums of AttentionForwardTraining."""
    heads = node.int("q_num_heads", 0), *[node.int("kv_num_heads", 0)] * 2
    flat = [len(dims(node.input(n)) or ()) == 3 for n in range(3)]
    given = [_by_heads(op, node.input(n), count) if flat[n] else node.input(n) for n, count in enumerate(heads)]
    bias = None
    if node.has(3):
        mask = node.input(3)
        bias = op.Where(mask, op.scalar(0, given[0]), op.scalar(float("-inf"), given[0]))
        missing = 4 - len(dims(mask) or ())
        bias = op.Unsqueeze(bias, list(range(missing))) if missing else bias
    attributes = {
        "is_causal": node.int("is_causal", 0),
        "scale": node.float("scale", 0.0),
        "diagonal_alignment": TOP_LEFT,
    }
    forward = op.domain.emit("AttentionForwardTraining", [*given, bias], attributes, outputs=2)
    dy = _by_heads(op, dy, heads[0]) if flat[0] else dy
    grads = op.domain.emit("AttentionBackward", [dy, *given, *forward, bias], attributes, outputs=3)
    return [_joined(op, g, node.input(n)) if flat[n] else g for n, g in enumerate(grads)]


def _by_heads(op: Builder, x: ir.Value, heads: int) -> ir.Value:
    """(batch, length, heads · size) -> (batch, heads, length, size)."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


def _joined(op: Builder, x: ir.Value, like: ir.Value) -> ir.Value:
    """The other way round."""
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), op.shape(like), allowzero=1)


@amends("Attention")
def attention_body(body: onnx.FunctionProto, node: ir.Node) -> None:
    """Queries that may look nowhere have no gradient to their scores.

    Where all of a row of the mask is -inf, the body takes the softmax of -inf alone, whose NaN it replaces by 0
    afterwards: in the gradient the NaN would come back. Here the scores are replaced before the softmax as well.

    Where the best of a row is the lowest finite number, in which every score is lost, the answer depends on who
    computes it: onnxruntime's kernel puts out 0, and the body the mean of the values. onnxruntime uses the body for
    types and versions that it has no kernel for, such as float64 and, since 1.32, Attention of opset 25. The training
    graph therefore asks an Attention of one key, which is folded when a session is made.

    A single query after past keys sees none of the new keys but the first by the body, and all by the kernel. That is
    asked of an Attention too.
    """
    dtype = None if node.inputs[0] is None else element_type(node.inputs[0])
    nodes = {inner.output[0]: inner for inner in map(copied, body.node)}
    softmax = next((inner for inner in nodes.values() if inner.op_type == "Softmax"), None)
    if softmax is None or dtype is None or not nodes.keys() >= set(MASKED):
        raise unsupported(node, "the function body that onnx defines for it is not one that this version knows")
    *earlier, _ = [nodes.pop(name) for name in MASKED]
    scores = helper.make_node("Identity", [softmax.input[0]], ["Scores"])
    softmax.input[0] = "ScoresOrNone"
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    rows = parser.parse_function(f'<opset_import: ["": 23], domain: "rows"> rows () => (ScoresOrNone) {{{ROWS}}}').node
    del body.node[:]
    if (rows_past := nodes.get("RangeRow2DPast")) is not None and _one_query_of_several_keys(node):
        rows_past.input[1] = "CausalOffset"
    for inner in nodes.values():
        if inner is rows_past and inner.input[1] == "CausalOffset":
            body.node.extend(_offset(dtype))
        if inner is softmax:
            body.node.extend([*earlier, scores, *_answer(dtype, dtype if mask is None else element_type(mask)), *rows])
        body.node.append(inner)


def _answer(dtype: ir.DataType, mask: ir.DataType) -> list[onnx.NodeProto]:
    """What this onnxruntime puts out for a value of 1 where the mask is the lowest number: 0, or the mean, 1."""
    lowest = mask.min if mask.is_floating_point() else 0
    given = {"AskQ": (dtype, [1] * 4, 0), "AskV": (dtype, [1] * 4, 1), "AskMask": (mask, [1, 1], lowest)}
    given["Lowest"] = (dtype, [1], dtype.min)
    tensors = {name: helper.make_tensor(name, kind.value, shape, [x]) for name, (kind, shape, x) in given.items()}
    constants = [helper.make_node("Constant", [], [name], value=tensor) for name, tensor in tensors.items()]
    return [*constants, helper.make_node("Attention", ["AskQ", "AskQ", "AskV", "AskMask"], ["Answer"])]


def _one_query_of_several_keys(node: ir.Node) -> bool:
    """Whether an Attention may have one query and not one new key, as far as shapes say."""
    lengths = []
    for value in node.inputs[:2]:
        shape = None if value is None else value.shape
        lengths.append(None if shape is None else shape[-2])
    queries, keys = lengths
    return not (isinstance(queries, int) and queries != 1) and (queries is None or queries != keys)


def _offset(dtype: ir.DataType) -> list[onnx.NodeProto]:
    """CausalOffset, the number of past keys; or that of all keys, for one query, where this onnxruntime hides none."""
    shapes = {"OneQ": [1] * 4, "TwoK": [1, 1, 2, 1], "OnePast": [1] * 4}
    tensors = [helper.make_tensor(name, dtype.value, shape, [0] * (shape[2])) for name, shape in shapes.items()]
    tensors.append(helper.make_tensor("TwoV", dtype.value, [1, 1, 2, 1], [0, 1]))
    constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in tensors]
    inputs = ["OneQ", "TwoK", "TwoV", "", "OnePast", "OnePast"]
    asked = helper.make_node("Attention", inputs, ["LastIsSeen4D", "AskedKey", "AskedValue"], is_causal=1)
    text = f'<opset_import: ["": 23], domain: "offset"> offset () => (CausalOffset) {{{OFFSET}}}'
    return [*constants, asked, *parser.parse_function(text).node]
