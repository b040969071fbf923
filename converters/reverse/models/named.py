"""Values of a graph by name: what to differentiate, and by what."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_backprop.converters.prepare.load import check_names, pick
from onnx_backprop.converters.reverse.known import is_float, type_name
from onnx_backprop.opset.core.errors import InvalidArgumentError

INPUT, OUTPUT = "a graph input or an initializer", "a graph output"  # what a caller most often names


def values_by_name(graph: ir.Graph) -> dict[str, ir.Value]:
    """Every value of a graph that has a name: initializers, inputs, and what its nodes make."""
    return ir.convenience.create_value_mapping(graph, include_subgraphs=False)


def pick_values(
    graph: ir.Graph, names: Sequence[str], values: Mapping[str, ir.Value], *, argument: str, what: str
) -> list[ir.Value]:
    """The values of the given names, or else those that nodes of the graph make.

    `values`: what `what` says, in its order. Errors: InvalidArgumentError for unknown and repeated names, with near
    misses, and for values of a sub-graph.
    """
    check_names(argument, names)
    known = dict(values)
    if any(isinstance(name, str) and name not in known for name in names):
        known |= {name: value for name, value in values_by_name(graph).items() if value.producer() is not None}
        what = f"{what}, or of a value inside the graph"
    for name in names:
        if isinstance(name, str) and name not in known:
            _refuse_sub_graph(graph, name, argument)
    return pick(names, known, argument=argument, what=what)


def _refuse_sub_graph(graph: ir.Graph, name: str, argument: str) -> None:
    for inner in graph.subgraphs():
        if name in values_by_name(inner):
            raise InvalidArgumentError(
                f"{name!r} is a value inside a branch or the body of a loop, which has no gradient of its "
                "own outside of it. Name a value of the main graph, such as an output of the If, Loop or Scan",
                argument,
            )


def require_floats(values: Sequence[ir.Value], argument: str) -> list[ir.Value]:
    """The values; InvalidArgumentError for other types than floats."""
    for value in values:
        if not is_float(value):
            raise InvalidArgumentError(
                f"{value.name!r} has type {type_name(value)}; gradients exist for floats only", argument
            )
    return list(values)
