"""Matrix products and convolutions with what was fused into them."""

from onnx_backprop.converters.prepare.fused.activations import apply_activation
from onnx_backprop.converters.prepare.fused.composer import Composer


def fused_mat_mul(op: Composer) -> str:
    """y = α · a'·b', a' and b' being transposed as trans says, their batch axes moved as transBatch says."""
    factors = [
        _transposed(op, op.input(n), bool(op.attribute(f"trans{x}", 0)), bool(op.attribute(f"transBatch{x}", 0)))
        for n, x in enumerate("AB")
    ]
    y, alpha = op.MatMul(*factors), op.attribute("alpha", 1.0)
    return y if alpha == 1 else op.Mul(y, alpha)


def fused_gemm(op: Composer) -> str:
    """y = activation(α · a'·b' + β · c)."""
    names = ("alpha", "beta", "transA", "transB")
    given = {name: op.attribute(name) for name in names}
    y = op.Gemm(op.input(0), op.input(1), op.input(2), **given)
    parameters = {n: op.attribute(f"activation_{n}") for n in ("alpha", "beta", "gamma")}
    stated = {n: v for n, v in parameters.items() if v is not None}
    return apply_activation(op, y, op.attribute("activation", ""), **stated)


def fused_conv(op: Composer) -> str:
    """y = activation(conv(x, w) + b + z)."""
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    given = {name: op.attribute(name) for name in names}
    y = op.Conv(op.input(0), op.input(1), op.input(2), **given)
    y = op.Add(y, op.input(3)) if op.input(3) else y
    activation, numbers = op.attribute("activation", ""), list(op.attribute("activation_params", []))
    if activation == "Clip" and len(numbers) == 2:
        return op.Clip(y, *(op.number(n, y) for n in numbers))
    order = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta")}.get(activation, ())
    if len(numbers) != len(order):
        raise op.refuse(f"{activation} takes {len(order)} activation_params, got {len(numbers)}")
    return apply_activation(op, y, activation, **dict(zip(order, numbers, strict=True)))


def _transposed(op: Composer, x: str, last: bool, batch: bool) -> str:
    """The last two axes swapped; with `batch` the first axis moved before the last first.

    Vectors stay as they are.
    """
    if not last and not batch:
        return x
    rank = op.rank(x, "to be transposed")
    order = list(range(rank))
    if batch and rank > 2:
        order = [*order[1:-1], 0, rank - 1]
    if last and rank > 1:
        order[-2:] = reversed(order[-2:])
    return op.Transpose(x, perm=order) if order != list(range(rank)) else x
