"""What operators compute, in PyTorch, after their text: for `twin`, which is compared with onnxruntime's forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from onnx import NodeProto, helper

torch: Any = import_module("torch")
F: Any = torch.nn.functional


@dataclass(frozen=True)
class Call:
    """A node: its attributes, the version of its domain, the twin's float type, how many outputs it has."""

    node: NodeProto
    attributes: dict[str, Any]
    opset: int
    dtype: Any
    outputs: int

    def get(self, name: str, default: Any = None) -> Any:
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def type_of(self, element: int) -> Any:
        """The type of torch for one of ONNX; every float is the twin's."""
        name = helper.tensor_dtype_to_np_dtype(element).name
        if name.startswith(("float", "bfloat")):
            return self.dtype
        return getattr(torch, name)


Operator = Callable[..., Any]
OPERATORS: dict[tuple[str, str], Operator] = {}


def operator(*names: str, domain: str = "") -> Callable[[Operator], Operator]:
    def register(function: Operator) -> Operator:
        OPERATORS.update({(domain, name): function for name in names})
        return function

    return register


def simple(**functions: Operator) -> None:
    """Operators without attributes."""
    for name, function in functions.items():
        OPERATORS["", name] = lambda _c, *xs, f=function: f(*xs)


def _reduced(combine: Operator) -> Operator:
    def over_all(*xs: Any) -> Any:
        result = xs[0]
        for x in xs[1:]:
            result = combine(result, x)
        return result

    return over_all


def _divide(x: Any, y: Any) -> Any:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


simple(
    Abs=torch.abs,
    Acos=torch.acos,
    Acosh=torch.acosh,
    Add=torch.add,
    And=torch.logical_and,
    Asin=torch.asin,
    Asinh=torch.asinh,
    Atan=torch.atan,
    Atanh=torch.atanh,
    Ceil=torch.ceil,
    Cos=torch.cos,
    Cosh=torch.cosh,
    Div=_divide,
    Equal=torch.eq,
    Erf=torch.erf,
    Exp=torch.exp,
    Floor=torch.floor,
    Greater=torch.gt,
    GreaterOrEqual=torch.ge,
    HardSwish=F.hardswish,
    Identity=lambda x: x,
    IsInf=torch.isinf,
    IsNaN=torch.isnan,
    Less=torch.lt,
    LessOrEqual=torch.le,
    Log=torch.log,
    MatMul=torch.matmul,
    Max=_reduced(torch.maximum),
    Mean=lambda *xs: _reduced(torch.add)(*xs) / len(xs),
    Min=_reduced(torch.minimum),
    Mish=F.mish,
    Mul=torch.mul,
    Neg=torch.neg,
    Not=torch.logical_not,
    Or=torch.logical_or,
    PRelu=lambda x, slope: torch.where(x < 0, slope * x, x),
    Pow=lambda x, y: torch.pow(x, y.to(x.dtype)),
    Reciprocal=torch.reciprocal,
    Relu=torch.relu,
    Round=torch.round,
    Sigmoid=torch.sigmoid,
    Sign=torch.sign,
    Sin=torch.sin,
    Sinh=torch.sinh,
    Size=lambda x: torch.tensor(x.numel()),
    Softplus=F.softplus,
    Softsign=F.softsign,
    Sqrt=torch.sqrt,
    Sub=torch.sub,
    Sum=_reduced(torch.add),
    Tan=torch.tan,
    Tanh=torch.tanh,
    Where=torch.where,
    Xor=torch.logical_xor,
)


@operator("HardSigmoid")
def _hard_sigmoid(c: Call, x: Any) -> Any:
    return torch.clamp(c.get("alpha", 0.2) * x + c.get("beta", 0.5), 0, 1)


@operator("LeakyRelu")
def _leaky_relu(c: Call, x: Any) -> Any:
    return F.leaky_relu(x, c.get("alpha", 0.01))


@operator("Elu")
def _elu(c: Call, x: Any) -> Any:
    return F.elu(x, c.get("alpha", 1.0))


@operator("ThresholdedRelu")
def _thresholded_relu(c: Call, x: Any) -> Any:
    return torch.where(x > c.get("alpha", 1.0), x, 0)


@operator("Celu")
def _celu(c: Call, x: Any) -> Any:
    return F.celu(x, c.get("alpha", 1.0))


@operator("Selu")
def _selu(c: Call, x: Any) -> Any:
    alpha, gamma = c.get("alpha", 1.67326319217681884765625), c.get("gamma", 1.05070102214813232421875)
    return gamma * torch.where(x > 0, x, alpha * (torch.exp(x) - 1))


@operator("Hardmax")
def _hardmax(c: Call, x: Any) -> Any:
    axis = c.get("axis", -1 if c.opset >= 13 else 1)
    if c.opset < 13:
        raise NotImplementedError("Hardmax of flattened axes")
    return F.one_hot(x.argmax(axis), x.shape[axis]).movedim(-1, axis).to(x.dtype)


@operator("Gelu")
def _gelu(c: Call, x: Any) -> Any:
    return F.gelu(x, approximate=c.get("approximate", "none"))


@operator("Clip")
def _clip(c: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    low, high = c.get("min", low), c.get("max", high)
    if low is not None:  # not by clamp, which drops the gradient of a limit that is both
        x = torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


@operator("Mod")
def _mod(c: Call, x: Any, y: Any) -> Any:
    return torch.fmod(x, y) if c.get("fmod", 0) else torch.remainder(x, y)


@operator("Cast")
def _cast(c: Call, x: Any) -> Any:
    return x.to(c.type_of(c.get("to")))


@operator("CastLike")
def _cast_like(_: Call, x: Any, like: Any) -> Any:
    return x.to(like.dtype)


@operator("Dropout")
def _dropout(_: Call, x: Any, *_more: Any) -> Any:
    return x, torch.ones_like(x, dtype=torch.bool)


@operator("Softmax", "LogSoftmax")
def _softmax(c: Call, x: Any) -> Any:
    function = torch.softmax if c.node.op_type == "Softmax" else torch.log_softmax
    if c.opset >= 13:
        return function(x, c.get("axis", -1))
    axis = c.get("axis", 1) % x.ndim
    return function(x.flatten(axis), -1).reshape(x.shape) if axis < x.ndim - 1 else function(x, axis)


def _axes(c: Call, given: Any) -> list[int] | None:
    dims = c.get("axes") if given is None else given.tolist()
    return None if dims is None or len(dims) == 0 else list(dims)


_REDUCTIONS: dict[str, Operator] = {
    "ReduceL1": lambda x, d, k: x.abs().sum(d, k),
    "ReduceL2": lambda x, d, k: torch.linalg.vector_norm(x, 2, d, k),
    "ReduceLogSum": lambda x, d, k: torch.log(x.sum(d, k)),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": torch.amax,
    "ReduceMean": lambda x, d, k: x.mean(d, k),
    "ReduceMin": torch.amin,
    "ReduceSum": lambda x, d, k: x.sum(d, k),
    "ReduceSumSquare": lambda x, d, k: (x * x).sum(d, k),
}


@operator(*_REDUCTIONS, "ReduceProd")
def _reduce(c: Call, x: Any, axes: Any = None) -> Any:
    dims = _axes(c, axes)
    if dims is None:
        if c.get("noop_with_empty_axes", 0):
            return x
        dims = list(range(x.ndim))
    keep = bool(c.get("keepdims", 1))
    if c.node.op_type != "ReduceProd":
        return _REDUCTIONS[c.node.op_type](x, dims, keep)
    for dim in sorted((d % x.ndim for d in dims), reverse=True):
        x = x.prod(dim, keepdim=keep)
    return x


@operator("ArgMax", "ArgMin")
def _arg(c: Call, x: Any) -> Any:
    function = torch.argmax if c.node.op_type == "ArgMax" else torch.argmin
    return function(x, c.get("axis", 0), bool(c.get("keepdims", 1)))


@operator("Gemm")
def _gemm(c: Call, a: Any, b: Any, bias: Any = None) -> Any:
    a, b = (a.T if c.get("transA", 0) else a), (b.T if c.get("transB", 0) else b)
    y = c.get("alpha", 1.0) * (a @ b)
    return y if bias is None else y + c.get("beta", 1.0) * bias


@operator("Einsum")
def _einsum(c: Call, *xs: Any) -> Any:
    return torch.einsum(c.get("equation"), *xs)


@operator("BatchNormalization")
def _batch_norm(c: Call, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    if c.get("training_mode", 0) or c.outputs > 1:
        raise NotImplementedError("BatchNormalization by the statistics of the batch")
    scale, bias, mean, variance = _per_channel(x, scale, bias, mean, variance)
    return (x - mean) / torch.sqrt(variance + c.get("epsilon", 1e-5)) * scale + bias


def _standardised(c: Call, x: Any, axes: Sequence[int]) -> Any:
    variance, mean = torch.var_mean(x, tuple(axes), correction=0, keepdim=True)
    return (x - mean) / torch.sqrt(variance + c.get("epsilon", 1e-5))


def _per_channel(x: Any, *values: Any) -> Any:
    return (v.reshape(-1, *[1] * (x.ndim - 2)) for v in values)


@operator("InstanceNormalization")
def _instance_norm(c: Call, x: Any, scale: Any, bias: Any) -> Any:
    scale, bias = _per_channel(x, scale, bias)
    return _standardised(c, x, range(2, x.ndim)) * scale + bias


@operator("GroupNormalization")
def _group_norm(c: Call, x: Any, scale: Any, bias: Any) -> Any:
    groups = c.get("num_groups")
    if c.opset < 21:
        scale, bias = (v.repeat_interleave(x.shape[1] // groups) for v in (scale, bias))
    scale, bias = _per_channel(x, scale, bias)
    return _standardised(c, x.reshape(len(x), groups, -1), [2]).reshape(x.shape) * scale + bias


def layer_norm(c: Call, x: Any, scale: Any, bias: Any = None) -> Any:
    axis = c.get("axis", -1) % x.ndim
    y = F.layer_norm(x, x.shape[axis:], None, None, c.get("epsilon", 1e-5)) * scale
    return y if bias is None else y + bias


OPERATORS["", "LayerNormalization"] = layer_norm


@operator("LRN")
def _local_response_norm(c: Call, x: Any) -> Any:
    """Over channels from floor((size - 1) / 2) before to ceil((size - 1) / 2) behind."""
    size = c.get("size")
    before, behind = (size - 1) // 2, size // 2
    squares = F.pad((x * x).movedim(1, -1), (before, behind)).unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / (c.get("bias", 1.0) + c.get("alpha", 1e-4) / size * squares) ** c.get("beta", 0.75)


@operator("LpNormalization")
def _lp_norm(c: Call, x: Any) -> Any:
    norm = torch.linalg.vector_norm(x, c.get("p", 2), c.get("axis", -1), keepdim=True)
    return x / torch.where(norm == 0, 1, norm)  # of zeros onnxruntime gives zeros


@operator("Shrink")
def _shrink(c: Call, x: Any) -> Any:
    bias, limit = c.get("bias", 0.0), c.get("lambd", 0.5)
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, 0))


@operator("Det")
def _det(_: Call, x: Any) -> Any:
    return torch.linalg.det(x)


@operator("CumProd")
def _cum_prod(c: Call, x: Any, axis: Any) -> Any:
    dim, back = int(axis), bool(c.get("reverse", 0))
    x = x.flip(dim) if back else x
    if c.get("exclusive", 0):
        x = torch.cat([torch.ones_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)], dim)
    y = x.cumprod(dim)
    return y.flip(dim) if back else y


@operator("NegativeLogLikelihoodLoss")
def _nll(c: Call, x: Any, labels: Any, weight: Any = None) -> Any:
    return F.nll_loss(
        x, labels.long(), weight, ignore_index=c.get("ignore_index", -100), reduction=c.get("reduction", "mean")
    )


@operator("SoftmaxCrossEntropyLoss")
def _cross_entropy(c: Call, x: Any, labels: Any, weight: Any = None) -> Any:
    logarithms = torch.log_softmax(x, 1)
    return _nll(c, logarithms, labels, weight), logarithms


@operator("DFT")
def _dft(c: Call, x: Any, length: Any = None, axis: Any = None) -> Any:
    dim = c.get("axis", 1) if axis is None else int(axis)
    if c.get("inverse", 0) and c.get("onesided", 0):
        raise NotImplementedError("DFT, inverse and onesided")
    values = torch.complex(x[..., 0], x[..., 1] if x.shape[-1] == 2 else torch.zeros_like(x[..., 0]))
    function = torch.fft.ifft if c.get("inverse", 0) else torch.fft.fft
    y = torch.view_as_real(function(values, None if length is None else int(length), dim % x.ndim))
    return y.narrow(dim, 0, y.shape[dim] // 2 + 1) if c.get("onesided", 0) else y


for room in ("layout", "windows", "recurrent", "fused"):
    import_module(f"tests.field.twin_{room}")
