"""ConvTranspose nodes whose output length onnx's shape inference gets wrong, rewritten so that it gets it right.

With auto_pad SAME_* onnx's inference adds output_padding to the length and onnxruntime to the padding; with an
output_shape below the input's length inference gives up half-way and states a wrong rank. The same node with explicit
pads and output_padding says to both what onnxruntime runs. Where the numbers for that are not all known, the input's
shape is hidden from inference. What the node computes does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto, helper

from onnx_backprop.converters.prepare.conv_transpose_pads import extent, full_length, output_shape_pads, same_pads

Lengths = dict[str, list[int | None]]  # name of a value -> its dimensions, None for what is no number
Axes = list[tuple[int, int, int]]  # per spatial axis: pads at the beginning and at the end, output_padding


def infer_with_explicit_pads(proto: ModelProto, infer: Callable[[ModelProto], ModelProto]) -> ModelProto:
    """`infer(proto)`, after the ConvTranspose nodes of the main graph that it misreads are rewritten."""
    inferred = infer(proto)
    while any(map(_may_be_misread, inferred.graph.node)):
        lengths = _lengths(inferred.graph)
        for node in filter(_may_be_misread, inferred.graph.node):
            axes = _explicit(node, lengths)
            if axes is not None:
                _rewrite(node, axes)
            elif _gives_up(node, lengths):
                _hide_input(inferred.graph, node)
            else:
                continue
            _forget_shapes(inferred.graph, node)
            break
        else:
            break
        inferred = infer(inferred)  # what follows may depend on the corrected length
    return inferred


def _may_be_misread(node: NodeProto) -> bool:
    """Whether onnx's inference may give the node's output another length than onnxruntime."""
    if node.op_type != "ConvTranspose" or node.domain not in ("", "ai.onnx"):
        return False
    attributes = _attributes(node)
    same = attributes.get("auto_pad") in (b"SAME_UPPER", b"SAME_LOWER")
    return "output_shape" in attributes or (same and any(attributes.get("output_padding", ())))


def _gives_up(node: NodeProto, lengths: Lengths) -> bool:
    """Whether inference stops at an output_shape below a known length of X."""
    wanted = _attributes(node).get("output_shape", [])
    known = lengths.get(node.input[0], [])[2:]
    return any(length is not None and out < length for length, out in zip(known, wanted, strict=False))


def _explicit(node: NodeProto, lengths: Lengths) -> Axes | None:
    """The pads and output_padding that a node means, per axis.

    None when lengths are missing, the attributes contradict each other, or inference reads them right.
    """
    attributes = _attributes(node)
    stated = attributes.get("kernel_shape") or lengths.get(node.input[1], [])[2:]
    kernel = [k for k in stated if k is not None]
    count = len(stated)
    if not count or len(kernel) < count:
        return None
    strides = attributes.get("strides", [1] * count)
    dilations = attributes.get("dilations", [1] * count)
    extra = attributes.get("output_padding", [0] * count)
    wanted = attributes.get("output_shape")
    if any(len(values) != count for values in (strides, dilations, extra)) or min(*strides, *dilations) < 1:
        return None
    upper = attributes.get("auto_pad") == b"SAME_UPPER"
    extents = [extent(k, d) for k, d in zip(kernel, dilations, strict=True)]
    if wanted is None:
        pairs = [same_pads(e, s, x, upper=upper) for e, s, x in zip(extents, strides, extra, strict=True)]
        return [(*pair, x) for pair, x in zip(pairs, extra, strict=True)]
    sources = [d for d in lengths.get(node.input[0], [])[2:] if d is not None]
    if not len(sources) == len(wanted) == count or not _gives_up(node, lengths):
        return None
    axes: Axes = []
    for source, out, e, s, x in zip(sources, wanted, extents, strides, extra, strict=True):
        begin, end = output_shape_pads(source, out, e, s, x, upper=upper)
        beyond = out - (full_length(source, e, s) - begin - end)
        if not 0 <= beyond < s:  # onnxruntime refuses it
            return None
        axes.append((begin, end, beyond))
    return axes


def _rewrite(node: NodeProto, axes: Axes) -> None:
    replaced = ("auto_pad", "output_shape", "pads", "output_padding")
    kept = [a for a in node.attribute if a.name not in replaced]
    del node.attribute[:]
    node.attribute.extend(kept)
    begins, ends, extra = (list(values) for values in zip(*axes, strict=True))
    node.attribute.append(helper.make_attribute("pads", begins + ends))
    node.attribute.append(helper.make_attribute("output_padding", extra))


def _hide_input(graph: GraphProto, node: NodeProto) -> None:
    """X through a Reshape to its own shape, which inference cannot follow; it costs the run nothing."""
    taken = {name for other in graph.node for name in (*other.input, *other.output, other.name)}
    taken.update(value.name for value in (*graph.input, *graph.initializer))
    base = f"{node.output[0]}_input"
    while any(name.startswith(base) for name in taken):
        base += "_"
    x, shape, same, hidden = node.input[0], f"{base}_shape", f"{base}_lengths", base
    position = list(graph.node).index(node)
    for n, new in enumerate(
        (
            helper.make_node("Shape", [x], [shape], name=shape),
            helper.make_node("Abs", [shape], [same], name=same),
            helper.make_node("Reshape", [x, same], [hidden], name=hidden),
        )
    ):
        graph.node.insert(position + n, new)
    graph.node[position + 3].input[0] = hidden


def _forget_shapes(graph: GraphProto, node: NodeProto) -> None:
    """Drop the stated shapes of everything that depends on a node: inference would not correct them."""
    stale = set(node.output)
    for other in graph.node:
        if stale.intersection(other.input):
            stale.update(other.output)
    for value in graph.value_info:
        if value.name in stale and value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    for value in graph.output:  # must keep a rank
        if value.name in stale and value.type.HasField("tensor_type"):
            for dim in value.type.tensor_type.shape.dim:
                dim.Clear()


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}


def _lengths(graph: GraphProto) -> Lengths:
    found: Lengths = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape"):
            found[value.name] = [d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim]
    return found
