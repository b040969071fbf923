"""What a model says about the tensors in it: shapes, as far as inference finds them, and small constants."""

from collections.abc import Iterable, Iterator

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backprop.opset.core.errors import InvalidModelError, OnnxBackpropError
from onnx_backprop.opset.core.mapped import PROTO_LIMIT
from onnx_backprop.opset.functions.declared import is_declared, operator
from onnx_backprop.opset.functions.long_vectors import infer_shapes
from onnx_backprop.opset.graphs.scope import Scope, scoped_graphs
from onnx_backprop.opset.graphs.walk import all_nodes


def custom_nodes(owner: ModelProto | GraphProto | FunctionProto) -> Iterator[NodeProto]:
    """Every node of our domain, and of operators that were declared, in subgraphs and functions too."""
    return (node for node in all_nodes(owner) if is_declared(node.domain, node.op_type))


def domain_nodes(model: ModelProto) -> Iterator[tuple[NodeProto, Scope]]:
    """`custom_nodes` with what each can see."""
    for owner in (model.graph, *model.functions):
        for graph, scope in scoped_graphs(owner) if any(custom_nodes(owner)) else ():
            yield from ((node, scope) for node in graph.node if is_declared(node.domain, node.op_type))


def infer_missing(model: ModelProto, nodes: Iterable[tuple[NodeProto, Scope]]) -> bool:
    """Write inferred types and shapes into the model where a node of our domain has an input without; whether one had.

    nodes: `domain_nodes` of the model, whose nodes are others afterwards.

    Raises InvalidModelError for a contradiction. A model too large for a protobuf message stays as it is.
    """
    complete = all(
        not name or scope.dims(name) is not None
        for node, scope in nodes
        for name in node.input
        if operator(node) is not None
    )
    if complete or model.ByteSize() > PROTO_LIMIT:
        return False
    try:
        inferred = infer_shapes(model, check_type=False)
    except OnnxBackpropError:
        raise
    except Exception as e:
        raise InvalidModelError(f"shape inference of the model failed: {e}") from e
    model.CopyFrom(inferred)
    return True


def state_types(model: ModelProto) -> None:
    """State the element types of what nodes of our domain put out in the main graph, where an input's says them.

    Not of a node that leaves out an output before another: by itself, onnxruntime refuses it where it is a kernel's.
    """
    graph, scope = model.graph, Scope(model.graph)
    types, noted = dict[str, int](), {value.name for value in graph.value_info}
    for node in graph.node:
        op = operator(node)
        if op is None or "" in node.output:
            continue
        named = (name for spec, name in zip(op.inputs, node.input, strict=False) if name and spec.type_name == "T1")
        first = next((dtype for name in named if (dtype := scope.element_type(name) or types.get(name))), 0)
        for spec, name in zip(op.outputs, node.output, strict=False):
            element = TensorProto.FLOAT if spec.type_name == "T5" else first
            if name and element and name not in noted and not scope.states_type(name):
                types[name] = element
                graph.value_info.append(helper.make_tensor_value_info(name, element, None))
