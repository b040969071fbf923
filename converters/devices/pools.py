"""MaxPoolBackward without Indices, which few kernels give: tap after tap of the windows is compared instead."""

from collections.abc import Mapping, Sequence

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.core.schema import attributes_of
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.maths import pooling
from onnx_backprop.opset.operators.max_pool_backward import OP as MAX_POOL_BACKWARD


def max_pool_backward(op: Emitter, node: NodeProto, shapes: Mapping[str, Sequence[int]]) -> str | None:
    """dx of MaxPoolBackward: tap k of a window wins if it is the first, or greater than the best, and no later one.

    best ← where(taken_k, x_k, best), taken_k = x_k > best;  won_k = taken_k · Π_{j>k} (1 - taken_j);
    dx = Σ_k won_k · dy, put where tap k lies. Taps that lie in the padding are never taken.
    None where lengths are not known or channels are last.
    """
    attrs = Attributes(MAX_POOL_BACKWARD, attributes_of(node))
    source, gradient = node.input
    if attrs["data_format"] != "NCX" or source not in shapes or gradient not in shapes:
        return None
    spatial = range(2, len(shapes[source]))
    axes = pooling.axes_of(attrs, shapes[source][2:], shapes[gradient][2:])
    before = [axis.begin for axis in axes]
    reach = [(axis.out - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1 for axis in axes]
    after = [max(0, r - b - axis.length) for axis, r, b in zip(axes, reach, before, strict=True)]
    total = [b + axis.length + a for axis, b, a in zip(axes, before, after, strict=True)]
    pads = [0, 0, *before, 0, 0, *after]
    padded = op.Pad(source, op.constant(pads, np.int64)) if any(pads) else source
    taps = list(np.ndindex(*(axis.kernel for axis in axes)))
    starts = {tap: [k * axis.dilation for k, axis in zip(tap, axes, strict=True)] for tap in taps}

    def part(tap: tuple[int, ...]) -> str:
        ends = [s + (axis.out - 1) * axis.stride + 1 for s, axis in zip(starts[tap], axes, strict=True)]
        steps = [axis.stride for axis in axes]
        return op.Slice(padded, *(op.constant(list(v), np.int64) for v in (starts[tap], ends, spatial, steps)))

    reached = np.zeros([axis.out for axis in axes], bool)
    best, taken = "", dict[tuple[int, ...], str]()
    for tap in taps:
        value, inside = part(tap), _inside(tap, axes)
        if not inside.any():
            continue
        first = op.constant((inside & ~reached)[None, None].astype(np.float32))
        if not best:
            taken[tap] = op.Expand(first, op.constant(shapes[gradient], np.int64))
        else:
            later = op.Cast(op.Greater(value, best), to=TensorProto.FLOAT)
            if not (inside & reached).all():
                # where nothing was reached before, `best` is padding: the comparison does not count there
                later = op.Max(op.Mul(later, op.constant((inside & reached)[None, None].astype(np.float32))), first)
            taken[tap] = later
        best = op.Where(op.Greater(taken[tap], op.constant(0.5, np.float32)), value, best) if best else value
        reached |= inside
    result = ""
    rest = gradient  # of dy, what no later tap has won
    for tap in reversed(taken):
        won = op.Mul(rest, taken[tap])
        rest = op.Sub(rest, won)
        put = _put_back(op, won, shapes[gradient], axes, starts[tap], total)
        result = op.Add(result, put) if result else put
    if any(pads):
        ends = [b + axis.length for b, axis in zip(before, axes, strict=True)]
        result = op.Slice(result, *(op.constant(list(v), np.int64) for v in (before, ends, spatial)))
    return result


def _inside(tap: tuple[int, ...], axes: Sequence[pooling.Windows]) -> np.ndarray:
    """In which windows a tap lies inside the source."""
    result = np.ones((), bool)
    for k, axis in zip(tap, axes, strict=True):
        place = np.arange(axis.out) * axis.stride + k * axis.dilation - axis.begin
        result = result[..., None] & ((place >= 0) & (place < axis.length))
    return result


def _put_back(
    op: Emitter,
    value: str,
    shape: Sequence[int],
    axes: Sequence[pooling.Windows],
    start: Sequence[int],
    total: Sequence[int],
) -> str:
    """The adjoint of a Slice with steps: zeros between the elements, then around them."""
    steps = [axis.stride for axis in axes]
    lengths = [axis.out for axis in axes]
    if any(step > 1 for step in steps):
        spaced = [n for axis in zip(lengths, [1] * len(axes), strict=True) for n in axis]
        gaps = [n for step in steps for n in (0, step - 1)]
        value = op.Reshape(value, op.constant([*shape[:2], *spaced], np.int64))
        value = op.Pad(value, op.constant([0, 0, *[0] * len(gaps), 0, 0, *gaps], np.int64))
        lengths = [n * step for n, step in zip(lengths, steps, strict=True)]
        value = op.Reshape(value, op.constant([*shape[:2], *lengths], np.int64))
    # a last gap may reach beyond the end, which a negative pad cuts
    ends = [t - s - n for t, s, n in zip(total, start, lengths, strict=True)]
    return op.Pad(value, op.constant([0, 0, *start, 0, 0, *ends], np.int64))
