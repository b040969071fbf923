"""Products of large float32 matrices as MatrixProduct, where the processor has registers for matrices.

    MatMul(x, w)  MatMul(dy, Transpose(w))  Gemm<transA>(x, dy)   ->   MatrixProduct(x, w)  …<transB>(dy, w)  …<transA>
    Transpose(Gemm<transA>(x, dy))   ->   MatrixProduct<transA>(dy, x)

What is known to be short stays: a product that splits a matrix into parts for few rows takes longer than one that reads
it. So do rows that are a batch's of unknown number and nothing else, batches of matrices, and Gemm with factors. A
Transpose that nobody reads any more goes.
"""

from collections import Counter
from collections.abc import Container, Iterable
from math import prod

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backprop.opset.functions.native import NATIVE_DOMAIN, NATIVE_PREFIX
from onnx_backprop.opset.graphs.edit import add_import, assign, copied
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import producers
from onnx_backprop.opset.graphs.types import Dim, Dims, shapes_of, type_dims
from onnx_backprop.opset.graphs.walk import attributes_of, is_standard, reads, subgraphs
from onnx_backprop.ort_ops.products.matrix_product import NAME

_LEAST_ROWS, _LEAST = 32, 64  # of rows; of columns and of what is summed


def replace_products(model: ModelProto) -> ModelProto:
    """Put MatrixProduct in the place of products, those inside loops too, in place; returns the model."""
    taken = used_names(model.graph)
    batches = {dims[0] for value in model.graph.input if (dims := type_dims(value.type)) and isinstance(dims[0], str)}
    if _replace(model.graph, {}, set(), taken, batches):
        add_import(model, NATIVE_DOMAIN)
    return model


def _replace(
    graph: GraphProto, outer: dict[str, Dims], floats: set[str], taken: set[str], batches: Container[Dim]
) -> bool:
    shapes = outer | shapes_of(graph)
    floats = floats | set(_floats(graph))
    makers, nodes, changed = producers(graph.node), list[NodeProto](), False
    for node in graph.node:
        product = _product(node, makers, shapes, floats, taken, batches)
        nodes += product or [copied(node)]
        changed |= bool(product)
    inner = [_replace(body, shapes, floats, taken, batches) for node in nodes for body in subgraphs(node)]
    if changed := changed or any(inner):
        assign(graph.node, _without_transposes(nodes, {value.name for value in graph.output}, shapes))
    return changed


def _without_transposes(nodes: list[NodeProto], outputs: set[str], shapes: dict[str, Dims]) -> list[NodeProto]:
    """(A·B)ᵀ as Bᵀ·Aᵀ where nobody else reads A·B; no Transpose that nobody reads."""
    products = {node.output[0]: node for node in nodes if node.op_type == NATIVE_PREFIX + NAME}
    gone: set[int] = set()
    readers = Counter(name for node in nodes for name in reads(node)) + Counter(outputs)
    for node in filter(_turns, nodes):
        product = products.get(node.input[0])
        if product is None or readers[node.input[0]] > 1 or any(len(shapes.get(x, ())) != 2 for x in product.input):
            continue
        turned = {a.name: a for a in product.attribute}
        turned["transA"].i, turned["transB"].i = int(not turned["transB"].i), int(not turned["transA"].i)
        assign(product.input, reversed(product.input))
        product.output[0] = node.output[0]
        gone.add(id(node))
    nodes = [node for node in nodes if id(node) not in gone]
    while True:
        read = outputs.union(*map(reads, nodes))
        left = [node for node in nodes if not (_turns(node) and read.isdisjoint(node.output))]
        if len(left) == len(nodes):
            return left
        nodes = left


def _turns(node: NodeProto) -> bool:
    """Whether a node is the Transpose of a matrix, or of all axes of a tensor."""
    return is_standard(node, "Transpose") and attributes_of(node).get("perm", [1, 0]) == [1, 0]


def _floats(graph: GraphProto) -> Iterable[str]:
    """Values that are known to be of float32."""
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            yield tensor.name
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            yield value.name


def _product(
    node: NodeProto,
    makers: dict[str, NodeProto],
    shapes: dict[str, Dims],
    floats: set[str],
    taken: set[str],
    batches: Container[Dim],
) -> list[NodeProto]:
    """The nodes in the place of one; none where it stays."""
    if not is_standard(node, "MatMul", "Gemm") or not floats.intersection(node.input[:2]):
        return []
    given = attributes_of(node)
    if given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
        return []
    names, turned = list(node.input[:2]), [bool(given.get(name, 0)) for name in ("transA", "transB")]
    for n in range(2):
        while (maker := makers.get(names[n])) is not None and _turns(maker):
            if not maker.attribute and len(shapes.get(maker.input[0], ())) != 2:
                break  # it may turn more than two axes
            names[n], turned[n] = maker.input[0], not turned[n]
    left, right = (shapes.get(name, ()) for name in names)
    few = len(left) == 2 and left[0] in batches
    result = node.output[0]
    if few or len(left) < 2 or len(right) != 2 or not _pays(left, right, shapes.get(result, ()), *turned):
        return []
    bias = node.input[2] if len(node.input) > 2 else ""
    product = unique(f"{result}/product", taken) if bias else result
    nodes = [
        helper.make_node(
            NATIVE_PREFIX + NAME, names, [product], name=node.name, domain=NATIVE_DOMAIN,
            transA=int(turned[0]), transB=int(turned[1]),
        )
    ]  # fmt: skip
    if bias:
        nodes.append(helper.make_node("Add", [product, bias], [result], name=unique(f"{result}/bias", taken)))
    return nodes


def _pays(left: Dims, right: Dims, result: Dims, turned_left: bool, turned_right: bool) -> bool:
    """Whether nothing that is known is short, and two of three lengths are known, as of a weight or its gradient."""
    rows, depth = (left[1:], left[0]) if turned_left else (left[:-1], left[-1])
    other, columns = right[::-1] if turned_right else right
    depth = depth if isinstance(depth, int) else other
    if len(result) == len(rows) + 1:
        *rows, columns = (d if isinstance(d, int) else e for d, e in zip((*rows, columns), result, strict=True))
    count = None if any(not isinstance(d, int) for d in rows) else prod(d for d in rows if isinstance(d, int))
    known = [
        (length, least)
        for length, least in ((count, _LEAST_ROWS), (depth, _LEAST), (columns, _LEAST))
        if isinstance(length, int)
    ]
    return len(known) > 1 and all(length >= least for length, least in known)
