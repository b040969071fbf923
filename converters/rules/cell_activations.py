"""The activation functions of recurrent cells, and their slopes.

Names and defaults are those of RNN, GRU and LSTM. activation_alpha and activation_beta list the constants of the
functions that take one, in order, and skip the others, as onnxruntime reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from onnx_backprop.converters.reverse.registry import RULES, Builder, Forward, served_versions

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


@dataclass(frozen=True)
class CellActivation:
    """y = f(a), a clipped to [-clip, clip] first where there is a clip."""

    name: str
    alpha: float
    beta: float
    clip: float | None

    def value(self, op: Builder, a: ir.Value) -> ir.Value:
        return _VALUES[self.name](op, self._clipped(op, a), self)

    def slope(self, op: Builder, a: ir.Value) -> ir.Value:
        """dy / da: 0 beyond the clip; at the kink of a function, the slope to its left."""
        emit = _SLOPES.get(self.name, lambda op, a, f: _rule_slope(op, _VALUES[f.name](op, a, f)))
        slope = emit(op, self._clipped(op, a), self)
        return slope if self.clip is None else op.Where(op.Less(op.Abs(a), self.clip), slope, 0)

    def _clipped(self, op: Builder, a: ir.Value) -> ir.Value:
        return a if self.clip is None else op.Clip(a, -self.clip, self.clip)


def activations(
    node: Forward, default: tuple[str, ...], directions: int, clip: float | None
) -> list[list[CellActivation]]:
    """The activation functions of each direction. `default`: their names in one direction.

    Errors: UnsupportedAttributeError for an unknown name, for a wrong count, and for a constant that has no agreed
    default and is not given.
    """
    attribute = node.node.attributes.get("activations")
    names = list(default) * directions if attribute is None else list(attribute.as_strings())
    if len(names) != len(default) * directions:
        raise node.refuse("activations", names, f"with {len(default)} names for each of {directions} direction(s)")
    constants = {name: iter(_floats(node, name)) for name in ("activation_alpha", "activation_beta")}
    functions: list[CellActivation] = []
    for name in names:
        if name not in _VALUES:
            raise node.refuse("activations", name, f"of {', '.join(sorted(_VALUES))}")
        values: list[float] = []
        for which, defaults in (("activation_alpha", ALPHAS), ("activation_beta", BETAS)):
            value = next(constants[which], defaults[name]) if name in defaults else 0.0
            if value is None:
                raise node.refuse(which, None, f"for {name} where it is written out; its default is not agreed on")
            values.append(value)
        functions.append(CellActivation(name, values[0], values[1], clip))
    count = len(default)
    return [functions[d * count : (d + 1) * count] for d in range(directions)]


def _floats(node: Forward, name: str) -> list[float]:
    return list(node.node.attributes[name].as_floats()) if node.given(name) else []


Emit = Callable[[Builder, ir.Value, CellActivation], ir.Value]


def _rule_slope(op: Builder, y: ir.Value) -> ir.Value:
    """The slope of the operator that has put y out, by its gradient rule."""
    node = y.producer()
    assert node is not None
    version = served_versions(node.op_type)[-1]
    slope = RULES["", node.op_type, version].function(op, Forward(node, set(), version), op.scalar(1, y))
    assert isinstance(slope, ir.Value)
    return slope


def _line(op: Builder, a: ir.Value, f: CellActivation) -> ir.Value:
    return op.Add(op.Mul(f.alpha, a), f.beta)


_VALUES: dict[str, Emit] = {
    "Tanh": lambda op, a, _: op.Tanh(a),
    "Sigmoid": lambda op, a, _: op.Sigmoid(a),
    "Relu": lambda op, a, _: op.LeakyRelu(a, alpha=0.0),
    "LeakyRelu": lambda op, a, f: op.LeakyRelu(a, alpha=f.alpha),
    "ThresholdedRelu": lambda op, a, f: op.ThresholdedRelu(a, alpha=f.alpha),
    "Affine": _line,
    "ScaledTanh": lambda op, a, f: op.Mul(f.alpha, op.Tanh(op.Mul(f.beta, a))),
    "HardSigmoid": lambda op, a, f: op.HardSigmoid(a, alpha=f.alpha, beta=f.beta),
    "Elu": lambda op, a, f: op.Elu(a, alpha=f.alpha),
    "Softsign": lambda op, a, _: op.Softsign(a),
    "Softplus": lambda op, a, _: op.Softplus(a),
}
_SLOPES: dict[str, Emit] = {
    "Affine": lambda op, a, f: op.Expand(op.scalar(f.alpha, a), op.Shape(a)),
    "ScaledTanh": lambda op, a, f: op.Mul(f.alpha * f.beta, _rule_slope(op, op.Tanh(op.Mul(f.beta, a)))),
}
