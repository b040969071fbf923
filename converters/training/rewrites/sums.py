"""Sums over all elements of a tensor in stages: short rows in float32, the rows in float64.

onnxruntime adds float32 numbers up one after the other: the mean of 2²⁵ squares is 4e-3 off, and a cross entropy with
class weights 5e-3. In stages the relative error of a sum of positive numbers stays below 1e-6, that of equal ones too,
whose roundings all go the same way.
"""

from collections.abc import Collection
from math import prod

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import constant_value, dims, element_type
from onnx_backprop.converters.rules.common import cast
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.walk import subgraphs

_AT_ONCE = 1024  # elements
_SHORTEST = 8  # elements of a row
# Of the longest rows. ReduceSum and ReduceMean add several elements of a row at a time, the others one after the other.
_LONGEST = {"ReduceSum": 256, "ReduceMean": 256, "ReduceL1": 64, "ReduceL2": 64, "ReduceSumSquare": 64}
_NARROW = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def staged(op: Builder, x: ir.Value, reduce: str = "ReduceSum", dtype: ir.DataType | None = None) -> ir.Value:
    """One of ReduceSum, ReduceMean, ReduceL1, ReduceL2, ReduceSumSquare over all elements: 0-D, of the type of x.

    dtype: of the result, where it is another one.

    A tensor that is known to have at most 1024 elements, and one of float64, is reduced at once. Rows are as long as
    the lengths known at conversion allow; where that is less than 8 elements, all of x is reduced in float64.
    """
    dtype = element_type(x) if dtype is None else dtype
    if not _worth_stages(x):
        return cast(op, op.emit(reduce, [x], {"keepdims": 0})[0], dtype)
    row, mean = _row(x, _LONGEST[reduce]), reduce == "ReduceMean"
    each = "ReduceSumSquare" if reduce == "ReduceL2" else reduce
    if row >= _SHORTEST and x.dtype == ir.DataType.FLOAT:
        rows = x if (dims(x) or (None,))[-1] == row else op.Reshape(x, [-1, row])
        x, each = op.emit(each, [rows, [-1]], {"keepdims": 0})[0], "ReduceSum"
    wide = op.Cast(x, to=ir.DataType.DOUBLE)
    if each == "ReduceL1":  # which onnxruntime has no kernel of for float64 in older versions
        wide, each = op.Abs(wide), "ReduceSum"
    total = op.emit("ReduceMean" if mean else each, [wide], {"keepdims": 0})[0]
    if reduce == "ReduceL2":
        total = op.Sqrt(total)
    result = cast(op, total, dtype)
    result.shape = ir.Shape([])
    return result


def stage_sums(graph: ir.Graph, kept: Collection[str], losses: Collection[str] = ()) -> None:
    """Put sums in stages in the place of full reductions, in the graph and the branches of its If nodes.

    Cross entropies that are reduced to a mean or a sum count too. kept: names of values whose nodes stay as they are.
    losses: names of values of the loss, where sums over some axes of unknown or many elements count too.
    The values keep their names; the last node of the stages has the name of the node that it stands for. Backward nodes
    are to be there already: stages have a longer gradient than one reduction.
    """
    used = used_names(graph)
    graphs = [graph]
    while graphs:
        inner = graphs.pop()
        for node in list(inner):
            if node.domain:
                continue
            if node.op_type == "If":
                graphs += subgraphs(node)
            elif node.outputs[0].name not in kept:
                _stage(inner, node, used, some_axes=node.outputs[0].name in losses)


def _stage(graph: ir.Graph, node: ir.Node, used: set[str], *, some_axes: bool) -> None:
    op = Builder(used)
    op.prefix = str(node.name or node.outputs[0].name)
    old = node.outputs[0]
    if node.op_type in _LONGEST and _is_full(node) and _worth_stages(_first(node)):
        new = staged(op, _first(node), node.op_type)
        if node.attributes.get_int("keepdims", 1):
            new = op.Reshape(new, [1] * len(dims(_first(node)) or ()))
    elif node.op_type == "SoftmaxCrossEntropyLoss" and node.attributes.get_string("reduction", "mean") != "none":
        new = _cross_entropy(op, node)
    elif some_axes and node.op_type in ("ReduceSum", "ReduceMean") and _is_long(node):
        wide = op.Cast(_first(node), to=ir.DataType.DOUBLE)
        keepdims = node.attributes.get_int("keepdims", 1)
        new = op.Cast(op.emit(node.op_type, [wide, node.inputs[1]], {"keepdims": keepdims})[0], to=_first(node).dtype)
    else:
        return
    name, last = str(old.name), op.nodes[-1]
    new.type, new.shape = old.type, old.shape
    graph.insert_before(node, op.nodes)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    last.name, new.name = node.name, name


def _cross_entropy(op: Builder, node: ir.Node) -> ir.Value:
    """Σ_n l_n, or Σ_n l_n / Σ_n w_n, of the losses l and the weights w of all positions; w = 0 where one is ignored."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    mean = attributes.pop("reduction", "mean") == "mean"
    scores, labels, weights = (*node.inputs, None)[:3]
    assert scores is not None
    assert labels is not None
    results = op.emit(
        node.op_type, list(node.inputs), attributes | {"reduction": "none"}, outputs=max(len(node.outputs), 1)
    )
    each = results[0]
    each.shape = labels.shape
    if len(node.outputs) > 1:
        name = node.outputs[1].name
        results[1].type, results[1].shape = node.outputs[1].type, node.outputs[1].shape
        node.outputs[1].replace_all_uses_with(results[1], replace_graph_outputs=True)
        node.outputs[1].name, results[1].name = None, name
    ignored = node.attributes.get_int("ignore_index", None)
    if not mean or (weights is None and ignored is None):
        return staged(op, each, "ReduceMean" if mean else "ReduceSum")
    left_out = None if ignored is None else op.Equal(labels, ignored)
    if weights is None:
        count: ir.Value = op.Where(left_out, op.scalar(0, each), op.scalar(1, each))
    else:
        count = op.Gather(weights, labels if left_out is None else op.Where(left_out, 0, labels), axis=0)
        count = count if left_out is None else op.Where(left_out, 0, count)
    count.shape = labels.shape
    return op.Div(staged(op, each), staged(op, count))


def _first(node: ir.Node) -> ir.Value:
    x = node.inputs[0]
    assert x is not None
    return x


def _is_full(node: ir.Node) -> bool:
    """Whether a reduction goes over all axes, by what is known."""
    axes, shape = node.inputs[1] if len(node.inputs) > 1 else None, dims(_first(node))
    if node.attributes.get_int("keepdims", 1) and shape is None:
        return False
    if axes is None:
        return not node.attributes.get_int("noop_with_empty_axes", 0)
    named = constant_value(axes)
    if named is None:
        return False
    if not named.size:
        return not node.attributes.get_int("noop_with_empty_axes", 0)
    return shape is not None and {int(axis) % len(shape) for axis in named.flat} == set(range(len(shape)))


def _is_long(node: ir.Node) -> bool:
    """Whether a reduction of float32 over axes that are known may sum more elements than are summed at once."""
    x, axes = _first(node), constant_value(node.inputs[1]) if len(node.inputs) > 1 else None
    shape = dims(x)
    if shape is None or axes is None or x.dtype not in _NARROW:
        return False
    lengths = [shape[int(axis)] for axis in axes.flat]
    return any(not isinstance(d, int) for d in lengths) or prod(d for d in lengths if isinstance(d, int)) > _AT_ONCE


def _worth_stages(x: ir.Value) -> bool:
    shape = dims(x)
    small = shape is not None and all(isinstance(d, int) for d in shape) and _least_size(x) <= _AT_ONCE
    return x.dtype in _NARROW and not small


def _least_size(x: ir.Value) -> int:
    return prod(d for d in dims(x) or () if isinstance(d, int))


def _row(x: ir.Value, longest: int) -> int:
    """The longest row, up to `longest` elements, that the number of elements is a multiple of."""
    known = _least_size(x)
    return next(row for row in range(longest, 0, -1) if known % row == 0) if known else 1
