"""What the six convolution operators share: geometry, and the three products of a correlation.

Per spatial axis, with S stride, D dilation, P and E the zeros before and after, K kernel length and
EK = (K-1)·D + 1, a correlation takes a source of length `in` to a destination of length

    out = (in + P + E - EK) // S + 1,   in + P + E >= EK,

destination pixel o reading source pixels i = o·S + k·D - P, k = 0…K-1, wherever 0 <= i < in. P alone enters the
indices; E only bounds `out`. Source pixels beyond the last full window get no gradient.

    forward           y[n,d,o]  = Σ_{s,k} x[n,s,o·S+k·D-P] · w[d,s,k]
    backward data     dx[n,s,i] = Σ_{d,k,o: o·S+k·D-P = i} dy[n,d,o] · w[d,s,k]
    backward weights  dw[d,s,k] = Σ_{n,o} dy[n,d,o] · x[n,s,o·S+k·D-P]

With g groups, group q pairs the q-th of g equal parts of the source channels with the q-th part of the
destination channels. All arrays here are NCX and (D, S/g, k…); a transposed convolution is `backward data`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.op import Attributes, Float64Array
from onnx_backprop.opset.core.shapes import Dim, Dims, merge, require_at_least, require_length, require_rank, times

MIN_RANK, MAX_RANK = 3, 5  # one to three spatial axes


@dataclass(frozen=True)
class Geometry:
    """Strides, dilations, zeros before (per spatial axis) and groups of one correlation."""

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class Resolved:
    """The dimensions of source (NCX), destination (NCX) and weights (D, S/g, k…) after they met each other.

    `pads` is one (begin, end) pair per spatial axis, None where an unknown length hides it.
    """

    source: Dims
    destination: Dims
    weights: Dims
    pads: tuple[tuple[int, int] | None, ...]


def geometry(attrs: Attributes, resolved: Resolved) -> Geometry:
    """The geometry at run time, when every length is known."""
    pads = [p for p in resolved.pads if p is not None]
    assert len(pads) == len(resolved.pads), "pads are known once shapes are"
    return Geometry(attrs["strides"], attrs["dilations"], tuple(begin for begin, _ in pads), attrs["groups"])


def extent(kernel: Any, dilation: Any) -> Any:
    """EK = (K-1)·D + 1, the pixels that a kernel covers; of numbers, or of a function body's vectors of them."""
    return (kernel - 1) * dilation + 1


def same_excess(length: Any, extent: Any, stride: Any) -> Any:
    """Where above 0, the total padding with which out = ceil(length / stride); of numbers or vectors."""
    return extent - 1 - (length - 1) % stride


def split_pads(total: Any, *, upper: bool) -> tuple[Any, Any]:
    """The odd pixel goes to the end for SAME_UPPER, to the beginning for SAME_LOWER; of numbers or vectors."""
    half = total // 2
    return (half, total - half) if upper else (total - half, half)


def conv_same_pads(length: Dim, extent: int, stride: int, *, upper: bool) -> tuple[int, int] | None:
    """Pads of auto_pad SAME_* of a convolution with source `length`: out = ceil(length / stride)."""
    if not isinstance(length, int):
        return (0, 0) if extent == 1 else None
    return split_pads(max(same_excess(length, extent, stride), 0), upper=upper)


def conv_transpose_same_pads(extent: int, stride: int, *, upper: bool) -> tuple[int, int]:
    """Pads of auto_pad SAME_* of a transposed convolution: the forward rule, whatever output_padding is."""
    return split_pads(max(extent - stride, 0), upper=upper)


def conv_transpose_backward_same_pads(
    length: Dim, extent: int, stride: int, *, upper: bool, short: Dim, output_padding: bool, infers_short: bool
) -> tuple[int, int] | None:
    """Pads of auto_pad SAME_* of the gradients of a transposed convolution that made `length` pixels from `short`.

    The forward rule when output_padding is given. Without it the padding is that of the convolution that takes
    `length` pixels to ceil(length / stride), unless `short` is known and only the forward rule leads to it (the two
    rules never lead to the same `short` with different padding). `infers_short`: nothing states `short`, it follows.
    None while an unknown length leaves it open.
    """
    forward_rule = conv_transpose_same_pads(extent, stride, upper=upper)
    if output_padding:
        return forward_rule
    conv_rule = conv_same_pads(length, extent, stride, upper=upper)
    if infers_short or conv_rule is None or conv_rule == forward_rule:
        return conv_rule
    if not isinstance(short, int) or not isinstance(length, int):
        return None
    leads_there = output_length(length, extent, stride, forward_rule) == short
    return forward_rule if leads_there else conv_rule


class AxisPads(NamedTuple):
    """Pads of one axis of ONNX's ConvTranspose; `beyond`: what they leave of the wanted length for output_padding.

    onnxruntime refuses an output_shape for which 0 <= beyond < stride does not hold.
    """

    begin: int
    end: int
    beyond: int


def onnx_conv_transpose_pads(
    extents: Sequence[int],
    strides: Sequence[int],
    extra: Sequence[int],
    *,
    upper: bool,
    lengths: Sequence[int] = (),
    wanted: Sequence[int] = (),
) -> list[AxisPads]:
    """Pads of ONNX's ConvTranspose: those of SAME, out = in · stride wherever the kernel covers the stride, or for
    outputs of `wanted` lengths, from inputs of the given ones.

    Per spatial axis, with `extra` the output_padding, the natural output is S·(in-1) + extra + EK; what is cut from it
    to reach the wanted length is the total padding. onnxruntime's reading is followed where texts differ: extra is part
    of the total, a negative total counts as 0, and the odd cell is at the beginning unless auto_pad is SAME_UPPER, in
    every version of the operator.
    """
    result: list[AxisPads] = []
    for axis, (covered, stride, more) in enumerate(zip(extents, strides, extra, strict=True)):
        full = stride * (lengths[axis] - 1) + covered if wanted else covered  # every pixel that a kernel reaches
        out = wanted[axis] if wanted else stride
        total = max(full + more - out, 0)
        result.append(AxisPads(*split_pads(total, upper=upper), out - (full - total) if wanted else more))
    return result


def output_length(source: int, extent: int, stride: int, pads: tuple[int, int]) -> int:
    """(in + P + E - EK) // S + 1, or 0 when the kernel does not fit the padded source."""
    room = source + sum(pads) - extent
    return room // stride + 1 if room >= 0 else 0


def resolve(
    attrs: Attributes,
    *,
    source: Dims | None,
    destination: Dims | None,
    weights: Dims | None,
    names: tuple[str, str, str],
    transposed: bool = False,
    infers_destination: bool = False,
) -> Resolved | None:
    """Check everything that is known against everything else and complete what follows from it.

    `names` are the operator's names of source, destination and weights, for messages. At most one of the
    three may be wholly unknown. `transposed`: the operator is a gradient of a transposed convolution, from which
    follows what SAME means; `infers_destination`: it has no input that states the destination's lengths.
    Returns None while the rank is unknown; raises ShapeError on contradiction.
    """
    # a tensor's rank before that of a stated shape, so that a message blames the statement
    rank = common_rank(attrs.op, {names[1]: destination, names[2]: weights, names[0]: source})
    require_lists(attrs, len(attrs["strides"]) if rank is None else rank - 2)
    require_at_least([attrs["groups"]], 1, op=attrs.op, subject="attribute groups")
    if rank is None:
        return None
    blank: Dims = (None,) * rank
    source, destination, weights = source or blank, destination or blank, weights or blank
    source, destination, weights = _meet_channels(attrs, source, destination, weights, names)

    pads: list[tuple[int, int] | None] = []
    lengths: list[Dim] = []
    for axis in range(rank - 2):
        length, kernel = source[axis + 2], weights[axis + 2]
        out = None if infers_destination else destination[axis + 2]
        pad = _axis_pads(attrs, axis, (length, out, kernel), transposed=transposed, infers=infers_destination)
        pads.append(pad)
        lengths.append(_meet_lengths(attrs, axis, length, destination[axis + 2], kernel, pad, names))
    destination = (*destination[:2], *lengths)
    return Resolved(source, destination, weights, tuple(pads))


def common_rank(op: str, named: Mapping[str, Dims | None]) -> int | None:
    """The rank of the first tensor that is known, which all others must have; None while none is."""
    known = [(name, dims) for name, dims in named.items() if dims is not None]
    for name, dims in known:
        require_rank(dims, MIN_RANK, MAX_RANK, op=op, subject=name)
        require_rank(dims, len(known[0][1]), len(known[0][1]), op=op, subject=name)
    return len(known[0][1]) if known else None


def require_lists(attrs: Attributes, axes: int) -> None:
    """Raise ShapeError unless every list of the geometry has one entry per spatial axis, none too small."""
    for name in ("kernel", "strides", "dilations", "pads_begin", "pads_end", "output_padding"):
        values = attrs.get(name)
        if values is None or (values == () and name.startswith("pads")):
            continue
        least = 1 if name in ("kernel", "strides", "dilations") else 0
        require_length(values, axes, op=attrs.op, subject=f"attribute {name} (one per spatial axis)")
        require_at_least(values, least, op=attrs.op, subject=f"attribute {name}")


def _meet_channels(
    attrs: Attributes, source: Dims, destination: Dims, weights: Dims, names: tuple[str, str, str]
) -> tuple[Dims, Dims, Dims]:
    op, groups = attrs.op, attrs["groups"]
    source_name, destination_name, weights_name = names
    batch = merge(source[0], destination[0], op=op, subject=f"batch sizes of {source_name} and {destination_name}")
    d = merge(destination[1], weights[0], op=op, subject=f"channels of {destination_name} and of {weights_name}")
    s = merge(
        source[1],
        times(weights[1], groups),
        op=op,
        subject=f"channels of {source_name} and groups ({groups}) × channels per group of {weights_name}",
    )
    for channels, name in ((s, source_name), (d, destination_name)):
        if isinstance(channels, int) and channels % groups:
            raise ShapeError(f"channels of {name}: expected a multiple of groups {groups}, got {channels}", op_type=op)
    per_group = s // groups if isinstance(s, int) else weights[1]
    return (batch, s, *source[2:]), (batch, d, *destination[2:]), (d, per_group, *weights[2:])


def stated_pads(attrs: Attributes, axis: int) -> tuple[int, int] | None:
    """The pads of one axis; None where the lengths say what SAME means."""
    if attrs["auto_pad"].startswith("SAME"):
        return None
    begin, end = (attrs[name] if attrs["auto_pad"] == "None" else () for name in ("pads_begin", "pads_end"))
    return (begin[axis] if begin else 0, end[axis] if end else 0)


def _axis_pads(
    attrs: Attributes, axis: int, lengths: tuple[Dim, Dim, Dim], *, transposed: bool, infers: bool
) -> tuple[int, int] | None:
    """The pads of one axis with `lengths` of source, destination and kernel; None while they are open."""
    length, out, kernel = lengths
    stated = stated_pads(attrs, axis)
    if stated is not None or not isinstance(kernel, int):
        return stated
    covered, stride = extent(kernel, attrs["dilations"][axis]), attrs["strides"][axis]
    upper = attrs["auto_pad"] == "SAME_UPPER"
    if not transposed:
        return conv_same_pads(length, covered, stride, upper=upper)
    given = attrs["output_padding"] is not None
    return conv_transpose_backward_same_pads(
        length, covered, stride, upper=upper, short=out, output_padding=given, infers_short=infers
    )


def _meet_lengths(
    attrs: Attributes,
    axis: int,
    length: Dim,
    out: Dim,
    kernel: Dim,
    pads: tuple[int, int] | None,
    names: tuple[str, str, str],
) -> Dim:
    """The destination length of one axis; ShapeError when lengths, kernel, stride and pads contradict."""
    source_name, destination_name, weights_name = names
    where = f"spatial axis {axis}"
    if kernel == 0:
        raise ShapeError(f"{weights_name}, {where}: expected a kernel length >= 1, got 0", op_type=attrs.op)
    if not isinstance(length, int) or not isinstance(kernel, int) or pads is None:
        return out
    stride, dilation = attrs["strides"][axis], attrs["dilations"][axis]
    covered = extent(kernel, dilation)
    expected = output_length(length, covered, stride, pads)
    if expected < 1:
        raise ShapeError(
            f"{where}: the kernel ({kernel}, dilation {dilation}) covers {covered} pixels, expected at most the "
            f"padded {source_name}, got {length} + {pads[0]} + {pads[1]}",
            op_type=attrs.op,
        )
    if isinstance(out, int) and out != expected:
        raise ShapeError(
            f"{where}: {source_name} length {length} with kernel {kernel}, stride {stride}, dilation {dilation}, "
            f"pads {pads[0]} and {pads[1]} expects {destination_name} length {expected}, got {out}",
            op_type=attrs.op,
        )
    return expected


def require_output_padding(attrs: Attributes, resolved: Resolved, name: str) -> None:
    """Check a given output_padding: len(source) == S·(len(destination)-1) + EK - P - E + output_padding.

    It never changes a gradient: the lengths already say where the transposed convolution's output ends.
    """
    lengths = zip(resolved.source[2:], resolved.destination[2:], resolved.weights[2:], strict=True)
    for axis, ((a, b, kernel), padding) in enumerate(zip(lengths, attrs["output_padding"], strict=True)):
        pads = resolved.pads[axis]
        if not (isinstance(a, int) and isinstance(b, int) and isinstance(kernel, int) and pads is not None):
            continue
        natural = attrs["strides"][axis] * (b - 1) + extent(kernel, attrs["dilations"][axis]) - sum(pads)
        if a != natural + padding:
            raise ShapeError(
                f"attribute output_padding, spatial axis {axis}: expected {a - natural} "
                f"({name} length {a} minus {natural}), got {padding}",
                op_type=attrs.op,
            )


def forward(x: Float64Array, w: Float64Array, out: Sequence[int], geo: Geometry) -> Float64Array:
    """Correlation: x (N, S, in…), w (D, S/g, k…) -> y (N, D, out…)."""
    xg, wg = _group_channels(x, geo.groups), _group_outer(w, geo.groups)
    y = np.zeros((x.shape[0], *wg.shape[:2], int(np.prod(out))))
    y_map = y.reshape(*y.shape[:3], *out)
    for tap, o, i in _taps(w.shape[2:], x.shape[2:], out, geo):
        y_map[(..., *o)] += _matmul(wg[(..., *tap)], xg[(..., *i)])
    return y.reshape(x.shape[0], w.shape[0], *out)


def backward_data(dy: Float64Array, w: Float64Array, source: Sequence[int], geo: Geometry) -> Float64Array:
    """Adjoint wrt the source: dy (N, D, out…), w (D, S/g, k…) -> dx (N, S, source…)."""
    dyg, wg = _group_channels(dy, geo.groups), _group_outer(w, geo.groups)
    dx = np.zeros((dy.shape[0], geo.groups, w.shape[1], *source))
    for tap, o, i in _taps(w.shape[2:], source, dy.shape[2:], geo):
        dx[(..., *i)] += _matmul(wg[(..., *tap)].swapaxes(1, 2), dyg[(..., *o)])
    return dx.reshape(dy.shape[0], geo.groups * w.shape[1], *source)


def backward_weights(x: Float64Array, dy: Float64Array, kernel: Sequence[int], geo: Geometry) -> Float64Array:
    """Adjoint wrt the weights: x (N, S, in…), dy (N, D, out…) -> dw (D, S/g, kernel…)."""
    xg, dyg = _group_channels(x, geo.groups), _group_channels(dy, geo.groups)
    dw = np.zeros((geo.groups, dyg.shape[2], xg.shape[2], *kernel))
    for tap, o, i in _taps(kernel, x.shape[2:], dy.shape[2:], geo):
        a, b = _flat_pixels(dyg[(..., *o)]), _flat_pixels(xg[(..., *i)])
        dw[(..., *tap)] = np.matmul(a, b.swapaxes(2, 3)).sum(axis=0)
    return dw.reshape(dy.shape[1], xg.shape[2], *kernel)


def _group_channels(x: Float64Array, groups: int) -> Float64Array:
    """(N, C, …) -> (N, g, C/g, …)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _group_outer(w: Float64Array, groups: int) -> Float64Array:
    """(D, S/g, k…) -> (g, D/g, S/g, k…)."""
    return w.reshape(groups, w.shape[0] // groups, *w.shape[1:])


def _matmul(w: Float64Array, x: Float64Array) -> Float64Array:
    """(g, A, B) · (N, g, B, pixels…) -> (N, g, A, pixels…)."""
    flat = np.matmul(w, _flat_pixels(x))
    return flat.reshape(*flat.shape[:3], *x.shape[3:])


def _flat_pixels(x: Float64Array) -> Float64Array:
    """(N, g, C, pixels…) -> (N, g, C, all pixels); -1 would not do for an empty batch."""
    return x.reshape(*x.shape[:3], int(np.prod(x.shape[3:])))


Slices = tuple[slice, ...]


def _taps(
    kernel: Sequence[int], source: Sequence[int], out: Sequence[int], geo: Geometry
) -> Iterator[tuple[tuple[int, ...], Slices, Slices]]:
    """For each kernel position: its index, the destination pixels it serves, and the source pixels they read."""
    per_axis = [
        [_tap(k, i, o, s, d, p) for k in range(length)]
        for length, i, o, s, d, p in zip(kernel, source, out, geo.strides, geo.dilations, geo.pads_begin, strict=True)
    ]
    for tap in product(*(range(length) for length in kernel)):
        ranges = [per_axis[axis][k] for axis, k in enumerate(tap)]
        served = [r for r in ranges if r is not None]
        if len(served) == len(ranges):
            yield tap, tuple(o for o, _ in served), tuple(i for _, i in served)


def _tap(k: int, length: int, out: int, stride: int, dilation: int, pad: int) -> tuple[slice, slice] | None:
    """Destination pixels o in [first, last) with 0 <= o·S + k·D - P < length, and the source pixels they read."""
    shift = k * dilation - pad
    first = max(0, -(shift // stride))
    last = min(out, (length - 1 - shift) // stride + 1)
    if first >= last:
        return None
    start = first * stride + shift
    return slice(first, last), slice(start, start + (last - first - 1) * stride + 1, stride)
