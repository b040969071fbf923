"""Updates that overwrite what they renew: they come last, when nothing can fail any more, and the loss is known.

Parameters and the state of an optimizer then lie in memory once. A run that fails, or whose loss is no finite number,
has changed nothing.
"""

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy

from onnx import GraphProto, ModelProto, TensorProto, helper

from onnx_backprop.opset.functions.native import NATIVE_DOMAIN
from onnx_backprop.opset.graphs.facts import MAY_SHARE
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import ancestors, positions
from onnx_backprop.opset.graphs.walk import reads
from onnx_backprop.ort_ops.elementwise.kernel import NAME

_OTHER_FLOATS = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def update_in_place(model: ModelProto, loss: str, updates: Mapping[str, str]) -> tuple[frozenset[str], str]:
    """Make the native updates of a model wait for all its other outputs, in place.

    updates: {input: the output that is its new value}. Returns the inputs that the updates may overwrite, and the name
    of the guard, one more input, 0-D float32, "" where there are none: where it is no finite number nothing is
    overwritten, else every update raises it by 1 when it is done.
    """
    graph = model.graph
    native = [n for n, node in enumerate(graph.node) if node.domain == NATIVE_DOMAIN and node.op_type == NAME]
    renewed = {name: n for n in native for name in graph.node[n].output}
    if not native or any(not renewed.keys().isdisjoint(reads(node)) for node in graph.node):
        return frozenset(), ""
    types = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    if any(types[new] in _OTHER_FLOATS for new in updates.values()):  # renewed by nodes that nothing here waits for
        return frozenset(), ""
    others = [name for name, kind in types.items() if kind == TensorProto.FLOAT and name not in (loss, *renewed)]
    before = ancestors(graph.node, [*others, loss, *(name for n in native for name in graph.node[n].input)])
    read = Counter(name for n in native for name in graph.node[n].input)
    read_elsewhere = {name for n, node in enumerate(graph.node) if n not in {*before, *native} for name in reads(node)}
    beside = {x for x, new in updates.items() if new in renewed and x in graph.node[renewed[new]].input}
    shared = _shared(graph, [name for n in native for name in graph.node[n].input])
    overwritten = frozenset(x for x in beside - read_elsewhere - shared if read[x] == 1)
    if not overwritten:
        return overwritten, ""
    taken = used_names(graph)
    guard, cast = unique("update_guard", taken), unique("update_guard/loss", taken)
    added = [] if types[loss] == TensorProto.FLOAT else [helper.make_node("Cast", [loss], [cast], to=TensorProto.FLOAT)]
    produced = {name for name, n in positions(graph.node).items() if n not in native}
    after = [name for name in read if name in produced and len(native) > 1]  # what any of them reads, all wait for
    after += [*others, cast if added else loss, guard]
    graph.input.append(helper.make_tensor_value_info(guard, TensorProto.FLOAT, []))
    nodes = [deepcopy(node) for node in graph.node]
    for n in native:
        nodes[n].input.extend(after)
        nodes[n].attribute.append(helper.make_attribute("after", len(after)))
    del graph.node[:]
    graph.node.extend([*(node for n, node in enumerate(nodes) if n not in native), *added, *(nodes[n] for n in native)])
    return overwritten, guard


def _shared(graph: GraphProto, names: list[str]) -> set[str]:
    """The graph inputs in whose memory onnxruntime may let values lie that updates read, as a Reshape's result does.

    Such a gradient would change when the input is overwritten, be it by another item of the same update.
    """
    sharing = [node for node in graph.node if node.op_type in MAY_SHARE]
    read = set[str]().union(*(sharing[n].input for n in ancestors(sharing, names)))
    return read.intersection(value.name for value in graph.input)
