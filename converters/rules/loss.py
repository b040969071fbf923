"""Gradients of losses that are operators of their own, and of the Cast that widens half precision before them."""

from collections.abc import Sequence

import onnx_ir as ir

from onnx_backprop.converters.reverse.divisors import mark_divisor
from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.reverse.long_sums import sum_over
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import FLOAT_TYPES, cast, narrow, widen, work_type
from onnx_backprop.opset.graphs.walk import is_standard


@gradient("Cast", versions=(13, 19, 21, 23, 24, 25, 28))
def cast_(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = x in another float type  =>  dx = dy in the type of x; rounding counts as the identity.

    Of x that quantisation rounded the gradient is a float, whatever integers x and y are of. Where dy has been widened
    from the type of x, dx is what it was: onnxruntime drops the two casts, and does not tell bodies that read them.
    """
    x, target = element_type(node.input(0)), ir.DataType(node.int("to", 0))
    if x.is_integer():
        return dy
    if x not in FLOAT_TYPES or target not in FLOAT_TYPES:
        handled = f"among {', '.join(t.name for t in FLOAT_TYPES)}"
        raise node.refuse("casts", f"{x.name} to {target.name}", handled)
    before = dy.producer()
    if before is not None and is_standard(before, "Cast") and target.itemsize > x.itemsize:
        (wide,) = before.inputs
        if wide is not None and wide.dtype == x:
            return wide
    return cast(op, dy, x)


@gradient("SoftmaxCrossEntropyLoss", versions=(13,), all_outputs=True)
def softmax_cross_entropy_loss(op: Builder, node: Forward, dys: Sequence[ir.Value | None]) -> Grads:
    """l_n = -w_n · log p[n, t_n], p = softmax(x) along axis 1  =>  dx = g_n · w_n · (p - onehot(t_n)).

    n is a position, t_n its label, w_n = weights[t_n] (1 without weights, 0 where t_n is ignore_index) and
    g_n = dy_n for reduction none, dy for sum, dy / Σ w for mean. By the weights: dw_c = Σ g_n · l_n / w_n over the
    positions of class c, for mean with the loss subtracted from each l_n / w_n. The second output, log p, adds
    dlog_p - p · Σ_c dlog_p to dx.

    Shapes: x (N, C, d1, …), labels (N, d1, …), weights (C).
    """
    reduction = node.choice("reduction", "mean", ("mean", "sum", "none"))
    x, labels = node.input(0), op.Cast(node.input(1), to=ir.DataType.INT64)
    dy, dlog_p = (*(None if d is None else widen(op, d, x) for d in dys), None)[:2]
    wide = widen(op, x)
    p = op.Softmax(wide, axis=1)

    mask = None
    if node.given("ignore_index"):
        ignored = op.Equal(labels, node.int("ignore_index", 0))
        labels = op.Where(ignored, 0, labels)
        mask = op.Where(ignored, op.scalar(0, wide), op.scalar(1, wide))
    onehot = cast(op, op.OneHot(labels, op.Gather(op.Shape(x), 1), [0.0, 1.0], axis=1), work_type(x))  # never float64

    dx = dw = None
    if dy is not None:
        w = mask
        if node.has(2):
            weights = op.Gather(widen(op, node.input(2)), labels, axis=0)
            w = weights if mask is None else op.Mul(weights, mask)
        g = dy
        if reduction == "mean":
            total = op.ReduceSum(w, keepdims=0) if w is not None else op.Cast(op.Size(labels), to=work_type(x))
            g = mark_divisor(op.Div(dy, total), node.output())
        scale = g if w is None else op.Mul(g, w)
        scale = op.Unsqueeze(scale, [1]) if w is not None or reduction == "none" else scale
        dx = op.Mul(scale, op.Sub(p, onehot))
        if node.has(2):
            per_position = g if mask is None else op.Mul(g, mask)
            dw = _weights_gradient(op, node, labels, onehot, per_position, mean=reduction == "mean")
            dw = narrow(op, dw, node.input(2))
    if dlog_p is not None:
        term = op.Sub(dlog_p, op.Mul(p, op.ReduceSum(dlog_p, [1], keepdims=1)))
        dx = term if dx is None else op.Add(dx, term)
    return None if dx is None else narrow(op, dx, x), None, dw


def _weights_gradient(
    op: Builder, node: Forward, labels: ir.Value, onehot: ir.Value, g: ir.Value, *, mean: bool
) -> ir.Value:
    """dw_c = Σ g_n · (-log p[n, t_n] - (the mean loss)) over the positions n of class c."""
    log_p = op.LogSoftmax(widen(op, node.input(0)), axis=1)
    value = op.Neg(op.Squeeze(op.GatherElements(log_p, op.Unsqueeze(labels, [1]), axis=1), [1]))
    if mean:
        value = op.Sub(value, widen(op, node.output()))
    per_class = op.Mul(onehot, op.Unsqueeze(op.Mul(g, value), [1]))
    return sum_over(op, op.Reshape(per_class, [0, 0, -1]), [0, 2], (None,) * 3, keepdims=0)
