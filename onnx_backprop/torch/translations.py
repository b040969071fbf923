"""Operators that torch's exporter lacks, or writes with another gradient or a smaller range, in ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.torch_metadata import STOP
from onnx_backprop.torch.modules import torch

_OPERATORS = (
    "dropout(Tensor x, float p, bool train) -> Tensor",
    "feature_dropout(Tensor x, float p, bool train) -> Tensor",
    "batch_norm(Tensor x, Tensor? scale, Tensor? bias, Tensor? mean, Tensor? var, bool train, float momentum, "
    "float eps) -> Tensor",
    "stop(Tensor x) -> Tensor",
)


@cache
def translations() -> dict[Any, Callable[..., Any]]:
    """The operators of the library and some of torch's own, each with its translation for `torch.onnx.export`."""
    op: Any = import_module("onnxscript").opset18

    library = torch.library.Library("onnx_backprop", "DEF")
    for schema in _OPERATORS:
        library.define(schema)
        library.impl(schema.partition("(")[0], lambda x, *_: x.clone(), "CompositeExplicitAutograd")
    torch._onnx_backprop_library = library  # it lives as long as its operators are called

    def dropout(x: Any, p: float, train: bool) -> Any:
        ratio = op.Constant(value_float=p)
        mode = (op.Constant(value=ir.tensor(np.array(True))),) if train else ()
        return op.Dropout(x, ratio, *mode)[0]

    def feature_dropout(x: Any, p: float, train: bool) -> Any:
        ones = [1] * (len(x.shape) - 2)
        lengths = op.Concat(op.Shape(x, start=0, end=2), op.Constant(value_ints=ones), axis=0)
        return op.Mul(x, dropout(op.Expand(op.CastLike(op.Constant(value_floats=[1.0]), x), lengths), p, train))

    def batch_norm(x: Any, scale: Any, bias: Any, mean: Any, var: Any, train: bool, momentum: float, eps: float) -> Any:
        def filled(number: float) -> Any:
            if isinstance(x.shape[1], int):
                return op.Constant(value=ir.tensor(np.full(x.shape[1], number, x.dtype.numpy())))
            return op.Expand(op.CastLike(op.Constant(value_floats=[number]), x), op.Shape(x, start=1, end=2))

        scale, bias = filled(1.0) if scale is None else scale, filled(0.0) if bias is None else bias
        if mean is None or var is None:  # statistics of the batch in both modes, and none to renew
            axes = op.Constant(value_ints=[0, *range(2, len(x.shape))])
            places = op.Constant(value_ints=list(range(1, len(x.shape) - 1))) if len(x.shape) > 2 else None
            centred = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
            variance = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1)
            normal = op.Div(centred, op.Sqrt(op.Add(variance, op.CastLike(op.Constant(value_float=eps), x))))
            if places is not None:
                scale, bias = op.Unsqueeze(scale, places), op.Unsqueeze(bias, places)
            return op.Add(op.Mul(normal, scale), bias)
        more = {"epsilon": eps, "momentum": 1 - momentum}
        if train:
            return op.BatchNormalization(x, scale, bias, mean, var, training_mode=1, **more)[0]
        return op.BatchNormalization(x, scale, bias, mean, var, **more)

    def like(number: float, x: Any) -> Any:
        return op.Constant(value=ir.tensor(np.array(number, x.dtype.numpy())))

    def log_sigmoid(x: Any) -> Any:
        """Log(Sigmoid(x)) is -inf from -104 on."""
        return op.Neg(op.Softplus(op.Neg(x)))

    def log_add(x: Any, y: Any, base: float) -> Any:
        """m + log(base^(x - m) + base^(y - m)), m: the maximum, which has no gradient here; that alone of infinities.

        Exp(x) is infinite from 89 on, and a logarithm of its sum rounds large x.
        """
        nil, endless, factor = like(0, x), like(math.inf, x), like(math.log(base), x)
        largest = op.Max(x, y)
        infinite = op.Or(op.Equal(op.Abs(x), endless), op.Equal(op.Abs(y), endless))
        most = stop(op.Where(infinite, nil, largest))
        powers = [op.Exp(op.Mul(op.Sub(op.Where(infinite, nil, v), most), factor)) for v in (x, y)]
        return op.Where(infinite, largest, op.Add(most, op.Div(op.Log(op.Add(*powers)), factor)))

    def log_add_exp(x: Any, y: Any) -> Any:
        return log_add(x, y, math.e)

    def log_add_exp2(x: Any, y: Any) -> Any:
        return log_add(x, y, 2)

    def xlogy(x: Any, y: Any) -> Any:
        """x · log y, whose gradient by x is log y where x is 0 too; both are 0 where y has no logarithm then."""
        y = like(y, x) if isinstance(y, int | float) else y
        nil, one = like(0, x), like(1, x)
        return op.Mul(x, op.Log(op.Where(op.And(op.Equal(x, nil), op.LessOrEqual(y, nil)), one, y)))

    def sinc(x: Any) -> Any:
        """Without the 0/0 in the branch that Where leaves, whose gradient is NaN."""
        at_0, one = op.Equal(x, like(0, x)), like(1, x)
        angle = op.Where(at_0, one, op.Mul(x, like(math.pi, x)))
        return op.Where(at_0, one, op.Div(op.Sin(angle), angle))

    def atan2(y: Any, x: Any) -> Any:
        """By the quotient of the smaller over the larger, so that none is x/0; it has no gradient where both are 0."""
        nil, half = like(0, x), like(math.pi / 2, x)
        steep = op.Greater(op.Abs(y), op.Abs(x))
        larger, smaller = op.Where(steep, y, x), op.Where(steep, x, y)
        at_0 = op.Equal(larger, nil)
        angle = op.Atan(op.Where(at_0, nil, op.Div(smaller, op.Where(at_0, like(1, x), larger))))

        def negative(value: Any) -> Any:  # -0 too, which is not less than 0
            return op.Less(op.Where(op.Equal(value, nil), op.Reciprocal(value), value), nil)

        quarter = op.Where(negative(y), op.Neg(half), half)
        turned = op.Add(angle, op.Where(negative(x), op.Add(quarter, quarter), nil))
        return op.Where(steep, op.Sub(quarter, angle), turned)

    def norm(x: Any, ord: float = 2.0, dim: Any = None, keepdim: bool = False, dtype: int = -1) -> Any:
        """(Σ |x|^p)^(1/p) whose gradient is 0 where it is 0, and by what is 0, as torch's, and not NaN."""
        if dtype not in (-1, None):
            x = op.Cast(x, to=dtype)
            x.dtype = ir.DataType(dtype)
        axes = () if dim in (None, []) else (op.Constant(value_ints=[dim] if isinstance(dim, int) else list(dim)),)
        nil, one = like(0, x), like(1, x)
        at_0 = op.Equal(x, nil)
        if ord == 0:
            return op.ReduceSum(op.Where(at_0, nil, one), *axes, keepdims=keepdim)
        if ord in (1, 2):
            return (op.ReduceL1 if ord == 1 else op.ReduceL2)(x, *axes, keepdims=keepdim)
        if math.isinf(ord):
            return (op.ReduceMax if ord > 0 else op.ReduceMin)(op.Abs(x), *axes, keepdims=keepdim)
        power_of_0 = nil if ord > 0 else like(math.inf, x)
        powers = op.Where(at_0, power_of_0, op.Pow(op.Abs(op.Where(at_0, one, x)), like(ord, x)))
        total = op.ReduceSum(powers, *axes, keepdims=keepdim)
        at_0 = op.Equal(total, power_of_0)
        return op.Where(at_0, nil, op.Pow(op.Where(at_0, one, total), like(1 / ord, x)))

    def stop(x: Any) -> Any:
        y = op.Identity(x)
        y.producer().metadata_props[STOP] = "detach"
        return y

    ops, aten = torch.ops.onnx_backprop, torch.ops.aten
    return {
        ops.dropout.default: dropout,
        ops.feature_dropout.default: feature_dropout,
        ops.batch_norm.default: batch_norm,
        ops.stop.default: stop,
        aten.log_sigmoid.default: log_sigmoid,
        aten.logaddexp.default: log_add_exp,
        aten.logaddexp2.default: log_add_exp2,
        aten.sinc.default: sinc,
        aten.atan2.default: atan2,
        aten.linalg_vector_norm.default: norm,
        aten.xlogy.Tensor: xlogy,
        aten.xlogy.Scalar_Other: xlogy,
        aten.special_xlog1py.default: lambda x, y: xlogy(x, op.Add(y, like(1, y))),
    }
