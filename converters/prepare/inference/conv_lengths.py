"""ConvTranspose nodes whose output length onnx's shape inference gets wrong, rewritten so that it gets it right.

With auto_pad SAME_* onnx's inference adds output_padding to the length and onnxruntime to the padding; with an
output_shape below the input's length inference gives up half-way and states a wrong rank. The same node with explicit
pads and output_padding says to both what onnxruntime runs. Where the numbers for that are not all known, the input's
shape is hidden from inference. What the node computes does not change.
"""

from collections.abc import Callable, Iterable

from onnx import GraphProto, ModelProto, NodeProto, helper

from onnx_backprop.converters.prepare.graphs import DEFAULT_DOMAINS, assign, attributes_of, unique, used_names
from onnx_backprop.converters.prepare.inference.conv_transpose_pads import AxisPads, axis_pads, extent
from onnx_backprop.opset.functions.scope import Scope


def infer_with_explicit_pads(proto: ModelProto, infer: Callable[[ModelProto], ModelProto]) -> ModelProto:
    """`infer(proto)`, after the ConvTranspose nodes of the main graph that it misreads are rewritten."""
    inferred = infer(proto)
    while any(map(_may_be_misread, inferred.graph.node)):
        scope = Scope(inferred.graph)
        for node in filter(_may_be_misread, inferred.graph.node):
            axes = _explicit(node, scope)
            if axes is not None:
                _rewrite(node, axes)
            elif _gives_up(node, scope):
                _hide_input(inferred.graph, node)
            else:
                continue
            forget_shapes(inferred.graph, node.output)
            break
        else:
            break
        inferred = infer(inferred)  # what follows may depend on the corrected length
    return inferred


def _may_be_misread(node: NodeProto) -> bool:
    """Whether onnx's inference may give the node's output another length than onnxruntime."""
    if node.op_type != "ConvTranspose" or node.domain not in DEFAULT_DOMAINS:
        return False
    attributes = attributes_of(node)
    same = attributes.get("auto_pad") in (b"SAME_UPPER", b"SAME_LOWER")
    return "output_shape" in attributes or (same and any(attributes.get("output_padding", ())))


def _gives_up(node: NodeProto, scope: Scope) -> bool:
    """Whether inference stops at an output_shape below a known length of X."""
    wanted = attributes_of(node).get("output_shape", [])
    known = (scope.dims(node.input[0]) or ())[2:]
    return any(isinstance(length, int) and out < length for length, out in zip(known, wanted, strict=False))


def _explicit(node: NodeProto, scope: Scope) -> list[AxisPads] | None:
    """The pads and output_padding that a node means, per axis.

    None when lengths are missing, the attributes contradict each other, or inference reads them right.
    """
    attributes = attributes_of(node)
    stated = attributes.get("kernel_shape") or (scope.dims(node.input[1]) or ())[2:]
    kernel = [k for k in stated if isinstance(k, int)]
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
        return axis_pads(extents, strides, extra, upper=upper)
    lengths = [d for d in (scope.dims(node.input[0]) or ())[2:] if isinstance(d, int)]
    if not len(lengths) == len(wanted) == count or not _gives_up(node, scope):
        return None
    axes = axis_pads(extents, strides, extra, upper=upper, lengths=lengths, wanted=wanted)
    return axes if all(0 <= axis.beyond < s for axis, s in zip(axes, strides, strict=True)) else None


def _rewrite(node: NodeProto, axes: list[AxisPads]) -> None:
    replaced = ("auto_pad", "output_shape", "pads", "output_padding")
    assign(node.attribute, [a for a in node.attribute if a.name not in replaced])
    begins, ends, extra = (list(values) for values in zip(*axes, strict=True))
    node.attribute.append(helper.make_attribute("pads", begins + ends))
    node.attribute.append(helper.make_attribute("output_padding", extra))


def _hide_input(graph: GraphProto, node: NodeProto) -> None:
    """X through a Reshape to its own shape, which inference cannot follow; it costs the run nothing."""
    taken = used_names(graph)
    x, base = node.input[0], f"{node.output[0]}_input"
    shape, same, hidden = (unique(name, taken) for name in (f"{base}_shape", f"{base}_lengths", base))
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


def forget_shapes(graph: GraphProto, names: Iterable[str]) -> None:
    """Drop the stated lengths of some values and of all that depends on them: inference would not correct them."""
    stale = set(names)
    for node in graph.node:
        if not stale.isdisjoint(node.input):
            stale.update(node.output)
    for value in (*graph.value_info, *graph.output):
        if value.name in stale and value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
