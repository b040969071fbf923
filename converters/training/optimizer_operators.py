"""`Adam`, `Adagrad` and `Momentum` of `ai.onnx.preview.training` as functions in standard operators.

onnx defines these operators without a body, and stock onnxruntime has no kernel for them. A function of the same name
in the model is what it runs instead. The number of tensors that a node updates, and Momentum's mode, choose the
overload.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, defs, helper

from onnx_backprop.converters.prepare.graphs import all_nodes
from onnx_backprop.converters.prepare.upgrade import default_opset
from onnx_backprop.opset.bodies.builder import DOUBLE, Body
from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.opset.functions.use_kernels import MIN_IR_VERSION

TRAINING_DOMAIN = "ai.onnx.preview.training"
MODES = ("standard", "nesterov")


def attach_optimizers(model: ModelProto) -> None:
    """Give the model a function for each optimizer node that it, its sub-graphs or its functions hold.

    Errors: InvalidModelError for a node whose inputs are not an equal number of each kind, or of an unknown mode.
    """
    attached = {(f.domain, f.name, f.overload) for f in model.functions}
    functions: dict[tuple[str, str], FunctionProto] = {}
    for node in all_nodes(model):
        if node.domain != TRAINING_DOMAIN or node.op_type not in _UPDATES:
            continue
        if (node.domain, node.op_type, node.overload) in attached:
            continue
        count, mode = _tensors(node), _mode(node)
        node.overload = f"{mode}_{count}" if mode else f"of_{count}"
        key = node.op_type, node.overload
        if key not in functions:
            functions[key] = _function(node, count, mode, default_opset(model))
    if functions:
        model.functions.extend(functions.values())
        model.ir_version = max(model.ir_version, MIN_IR_VERSION)
        for function in model.functions:
            if any(n.domain == TRAINING_DOMAIN for n in all_nodes(function)) and all(
                o.domain != TRAINING_DOMAIN for o in function.opset_import
            ):
                function.opset_import.append(helper.make_opsetid(TRAINING_DOMAIN, 1))


def _tensors(node: NodeProto) -> int:
    kinds = len(_UPDATES[node.op_type][0])
    given = len(node.input) - 2
    if given < kinds or given % kinds:
        raise InvalidModelError(
            f"expected R, T and {kinds} inputs for every tensor, got {len(node.input)} inputs",
            op_type=node.op_type,
            node=node.name,
        )
    return given // kinds


def _mode(node: NodeProto) -> str:
    if node.op_type != "Momentum":
        return ""
    mode = next((a.s.decode() for a in node.attribute if a.name == "mode"), "")
    if mode not in MODES:
        raise InvalidModelError(
            f"mode: expected {' or '.join(map(repr, MODES))}, got {mode!r}", op_type=node.op_type, node=node.name
        )
    return mode


def _function(node: NodeProto, count: int, mode: str, opset: int) -> FunctionProto:
    inputs, outputs, update = _UPDATES[node.op_type]
    schema = defs.get_schema(node.op_type, 1, TRAINING_DOMAIN)
    body = Body(node.op_type)
    rate, step = (body.Reshape(name, body.ints([])) for name in ("R", "T"))
    optimizer = _Optimizer(body, rate, step, mode)
    made: dict[str, str] = {}
    for n in range(count):
        updated = update(optimizer, *(f"{kind}_{n}" for kind in inputs))
        for kind, value in zip(outputs, updated, strict=True):
            made[f"{kind}_{n}"] = value
    for name, value in made.items():
        body.nodes.append(helper.make_node("Identity", [value], [name]))
    return helper.make_function(
        TRAINING_DOMAIN,
        node.op_type,
        ["R", "T", *(f"{kind}_{n}" for kind in inputs for n in range(count))],
        [f"{kind}_{n}" for kind in outputs for n in range(count)],
        body.nodes,
        [helper.make_opsetid("", opset)],
        attributes=[name for name, a in schema.attributes.items() if a.required],
        attribute_protos=[a.default_value for a in schema.attributes.values() if not a.required],
        overload=node.overload,
    )


class _Optimizer:
    """What the updates of all tensors of one node have in common: R and T, 0-D, and the attributes.

    R and powers of T are worked out in float64, since 1 - beta**T loses most of its digits in float32.
    """

    def __init__(self, body: Body, rate: str, step: str, mode: str) -> None:
        self.body = body
        self.rate = body.Cast(rate, to=DOUBLE)
        self.step = body.Cast(step, to=DOUBLE)
        self.mode = mode
        self._attributes: dict[str, str] = {}
        self._rates: dict[str, str] = {}

    def exact(self, name: str) -> str:
        """An attribute, 0-D, in float64."""
        if name not in self._attributes:
            (value,) = self.body.emit("Constant", [], {})
            reference = AttributeProto(name="value_float", type=AttributeProto.FLOAT, ref_attr_name=name)
            self.body.nodes[-1].attribute.append(reference)
            self._attributes[name] = self.body.Cast(value, to=DOUBLE)
        return self._attributes[name]

    def attribute(self, name: str, like: str) -> str:
        """An attribute, 0-D, of the type of a tensor."""
        return self.body.CastLike(self.exact(name), like)

    def number(self, value: float) -> str:
        """A constant, 0-D, in float64."""
        return self.body.constant(np.array(value, np.float64))

    def rest(self, name: str, like: str) -> str:
        """1 less an attribute, of the type of a tensor."""
        return self.body.CastLike(self.body.Sub(self.number(1), self.exact(name)), like)

    def once(self, name: str, write: Callable[[], str]) -> str:
        """What `write` writes, written for the first tensor only."""
        if name not in self._rates:
            self._rates[name] = write()
        return self._rates[name]

    def started(self) -> str:
        """Whether T > 0."""
        return self.once("started", lambda: self.body.Greater(self.step, self.number(0)))

    def regularized(self, x: str, g: str) -> str:
        """G_regularized = norm_coefficient · X + G."""
        return self.body.Add(self.body.Mul(self.attribute("norm_coefficient", x), x), g)


def _adam(o: _Optimizer, x: str, g: str, v: str, h: str) -> tuple[str, str, str]:
    """V' = α·V + (1 - α)·G; H' = β·H + (1 - β)·G²; X' = (1 - post) · (X - R' · V' / (√H' + ε)).

    R' = R · √(1 - βᵀ) / (1 - αᵀ) for T > 0, else R; G includes norm_coefficient · X.
    """
    b = o.body

    def adjusted() -> str:
        one = o.number(1)
        root = b.Sqrt(b.Sub(one, b.Pow(o.exact("beta"), o.step)))
        corrected = b.Div(b.Mul(o.rate, root), b.Sub(one, b.Pow(o.exact("alpha"), o.step)))
        return b.Where(o.started(), corrected, o.rate)

    g = o.regularized(x, g)
    v_new = b.Add(b.Mul(o.attribute("alpha", x), v), b.Mul(o.rest("alpha", x), g))
    h_new = b.Add(b.Mul(o.attribute("beta", x), h), b.Mul(o.rest("beta", x), b.Mul(g, g)))
    rate = b.CastLike(o.once("adjusted", adjusted), x)
    step = b.Div(b.Mul(rate, v_new), b.Add(b.Sqrt(h_new), o.attribute("epsilon", x)))
    return b.Mul(o.rest("norm_coefficient_post", x), b.Sub(x, step)), v_new, h_new


def _adagrad(o: _Optimizer, x: str, g: str, h: str) -> tuple[str, str]:
    """H' = H + G²; X' = X - R / (1 + T · decay_factor) · G / (√H' + ε); G includes norm_coefficient · X."""
    b = o.body

    def decayed() -> str:
        return b.Div(o.rate, b.Add(o.number(1), b.Mul(o.step, o.exact("decay_factor"))))

    g = o.regularized(x, g)
    h_new = b.Add(h, b.Mul(g, g))
    rate = b.CastLike(o.once("decayed", decayed), x)
    return b.Sub(x, b.Div(b.Mul(rate, g), b.Add(b.Sqrt(h_new), o.attribute("epsilon", x)))), h_new


def _momentum(o: _Optimizer, x: str, g: str, v: str) -> tuple[str, str]:
    """V' = α·V + β'·G, β' = β for T > 0 else 1; X' = X - R·V', or with Nesterov X - R·(G + α·V').

    G includes norm_coefficient · X.
    """
    b = o.body
    g = o.regularized(x, g)
    scale = o.once("scale", lambda: b.Where(o.started(), o.exact("beta"), o.number(1)))
    alpha = o.attribute("alpha", x)
    v_new = b.Add(b.Mul(alpha, v), b.Mul(b.CastLike(scale, x), g))
    direction = b.Add(g, b.Mul(alpha, v_new)) if o.mode == "nesterov" else v_new
    return b.Sub(x, b.Mul(b.CastLike(o.rate, x), direction)), v_new


# operator -> the kinds of its inputs and of its outputs, each for all tensors in turn, and the update of one tensor
_UPDATES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[..., tuple[str, ...]]]] = {
    "Adam": (("X", "G", "V", "H"), ("X_new", "V_new", "H_new"), _adam),
    "Adagrad": (("X", "G", "H"), ("X_new", "H_new"), _adagrad),
    "Momentum": (("X", "G", "V"), ("X_new", "V_new"), _momentum),
}
