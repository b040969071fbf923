"""ConvTranspose and pools whose output length onnx's shape inference gets wrong, rewritten so that it gets it right.

With auto_pad SAME_* onnx's inference adds output_padding to the length and onnxruntime to the padding; with an
output_shape below the input's length inference gives up half-way and states a wrong rank. The same node with explicit
pads and output_padding says to both what onnxruntime runs. A pool with ceil_mode has no window that begins in the
padding behind, which inference counts: less padding says to both what is run, or less of the input; so do pads in the
place of SAME_*, where its window has gaps or leaves out pixels. Where the numbers are not all known, the input's shape
is hidden from inference. What the node computes does not change.
"""

from collections.abc import Callable, Iterable, Sequence

from onnx import GraphProto, ModelProto, NodeProto, helper

from onnx_backprop.converters.prepare.inference.driver import Correct
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.graphs.edit import assign, insert
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.order import descendants
from onnx_backprop.opset.graphs.scope import Scope
from onnx_backprop.opset.graphs.types import Dims
from onnx_backprop.opset.graphs.walk import attributes_of, called, is_standard
from onnx_backprop.opset.maths.convolution import AxisPads, extent, onnx_conv_transpose_pads, same_excess, split_pads

_POOLS = ("AveragePool", "LpPool", "MaxPool")
_SAME = (b"SAME_UPPER", b"SAME_LOWER")


def explicit_pads(_: ModelProto) -> Correct:
    """The ConvTranspose nodes and pools of the main graph that inference misreads are rewritten."""
    return _corrected


def _corrected(inferred: ModelProto) -> ModelProto | None:
    """One node is rewritten: what follows may depend on the corrected length."""
    misread = list(filter(_may_be_misread, inferred.graph.node))
    scope = Scope(inferred.graph if misread else None)
    for node in misread:
        pool = node.op_type in _POOLS
        axes = None if pool else _explicit(node, scope)
        if pool:
            if not _pool_rewritten(inferred.graph, node, scope):
                continue
        elif axes is not None:
            _rewrite(node, axes)
        elif _gives_up(node, scope):
            _hide_input(inferred.graph, node)
        else:
            continue
        forget_shapes(inferred.graph, node.output)
        return inferred
    return None


def _may_be_misread(node: NodeProto) -> bool:
    """Whether onnx's inference may give the node's output another length than onnxruntime."""
    attributes = attributes_of(node)
    same = attributes.get("auto_pad") in _SAME
    if is_standard(node, *_POOLS):
        return bool(attributes.get("ceil_mode")) or (same and max(attributes.get("dilations", [1])) > 1)
    if not is_standard(node, "ConvTranspose"):
        return False
    return "output_shape" in attributes or (same and any(attributes.get("output_padding", ())))


def _pool_rewritten(graph: GraphProto, node: NodeProto, scope: Scope) -> bool:
    """Rewrite a pool with ceil_mode so that no window begins in the padding behind; whether it had to be rewritten.

    That padding ends with the last window that begins before it. Where this is not beyond x, ceil_mode goes, or where
    another axis needs it, the pixels of x behind that window.
    """
    attributes = attributes_of(node)
    kernel = attributes.get("kernel_shape", [])
    count = len(kernel)
    pads = list(attributes.get("pads", [0] * 2 * count))
    strides, dilations = (attributes.get(name, [1] * count) for name in ("strides", "dilations"))
    lengths = (scope.dims(node.input[0]) or ())[2:]
    if not len(lengths) == len(strides) == len(dilations) == len(pads) // 2 == count:
        return False
    if attributes.get("auto_pad") in _SAME:
        return _explicit_pool(graph, node, lengths, (kernel, strides), gaps=max(dilations) > 1)
    changed = beyond = False
    for n, (length, stride) in enumerate(zip(lengths, strides, strict=True)):
        if not isinstance(length, int) or stride < 1:
            beyond = True
            continue
        covered = extent(kernel[n], dilations[n])
        steps, rest = divmod(length + pads[n] + pads[n + count] - covered, stride)
        if rest and (steps + 1) * stride >= length + pads[n]:
            pads[n + count], changed = steps * stride + covered - length - pads[n], True
        else:
            beyond |= rest > 0
    if changed and min(pads) < 0 and not beyond:
        assign(node.attribute, [a for a in node.attribute if a.name != "ceil_mode"])
    elif changed:
        _set_pads(graph, node, pads)
    return changed


def _explicit_pool(
    graph: GraphProto, node: NodeProto, lengths: Dims, window: tuple[list[int], list[int]], *, gaps: bool
) -> bool:
    """Rewrite a pool of SAME_* that inference misreads, if a length is known; whether it had to be rewritten.

    That is one with gaps, which onnxruntime pads as if it had none, and one with windows so much shorter than a stride
    that pixels of x are left out, of which inference counts one window more under ceil_mode. The input is hidden from
    inference where another length is not known.
    """
    attributes = attributes_of(node)
    known = [(length, k, s) for length, k, s in zip(lengths, *window, strict=True) if isinstance(length, int)]
    left_out = any(same_excess(*axis) < 0 for axis in known)
    if not known or not (gaps or left_out):
        return False
    if len(known) < len(lengths):
        _hide_input(graph, node)
        return True
    if gaps and left_out:
        raise UnsupportedError(
            f"auto_pad {attributes['auto_pad'].decode()} with dilations, and strides beyond the kernel, makes "
            "onnxruntime leave out pixels at the ends. State pads, and Slice off those pixels",
            op_type=node.op_type,
            node=called(node),
        )
    if left_out and len(node.output) > 1:  # whose Indices count all pixels of x; ceil_mode changes nothing
        assign(node.attribute, [a for a in node.attribute if a.name != "ceil_mode"])
        return True
    pairs = [_same_pads(same_excess(*axis), upper=attributes["auto_pad"] == b"SAME_UPPER") for axis in known]
    _set_pads(graph, node, [pair[n] for n in (0, 1) for pair in pairs])
    return True


def _same_pads(total: int, *, upper: bool) -> tuple[int, int]:
    """As onnxruntime splits them: below 0, where pixels are left out, it rounds the quotient towards 0."""
    if total >= 0:
        return split_pads(total, upper=upper)
    begin = -((-total if upper else -total - 1) // 2)
    return begin, total - begin


def _set_pads(graph: GraphProto, node: NodeProto, pads: Sequence[int]) -> None:
    """State the pads of a pool; below 0 they are pixels to Slice off. Indices would then count others: X is hidden."""
    count = len(pads) // 2
    cut = [n for n in range(count) if min(pads[n], pads[n + count]) < 0]
    if cut and len(node.output) > 1:
        _hide_input(graph, node)
        return
    if cut:
        starts = [max(-pads[n], 0) for n in cut]
        ends = [min(pads[n + count], 0) or 2**62 for n in cut]
        _replace_input(graph, node, lambda op, x: op.Slice(x, *map(op.constant, (starts, ends, [n + 2 for n in cut]))))
    assign(node.attribute, [a for a in node.attribute if a.name not in ("auto_pad", "pads")])
    node.attribute.append(helper.make_attribute("pads", [max(pad, 0) for pad in pads]))


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
        return onnx_conv_transpose_pads(extents, strides, extra, upper=upper)
    lengths = [d for d in (scope.dims(node.input[0]) or ())[2:] if isinstance(d, int)]
    if not len(lengths) == len(wanted) == count or not _gives_up(node, scope):
        return None
    axes = onnx_conv_transpose_pads(extents, strides, extra, upper=upper, lengths=lengths, wanted=wanted)
    return axes if all(0 <= axis.beyond < s for axis, s in zip(axes, strides, strict=True)) else None


def _rewrite(node: NodeProto, axes: list[AxisPads]) -> None:
    replaced = ("auto_pad", "output_shape", "pads", "output_padding")
    assign(node.attribute, [a for a in node.attribute if a.name not in replaced])
    begins, ends, extra = (list(values) for values in zip(*axes, strict=True))
    node.attribute.append(helper.make_attribute("pads", begins + ends))
    node.attribute.append(helper.make_attribute("output_padding", extra))


def _hide_input(graph: GraphProto, node: NodeProto) -> None:
    """X through a Reshape to its own shape, which inference cannot follow; it costs the run nothing."""
    _replace_input(graph, node, lambda op, x: op.Reshape(x, op.Abs(op.Shape(x))))


def _replace_input(graph: GraphProto, node: NodeProto, emit: Callable[[Emitter, str], str]) -> None:
    op = Emitter(f"{node.output[0]}_input", used_names(graph))
    position = list(graph.node).index(node)
    replaced = emit(op, node.input[0])
    insert(graph, position, op.nodes)
    graph.node[position + len(op.nodes)].input[0] = replaced


def forget_shapes(graph: GraphProto, names: Iterable[str]) -> None:
    """Drop the stated lengths of some values and of all that depends on them: inference would not correct them."""
    stale = set(names)
    stale.update(name for node in descendants(graph.node, names) for name in node.output)
    for value in (*graph.value_info, *graph.output):
        if value.name in stale and value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
