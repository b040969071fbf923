"""The bodies that make a domain node run: model-local functions, attached and exchanged by `use_kernels`.

A node keeps the form its specification gives it. What executes it is a function of the same domain and name in
the model, which onnxruntime inlines when it creates the session. Exchanging the functions switches the kernels;
the graph stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)

from .errors import InvalidArgumentError, InvalidModelError, KernelError, OnnxBackpropError
from .op import DOMAIN, OPSET_VERSION, Attribute, Attributes, Op
from .registry import BY_NAME
from .schema import attributes_of

NUMPY_DOMAIN = "onnx_backprop.numpy"
CHECK_DOMAIN = "ai.onnx.contrib"
CHECK_OP = "OnnxBackpropCheck"

KERNELS = ("numpy",)
_PLANNED = {"onnx": "bodies in standard ONNX operators", "numba": "native kernels"}

MIN_BODY_OPSET = 18  # the bodies use the forms that operators have from here on
MIN_IR_VERSION = 10  # function overloads

# What an absent optional attribute looks like inside a body: no int64 attribute of the domain can mean this.
ABSENT_INT = -(2**63)
# An absent optional input: the shape-carrying inputs are 1-D, so a 2-D empty tensor is none of them.
ABSENT_INPUT = np.zeros((0, 0), np.int32)


def use_kernels(model: ModelProto | str | Path, kernels: str) -> ModelProto:
    """Return a copy of the model whose domain nodes run on the given kernels.

    kernels: "numpy" runs the float64 references as Python operators; the session needs `register_ops`.
    Errors: InvalidArgumentError for an unknown name, KernelError for a route this version does not have,
    InvalidModelError for a node that its operator's schema refuses (operator, node and reason in the message).
    """
    check_kernels(kernels)
    result = ModelProto()
    result.CopyFrom(model if isinstance(model, ModelProto) else onnx.load(model))
    kept = [f for f in result.functions if f.domain != DOMAIN]
    del result.functions[:]
    result.functions.extend(kept)
    bodies: dict[tuple[str, str], FunctionProto] = {}
    opset = max(_default_opset(result), MIN_BODY_OPSET)
    for node in _domain_nodes(result):
        op = check_node(node)
        present = _present(op, node)
        overload = _overload(op, present)
        node.overload = overload
        bodies.setdefault((op.name, overload), numpy_body(op, present, overload, opset))
    if bodies:
        _require_opset(result)
        result.functions.extend(bodies.values())
        result.ir_version = max(result.ir_version, MIN_IR_VERSION)
        _import(result, DOMAIN, OPSET_VERSION)
    return result


def check_kernels(kernels: str) -> None:
    """Raise unless `kernels` names a route that this version has."""
    if kernels in _PLANNED and kernels not in KERNELS:
        raise KernelError(
            f"kernels {kernels!r} ({_PLANNED[kernels]}) are not part of this version. "
            f"Use {', '.join(map(repr, KERNELS))}"
        )
    if kernels not in KERNELS:
        raise InvalidArgumentError(f"kernels: expected one of {', '.join(map(repr, KERNELS))}, got {kernels!r}")


def check_node(node: NodeProto) -> Op:
    """The operator of a domain node whose attributes and inputs its schema accepts."""
    op = BY_NAME.get(node.op_type)
    if op is None:
        raise InvalidModelError(
            f"no such operator in domain {DOMAIN}; it has {', '.join(BY_NAME)}",
            op_type=node.op_type,
            node=node.name,
        )
    try:
        Attributes(op, attributes_of(node))
        required = sum(not i.optional for i in op.inputs)
        given = [bool(name) for name in node.input]
        if len(given) > len(op.inputs) or len(given) < required or not all(given[:required]):
            names = ", ".join(i.name + ("?" if i.optional else "") for i in op.inputs)
            raise InvalidModelError(f"expected inputs {names}, got {list(node.input)}", op_type=op.name)
    except OnnxBackpropError as e:
        raise InvalidModelError(e.message, op_type=op.name, node=node.name) from e
    return op


def _present(op: Op, node: NodeProto) -> tuple[bool, ...]:
    return tuple(n < len(node.input) and bool(node.input[n]) for n in range(len(op.inputs)))


def _overload(op: Op, present: tuple[bool, ...]) -> str:
    """A function cannot have optional inputs: each pattern of present ones is an overload of its own."""
    absent = [i.name for i, there in zip(op.inputs, present, strict=True) if not there]
    return f"without_{'_'.join(absent)}" if absent else ""


def _domain_nodes(model: ModelProto) -> Iterator[NodeProto]:
    def walk(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
        for node in nodes:
            if node.domain == DOMAIN:
                yield node
            for attribute in node.attribute:
                graphs: list[GraphProto] = [attribute.g, *attribute.graphs]
                for graph in graphs:
                    yield from walk(graph.node)

    yield from walk(model.graph.node)
    for function in model.functions:
        yield from walk(function.node)
        if any(n.domain == DOMAIN for n in function.node):
            _import(function, DOMAIN, OPSET_VERSION)


def _import(target: ModelProto | FunctionProto, domain: str, version: int) -> None:
    if all(o.domain != domain for o in target.opset_import):
        target.opset_import.append(helper.make_opsetid(domain, version))


def _default_opset(model: ModelProto) -> int:
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)


def _require_opset(model: ModelProto) -> None:
    """Onnxruntime inlines a body under the model's own opset, whatever the function imports."""
    version = _default_opset(model)
    if not version:
        _import(model, "", MIN_BODY_OPSET)
    elif version < MIN_BODY_OPSET:
        raise InvalidModelError(
            f"kernel bodies need opset {MIN_BODY_OPSET} or later, got a model of opset {version}. "
            f"Convert it with onnx.version_converter.convert_version(model, {MIN_BODY_OPSET}) first"
        )


def numpy_body(op: Op, present: tuple[bool, ...], overload: str, opset: int) -> FunctionProto:
    """The body of route "numpy": everything becomes a tensor, one Python operator computes in float64.

    Floating-point inputs are cast to float32 and the result back, so that f16 and bf16 are rounded once; of an
    input whose values do not matter only the shape is passed on. The Python operator answers (data, shape,
    message); a non-empty message fails the run in the check node, for a Python exception there would end the
    process.
    """
    nodes: list[NodeProto] = []
    feeds: list[str] = []
    for spec, there in zip(op.inputs, present, strict=True):
        feed = f"input_{spec.name}"
        feeds.append(feed)
        if not there:
            nodes.append(helper.make_node("Constant", [], [feed], value=numpy_helper.from_array(ABSENT_INPUT)))
        elif spec.shape_only:
            nodes.append(helper.make_node("Shape", [spec.name], [feed]))
        elif spec.type_name == "T1":
            nodes.append(helper.make_node("Cast", [spec.name], [feed], to=TensorProto.FLOAT))
        else:
            nodes.append(helper.make_node("Identity", [spec.name], [feed]))
    for attribute in op.attributes:
        if attribute.kind in ("ints", "floats"):
            feeds.append(f"attribute_{attribute.name}")
            constant = helper.make_node("Constant", [], [feeds[-1]])
            constant.attribute.append(_reference(f"value_{attribute.kind}", attribute))
            nodes.append(constant)
    kernel = helper.make_node(op.name, feeds, ["data", "shape", "message"], domain=NUMPY_DOMAIN, name="kernel")
    kernel.attribute.extend(_reference(a.name, a) for a in op.attributes if a.kind in ("int", "string"))
    like = next(i.name for i in op.inputs if i.type_name == "T1" and not i.shape_only)
    nodes += [
        kernel,
        helper.make_node(CHECK_OP, ["shape", "message"], ["checked"], domain=CHECK_DOMAIN, name="check"),
        helper.make_node("Reshape", ["data", "checked"], ["result"], name="result", allowzero=1),
        helper.make_node("CastLike", ["result", like], [op.output]),
    ]
    body = helper.make_function(
        DOMAIN,
        op.name,
        [i.name for i, there in zip(op.inputs, present, strict=True) if there],
        [op.output],
        nodes,
        [
            helper.make_opsetid("", opset),  # the checker wants the model's own
            helper.make_opsetid(NUMPY_DOMAIN, 1),
            helper.make_opsetid(CHECK_DOMAIN, 1),
        ],
        attributes=[a.name for a in op.attributes if a.required],
        attribute_protos=[_default(a) for a in op.attributes if not a.required],
        overload=overload,
    )
    return body


_PROTO_KIND: dict[str, Callable[[str], AttributeProto]] = {
    "int": lambda name: helper.make_attribute(name, ABSENT_INT),
    "string": lambda name: helper.make_attribute(name, ""),
    "ints": lambda name: helper.make_attribute(name, [], attr_type=AttributeProto.INTS),
    "floats": lambda name: helper.make_attribute(name, [], attr_type=AttributeProto.FLOATS),
}


def _default(attribute: Attribute) -> AttributeProto:
    if attribute.default is not None:
        return helper.make_attribute(attribute.name, attribute.default)
    return _PROTO_KIND[attribute.kind](attribute.name)


def _reference(name: str, attribute: Attribute) -> AttributeProto:
    """An attribute of a body's node that takes the value of the function's attribute."""
    proto = _PROTO_KIND[attribute.kind](name)
    result = AttributeProto(name=name, type=proto.type, ref_attr_name=attribute.name)
    return result
