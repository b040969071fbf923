"""The last matrix product of a model together with its cross entropy, in blocks of rows: logits are never whole.

    total = Σ_n w_n · l(z_n, t_n),  z_n = f(x_n)

f is what leads from the last products to the logits: a MatMul or Gemm by a matrix that is trained, frozen or tied to an
embedding, a MatMulNBits, a LoRA beside it, a bias, a factor, a softcap c · tanh(z / c). Each step of a Loop takes some
of the rows that count, computes their logits and adds up their losses; `reverse.loops.rows` lets the same steps compute
the gradients. Source: Hsu et al., "Liger Kernel", 2024; Wijmans et al., "Cut Your Losses", 2025.
"""

import json
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.detached import is_stop
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import label
from onnx_backprop.converters.reverse.known import dims, element_type, is_float
from onnx_backprop.converters.reverse.loops.rows import ROWS, row_losses
from onnx_backprop.converters.rules.common import cast
from onnx_backprop.converters.training.losses.base import LossBuilder, require_rank, wide
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.graphs.facts import ARITHMETIC
from onnx_backprop.opset.graphs.walk import is_standard

_WORTH = 2**20  # logits from which on blocks are used
_UNKNOWN = 2**12  # classes from which on they are where the number of rows is unknown
_AT_ONCE = 2**24  # logits of a block, if that is not less than
_LEAST = 128  # rows, below which a product takes as long as one of this many
_UNARY = ("Tanh", "Neg", "Identity", "Cast")


@dataclass(frozen=True)
class Head:
    """What leads to logits, row by row.

    nodes: in their order. rows: what each row of the logits reads a row of, and the others read whole by `nodes`.
    """

    nodes: list[ir.Node]
    rows: list[ir.Value]
    product: ir.Node


def head_of(logits: ir.Value) -> Head | None:
    """The head that ends in some logits; None where their last axis is not made by a matrix product."""
    shape = dims(logits)
    if shape is None or len(shape) < 2:
        return None
    nodes: dict[ir.Node, None] = {}
    rows: dict[ir.Value, None] = {}
    products: list[ir.Node] = []
    if not _visit(logits, shape[-1], nodes, rows, products) or not products:
        return None
    return Head(list(nodes), list(rows), products[0])


def positions_shape(op: Builder, logits: ir.Value) -> ir.Value:
    """The shape of logits without their last axis, 1-D int64, read of what their head reads where that is known."""
    head = head_of(logits)
    if head is None:
        return op.Shape(logits, start=0, end=-1)
    product, shape = head.product, None
    for node in head.nodes[head.nodes.index(product) :]:
        if is_standard(node, "Reshape"):
            shape = node.inputs[1]
    x = product.inputs[0]
    if shape is not None:  # one column of the rows in the place of the classes
        column = op.Slice(x, [0], [1], [-1])
        x = op.Reshape(column, op.Concat(op.Slice(shape, [0], [-1], [0]), [1], axis=0))
    return op.Shape(x, start=0, end=-1)


def _visit(
    z: ir.Value, classes: object, nodes: dict[ir.Node, None], rows: dict[ir.Value, None], products: list[ir.Node]
) -> bool:
    """Walk back from a value of one row for each row of the logits; whether all of it is known to be one."""
    node, shape = z.producer(), dims(z)
    if node is None or node in nodes:
        return node is not None
    if shape is None or shape[-1] != classes or not is_float(z) or is_stop(node):
        return False
    first, *others = node.inputs
    if _is_product(node, len(shape)):
        assert first is not None
        rows[first] = None
        products.append(node)
    elif is_standard(node, *_UNARY) and first is not None:
        if not is_float(first) or (first.dtype != z.dtype and ir.DataType.DOUBLE in (first.dtype, z.dtype)):
            return False
        if not _visit(first, classes, nodes, rows, products):
            return False
    elif is_standard(node, "Reshape") and first is not None:
        if not _visit(first, classes, nodes, rows, products):
            return False
    elif node in ARITHMETIC:
        for operand in (first, *others):
            if operand is None or dims(operand) is None:
                return False
            if not _is_broadcast(operand) and not (
                dims(operand) == shape and None not in shape and _visit(operand, classes, nodes, rows, products)
            ):
                return False
    else:
        return False
    nodes[node] = None
    return True


def _is_product(node: ir.Node, rank: int) -> bool:
    """Whether each row of the output is the product of a row of the first input and a matrix."""
    if _is_packed(node):
        return node.inputs[0] is not None and len(dims(node.inputs[0]) or ()) == rank
    if not is_standard(node, "MatMul", "Gemm"):
        return False
    a, b, c = (*node.inputs, None)[:3]
    known = a is not None and b is not None and len(dims(a) or ()) == rank and len(dims(b) or ()) == 2
    turned = node.attributes.get("transA")
    return known and (turned is None or not turned.as_int()) and (c is None or _is_broadcast(c))


def _is_packed(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == ("com.microsoft", "MatMulNBits")


def _is_broadcast(value: ir.Value) -> bool:
    """Whether a value is the same for all rows."""
    shape = dims(value)
    return shape is not None and all(d == 1 for d in shape[:-1])


def in_blocks(shape: Dims, rows: int | None) -> int:
    """How many rows of logits of a shape to compute at once; 0: all. rows: what the caller says, None: nothing."""
    *before, classes = shape
    if rows is not None or not isinstance(classes, int):
        return rows or 0
    known = [d for d in before if isinstance(d, int)]
    worth = prod(known) * classes >= _WORTH if len(known) == len(before) else classes >= _UNKNOWN
    return max(_AT_ONCE // classes, _LEAST) if worth else 0


def emit_blocks(
    op: LossBuilder,
    logits: ir.Value,
    labels: ir.Value,
    weights: ir.Value | None,
    ignored: int | None,
    *,
    rows: int | None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> ir.Value | None:
    """Σ_n w_n · l_n, 0-D; None where the logits are not worth blocks, or no head is found.

    labels: int64, one for each row of the logits, of one axis. weights: of the rows, None: 1. ignored: a label whose
    rows are left out. rows: of a block, see `in_blocks`.
    """
    head = head_of(logits)
    size, classes = in_blocks(require_rank(logits), rows), require_rank(logits)[-1]
    if head is None or not size or not isinstance(classes, int):
        return None
    count = op.Size(labels)
    places = op.Range(0, count, 1)
    if ignored is not None:
        left_out = op.Equal(labels, ignored)
        places = op.Compress(places, op.Not(left_out), axis=0)
        labels = op.Where(left_out, 0, labels)  # of the row that fills blocks up
    number = op.Size(places)
    number.shape = ir.Shape([])
    blocks = op.Max(op.Div(op.Add(number, size - 1), size), 1)
    each = op.Max(op.Div(op.Add(number, op.Sub(blocks, 1)), blocks), 1)  # rows of a block
    places = op.Concat(places, [0], axis=0)  # the last fills blocks up
    outer = {x: x if len(dims(x) or ()) == 2 else op.Flatten(x, axis=-1) for x in head.rows}
    for x, flat in outer.items():
        flat.shape = ir.Shape((None, (dims(x) or (None,))[-1])) if flat is not x else x.shape
    parameters = _parameters(op, head)

    inner = op.inside()
    inner.prefix = f"{op.prefix}/rows"
    n, go = _argument(inner, "n", ir.DataType.INT64), _argument(inner, "go", ir.DataType.BOOL)
    total = _argument(inner, "total", ir.DataType.DOUBLE)
    place = inner.Add(inner.Mul(n, each), inner.Range(0, each, 1))
    at = inner.Gather(places, inner.Min(place, number))
    copies: dict[ir.Value, ir.Value] = dict(parameters)
    for x, flat in outer.items():
        copies[x] = inner.Gather(flat, at)
        copies[x].shape = ir.Shape((None, (dims(x) or (None,))[-1]))
    for node in head.nodes:
        copies[node.outputs[0]] = _emitted(inner, node, copies, classes)
    z = copies[logits]
    counts = inner.Cast(inner.Less(place, number), to=element_type(z))
    noted = {}
    if weights is not None:
        row_weights = inner.Gather(weights, at)
        counts, noted = inner.Mul(counts, row_weights), {"weights": row_weights}
    w = inner.Unsqueeze(counts, [1])
    t = inner.Unsqueeze(inner.Gather(labels, at), [1])
    loss, values = row_losses(inner, z, t, classes, smoothing, z_loss)
    added = inner.Add(total, inner.ReduceSum(inner.Cast(inner.Mul(w, loss), to=ir.DataType.DOUBLE), keepdims=0))
    added.shape = ir.Shape([])
    body = ir.Graph([n, go, total], [inner.Identity(go), added], nodes=inner.nodes, name=inner.unique(inner.prefix))
    inputs = [blocks, op.constant(np.array(True)), op.constant(np.array(0.0))]
    result = op.emit("Loop", inputs, {"body": body})[0]
    about: dict[str, object] = {"classes": classes, "smoothing": smoothing, "z_loss": z_loss}
    about |= {name: value.name for name, value in (values | noted | {"z": z, "w": w, "at": at}).items()}
    op.nodes[-1].metadata_props[ROWS] = json.dumps(about)
    result.type, result.shape = ir.TensorType(ir.DataType.DOUBLE), ir.Shape([])
    op.blocks[label(head.product)] = size
    return op.typed(cast(op, result, element_type(z)), ir.Value(type=z.type, shape=result.shape))


def _argument(op: Builder, name: str, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=op.unique(f"{op.prefix}/{name}"), type=ir.TensorType(dtype), shape=ir.Shape([]))


def _parameters(op: Builder, head: Head) -> dict[ir.Value, ir.Value]:
    """What all rows read, in float32 where it is of half precision, without axes of length 1 in front."""
    result: dict[ir.Value, ir.Value] = {}
    inside = {y for node in head.nodes for y in node.outputs}
    for node in head.nodes:
        for n, x in enumerate(node.inputs):
            if x is None or x in inside or x in result or (n == 0 and x in head.rows) or is_standard(node, "Reshape"):
                continue
            if _is_packed(node):
                result[x] = x
                continue
            shape, matrix = dims(x) or (), n == 1 and _is_product(node, len(dims(node.outputs[0]) or ()))
            source = _turned(x) if matrix else None
            value = wide(op, source or x)
            if not matrix and len(shape) > 1:
                value = op.Reshape(value, [-1])
                value.shape = ir.Shape(shape[-1:])
            result[x] = value
    return result


def _turned(x: ir.Value) -> ir.Value | None:
    """The matrix that x is the transpose of, as the head of a tied embedding is."""
    node = x.producer()
    if node is None or not is_standard(node, "Transpose") or len(dims(x) or ()) != 2 or is_stop(node):
        return None
    perm = node.attributes.get("perm")
    return node.inputs[0] if perm is None or list(perm.as_ints()) == [1, 0] else None


def _emitted(op: Builder, node: ir.Node, copies: dict[ir.Value, ir.Value], classes: int) -> ir.Value:
    """The same for a block of rows. Products are Gemms, whose gradients transpose nothing."""
    inputs = [None if x is None else copies.get(x) for x in node.inputs]
    if is_standard(node, "Identity", "Reshape", "Cast"):  # rows stay rows, and all is of one type
        assert inputs[0] is not None
        return inputs[0]
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    op_type = node.op_type
    if is_standard(node, "MatMul", "Gemm"):
        op_type, b = "Gemm", node.inputs[1]
        inputs[0] = None if inputs[0] is None else wide(op, inputs[0])
        if b is not None and _turned(b) is not None:
            attributes["transB"] = 1 - attributes.get("transB", 0)
    (result,) = op.emit(op_type, inputs, attributes, domain=node.domain)
    if _is_packed(node) and inputs[0] is not None:
        result.dtype = element_type(inputs[0])
    result.shape = ir.Shape((None, classes))
    return wide(op, result)
