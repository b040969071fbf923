"""Gradients of normalisations with a scale and a bias per channel: Batch-, Group- and InstanceNormalization."""

from collections.abc import Sequence

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims, element_type
from onnx_backprop.converters.reverse.long_sums import sum_over
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import as_shaped, cast, narrow, size_ratio, widen, work_type
from onnx_backprop.converters.rules.merged_shapes import channel_view, group_view
from onnx_backprop.converters.rules.standardise import standardise
from onnx_backprop.opset.core.shapes import Dims, product

LATEST_GROUPS = 21  # the version of GroupNormalization whose scale and bias are per channel


@gradient("BatchNormalization", versions=(15,), all_outputs=True)
def batch_normalization(op: Builder, node: Forward, dys: Sequence[ir.Value | None]) -> Grads:
    """Y = s · z + b, z = (x - m) · r, r = 1/√(v + ε)  =>  dx = dy · s · r, ds = Σ dy · z, db = Σ dy,
    dm = -s · r · Σ dy, dv = -s · r² · ds / 2, Σ over all axes but the channels'.

    training_mode = 1 takes the mean μ and the variance σ² from x, over n elements: dx = s · r · (dy - db/n - z · ds/n).
    The running statistics m' = p·m + (1-p)·μ and v' = p·v + (1-p)·σ² add (1-p)/n · (dm' + 2 (x-μ) · dv') to dx and
    p · dm' to dm, p · dv' to dv.

    Shapes: x (N, C, …), the others (C). Half types are computed in float32.
    """
    values = _BatchNorm(op, node)
    grads = values.training(dys) if node.int("training_mode", 0) else values.frozen(dys)
    return values.as_given(grads)


class _BatchNorm:
    """What both modes of BatchNormalization work on: inputs and gradients in one type, channels on axis 1."""

    def __init__(self, op: Builder, node: Forward) -> None:
        self._op, self._node = op, node
        self._inputs = node.every_input()
        x = self._inputs[0]
        types = [element_type(value) for value in self._inputs]
        self._wide = ir.DataType.DOUBLE if ir.DataType.DOUBLE in types else work_type(x)
        static_shape = dims(x)
        self._view = channel_view(op, x) if static_shape is None else None
        rank = 3 if static_shape is None else len(static_shape)
        self._per_channel = [-1] + [1] * (rank - 2)
        self._others = [axis for axis in range(rank) if axis != 1]
        self._lengths: Dims = (None,) * 3 if static_shape is None else static_shape
        self._epsilon = node.float("epsilon", 1e-5)
        self._x = self._seen(x)
        self._scale, _, self._mean, self._variance = (cast(op, value, self._wide) for value in self._inputs[1:])

    def frozen(self, dys: Sequence[ir.Value | None]) -> list[ir.Value | None]:
        """dx, ds, db, dm, dv where m and v are constants of the run."""
        op = self._op
        assert dys[0] is not None, "outside training there is one output"
        dy = self._seen(dys[0])
        rate = op.Reciprocal(op.Sqrt(op.Add(self._variance, self._epsilon)))
        slope = op.Mul(self._scale, rate)
        centred = op.Sub(self._x, op.Reshape(self._mean, self._per_channel))
        db, ds = self._sum(dy), op.Mul(rate, self._sum(op.Mul(dy, centred)))
        dx = op.Mul(dy, op.Reshape(slope, self._per_channel))
        return [dx, ds, db, op.Neg(op.Mul(slope, db)), op.Mul(-0.5, op.Mul(op.Mul(slope, rate), ds))]

    def training(self, dys: Sequence[ir.Value | None]) -> list[ir.Value | None]:
        """dx, ds, db, dm, dv where Y is standardised by the statistics of x itself."""
        op, momentum = self._op, self._node.float("momentum", 0.9)
        dy, dmean, dvariance = (*dys, None, None)[:3]
        grads: list[ir.Value | None] = [None] * 5
        terms: list[ir.Value] = []
        if dy is not None and self._wide == ir.DataType.FLOAT:
            inputs = [self._inputs[0], dy, None, None, self._scale]
            attributes = {"epsilon": self._epsilon, "data_format": "NCX"}
            dx, grads[1], grads[2] = op.domain.emit("BatchNormTrainingBackward", inputs, attributes, outputs=3)
            terms.append(self._seen(dx))
        elif dy is not None:
            given, unit = self._seen(dy), standardise(op, self._x, self._others, self._epsilon)
            terms.append(unit.gradient(op, op.Mul(given, op.Reshape(self._scale, self._per_channel))))
            grads[1], grads[2] = self._sum(op.Mul(given, unit.z)), self._sum(given)
        if dmean is not None:
            dmean = cast(op, dmean, self._wide)
            grads[3] = op.Mul(dmean, momentum)
            terms.append(op.Expand(self._share(dmean, 1 - momentum), op.Shape(self._x)))
        if dvariance is not None:
            dvariance = cast(op, dvariance, self._wide)
            grads[4] = op.Mul(dvariance, momentum)
            deviation = op.Sub(self._x, op.ReduceMean(self._x, self._others, keepdims=1))
            terms.append(op.Mul(deviation, self._share(dvariance, 2 * (1 - momentum))))
        grads[0] = op.accumulate(terms)
        return grads

    def as_given(self, grads: list[ir.Value | None]) -> Grads:
        """The gradients in the types of the inputs, dx in its shape."""
        dx = grads[0]
        if dx is not None and self._view is not None:
            grads[0] = as_shaped(self._op, dx, self._inputs[0])
        return [None if g is None else narrow(self._op, g, like) for g, like in zip(grads, self._inputs, strict=True)]

    def _seen(self, value: ir.Value) -> ir.Value:
        """A value of the shape of x, to work on."""
        value = cast(self._op, value, self._wide)
        return value if self._view is None else self._op.Reshape(value, self._view, allowzero=1)

    def _sum(self, value: ir.Value) -> ir.Value:
        return sum_over(self._op, value, self._others, self._lengths, keepdims=0)

    def _share(self, statistic: ir.Value, factor: float) -> ir.Value:
        """statistic · factor / n, n = the elements of one channel, in a shape that broadcasts to x."""
        op = self._op
        ratio = cast(op, size_ratio(op, self._inputs[1], self._inputs[0]), self._wide)
        return op.Reshape(op.Mul(statistic, op.Mul(ratio, factor)), self._per_channel)


@gradient("InstanceNormalization", versions=(6, 22))
def instance_normalization(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = s · z + b, z = (x - μ) · r, r = 1/√(σ² + ε) over the spatial axes
    =>  dx = r · (g - mean g - z · mean(g · z)), g = s · dy; ds = Σ dy · z, db = Σ dy over all but channels.

    Shapes: x (N, C, …), s and b (C). Half types are computed in float32.
    """
    return _grouped(op, node, dy, groups=None, scale_shape=[-1, 1, 1], others=[0, 2, 3])


@gradient("GroupNormalization", versions=(18, 21))
def group_normalization(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = s · z + b, z = (x - μ) · r, r = 1/√(σ² + ε) over each of G groups of channels
    =>  dx = r · (g - mean g - z · mean(g · z)), g = s · dy; ds = Σ dy · z, db = Σ dy over what an entry of s serves.

    Shapes: x (N, C, …), s and b (C), in version 18 (G). Half types are computed in float32, whatever stash_type says.
    """
    groups = node.int("num_groups", 0)
    if groups < 1:
        raise node.refuse("num_groups", groups, "of 1 and more")
    if node.version >= LATEST_GROUPS:
        return _grouped(op, node, dy, groups=groups, scale_shape=[groups, -1, 1], others=[0, 3])
    return _grouped(op, node, dy, groups=groups, scale_shape=[-1, 1, 1], others=[0, 2, 3])


def _grouped(
    op: Builder, node: Forward, dy: ir.Value, *, groups: int | None, scale_shape: Sequence[int], others: Sequence[int]
) -> Grads:
    """In the view (N, G, C/G, L): statistics over its last two axes, s broadcast to it, ds summed over `others`."""
    x, scale, bias = node.every_input()
    view = group_view(op, x, groups)
    wide, given = (op.Reshape(widen(op, value, x), view, allowzero=1) for value in (x, dy))
    lengths = _lengths(x, groups)
    unit = standardise(op, wide, [2, 3], node.float("epsilon", 1e-5), lengths=lengths)
    g = op.Mul(given, op.Reshape(widen(op, scale), scale_shape))
    dscale, dbias = (
        narrow(op, op.Reshape(sum_over(op, terms, others, lengths, keepdims=0), [-1]), like)
        for terms, like in ((op.Mul(given, unit.z), scale), (given, bias))
    )
    return narrow(op, as_shaped(op, unit.gradient(op, g), x), x), dscale, dbias


def _lengths(x: ir.Value, groups: int | None) -> Dims:
    """What is known of the lengths (N, G, C/G, L) of `group_view`."""
    static_shape = dims(x)
    if static_shape is None:
        return None, groups, 1 if groups is None else None, None
    first, channels, *rest = static_shape
    if groups is None:
        return first, channels, 1, product(tuple(rest))
    return first, groups, channels // groups if isinstance(channels, int) else None, product(tuple(rest))
