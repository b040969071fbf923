"""The table of gradient rules: `@gradient("Relu", versions=(14,))` above a function is all it takes to add one.

A rule is `rule(op, node, dy) -> one value or None per forward input`; those at the end may be left out, and for one
input the value alone will do. It states the versions of the operator it serves, as `OpSchema.since_version`; a version
nobody looked at has no rule, so a changed operator is refused and never differentiated by an outdated formula. Where a
schema says word for word what that of an earlier version says, but for types, the operator is no changed one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import onnx_ir as ir
from onnx import defs

from onnx_backprop.converters.prepare.exporters.detached import is_stop
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import Forward
from onnx_backprop.opset.core.errors import InvalidModelError, RegistrationError
from onnx_backprop.opset.extensions import load_extensions

Grads = ir.Value | Sequence[ir.Value | None]
RuleFunction = Callable[[Builder, Forward, Any], Grads]  # Any: dy, or with all_outputs a list of them
Key = tuple[str, str, int]  # domain, operator, since_version


@dataclass(frozen=True)
class Rule:
    """One gradient rule, as `gradient` registered it."""

    function: RuleFunction
    all_outputs: bool = False
    broadcasts: bool = False
    serves: Callable[[ir.Node], bool] | None = None


ANY_VERSION = 0  # of a rule for an operator that has no schema
RULES: dict[Key, Rule] = {}
FLOWING_INPUTS: dict[tuple[str, str], frozenset[int]] = {}  # (domain, operator) -> inputs that can have a gradient
ZERO_INPUTS: dict[tuple[str, str], frozenset[int]] = {}  # the same -> other inputs, by which the derivative is 0


class Stop(NamedTuple):
    """Why no gradient flows through a node. zero: its derivative is 0; otherwise there is none, or none is known.

    refused: to pass over it would leave a part of the gradient out, so that the node may not lie on a way at all.
    """

    reason: str
    zero: bool = True
    refused: bool = False


_STOPPED = Stop("it is marked as a stop")
NO_GRADIENT: dict[tuple[str, str], Stop] = {}  # by domain and operator


def gradient(
    op_type: str,
    *,
    versions: Sequence[int],
    domain: str = "",
    all_outputs: bool = False,
    broadcasts: bool = False,
    inputs: Sequence[int] | None = None,
    serves: Callable[[ir.Node], bool] | None = None,
) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function as the gradient rule of an operator, for the versions named.

    `all_outputs`: the rule takes a list with one gradient or None per output, not just the first's. `broadcasts`: its
    gradients have the shape of the output, and are summed over the axes that each input was broadcast along.
    `inputs`: the indices of the inputs that gradients flow to, where a float input (as Resize's scales) gets none
    whatever it is. `serves`: the nodes that the rule is
    for, where the others have a function body to be differentiated through.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for version in versions:
            key = (domain, op_type, version)
            if key in RULES:
                raise RegistrationError(f"second gradient rule for {key}", op_type=op_type)
            if (domain, op_type) in NO_GRADIENT:
                raise RegistrationError("a gradient rule for an operator listed as without gradient", op_type=op_type)
            RULES[key] = Rule(function, all_outputs, broadcasts, serves)
        if inputs is not None:
            flows(op_type, domain, inputs)
        return function

    return register


def flows(op_type: str, domain: str, inputs: Sequence[int], zero: Sequence[int] = ()) -> None:
    """State the inputs that gradients flow to; a node reached through another alone is not on a path.

    `zero`: others, by which the derivative is 0; by the rest it is not known.
    """
    FLOWING_INPUTS[domain, op_type], ZERO_INPUTS[domain, op_type] = frozenset(inputs), frozenset(zero)


def no_gradient(reason: str, *op_types: str, domain: str = "", zero: bool = True, refused: bool = False) -> None:
    """State that no gradient flows through these operators, and why; see `Stop`."""
    for op_type in op_types:
        if (domain, op_type) in NO_GRADIENT or any(k[:2] == (domain, op_type) for k in RULES):
            raise RegistrationError("listed as without gradient twice, or beside a rule", op_type=op_type)
        NO_GRADIENT[domain, op_type] = Stop(reason, zero, refused)


def version_of(node: ir.Node, opsets: dict[str, int]) -> int | None:
    """The since_version of a node's operator under the model's opset imports; None for an unknown operator."""
    opset = opsets.get(node.domain)
    if opset is None:
        raise InvalidModelError(f"the model imports no opset of domain {node.domain!r}", op_type=node.op_type)
    try:
        return defs.get_schema(node.op_type, opset, node.domain).since_version
    except defs.SchemaError:
        return None


def find(node: ir.Node, opsets: dict[str, int]) -> Rule | None:
    """The rule that serves a node, or None."""
    version = version_of(node, opsets) or opsets[node.domain]  # of a domain without schemas, what the model imports
    rule = RULES.get((node.domain, node.op_type, version), RULES.get((node.domain, node.op_type, ANY_VERSION)))
    rule = rule or _rule_of_equal(node.domain, node.op_type, version)
    return None if rule is None or (rule.serves is not None and not rule.serves(node)) else rule


def _rule_of_equal(domain: str, op_type: str, version: int) -> Rule | None:
    """The rule of the newest earlier version, where this one differs from it in the types that it takes alone."""
    earlier = [n for n in served_versions(op_type, domain) if 0 < n < version]
    same = bool(earlier) and _say_the_same(domain, op_type, earlier[-1], version)
    return RULES[domain, op_type, earlier[-1]] if same else None


@cache
def _say_the_same(domain: str, op_type: str, earlier: int, later: int) -> bool:
    try:
        old, new = (defs.get_schema(op_type, n, domain) for n in (earlier, later))
    except defs.SchemaError:
        return False
    return _contents(old) == _contents(new)


def _contents(schema: defs.OpSchema) -> tuple[Any, ...]:
    """All that a schema says but for types and its version."""
    values = [
        (v.name, v.option, v.is_homogeneous, v.min_arity, v.description) for v in (*schema.inputs, *schema.outputs)
    ]
    given = {name: (a.type, a.required, str(a.default_value), a.description) for name, a in schema.attributes.items()}
    return schema.doc, values, given, len(schema.inputs)


def stops(node: ir.Node) -> Stop | None:
    """Why no gradient flows through a node, or None when one may."""
    return _STOPPED if is_stop(node) else NO_GRADIENT.get((node.domain, node.op_type))


def served_versions(op_type: str, domain: str = "") -> list[int]:
    """The versions of an operator that have a rule."""
    return sorted(v for d, o, v in RULES if (d, o) == (domain, op_type))


class SupportedOp(NamedTuple):
    """One operator version with a gradient rule; the domain "" is ONNX's own.

    since_version is 0 for an operator of a user's own domain, which `register_gradient` has given one in all versions,
    and what models import where it has no schema.
    """

    domain: str
    op_type: str
    since_version: int


def supported_ops() -> list[SupportedOp]:
    """The operators that have a gradient rule, sorted; `since_version` as in ONNX's operator documents.

    A model below opset 18 is converted to 18 first, so that it may use older versions than these.
    """
    load_extensions()
    return sorted(SupportedOp(*key) for key in RULES)
