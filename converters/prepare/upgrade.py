"""Bring a model to the opset that gradients are written in, once and without changing what it computes.

onnx's own version converter does the work, except for Upsample and Resize before opset 11. Those define no
coordinate rule; what runtimes do is x = o / scale, nearest taking floor(x) when scale >= 1 and ceil(x) below.
onnx's adapter turns them into a Resize with the newer defaults, which is another function, so they are set aside
under another name and written back as a Resize that says what they do. Hardmax before opset 13 took rows of what
Flatten makes, which onnx's converter does not know of.
"""

from itertools import chain

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper, parser, version_converter

from onnx_backprop.converters.prepare.inference.declared import forget_declared
from onnx_backprop.opset.core.errors import InvalidModelError, UnsupportedError
from onnx_backprop.opset.functions.use_kernels import MIN_BODY_OPSET
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.hide import hide, show
from onnx_backprop.opset.graphs.names import rename
from onnx_backprop.opset.graphs.scope import Scope, scoped_graphs
from onnx_backprop.opset.graphs.walk import DEFAULT_DOMAINS, all_nodes, attributes_of, called, is_standard

MIN_OPSET = MIN_BODY_OPSET
_MODES = ("nearest", "linear", "cubic")
_ASIDE = "onnx_backprop.aside"
_MARKED = "onnx_backprop.marked/"  # begins the name of a node while a converter is at work


def default_opset(proto: ModelProto) -> int:
    """The version of the default domain that a model imports."""
    version = next((o.version for o in proto.opset_import if o.domain in DEFAULT_DOMAINS), None)
    if version is None:
        raise InvalidModelError("the model imports no opset of the default domain")
    return version


def upgrade(proto: ModelProto) -> ModelProto:
    """The model at opset 18 or later; a model already there is returned as it is.

    Errors: UnsupportedError when onnx has no converter for an operator.
    """
    version = default_opset(proto)
    if version >= MIN_OPSET:
        return proto
    scans = [called(n) for n in all_nodes(proto.graph) if is_standard(n, "Scan")]
    if version < 9 and scans:
        raise UnsupportedError(
            f"a Scan of opset {version} has a batch axis, which onnx does not convert. Export it in opset 9 or later",
            op_type="Scan",
            node=scans[0],
        )
    for domain in [o for o in proto.opset_import if o.domain == "ai.onnx"]:
        domain.domain = ""
    marked = _name_marked(proto)
    for pad in [n for n in all_nodes(proto.graph) if version < 11 and is_standard(n, "Pad")]:
        if attributes_of(pad).get("mode", b"constant") != b"constant":
            assign(pad.attribute, [a for a in pad.attribute if a.name != "value"])  # unused; onnx's adapter keeps it
    last = {"Upsample": 10, "Resize": 10, "Hardmax": 12}  # opsets of the older meaning
    legacy = [n for n in all_nodes(proto.graph) if is_standard(n, *last) and version <= last[n.op_type]]
    if legacy:
        hide(proto, legacy, _ASIDE)
    try:
        result = version_converter.convert_version(proto, MIN_OPSET)
    except Exception as e:
        raise UnsupportedError(
            f"converting the model from opset {version} to {MIN_OPSET} failed: {e}. Convert it another way first"
        ) from e
    forget_declared(result)  # the converter infers in the old opset, which reads negative axes of Squeeze as others
    _mark_again(result, marked)
    if legacy:
        _write_back(result)
        show(result, _ASIDE)
    return result


def _name_marked(model: ModelProto) -> list[NodeProto]:
    """Give each node with metadata, which the converter drops, a name that says which it was; those nodes."""
    marked = [node for node in all_nodes(model.graph) if node.metadata_props]
    copies = [copied(node) for node in marked]
    for n, node in enumerate(marked):
        node.name = f"{_MARKED}{n}"
    return copies


def _mark_again(model: ModelProto, marked: list[NodeProto]) -> None:
    """Put the names and the metadata back."""
    for node in all_nodes(model.graph):
        if node.name.startswith(_MARKED):
            before = marked[int(node.name.removeprefix(_MARKED))]
            node.name = before.name
            node.metadata_props.extend(before.metadata_props)


def _write_back(model: ModelProto) -> None:
    for graph, scope in reversed(list(scoped_graphs(model.graph))):  # inner ones first: the outer nodes are copied
        rewritten = [_written_back(node, scope) if node.domain == _ASIDE else [node] for node in graph.node]
        assign(graph.node, chain.from_iterable(rewritten))


def _written_back(node: NodeProto, scope: Scope) -> list[NodeProto]:
    if node.op_type != "Hardmax":
        return _resizes(node, scope)
    op = Emitter(node.output[0], set())
    rows = op.Hardmax(op.Flatten(node.input[0], axis=attributes_of(node).get("axis", 1)), axis=-1)
    return op.finish({node.output[0]: op.Reshape(rows, op.Shape(node.input[0]), allowzero=1, name=node.name or None)})


# First up on the axes with a scale above 1, then down on those below. That is exact for nearest, an axis of scale 1
# being copied, but for one thing: where the first step keeps every length, onnxruntime copies, which it would not have
# done with the second. So the first step gets one more axis, of length 1, that grows to 2 if there is a second step;
# its second half is dropped.
_UP_AND_DOWN = """
    up = Max(scales, one)
    down = Min(scales, one)
"""
_GROW = """
    smallest = ReduceMin<keepdims = 1>(down)
    shrinks = Less(smallest, one)
    two = Constant<value = float[1] {2}>()
    more = Where(shrinks, two, one)
    last = Constant<value = int64[1] {-1}>()
    first = Constant<value = int64 {0}>()
    wide = Unsqueeze(x, last)
    up_of_wide = Concat<axis = 0>(up, more)
    grown = FLOOR(wide, "", up_of_wide)
    larger = Gather<axis = -1>(grown, first)
"""


def _resizes(node: NodeProto, scope: Scope) -> list[NodeProto]:
    """The nodes of opset 18 that compute the same as a legacy Upsample or Resize.

    Nearest takes floor(x) on axes with a scale >= 1 and ceil(x) below; a scale of Upsample is never below.
    """
    attributes, output = attributes_of(node), node.output[0]
    mode = attributes.get("mode", b"nearest").decode()
    if mode not in _MODES:
        message = f"attribute mode: expected one of {', '.join(_MODES)}, got {mode!r}"
        raise InvalidModelError(message, op_type=node.op_type, node=called(node))
    known = attributes["scales"] if "scales" in attributes else scope.constant(node.input[1])
    scales = None if known is None else np.array(known, np.float32)
    constants = {"scales": scales} if scales is not None and "scales" in attributes else {}  # Upsample-7
    if mode != "nearest":
        text = 'y = PLAIN(x, "", scales)'
    elif node.op_type == "Upsample" or (scales is not None and (scales >= 1).all()):
        text = 'y = FLOOR(x, "", scales)'
    elif scales is not None and (scales <= 1).all():
        text = 'y = CEIL(x, "", scales)'
    else:
        constants["one"] = np.array([1], np.float32)
        text = 'y = CEIL(larger, "", down)'
        text = ('larger = FLOOR(x, "", up)' if scales is not None and scales.max() >= 2 else _GROW) + text
        if scales is None:
            text = _UP_AND_DOWN + text
        else:
            constants |= {"up": np.maximum(scales, np.float32(1)), "down": np.minimum(scales, np.float32(1))}
    resize = f'Resize<mode = "{mode}", coordinate_transformation_mode = "asymmetric"'
    for macro, more in (("PLAIN", ""), ("FLOOR", ', nearest_mode = "floor"'), ("CEIL", ', nearest_mode = "ceil"')):
        text = text.replace(macro, f"{resize}{more}>")
    body = parser.parse_function(f'<opset_import: ["": 18], domain: "{_ASIDE}"> resize (x, scales) => (y) {{ {text} }}')
    nodes = [helper.make_node("Constant", [], [n], value=numpy_helper.from_array(a)) for n, a in constants.items()]
    nodes += body.node
    names = {name: f"{output}/{name}" for one in nodes for name in one.output} | {"x": node.input[0], "y": output}
    if "scales" not in constants:
        names["scales"] = node.input[1]
    for one in nodes:
        rename(one, names)
        one.name = node.name if one.output[0] == output else one.output[0]
    return nodes
