"""Where rounding cuts: quantisers leave out a Relu or a Clip if the range of integers behind it ends where it does."""

from collections.abc import Callable

import numpy as np
from onnx import NodeProto

from onnx_backprop.converters.quantized.numbers import Array, Range
from onnx_backprop.opset.graphs.facts import KEEPS_SIGN, NOT_NEGATIVE
from onnx_backprop.opset.graphs.walk import attributes_of

_OPERANDS = {"Add": 2, "Div": 2, "Mul": 2}  # of KEEPS_SIGN, how many inputs are numbers; else one, or all
_LIMITS = ((0.0, 6.0), (0.0, 1.0), (-1.0, 1.0))  # of Clip, which quantisers leave to the rounding behind it
_NEAR = 1e-4  # of a limit


def is_positive(node: NodeProto, of: Callable[[str], bool], array: Callable[[str], Array | None]) -> bool:
    """Whether no result of a node is below 0. of: whether a value that it reads is; array: a constant's numbers."""
    if node.domain:
        return False
    operands = node.input if node.op_type == "Concat" else node.input[: _OPERANDS.get(node.op_type, 1)]
    keeping = node in KEEPS_SIGN and all(map(of, operands))
    return node in NOT_NEGATIVE or keeping or _clips(node, array)


def _clips(node: NodeProto, array: Callable[[str], Array | None]) -> bool:
    """Whether a node is a Clip from 0 or more on."""
    if node.op_type != "Clip":
        return False
    given = array(node.input[1]) if len(node.input) > 1 else None
    least = attributes_of(node).get("min") if given is None else float(given.reshape(-1)[0])
    return least is not None and least >= 0


def limits_of(scale: float, zero: int, ints: Range) -> tuple[float, float] | None:
    """What (q - z) · s cuts below 0, or beyond limits that Clip has; None where the ends of the range mean nothing."""
    if scale <= 0:
        return None
    low, high = (ints.least - zero) * scale, (ints.most - zero) * scale
    for least, most in _LIMITS:
        wide = abs((high - low) - (most - least)) <= _NEAR * (most - least)
        if wide and abs(low - least) <= (0.51 * scale if least else 0):
            return least, most
    return (0.0, np.inf) if zero == ints.least else None
