"""Reverse-mode differentiation of one graph: which nodes lie on a path, and the walk back along them.

For y = f(x) and a scalar L, dx = (∂y/∂x)ᵀ · dy. Nodes are visited in reverse order; each rule turns the gradients
of its outputs into gradients of its inputs, and the gradients of a value that is used twice are added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..opset.errors import InvalidArgumentError, UnsupportedError, UnsupportedOpError
from . import registry
from .builder import Builder, is_float
from .forward import Forward, label

Progress = Callable[[Sequence[ir.Node]], Iterable[ir.Node]]


@dataclass(frozen=True)
class Path:
    """The nodes between the values to differentiate and those to differentiate by."""

    nodes: list[ir.Node]  # in forward order
    active: set[ir.Value]  # depend on a `wrt` value and influence an `of` value, differentiably
    stops: dict[ir.Node, str]  # nodes that depend on a `wrt` value and let no gradient through, with the reason


def inputs_of(node: ir.Node) -> set[ir.Value]:
    """Everything a node reads: its inputs and what its subgraphs capture from outside."""
    used = {value for value in node.inputs if value is not None}
    for attribute in node.attributes.values():
        graphs: Sequence[ir.Graph] = ()
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            graphs = (attribute.as_graph(),)
        elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
            graphs = attribute.as_graphs()
        for graph in graphs:
            inside: set[ir.Value] = set(graph.inputs)
            read: set[ir.Value] = set(graph.outputs)
            for inner in graph:
                read |= inputs_of(inner)
                inside |= set(inner.outputs)
            used |= read - inside - set(graph.initializers.values())
    return used


def find_path(graph: ir.Graph, of: Iterable[ir.Value], wrt: Iterable[ir.Value]) -> Path:
    """Find the nodes on a differentiable path from a `wrt` value to an `of` value."""
    influenced = set(wrt)
    candidates: list[tuple[ir.Node, set[ir.Value]]] = []
    stops: dict[ir.Node, str] = {}
    for node in graph:
        read = inputs_of(node) & influenced
        flowing = registry.FLOWING_INPUTS.get((node.domain, node.op_type))
        if read and flowing is not None:
            reached = {value for n, value in enumerate(node.inputs) if n in flowing and value in read}
            if not reached:
                stops[node] = "no gradient flows to that input"
            read = {value for value in reached if value is not None}
        if not read:
            continue
        reason = registry.stops(node)
        if reason is not None:
            stops[node] = reason
            continue
        candidates.append((node, read))
        influenced.update(value for value in node.outputs if is_float(value) or value.dtype is None)
    active = set(of) & influenced
    nodes: list[ir.Node] = []
    for node, read in reversed(candidates):
        if active.intersection(node.outputs):
            nodes.append(node)
            active |= read
    return Path(nodes[::-1], active, stops)


def require_rules(path: Path, opsets: dict[str, int]) -> None:
    """Raise one UnsupportedOpError that lists every operator on the path without a rule, with its nodes."""
    missing: dict[str, list[str]] = defaultdict(list)
    for node in path.nodes:
        if registry.find(node, opsets) is None:
            missing[_describe(node, opsets)].append(f"'{label(node)}'")
    if missing:
        lines = "".join(f"\n  {what}: {_shorten(names)}" for what, names in sorted(missing.items()))
        raise UnsupportedOpError(
            f"no gradient rule for {len(missing)} operator(s) on the way:{lines}\n"
            "`onnx-backprop ops` lists the operators that have one; leave these nodes out of the path with `wrt` and "
            "`of`, or add a rule (CONTRIBUTING.md)"
        )


def _describe(node: ir.Node, opsets: dict[str, int]) -> str:
    qualified = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    version = registry.version_of(node, opsets)
    served = registry.served_versions(node.op_type, node.domain)
    if version is None:
        return f"{qualified} (not an operator onnx knows)"
    if served:
        return f"{qualified} version {version} (there are rules for version {', '.join(map(str, served))})"
    return qualified


def _shorten(names: list[str], limit: int = 8) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def walk_back(
    path: Path,
    seeds: Mapping[ir.Value, ir.Value],
    op: Builder,
    opsets: dict[str, int],
    progress: Progress = iter,
) -> dict[ir.Value, ir.Value]:
    """Emit the backward nodes; return the gradient of every active value that received one."""
    require_rules(path, opsets)
    pending: dict[ir.Value, list[ir.Value]] = defaultdict(list)
    for value, seed in seeds.items():
        pending[value].append(seed)
    for node in progress(path.nodes[::-1]):
        op.prefix = f"{label(node)}_grad"
        dys = [op.accumulate(pending.pop(y)) if y in pending and y in path.active else None for y in node.outputs]
        if all(dy is None for dy in dys):
            continue
        rule, version = registry.find(node, opsets), registry.version_of(node, opsets)
        assert rule is not None
        assert version is not None
        for value, dy in zip(node.outputs, dys, strict=True):
            if dy is not None:
                pending[value] = [dy]  # kept: an intermediate value may itself be asked for
        grads = _apply(rule, op, Forward(node, path.active, version), dys)
        for value, grad in zip(node.inputs, grads, strict=True):
            if grad is not None and value in path.active:
                pending[value].append(grad)
    op.prefix = "grad"
    return {value: op.accumulate(grads) for value, grads in pending.items() if grads}


def _apply(rule: registry.Rule, op: Builder, node: Forward, dys: list[ir.Value | None]) -> registry.Grads:
    if rule.all_outputs:
        grads = rule.function(op, node, dys)
    elif any(dy is not None for dy in dys[1:]):
        raise UnsupportedError(
            "a gradient arrives at another than the first output; the rule handles the first only",
            op_type=node.op_type,
            node=node.name,
        )
    else:
        grads = rule.function(op, node, dys[0])
    if len(grads) != len(node.inputs):
        raise AssertionError(f"rule {rule.function.__name__}: {len(grads)} gradients for {len(node.inputs)} inputs")
    return grads


def explain_unreached(name: str, of: Sequence[str], path: Path, *, argument: str = "wrt") -> InvalidArgumentError:
    """The error for a value that no gradient reaches, though the caller's `argument` names it."""
    reasons = "; ".join(f"{n.op_type} '{label(n)}' stops it ({why})" for n, why in list(path.stops.items())[:4])
    return InvalidArgumentError(
        f"{argument}: {name!r} does not influence {', '.join(of)} along a differentiable path"
        + (f": {reasons}" if reasons else "")
        + f". Leave it out of {argument}"
    )
