"""Operators of other domains, as packages declare them: they get schemas, bodies and kernels as ours do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from onnx import NodeProto

from onnx_backprop.opset.core.errors import InvalidArgumentError, RegistrationError
from onnx_backprop.opset.core.op import DOMAIN, AttributeKind, Op, TypeName
from onnx_backprop.opset.core.schema import register
from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.operators.registry import BY_NAME

OPERATORS: dict[tuple[str, str], Op] = {}  # by domain and name, of other domains than ours
PLANS: dict[str, Callable[..., Any]] = {}  # native kernels, by keys; operators without one run their references


def is_declared(domain: str, name: str) -> bool:
    """Whether an operator is one of ours, or was declared as they are."""
    return domain == DOMAIN or (domain, name) in OPERATORS


def operator(node: NodeProto | ir.Node) -> Op | None:
    """What a node calls, of our domain or declared; None for another, and for a name that our domain does not have."""
    return BY_NAME.get(node.op_type) if node.domain == DOMAIN else OPERATORS.get((node.domain, node.op_type))


def declare(op: Op) -> None:
    """Make an operator of another domain known; RegistrationError for a second one of its name.

    InvalidArgumentError for an attribute, an input or an output of a kind that there is not.
    """
    if (op.domain, op.name) in OPERATORS:
        raise RegistrationError(f"a second declaration of {op.domain}::{op.name}", op_type=op.name)
    kinds = [(f"Attribute {a.name!r}: kind", a.kind, get_args(AttributeKind)) for a in op.attributes]
    kinds += [
        (f"{type(v).__name__} {v.name!r}: type_name", v.type_name, get_args(TypeName))
        for v in (*op.inputs, *op.outputs)
    ]
    for what, given, known in kinds:
        if given not in known:
            raise InvalidArgumentError(f"{what}: expected one of {', '.join(known)}, got {given!r}", "operator")
    register([op])
    OPERATORS[op.domain, op.name] = op
