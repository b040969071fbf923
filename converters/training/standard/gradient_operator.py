"""`expand_gradients`: the standard's own `Gradient` operator as explicit nodes that any runtime has.

    dx_1, … = Gradient<xs = [x_1, …], zs = [z_1, …], y>(values of x_1, …, values of z_1, …)

`xs` and `zs` name tensors of the graph that the node stands in; together they cut out the part of it that computes
y. The node's inputs are the values that this part is evaluated at. Where they are the named tensors themselves, the
values of the forward pass serve; for each other one the part is computed again from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx import GraphProto, ModelProto, NodeProto, helper

from onnx_backprop.converters.prepare.ir_models import as_given, to_ir, to_proto
from onnx_backprop.converters.prepare.load import infer, prepare
from onnx_backprop.converters.prepare.upgrade import MIN_OPSET
from onnx_backprop.converters.prepare.writing.inline import check_inline, inlined
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.differentiate import walk_back
from onnx_backprop.converters.reverse.expand import drop_unread
from onnx_backprop.converters.reverse.known import element_type, is_float, known_lengths, type_name
from onnx_backprop.converters.reverse.models.backward import DEFAULT_KERNELS
from onnx_backprop.converters.reverse.path import explain_unreached, find_path
from onnx_backprop.converters.training.standard.optimizer_operators import TRAINING_DOMAIN, attach_optimizers
from onnx_backprop.opset import OPSET_VERSION, use_kernels
from onnx_backprop.opset.core.errors import InvalidModelError, UnsupportedError
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.functions.use_kernels import check_kernels
from onnx_backprop.opset.graphs.edit import copied, without_imports
from onnx_backprop.opset.graphs.names import rename, unique, used_names
from onnx_backprop.opset.graphs.order import ancestors
from onnx_backprop.opset.graphs.walk import all_nodes, called, defined_in, reads, subgraphs

_SMALL = 1024  # elements of a seed that is written down


@as_given
def expand_gradients(
    model: ModelProto | ir.Model | str | Path, *, kernels: str = DEFAULT_KERNELS, inline: bool = False
) -> ModelProto:
    """The model with every node of `ai.onnx.preview.training` replaced by what stock onnxruntime runs.

    A `Gradient` node becomes nodes that compute Σ ∂y/∂x for each x in its `xs`: for a y of several elements the
    gradient of their sum, as in the second derivatives of the operator's own documentation. Gradients of gradients are
    expanded from the inside out. An x that y does not depend on, or whose derivative is zero almost everywhere, gets
    zeros. Values that y depends on and that are in neither `xs` nor `zs` are held constant.

    `Adam`, `Adagrad` and `Momentum` keep their nodes and get functions in standard operators, with the formulas of
    their documentation, for float32 and float64.

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed.
        kernels: how the operators of our domain run, see `use_kernels`.
        inline: write them, and the optimizers, into the graph itself, see `backward`.

    Returns: a model of opset 18 or later with the same inputs and outputs; one without such nodes is prepared in the
    same way. Raises: InvalidModelError (names in `xs`, `zs`, `y` that the graph does not have, integer tensors, nodes
    that depend on each other), UnsupportedError for a Gradient inside a sub-graph or a function, UnsupportedOpError for
    operators on the way without a gradient rule. Those of our domain are differentiated through their bodies.
    """
    check_kernels(kernels)
    check_inline(kernels, inline=inline)
    source = copied(load(model))
    _refuse_inner(source)
    if all(o.domain not in ("", "ai.onnx") for o in source.opset_import):  # a model of optimizers alone
        source.opset_import.append(helper.make_opsetid("", MIN_OPSET))
    proto = prepare(source)
    while gradients := [node for node in proto.graph.node if _is_gradient(node)]:
        proto = _expand_some(proto, gradients)
    attach_optimizers(proto)
    if not any(node.domain == TRAINING_DOMAIN for node in all_nodes(proto.graph)):
        without_imports(proto, TRAINING_DOMAIN)
    result = use_kernels(proto, kernels)
    return inlined(result) if inline else result


def has_training_nodes(model: ModelProto) -> bool:
    """Whether the model's main graph has a node of `ai.onnx.preview.training`."""
    return any(node.domain == TRAINING_DOMAIN for node in model.graph.node)


@dataclass(frozen=True)
class _Request:
    """What one Gradient node asks for."""

    node: NodeProto
    xs: list[str]
    zs: list[str]
    y: str

    @property
    def leaves(self) -> list[str]:
        return self.xs + self.zs

    def fail(self, message: str) -> InvalidModelError:
        return InvalidModelError(message, op_type="Gradient", node=called(self.node))


def _is_gradient(node: NodeProto) -> bool:
    return (node.domain, node.op_type) == (TRAINING_DOMAIN, "Gradient")


def _refuse_inner(model: ModelProto) -> None:
    inner = [n for node in model.graph.node for graph in subgraphs(node) for n in all_nodes(graph)]
    for node in filter(_is_gradient, chain(inner, *map(all_nodes, model.functions))):
        raise UnsupportedError(
            "a Gradient inside a sub-graph or a function is not expanded; move it into the main graph",
            op_type="Gradient",
            node=called(node),
        )


def _request(node: NodeProto, known: set[str]) -> _Request:
    """The attributes of a Gradient node, proven to name tensors of the graph and to fit its inputs and outputs."""
    lists = {a.name: [s.decode() for s in a.strings] for a in node.attribute if a.name in ("xs", "zs")}
    y = next((a.s.decode() for a in node.attribute if a.name == "y"), "")
    request = _Request(node, lists.get("xs", []), lists.get("zs", []), y)
    if not request.xs:
        raise request.fail("expected at least one name in xs, got none")
    for attribute, names in (("xs", request.xs), ("zs", request.zs), ("y", [y])):
        for name in names:
            if name not in known:
                hint = near(name, known)
                raise request.fail(f"{attribute}: expected the name of a tensor of this graph, got {name!r}{hint}")
    if len(set(request.leaves)) < len(request.leaves):
        raise request.fail(f"xs, zs: expected different names, got {', '.join(request.leaves)}")
    if len(node.input) != len(request.leaves) or not all(node.input):
        raise request.fail(
            f"expected {len(request.leaves)} inputs, one for each name in xs and zs, got {list(node.input)}"
        )
    if len(node.output) > len(request.xs):
        raise request.fail(
            f"expected at most {len(request.xs)} outputs, one for each name in xs, got {len(node.output)}"
        )
    return request


def _expand_some(proto: ModelProto, gradients: Sequence[NodeProto]) -> ModelProto:
    """Expand the Gradient nodes whose y depends on no other one; types are inferred anew at the end."""
    graph = proto.graph
    protos = list(graph.node)
    position = {id(node): n for n, node in enumerate(protos)}
    known = defined_in(graph)
    requests = [_request(node, known) for node in gradients]
    parts = [[protos[n] for n in ancestors(protos, {r.y} - {*r.leaves}, r.leaves)] for r in requests]
    ready = [(r, part) for r, part in zip(requests, parts, strict=True) if not any(map(_is_gradient, part))]
    if not ready:
        raise requests[0].fail("its y depends on its own output, or on that of a Gradient for which this holds")
    elsewhere = [(r, part) for r, part in ready if list(r.node.input) != r.leaves]
    if elsewhere:
        names = used_names(proto.graph)
        for request, part in elsewhere:
            _evaluate_at_inputs(graph, request, part, names)
        return infer(proto)  # the copies have types now; the next round differentiates them
    model = to_ir(proto)
    nodes = list(model.graph)
    values = {str(v.name): v for v in (*model.graph.inputs, *model.graph.initializers.values())}
    values |= {str(v.name): v for node in nodes for v in node.outputs if v.name}
    op = Builder(used_names(model.graph))
    results: list[ir.Value] = []
    for request, part in ready:
        node = nodes[position[id(request.node)]]
        inside = [nodes[position[id(inner)]] for inner in part]
        results += _differentiate(request, node, inside, values, op, model.opset_imports)
        model.graph.remove(node, safe=True)
    drop_unread(op.nodes, results)
    model.graph.extend(op.nodes)
    model.graph.sort()
    for domain in {node.domain for node in all_nodes(op.nodes)} - {""}:
        model.opset_imports.setdefault(domain, OPSET_VERSION)
    result = to_proto(model)
    result.training_info.extend(proto.training_info)
    return infer(result)


def _evaluate_at_inputs(graph: GraphProto, request: _Request, part: Sequence[NodeProto], names: set[str]) -> None:
    """Copy what depends on the named tensors, for the values that the node has as inputs; it then names those."""
    node = request.node
    new: dict[str, str] = {}
    for leaf, given in zip(request.leaves, node.input, strict=True):
        if leaf != given:
            new[leaf] = unique(f"{leaf}_given", names)
            graph.node.append(helper.make_node("Identity", [given], [new[leaf]], name=new[leaf]))
    for inner in part:
        if not new.keys().isdisjoint(reads(inner)):
            copy = graph.node.add()
            copy.CopyFrom(inner)
            copy.name = unique(f"{inner.name or inner.op_type}_given", names)
            new |= {name: unique(f"{name}_given", names) for name in inner.output if name}
            rename(copy, new)
    for attribute in node.attribute:
        if attribute.name in ("xs", "zs"):
            attribute.strings[:] = [new.get(s.decode(), s.decode()).encode() for s in attribute.strings]
        elif attribute.name == "y":
            attribute.s = new.get(request.y, request.y).encode()
    node.input[:] = [new.get(leaf, leaf) for leaf in request.leaves]


def _differentiate(
    request: _Request,
    node: ir.Node,
    inside: Sequence[ir.Node],
    values: Mapping[str, ir.Value],
    op: Builder,
    opsets: dict[str, int],
) -> list[ir.Value]:
    """Emit the gradient and put it in the place of the Gradient node's outputs; the new ones."""
    y, xs = values[request.y], [values[name] for name in request.xs]
    for value in (y, *xs):
        if not is_float(value):
            raise request.fail(f"gradients exist for floats only, {value.name!r} has type {type_name(value)}")
    shape, dtype = known_lengths(y), element_type(y)
    if shape is not None and prod(shape) <= _SMALL:
        seed = op.constant(np.ones(shape, dtype.numpy()))
    else:
        seed = op.filled(op.shape(y), 1, dtype)
    gradients = walk_back(find_path(inside, [y], xs), {y: seed}, op, opsets)
    op.prefix = request.node.name or f"{request.y}_grad"
    results: list[ir.Value] = []
    for x, output in zip(xs, node.outputs, strict=False):
        if not output.name:
            continue
        gradient = gradients.get(x)
        if gradient is None:
            _require_zero(request, x, y, inside)
            gradient = op.zeros(op.shape(x), x)
        result = op.typed(op.Identity(gradient), x)
        ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
        result.name, output.name = output.name, None
        results.append(result)
    return results


def _require_zero(request: _Request, x: ir.Value, y: ir.Value, inside: Sequence[ir.Node]) -> None:
    """The derivative is 0 where y does not depend on x, or in jumps alone; of anything else nobody knows it is."""
    path = find_path(inside, [y], [x])
    unknown = {node: stop for node, stop in path.stops.items() if not stop.zero}
    if unknown:
        error = explain_unreached(str(x.name), [str(y.name)], replace(path, stops=unknown), argument="xs")
        raise request.fail(str(error))
