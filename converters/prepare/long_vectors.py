"""Shape inference that does not follow the numbers of long vectors.

onnx's inference follows what shapes are computed from: integers, but also every float tensor of one axis, each element
as a dimension of its own, 70 bytes and more. Twenty products of a million floats take 9 seconds and 6 gigabytes.
"""

from onnx import ModelProto, NodeProto, ValueInfoProto, shape_inference

from onnx_backprop.converters.prepare.graphs import DEFAULT_DOMAINS, copied, without_imports

LONG = 1024  # elements; no tensor has that many axes
_FOLLOWED = frozenset(
    {"Add", "Cast", "Concat", "Gather", "Identity", "Mul", "Shape", "Size", "Slice", "Squeeze", "Sub", "Unsqueeze"}
)
_HIDDEN = "onnx_backprop.hidden"
_NAMELESS = "unk__"  # how inference begins the names that it gives to lengths


def infer_shapes(proto: ModelProto) -> ModelProto:
    """`onnx.shape_inference.infer_shapes` with types checked, and numbers followed but for those of long vectors."""
    first = shape_inference.infer_shapes(proto, check_type=True, data_prop=False)
    graph = first.graph
    long = {t.name for t in graph.initializer if len(t.dims) == 1 and t.dims[0] > LONG}
    long |= {value.name for value in (*graph.input, *graph.output, *graph.value_info) if _is_long(value)}
    hidden = {n for n, node in enumerate(graph.node) if _is_followed(node) and not long.isdisjoint(node.input)}
    if not hidden:
        return shape_inference.infer_shapes(proto, check_type=True, data_prop=True)
    known = {value.name: value for value in (*graph.value_info, *graph.output)}
    work = copied(proto)
    work.opset_import.add(domain=_HIDDEN, version=1)
    stated = {value.name for value in (*work.graph.value_info, *work.graph.output)}
    for n in hidden:
        node = work.graph.node[n]
        node.domain = _HIDDEN
        for name in node.output:
            if name in known and name not in stated:
                work.graph.value_info.add().CopyFrom(_without_names(known[name]))
    for value in work.graph.output:
        if any(value.name in work.graph.node[n].output for n in hidden):
            value.CopyFrom(_without_names(known[value.name]))
    result = shape_inference.infer_shapes(work, check_type=True, data_prop=True)
    for n in hidden:
        result.graph.node[n].domain = proto.graph.node[n].domain
    without_imports(result, _HIDDEN)
    return result


def _is_followed(node: NodeProto) -> bool:
    return node.op_type in _FOLLOWED and node.domain in DEFAULT_DOMAINS


def _is_long(value: ValueInfoProto) -> bool:
    dims = value.type.tensor_type.shape.dim
    return len(dims) == 1 and dims[0].dim_value > LONG


def _without_names(value: ValueInfoProto) -> ValueInfoProto:
    """A copy without the names that the first inference gave to lengths: the second gives names anew."""
    result = copied(value)
    for dim in result.type.tensor_type.shape.dim:
        if dim.dim_param.startswith(_NAMELESS):
            dim.Clear()
    return result
