"""Gradients of pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..opset.errors import InvalidModelError
from .builder import Builder, dims
from .forward import Forward
from .idioms import lengths_from, narrow, put_back, size_ratio, widen, work_type
from .registry import Grads, gradient

LISTS = ("kernel_shape", "strides", "dilations", "pads")
NUMBERS = ("ceil_mode", "count_include_pad")


def _attributes(node: Forward) -> dict[str, Any]:
    """The attributes of a pool that decide its value, as far as they are written on the node."""
    given: dict[str, Any] = {name: node.ints(name) for name in LISTS}
    given |= {name: node.int(name, 0) for name in NUMBERS if node.given(name)}
    return given | {"auto_pad": node.string("auto_pad", "NOTSET")}


@gradient("MaxPool", versions=(12, 22))
def max_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max x over each window  =>  dx = Σ over the windows won by an element of dy.

    The winners are the Indices that the pool itself gives, recomputed on x; of equal elements in a window it names
    one, which gets all of dy. A window that lies in the padding altogether passes nothing on.
    """
    x = node.input(0)
    y, winners = op.emit("MaxPool", [x], _attributes(node), outputs=2)  # storage_order 0, whatever the node says
    if any(d > 1 for d in node.ints("dilations") or ()):
        # a dilated window may step over x altogether: its value is then the lowest number and its index means nothing
        reached = op.Greater(y, op.scalar(_lowest(x), x))
        winners = op.Where(reached, winners, op.constant(np.array(0)))
        dy = op.Where(reached, dy, op.scalar(0.0, x))
    return (put_back(op, x, winners, dy),)


def _lowest(x: ir.Value) -> float:
    """The lowest finite number of the type of x, which onnxruntime's pool starts from."""
    return float((x.dtype or work_type(x)).min)


@gradient("AveragePool", versions=(11, 19, 22))
def average_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y[o] = s[o] · Σ_{k: i = o·S + k·D - P inside x} x[i]  =>  dx[i] = Σ_{o, k: o·S + k·D - P = i} s[o] · dy[o].

    That is a transposed convolution with a kernel of ones, channel by channel, cut to the shape of x. The share s is
    the pool of an image of ones over the number of its cells in each window, so it follows whatever the pool counts
    under count_include_pad, ceil_mode and auto_pad.
    """
    x = node.input(0)
    kernel = node.ints("kernel_shape")
    if not kernel:
        raise InvalidModelError("the attribute kernel_shape is missing", op_type=node.op_type, node=node.name)
    steps = {name: node.ints(name, [1] * len(kernel)) or [] for name in ("strides", "dilations")}
    padding, cropping = _padding(op, node, kernel, steps["strides"], steps["dilations"])
    spatial = op.ints(range(2, len(kernel) + 2))
    numpy_type = work_type(x).numpy()
    ones_kernel = op.constant(np.ones((1, 1, *kernel), numpy_type))

    image_shape = op.Concat(op.ints([1, 1]), lengths_from(op, x, 2), axis=0)
    image = op.ConstantOfShape(image_shape, value=ir.tensor(np.ones(1, numpy_type)))
    cells = op.Conv(op.Pad(image, padding, None, spatial), ones_kernel, **steps)
    one = op.constant(np.ones((), numpy_type))
    share = op.Div(op.AveragePool(image, **_attributes(node)), op.Max(cells, one))

    g = op.Mul(widen(op, dy, x), share)
    g = op.Reshape(g, op.Concat(op.ints([-1, 1]), lengths_from(op, node.output(), 2), axis=0))
    dx = op.Pad(op.ConvTranspose(g, ones_kernel, **steps), cropping, None, spatial)
    return (op.Reshape(narrow(op, dx, x), op.shape(x), allowzero=1),)


def _padding(
    op: Builder, node: Forward, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[ir.Value, ir.Value]:
    """The pads that stretch x to what the windows cover, and those that cut it back, along the spatial axes.

    Windows cover (O - 1) · S + (K - 1) · D + 1 cells, P of them before x begins; where that ends before x does (or
    beyond, under ceil_mode), the padding behind is negative (or larger than the attribute says).
    """
    rank, auto_pad = len(kernel), node.string("auto_pad", "NOTSET")
    if auto_pad not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise node.refuse("auto_pad", auto_pad, "NOTSET, VALID, SAME_UPPER and SAME_LOWER")
    stride = op.ints(strides)
    extent = op.ints([(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)])
    length, windows = lengths_from(op, node.input(0), 2), lengths_from(op, node.output(), 2)
    covered = op.Add(op.Mul(op.Sub(windows, op.ints([1])), stride), extent)
    total = op.Sub(covered, length)
    if auto_pad.startswith("SAME"):
        needed = op.Max(total, op.ints([0]))
        smaller = op.Div(needed, op.ints([2]))
        before = smaller if auto_pad == "SAME_UPPER" else op.Sub(needed, smaller)
    else:
        pads = node.ints("pads", [0] * 2 * rank) or []
        before = op.ints(pads[:rank] if auto_pad == "NOTSET" else [0] * rank)
    padding = op.Concat(before, op.Sub(total, before), axis=0)
    return padding, op.Neg(padding)


@gradient("GlobalAveragePool", versions=(1, 22))
def global_average_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = Σ x / n over the n spatial positions  =>  dx = dy / n, repeated over them."""
    x = node.input(0)
    share = op.Mul(widen(op, dy, x), size_ratio(op, node.output(), x))
    return (op.Expand(narrow(op, share, x), op.shape(x)),)


@gradient("GlobalMaxPool", versions=(1, 22))
def global_max_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max x over the spatial axes  =>  dx = dy / (number of x that equal Y) where x = Y: ties share equally."""
    x = node.input(0)
    known = dims(x)
    if known is None:
        two, one = op.constant(np.array(2)), op.constant(np.array(1))
        axes = op.Range(two, op.Size(op.shape(x)), one)
    else:
        axes = op.ints(range(2, len(known)))
    hit = op.Equal(x, node.output())
    count = op.ReduceSum(op.Cast(hit, to=work_type(x).value), axes, keepdims=1, noop_with_empty_axes=1)
    share = narrow(op, op.Div(widen(op, dy, x), count), x)
    return (op.Where(hit, share, op.scalar(0.0, x)),)
