"""Gradients of activation functions and of the operators that are the identity outside training."""

from math import pi, sqrt

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims, element_type
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import DOMAIN_TYPES, cast, widen, work_type
from onnx_backprop.opset.core.shapes import Dims

GELU_CUBIC = 0.044715  # of the tanh approximation, from the operator's definition
SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875  # the operator's defaults, in float32
GELU_SATURATED = 30.0  # beyond this |x| the slope is 0 or 1 in every float type


@gradient("Relu", versions=(14,))
def relu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max(x, 0)  =>  dx = dy where Y > 0, else 0 (also at x = 0)."""
    y = node.output()
    return op.domain.ReLUBackward(y, dy) if y.dtype in DOMAIN_TYPES else op.Where(op.Greater(y, 0), dy, 0)


@gradient("LeakyRelu", versions=(16,))
def leaky_relu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x where x > 0, else α · x  =>  dx = dy where x > 0, else α · dy (also at x = 0)."""
    return op.Where(op.Greater(node.input(0), 0), dy, op.Mul(dy, node.float("alpha", 0.01)))


@gradient("PRelu", versions=(16,))
def prelu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x where x > 0, else s · x  =>  dx = dy where x > 0, else s · dy; ds = Σ x · dy where x <= 0.

    Shapes: the slope s broadcasts to x; ds is summed over the axes it was broadcast along. Both are PReLUBackward's
    where it takes such a slope.
    """
    x, slope = node.input(0), node.input(1)
    layout = _slope_layout(dims(x), dims(slope))
    if layout and x.dtype in DOMAIN_TYPES and node.wants(1):
        entries = slope if layout == "each" else op.Reshape(slope, [-1])
        attributes = {} if layout == "each" else {"data_format": layout}
        dx, dslope = op.domain.emit("PReLUBackward", [x, entries, dy], attributes, outputs=2)
        return dx, dslope if entries is slope else op.Reshape(dslope, op.shape(slope), allowzero=1)
    positive = op.Greater(x, 0)
    dslope = op.unbroadcast(op.Where(positive, 0, op.Mul(dy, x)), slope, node.output())
    return op.Where(positive, dy, op.Mul(dy, slope)), dslope


def _slope_layout(x: Dims | None, slope: Dims | None) -> str | None:
    """NCX, NXC: a slope along axis 1, or along the last one, or of one entry; each: one of x without its first axis."""
    if x is None or slope is None or len(x) < 2:
        return None
    if len(slope) > 1 and slope == x[1:] and None not in slope:
        return "each"
    axes = [axis for axis, length in enumerate(slope, len(x) - len(slope)) if length != 1]
    if axes in ([], [len(x) - 1]):
        return "NXC"
    return "NCX" if axes == [1] else None


@gradient("Elu", versions=(6, 22))
def elu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x where x > 0, else α (e^x - 1)  =>  dx = dy where x > 0, else dy · (Y + α)."""
    slope = op.Add(node.output(), node.float("alpha", 1.0))
    return op.Where(op.Greater(node.input(0), 0), dy, op.Mul(dy, slope))


@gradient("HardSigmoid", versions=(6, 22))
def hard_sigmoid(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = min(max(α x + β, 0), 1)  =>  dx = α · dy where 0 < Y < 1, else 0."""
    y = node.output()
    inside = op.And(op.Greater(y, 0), op.Less(y, 1))
    return op.Where(inside, op.Mul(dy, node.float("alpha", 0.2)), 0)


@gradient("HardSwish", versions=(14, 22))
def hard_swish(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x · min(max(x/6 + 1/2, 0), 1)  =>  dx = 0 for x <= -3, dy for x >= 3, dy · (x/3 + 1/2) between."""
    x = node.input(0)
    between = op.Mul(dy, op.Add(op.Div(x, 3), 0.5))
    return op.Where(op.LessOrEqual(x, -3), 0, op.Where(op.GreaterOrEqual(x, 3), dy, between))


@gradient("Gelu", versions=(20,))
def gelu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x · Φ(x)  =>  dx = dy · (Φ(x) + x · Φ'(x)).

    approximate none: Φ(x) = (1 + erf(x/√2)) / 2, the normal distribution; tanh: Φ(x) = (1 + tanh u) / 2 with
    u = √(2/π) (x + 0.044715 x³). Edge: x is clipped first where the slope no longer changes, so no square overflows.
    """
    approximate = node.choice("approximate", "none", ("none", "tanh"))
    x = op.Min(op.Max(node.input(0), -GELU_SATURATED), GELU_SATURATED)
    return op.Mul(dy, _gelu_exact(op, x) if approximate == "none" else _gelu_tanh(op, x))


def _gelu_exact(op: Builder, x: ir.Value) -> ir.Value:
    share = op.Mul(0.5, op.Add(1, op.Erf(op.Mul(x, sqrt(0.5)))))
    bell = op.Exp(op.Mul(op.Mul(x, x), -0.5))
    return op.Add(share, op.Mul(x, op.Mul(bell, 1 / sqrt(2 * pi))))


def _gelu_tanh(op: Builder, x: ir.Value) -> ir.Value:
    root, square = sqrt(2 / pi), op.Mul(x, x)
    u = op.Mul(op.Mul(root, x), op.Add(1, op.Mul(GELU_CUBIC, square)))
    du = op.Mul(root, op.Add(1, op.Mul(3 * GELU_CUBIC, square)))
    t = op.Tanh(u)
    share = op.Mul(0.5, op.Add(1, t))
    return op.Add(share, op.Mul(op.Mul(0.5, x), op.Mul(op.Sub(1, op.Mul(t, t)), du)))


@gradient("Selu", versions=(6, 22))
def selu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = γ x where x > 0, else γ α (e^x - 1)  =>  dx = γ · dy where x > 0, else dy · (Y + γ α)."""
    alpha, gamma = node.float("alpha", SELU_ALPHA), node.float("gamma", SELU_GAMMA)
    return op.Mul(dy, op.Where(op.Greater(node.input(0), 0), gamma, op.Add(node.output(), alpha * gamma)))


@gradient("Celu", versions=(12,))
def celu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = max(x, 0) + min(α (e^(x/α) - 1), 0)  =>  dx = dy where x > 0, else dy · (Y/α + 1)."""
    slope = op.Add(op.Div(node.output(), node.float("alpha", 1.0)), 1)
    return op.Mul(dy, op.Where(op.Greater(node.input(0), 0), 1, slope))


@gradient("ThresholdedRelu", versions=(10, 22))
def thresholded_relu(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x where x > α, else 0  =>  dx = dy where x > α, else 0. The jump at x = α is left out."""
    return op.Where(op.Greater(node.input(0), node.float("alpha", 1.0)), dy, 0)


@gradient("Shrink", versions=(9,))
def shrink(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x + β where x < -λ, x - β where x > λ, else 0  =>  dx = dy where x < -λ or x > λ, else 0."""
    x, limit = node.input(0), node.float("lambd", 0.5)
    return op.Where(op.Or(op.Less(x, -limit), op.Greater(x, limit)), dy, 0)


@gradient("Softsign", versions=(1, 22))
def softsign(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x / (1 + |x|)  =>  dx = dy / (1 + |x|)²."""
    share = op.Reciprocal(op.Add(1, op.Abs(node.input(0))))
    return op.Mul(op.Mul(dy, share), share)


@gradient("Swish", versions=(24,))
def swish(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x · s, s = sigmoid(α x)  =>  dx = dy · (s + α · Y · (1 - s))."""
    alpha = node.float("alpha", 1.0)
    s = op.Sigmoid(op.Mul(alpha, node.input(0)))
    return op.Mul(dy, op.Add(s, op.Mul(op.Mul(alpha, node.output()), op.Sub(1, s))))


@gradient("Identity", versions=(16, 19, 21, 23, 24, 25))
def identity(_op: Builder, _node: Forward, dy: ir.Value) -> Grads:
    """Y = x  =>  dx = dy."""
    return dy


@gradient("Dropout", versions=(13, 22))
def dropout(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x · mask / (1 - r) in training, x outside  =>  dx = dy · mask / (1 - r), dr = Σ dy · Y / (1 - r); dx = dy.

    The mask is the forward node's own second output, added to it where it has none, so the gradient drops what this
    run dropped. Training may be decided at run time. Edge: dr leaves out that the mask depends on r, in steps.
    """
    mode = node.constant(2)
    if not node.has(2) or (mode is not None and not mode.any()):
        return dy
    x, y, given = node.input(0), node.output(), node.optional(1)
    dtype, wide, training = element_type(x), work_type(x), None if mode is not None else node.input(2)
    ratio = op.number(0.5, wide) if given is None else cast(op, given, wide)
    scale, g = op.Reciprocal(op.Sub(1, ratio)), widen(op, dy, x)
    dx = dratio = None
    if node.wants(0):  # or the mask would be put out for nothing
        dx = cast(op, op.Where(_mask(op, node), op.Mul(g, scale), 0), dtype)
        dx = dx if training is None else op.Where(training, dx, dy)
    if given is not None:
        total = op.ReduceSum(op.Mul(op.Mul(g, widen(op, y, x)), scale), keepdims=0)
        total = total if training is None else op.Where(training, total, 0)
        dratio = cast(op, op.Reshape(total, op.shape(given), allowzero=1), element_type(given))
    return dx, dratio


def _mask(op: Builder, node: Forward) -> ir.Value:
    """Dropout's second output: what it kept."""
    if len(node.node.outputs) < 2:
        node.node.resize_outputs(2)
    mask = node.output(1)
    if not mask.name:
        mask.name = op.unique(f"{node.name}_mask")
    mask.dtype, mask.shape = ir.DataType.BOOL, node.output().shape
    return mask
