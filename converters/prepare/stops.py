"""Values inside a graph by name: where no gradient passes, and what to differentiate by."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
from onnx import FunctionProto, ModelProto

from onnx_backprop.converters.prepare.exporters.detached import STOP
from onnx_backprop.converters.prepare.ir_models import to_ir
from onnx_backprop.converters.prepare.load import Edit, Free, check_names, prepare
from onnx_backprop.converters.prepare.selection import Patterns, select
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.op import DOMAIN
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.functions.overloads import REFUSAL
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.walk import all_nodes, constant_tensor

_LONGEST = 4  # bytes of an integer that may stand for a float, as quantised numbers do

Place = tuple[ir.Graph, ir.Value]


def hidden_names(proto: ModelProto) -> dict[str, str]:
    """The names of values and nodes that only a model's functions have, each with the function."""
    functions = [f for f in proto.functions if f.domain != DOMAIN and f.overload != REFUSAL]
    result = {name: f"{function.domain}::{function.name}" for function in functions for name in _named_in(function)}
    for name in used_names(proto.graph) if result else ():
        result.pop(name, None)
    return result


def _named_in(function: FunctionProto) -> Iterable[str]:
    for node in all_nodes(function):
        if constant_tensor(node) is None:  # which becomes an initializer of that name
            yield from filter(None, (node.name, *node.output))


def refuse_hidden(hidden: Mapping[str, str], **arguments: Patterns | None) -> None:
    """Raise for the name of a value inside a function: each call of the function has its own."""
    for argument, names in arguments.items():
        for name in names if isinstance(names, Sequence) and not isinstance(names, str) else ():
            if isinstance(name, str) and name in hidden:
                raise InvalidArgumentError(
                    f"{name!r} is a value inside the function {hidden[name]}, and each call of it has its "
                    "own. Name an input or an output of the node that calls it, or inline the functions first: "
                    "onnx.inliner.inline_local_functions(model)",
                    argument,
                )


def stop_at(graph: ir.Graph, stop: Patterns | None, hidden: Iterable[str] = ()) -> None:
    """Let no gradient pass the values that `stop` names, nor those of the nodes that it names; in sub-graphs too.

    Patterns choose among inputs and what nodes make; an initializer has to be written out. Behind each comes a marked
    Identity. What a node made hands its name on to it, so that an output keeps its name;
    an input and an initializer keep theirs. Values that carry no gradient anyway stay as they are.
    """
    if stop is None:
        return
    values: dict[str, list[Place]] = {}
    nodes: dict[str, list[Place]] = {}
    for one in (graph, *graph.subgraphs()):
        inner = [(node, value) for node in one for value in node.outputs if value.name]
        for value in (*one.inputs, *one.initializers.values(), *(value for _, value in inner)):
            values.setdefault(str(value.name), []).append((one, value))
        for node, value in inner:
            if node.name:
                nodes.setdefault(str(node.name), []).append((one, value))
    names = {name: [*values.get(name, ()), *nodes.get(name, ())] for name in dict.fromkeys((*values, *nodes))}
    for name in hidden:
        names.pop(name, None)
    pool = [n for n, places in names.items() if any(_carries(v) and not v.is_initializer() for _, v in places)]
    written = {name for name in check_names("stop", stop) if isinstance(name, str)}
    chosen: dict[ir.Value, ir.Graph] = {}
    for name in select("stop", stop, pool, exact=names, what="a value or node of the graph"):
        places = values[name] if name in written and name in values else names[name]
        chosen |= {value: one for one, value in places if _carries(value)}
    reserved = used_names(graph)
    for value, one in chosen.items():
        put_identity(one, value, reserved, stop=True, all_outputs=one is not graph)


def _carries(value: ir.Value) -> bool:
    """Whether a gradient may be at a value: of floats, of small integers that stand for them, or of unknown type."""
    dtype = value.dtype
    return dtype is None or dtype.is_floating_point() or (dtype.is_integer() and dtype.itemsize <= _LONGEST)


def put_identity(
    graph: ir.Graph, value: ir.Value, reserved: set[str], *, stop: bool = False, all_outputs: bool = False
) -> ir.Value:
    """Put an Identity between a value and all that reads it; what they read from then on.

    What a node makes gives its name away. all_outputs: of the graph too, where it puts an input out.
    """
    name, producer = str(value.name), value.producer()
    node = ir.node("Identity", [value], name=unique(f"{name}/stop" if stop else f"{name}/Identity", reserved))
    if stop:
        node.metadata_props[STOP] = "stop"
    (new,) = node.outputs
    new.type, new.shape = value.type, value.shape
    for reader, index in list(value.uses()):
        if reader is not node:
            reader.replace_input_with(index, new)
    for one in (graph, *graph.subgraphs()):
        for place, output in enumerate(one.outputs):
            if output is value and (one is not graph or all_outputs or producer is not None):
                one.outputs[place] = new
    if producer is None:
        new.name = str(node.name)
        graph.insert_before(graph[0], node) if len(graph) else graph.append(node)
    else:
        if not producer.name:  # for messages: its output's, which another node may be called by
            label = next(str(y.name) for y in producer.outputs if y.name)
            producer.name = unique(label, reserved) if any(n.name == label for n in producer.graph or ()) else label
        value.name, new.name = unique(f"{name}/before", reserved), name
        graph.insert_after(producer, node)
    return new


def prepared(
    model: ModelProto | ir.Model | str | Path,
    *,
    stop: Patterns | None = None,
    free: Free | None = None,
    edit: Edit | None = None,
    **names: Patterns | None,
) -> tuple[ModelProto, ir.Model]:
    """What `prepare` makes of a model, as a message and as a graph in which no gradient passes the values of `stop`.

    free: fixed lengths of inputs that become symbols. edit: of `prepare`. names: other arguments of the caller that
    name values of the model as it came.
    """
    proto = load(model, mapped=True)
    hidden = hidden_names(proto)
    refuse_hidden(hidden, stop=stop, **names)
    original = prepare(proto, edit)
    if free is not None:
        from onnx_backprop.converters.prepare.lengths.free import free_lengths  # whose search few models need

        original = free_lengths(original, free)
    result = to_ir(original)
    stop_at(result.graph, stop, hidden)
    return original, result
