"""Gradients of pooling, and of putting windows back together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import (
    DOMAIN_TYPES,
    as_shaped,
    divided,
    narrow,
    padded,
    put_back,
    size_ratio,
    widen,
    work_type,
)
from onnx_backprop.opset.maths.convolution import MAX_RANK


@gradient("MaxPool", versions=(12, 22))
def max_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max x over each window  =>  dx = Σ over the windows won by an element of dy.

    That is MaxPoolBackward: of equal elements in a window the first gets all of dy, and a window that lies in the
    padding altogether passes nothing on. What that operator does not take is done with the Indices of the pool itself.
    """
    x = node.input(0)
    attributes = _backward_attributes(node, x)
    if attributes is not None:
        return op.domain.MaxPoolBackward(x, dy, **attributes)
    y, winners = op.emit("MaxPool", [x], node.written | {"storage_order": 0}, outputs=2)
    if any(d > 1 for d in node.ints("dilations") or ()):
        # a dilated window may step over x altogether: its value is then the lowest number and its index means nothing
        reached = op.Not(op.Equal(y, float((x.dtype or work_type(x)).min)))  # what onnxruntime's pool starts from
        winners = op.Where(reached, winners, 0)
        dy = op.Where(reached, dy, 0)
    return put_back(op, x, winners, dy)


def _backward_attributes(node: Forward, x: ir.Value) -> dict[str, Any] | None:
    """What MaxPoolBackward is told; None for what the gradients of pools do not take and onnxruntime's pools may:
    float64, and SAME with dilations or strides beyond the kernel, which onnxruntime pads in a way of its own.
    """
    kernel = node.ints("kernel_shape") or []
    if x.dtype not in DOMAIN_TYPES or not 1 <= len(kernel) <= MAX_RANK - 2:
        return None
    ones, none = [1] * len(kernel), [0] * 2 * len(kernel)
    strides, dilations = node.ints("strides", ones), node.ints("dilations", ones)
    pads, auto_pad = node.ints("pads", none) or none, node.string("auto_pad", "NOTSET")
    if auto_pad.startswith("SAME") and (max(dilations) > 1 or any(s > k for s, k in zip(strides, kernel, strict=True))):
        return None
    if auto_pad == "NOTSET" and any(not 0 <= pad < k for pad, k in zip(pads, kernel * 2, strict=True)):
        return None
    return {
        "kernel": kernel,
        "strides": strides,
        "dilations": dilations,
        "pads_begin": pads[: len(kernel)],
        "pads_end": pads[len(kernel) :],
        "auto_pad": "None" if auto_pad == "NOTSET" else auto_pad,
        "data_format": "NCX",
    }


@gradient("AveragePool", versions=(11, 19, 22))
def average_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y[o] = s[o] · Σ_{k: i = o·S + k·D - P inside x} x[i]  =>  dx[i] = Σ_{o, k: o·S + k·D - P = i} s[o] · dy[o].

    That is AvgPoolBackward. What that operator does not take, dilations among it, is a transposed convolution with a
    kernel of ones, channel by channel, cut to the shape of x. The share s is the pool of an image of ones over the
    number of its cells in each window, so it follows whatever the pool counts under count_include_pad, ceil_mode and
    auto_pad.
    """
    x = node.input(0)
    attributes = _avg_pool_backward(node, x)
    if attributes is not None:
        return op.domain.AvgPoolBackward(dy, op.shape(x), **attributes)
    windows = _Windows(op, node)
    image = op.filled(op.Concat([1, 1], op.lengths(x, 2), axis=0), 1, work_type(x))
    share = op.Div(op.AveragePool(image, **node.written), op.Max(windows.sums(image), 1))
    return narrow(op, windows.spread(op.Mul(widen(op, dy), share)), x)


def _avg_pool_backward(node: Forward, x: ir.Value) -> dict[str, Any] | None:
    """What AvgPoolBackward is told; None for what it does not take: dilations, padding that counts under ceil_mode.

    A last window that reaches beyond the padding is then divided by its cells inside the padding, not by all of them.
    """
    attributes, counts = _backward_attributes(node, x), node.int("count_include_pad", 0)
    if attributes is None or max(attributes.pop("dilations")) > 1 or (counts and node.int("ceil_mode", 0)):
        return None
    return attributes | {"exclude_pad": int(not counts)}


@gradient("LpPool", versions=(18, 22))
def lp_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = (Σ |x|^p)^(1/p) over each window  =>  dx = sign(x) · |x|^(p-1) · Σ over its windows of dy · Y^(1-p).

    Edge: a window of zeros, where Y has a corner (p = 1: every x = 0), passes nothing on. p < 1 is refused.
    """
    x, power = node.input(0), _power(node)
    share = _over_power(op, widen(op, node.output()), widen(op, dy), power)
    return narrow(op, op.Mul(_Windows(op, node).spread(share), _odd_power(op, widen(op, x), power)), x)


@gradient("GlobalLpPool", versions=(2, 22))
def global_lp_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = (Σ |x|^p)^(1/p) over the spatial axes  =>  dx = sign(x) · (|x| / Y)^(p-1) · dy, 0 where Y = 0.

    Edge: 0 at x = 0 where p = 1. p < 1 is refused.
    """
    x, power, y = node.input(0), _power(node), widen(op, node.output())
    return narrow(op, op.Mul(_odd_power(op, divided(op, widen(op, x), y), power), widen(op, dy)), x)


def _power(node: Forward) -> int:
    power = node.int("p", 2)
    if power < 1:
        raise node.refuse("p", power, "of 1 and more")
    return power


def _odd_power(op: Builder, x: ir.Value, power: int) -> ir.Value:
    """sign(x) · |x|^(power - 1), which is x^(power - 1) where power is even."""
    if power % 2 == 0:
        return x if power == 2 else op.Pow(x, float(power - 1))
    sign = op.Sign(x)
    return sign if power == 1 else op.Mul(sign, op.Pow(op.Abs(x), float(power - 1)))


def _over_power(op: Builder, y: ir.Value, dy: ir.Value, power: int) -> ir.Value:
    """dy · y^(1 - power), 0 where y = 0; y >= 0."""
    if power == 1:
        return dy
    return divided(op, dy, y if power == 2 else op.Pow(y, float(power - 1)))


class _Windows:
    """The windows of a pool, as a convolution with a kernel of ones and its adjoint, channel by channel."""

    def __init__(self, op: Builder, node: Forward) -> None:
        kernel = node.ints("kernel_shape")
        if not kernel:
            raise node.invalid("the attribute kernel_shape is missing")
        self._op, self._node = op, node
        self._steps = {name: node.ints(name, [1] * len(kernel)) for name in ("strides", "dilations")}
        self._pads = _padding(op, node, kernel, self._steps["strides"], self._steps["dilations"])
        self._spatial = op.ints(range(2, len(kernel) + 2))
        self._ones = op.constant(np.ones((1, 1, *kernel), work_type(node.input(0)).numpy()))

    def sums(self, image: ir.Value) -> ir.Value:
        """The sum over each window of an image (1, 1, …) with the lengths of x."""
        op = self._op
        return op.Conv(padded(op, image, self._pads[0], self._spatial), self._ones, **self._steps)

    def spread(self, g: ir.Value) -> ir.Value:
        """Each g, in the shape of the pool's output, added to every element of x in its window; the shape of x."""
        op, x = self._op, self._node.input(0)
        g = op.Reshape(g, op.Concat([-1, 1], op.lengths(self._node.output(), 2), axis=0))
        cells = padded(op, op.ConvTranspose(g, self._ones, **self._steps), self._pads[1], self._spatial)
        return as_shaped(op, cells, x)


def _padding(
    op: Builder, node: Forward, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[ir.Value, ir.Value]:
    """The pads that stretch x to what the windows cover, and those that cut it back, along the spatial axes.

    Windows cover (O - 1) · S + (K - 1) · D + 1 cells, P of them before x begins; where that ends before x does (or
    beyond, under ceil_mode), the padding behind is negative (or larger than the attribute says).
    """
    auto_pad = node.choice("auto_pad", "NOTSET", ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"))
    rank, extent = len(kernel), [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    length, windows = op.lengths(node.input(0), 2), op.lengths(node.output(), 2)
    total = op.Sub(op.Add(op.Mul(op.Sub(windows, [1]), strides), extent), length)
    if auto_pad.startswith("SAME"):
        # onnxruntime pads as if there were no gaps; below 0 it leaves pixels out. A quotient is rounded towards 0
        most = op.Div(op.Add(length, [s - 1 for s in strides]), strides)
        needed = op.Sub(op.Add(op.Mul(op.Sub(most, [1]), strides), kernel), length)
        before = op.Div(needed if auto_pad == "SAME_UPPER" else op.Add(needed, [1]), [2])
    else:
        before = op.ints(node.ints("pads", [0] * 2 * rank)[:rank] if auto_pad == "NOTSET" else [0] * rank)
    padding = op.Concat(before, op.Sub(total, before), axis=0)
    return padding, op.Neg(padding)


@gradient("GlobalAveragePool", versions=(1, 22))
def global_average_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ x / n over the n spatial positions  =>  dx = dy / n, repeated over them."""
    x = node.input(0)
    share = op.Mul(widen(op, dy), size_ratio(op, node.output(), x))
    return op.Expand(narrow(op, share, x), op.shape(x))


@gradient("GlobalMaxPool", versions=(1, 22))
def global_max_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max x over the spatial axes  =>  dx = dy / (number of x that equal Y) where x = Y: ties share equally."""
    x, static_shape = node.input(0), dims(node.input(0))
    axes = op.Range(2, op.rank(x), 1) if static_shape is None else range(2, len(static_shape))
    hit = op.Equal(x, node.output())
    count = op.ReduceSum(op.Cast(hit, to=work_type(x)), axes, keepdims=1, noop_with_empty_axes=1)
    return op.Where(hit, narrow(op, op.Div(widen(op, dy), count), x), 0)


@gradient("Col2Im", versions=(18,))
def col2im(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = an image, the sum of the blocks that x holds as columns  =>  dx = the blocks of dy, as columns.

    Taken by a convolution with one kernel per cell of a block, which picks it. Shapes: x (N, C · cells, L).
    """
    x, block = node.input(0), node.input(2)
    cells = op.ReduceProd(block, keepdims=1)
    square = op.filled(op.Concat(cells, cells, axis=0), 0, work_type(x))
    kernels = op.Reshape(op.EyeLike(square), op.Concat(cells, [1], block, axis=0))
    image = op.Reshape(widen(op, dy), op.Concat([-1, 1], op.lengths(node.output(), 2), axis=0))
    return narrow(op, as_shaped(op, op.Conv(image, kernels, **node.written), x), x)
