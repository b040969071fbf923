"""`explain_gradients`: which rule serves each node, and where and why a gradient path stops. It writes no model."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters import pages
from onnx_backprop.converters.pages import Bar, Verdict
from onnx_backprop.converters.parameters import table as rows
from onnx_backprop.converters.parameters.choice import Choice, choose
from onnx_backprop.converters.parameters.report import doubts, missing
from onnx_backprop.converters.prepare.exporters.origins import origin_of
from onnx_backprop.converters.prepare.load import Free, load
from onnx_backprop.converters.prepare.selection import Patterns
from onnx_backprop.converters.prepare.stops import prepared
from onnx_backprop.converters.reverse import registry
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.differentiate import NodePlan, plan, walk_back
from onnx_backprop.converters.reverse.forward import label
from onnx_backprop.converters.reverse.known import is_float, type_name
from onnx_backprop.converters.reverse.models.backward import backward
from onnx_backprop.converters.reverse.models.named import INPUT, OUTPUT, pick_values, require_floats
from onnx_backprop.converters.reverse.path import GradientPath, describe_stops, find_path
from onnx_backprop.converters.tables import table, wrapped
from onnx_backprop.opset.core.errors import OnnxBackpropError, OnnxBackpropWarning, UnsupportedOpError
from onnx_backprop.opset.core.progress import shown
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.walk import values_read

SERVED, STOPS, REFUSED, MISSING, ASIDE = "served", "stops", "refused", "no rule", "aside"
_GOOD = {SERVED: True, REFUSED: False, MISSING: False}
_ROWS = 30  # that a page lists at once


@dataclass(frozen=True)
class NodeExplanation:
    """What becomes of the gradient at one node that depends on the variables.

    op: operator and version, as "Conv-22". status: "served" by a rule; "stops": no gradient flows on; "refused": the
    rule does not handle this attribute or form; "no rule": none is written; "aside": no output asked for depends on
    it. by: the rule, the body or the branches. why: the reason where it is not served. needed: `backward` comes by it;
    by default it does not come by what lies before all parameters.
    """

    op: str
    node: str
    status: str
    by: str = ""
    why: str = ""
    needed: bool = True


@dataclass(frozen=True)
class VariableExplanation:
    """Whether a gradient reaches a variable, and if not, why.

    refused: it was asked for by name, and `backward` refuses it; where it merely is zero, `backward` answers zeros.
    """

    name: str
    reached: bool
    why: str = ""
    refused: bool = False


@dataclass(frozen=True, repr=False)
class GradientExplanation:
    """What `backward` would do; `print` shows it as tables.

    variables: those of `wrt`. nodes: those that depend on the variables, in the order of the graph. ok: `backward`
    works: every node on its way has a rule, no variable is refused, and by default at least one is reached. refusal:
    another reason why it does not work. tensors: by default, which tensors of the file are trained. remarks: which of
    these are guesses.
    """

    variables: tuple[VariableExplanation, ...]
    nodes: tuple[NodeExplanation, ...]
    by_default: bool = False
    refusal: str = ""
    tensors: tuple[rows.Row, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether `backward` converts the model."""
        blocked = any(node.needed and node.status in (REFUSED, MISSING) for node in self.nodes)
        refused = any(variable.refused for variable in self.variables)
        unasked = any(v.reached for v in self.variables) or not self.by_default
        return not blocked and not refused and unasked and not self.refusal

    def __str__(self) -> str:
        listed = {row.name for row in self.tensors}
        variables = [(v.name, "yes" if v.reached else "no", v.why) for v in self.variables if v.name not in listed]
        nodes = [(n.op, n.node, n.status, n.by, n.why) for n in self.nodes]
        lines = [*rows.lines(self.tensors), rows.counted(self.tensors), *self.remarks, ""] if self.tensors else []
        lines += table(("variable", "gradient", ""), variables) if variables else []
        if nodes:
            lines += ["", *table(("operator", "node", "gradient", "by", ""), nodes)]
        if self.refusal:
            lines += ["", f"refused: {self.refusal}"]
        lines += ["", self._summary()]
        return wrapped("\n".join(lines))

    def _counts(self) -> Counter[str]:
        return Counter(node.status for node in self.nodes)

    def _summary(self) -> str:
        counts = ", ".join(f"{count} {status}" for status, count in self._counts().items())
        reached = sum(variable.reached for variable in self.variables)
        verdict = "converts" if self.ok else "does not convert"
        nodes = f"; nodes: {counts}" if counts else ""
        return f"{verdict}, {reached} of {len(self.variables)} variables reached{nodes}"

    def __repr__(self) -> str:
        """Whether it converts and how many nodes are served, in one line."""
        return f"<GradientExplanation: {self._summary()}>"

    def html(self) -> str:
        """The tables as a part of a page."""
        verdict = Verdict("converts" if self.ok else self.refusal or "does not convert", self.ok)
        counts = [(status, Bar(str(n), n / len(self.nodes))) for status, n in self._counts().most_common()]
        variables = [
            (v.name, Verdict("yes", True) if v.reached else Verdict("no", None), v.why) for v in self.variables
        ]
        nodes = [(n.op, n.node, Verdict(n.status, _GOOD.get(n.status)), n.by, n.why) for n in self.nodes]
        return "".join(
            (
                pages.table((), [(verdict,)]),
                pages.table(("gradient", "nodes"), counts),
                *([f"<h2>Tensors</h2><p>{pages.text(rows.counted(self.tensors))}</p>"] if self.tensors else []),
                *(f"<p>{pages.text(remark)}</p>" for remark in self.remarks),
                *([rows.page(self.tensors)] if self.tensors else []),
                "<h2>Variables</h2>",
                pages.table(("variable", "gradient", ""), variables, most=_ROWS),
                "<h2>Nodes</h2>",
                pages.table(("operator", "node", "gradient", "by", ""), nodes, most=_ROWS),
            )
        )

    def _repr_html_(self) -> str:
        """For notebooks."""
        return pages.fragment(self.html())


def explain_gradients(
    model: ModelProto | ir.Model | str | Path,
    *,
    wrt: Sequence[str] | None = None,
    of: Sequence[str] | None = None,
    stop: Patterns | None = None,
    free: Free | None = None,
) -> GradientExplanation:
    """Which rule serves each node between `wrt` and `of`, and where and why a path stops. Writes nothing.

        explanation = ob.explain_gradients("model.onnx", wrt=["x"])
        print(explanation)  # in a notebook: a table; explanation.ok: whether the model converts

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file.
        wrt: graph inputs and initializers, of any type, or values inside the graph. Default: every float input and
            initializer; one that is no parameter is shown with what it is, as `exponent of Pow`.
        of: graph outputs, or values inside the graph. Default: every float output.
        stop, free: values that no gradient passes, and lengths that become symbols, as `backward` takes them.

    The nodes are those of the model as it is differentiated: functions inlined, opset 18 or later. Each rule is tried
    on its node with the known types and shapes, so attributes that it refuses show here.

    Raises: InvalidArgumentError for unknown names and integer outputs, InvalidModelError.
    """
    proto = load(model, mapped=True)
    _, ir_model = prepared(proto, stop=stop, free=free, wrt=wrt, of=of)
    graph = ir_model.graph
    values = {str(v.name): v for v in (*graph.initializers.values(), *graph.inputs)}
    outputs = {str(v.name): v for v in graph.outputs}
    targets = [v for v in outputs.values() if is_float(v)]
    if of is not None:
        targets = require_floats(pick_values(graph, of, outputs, argument="of", what=OUTPUT), "of")
    if wrt is not None:
        variables = pick_values(graph, wrt, values, argument="wrt", what=INPUT)
        taken, choice = [v for v in variables if is_float(v)], Choice({}, {})
        left_out = choice.left_out
    else:
        variables = [v for v in values.values() if is_float(v)]
        reached = find_path(graph, targets, variables).active
        choice = choose(graph, [v for v in variables if v.is_initializer() and v in reached])
        left_out = choice.left_out
        taken = [v for v in variables if v.is_initializer() and v in reached and v not in left_out]
        taken = taken or [v for v in variables if not v.is_initializer()]
    path = find_path(graph, targets, [v for v in variables if is_float(v) and v not in left_out])
    explainer = _Explainer(ir_model, path, set(find_path(graph, targets, taken).nodes))
    explanations = [
        VariableExplanation(str(v.name), False, f"{left_out[v]}, which wrt can name")
        if v in left_out
        else _variable(v, graph, targets, path, asked=wrt is not None)
        for v in variables
    ]
    result = GradientExplanation(tuple(explanations), tuple(explainer.nodes(variables)), by_default=wrt is None)
    if wrt is None:
        tensors = _rows(variables, explanations, choice)
        result = replace(
            result, tensors=tuple(tensors), remarks=tuple(filter(None, (doubts(choice, ()), missing(graph))))
        )
    by = wrt if wrt is not None or left_out or any(v.is_initializer() for v in taken) else [str(v.name) for v in taken]
    return (
        replace(result, refusal=_refusal(proto, wrt=by or None, of=of, stop=stop, free=free)) if result.ok else result
    )


def _rows(
    variables: Sequence[ir.Value], explanations: Sequence[VariableExplanation], choice: Choice
) -> Iterator[rows.Row]:
    """The tensors of the file, as `TrainingGraph.rows` has them."""
    for value, explained in zip(variables, explanations, strict=True):
        if value.is_initializer() and value.const_value is not None:
            name, module = str(value.name), origin_of(value).name
            state = rows.TRAINED if explained.reached else choice.left_out.get(value, explained.why)
            shape = tuple(value.const_value.shape.numpy())
            yield rows.Row(name, "" if module == name else module, shape, state, choice.doubtful.get(value, ""))


def _refusal(model: ModelProto, **arguments: Any) -> str:
    """What a conversion says against a model whose nodes are served one by one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OnnxBackpropWarning)
        try:
            backward(model, **arguments)
        except OnnxBackpropError as e:
            return str(e)
    return ""


def _variable(
    x: ir.Value, graph: ir.Graph, targets: list[ir.Value], path: GradientPath, *, asked: bool
) -> VariableExplanation:
    name = str(x.name)
    if not is_float(x):
        why = f"its type is {type_name(x)}; gradients exist for floats only"
        return VariableExplanation(name, False, why, refused=asked)
    if x in path.active:
        return VariableExplanation(name, True)
    alone = find_path(graph, targets, [x])
    why = describe_stops(alone.stops) or "no output asked for depends on it"
    return VariableExplanation(name, False, why, refused=asked and not all(s.zero for s in alone.stops.values()))


class _Explainer:
    """Tries each node of a path on its own."""

    def __init__(self, model: ir.Model, path: GradientPath, needed: set[ir.Node]) -> None:
        self.graph = model.graph
        self.opsets = model.opset_imports
        self.path = path
        self.needed = needed
        self.names = used_names(model.graph)

    def nodes(self, variables: Sequence[ir.Value]) -> list[NodeExplanation]:
        """What becomes of the gradient at each node that depends on the variables."""
        on_path = set(self.path.nodes)
        influenced = {v for v in variables if is_float(v)}
        result: list[NodeExplanation] = []
        for node in shown(list(self.graph), what="explaining"):
            if influenced.isdisjoint(values_read(node)):
                continue
            if node in on_path:
                result.append(self._on_path(node))
            elif node in self.path.stops:
                stop = self.path.stops[node]
                result.append(self._explanation(node, REFUSED if stop.refused else STOPS, stop.reason))
            else:
                result.append(self._explanation(node, ASIDE, "no output asked for depends on it"))
            if node not in self.path.stops:
                influenced.update(v for v in node.outputs if v in self.path.active or is_float(v))
        return result

    def _explanation(self, node: ir.Node, status: str, why: str = "", by: str = "") -> NodeExplanation:
        version = registry.version_of(node, self.opsets)
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        title = f"{name}-{version}" if version else name
        return NodeExplanation(
            title, label(node), status, by, why, needed=node in self.needed or node in self.path.stops
        )

    def _on_path(self, node: ir.Node) -> NodeExplanation:
        around = values_read(node).union(node.outputs)  # not all values: the time would grow with their square
        alone = GradientPath([node], self.path.active & around, {})
        by = ""
        try:
            by = _served_by(plan(alone, self.opsets)[0])
            op = Builder(self.names)
            active = [y for y in node.outputs if y in self.path.active]
            seeds = {y: ir.Value(name=f"{y.name}_grad", type=y.type, shape=y.shape) for y in active}
            gradients = walk_back(alone, seeds, op, self.opsets)
        except UnsupportedOpError as e:
            return self._explanation(node, MISSING, f"{'; '.join(e.operators)} has no gradient rule")
        except OnnxBackpropError as e:
            return self._explanation(node, REFUSED, e.message, by)
        lost = [str(v.name) for v in node.inputs if v in self.path.active and v not in gradients]
        why = f"its rule gives no gradient to {', '.join(lost)}" if lost else ""
        return self._explanation(node, SERVED, why, by)


def _served_by(node_plan: NodePlan) -> str:
    """The rule, by module and function; for a node that is made of others, theirs."""
    if node_plan.rule is not None:
        function = node_plan.rule.function
        return f"{'.'.join(function.__module__.split('.')[-2:])}.{function.__name__}"
    inner = dict.fromkeys(_served_by(other) for part in node_plan.parts for other in part.plans)
    what = {"If": "its branches", "Loop": "its steps", "Scan": "its steps"}.get(
        node_plan.node.op_type, "its function body"
    )
    return f"{what}: {', '.join(inner)}" if inner else what
