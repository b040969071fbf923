"""Activations of com.microsoft, those that other fused operators end with, and losses by class of one row."""

from collections.abc import Sequence
from math import pi, sqrt

from onnx_backprop.converters.prepare.fused.composer import Composer


def gelu(op: Composer) -> str:
    """y = x · Φ(x) = x/2 · (1 + erf(x/√2))."""
    return _gelu(op, op.input(0))


def bias_gelu(op: Composer) -> str:
    """y = gelu(a + b)."""
    return _gelu(op, op.Add(op.input(0), op.input(1)))


def bias_split_gelu(op: Composer) -> str:
    """y = l · gelu(r) of the two halves of x + b along the last axis."""
    left, right = op.several("Split", 2, op.Add(op.input(0), op.input(1)), axis=-1, num_outputs=2)
    return op.Mul(left, _gelu(op, right))


def fast_gelu(op: Composer) -> str:
    """y = x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³))) of x + bias."""
    x, bias = op.input(0), op.input(1)
    return tanh_gelu(op, op.Add(x, bias) if bias else x)


def gemm_fast_gelu(op: Composer) -> str:
    """y = fast_gelu(x·w + bias)."""
    product, bias = op.MatMul(op.input(0), op.input(1)), op.input(2)
    return tanh_gelu(op, op.Add(product, bias) if bias else product)


def quick_gelu(op: Composer) -> str:
    """y = x · sigmoid(α·x)."""
    x, alpha = op.input(0), op.attribute("alpha", 1.702)
    return op.Mul(x, op.Sigmoid(x if alpha == 1 else op.Mul(x, alpha)))


def bias_add(op: Composer) -> str:
    """y = x + bias + skip."""
    return op.Add(op.Add(op.input(0), op.input(1)), op.input(2))


def bias_dropout(op: Composer) -> list[str]:
    """y = dropout(x + bias) + residual, and the mask."""
    total = op.Add(op.input(0), op.input(1))
    ratio, mode, seed = op.input(3), op.input(4), op.attribute("seed")
    y, mask = op.several("Dropout", 2, total, ratio, mode, seed=seed)
    return [op.Add(y, op.input(2)) if op.input(2) else y, mask]


def bias_softmax(op: Composer) -> str:
    """y = softmax(x + bias) over the axes from `axis` on, bias being broadcast before them or to the front of x.

    bias with is_inner_broadcast has lengths 1, or no axes, where it is broadcast, so that Add does both.
    """
    x, axis = op.input(0), op.attribute("axis", 1)
    op.attribute("is_inner_broadcast")
    rank = op.rank(x, "by BiasSoftmax")
    if axis % rank != rank - 1:
        raise op.refuse(f"the softmax over one axis, the last, is handled; got axis {axis} of {rank}")
    return op.Softmax(op.Add(x, op.input(1)), axis=-1)


def apply_activation(op: Composer, x: str, name: str, **attributes: float) -> str:
    """An activation of FusedConv or FusedGemm, by its operator's name."""
    known = {"": (), "Relu": (), "Tanh": (), "Sigmoid": (), "Softplus": (), "Softsign": (), "HardSwish": ()} | {
        "LeakyRelu": ("alpha",),
        "Elu": ("alpha",),
        "ThresholdedRelu": ("alpha",),
        "Selu": ("alpha", "gamma"),
        "HardSigmoid": ("alpha", "beta"),
    }
    if name not in known:
        raise op.refuse(f"the activation {name!r} is not handled; {', '.join(filter(None, known))} are")
    unknown = sorted(set(attributes) - set(known[name]))
    if unknown:
        raise op.refuse(f"{name} has no {unknown[0]!r}. Leave that attribute out")
    return getattr(op, name)(x, **attributes) if name else x


def _gelu(op: Composer, x: str) -> str:
    return op.Mul(op.Mul(x, 0.5), op.Add(op.Erf(op.Mul(x, sqrt(0.5))), 1.0))


def tanh_gelu(op: Composer, x: str) -> str:
    """y = x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³)))."""
    cubic = op.Mul(op.Mul(x, op.Mul(x, x)), 0.044715)
    return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(op.Mul(op.Add(x, cubic), sqrt(2 / pi))), 1.0))


def class_loss(op: Composer) -> Sequence[str | None] | None:
    """A loss by class of one row without an axis for it, x (C) and t (), as that of x (1, C) and t (1); else None.

    PyTorch exports such a loss, and onnxruntime does not load it.
    """
    x, t, weights = (op.input(n) for n in range(3))
    given = {name: op.attribute(name) for name in ("reduction", "ignore_index")}
    if op.known.rank(x) != 1:
        return None
    asked = len(op.node.output)
    y, *rest = op.emit(op.node.op_type, [op.Unsqueeze(x, [0]), op.Unsqueeze(t, [0]), weights], given, outputs=asked)
    op.nodes[-1].metadata_props.extend(op.node.metadata_props)
    return [op.Squeeze(y, [0]) if given["reduction"] == "none" else y, *(op.Squeeze(v, [0]) for v in rest)]
