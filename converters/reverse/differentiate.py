"""Reverse-mode differentiation of one graph: a plan for each node of a path, and the walk back along them.

For y = f(x) and a scalar L, dx = (∂y/∂x)ᵀ · dy. Nodes are visited in reverse order; each rule turns the gradients
of its outputs into gradients of its inputs, and the gradients of a value that is used twice are added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnx_backprop.converters.prepare.fused.expand import REFUSED
from onnx_backprop.converters.reverse import registry
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import (
    Expansion,
    branch_bodies,
    complaint,
    drop_unread,
    function_body,
    prune_and_name,
)
from onnx_backprop.converters.reverse.forward import Forward, label, unsupported
from onnx_backprop.converters.reverse.loops.steps import body_of, is_loop
from onnx_backprop.converters.reverse.path import (
    GradientPath,
    find_path,
    imputed,
    is_rounded,
    refuse_rounding,
    values_between,
)
from onnx_backprop.converters.reverse.widened import Widened
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import OnnxBackpropError, UnsupportedOpError
from onnx_backprop.opset.graphs.facts import CARRIES_ROUNDED, UNARY
from onnx_backprop.opset.graphs.walk import is_standard, values_read

if TYPE_CHECKING:
    from onnx_backprop.converters.reverse.loops.gradients import LoopPlan

Progress = Callable[[Sequence[ir.Node]], Iterable[ir.Node]]
PerSample = bool | Sequence[str]  # see `batching.add_axis`


@dataclass(frozen=True)
class BodyPlan:
    """A copy of what a node without a rule is made of, and the path through it."""

    body: Expansion
    path: GradientPath
    plans: list[NodePlan]  # one for each node of the path


@dataclass(frozen=True)
class NodePlan:
    """How one node of a path is differentiated: by its rule, or through its function body, branches or steps."""

    node: ir.Node
    rule: registry.Rule | None
    version: int
    parts: tuple[BodyPlan, ...] = ()
    loop: LoopPlan | None = None


def plan(path: GradientPath, opsets: dict[str, int]) -> list[NodePlan]:
    """A plan for every node of a path, in forward order.

    Raises one UnsupportedOpError that lists every operator on the path that has neither a rule nor a function body,
    with its nodes.
    """
    missing: dict[str, list[str]] = defaultdict(list)
    plans = _plan(path, opsets, missing)
    if missing:
        lines = "".join(f"\n  {what}: {_shorten(names)}" for what, names in sorted(missing.items()))
        raise UnsupportedOpError(
            f"no gradient rule for {len(missing)} operator(s) on the way:{lines}\n"
            "`onnx-backprop ops` lists the operators that have one; leave these nodes out of the path with `wrt` and "
            "`of`, let no gradient pass them with `stop`, or give an operator of a domain of your own a rule with "
            "onnx_backprop.register_gradient('domain::Name')",
            tuple(sorted(missing)),
        )
    return plans


def _plan(
    path: GradientPath, opsets: dict[str, int], missing: dict[str, list[str]], within: str = ""
) -> list[NodePlan]:
    """`within`: the operator that the nodes are the body of, for messages."""
    plans: list[NodePlan] = []
    for node in path.nodes:
        refused = REFUSED in node.metadata_props
        rule, version = None if refused else registry.find(node, opsets), registry.version_of(node, opsets)
        parts: list[BodyPlan] = []
        loop: LoopPlan | None = None
        if version is not None and is_loop(node):
            from onnx_backprop.converters.reverse.loops.gradients import plan_loop  # with them: few models have any

            loop = plan_loop(node, path.active, values_between)
            inside = find_path(loop.nodes, loop.of, loop.start)
            refuse_rounding(loop.nodes, loop.of, inside)
            body = Expansion(loop.steps.nodes, [])
            parts.append(BodyPlan(body, inside, _plan(inside, opsets, missing, within)))
        elif rule is None:
            bodies = _bodies(node, opsets)
            if not bodies or version is None:
                missing[_describe(node, opsets)].append(f"'{label(node)}'{within}")
                continue
            body_of = within if node.op_type == "If" else f" in the body of {node.op_type}"
            for body in bodies:
                of = [y for y, outer in zip(body.outputs, node.outputs, strict=True) if y and outer in path.active]
                inside = find_path(body.nodes, of, values_read(node) & path.active)
                refuse_rounding(body.nodes, of, inside)
                parts.append(BodyPlan(body, inside, _plan(inside, opsets, missing, body_of)))
        rounded = values_read(node) | set(node.outputs if loop is not None else ())
        if node.op_type not in CARRIES_ROUNDED and any(is_rounded(x) for x in rounded & path.active):
            known = ", ".join(CARRIES_ROUNDED)
            raise unsupported(node, f"it works on rounded numbers, where gradients are known for {known} only")
        plans.append(NodePlan(node, rule, version or registry.ANY_VERSION, tuple(parts), loop))
    return plans


def _bodies(node: ir.Node, opsets: dict[str, int]) -> list[Expansion]:
    if is_standard(node, "If"):
        return branch_bodies(node)
    if is_standard(node, "SequenceMap"):
        from onnx_backprop.converters.reverse.loops.sequence_map import map_as_loop

        return [map_as_loop(node)]
    body = function_body(node, opsets)
    return [] if body is None else [body]


def _describe(node: ir.Node, opsets: dict[str, int]) -> str:
    qualified = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    version = registry.version_of(node, opsets)
    served = registry.served_versions(node.op_type, node.domain)
    if REFUSED in node.metadata_props:
        return f"{qualified} ({node.metadata_props[REFUSED]})"
    if version is None:
        return f"{qualified} (not an operator onnx knows)"
    if served:
        return f"{qualified} version {version} (there are rules for version {', '.join(map(str, served))})"
    return qualified


def _shorten(names: list[str], limit: int = 8) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def walk_back(
    path: GradientPath,
    seeds: Mapping[ir.Value, ir.Value],
    op: Builder,
    opsets: dict[str, int],
    progress: Progress = iter,
) -> dict[ir.Value, ir.Value]:
    """Emit the backward nodes; return the gradient of every active value that received one."""
    wide = Widened(path.nodes, op)
    active = path.active | {wide.of(value) for value in path.active}
    plans = plan(GradientPath(wide.nodes, active, path.stops), opsets)
    marked = imputed(path.nodes)
    masked = {new for new, old in zip(wide.nodes, path.nodes, strict=True) if old in marked}
    return wide.replace_stand_ins(_walk_back(plans, active, seeds, op, wide, opsets, progress, masked))


def _walk_back(
    plans: list[NodePlan],
    active: set[ir.Value],
    seeds: Mapping[ir.Value, ir.Value],
    op: Builder,
    wide: Widened,
    opsets: dict[str, int],
    progress: Progress = iter,
    masked: Collection[ir.Node] = (),
) -> dict[ir.Value, ir.Value]:
    pending: dict[ir.Value, list[ir.Value]] = defaultdict(list)

    def add(value: ir.Value, grad: ir.Value) -> None:
        pending[wide.of(value)].append(wide.cast(grad, wide.of(value)))

    for value, seed in seeds.items():
        add(value, seed)
    plan_of = {node_plan.node: node_plan for node_plan in plans}
    for node in progress([node_plan.node for node_plan in reversed(plans)]):
        node_plan = plan_of[node]
        op.prefix = f"{label(node)}_grad"
        summed = {
            y: op.accumulate(pending[wide.of(y)]) for y in node.outputs if pending.get(wide.of(y)) and y in active
        }
        if not summed:
            continue
        pending.update((wide.of(y), [dy]) for y, dy in summed.items())  # kept: each may itself be asked for
        dys = [wide.cast(summed[y], y) if y in summed else None for y in node.outputs]
        if node_plan.rule is not None:
            op.imputed = dys[0] if node in masked else None
            received = _apply(node_plan.rule, op, Forward(node, active, node_plan.version), dys)
            op.imputed = None
        elif node_plan.loop is not None:
            received = (
                _through_rows(node, active, dys, op, opsets)
                or _through_segments(node_plan, active, dys, op, opsets)
                or _through_steps(node_plan, dys, op, opsets)
            )
        elif node.op_type == "If":
            received = _through_branches(node_plan, dys, op, opsets)
        else:
            received = _through_body(node_plan.parts[0], node, dys, op, opsets)
        for value, grad in received:
            if value is not None and grad is not None and value in active:
                add(value, grad)
    op.prefix = "grad"
    return {value: op.accumulate(grads) for value, grads in pending.items() if grads}


def _through_body(
    part: BodyPlan, node: ir.Node, dys: Sequence[ir.Value | None], op: Builder, opsets: dict[str, int]
) -> list[tuple[ir.Value, ir.Value]]:
    """Emit the copy and its gradient behind it; return the gradients of what the copy reads from outside."""
    start = len(op.nodes)
    op.nodes.extend(part.body.nodes)
    seeds: dict[ir.Value, list[ir.Value]] = defaultdict(list)
    for y, dy in zip(part.body.outputs, dys, strict=False):  # a loop may have got more outputs
        if y is not None and dy is not None and y in part.path.active:
            seeds[y].append(dy)
    summed = {y: op.accumulate(values) for y, values in seeds.items()}
    grads = _walk_back(part.plans, part.path.active, summed, op, Widened([], op), opsets)
    outside = sorted(values_read(node) & part.path.active, key=lambda value: str(value.name))
    result = [(value, grads[value]) for value in outside if value in grads]
    prune_and_name(part.body, op, node, op.nodes[start:], [grad for _, grad in result])
    return result


def _through_rows(
    node: ir.Node, active: set[ir.Value], dys: Sequence[ir.Value | None], op: Builder, opsets: dict[str, int]
) -> list[tuple[ir.Value, ir.Value]]:
    """The gradients through a loop over blocks of rows that computes them itself; [] of another loop."""
    from onnx_backprop.converters.reverse.loops.rows import rows_gradients

    def walk(z: ir.Value, wrt: Sequence[ir.Value], dz: ir.Value, inner: Builder) -> dict[ir.Value, ir.Value]:
        path = find_path(body_of(node), [z], wrt)
        return walk_back(path, {z: dz}, inner, opsets)

    return rows_gradients(node, dys, active, op, walk)


def _through_segments(
    node_plan: NodePlan, active: set[ir.Value], dys: Sequence[ir.Value | None], op: Builder, opsets: dict[str, int]
) -> list[tuple[ir.Value, ir.Value]]:
    """The gradients through a loop in segments, where that is asked for; [] where it is not, or cannot be."""
    from onnx_backprop.converters.reverse.loops.segments import has_segments, segmented

    if not op.checkpoint or not has_segments(node_plan.node):
        return []
    body = segmented(node_plan.node, op.checkpoint, op)
    of = [y for y, outer in zip(body.outputs, node_plan.node.outputs, strict=False) if y and outer in active]
    inside = find_path(body.nodes, of, values_read(node_plan.node) & active)
    return _through_body(
        BodyPlan(body, inside, _plan(inside, opsets, defaultdict(list))), node_plan.node, dys, op, opsets
    )


def _through_steps(
    node_plan: NodePlan, dys: Sequence[ir.Value | None], op: Builder, opsets: dict[str, int]
) -> list[tuple[ir.Value, ir.Value]]:
    """Emit the steps of a Scan or a Loop in reverse; return the gradients of what the node reads."""
    from onnx_backprop.converters.reverse.loops.gradients import loop_gradients

    part, loop = node_plan.parts[0], node_plan.loop
    assert loop is not None

    def walk(seeds: Mapping[ir.Value, ir.Value], inner: Builder) -> dict[ir.Value, ir.Value]:
        seeds = {y: dy for y, dy in seeds.items() if y in part.path.active}
        return _walk_back(part.plans, part.path.active, seeds, inner, Widened([], inner), opsets)

    return loop_gradients(loop, dys, op, walk)


def _through_branches(
    node_plan: NodePlan, dys: Sequence[ir.Value | None], op: Builder, opsets: dict[str, int]
) -> list[tuple[ir.Value, ir.Value]]:
    """dx = If(condition, dx of the then-branch, dx of the else-branch) for every x the branches read from outside.

    A branch that does not let a gradient through to x gives zeros.
    """
    node = node_plan.node
    inner = [op.inside() for _ in node_plan.parts]
    branch_grads: list[dict[ir.Value, ir.Value]] = []
    for part, child in zip(node_plan.parts, inner, strict=True):
        child.prefix = op.prefix
        branch_grads.append(dict(_through_body(part, node, dys, child, opsets)))
    reached = sorted({value for grads in branch_grads for value in grads}, key=lambda value: str(value.name))
    if not reached:
        return []
    branches: list[tuple[Builder, list[ir.Value]]] = []
    for child, grads in zip(inner, branch_grads, strict=True):
        values = [grads[x] if x in grads else child.zeros_like(x) for x in reached]
        drop_unread(child.nodes, values)
        branches.append((child, values))
    (condition,) = node.inputs
    assert condition is not None
    return list(zip(reached, op.choose(condition, reached, *branches), strict=True))


def _apply(
    rule: registry.Rule, op: Builder, node: Forward, dys: list[ir.Value | None]
) -> list[tuple[ir.Value | None, ir.Value | None]]:
    """Each input and its gradient."""
    if not rule.all_outputs and any(dy is not None for dy in dys[1:]):
        raise node.unsupported("a gradient arrives at another than the first output; the rule handles the first only")
    start = len(op.nodes)
    try:
        grads = rule.function(op, node, dys if rule.all_outputs else dys[0])
    except OnnxBackpropError:
        raise
    except Exception as e:  # a rule may rely on what the operator's definition asks of a node
        if words := node.version != registry.ANY_VERSION and complaint(node.node, node.version):
            raise node.invalid(words) from e
        raise
    _check_types(node, op.nodes[start:])
    grads = (grads,) if isinstance(grads, ir.Value) else grads
    if node.node in UNARY:
        grads = [op.where_it_flows(g) for g in grads if g is not None]
    received = list(zip(node.inputs, grads, strict=False))
    if not rule.broadcasts:
        return received
    return [
        (x, op.unbroadcast(g, x, node.output()) if x is not None and g is not None and node.wants(n) else None)
        for n, (x, g) in enumerate(received)
    ]


def _check_types(node: Forward, emitted: Sequence[ir.Node]) -> None:
    """Refuse float64 where an operator of this domain computes the gradient."""
    for each in emitted:
        if each.domain == DOMAIN and any(x is not None and x.dtype == ir.DataType.DOUBLE for x in each.inputs):
            raise node.unsupported(
                f"its gradient is {each.op_type}, which takes float32, float16 and bfloat16, got float64. Convert the "
                "model to float32"
            )
