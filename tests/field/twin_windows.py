"""Convolution, pooling and resizing in PyTorch, after ONNX's text: for `twin`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.field.twin_operators import OPERATORS, Call, operator

torch: Any = import_module("torch")
F: Any = torch.nn.functional


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


@operator("GlobalLpPool")
def _global_lp_pool(c: Call, x: Any) -> Any:
    return torch.linalg.vector_norm(x, c.get("p", 2), tuple(range(2, x.ndim)), keepdim=True)


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
