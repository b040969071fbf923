"""The products of all factors but one, without a division by a factor of 0."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.rules.common import positions

Combine = Callable[[str, ir.Value], ir.Value]  # "mul", "add" or "min" of the elements of each group
Spread = Callable[[ir.Value], ir.Value]  # the value of its group for each element
_APART = 3  # zeros of a group that stay factors, so that derivatives by them exist
_NOWHERE = np.iinfo(np.int64).max


def product_and_others(op: Builder, x: ir.Value, combine: Combine, spread: Spread) -> tuple[ir.Value, ir.Value]:
    """Π_j x_j of each group, and for each element Π_{j ≠ i} x_j of its group.

    The first 0 of a group, x_k, is set apart: with u = x but for u_k = 1, Π x = x_k Π u, and Π_{j ≠ i} x_j =
    x_k Π_{j ≠ i} u_j, or Π_{j ≠ k} u_j for i = k; so is the first 0 of u. What is left is divided: Π x over x_i, or 0
    beside another 0. The first three derivatives of Π x are exact, and all where a group has at most three zeros.
    """
    return _apart(op, x, combine, spread, _APART)


def _apart(op: Builder, x: ir.Value, combine: Combine, spread: Spread, zeros: int) -> tuple[ir.Value, ir.Value]:
    is_zero = op.Equal(x, 0)
    if not zeros:
        ones, rest = op.Cast(is_zero, to=element_type(x)), op.Where(is_zero, 1, x)
        product, count = combine("mul", rest), combine("add", ones)
        others = op.Where(op.Greater(op.Sub(spread(count), ones), 0), 0, op.Div(spread(product), rest))
        return op.Where(op.Greater(count, 0), 0, product), others
    place = positions(op, x)
    first = op.Equal(place, spread(combine("min", op.Where(is_zero, place, _NOWHERE))))
    is_first = op.Cast(first, to=element_type(x))
    zero = op.Add(combine("add", op.Where(first, x, 0)), op.Sub(1, combine("add", is_first)))  # 1 of a group without
    product, others = _apart(op, op.Where(first, 1, x), combine, spread, zeros - 1)
    return op.Mul(zero, product), op.Mul(others, op.Where(first, 1, spread(zero)))
