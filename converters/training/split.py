"""A training graph in two: up to the gradients, and from there on, so that something can happen to them in between."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.functions.overloads import refuse_older_runtimes
from onnx_backprop.opset.graphs.edit import assign, copied, without
from onnx_backprop.opset.graphs.names import RENEWED, unique, used_names
from onnx_backprop.opset.graphs.order import ancestors, positions
from onnx_backprop.opset.graphs.walk import all_nodes, reads


@dataclass(frozen=True)
class Split:
    """Two models that compute what one training graph does.

    gradients: data, target and state in; the loss, gradients and new running statistics out.
    update: `passed` and state in; all outputs of the training graph but the model's own.
    passed: each output of the first model and the input of the second that takes it.
    of: each parameter and the output of the first model that is its gradient.
    statistics: each running statistic and the output of the first model that is its new value.
    """

    gradients: ModelProto
    update: ModelProto
    passed: dict[str, str]
    of: dict[str, str]
    statistics: dict[str, str]


def split(graph: TrainingGraph, model: ModelProto) -> Split:
    """Split `model`, which is that of `graph` or made of it; it is not changed.

    The update reads nothing of the data but through gradients, the loss and statistics. Errors: UnsupportedError for a
    graph in which it does.
    """
    nodes = list(model.graph.node)
    maker = positions(nodes)
    candidates = {p: _sources(g, nodes, maker) for p, g in graph.parameters.items()}
    cut = {name for names in candidates.values() for name in names} | {graph.loss}
    types = {v.name: v for v in (*model.graph.value_info, *model.graph.output, *model.graph.input)}
    statistics: dict[str, str] = {}
    for x, new in graph.updates.items():
        if x not in graph.parameters and (renewed := _renewed(new, nodes, maker)) is not None:
            statistics[x] = renewed
            types[renewed] = _renamed(types[new], renewed)
    cut |= set(statistics.values())
    ends = [*graph.updates.values(), *([graph.gradient_norms] if graph.gradient_norms else [])]
    late = ancestors(nodes, [name for name in ends if name not in cut], cut)
    read = set[str]().union(*(reads(nodes[n]) for n in late))
    fed = [*graph.inputs, *graph.optional]
    if stray := [name for name in fed if name in read]:
        raise UnsupportedError(
            f"the update reads {stray[0]!r} otherwise than through a gradient; expected updates that follow from the "
            "gradients. Train this graph on one rank"
        )
    of: dict[str, str] = {}
    for p, names in candidates.items():
        used = [name for name in names if name in read]
        if len(used) > 1:
            raise UnsupportedError(f"the update reads the gradient of {p!r} in two types. Train this graph on one rank")
        of.update(dict.fromkeys([p], used[0]) if used else {})
    first = [*dict.fromkeys(of.values()), *(name for name in (graph.loss, *statistics.values()) if name not in of)]
    reserved = used_names(model.graph)
    passed = {name: name if name in read else unique(f"{name}.sum", reserved) for name in first}
    if graph.loss in read:  # an update that reads the loss itself would need both
        raise UnsupportedError("the update reads the loss. Train this graph on one rank")
    typed = {name: _typed(name, types, graph, of) for name in first}
    whole = [name for name in passed if passed[name] != name]
    kept = [helper.make_node("Identity", [passed[name]], [name], name=f"{name}/kept") for name in whole]
    gradients = part(model, [nodes[n] for n in ancestors(nodes, first)], fed, typed.values())
    update = part(
        model,
        [*kept, *(nodes[n] for n in late)],
        [v.name for v in model.graph.input if v.name not in fed],
        [types[name] for name in dict.fromkeys([graph.loss, *ends])],
        {passed[name]: typed[name] for name in first},
    )
    return Split(gradients, update, passed, of, statistics)


def step_alone(graph: TrainingGraph, model: ModelProto) -> ModelProto:
    """`model`, which is that of `graph`, without the outputs of the forward model that no step reads."""
    wanted = [graph.loss, graph.gradient_norms, *graph.updates.values(), *graph.input_gradients.values()]
    outputs = [value for value in model.graph.output if value.name in wanted]
    nodes = list(model.graph.node)
    alone = part(model, [nodes[n] for n in ancestors(nodes, [v.name for v in outputs])], list(graph.inputs), outputs)
    kept = {value.name for value in alone.graph.input}
    alone.graph.input.extend(v for v in model.graph.input if v.name not in kept)
    return alone


def _sources(gradient: str, nodes: list[NodeProto], maker: Mapping[str, int]) -> tuple[str, ...]:
    """A gradient, and what it is a Cast of: the update reads that."""
    node = nodes[maker[gradient]] if gradient in maker else None
    return (gradient, node.input[0]) if node is not None and node.op_type == "Cast" else (gradient,)


def _renewed(new: str, nodes: list[NodeProto], maker: Mapping[str, int]) -> str | None:
    """The statistic of a BatchNormalization that `new` is, or a copy of by Identity, as where other nodes read it."""
    while new in maker and not nodes[maker[new]].domain:
        node = nodes[maker[new]]
        if any(entry.key == RENEWED for entry in node.metadata_props):
            return new
        if node.op_type == "BatchNormalization":
            return None if new == node.output[0] else new
        if node.op_type != "Identity":
            break
        new = node.input[0]
    return None


def _renamed(value: ValueInfoProto, name: str) -> ValueInfoProto:
    result = copied(value)
    result.name = name
    return result


def _typed(
    name: str, types: Mapping[str, ValueInfoProto], graph: TrainingGraph, of: Mapping[str, str]
) -> ValueInfoProto:
    """What is known of a value that is passed on: a gradient has its parameter's shape, and type before any Cast."""
    parameter = next((p for p, g in of.items() if g == name), None)
    if parameter is None:
        return types[name]
    type_ = types[parameter].type.tensor_type
    kind = type_.elem_type if name == graph.parameters[parameter] else TensorProto.FLOAT
    result = helper.make_tensor_value_info(name, kind, None)
    result.type.tensor_type.shape.CopyFrom(type_.shape)
    return result


def part(
    model: ModelProto,
    nodes: list[NodeProto],
    inputs: list[str],
    outputs: Iterable[ValueInfoProto],
    more: Mapping[str, ValueInfoProto] | None = None,
) -> ModelProto:
    """Some nodes of a model with all that they need; `inputs` stay, others where they are read; `more`: new ones."""
    read = set().union(*map(reads, nodes), inputs)
    produced = {name for node in nodes for name in node.output}
    result = without(model, "graph")
    graph = result.graph
    graph.name = model.graph.name
    graph.node.extend(nodes)
    graph.input.extend(v for v in model.graph.input if v.name in read)
    for name, value in (more or {}).items():
        graph.input.append(_renamed(value, name))
    graph.output.extend(outputs)
    graph.initializer.extend(t for t in model.graph.initializer if t.name in read)
    graph.value_info.extend(v for v in model.graph.value_info if v.name in produced)
    called = {(node.domain, node.op_type, node.overload) for node in _called(nodes, model)}
    assign(result.functions, [f for f in model.functions if (f.domain, f.name, f.overload) in called])
    refuse_older_runtimes(result)
    return result


def _called(nodes: Iterable[NodeProto], model: ModelProto) -> list[NodeProto]:
    """Nodes, those of the graphs inside them, and of the functions that they call."""
    bodies = {(f.domain, f.name, f.overload): f for f in model.functions}
    result = list(all_nodes(nodes))
    for node in result:
        body = bodies.pop((node.domain, node.op_type, node.overload), None)
        if body is not None:
            result.extend(all_nodes(body))
    return result
