"""Mixtures of experts: every expert is computed for every token, and weighed by what the router gives it, 0 for most.

Letters of shapes: T tokens, E experts, size H of a token, size I between the two products of an expert, 2·I before a
SwiGLU. The first product stacks the experts' rows, the second their columns, so that each is one matrix product.
"""

from math import inf

import numpy as np

from onnx_backprop.converters.prepare.fused.activations import tanh_gelu
from onnx_backprop.converters.prepare.fused.composer import SCALE, Composer

_LEAST = 1e-8  # QMoE computes no expert whose weight is not above it
_LARGEST_BLOCK = 128


def moe(op: Composer) -> str:
    """y = Σ weight · (W2·activation(W1·x + b1) + b2) over the k experts of the highest softmax(router), their weights.

    The weights of the chosen are divided by their sum with `normalize_routing_weights`. W1 (E, I, H) or, for swiglu,
    (E, 2·I, H), W2 (E, H, I). Of equal experts the last is chosen. `use_sparse_mixer` changes nothing on the CPU. Half
    types are computed in float32, as onnxruntime does.
    """
    if op.input(6) or op.input(7):
        raise op.refuse(_NO_FC3)
    x, router, w1, b1, w2, b2 = (name and op.as_float32(name) for name in map(op.input, range(6)))
    op.attribute("use_sparse_mixer")
    softmax = op.Softmax(router, axis=-1)
    weights = op.Mul(softmax, _chosen(op, softmax))
    if op.attribute("normalize_routing_weights", 0) == 1:
        weights = op.Div(weights, op.ReduceSum(weights, [1]))
    size = op.length(x, -1)
    rows = op.Reshape(w1, op.joined(-1, size))
    columns = op.Transpose(op.Reshape(w2, op.joined(0, size, -1)), perm=[0, 2, 1])
    h = op.MatMul(op.Reshape(x, op.joined(-1, size)), op.Transpose(rows, perm=[1, 0]))
    h = _activated(op, op.Add(h, op.Reshape(b1, [-1])) if b1 else h)
    y = op.MatMul(_weighed(op, h, weights), op.Reshape(columns, op.joined(-1, size)))
    y = op.Reshape(op.Add(y, op.MatMul(weights, b2)) if b2 else y, op.Shape(x))
    return op.typed_as(op.input(0), y) if op.is_half(op.input(0)) else y


def q_moe(op: Composer) -> str:
    """`moe` with W1 and W2 packed in bytes along their last axis, the lowest bits first: W = (q - z) · scales.

    The weights are the softmax over the chosen experts' `router_probs`, or `router_weights` of the chosen, divided by
    their sum with `normalize_routing_weights`; those of 1e-8 and less count as 0. float16 is computed in float32, as
    onnxruntime does. Each product is a MatMulNBits, in which the weights stay packed; only where the length that is
    summed over is no multiple of 16 they are written out in floats. What `accuracy_level`, and onnxruntime with 8 bits
    in blocks at every level, rounds of x is not rounded.
    """
    _refuse_layouts(op)
    x, router, given = op.input(0), op.as_float32(op.input(1)), op.input(14)
    chosen = _chosen(op, router)
    normalised = op.attribute("normalize_routing_weights", 0) == 1
    if given:
        weights = op.Mul(op.as_float32(given), chosen)
        if normalised:
            total = op.ReduceSum(weights, [1])
            none = op.Equal(total, 0.0)
            weights = op.Div(weights, op.Where(none, op.number(inf, total), total))
        weights = op.Where(op.Greater(weights, _LEAST), weights, op.number(0.0, weights))
    else:
        kept = op.Where(op.Greater(chosen, 0.5), router, op.number(-inf, router))
        weights = op.Softmax(kept, axis=-1)
    size = op.length(x, -1)
    tokens = op.as_float32(op.Reshape(x, op.joined(-1, size)))
    first, second = _Packed(op, 2, "fc1"), _Packed(op, 5, "fc2")
    b1, b2 = op.input(4), op.input(7)
    h = first.rows(tokens)
    h = _activated(op, op.Add(h, op.Reshape(op.as_float32(b1), [-1])) if b1 else h)
    y = second.columns(_weighed(op, h, weights))
    y = op.Add(y, op.MatMul(weights, op.as_float32(b2))) if b2 else y
    return op.Reshape(op.typed_as(x, y), op.Shape(x))


_NO_FC3 = "fc3 is not handled, nor has onnxruntime's CPU a kernel. Interleave it with fc1: swiglu_fusion=1"


def _refuse_layouts(op: Composer) -> None:
    """Refuse what onnxruntime's CPU kernel does not run."""
    if any(op.input(n) for n in (8, 9, 10, 13)):
        raise op.refuse(_NO_FC3)
    op.attribute("use_sparse_mixer")
    op.attribute("accuracy_level")
    bits = op.attribute("expert_weight_bits", 4)
    if op.attribute("quant_type", "int") != "int" or bits not in (2, 4, 8):
        raise op.refuse("weights of 2, 4 and 8 bits with quant_type 'int' are handled. Quantise to these")
    if any(op.attribute(f"fc{n}_expert_weight_bits", bits) != bits for n in (1, 2, 3)):
        raise op.refuse("one number of bits for all products is handled. Leave out fc…_expert_weight_bits")
    if op.attribute("weights_prepacked", -1) not in (-1, 0):
        raise op.refuse("weights that are packed for one processor are not handled. Export with weights_prepacked=0")
    if op.attribute("activation_type", "relu") != "swiglu" and op.attribute("swiglu_fusion", 0):
        raise op.refuse("swiglu_fusion is for activation_type='swiglu'. Leave it out")


def _chosen(op: Composer, scores: str) -> str:
    """1 for the k highest of each row of scores (T, E), else 0; of equal ones the last, as onnxruntime does."""
    backwards = op.Slice(scores, [-1], [-(2**62)], [1], [-1])
    _, places = op.several("TopK", 2, backwards, op.constant(np.array([op.count("k")])), axis=1)
    count = op.Squeeze(op.length(scores, 1))
    last = op.Sub(count, op.constant(np.array(1)))
    ones = op.OneHot(op.Sub(last, places), count, np.array([0, 1], np.float32))
    return op.ReduceSum(ones, [1], keepdims=0)


def _weighed(op: Composer, h: str, weights: str) -> str:
    """h (T, E·I) times weights (T, E)."""
    by_expert = op.Reshape(h, op.joined(0, op.length(weights, 1), -1))
    return op.Flatten(op.Mul(by_expert, op.Unsqueeze(weights, [2])), axis=1)


def _activated(op: Composer, h: str) -> str:
    """The activation; swiglu: g·sigmoid(α·g)·(l + β), g and l alternating along the last axis."""
    name, alpha, beta = (
        op.attribute(f"activation_{n}", default) for n, default in (("type", "relu"), ("alpha", 1.0), ("beta", 0.0))
    )
    limit, fusion = op.attribute("swiglu_limit", inf), op.attribute("swiglu_fusion", 0)
    if op.attribute("swiglu_limit_after_activation", 0):
        raise op.refuse(
            "swiglu_limit_after_activation is not handled, nor has onnxruntime's CPU a kernel. Leave it out"
        )
    if name != "swiglu":
        plain = {"relu": op.Relu, "gelu": lambda x: tanh_gelu(op, x), "silu": lambda x: op.Mul(x, op.Sigmoid(x))}
        plain |= {"identity": lambda x: x}
        if name not in plain:
            raise op.refuse(f"the activation {name!r} is not handled; {', '.join(plain)} and swiglu are")
        return plain[name](h)
    if fusion != 1:
        raise op.refuse(f"swiglu_fusion=1 is handled, as onnxruntime's CPU does, got {fusion}. Interleave gate and up")
    if not limit >= 0:
        raise op.refuse(f"the attribute 'swiglu_limit': expected 0 or more, got {limit}")
    g, up = (op.Slice(h, [n], [2**62], [1], [2]) for n in (0, 1))
    if limit < inf:
        g, up = op.Clip(g, None, op.number(limit, g)), op.Clip(up, *(op.number(s * limit, up) for s in (-1, 1)))
    gate = op.Mul(g, op.Sigmoid(g if alpha == 1 else op.Mul(g, alpha)))
    return op.Mul(gate, up if beta == 0 else op.Add(up, beta))


class _Packed:
    """Packed weights (E, N, K) of all experts, from the inputs at `index`: q, and behind it the scales."""

    def __init__(self, op: Composer, index: int, name: str) -> None:
        self.op, self.bits = op, op.attribute("expert_weight_bits", 4)
        self.q, self.scales, self.points = op.input(index), op.input(index + 1), op.input(11 + (index == 5))
        lengths = [op.known.length(self.q, axis) for axis in range(3)]
        if None in lengths or not self.scales:
            raise op.refuse(f"{name}'s scales, and the lengths of its weights, are needed. Declare the shape")
        self.experts, self.n, stored = (n or 0 for n in lengths)
        self.k, block = stored * 8 // self.bits, op.attribute("block_size", 0)
        self.by_row = not block
        self.size = min(self.k & -self.k, block or _LARGEST_BLOCK)  # a power of two, as blocks are, that divides K
        self.stays = self.size >= 16
        self.size = self.k if self.by_row and not self.stays else self.size
        self.places = np.arange(self.k // self.size) * self.size // (block or self.k)  # of the scale of each block
        self.whole = self.size == block

    def rows(self, x: str) -> str:
        """x (T, K) by each expert's rows: (T, E·N)."""
        return self._product(x, False, self.experts * self.n, self.k)

    def columns(self, h: str) -> str:
        """Each expert's h, (T, E·K), by its rows, summed over the experts: (T, N)."""
        return self._product(h, True, self.n, self.experts * self.k)

    def _product(self, x: str, columns: bool, n: int, k: int) -> str:
        op, blocks = self.op, k // self.size
        q = op.Reshape(self.q, [self.experts, self.n, self.places.size, -1])
        q = op.Reshape(op.Transpose(q, perm=[1, 0, 2, 3]) if columns else q, [n, blocks, -1])
        scales, points = op.as_float32(self.scales), self._points(columns, n)
        scales = self._stacked(scales if self.whole else self._spread(scales), columns, n)
        if self.stays:
            sizes = {"N": n, "K": k, "bits": self.bits, "block_size": self.size}
            return op.MatMulNBits(x, q, scales, points, domain="com.microsoft", **sizes)
        numbers = op.as_float32(op.Reshape(_unpacked(op, q, self.bits), [n, blocks, self.size]))
        middle = op.Unsqueeze(points, [2]) if points else op.number(float(1 << (self.bits - 1)), numbers)
        scaled = op.Mul(op.Sub(numbers, middle), op.Unsqueeze(scales, [2]))
        scaled = op.defined_by(scaled, 1, SCALE)
        return op.MatMul(x, op.Transpose(op.Reshape(scaled, [n, k]), perm=[1, 0]))

    def _points(self, columns: bool, n: int) -> str:
        """(n, blocks), packed in bytes where they stay together, else in floats; "" for none."""
        op = self.op
        if not self.points:
            return ""
        if self.whole and self.stays and (not columns or self.places.size * self.bits % 8 == 0):
            return self._stacked(op.Reshape(self.points, [self.experts, self.n, -1]), columns, n)
        numbers = _unpacked(op, self.points, self.bits)
        numbers = numbers if self.bits == 8 and self.stays else op.as_float32(numbers)
        if self.by_row:  # packed along the rows, and to whole bytes
            numbers = op.Slice(op.Reshape(numbers, [self.experts, -1]), [0], [self.n], [1])
        else:
            numbers = op.Reshape(numbers, [self.experts, self.n, -1])
        return self._stacked(self._spread(numbers), columns, n)

    def _spread(self, values: str) -> str:
        """Those of a row, or of its blocks, for each of the blocks here: (E, N, blocks)."""
        rows = self.op.Unsqueeze(values, [2]) if self.by_row else values
        return self.op.Gather(rows, self.op.constant(self.places), axis=2)

    def _stacked(self, values: str, columns: bool, n: int) -> str:
        """(E, N, …) as (E·N, …), or (N, E·…) for columns."""
        return self.op.Reshape(self.op.Transpose(values, perm=[1, 0, 2]) if columns else values, [n, -1])


def _unpacked(op: Composer, packed: str, bits: int) -> str:
    """The numbers in bytes, along a new last axis, still uint8."""
    if bits == 8:
        return packed
    shifts = op.constant(np.arange(0, 8, bits, dtype=np.uint8))
    moved = op.BitShift(op.Unsqueeze(packed, [-1]), shifts, direction="RIGHT")
    return op.BitwiseAnd(moved, op.constant(np.array((1 << bits) - 1, np.uint8)))
