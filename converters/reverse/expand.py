"""Operators that are differentiated through what they are made of: a function body of ONNX, or the branches of an If.

The forward node stays as it is, so its outputs are bit for bit what they were: a kernel and the body it stands for
round differently, and a branch runs on one side of a condition only. (Where onnxruntime has no kernel and computes the
body itself, the last bits may change with what it fuses.) A copy of the body is differentiated in its place, and what
the gradient reads of that copy is computed again in the backward part; the rest of the copy is dropped. The copy's
outputs are its own too: a rule may compare an output with an input bit by bit, as that of Max does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx
import onnx_ir as ir
from onnx import ModelProto, TypeProto, checker, defs, helper, inliner, numpy_helper, shape_inference

from onnx_backprop.converters.prepare.inference.driver import infer_corrected
from onnx_backprop.converters.prepare.inference.inner_constants import copy_constants
from onnx_backprop.converters.prepare.inference.loop_lengths import loop_states
from onnx_backprop.converters.prepare.inference.loop_sequences import loose_sequences
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import label, unsupported
from onnx_backprop.converters.reverse.known import constant_value, dims
from onnx_backprop.converters.reverse.unread import detach, without_unread_rows
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import OnnxBackpropError
from onnx_backprop.opset.core.op import Arg, Attributes
from onnx_backprop.opset.core.schema import attributes_of
from onnx_backprop.opset.functions.long_vectors import is_long, is_nameless
from onnx_backprop.opset.functions.onnx import standard_body
from onnx_backprop.opset.functions.protos import named_outputs
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.facts import DRAWS
from onnx_backprop.opset.graphs.order import dependencies
from onnx_backprop.opset.graphs.walk import all_nodes, subgraphs
from onnx_backprop.opset.operators.registry import BY_NAME

LOCAL = "onnx_backprop.body"
CONSTANTS_LIMIT = 1024  # elements of an input's value that shape inference is shown
Unique = Callable[[str], str]
Amendment = Callable[[onnx.FunctionProto, ir.Node], None]
AMENDMENTS: dict[tuple[str, str], Amendment] = {}


def amends(op_type: str, domain: str = "") -> Callable[[Amendment], Amendment]:
    """Register a function that changes an operator's body, where it does not say what onnxruntime computes."""

    def register(function: Amendment) -> Amendment:
        AMENDMENTS[domain, op_type] = function
        return function

    return register


@dataclass(frozen=True)
class Expansion:
    """A copy of what a node is made of. `outputs` correspond to the node's, None where it leaves one out."""

    nodes: list[ir.Node]
    outputs: list[ir.Value | None]


def function_body(node: ir.Node, opsets: Mapping[str, int]) -> Expansion | None:
    """The body that ONNX or our domain gives an operator, wired to the node's own inputs; None where there is none.

    Which body depends on the opset, the node's attributes, and the types of its inputs. Errors: UnsupportedError when
    onnx cannot write the body for these, as for an input of unknown type.
    """
    try:
        schema = defs.get_schema(node.op_type, opsets[node.domain], node.domain)
    except defs.SchemaError:
        return None
    if node.domain != DOMAIN and not has_body(schema):
        return None
    given = {str(value.name): value for value in node.inputs if value is not None}
    try:
        model = _alone(node, schema, given, opsets)
        if model is None:
            return None  # the schema has a body, but none for these types
        inlined = inliner.inline_local_functions(model)
        _check_nodes(inlined)
        _constants_are_known(inlined, given)
        copy_constants(inlined)
        short = not any(is_long(value) for value in inlined.graph.input)
        infer = partial(shape_inference.infer_shapes, check_type=True, strict_mode=True, data_prop=short)
        inlined = infer_corrected(inlined, infer, loose_sequences, loop_states)
    except OnnxBackpropError:
        raise
    except Exception as e:
        raise unsupported(
            node, f"it has no gradient rule, and the function body that is defined for it cannot be used here: {e}"
        ) from e
    graph = ir.from_proto(inlined).graph
    outputs = iter(list(graph.outputs))
    graph.outputs.clear()
    for inner in (*graph.inputs, *graph.initializers.values()):
        inner.replace_all_uses_with(given[str(inner.name)])
    wired = [next(outputs) if value.name else None for value in node.outputs]
    nodes = _taken_out(graph)
    _forget_names(nodes, given.values())
    for inner in nodes:
        inner.name = f"{label(node)}/{inner.op_type}"  # for messages
    return Expansion(nodes, [_outer(value, given) for value in wired])


def _forget_names(nodes: Iterable[ir.Node], given: Iterable[ir.Value]) -> None:
    """Lengths that inference has named in a body alone are other ones than those it names likewise elsewhere."""
    known = {length for value in given for length in dims(value) or ()}
    for inner in all_nodes(nodes):
        for value in (*inner.outputs, *(x for graph in subgraphs(inner) for x in graph.inputs)):
            named = [n for n, d in enumerate(dims(value) or ()) if is_nameless(d) and d not in known]
            if named and value.shape is not None:
                value.shape = ir.Shape([None if n in named else d for n, d in enumerate(value.shape)])


def has_body(schema: defs.OpSchema) -> bool:
    """Whether ONNX gives an operator a function body, of its own or written for given attributes and types."""
    return any(getattr(schema, name) for name in ("has_function", "has_context_dependent_function"))  # not in the stubs


def branch_bodies(node: ir.Node) -> list[Expansion]:
    """Copies of the then-branch and the else-branch of an If."""
    return [graph_copy(node.attributes[name].as_graph())[0] for name in ("then_branch", "else_branch")]


def graph_copy(graph: ir.Graph) -> tuple[Expansion, list[ir.Value]]:
    """A copy of a graph in a node, and its inputs."""
    copy = graph.clone(allow_outer_scope_values=True)
    inputs, outputs = list(copy.inputs), list[ir.Value | None](copy.outputs)
    copy.outputs.clear()
    copy.inputs.clear()
    return Expansion(_taken_out(copy), outputs), inputs


def _alone(
    node: ir.Node, schema: defs.OpSchema, given: Mapping[str, ir.Value], opsets: Mapping[str, int]
) -> ModelProto | None:
    """A model of one node, which calls its body as a local function, with the types it has in the whole model.

    Attributes are written out, because onnx's inliner does not know their defaults. That inliner could find the body
    itself, but not where an optional input in the middle is left out.
    """
    proto = ir.to_proto(node)
    written = {attribute.name for attribute in proto.attribute}
    for name, attribute in schema.attributes.items():
        if name not in written and attribute.default_value.name:
            proto.attribute.append(attribute.default_value)
    if node.domain == DOMAIN:
        body = _domain_body(node, proto, opsets)
    else:
        body = _written_body(node, proto, schema, opsets[node.domain])
    if not body.node:
        return None
    amend = AMENDMENTS.get((node.domain, node.op_type))
    if amend is not None:
        amend(body, node)
    proto.domain = body.domain = LOCAL
    body.name, proto.overload = proto.op_type, ""
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    assign(body.opset_import, imports)
    outputs = {str(value.name): value for value in node.outputs if value.name}
    graph = helper.make_graph([proto], "body", _typed(given), _typed(outputs))
    imports.append(helper.make_opsetid(LOCAL, 1))
    return helper.make_model(graph, opset_imports=imports, functions=[body], ir_version=10)


def _written_body(node: ir.Node, proto: onnx.NodeProto, schema: defs.OpSchema, opset: int) -> onnx.FunctionProto:
    """The newest body the schema has for an opset; without nodes where it has none.

    A schema has one body, or writes one for given attributes and input types; onnx's stubs know neither.
    """
    body = onnx.FunctionProto()
    for kind in ("function", "context_dependent_function"):
        versions = [v for v in getattr(schema, f"{kind}_opset_versions") if v <= opset]
        if not getattr(schema, f"has_{kind}") or not versions:
            continue
        get = getattr(schema, f"get_{kind}_with_opset_version")
        if kind == "function":
            body.ParseFromString(get(max(versions)))
        else:
            types = [TypeProto() if value is None else _typed({"": value})[0].type for value in node.inputs]
            serialized = [one.SerializeToString() for one in types]
            body.ParseFromString(get(max(versions), proto.SerializeToString(), serialized))
    return body


def _domain_body(node: ir.Node, proto: onnx.NodeProto, opsets: Mapping[str, int]) -> onnx.FunctionProto:
    """The body in standard operators of an operator of our domain, for what is known of the node's inputs."""
    op = BY_NAME[node.op_type]
    args: list[Arg | None] = [None] * len(op.inputs)
    single = True
    for n, (spec, value) in enumerate(zip(op.inputs, node.inputs, strict=False)):
        if value is None:
            continue
        args[n] = Arg.of_array(spec, dims(value), None if spec.tensor else constant_value(value))
        single = single and (spec.type_name != "T1" or value.dtype == ir.DataType.FLOAT)
    attributes = Attributes(op, attributes_of(proto))
    return standard_body(op, attributes, args, opsets[""], named_outputs(op, proto), single=single)


def complaint(node: ir.Node, version: int) -> str:
    """What onnx's strict inference has to say against a node alone; "" where that is nothing."""
    given = {str(value.name): value for value in node.inputs if value is not None}
    outputs = [onnx.ValueInfoProto(name=value.name) for value in node.outputs if value.name]
    graph = helper.make_graph([ir.to_proto(node)], "alone", _typed(given), outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(node.domain, version)])
    try:
        _constants_are_known(model, given)
        shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except Exception as e:  # noqa: BLE001 - whatever it is, it is the complaint
        return str(e)
    return ""


def _typed(values: Mapping[str, ir.Value]) -> list[onnx.ValueInfoProto]:
    return [ir.to_proto(ir.Value(name=name, type=v.type, shape=v.shape)) for name, v in values.items()]


def _check_nodes(model: ModelProto) -> None:
    """Whether the body is written for the model's opset: a body may be older than that."""
    context = checker.C.CheckerContext()
    context.ir_version = model.ir_version
    context.opset_imports = {o.domain: o.version for o in model.opset_import}
    for node in all_nodes(model.graph):
        if not subgraphs(node):  # alone, one with sub-graphs seems to read values that nobody makes
            checker.check_node(node, context)


def _constants_are_known(model: ModelProto, given: Mapping[str, ir.Value]) -> None:
    """Turn the inputs whose values no run can change into initializers, for shape inference to see."""
    for declared in list(model.graph.input):
        array = constant_value(given[declared.name])
        if array is not None and array.size <= CONSTANTS_LIMIT:
            model.graph.input.remove(declared)
            model.graph.initializer.append(numpy_helper.from_array(array, declared.name))


def _outer(value: ir.Value | None, given: Mapping[str, ir.Value]) -> ir.Value | None:
    """An input that the body hands on as it is, as the value outside."""
    if value is not None and value.producer() is None:
        return given[str(value.name)]
    return value


def _taken_out(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of a graph that is given up; its initializers become Constant nodes."""
    constants: list[ir.Node] = []
    for value in list(graph.initializers.values()):
        if value.uses():
            constant = ir.node("Constant", [], {"value": value.const_value})
            copy = constant.outputs[0]
            copy.name, copy.type, copy.shape = value.name, value.type, value.shape
            value.replace_all_uses_with(copy)
            constants.append(constant)
    nodes = list(graph)
    graph.remove(nodes)
    return [*constants, *nodes]


def rename(node: ir.Node, prefix: str, unique: Unique) -> None:
    """Give a node, those inside it and the values that they make names that are free."""
    for inner in all_nodes([node]):
        inner.name = unique(f"{prefix}/{inner.op_type}")
        leaves = [value for graph in subgraphs(inner) for value in (*graph.inputs, *graph.initializers.values())]
        for value in (*inner.outputs, *leaves):
            if value.name:
                value.name = unique(f"{prefix}/{value.name}")


def prune_and_name(
    body: Expansion, op: Builder, node: ir.Node, emitted: Sequence[ir.Node], grads: Sequence[ir.Value]
) -> None:
    """Once the gradient is emitted: take the copied nodes that it does not read away, and give the others their names.

    `emitted`: the copy and its gradient; what the gradient reads is what `grads` depend on.
    Errors: UnsupportedError for an operator that would draw other random numbers than it did in the forward pass.
    """
    needed = dependencies(emitted, grads)
    unread = {copy for copy in body.nodes if needed.isdisjoint(copy.outputs)}
    op.nodes[:] = [n for n in op.nodes if n not in unread]
    for copy in reversed(body.nodes):
        if copy in unread:
            detach(copy)
        else:
            _require_repeatable(copy, node)
            kept = without_unread_rows(copy, set(grads))
            if kept is not copy:
                op.nodes[op.nodes.index(copy)] = kept
            rename(kept, f"{label(node)}_again", op.unique)


def drop_unread(nodes: list[ir.Node], kept: Iterable[ir.Value]) -> None:
    """Take the nodes that neither another nor `kept` needs out of a complete list of backward nodes."""
    needed, unread = set(kept), set()
    for node in reversed(nodes):
        if not any(value.uses() or value in needed for value in node.outputs):
            unread.add(node)
            detach(node)
    nodes[:] = [node for node in nodes if node not in unread]


def drop_dead(graph: ir.Graph) -> None:
    """Remove the nodes of a graph that no output of it depends on."""
    nodes, kept = list(graph), list(graph)
    drop_unread(kept, graph.outputs)
    graph.remove(set(nodes).difference(kept))


def _require_repeatable(copied: ir.Node, node: ir.Node) -> None:
    for copy in all_nodes([copied]):
        training = copy.op_type == "Dropout" and len(copy.inputs) > 2 and copy.inputs[2] is not None
        if training:
            mode = constant_value(copy.inputs[2])
            training = mode is None or bool(mode.any())
        if copy.op_type in DRAWS or training:
            raise unsupported(
                node,
                f"its gradient computes {copy.op_type} '{label(copy)}' a second time, which would draw other random "
                "numbers. Move that node out of the sub-graph",
            )
