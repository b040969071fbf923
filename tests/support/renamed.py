"""The same model under other names: of nodes that have none, with slashes and spaces, of digits, and of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto

STYLES = ("unnamed", "odd", "numbers", "ours")

# what a training graph of ours, and the native one made of it, calls inputs, outputs, values and nodes
OURS = (
    *(
        "loss",
        "loss_grad",
        "loss_grad_grad",
        "loss_2",
        "target",
        "learning_rate",
        "optimizer_step",
        "random_state",
        "micro_step",
        "update_guard",
    ),
    *("gradient_norms", "x_grad", "y_grad", "grad/Constant", "grad/MatMul", "optimizer/Constant", "loss/Constant"),
    *(
        "optimizer/update",
        "optimizer/adamw",
        "update_guard/loss",
        "labels",
        "loss_scale",
        "_1",
        "_2",
        "graph",
        "weight",
    ),
)


def renamed(model: ModelProto, style: str, ours: Iterable[str] = OURS) -> tuple[ModelProto, dict[str, str]]:
    """A copy under other names, and {old: new} of the values of its main graph.

    "unnamed": values keep their names, nodes lose theirs. "odd": slashes, spaces, dots and other letters. "numbers":
    digits alone. "ours": the given names, then others that begin with them.
    """
    result = ModelProto()
    result.CopyFrom(model)
    if style == "unnamed":
        for node in _nodes(result.graph):
            node.name = ""
        return result, {name: name for name in _values(result.graph)}
    new = _names(style, ours)
    names = _rename(result.graph, {}, lambda _: next(new))
    for node in _nodes(result.graph):
        node.name = next(new)
    return result, names


def joined(models: Sequence[ModelProto]) -> ModelProto:
    """The graphs of several models side by side in one, whose names begin with "n/" for model n, symbols' too."""
    result = ModelProto()
    result.CopyFrom(models[0])
    result.graph.Clear()
    result.graph.name = "joined"
    for n, model in enumerate(models):
        assert list(model.opset_import) == list(result.opset_import), "models of different opsets"
        assert len(models) == 1 or not model.functions, "functions would meet"
        graph, start = GraphProto(), f"{n}/"
        graph.CopyFrom(model.graph)
        _rename(graph, {}, start.__add__)
        for node in _nodes(graph):
            node.name = node.name and start + node.name
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = start + dim.dim_param
        for field in ("node", "input", "output", "initializer", "value_info"):
            getattr(result.graph, field).extend(getattr(graph, field))
    return result


def _names(style: str, ours: Iterable[str]) -> Iterator[str]:
    if style == "numbers":
        return map(str, count())
    if style == "odd":
        return (f"/layer {n}/w.{n}:0 é" for n in count())
    given = list(dict.fromkeys(ours))
    more = (f"{name}{end}{n}" for n in count(2) for end in ("_", "/") for name in given)
    return chain(given, (name for name in more if name not in given))


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for inner in _graphs(node):
            yield from _nodes(inner)


def _graphs(node: NodeProto) -> list[GraphProto]:
    return [graph for a in node.attribute for graph in ([a.g] if a.HasField("g") else a.graphs)]


def _values(graph: GraphProto) -> list[str]:
    """What a graph itself names, inputs first, each once."""
    names = [v.name for v in graph.input] + [v.name for v in graph.output if v.name]
    names += [t.name for t in graph.initializer] + [name for node in graph.node for name in node.output if name]
    return list(dict.fromkeys(names))


def _rename(graph: GraphProto, outer: Mapping[str, str], new: Callable[[str], str]) -> dict[str, str]:
    renames = {name: new(name) for name in _values(graph) if name not in outer or _defines(graph, name)}
    seen = {**outer, **renames, "": ""}
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = seen.get(value.name, value.name)
    for tensor in graph.initializer:
        tensor.name = renames[tensor.name]
    for node in graph.node:
        for inner in _graphs(node):
            _rename(inner, seen, new)
        node.input[:] = [seen[name] for name in node.input]
        node.output[:] = [seen[name] for name in node.output]
    return renames


def _defines(graph: GraphProto, name: str) -> bool:
    """Whether a graph's own value has a name, not one from outside that is its result."""
    return (
        any(v.name == name for v in graph.input)
        or any(t.name == name for t in graph.initializer)
        or any(name in node.output for node in graph.node)
    )


def anonymous(model: ModelProto) -> list[str]:
    """The inputs, outputs and nodes of a model without names: values are numbers, in the order that they come up in."""
    numbers: dict[str, str] = {"": ""}

    def number(name: str) -> str:
        return numbers.setdefault(name, str(len(numbers)))

    def node(one: NodeProto) -> str:
        attributes = [_unnamed(a) for a in one.attribute if not (a.HasField("g") or a.graphs)]
        inner = [graph(g) for g in _graphs(one)]
        inputs, outputs = ([number(name) for name in names] for names in (one.input, one.output))
        return f"{one.domain}.{one.op_type}.{one.overload} {sorted(attributes)} {inputs} {outputs} {inner}"

    def graph(one: GraphProto) -> list[str]:
        values = [[number(v.name) for v in values] for values in (one.input, one.output)]
        return [*map(str, values), *map(node, one.node)]

    called = [f"{f.domain}.{f.name}.{f.overload} {len(f.node)}" for f in model.functions]
    return [*graph(model.graph), *called]


def _unnamed(attribute: AttributeProto) -> bytes:
    result = AttributeProto()
    result.CopyFrom(attribute)
    if result.HasField("t"):
        result.t.name = ""
    return result.SerializeToString(deterministic=True)


def clashes(model: ModelProto) -> list[str]:
    """Names that two nodes of a graph have, or two values."""
    graph = model.graph
    values = [v.name for v in graph.input] + [name for node in graph.node for name in node.output if name]
    values += [t.name for t in graph.initializer if t.name not in {v.name for v in graph.input}]
    named = Counter(node.name for node in graph.node if node.name)
    return [name for names in (Counter(values), named) for name, count in names.items() if count > 1]
