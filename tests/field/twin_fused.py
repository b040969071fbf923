"""Operators of com.microsoft that onnxruntime's optimisers leave, in PyTorch: for `twin`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.field.twin_operators import OPERATORS, Call, layer_norm, operator
from tests.field.twin_windows import conv

torch: Any = import_module("torch")
F: Any = torch.nn.functional
MICROSOFT = "com.microsoft"


def _activated(c: Call, y: Any) -> Any:
    name = c.get("activation", "")
    numbers = c.get("activation_params") or []
    if name == "Clip":
        return torch.clamp(y, *numbers)
    if name == "LeakyRelu":
        return F.leaky_relu(y, numbers[0] if numbers else c.get("activation_alpha", 0.01))
    if name == "HardSigmoid":
        return torch.clamp(numbers[0] * y + numbers[1], 0, 1)
    plain = {"": lambda v: v, "Relu": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid}
    return plain[name](y)


@operator("FusedConv", domain=MICROSOFT)
def _fused_conv(c: Call, x: Any, w: Any, b: Any = None, z: Any = None) -> Any:
    y = conv(c, x, w, b)
    return _activated(c, y if z is None else y + z)


@operator("FusedGemm", domain=MICROSOFT)
def _fused_gemm(c: Call, *xs: Any) -> Any:
    return _activated(c, OPERATORS["", "Gemm"](c, *xs))


@operator("FusedMatMul", domain=MICROSOFT)
def _fused_matmul(c: Call, a: Any, b: Any) -> Any:
    if c.get("transBatchA", 0) or c.get("transBatchB", 0):
        raise NotImplementedError("FusedMatMul with a batch transposed")
    a, b = (a.mT if c.get("transA", 0) else a), (b.mT if c.get("transB", 0) else b)
    return c.get("alpha", 1.0) * (a @ b)


@operator("Gelu", domain=MICROSOFT)
def _gelu(_: Call, x: Any) -> Any:
    return F.gelu(x)


@operator("BiasGelu", domain=MICROSOFT)
def _bias_gelu(_: Call, x: Any, b: Any) -> Any:
    return F.gelu(x + b)


@operator("FastGelu", domain=MICROSOFT)
def _fast_gelu(_: Call, x: Any, b: Any = None) -> Any:
    return F.gelu(x if b is None else x + b, approximate="tanh")


@operator("QuickGelu", domain=MICROSOFT)
def _quick_gelu(c: Call, x: Any) -> Any:
    return x * torch.sigmoid(c.get("alpha", 1.702) * x)


@operator("BiasSoftmax", domain=MICROSOFT)
def _bias_softmax(c: Call, x: Any, b: Any) -> Any:
    return torch.softmax(x + b, c.get("axis", 1))


@operator("SkipLayerNormalization", domain=MICROSOFT)
def _skip_layer_norm(c: Call, x: Any, skip: Any, gamma: Any, beta: Any = None, bias: Any = None) -> Any:
    total = x + skip if bias is None else x + skip + bias
    return (
        layer_norm(Call(c.node, {"epsilon": c.get("epsilon", 1e-12)}, 1, c.dtype, 1), total, gamma, beta),
        None,
        None,
        total,
    )


def _simplified(c: Call, x: Any, scale: Any) -> Any:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + c.get("epsilon", 1e-5)) * scale


OPERATORS["", "SimplifiedLayerNormalization"] = _simplified
OPERATORS["", "RMSNormalization"] = _simplified
OPERATORS[MICROSOFT, "SimplifiedLayerNormalization"] = _simplified


@operator("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_simplified(c: Call, x: Any, skip: Any, gamma: Any, bias: Any = None) -> Any:
    total = x + skip if bias is None else x + skip + bias
    return _simplified(c, total, gamma), None, None, total


@operator("EmbedLayerNormalization", domain=MICROSOFT)
def _embed(
    c: Call,
    ids: Any,
    kinds: Any,
    words: Any,
    places: Any,
    segments: Any,
    gamma: Any,
    beta: Any,
    mask: Any = None,
    at: Any = None,
) -> Any:
    at = torch.arange(ids.shape[1]) if at is None else at.long()
    total = words[ids.long()] + places[at] + (0 if segments is None else segments[kinds.long()])
    lengths = None if mask is None else mask.sum(-1)
    y = layer_norm(Call(c.node, {"epsilon": c.get("epsilon", 1e-12)}, 1, c.dtype, 1), total, gamma, beta)
    return y, lengths, total


def _heads(x: Any, count: int) -> Any:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _attended(c: Call, q: Any, k: Any, v: Any, mask: Any, bias: Any) -> Any:
    """(N, heads, S, d): mask (N, S) of keys, or lengths (N,); bias is added to the scores."""
    scores = q @ k.mT * (c.get("scale") or q.shape[-1] ** -0.5)
    low = c.get("mask_filter_value", -10000.0)
    if mask is not None:
        if mask.ndim == 1:
            mask = torch.arange(k.shape[2]) < mask[:, None]
        if mask.ndim == 2:
            mask = mask[:, None, None, :]
        elif mask.ndim == 3:
            mask = mask[:, None]
        scores = scores + torch.where(mask.bool(), 0.0, low).to(scores.dtype)
    if c.get("unidirectional", 0):
        scores = scores + torch.full(scores.shape[-2:], low, dtype=scores.dtype).triu(1)
    scores = scores if bias is None else scores + bias
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


@operator("Attention", domain=MICROSOFT)
def _attention(
    c: Call, x: Any, w: Any, b: Any = None, mask: Any = None, past: Any = None, bias: Any = None, *_more: Any
) -> Any:
    if past is not None or c.get("do_rotary", 0) or c.get("qkv_hidden_sizes"):
        raise NotImplementedError("Attention with past")
    both = x @ w if b is None else x @ w + b
    q, k, v = (_heads(part, c.get("num_heads")) for part in both.chunk(3, -1))
    return _attended(c, q, k, v, mask, bias), torch.stack((k, v))


@operator("MultiHeadAttention", domain=MICROSOFT)
def _multi_head(
    c: Call, q: Any, k: Any = None, v: Any = None, b: Any = None, mask: Any = None, bias: Any = None, *more: Any
) -> Any:
    if k is None or v is None or k.ndim != 3 or any(m is not None for m in more):
        raise NotImplementedError("MultiHeadAttention with packed or cached inputs")
    if b is not None:
        q, k, v = (
            x + part for x, part in zip((q, k, v), b.split([q.shape[-1], k.shape[-1], v.shape[-1]]), strict=True)
        )
    q, k, v = (_heads(x, c.get("num_heads")) for x in (q, k, v))
    return _attended(c, q, k, v, mask, bias)
