"""Probabilities of classes from those of pairs of them, as libsvm and onnxruntime find them."""

from itertools import combinations

import numpy as np
from onnx import GraphProto, TensorProto, helper

from onnx_backprop.converters.prepare.fused.composer import Composer

_LEAST, _ROUNDS = 1e-7, 100


def pairwise_probabilities(op: Composer, scores: str, classes: int) -> str:
    """p (N, classes): min_p Σ_{i≠j} (r_ji·p_i - r_ij·p_j)², Σp = 1, r_ij = σ(-(A·s + B)) of the pair's score s, i < j.

    r is kept within 1e-7 of 0 and 1. The minimum is found as onnxruntime does, class by class, until every row is
    within 0.005 / classes of it, 100 times at most; so is its derivative, that of the steps that were taken.
    Source: Wu, Lin and Weng, "Probability estimates for multi-class classification by pairwise coupling", section 4.
    """
    a, b = (np.array(op.attribute(name), np.float32) for name in ("prob_a", "prob_b"))
    sloped = op.Add(op.Mul(scores, op.parameter("prob_a", a)), op.parameter("prob_b", b))
    r = op.Clip(op.Sigmoid(op.Neg(sloped)), op.number(_LEAST, scores), op.number(1 - _LEAST, scores))
    pairs = list(combinations(range(classes), 2))
    first, second = (np.zeros((len(pairs), classes * classes), np.float32) for _ in range(2))
    for n, (i, j) in enumerate(pairs):
        first[n, i * classes + j] = second[n, j * classes + i] = 1
    rest = op.Sub(op.number(1.0, r), r)
    whole = op.Reshape(op.Add(op.MatMul(r, first), op.MatMul(rest, second)), [-1, classes, classes])  # 0 for i = j
    turned = op.Transpose(whole, perm=[0, 2, 1])
    diagonal = op.ReduceSum(op.Mul(whole, whole), [1])  # (N, 1, classes)
    eye = op.constant(np.eye(classes, dtype=np.float32))
    q = op.Sub(op.Mul(diagonal, eye), op.Mul(whole, turned))
    start = op.Add(op.Mul(op.ReduceSum(r, [1]), 0.0), op.number(1 / classes, r))
    p = op.Expand(start, op.constant(np.array([1, classes])))
    body = _round(op, q, classes)
    more = op.constant(np.array(True))
    return op.Loop(op.constant(np.array(_ROUNDS)), more, p, body=body)


def _round(op: Composer, q: str, classes: int) -> GraphProto:
    """One round over the classes as the body of a Loop with the state p."""
    outside, op.nodes = op.nodes, []
    count, condition, p = (op.fresh(name) for name in ("round", "more", "p"))
    slopes = op.ReduceSum(op.Mul(q, op.Unsqueeze(p, [1])), [2], keepdims=0)  # q·p
    level = op.ReduceSum(op.Mul(p, slopes), [1])  # pᵀ·q·p
    error = op.ReduceMax(op.Abs(op.Sub(slopes, level)), [1])
    there = op.Less(error, 0.005 / classes)
    new = p
    for t in range(classes):
        row = op.Gather(q, op.constant(np.array(t)), axis=1)
        diagonal, slope = (op.Gather(value, op.constant(np.array([t])), axis=1) for value in (row, slopes))
        step = op.Div(op.Sub(level, slope), diagonal)
        scale = op.Add(step, op.number(1.0, q))
        new = op.Div(op.Add(new, op.Mul(step, np.eye(classes, dtype=np.float32)[t])), scale)
        level = op.Add(level, op.Mul(step, op.Add(op.Mul(step, diagonal), op.Mul(slope, 2.0))))
        level = op.Div(op.Div(level, scale), scale)
        slopes = op.Div(op.Add(slopes, op.Mul(step, row)), scale)
    result = op.Where(there, p, new)
    missing = op.ReduceMax(op.Cast(op.Not(there), to=TensorProto.INT64), keepdims=0)
    go_on = op.Cast(missing, to=TensorProto.BOOL)
    inputs = [(count, TensorProto.INT64, []), (condition, TensorProto.BOOL, []), (p, TensorProto.FLOAT, None)]
    outputs = [(go_on, TensorProto.BOOL, []), (result, TensorProto.FLOAT, None)]
    read, written = ([helper.make_tensor_value_info(*value) for value in some] for some in (inputs, outputs))
    body = helper.make_graph(op.nodes, "round", read, written)
    op.nodes = outside
    return body
