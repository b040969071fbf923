"""Gradients of the Fourier transforms. They are linear: each gradient is the transposed transform.

Real and imaginary parts lie along the last axis, so <a, b> is the sum over both parts, and the transpose of a product
with e^(-iθ) is the product with e^(iθ). With N the length of the transform, F_kn = e^(-2πi kn / N).
"""

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import constant_value, dims
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import count_up, narrow, padded, scatter_add, widen, work_type


@gradient("DFT", versions=(17, 20))
def dft(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = F x  =>  dx = F̄ᵀ dy, the conjugate of F applied to the conjugate; Y = F̄ x / N  =>  dx = (F dy) / N.

    The inverse transform times N would be the same, but onnxruntime divides by N in float32, of doubles too.

    x is cut or filled with zeros to N first, dx is filled or cut back; of a real x, dx is the real part. A one-sided
    output lacks entries, whose gradient is 0. One-sided and inverse: Y = Re(Σ_k c_k x_k e^(2πi kn / N)) / N with c = 1
    for k = 0 and k = N / 2, else 2, so that dx_k = c_k (one-sided transform of dy)_k / N. There x must have N / 2 + 1
    entries: what onnxruntime does with another number is neither cutting nor filling.
    """
    x = node.input(0)
    axis, wide = _axis(op, node), work_type(x)
    inverse, onesided = bool(node.int("inverse", 0)), bool(node.int("onesided", 0))
    halved = inverse and onesided
    n = _as_length(op, node.input(1)) if node.has(1) else _length(op, dy if halved else x, axis)
    conjugate = np.array([1, -1], wide.numpy())
    g = widen(op, dy) if inverse else op.Mul(widen(op, dy), conjugate)
    if onesided and not inverse:  # not by a length given to DFT, whose inferred shape would be wrong
        g = padded(op, g, op.Concat([0], op.Sub(n, _length(op, dy, axis)), axis=0), axis)
    g = _transform(op, node, g, onesided=halved)
    if halved:
        g = op.Mul(g, _counted(op, n, axis, g))
    g = op.Div(g, op.Cast(n, to=wide)) if inverse else op.Mul(g, conjugate)
    if halved:
        _require_whole_spectrum(node, axis)
        g = op.Reshape(g, op.Concat(op.Shape(x, end=-1), [2], axis=0), allowzero=1)  # or the run fails
    elif node.has(1):
        behind = op.Sub(_length(op, x, axis), n)
        g = padded(op, g, op.Concat([0], behind, axis=0), axis)
    return narrow(op, _as_many_parts(op, g, x), x)


def _axis(op: Builder, node: Forward) -> ir.Value:
    """The axis of the transform, a 1-D tensor of one entry."""
    if node.version < 20:
        return op.ints([node.axis(1)])
    constant = node.constant(2)
    if constant is not None or not node.has(2):
        return op.ints([-2 if constant is None else int(constant.item())])
    return op.Reshape(node.input(2), [1])


def _require_whole_spectrum(node: Forward, axis: ir.Value) -> None:
    n, along, known = node.constant(1), constant_value(axis), dims(node.input(0))
    have = None if along is None or known is None else known[int(along.item())]
    if n is not None and isinstance(have, int) and have != int(n.item()) // 2 + 1:
        raise node.refuse("dft_length", n.item(), f"that fits a one-sided spectrum of {have} entries")


def _length(op: Builder, value: ir.Value, axis: ir.Value) -> ir.Value:
    return op.Gather(op.shape(value), axis)


def _transform(op: Builder, node: Forward, value: ir.Value, *, onesided: bool) -> ir.Value:
    """A DFT along the node's own axis."""
    attributes = {"inverse": 0, "onesided": int(onesided)}
    if node.version < 20:
        attributes["axis"] = node.axis(1)
    return op.emit("DFT", [value, None, node.input(2)] if node.has(2) else [value], attributes)[0]


def _counted(op: Builder, n: ir.Value, axis: ir.Value, g: ir.Value) -> ir.Value:
    """How often each entry of a one-sided spectrum stands in the whole one, in a shape that broadcasts to g."""
    k = count_up(op, op.Gather(op.Shape(g), axis))
    single = op.Or(op.Equal(k, 0), op.Equal(op.Mul(k, 2), n))
    weights = op.Where(single, op.scalar(1, g), op.scalar(2, g))
    ones = op.filled(op.Shape(op.Shape(g)), 1)
    return op.Reshape(weights, op.ScatterElements(ones, axis, [-1]))


def _as_many_parts(op: Builder, g: ir.Value, x: ir.Value) -> ir.Value:
    """The real part of g where x has no imaginary one."""
    known = dims(x)
    if known is not None and known[-1] == 2:
        return g
    return op.Slice(g, [0], op.length(x, -1), [-1])


@gradient("STFT", versions=(17,), inputs=(0, 2))
def stft(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y_f = F (w · x_f), x_f the N samples from f · step on  =>  g_f = F̄ᵀ dY_f, dx = Σ_f w · g_f at their places,
    dw = Σ_f x_f · g_f.

    Shapes: x (B, T, 1 or 2), w (N), Y (B, frames, N or N / 2 + 1, 2). Of a real x, g is the real part. F̄ᵀ dY is the
    conjugate of F applied to the conjugate, which is again an STFT, of one frame.
    """
    x, y, window = node.input(0), node.output(), node.optional(2)
    n, frames, batch = _frame_length(op, node), op.length(y, 1), op.Shape(x, start=0, end=1)

    conjugate = np.array([1, -1], work_type(x).numpy())
    spectra = op.Reshape(widen(op, dy), op.Concat([-1], op.length(y, 2), [2], axis=0))
    missing = op.Sub(n, op.length(y, 2))
    spectra = op.Pad(op.Mul(spectra, conjugate), op.Concat([0] * 4, missing, [0], axis=0))
    scalar = op.Squeeze(n, [0])
    g = op.Mul(op.emit("STFT", [spectra, scalar, None, scalar], {"onesided": 0})[0], conjugate)
    by_frame = op.Concat(batch, frames, n, [2], axis=0)
    g = _as_many_parts(op, op.Reshape(g, by_frame, allowzero=1), x)  # (B, frames, N, 1 or 2)

    begin = op.Mul(count_up(op, frames), _as_length(op, node.input(1)))
    places = op.Add(op.Unsqueeze(begin, [1]), op.Range(0, scalar, 1))  # (frames, N)
    weighted = g if window is None else op.Mul(g, op.Unsqueeze(widen(op, window), [1]))
    flat = op.Reshape(weighted, op.Concat(batch, [-1], op.length(x, 2), axis=0))
    origins = op.Expand(op.Reshape(places, [1, -1, 1]), op.Shape(flat))
    dx = scatter_add(op, op.shape(x), origins, narrow(op, flat, x), like=x, axis=1)
    taken = op.Gather(widen(op, x), places, axis=1)
    dwindow = op.ReduceSum(op.Mul(taken, g), [0, 1, 3], keepdims=0)
    return dx, None, None if window is None else narrow(op, dwindow, window)


def _as_length(op: Builder, value: ir.Value) -> ir.Value:
    """A number that an input states, a 1-D int64 tensor of one entry."""
    return op.Cast(op.Reshape(value, [1]), to=ir.DataType.INT64)


def _frame_length(op: Builder, node: Forward) -> ir.Value:
    """N, a 1-D int64 tensor of one entry."""
    if node.has(3):
        return _as_length(op, node.input(3))
    return op.length(node.input(2), 0) if node.has(2) else op.length(node.input(0), 1)
