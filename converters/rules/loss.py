"""Gradients of losses that are operators of their own, and of the Cast that widens half precision before them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, element_type
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import HALF_TYPES
from onnx_backprop.opset.core.errors import UnsupportedAttributeError

REDUCTIONS = ("mean", "sum", "none")
REAL_TYPES = (*HALF_TYPES, ir.DataType.FLOAT, ir.DataType.DOUBLE)


@gradient("Cast", versions=(13, 19, 21, 23, 24, 25, 28))
def cast(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x in another float type  =>  dx = dy in the type of x; rounding counts as the identity."""
    x, target = node.input(0), ir.DataType(node.int("to", 0))
    if element_type(x) not in REAL_TYPES or target not in REAL_TYPES:
        raise UnsupportedAttributeError(
            f"the gradient handles casts among {', '.join(t.name for t in REAL_TYPES)}; "
            f"got {element_type(x).name} to {target.name}",
            op_type=node.op_type,
            node=node.name,
        )
    return (op.Cast(dy, to=element_type(x).value),)


@gradient("SoftmaxCrossEntropyLoss", versions=(13,), all_outputs=True)
def softmax_cross_entropy_loss(op: Builder, node: Forward, dys: Sequence[ir.Value | None]) -> Grads:
    """l_n = -w_n · log p[n, t_n], p = softmax(x) along axis 1  =>  dx = g_n · w_n · (p - onehot(t_n)).

    n is a position, t_n its label, w_n = weights[t_n] (1 without weights, 0 where t_n is ignore_index) and
    g_n = dy_n for reduction none, dy for sum, dy / Σ w for mean. By the weights: dw_c = Σ g_n · l_n / w_n over the
    positions of class c, for mean with the loss subtracted from each l_n / w_n. The second output, log p, adds
    dlog_p - p · Σ_c dlog_p to dx.

    Shapes: x (N, C, d1, …), labels (N, d1, …), weights (C).
    """
    reduction = node.string("reduction", "mean")
    if reduction not in REDUCTIONS:
        raise node.refuse("reduction", reduction, f"one of {', '.join(REDUCTIONS)}")
    x, labels = node.input(0), op.Cast(node.input(1), to=ir.DataType.INT64.value)
    narrow = element_type(x)
    work = ir.DataType.FLOAT if narrow in HALF_TYPES else narrow
    p = op.Softmax(_cast(op, x, narrow, work), axis=1)
    dy, dlog_p = (*(None if d is None else _cast(op, d, narrow, work) for d in dys), None)[:2]
    one = op.constant(np.ones((), work.numpy()))

    kept = None
    if node.given("ignore_index"):
        ignored = op.Equal(labels, op.constant(np.array(node.int("ignore_index", 0))))
        labels = op.Where(ignored, op.constant(np.array(0)), labels)
        kept = op.Where(ignored, op.Sub(one, one), one)
    onehot = _onehot(op, x, labels, work)

    dx = dw = None
    if dy is not None:
        w = kept
        if node.has(2):
            weights = op.Gather(_cast(op, node.input(2), narrow, work), labels, axis=0)
            w = weights if kept is None else op.Mul(weights, kept)
        g = dy
        if reduction == "mean":
            total = op.ReduceSum(w, keepdims=0) if w is not None else op.Cast(op.Size(labels), to=work.value)
            g = op.Div(dy, total)
        if node.wants(0):
            scale = g if w is None else op.Mul(g, w)
            scale = op.Unsqueeze(scale, op.ints([1])) if w is not None or reduction == "none" else scale
            dx = op.Mul(scale, op.Sub(p, onehot))
        if node.wants(2):
            per_position = g if kept is None else op.Mul(g, kept)
            dw = _weights_gradient(op, node, labels, onehot, per_position, work, mean=reduction == "mean")
    if dlog_p is not None and node.wants(0):
        term = op.Sub(dlog_p, op.Mul(p, op.ReduceSum(dlog_p, op.ints([1]), keepdims=1)))
        dx = term if dx is None else op.Add(dx, term)
    grads = (
        None if dx is None else _cast(op, dx, work, narrow),
        None,
        None if dw is None else _cast(op, dw, work, narrow),
    )
    return grads[: len(node.inputs)]


def _weights_gradient(
    op: Builder, node: Forward, labels: ir.Value, onehot: ir.Value, g: ir.Value, work: ir.DataType, *, mean: bool
) -> ir.Value:
    """dw_c = Σ g_n · (-log p[n, t_n] - (the mean loss)) over the positions n of class c."""
    x = node.input(0)
    log_p = op.LogSoftmax(_cast(op, x, element_type(x), work), axis=1)
    value = op.Neg(op.Squeeze(op.GatherElements(log_p, op.Unsqueeze(labels, op.ints([1])), axis=1), op.ints([1])))
    if mean:
        value = op.Sub(value, _cast(op, node.output(), element_type(x), work))
    per_class = op.Mul(onehot, op.Unsqueeze(op.Mul(g, value), op.ints([1])))
    flat = op.Reshape(per_class, op.ints([0, 0, -1]))
    return op.ReduceSum(flat, op.ints([0, 2]), keepdims=0)


def _onehot(op: Builder, x: ir.Value, labels: ir.Value, work: ir.DataType) -> ir.Value:
    """1 at the label along axis 1, else 0, in the shape of x. onnxruntime's OneHot knows float32, not float64."""
    classes = op.Gather(op.Shape(x), op.constant(np.array(1)))
    onehot = op.OneHot(labels, classes, op.constant(np.array([0, 1], np.float32)), axis=1)
    return _cast(op, onehot, ir.DataType.FLOAT, work)


def _cast(op: Builder, value: ir.Value, source: ir.DataType, target: ir.DataType) -> ir.Value:
    """The value in the element type `target`; no node when that is its type already."""
    return value if source == target else op.Cast(value, to=target.value)
