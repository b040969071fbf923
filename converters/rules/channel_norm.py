"""Gradients of normalisations with a scale and a bias per channel: Batch-, Group- and InstanceNormalization."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder, dims, element_type
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.converters.reverse.registry import Grads, gradient
from onnx_backprop.converters.rules.common import cast, narrow, size_ratio, widen, work_type
from onnx_backprop.converters.rules.merged_shapes import channel_view, group_view
from onnx_backprop.converters.rules.standardise import standardise

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
        inputs = [node.input(n) for n in range(5)]
        self._own = [element_type(value) for value in inputs]
        self._wide = ir.DataType.DOUBLE if ir.DataType.DOUBLE in self._own else work_type(inputs[0])
        known = dims(inputs[0])
        self._view = channel_view(op, inputs[0]) if known is None else None
        rank = 3 if known is None else len(known)
        self._per_channel = op.ints([-1] + [1] * (rank - 2))
        self._others = op.ints([axis for axis in range(rank) if axis != 1])
        self._x = self._seen(inputs[0])
        self._scale, _, self._mean, self._variance = (
            cast(op, value, own, self._wide) for value, own in zip(inputs[1:], self._own[1:], strict=True)
        )

    def frozen(self, dys: Sequence[ir.Value | None]) -> list[ir.Value | None]:
        """dx, ds, db, dm, dv where m and v are constants of the run."""
        op, node = self._op, self._node
        grads: list[ir.Value | None] = [None] * 5
        assert dys[0] is not None, "outside training there is one output"
        dy = self._seen(dys[0])
        rate = op.Reciprocal(op.Sqrt(op.Add(self._variance, self._number(node.float("epsilon", 1e-5)))))
        slope = op.Mul(self._scale, rate)
        if node.wants(0):
            grads[0] = op.Mul(dy, op.Reshape(slope, self._per_channel))
        if node.wants(2) or node.wants(3):
            grads[2] = self._sum(dy)
            grads[3] = op.Neg(op.Mul(slope, grads[2]))
        if node.wants(1) or node.wants(4):
            centred = op.Sub(self._x, op.Reshape(self._mean, self._per_channel))
            grads[1] = op.Mul(rate, self._sum(op.Mul(dy, centred)))
            grads[4] = op.Mul(self._number(-0.5), op.Mul(op.Mul(slope, rate), grads[1]))
        return grads

    def training(self, dys: Sequence[ir.Value | None]) -> list[ir.Value | None]:
        """dx, ds, db, dm, dv where Y is standardised by the statistics of x itself."""
        op, node = self._op, self._node
        dy, dmean, dvariance = (*dys, None, None)[:3]
        momentum = node.float("momentum", 0.9)
        grads: list[ir.Value | None] = [None] * 5
        terms: list[ir.Value] = []
        if dy is not None and self._wide == ir.DataType.FLOAT:
            inputs = [node.input(0), dy, None, None, self._scale]
            attributes = {"epsilon": node.float("epsilon", 1e-5), "data_format": "NCX"}
            dx, grads[1], grads[2] = op.domain.emit("BatchNormTrainingBackward", inputs, attributes, outputs=3)
            terms.append(self._seen(dx))
        elif dy is not None:
            given = self._seen(dy)
            unit = standardise(op, self._x, self._others, node.float("epsilon", 1e-5), self._wide)
            terms.append(unit.gradient(op, op.Mul(given, op.Reshape(self._scale, self._per_channel))))
            grads[1], grads[2] = self._sum(op.Mul(given, unit.z)), self._sum(given)
        if dmean is not None:
            dmean = cast(op, dmean, self._own[3], self._wide)
            grads[3] = op.Mul(dmean, self._number(momentum))
            share = op.Reshape(op.Mul(dmean, self._share(1 - momentum)), self._per_channel)
            terms.append(op.Expand(share, op.Shape(self._x)))
        if dvariance is not None:
            dvariance = cast(op, dvariance, self._own[4], self._wide)
            grads[4] = op.Mul(dvariance, self._number(momentum))
            share = op.Reshape(op.Mul(dvariance, self._share(2 * (1 - momentum))), self._per_channel)
            deviation = op.Sub(self._x, op.ReduceMean(self._x, self._others, keepdims=1))
            terms.append(op.Mul(deviation, share))
        grads[0] = op.accumulate(terms)
        return grads

    def as_given(self, grads: list[ir.Value | None]) -> Grads:
        """The gradients in the types of the inputs, dx in its shape."""
        op, node = self._op, self._node
        dx = grads[0]
        if dx is not None and self._view is not None:
            grads[0] = op.Reshape(dx, op.shape(node.input(0)), allowzero=1)
        return [
            cast(op, g, self._wide, own) if g is not None and node.wants(n) else None
            for n, (g, own) in enumerate(zip(grads, self._own, strict=True))
        ]

    def _seen(self, value: ir.Value) -> ir.Value:
        """A value of the type and shape of x, to work on."""
        value = cast(self._op, value, self._own[0], self._wide)
        return value if self._view is None else self._op.Reshape(value, self._view, allowzero=1)

    def _sum(self, value: ir.Value) -> ir.Value:
        return self._op.ReduceSum(value, self._others, keepdims=0)

    def _number(self, number: float) -> ir.Value:
        return self._op.constant(np.array(number).astype(self._wide.numpy()))

    def _share(self, number: float) -> ir.Value:
        """number / n, n = the elements of one channel."""
        op, x = self._op, self._node.input(0)
        ratio = cast(op, size_ratio(op, self._node.input(1), x), work_type(x), self._wide)
        return op.Mul(ratio, self._number(number))


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
    x, scale, bias = node.input(0), node.input(1), node.input(2)
    view, wide = group_view(op, x, groups), work_type(x)
    given = op.Reshape(widen(op, dy, x), view, allowzero=1)
    unit = standardise(
        op, op.Reshape(widen(op, x, x), view, allowzero=1), op.ints([2, 3]), node.float("epsilon", 1e-5), wide
    )
    dx = dscale = dbias = None
    if node.wants(0):
        g = op.Mul(given, op.Reshape(widen(op, scale, scale), op.ints(scale_shape)))
        dx = narrow(op, op.Reshape(unit.gradient(op, g), op.shape(x), allowzero=1), x)
    if node.wants(1):
        dscale = op.ReduceSum(op.Mul(given, unit.z), op.ints(others), keepdims=0)
        dscale = narrow(op, op.Reshape(dscale, op.ints([-1])), scale)
    if node.wants(2):
        dbias = narrow(op, op.Reshape(op.ReduceSum(given, op.ints(others), keepdims=0), op.ints([-1])), bias)
    return dx, dscale, dbias
