"""The six convolution operators: three loops over the same pixels.

Destination pixel o reads source pixel i = o·S + k·D - P through weight k wherever there is such a pixel, with S the
strides, D the dilations and P the zeros before the first pixel. Destination channel d, of group q, reads the q-th part
of the source channels. Loops have three spatial axes; a convolution of fewer has axes of length 1 in front.

The input of a transposed convolution is the destination, its output the source; `opset.maths.convolution_roles` says
which tensor is which in each operator, and their axis orders.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numba import njit

from onnx_backprop.opset.core.op import Float64Array
from onnx_backprop.opset.maths.convolution import Geometry
from onnx_backprop.opset.operators.registry import BY_NAME


@njit(cache=True, nogil=True)
def add_forward(x, w, y, strides, dilations, pads, groups):
    """y[n,d,o] += Σ_{s,k} x[n,s,o·S+k·D-P] · w[d,s,k]."""
    for n in range(y.shape[0]):
        for d in range(y.shape[1]):
            first = d // (y.shape[1] // groups) * w.shape[1]
            for s in range(w.shape[1]):
                for k0 in range(w.shape[2]):
                    for k1 in range(w.shape[3]):
                        for k2 in range(w.shape[4]):
                            for o0 in range(y.shape[2]):
                                i0 = o0 * strides[0] + k0 * dilations[0] - pads[0]
                                if not 0 <= i0 < x.shape[2]:
                                    continue
                                for o1 in range(y.shape[3]):
                                    i1 = o1 * strides[1] + k1 * dilations[1] - pads[1]
                                    if not 0 <= i1 < x.shape[3]:
                                        continue
                                    for o2 in range(y.shape[4]):
                                        i2 = o2 * strides[2] + k2 * dilations[2] - pads[2]
                                        if 0 <= i2 < x.shape[4]:
                                            y[n, d, o0, o1, o2] += x[n, first + s, i0, i1, i2] * w[d, s, k0, k1, k2]


@njit(cache=True, nogil=True)
def add_backward_data(dx, w, dy, strides, dilations, pads, groups):
    """dx[n,s,o·S+k·D-P] += dy[n,d,o] · w[d,s,k]."""
    for n in range(dy.shape[0]):
        for d in range(dy.shape[1]):
            first = d // (dy.shape[1] // groups) * w.shape[1]
            for s in range(w.shape[1]):
                for k0 in range(w.shape[2]):
                    for k1 in range(w.shape[3]):
                        for k2 in range(w.shape[4]):
                            for o0 in range(dy.shape[2]):
                                i0 = o0 * strides[0] + k0 * dilations[0] - pads[0]
                                if not 0 <= i0 < dx.shape[2]:
                                    continue
                                for o1 in range(dy.shape[3]):
                                    i1 = o1 * strides[1] + k1 * dilations[1] - pads[1]
                                    if not 0 <= i1 < dx.shape[3]:
                                        continue
                                    for o2 in range(dy.shape[4]):
                                        i2 = o2 * strides[2] + k2 * dilations[2] - pads[2]
                                        if 0 <= i2 < dx.shape[4]:
                                            dx[n, first + s, i0, i1, i2] += dy[n, d, o0, o1, o2] * w[d, s, k0, k1, k2]


@njit(cache=True, nogil=True)
def add_backward_weights(x, dw, dy, strides, dilations, pads, groups):
    """dw[d,s,k] += Σ_{n,o} dy[n,d,o] · x[n,s,o·S+k·D-P]."""
    for d in range(dw.shape[0]):
        first = d // (dw.shape[0] // groups) * dw.shape[1]
        for s in range(dw.shape[1]):
            for k0 in range(dw.shape[2]):
                for k1 in range(dw.shape[3]):
                    for k2 in range(dw.shape[4]):
                        total = 0.0
                        for n in range(dy.shape[0]):
                            for o0 in range(dy.shape[2]):
                                i0 = o0 * strides[0] + k0 * dilations[0] - pads[0]
                                if not 0 <= i0 < x.shape[2]:
                                    continue
                                for o1 in range(dy.shape[3]):
                                    i1 = o1 * strides[1] + k1 * dilations[1] - pads[1]
                                    if not 0 <= i1 < x.shape[3]:
                                        continue
                                    for o2 in range(dy.shape[4]):
                                        i2 = o2 * strides[2] + k2 * dilations[2] - pads[2]
                                        if 0 <= i2 < x.shape[4]:
                                            total += dy[n, d, o0, o1, o2] * x[n, first + s, i0, i1, i2]
                        dw[d, s, k0, k1, k2] += total


def forward(x: Float64Array, w: Float64Array, out: Sequence[int], geo: Geometry) -> Float64Array:
    """x (N, S, in…), w (D, S/g, k…) -> y (N, D, out…)."""
    y = np.zeros((len(x), len(w), *out))
    _run(add_forward, (x, w, y), geo)
    return y


def backward_data(dy: Float64Array, w: Float64Array, source: Sequence[int], geo: Geometry) -> Float64Array:
    """dy (N, D, out…), w (D, S/g, k…) -> dx (N, S, source…)."""
    dx = np.zeros((len(dy), geo.groups * w.shape[1], *source))
    _run(add_backward_data, (dx, w, dy), geo)
    return dx


def backward_weights(x: Float64Array, dy: Float64Array, kernel: Sequence[int], geo: Geometry) -> Float64Array:
    """x (N, S, in…), dy (N, D, out…) -> dw (D, S/g, kernel…)."""
    dw = np.zeros((dy.shape[1], x.shape[1] // geo.groups, *kernel))
    _run(add_backward_weights, (x, dw, dy), geo)
    return dw


def _run(loop: Callable[..., None], arrays: Sequence[Float64Array], geo: Geometry) -> None:
    """The loop over contiguous arrays of source, weights and destination, with three spatial axes."""
    extra = 5 - arrays[0].ndim
    deep = [a.reshape(*a.shape[:2], *[1] * extra, *a.shape[2:]) for a in arrays]
    ones = (1,) * extra
    loop(*deep, ones + geo.strides, ones + geo.dilations, (0,) * extra + geo.pads_begin, geo.groups)


PRODUCTS = {"source": backward_data, "destination": forward, "weights": backward_weights}
"""The loop that computes each of the three tensors from the other two."""

REFERENCES = {
    name: partial(BY_NAME[name].reference, products=PRODUCTS)
    for name in (
        "Convolution",
        "ConvolutionBackwardData",
        "ConvolutionBackwardWeights",
        "ConvTransposeBackwardData",
        "ConvTransposeBackwardWeights",
        "ConvTransposeBackpropFilters",
    )
}
