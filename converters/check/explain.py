"""`explain_gradients`: which rule serves each node, and where and why a gradient path stops. It builds no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.prepare.graphs import used_names, values_read
from onnx_backprop.converters.prepare.ir_models import to_ir
from onnx_backprop.converters.prepare.load import check_names, pick, prepare
from onnx_backprop.converters.reverse import registry
from onnx_backprop.converters.reverse.backward import pick_floats
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.differentiate import (
    GradientPath,
    NodePlan,
    find_path,
    plan,
    told_stops,
    walk_back,
)
from onnx_backprop.converters.reverse.forward import label
from onnx_backprop.converters.reverse.known import is_float, type_name
from onnx_backprop.converters.tables import table
from onnx_backprop.opset.core.errors import OnnxBackpropError, UnsupportedOpError

SERVED, STOPS, REFUSED, MISSING, ASIDE = "served", "stops", "refused", "no rule", "aside"


@dataclass(frozen=True)
class NodeExplanation:
    """What becomes of the gradient at one node that depends on the variables.

    op: operator and version, as "Conv-22". status: "served" by a rule; "stops": no gradient flows on; "refused": the
    rule does not handle this attribute or form; "no rule": none is written; "aside": no output asked for depends on
    it. by: the rule, the body or the branches. why: the reason where it is not served.
    """

    op: str
    node: str
    status: str
    by: str = ""
    why: str = ""


@dataclass(frozen=True)
class VariableExplanation:
    """Whether a gradient reaches a variable, and if not, why."""

    name: str
    reached: bool
    why: str = ""


@dataclass(frozen=True)
class GradientExplanation:
    """What `backward` would do; `print` shows it as tables.

    variables: those of `wrt`. nodes: those that depend on the variables, in the order of the graph. ok: every variable
    is reached and every node on the way is served.
    """

    variables: tuple[VariableExplanation, ...]
    nodes: tuple[NodeExplanation, ...]

    @property
    def ok(self) -> bool:
        """Whether `backward` gives a gradient for every variable."""
        blocked = any(node.status in (REFUSED, MISSING) for node in self.nodes)
        return not blocked and all(variable.reached for variable in self.variables)

    def __str__(self) -> str:
        variables = [(v.name, "yes" if v.reached else "no", v.why) for v in self.variables]
        nodes = [(n.op, n.node, n.status, n.by, n.why) for n in self.nodes]
        lines = table(("variable", "gradient", ""), variables)
        if nodes:
            lines += ["", *table(("operator", "node", "gradient", "by", ""), nodes)]
        return "\n".join(lines)


def explain_gradients(
    model: ModelProto | str | Path, *, wrt: Sequence[str] | None = None, of: Sequence[str] | None = None
) -> GradientExplanation:
    """Which rule would serve each node between `wrt` and `of`, and where and why a path stops. Nothing is built.

    Args:
        model: a ModelProto or the path of one.
        wrt: graph inputs and initializers, of any type. Default: every float one.
        of: graph outputs. Default: every float output.

    The nodes are those of the model as it is differentiated: functions inlined, opset 18 or later. A rule is tried on
    its node with what is known of the types and shapes, so that attributes it refuses show here.

    Raises: InvalidArgumentError for unknown names and integer outputs, InvalidModelError.
    """
    ir_model = to_ir(prepare(model))
    graph = ir_model.graph
    values = {str(v.name): v for v in (*graph.initializers.values(), *graph.inputs)}
    outputs = {str(v.name): v for v in graph.outputs}
    if wrt is None:
        variables = [v for v in values.values() if is_float(v)]
    else:
        variables = pick(check_names("wrt", wrt), values, argument="wrt", what="a graph input or an initializer")
    targets = [v for v in outputs.values() if is_float(v)]
    if of is not None:
        targets = pick_floats(of, outputs, argument="of", what="a graph output")
    path = find_path(graph, targets, [v for v in variables if is_float(v)])
    explainer = _Explainer(ir_model, path)
    return GradientExplanation(
        tuple(_variable(v, graph, targets, path) for v in variables), tuple(explainer.nodes(variables))
    )


def _variable(x: ir.Value, graph: ir.Graph, targets: list[ir.Value], path: GradientPath) -> VariableExplanation:
    name = str(x.name)
    if not is_float(x):
        return VariableExplanation(name, False, f"its type is {type_name(x)}; gradients exist for floats only")
    if x in path.active:
        return VariableExplanation(name, True)
    alone = find_path(graph, targets, [x])
    return VariableExplanation(name, False, told_stops(alone.stops) or "no output asked for depends on it")


class _Explainer:
    """Tries each node of a path on its own."""

    def __init__(self, model: ir.Model, path: GradientPath) -> None:
        self.graph = model.graph
        self.opsets = model.opset_imports
        self.path = path
        self.names = used_names(model.graph)

    def nodes(self, variables: Sequence[ir.Value]) -> list[NodeExplanation]:
        """What becomes of the gradient at each node that depends on the variables."""
        on_path = set(self.path.nodes)
        influenced = {v for v in variables if is_float(v)}
        result: list[NodeExplanation] = []
        for node in list(self.graph):
            if influenced.isdisjoint(values_read(node)):
                continue
            if node in on_path:
                result.append(self._on_path(node))
            elif node in self.path.stops:
                result.append(self._told(node, STOPS, self.path.stops[node].reason))
            else:
                result.append(self._told(node, ASIDE, "no output asked for depends on it"))
            if node not in self.path.stops:
                influenced.update(v for v in node.outputs if v in self.path.active or is_float(v))
        return result

    def _told(self, node: ir.Node, status: str, why: str = "", by: str = "") -> NodeExplanation:
        version = registry.version_of(node, self.opsets)
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        return NodeExplanation(f"{name}-{version}" if version else name, label(node), status, by, why)

    def _on_path(self, node: ir.Node) -> NodeExplanation:
        alone = GradientPath([node], self.path.active, {})
        by = ""
        try:
            by = _served_by(plan(alone, self.opsets)[0])
            op = Builder(self.names)
            seeds = {y: _like(y) for y in node.outputs if y in self.path.active}
            gradients = walk_back(alone, seeds, op, self.opsets)
        except UnsupportedOpError as e:
            return self._told(node, MISSING, _inner_operators(e))
        except OnnxBackpropError as e:
            return self._told(node, REFUSED, e.message, by)
        lost = [str(v.name) for v in node.inputs if v in self.path.active and v not in gradients]
        why = f"its rule gives no gradient to {', '.join(lost)}" if lost else ""
        return self._told(node, SERVED, why, by)


def _like(y: ir.Value) -> ir.Value:
    return ir.Value(name=f"{y.name}_grad", type=y.type, shape=y.shape)


def _served_by(node_plan: NodePlan) -> str:
    """The rule, by module and function; for a node that is made of others, theirs."""
    if node_plan.rule is not None:
        function = node_plan.rule.function
        return f"{'.'.join(function.__module__.split('.')[-2:])}.{function.__name__}"
    inner = dict.fromkeys(_served_by(other) for part in node_plan.parts for other in part.plans)
    what = "its branches" if node_plan.node.op_type == "If" else "its function body"
    return f"{what}: {', '.join(inner)}" if inner else what


def _inner_operators(error: UnsupportedOpError) -> str:
    """The operators without a rule, from the list in the message."""
    lines = [line.strip() for line in error.message.splitlines()[1:-1]]
    return "; ".join(line.rpartition(": ")[0] for line in lines) + " has no gradient rule"
