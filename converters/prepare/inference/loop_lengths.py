"""Shapes of the states of Loops, which onnx's inference leaves open since a step may change them.

A state has the shape it has before the first step where a body that is given that shape makes the same again. Lengths
that inference cannot tell to be the same become unknown, to be looked at again in the bodies that read them; a state
whose shape certainly changes is noted, for a gradient that would have to stack it.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

from onnx_backprop.converters.prepare.inference.driver import Correct
from onnx_backprop.opset.functions.long_vectors import is_nameless
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.graphs.scope import Scope, scoped_graphs
from onnx_backprop.opset.graphs.walk import all_graphs, is_standard, subgraphs

_CHANGES = "onnx_backprop.changes"  # a Loop's metadata, which `_write_changes` writes and `shape_changes` reads
Dims = tuple[int | str | None, ...]
_COUNTERS = 2  # iteration and condition, in front of the states
_ROUNDS = 32


def loop_states(proto: ModelProto) -> Correct:
    """What follows for the states of Loops is stated, as long as that changes; nothing of it if it always does."""
    states: dict[tuple[int, int], Dims | None] = {}  # by Loop and state; None: not even the rank is the same
    changes: dict[int, dict[int, str]] = {}
    rounds = iter([True] * _ROUNDS + [False])  # the last without what was assumed

    def correct(inferred: ModelProto) -> ModelProto | None:
        narrows = next(rounds, None)
        if not narrows:
            return proto if narrows is False else None
        before, loops = dict(states), _loops(inferred.graph)
        for n, (node, body, scope) in enumerate(loops):
            for m in range(len(body.input) - _COUNTERS):
                _narrow(states, changes.setdefault(n, {}), (n, m), node, body, scope)
        if states != before:
            return _stated(proto, states)
        for n, (node, _, _) in enumerate(loops):
            _write_changes(node, changes.get(n, {}))
        return None

    return correct


def _write_changes(node: NodeProto, changes: Mapping[int, str]) -> None:
    """Write down which states change their shape from step to step, and how, in the place of what was there."""
    assign(node.metadata_props, [p for p in node.metadata_props if p.key != _CHANGES])
    if changes:
        node.metadata_props.add(key=_CHANGES, value="\n".join(f"{state} {how}" for state, how in changes.items()))


def shape_changes(node: ir.Node) -> dict[int, str]:
    """The states of a Loop whose shape changes from step to step, and how, as far as inference knows it."""
    lines = (line.partition(" ") for line in node.metadata_props.get(_CHANGES, "").splitlines())
    return {int(state): how for state, _, how in lines}


def _loops(graph: GraphProto) -> list[tuple[NodeProto, GraphProto, Scope]]:
    """Every Loop with its body and what it can see."""
    return [
        (node, inner, scope)
        for outer, scope in scoped_graphs(graph)
        for node in outer.node
        if is_standard(node, "Loop")
        for inner in subgraphs(node)
    ]


def _narrow(
    states: dict[tuple[int, int], Dims | None],
    changes: dict[int, str],
    key: tuple[int, int],
    node: NodeProto,
    body: GraphProto,
    scope: Scope,
) -> None:
    """What is left of what was assumed of a state, once the body was inferred with it."""
    m = key[1]
    if m + _COUNTERS >= len(node.input) or m + 1 >= len(body.output):
        return  # which is found elsewhere
    initial = _dims(scope, node.input[m + _COUNTERS])
    if key not in states:
        if initial is not None:
            states[key] = initial
        return
    assumed = states[key]
    dims = _dims(Scope(body, scope), body.output[m + 1].name)
    if assumed is None or initial is None or dims is None:
        states[key] = None
        return
    if len(dims) != len(assumed) or any(isinstance(a, int) and isinstance(b, int) and a != b
                                        for a, b in zip(assumed, dims, strict=True)):  # fmt: skip
        before, behind = _shape_text(assumed), _shape_text(dims)
        name = body.input[m + _COUNTERS].name
        changes.setdefault(m, f"{name!r} has the shape {before} before a step and {behind} behind it")
    same = len(dims) == len(assumed) == len(initial)
    lengths = zip(assumed, dims, initial, strict=True) if same else ()
    states[key] = tuple(a if a == b == c else None for a, b, c in lengths) if same else None


def _dims(scope: Scope, name: str) -> Dims | None:
    """The dimensions of a value, without the names that inference gives."""
    dims = scope.dims(name)
    if dims is None:
        return None
    return tuple(None if is_nameless(d) else d for d in dims)


def _shape_text(dims: Dims) -> str:
    return str([d if d is not None else "?" for d in dims])


def _stated(proto: ModelProto, states: dict[tuple[int, int], Dims | None]) -> ModelProto:
    """A copy with the shapes of states written down, in the bodies and on the nodes."""
    result = copied(proto)
    loops = _loops(result.graph)
    owners = {id(node): graph for graph in all_graphs(result.graph) for node in graph.node}
    for (n, m), dims in states.items():
        node, body, _ = loops[n]
        if dims is None:
            continue
        state = body.input[m + _COUNTERS]
        if state.type.WhichOneof("value") not in (None, "tensor_type"):
            continue
        _state(state, dims)
        outer = owners[id(node)]
        info = next((v for v in (*outer.value_info, *outer.output) if v.name == node.output[m]), None)
        element = state.type.tensor_type.elem_type
        if node.output[m] and element:
            info = outer.value_info.add(name=node.output[m]) if info is None else info
            info.type.tensor_type.elem_type = element
            _state(info, dims)
    return result


def _state(value: ValueInfoProto, dims: Dims) -> None:
    shape = value.type.tensor_type.shape
    del shape.dim[:]
    value.type.tensor_type.shape.SetInParent()
    for length in dims:
        dim = shape.dim.add()
        if isinstance(length, int):
            dim.dim_value = length
        elif length is not None:
            dim.dim_param = length
