"""Shape inference that does not follow the numbers of long vectors.

onnx's inference follows what shapes are computed from: integers, but also every float tensor of one axis, each element
as a dimension of its own, 70 bytes and more. Twenty products of a million floats take 9 seconds and 6 gigabytes.
"""

from collections.abc import Iterator

from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, defs, shape_inference

from onnx_backprop.opset.functions.misread_shapes import misread
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.hide import hide, show
from onnx_backprop.opset.graphs.walk import DEFAULT_DOMAINS, all_graphs, is_standard, subgraphs

LONG = 1024  # elements; no tensor has that many axes
_TOO_LONG = 1 << 16  # elements; inside functions, whose outputs may get their lengths by numbers alone
_AS_DIV = ("Add", "Mul", "Sub")  # inferred as Div, alike but for numbers, which are not followed there
_HIDDEN = "onnx_backprop.hidden"
NAMELESS = "unk__"  # how inference begins the names that it gives to lengths


def infer_shapes(proto: ModelProto, *, check_type: bool = True) -> ModelProto:
    """`onnx.shape_inference.infer_shapes` with numbers followed but for those of long vectors, and Einsum and Attention
    read right.

    Nodes that read or hold such a vector, in sub-graphs or in what they are made of, are inferred without numbers.
    """
    first = shape_inference.infer_shapes(proto, check_type=check_type, data_prop=False)
    graph = first.graph
    long, too_long = set(_long(graph, LONG)), set(_long(graph, _TOO_LONG))
    opset = max((o.version for o in proto.opset_import if o.domain in DEFAULT_DOMAINS), default=1)
    hidden = {n for n, node in enumerate(graph.node) if _follows(node, long, too_long, opset)} if long else set()
    guessed = misread(graph)
    hidden |= guessed.keys()
    if not hidden:
        return shape_inference.infer_shapes(proto, check_type=check_type, data_prop=True)
    known = {value.name: value for value in (*graph.value_info, *graph.output)}
    work = copied(proto)
    stated = {value.name for value in (*work.graph.value_info, *work.graph.output)}
    replaced = {n for n in hidden if is_standard(graph.node[n], *_AS_DIV)}
    for n in replaced:
        work.graph.node[n].op_type = "Div"
    ends = {value.name: value for value in work.graph.output}
    hide(work, (work.graph.node[n] for n in hidden - replaced), _HIDDEN)
    for n in hidden - replaced:
        node = work.graph.node[n]
        certain = guessed.get(n, _without_names)
        for name in node.output:
            if name in known and name not in stated:
                work.graph.value_info.add().CopyFrom(certain(known[name]))
            if name in ends:
                ends[name].CopyFrom(certain(known[name]))
    result = shape_inference.infer_shapes(work, check_type=check_type, data_prop=True)
    for n in hidden:
        result.graph.node[n].CopyFrom(graph.node[n])  # with the types that the first inference found in sub-graphs
    show(result, _HIDDEN)
    return result


def _long(graph: GraphProto, least: int) -> Iterator[str]:
    """The names of vectors of a graph and those inside it that are longer than this."""
    for one in all_graphs(graph):
        yield from (tensor.name for tensor in one.initializer if len(tensor.dims) == 1 and tensor.dims[0] > least)
        yield from (value.name for value in (*one.input, *one.output, *one.value_info) if is_long(value, least))


def _follows(node: NodeProto, long: set[str], too_long: set[str], opset: int) -> bool:
    """Whether inference would follow the numbers of a long vector in a node."""
    inside = subgraphs(node)
    if inside:
        return any(_follows(inner, long, too_long, opset) for graph in inside for inner in graph.node)
    if not is_standard(node):
        return not too_long.isdisjoint((*node.input, *node.output))
    if long.isdisjoint((*node.input, *node.output)):
        return False
    return _has_rule_for_numbers(node.op_type, opset)


def _has_rule_for_numbers(op_type: str, opset: int) -> bool:
    """Whether onnx computes the numbers of an operator's result, or those of operators that it is made of."""
    try:
        schema = defs.get_schema(op_type, opset, "")
    except defs.SchemaError:
        return False
    kinds = ("function", "context_dependent_function", "data_propagation_function")
    return any(getattr(schema, f"has_{kind}") for kind in kinds)


def is_nameless(length: object) -> bool:
    """Whether a length has no name but the one that inference has given it."""
    return isinstance(length, str) and length.startswith(NAMELESS)


def is_long(value: ValueInfoProto, least: int = LONG) -> bool:
    """Whether a value is a long vector."""
    dims = value.type.tensor_type.shape.dim
    return len(dims) == 1 and dims[0].dim_value > least


def _without_names(value: ValueInfoProto) -> ValueInfoProto:
    """A copy without the names that the first inference gave to lengths: the second gives names anew."""
    result = copied(value)
    for dim in result.type.tensor_type.shape.dim:
        if is_nameless(dim.dim_param):
            dim.Clear()
    return result
