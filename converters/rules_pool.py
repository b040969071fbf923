"""Gradients of pooling."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..opset.errors import UnsupportedError
from .builder import Builder, dims
from .forward import Forward
from .registry import Grads, gradient
from .rules_shape import scatter_back


@gradient("GlobalAveragePool", versions=(1, 22))
def global_average_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = mean of x over the spatial axes  =>  dx = dy / number of pixels, repeated over them."""
    x = node.input(0)
    pixels = op.Div(op.Size(x), op.Max(op.Size(node.output()), op.constant(np.array(1))))
    return (op.Expand(op.Div(dy, op.CastLike(pixels, x)), op.shape(x)),)


@gradient("MaxPool", versions=(12, 22))
def max_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y = the largest of each window  =>  dx = Σ dy over the windows that took the pixel.

    A tie goes to the pixel that the forward's Indices name. The indices come from the operator itself, so pads,
    dilations and ceil_mode mean here what they mean there. storage_order 1 is refused.
    """
    if node.int("storage_order", 0):
        raise node.refuse("storage_order", 1, "0")
    x = node.input(0)
    indices = node.node.outputs[1] if len(node.node.outputs) > 1 else None
    if indices is None:
        attributes = {name: attribute.value for name, attribute in node.node.attributes.items()}
        _, indices = op.emit("MaxPool", [x], attributes, outputs=2)
    return (scatter_back(op, x, indices, dy),)


@gradient("AveragePool", versions=(11, 19, 22))
def average_pool(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """y[o] = Σ_{i in window o} x[i] / n[o]  =>  dx[i] = Σ_{o: i in window o} dy[o] / n[o].

    A convolution of every channel with ones, divided by the number n of pixels counted: the kernel's size with
    count_include_pad, those inside the image without. ceil_mode 1 is refused: libraries count its overhang differently.
    """
    if node.int("ceil_mode", 0):
        raise node.refuse("ceil_mode", 1, "0")
    x = node.input(0)
    kernel = node.ints("kernel_shape") or []
    axes = len(kernel)
    known = dims(x)
    if known is not None and len(known) != axes + 2:
        raise UnsupportedError(f"kernel_shape {kernel} does not fit X {known}", op_type=node.op_type, node=node.name)
    auto_pad = node.string("auto_pad", "NOTSET")
    pads = node.ints("pads", [0] * 2 * axes) or []
    if auto_pad.startswith("SAME") and node.int("count_include_pad", 0):
        raise node.refuse("count_include_pad", 1, f"0 beside auto_pad {auto_pad}")
    convolution = {
        "strides": node.ints("strides", [1] * axes),
        "dilations": node.ints("dilations", [1] * axes),
        "pads_begin": pads[:axes],
        "pads_end": pads[axes:],
        "auto_pad": "None" if auto_pad == "NOTSET" else auto_pad,
        "data_format": "NCX",
        "weights_format": "OIX",
    }
    ones = op.constant(np.ones((1, 1, *kernel)).astype(x.dtype.numpy() if x.dtype else np.float32))
    dy = op.Div(dy, _counts(op, node, kernel, ones))
    # every channel for itself: batch and channels become one axis
    spatial = op.Slice(op.shape(x), op.ints([2]), op.ints([axes + 2]))
    flat_dy = op.Reshape(dy, op.Concat(op.ints([-1, 1]), op.Shape(dy, start=2), axis=0))
    channels = op.Slice(op.shape(x), op.ints([0]), op.ints([2]))
    number = op.ReduceProd(channels, keepdims=1)
    shape = op.Cast(op.Concat(number, op.ints([1]), spatial, axis=0), to=ir.DataType.INT32.value)
    dx = op.domain.ConvolutionBackwardData(flat_dy, ones, shape, **convolution)
    return (op.Reshape(dx, op.shape(x), allowzero=1),)


def _counts(op: Builder, node: Forward, kernel: list[int], ones: ir.Value) -> ir.Value:
    """The divisor n of every window, 0-D or (1, 1, out…)."""
    x = node.input(0)
    size = op.scalar(float(np.prod(kernel)), x)
    if node.int("count_include_pad", 0):
        return size
    # the forward's own Conv over an image of ones counts the pixels inside
    image = op.Concat(op.ints([1, 1]), op.Slice(op.shape(x), op.ints([2]), op.ints([len(kernel) + 2])), axis=0)
    names = ("strides", "dilations", "pads", "auto_pad")
    attributes = {n: node.node.attributes[n].value for n in names if node.given(n)}
    if node.given("auto_pad") and node.string("auto_pad", "NOTSET") != "NOTSET":
        attributes.pop("pads", None)
    return op.Conv(op.fill(image, 1.0, x), ones, kernel_shape=kernel, **attributes)
