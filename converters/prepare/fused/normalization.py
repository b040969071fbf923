"""Normalisations, alone and behind sums or embeddings.

float16 and bfloat16 are normalised in float32, as onnxruntime does.
"""

import numpy as np
from onnx import TensorProto

from onnx_backprop.converters.prepare.fused.composer import Composer


def layer_normalization(op: Composer) -> list[str]:
    """The standard operator, which onnx has from opset 17 on; x takes the type of a scale that has another."""
    x, scale = op.input(0), op.input(1)
    elements = {op.known.element(x), op.known.element(scale)}
    axis, epsilon = op.attribute("axis", -1), op.attribute("epsilon", 1e-5)
    if op.attribute("stash_type", 1) != TensorProto.FLOAT:
        raise op.refuse("statistics in float32 are handled. Set stash_type to 1")
    x = op.typed_as(scale, x) if len(elements) == 2 else x
    return op.several("LayerNormalization", 3, x, scale, op.input(2), axis=axis, epsilon=epsilon)


def simplified_layer_normalization(op: Composer) -> list[str]:
    """y = x/√(mean(x²) + ε) · scale over the axes from `axis` on; and 1/√(…)."""
    x = op.input(0)
    axis, epsilon = op.attribute("axis", -1), op.attribute("epsilon", 1e-5)
    if op.attribute("stash_type", 1) != TensorProto.FLOAT:
        raise op.refuse("statistics in float32 are handled. Set stash_type to 1")
    axes = [axis] if axis == -1 else list(range(axis, 0) if axis < 0 else range(axis, op.rank(x, "by its axis")))
    return list(root_mean_square(op, x, op.input(1), epsilon, axes))


def skip_layer_normalization(op: Composer) -> list[str]:
    """y = LayerNormalization(s), s = x + skip + bias; outputs y, mean(s) and 1/√(var(s) + ε) in float32, s."""
    total, gamma, beta = _skip_sum(op, op.input(4)), _wide(op, op.input(2)), _wide(op, op.input(3))
    outputs, epsilon = 3 if op.wants(1) or op.wants(2) else 1, op.attribute("epsilon", 1e-12)
    y, *statistics = op.several("LayerNormalization", outputs, total, gamma, beta, axis=-1, epsilon=epsilon)
    return [_narrow(op, y), *(statistics or ["", ""]), _narrow(op, total)]


def skip_simplified_layer_normalization(op: Composer) -> list[str | None]:
    """y = s/√(mean(s²) + ε) · gamma, s = x + skip + bias; outputs y, 0, 1/√(mean(s²) + ε), s."""
    total, epsilon = _skip_sum(op, op.input(3)), op.attribute("epsilon", 1e-12)
    y, inverse = root_mean_square(op, total, _wide(op, op.input(2)), epsilon, [-1])
    return [_narrow(op, y), op.Mul(inverse, 0.0) if op.wants(1) else None, inverse, _narrow(op, total)]


def embed_layer_normalization(op: Composer) -> list[str | None]:
    """y = LayerNormalization(word[ids] + position[p] + segment[segments]), the number of unmasked words, the sum.

    p: `position_ids`, else 0 … sequence length - 1.
    """
    ids, segments, mask, positions = op.input(0), op.input(1), op.input(7), op.input(8)
    op.attribute("mask_index_type")
    if not positions:
        length = op.Squeeze(op.length(ids, 1), [0])
        positions = op.Unsqueeze(
            op.Range(op.constant(np.array(0, np.int64)), length, op.constant(np.array(1, np.int64))), [0]
        )
    total = op.Add(op.Gather(op.input(2), ids), op.Gather(op.input(3), positions))
    table = op.input(4)
    if segments and table:
        total = op.Add(total, op.Gather(table, segments))
    epsilon = op.attribute("epsilon", 1e-12)
    y = op.LayerNormalization(total, op.input(5), op.input(6), axis=-1, epsilon=epsilon)
    return [y, _words(op, ids, mask) if op.wants(1) else None, total]


def _words(op: Composer, ids: str, mask: str) -> str:
    """How many entries of each row of a mask are 1; 0 without a mask."""
    if mask:
        return op.ReduceSum(op.Cast(op.Equal(mask, 1), to=TensorProto.INT32), [1], keepdims=0)
    return op.Cast(op.ReduceSum(op.Mul(ids, 0), [1], keepdims=0), to=TensorProto.INT32)


def _skip_sum(op: Composer, bias: str) -> str:
    total = op.Add(_wide(op, op.input(0)), _wide(op, op.input(1)))
    return op.Add(total, _wide(op, bias)) if bias else total


def _wide(op: Composer, name: str) -> str:
    return op.as_float32(name) if name and op.is_half(name) else name


def _narrow(op: Composer, name: str) -> str:
    """In the type of the first input again."""
    return op.typed_as(op.input(0), name) if op.is_half(op.input(0)) else name


def root_mean_square(op: Composer, x: str, scale: str, epsilon: float, axes: list[int]) -> tuple[str, str]:
    """x·r·scale and r = 1/√(mean(x²) + ε)."""
    wide = _wide(op, x)
    inverse = op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Mul(wide, wide), axes), epsilon)))
    y = op.Mul(wide, inverse)
    return op.Mul(y if wide == x else op.typed_as(scale, y), scale), inverse
