"""The bodies that make a domain node run: model-local functions, attached and exchanged by `use_kernels`.

A node keeps the form its specification gives it. What executes it is a function of the same domain and name in
the model, which onnxruntime inlines when it creates the session. Exchanging the functions switches the kernels;
the graph stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path

from onnx import FunctionProto, ModelProto, NodeProto, TensorProto

from onnx_backprop.opset.core.errors import InvalidArgumentError, InvalidModelError, OnnxBackpropError
from onnx_backprop.opset.core.op import DOMAIN, OPSET_VERSION, Arg, Attributes, Op
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.core.schema import attributes_of
from onnx_backprop.opset.functions.declared import OPERATORS, PLANS, operator
from onnx_backprop.opset.functions.native import native_body
from onnx_backprop.opset.functions.numpy import NUMBA_DOMAIN, NUMPY_DOMAIN, python_body
from onnx_backprop.opset.functions.onnx import standard_body
from onnx_backprop.opset.functions.overloads import refuse_older_runtimes
from onnx_backprop.opset.functions.protos import named_outputs, present_inputs
from onnx_backprop.opset.functions.scope import custom_nodes, domain_nodes, infer_missing
from onnx_backprop.opset.graphs.edit import add_import, assign, copied
from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.graphs.scope import Scope
from onnx_backprop.opset.graphs.walk import DEFAULT_DOMAINS
from onnx_backprop.opset.operators.registry import BY_NAME

KERNELS = ("onnx", "numpy", "native", "numba")  # routes
PYTHON_KERNELS = ("numpy", "numba")  # routes of Python operators
DEFAULT_KERNELS = "onnx"  # needs nothing but onnxruntime

MIN_BODY_OPSET = 18  # the bodies use the forms that operators have from here on
MIN_IR_VERSION = 10  # function overloads


def use_kernels(model: ModelProto | ir.Model | str | Path, kernels: str) -> ModelProto:
    """A copy of the model whose domain nodes run on the given kernels.

    kernels: "onnx" attaches bodies in standard ONNX operators, which need only onnxruntime; "native" uses kernels
    compiled by LLVM; "numpy" the float64 references as Python operators; "numba" plain loops compiled by Numba, and the
    reference for an operator without one. The session needs `register_ops` for the last three.
    Errors: InvalidArgumentError for an unknown name, InvalidModelError for a node that its operator's schema refuses
    (operator, node and reason in the message), ShapeError for shapes that contradict each other.
    """
    result = copied(load(model, mapped=isinstance(model, ModelProto)))
    attach_kernels(result, kernels)
    return result


def attach_kernels(result: ModelProto, kernels: str) -> None:
    """`use_kernels` of a model that is sound, in place."""
    check_kernels(kernels)
    assign(result.functions, [f for f in result.functions if not _attached(f.domain, f.name, kernels)])
    for node in custom_nodes(result):
        node.overload = ""
    nodes = list(domain_nodes(result))
    if kernels == "onnx" and infer_missing(result, nodes):
        nodes = list(domain_nodes(result))
    bodies = _Bodies(_BUILDERS[kernels], max(_default_opset(result), MIN_BODY_OPSET))
    for node, scope in nodes:
        if not _attached(node.domain, node.op_type, kernels):
            continue
        op = check_node(node)
        try:
            node.overload = bodies.overload(op, node, scope)
        except OnnxBackpropError as e:
            raise type(e)(e.message, op_type=op.name, node=node.name) from e
    if kernels == "onnx":
        _leave_out_unstated(bodies.functions, result)
    if bodies.functions:
        _require_opset(result)
        for owner in (*result.functions, result):
            nodes = owner.graph.node if isinstance(owner, ModelProto) else owner.node
            for op in filter(None, map(operator, nodes)):
                add_import(owner, op.domain, op.version)
        result.functions.extend(bodies.functions)
        result.ir_version = max(result.ir_version, MIN_IR_VERSION)
        add_import(result, DOMAIN, OPSET_VERSION)
    refuse_older_runtimes(result)


def _attached(domain: str, name: str, kernels: str) -> bool:
    """Whether nodes of an operator run on what is attached here.

    One of another domain without a body in standard operators does not on "onnx": what runs it there, a function of
    the model or a library of its owner, is left to.
    """
    declared = OPERATORS.get((domain, name))
    return domain == DOMAIN or (declared is not None and (kernels != "onnx" or declared.body is not None))


def _leave_out_unstated(functions: Sequence[FunctionProto], model: ModelProto) -> None:
    """Take out of interfaces the optional attributes that no node states: bodies in standard operators ask for none."""
    stated = {(node.domain, node.op_type, a.name) for node in custom_nodes(model) for a in node.attribute}
    for function in functions:
        kept = [a for a in function.attribute_proto if (function.domain, function.name, a.name) in stated]
        assign(function.attribute_proto, kept)


class _Bodies:
    """The bodies of one model, each once; nodes that need different ones call different overloads."""

    def __init__(self, build: Callable[[Op, NodeProto, Scope, int], FunctionProto], opset: int) -> None:
        self.functions: list[FunctionProto] = []
        self._build = build
        self._opset = opset
        self._overloads: dict[bytes, str] = {}
        self._alike: dict[Hashable, str] = {}  # nodes of which the same is known
        self._counts: dict[str, int] = {}

    def overload(self, op: Op, node: NodeProto, scope: Scope) -> str:
        """The overload that a node has to call."""
        stated = tuple(a.SerializeToString(deterministic=True) for a in node.attribute)
        types = tuple(map(scope.element_type, node.input)), tuple(map(scope.states_type, node.output))
        alike = op.key, stated, tuple(_args(op, node, scope)), types, tuple(map(bool, node.output))
        if alike not in self._alike:
            self._alike[alike] = self._overload(op, node, scope)
        return self._alike[alike]

    def _overload(self, op: Op, node: NodeProto, scope: Scope) -> str:
        function = self._build(op, node, scope, self._opset)
        key = function.SerializeToString(deterministic=True)
        if key not in self._overloads:
            if not function.overload:
                count = self._counts[op.key] = self._counts.get(op.key, 0) + 1
                function.overload = f"variant_{count}" if count > 1 else ""
            self._overloads[key] = function.overload
            self.functions.append(function)
        return self._overloads[key]


def _python(domain: str, op: Op, node: NodeProto, _scope: Scope, opset: int) -> FunctionProto:
    return python_body(domain, op, present_inputs(op, node), opset, named_outputs(op, node))


def _standard(op: Op, node: NodeProto, scope: Scope, opset: int) -> FunctionProto:
    tensors = [name for i, name in zip(op.inputs, node.input, strict=False) if name and i.type_name == "T1"]
    single = all(scope.element_type(name) == TensorProto.FLOAT for name in tensors)
    attributes = Attributes(op, attributes_of(node))
    return standard_body(op, attributes, _args(op, node, scope), opset, named_outputs(op, node), single=single)


def _args(op: Op, node: NodeProto, scope: Scope) -> list[Arg | None]:
    """What is known about each input of an operator's node; None for an absent one."""
    names = [*node.input, *[""] * (len(op.inputs) - len(node.input))]
    return [
        Arg.of_array(spec, scope.dims(name), None if spec.tensor else scope.constant(name)) if name else None
        for spec, name in zip(op.inputs, names, strict=True)
    ]


def _native(op: Op, node: NodeProto, scope: Scope, opset: int) -> FunctionProto:
    if op.domain != DOMAIN and op.key not in PLANS:
        return _python(NUMPY_DOMAIN, op, node, scope, opset)
    typed = all(scope.states_type(name) for name in node.output if name)
    return native_body(op, present_inputs(op, node), opset, named_outputs(op, node), typed=typed)


_BUILDERS = {
    "native": _native,
    "numpy": partial(_python, NUMPY_DOMAIN),
    "numba": partial(_python, NUMBA_DOMAIN),
    "onnx": _standard,
}


def check_kernels(kernels: str) -> None:
    """Raise unless `kernels` names a route that this version has."""
    if kernels not in KERNELS:
        raise InvalidArgumentError(f"expected one of {', '.join(map(repr, KERNELS))}, got {kernels!r}", "kernels")


def check_node(node: NodeProto) -> Op:
    """The operator of a domain node whose attributes and inputs its schema accepts."""
    op = operator(node)
    if op is None:
        raise InvalidModelError(
            f"no such operator in domain {DOMAIN}; it has {', '.join(BY_NAME)}", op_type=node.op_type, node=node.name
        )
    try:
        Attributes(op, attributes_of(node))
        op.require_inputs([bool(name) for name in node.input], list(node.input))
    except OnnxBackpropError as e:
        raise InvalidModelError(e.message, op_type=op.name, node=node.name) from e
    return op


def _default_opset(model: ModelProto) -> int:
    return next((o.version for o in model.opset_import if o.domain in DEFAULT_DOMAINS), 0)


def _require_opset(model: ModelProto) -> None:
    """Onnxruntime inlines a body under the model's own opset, whatever the function imports."""
    version = _default_opset(model)
    if not version:
        add_import(model, "", MIN_BODY_OPSET)
    elif version < MIN_BODY_OPSET:
        raise InvalidModelError(
            f"kernel bodies need opset {MIN_BODY_OPSET} or later, got a model of opset {version}. "
            f"Convert it with onnx.version_converter.convert_version(model, {MIN_BODY_OPSET}) first"
        )
