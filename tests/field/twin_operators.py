"""What operators compute, in PyTorch, after their text: for `twin`, which is compared with onnxruntime's forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
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
    Add=torch.add,
    And=torch.logical_and,
    Atan=torch.atan,
    Ceil=torch.ceil,
    Cos=torch.cos,
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


@operator("Gelu")
def _gelu(c: Call, x: Any) -> Any:
    return F.gelu(x, approximate=c.get("approximate", "none"))


@operator("Clip")
def _clip(c: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    low, high = c.get("min", low), c.get("max", high)
    return torch.clamp(x, None if low is None else float(low), None if high is None else float(high))


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
    found = c.get("axes") if given is None else given.tolist()
    return None if found is None or len(found) == 0 else list(found)


_REDUCTIONS: dict[str, Operator] = {
    "ReduceL1": lambda x, d, k: x.abs().sum(d, k),
    "ReduceL2": lambda x, d, k: torch.sqrt((x * x).sum(d, k)),
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
    return F.batch_norm(x, mean, variance, scale, bias, training=False, eps=c.get("epsilon", 1e-5))


@operator("InstanceNormalization")
def _instance_norm(c: Call, x: Any, scale: Any, bias: Any) -> Any:
    return F.instance_norm(x, weight=scale, bias=bias, eps=c.get("epsilon", 1e-5))


@operator("GroupNormalization")
def _group_norm(c: Call, x: Any, scale: Any, bias: Any) -> Any:
    groups = c.get("num_groups")
    if c.opset < 21:
        scale, bias = (v.repeat_interleave(x.shape[1] // groups) for v in (scale, bias))
    return F.group_norm(x, groups, scale, bias, c.get("epsilon", 1e-5))


def layer_norm(c: Call, x: Any, scale: Any, bias: Any = None) -> Any:
    axis = c.get("axis", -1) % x.ndim
    y = F.layer_norm(x, x.shape[axis:], None, None, c.get("epsilon", 1e-5)) * scale
    return y if bias is None else y + bias


OPERATORS["", "LayerNormalization"] = layer_norm


@operator("LpNormalization")
def _lp_norm(c: Call, x: Any) -> Any:
    return x / torch.linalg.vector_norm(x, c.get("p", 2), c.get("axis", -1), keepdim=True)


def _pads(c: Call, size: Any, kernel: list[int], strides: list[int], dilations: list[int]) -> list[int]:
    """Begin and end of each axis, as F.pad wants them: the last axis first."""
    rank, mode = len(kernel), c.get("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        pads = []
        for n, k, s, d in zip(size, kernel, strides, dilations, strict=True):
            total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            small = total // 2
            pads.append((small, total - small) if mode == "SAME_UPPER" else (total - small, small))
    elif mode == "VALID":
        pads = [(0, 0)] * rank
    else:
        flat = c.get("pads") or [0] * 2 * rank
        pads = list(zip(flat[:rank], flat[rank:], strict=True))
    return [p for pair in reversed(pads) for p in pair]


def conv(c: Call, x: Any, w: Any, b: Any = None) -> Any:
    kernel = list(w.shape[2:])
    ones = [1] * len(kernel)
    strides, dilations = list(c.get("strides") or ones), list(c.get("dilations") or ones)
    pads = _pads(c, x.shape[2:], kernel, strides, dilations)
    function = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 1]
    if c.get("group", 1) > 1 and len(kernel) == 2 and c.dtype == torch.float64:
        y = _grouped(F.pad(x, pads), w, strides, dilations, c.get("group"))
        return y if b is None else y + b[:, None, None]
    ends = pads[::-1][::2], pads[::-1][1::2]
    if ends[0] == ends[1]:
        return function(x, w, b, strides, ends[0], dilations, c.get("group", 1))
    return function(F.pad(x, pads), w, b, strides, 0, dilations, c.get("group", 1))


def _grouped(x: Any, w: Any, strides: list[int], dilations: list[int], groups: int) -> Any:
    """The same by a product of matrices: PyTorch takes groups one by one in float64."""
    height, width = (
        (n - (k - 1) * d - 1) // s + 1 for n, k, d, s in zip(x.shape[2:], w.shape[2:], dilations, strides, strict=True)
    )
    columns = F.unfold(x, w.shape[2:], dilations, 0, strides).unflatten(1, (groups, -1))
    return (w.unflatten(0, (groups, -1)).flatten(2) @ columns).reshape(len(x), -1, height, width)


OPERATORS["", "Conv"] = conv


@operator("ConvTranspose")
def _conv_transpose(c: Call, x: Any, w: Any, b: Any = None) -> Any:
    if c.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or c.get("output_shape"):
        raise NotImplementedError("ConvTranspose with output_shape or SAME")
    rank = w.ndim - 2
    flat = c.get("pads") or [0] * 2 * rank
    extra = c.get("output_padding") or [0] * rank
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    strides, dilations = c.get("strides") or [1] * rank, c.get("dilations") or [1] * rank
    y = function(x, w, b, strides, 0, 0, c.get("group", 1), dilations)
    for axis in range(rank):
        length = y.shape[2 + axis] - flat[axis] - flat[rank + axis] + extra[axis]
        lacking = flat[axis] + length - y.shape[2 + axis]
        if lacking > 0:
            raise NotImplementedError("ConvTranspose with output_padding above pads")
        y = y.narrow(2 + axis, flat[axis], length)
    return y


@operator("MaxPool", "AveragePool")
def _pool(c: Call, x: Any) -> Any:
    kernel = list(c.get("kernel_shape"))
    rank = len(kernel)
    strides, dilations = list(c.get("strides") or [1] * rank), list(c.get("dilations") or [1] * rank)
    pads = _pads(c, x.shape[2:], kernel, strides, dilations)
    ceil = bool(c.get("ceil_mode", 0))
    ends = pads[::-1][::2], pads[::-1][1::2]
    if c.node.op_type == "MaxPool":
        function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
        if ends[0] == ends[1]:
            return function(x, kernel, strides, ends[0], dilations, ceil)
        return function(F.pad(x, pads, value=-torch.inf), kernel, strides, 0, dilations, ceil)
    function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    counted = bool(c.get("count_include_pad", 0))
    if ends[0] == ends[1]:
        return function(x, kernel, strides, ends[0], ceil, counted)
    total = function(F.pad(x, pads), kernel, strides, 0, ceil)
    return total if counted else total / function(F.pad(torch.ones_like(x), pads), kernel, strides, 0, ceil)


@operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(c: Call, x: Any) -> Any:
    dims = tuple(range(2, x.ndim))
    return x.mean(dims, keepdim=True) if c.node.op_type == "GlobalAveragePool" else x.amax(dims, keepdim=True)


@operator("Resize", "Upsample")
def _resize(c: Call, x: Any, *more: Any) -> Any:
    if c.node.op_type == "Upsample" or c.opset < 11:
        scales, sizes = (more[0] if more else torch.tensor(c.get("scales") or ())), None
        where = "asymmetric"
    else:
        _roi, scales, sizes = (*more, None, None, None)[:3]
        where = c.get("coordinate_transformation_mode", "half_pixel")
    mode = c.get("mode", "nearest")
    if sizes is not None and sizes.numel():
        size = [int(n) for n in sizes]
        given = [n / m for n, m in zip(size, x.shape, strict=True)]
    else:
        given = [] if scales is None else [float(s) for s in scales]
        size = [int(n * s) for n, s in zip(x.shape, given, strict=True)]
    for axis, (n, m, s) in enumerate(zip(x.shape, size, given, strict=True)):
        if n != m or s != 1:
            x = torch.tensordot(x, _matrix(c, n, m, s, mode, where), dims=([axis], [1])).movedim(-1, axis)
    return x


def _matrix(c: Call, n: int, m: int, scale: float, mode: str, where: str) -> Any:
    """Row o: the weights of the n source pixels in output pixel o."""
    o = torch.arange(m, dtype=torch.float64)
    at = {
        "half_pixel": (o + 0.5) / scale - 0.5,
        "pytorch_half_pixel": (o + 0.5) / scale - 0.5 if m > 1 else 0 * o,
        "asymmetric": o / scale,
        "align_corners": o * (n - 1) / max(m - 1, 1),
    }[where]
    result = torch.zeros(m, n, dtype=c.dtype)
    if mode == "nearest":
        rounding = c.get("nearest_mode", "floor" if c.opset < 11 else "round_prefer_floor")
        index = {
            "floor": torch.floor(at),
            "ceil": torch.ceil(at),
            "round_prefer_floor": torch.ceil(at - 0.5),
            "round_prefer_ceil": torch.floor(at + 0.5),
        }[rounding]
        result[torch.arange(m), index.clamp(0, n - 1).long()] = 1
        return result
    if mode != "linear":
        raise NotImplementedError(f"Resize {mode}")
    low = torch.floor(at)
    for index, weight in ((low, 1 - (at - low)), (low + 1, at - low)):
        result.index_put_((torch.arange(m), index.clamp(0, n - 1).long()), weight.to(c.dtype), accumulate=True)
    return result


@operator("LSTM")
def _lstm(c: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None, s: Any = None) -> Any:
    if lengths is not None or c.get("activations") not in (None, [b"Sigmoid", b"Tanh", b"Tanh"]) or c.get("layout", 0):
        raise NotImplementedError("LSTM with sequence lengths or other activations")
    ways = []
    for d in range(w.shape[0]):
        backward = c.get("direction", "forward") == "reverse" or d == 1
        hidden = r.shape[-1]
        state = [x.new_zeros(x.shape[1], hidden) if v is None else v[d] for v in (h, s)]
        bias = 0 if b is None else b[d, : 4 * hidden] + b[d, 4 * hidden :]
        seen = []
        for t in reversed(range(x.shape[0])) if backward else range(x.shape[0]):
            i, o, f, g = (x[t] @ w[d].T + state[0] @ r[d].T + bias).split(hidden, -1)
            cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
            state = [torch.sigmoid(o) * torch.tanh(cell), cell]
            seen.append(state[0])
        ways.append((torch.stack(seen[::-1] if backward else seen), *state))
    return tuple(torch.stack(part, dim) for part, dim in zip(zip(*ways, strict=True), (1, 0, 0), strict=True))


@operator("GRU")
def _gru(c: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None) -> Any:
    if lengths is not None or c.get("activations") is not None or c.get("layout", 0):
        raise NotImplementedError("GRU with sequence lengths or other activations")
    ways = []
    for d in range(w.shape[0]):
        backward = c.get("direction", "forward") == "reverse" or d == 1
        hidden = r.shape[-1]
        state = x.new_zeros(x.shape[1], hidden) if h is None else h[d]
        wb, rb = (0, 0) if b is None else (b[d, : 3 * hidden], b[d, 3 * hidden :])
        parts = torch.zeros(3 * hidden, dtype=x.dtype) + rb
        seen = []
        for t in reversed(range(x.shape[0])) if backward else range(x.shape[0]):
            xz, xr, xh = (x[t] @ w[d].T + wb).split(hidden, -1)
            rz, rr, rh = r[d].split(hidden, 0)
            bz, br, bh = parts.split(hidden)
            z, reset = torch.sigmoid(xz + state @ rz.T + bz), torch.sigmoid(xr + state @ rr.T + br)
            if c.get("linear_before_reset", 0):
                new = torch.tanh(xh + reset * (state @ rh.T + bh))
            else:
                new = torch.tanh(xh + (reset * state) @ rh.T + bh)
            state = (1 - z) * new + z * state
            seen.append(state)
        ways.append((torch.stack(seen[::-1] if backward else seen), state))
    return tuple(torch.stack(part, dim) for part, dim in zip(zip(*ways, strict=True), (1, 0), strict=True))


def slices(lengths: list[int]) -> list[tuple[int, int]]:
    """Begin and end of pieces laid end to end."""
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    return list(pairwise(edges))


import_module("tests.field.twin_layout")
import_module("tests.field.twin_fused")
