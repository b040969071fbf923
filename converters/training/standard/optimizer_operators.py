"""`Adam`, `Adagrad` and `Momentum` of `ai.onnx.preview.training` as functions in standard operators.

onnx defines these operators without a body, and stock onnxruntime has no kernel for them. A function of the same name
in the model is what it runs instead. The number of tensors that a node updates, and Momentum's mode, choose the
overload.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, defs, helper

from onnx_backprop.converters.prepare.upgrade import default_opset
from onnx_backprop.converters.training.update.optimizer_function import Update
from onnx_backprop.opset.bodies.builder import DOUBLE, Body
from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.opset.functions.use_kernels import MIN_IR_VERSION
from onnx_backprop.opset.graphs.edit import add_import
from onnx_backprop.opset.graphs.walk import all_nodes

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
            if any(n.domain == TRAINING_DOMAIN for n in all_nodes(function)):
                add_import(function, TRAINING_DOMAIN)


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
    rate, step = (body.Cast(body.Reshape(name, body.ints([])), to=DOUBLE) for name in ("R", "T"))
    optimizer = _Attributes(body, rate, step, mode)
    results: dict[str, str] = {}
    for n in range(count):
        tensors = [f"{kind}_{n}" for kind in inputs]
        optimizer.of_type(n, partial(_cast_like, body, tensors[0]))
        for kind, value in zip(outputs, update(optimizer, *tensors), strict=True):
            results[f"{kind}_{n}"] = value
    for name, value in results.items():
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


def _cast_like(body: Body, tensor: str, value: str) -> str:
    return body.CastLike(value, tensor)


class _Attributes(Update):
    """An update whose numbers are attributes of the node."""

    def __init__(self, body: Body, rate: str, step: str, mode: str) -> None:
        super().__init__(body, rate, step, lambda name: self.once(f"attribute {name}", lambda: self._attribute(name)))
        self.mode = mode
        self.decay = "norm_coefficient"

    def _attribute(self, name: str) -> str:
        (value,) = self.exact.emit("Constant", [], {})
        reference = AttributeProto(name="value_float", type=AttributeProto.FLOAT, ref_attr_name=name)
        self.exact.nodes[-1].attribute.append(reference)
        return self.exact.Cast(value, to=DOUBLE)

    def started(self) -> str:
        """Whether T > 0."""
        zero = self.exact.constant(np.array(0, np.float64))
        return self.once("started", lambda: self.exact.Greater(self.exact_step, zero))


def _adam(u: _Attributes, x: str, g: str, v: str, h: str) -> tuple[str, str, str]:
    """V' = α·V + (1 - α)·G; H' = β·H + (1 - β)·G²; X' = (1 - post) · (X - R' · V' / (√H' + ε)).

    R' = R · √(1 - βᵀ) / (1 - αᵀ) for T > 0, else R; G includes norm_coefficient · X.
    """

    def adjusted() -> str:
        b = u.exact
        root = b.Mul(u.exact_rate, b.Sqrt(u.one_less_power("beta")))
        return b.Where(u.started(), b.Div(root, u.one_less_power("alpha")), u.exact_rate)

    g = u.decayed(x, g)
    v_new = u.Add(u.Mul(u.number("alpha"), v), u.Mul(u.rest("alpha"), g))
    h_new = u.Add(u.Mul(u.number("beta"), h), u.Mul(u.rest("beta"), u.Mul(g, g)))
    step = u.Div(u.Mul(u.scalar("adjusted", adjusted), v_new), u.Add(u.Sqrt(h_new), u.number("epsilon")))
    return u.Mul(u.rest("norm_coefficient_post"), u.Sub(x, step)), v_new, h_new


def _adagrad(u: _Attributes, x: str, g: str, h: str) -> tuple[str, str]:
    """H' = H + G²; X' = X - R / (1 + T · decay_factor) · G / (√H' + ε); G includes norm_coefficient · X."""

    def decayed() -> str:
        b = u.exact
        return b.Div(u.exact_rate, b.Add(u.exact_one, b.Mul(u.exact_step, u.exact_number("decay_factor"))))

    g = u.decayed(x, g)
    h_new = u.Add(h, u.Mul(g, g))
    rate = u.scalar("decayed", decayed)
    return u.Sub(x, u.Div(u.Mul(rate, g), u.Add(u.Sqrt(h_new), u.number("epsilon")))), h_new


def _momentum(u: _Attributes, x: str, g: str, v: str) -> tuple[str, str]:
    """V' = α·V + β'·G, β' = β for T > 0 else 1; X' = X - R·V', or with Nesterov X - R·(G + α·V').

    G includes norm_coefficient · X.
    """
    g, alpha = u.decayed(x, g), u.number("alpha")
    scale = u.scalar("scale", lambda: u.exact.Where(u.started(), u.exact_number("beta"), u.exact_one))
    v_new = u.Add(u.Mul(alpha, v), u.Mul(scale, g))
    direction = u.Add(g, u.Mul(alpha, v_new)) if u.mode == "nesterov" else v_new
    return u.Sub(x, u.Mul(u.rate, direction)), v_new


# operator -> the kinds of its inputs and of its outputs, each for all tensors in turn, and the update of one tensor
_UPDATES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[..., tuple[str, ...]]]] = {
    "Adam": (("X", "G", "V", "H"), ("X_new", "V_new", "H_new"), _adam),
    "Adagrad": (("X", "G", "H"), ("X_new", "H_new"), _adagrad),
    "Momentum": (("X", "G", "V"), ("X_new", "V_new"), _momentum),
}
