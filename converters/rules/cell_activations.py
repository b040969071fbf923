"""The activation functions of recurrent cells, and their slopes.

Names and defaults are those of RNN, GRU and LSTM. activation_alpha and activation_beta list the constants of the
functions that take one, in order, and skip the others, as onnxruntime reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import Forward

# None: the operator's text and onnxruntime do not name the same default, or name none
ALPHAS = {
    "LeakyRelu": 0.01,
    "HardSigmoid": 0.2,
    "Elu": 1.0,
    "Affine": None,
    "ThresholdedRelu": None,
    "ScaledTanh": None,
}
BETAS = {"HardSigmoid": 0.5, "Affine": None, "ScaledTanh": None}


class Arithmetic:
    """Emits into a builder, with numbers of one float type."""

    def __init__(self, op: Builder, dtype: ir.DataType) -> None:
        self.op = op
        self.dtype = dtype

    def number(self, value: float) -> ir.Value:
        return self.op.constant(np.array(value).astype(self.dtype.numpy()))

    def one_minus(self, x: ir.Value) -> ir.Value:
        return self.op.Sub(self.number(1.0), x)

    def times(self, factor: float, x: ir.Value) -> ir.Value:
        return self.op.Mul(self.number(factor), x)

    def product(self, first: ir.Value, *others: ir.Value) -> ir.Value:
        for other in others:
            first = self.op.Mul(first, other)
        return first

    def total(self, first: ir.Value, *others: ir.Value | None) -> ir.Value:
        for other in others:
            first = first if other is None else self.op.Add(first, other)
        return first


@dataclass(frozen=True)
class Activation:
    """y = f(a), a clipped to [-clip, clip] first where there is a clip."""

    name: str
    alpha: float
    beta: float
    clip: float | None

    def value(self, m: Arithmetic, a: ir.Value) -> ir.Value:
        return _VALUES[self.name](m, self._clipped(m, a), self)

    def slope(self, m: Arithmetic, a: ir.Value) -> ir.Value:
        """dy / da: 0 beyond the clip; at the kink of a function, the slope to its left."""
        slope = _SLOPES[self.name](m, self._clipped(m, a), self)
        if self.clip is None:
            return slope
        return m.op.Where(m.op.Less(m.op.Abs(a), m.number(self.clip)), slope, m.number(0.0))

    def _clipped(self, m: Arithmetic, a: ir.Value) -> ir.Value:
        return a if self.clip is None else m.op.Clip(a, m.number(-self.clip), m.number(self.clip))


def activations(node: Forward, default: tuple[str, ...], directions: int, clip: float | None) -> list[list[Activation]]:
    """The activation functions of each direction. `default`: their names in one direction.

    Errors: UnsupportedAttributeError for an unknown name, for a wrong count, and for a constant that has no agreed
    default and is not given.
    """
    attribute = node.node.attributes.get("activations")
    names = list(default) * directions if attribute is None else list(attribute.as_strings())
    if len(names) != len(default) * directions:
        raise node.refuse("activations", names, f"with {len(default)} names for each of {directions} direction(s)")
    constants = {name: iter(_floats(node, name)) for name in ("activation_alpha", "activation_beta")}
    functions: list[Activation] = []
    for name in names:
        if name not in _VALUES:
            raise node.refuse("activations", name, f"of {', '.join(sorted(_VALUES))}")
        values: list[float] = []
        for which, defaults in (("activation_alpha", ALPHAS), ("activation_beta", BETAS)):
            value = next(constants[which], defaults[name]) if name in defaults else 0.0
            if value is None:
                raise node.refuse(which, None, f"for {name} where it is written out; its default is not agreed on")
            values.append(value)
        functions.append(Activation(name, values[0], values[1], clip))
    count = len(default)
    return [functions[d * count : (d + 1) * count] for d in range(directions)]


def _floats(node: Forward, name: str) -> list[float]:
    return list(node.node.attributes[name].as_floats()) if node.given(name) else []


Emit = Callable[[Arithmetic, ir.Value, Activation], ir.Value]


def _above(m: Arithmetic, a: ir.Value, bound: float, above: ir.Value, below: ir.Value) -> ir.Value:
    return m.op.Where(m.op.Greater(a, m.number(bound)), above, below)


def _tanh_slope(m: Arithmetic, a: ir.Value, _: Activation) -> ir.Value:
    t = m.op.Tanh(a)
    return m.one_minus(m.op.Mul(t, t))


def _sigmoid_slope(m: Arithmetic, a: ir.Value, _: Activation) -> ir.Value:
    s = m.op.Sigmoid(a)
    return m.op.Mul(s, m.one_minus(s))


def _hard_sigmoid(m: Arithmetic, a: ir.Value, f: Activation) -> ir.Value:
    return m.op.Clip(m.op.Add(m.times(f.alpha, a), m.number(f.beta)), m.number(0.0), m.number(1.0))


def _hard_sigmoid_slope(m: Arithmetic, a: ir.Value, f: Activation) -> ir.Value:
    line = m.op.Add(m.times(f.alpha, a), m.number(f.beta))
    inside = m.op.And(m.op.Greater(line, m.number(0.0)), m.op.Less(line, m.number(1.0)))
    return m.op.Where(inside, m.number(f.alpha), m.number(0.0))


def _elu(m: Arithmetic, a: ir.Value, f: Activation) -> ir.Value:
    return m.op.Elu(a, alpha=f.alpha)


def _elu_slope(m: Arithmetic, a: ir.Value, f: Activation) -> ir.Value:
    return _above(m, a, 0.0, m.number(1.0), m.times(f.alpha, m.op.Exp(a)))


def _softsign_slope(m: Arithmetic, a: ir.Value, _: Activation) -> ir.Value:
    root = m.op.Add(m.number(1.0), m.op.Abs(a))
    return m.op.Reciprocal(m.op.Mul(root, root))


def _scaled_tanh_slope(m: Arithmetic, a: ir.Value, f: Activation) -> ir.Value:
    return m.times(f.alpha * f.beta, _tanh_slope(m, m.times(f.beta, a), f))


_VALUES: dict[str, Emit] = {
    "Tanh": lambda m, a, _: m.op.Tanh(a),
    "Sigmoid": lambda m, a, _: m.op.Sigmoid(a),
    "Relu": lambda m, a, _: m.op.Relu(a),
    "LeakyRelu": lambda m, a, f: m.op.LeakyRelu(a, alpha=f.alpha),
    "ThresholdedRelu": lambda m, a, f: _above(m, a, f.alpha, a, m.number(0.0)),
    "Affine": lambda m, a, f: m.op.Add(m.times(f.alpha, a), m.number(f.beta)),
    "ScaledTanh": lambda m, a, f: m.times(f.alpha, m.op.Tanh(m.times(f.beta, a))),
    "HardSigmoid": _hard_sigmoid,
    "Elu": _elu,
    "Softsign": lambda m, a, _: m.op.Softsign(a),
    "Softplus": lambda m, a, _: m.op.Softplus(a),
}
_SLOPES: dict[str, Emit] = {
    "Tanh": _tanh_slope,
    "Sigmoid": _sigmoid_slope,
    "Relu": lambda m, a, _: _above(m, a, 0.0, m.number(1.0), m.number(0.0)),
    "LeakyRelu": lambda m, a, f: _above(m, a, 0.0, m.number(1.0), m.number(f.alpha)),
    "ThresholdedRelu": lambda m, a, f: _above(m, a, f.alpha, m.number(1.0), m.number(0.0)),
    "Affine": lambda m, a, f: m.op.Expand(m.number(f.alpha), m.op.Shape(a)),
    "ScaledTanh": _scaled_tanh_slope,
    "HardSigmoid": _hard_sigmoid_slope,
    "Elu": _elu_slope,
    "Softsign": _softsign_slope,
    "Softplus": lambda m, a, _: m.op.Sigmoid(a),
}
