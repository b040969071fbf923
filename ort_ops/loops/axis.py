"""One axis of an interpolation's gradient: dx = Wᵀ·dy, row o of the matrix W being a few taps (index, weight)."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from onnx_backprop.opset.core.op import Float64Array


@njit(cache=True, nogil=True)
def add_transposed(dy, index, weight, dx):
    """dx[a,i,b] += Σ_{o,t: index[o,t] = i} weight[o,t] · dy[a,o,b]."""
    for a in range(dy.shape[0]):
        for o in range(dy.shape[1]):
            for t in range(index.shape[1]):
                for b in range(dy.shape[2]):
                    dx[a, index[o, t], b] += weight[o, t] * dy[a, o, b]


def transposed(taps: tuple[NDArray[np.int64], Float64Array], dy: Float64Array, axis: int, length: int) -> Float64Array:
    """Wᵀ·dy along one axis of any tensor, which has `length` entries then; taps are index and weight, (O, taps).

    IndexError for a tap outside: the loop checks no bounds.
    """
    index, weight = taps
    if index.min(initial=0) < 0 or index.max(initial=0) >= length:
        raise IndexError(f"taps at pixels {index.min()} to {index.max()} of axis {axis}, which has {length}")
    before, after = dy.shape[:axis], dy.shape[axis + 1 :]
    rows, columns = int(np.prod(before)), int(np.prod(after))
    dx = np.zeros((rows, length, columns))
    add_transposed(dy.reshape(rows, dy.shape[axis], columns), index, weight, dx)
    return dx.reshape(*before, length, *after)
