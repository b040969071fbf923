"""The mark of a stop: y = stop(x) is x, and dy/dx = 0. One mark says so everywhere.

It is the entry `onnx_backprop.stop` in the metadata of an Identity. Nodes of exporters that mean the same become one.
A runtime may take such an Identity out, since the mark counts at conversion alone.
"""

import re
from collections.abc import Collection, Sequence

from onnx import ModelProto, NodeProto, helper

from onnx_backprop.converters.prepare.exporters.origins import FX, arguments_of, called_with, merged_arguments
from onnx_backprop.opset.graphs.edit import assign, without_imports
from onnx_backprop.opset.graphs.lazy import ir
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.walk import all_nodes, attributes_of, called, is_standard

STOP = "onnx_backprop.stop"  # in an Identity's metadata, with any value
_DETACH = {("org.chainer", "detach"), ("org.pytorch.aten", "detach"), ("aten", "detach")}
_ATEN = {("org.pytorch.aten", "ATen"), ("aten", "ATen")}  # which say in an attribute what they are
_DETACHED = re.compile(r"detach(_\d+)?")
_NAMES = ("detach", "aten_detach", "aten::detach")  # of functions of exporters, and of what an ATen node is


def is_stop(node: ir.Node | NodeProto) -> bool:
    """Whether a node is an Identity with the mark."""
    if not is_standard(node, "Identity"):
        return False
    if isinstance(node, NodeProto):
        return any(entry.key == STOP for entry in node.metadata_props)
    return STOP in node.metadata_props


def mark_detached(proto: ModelProto) -> None:
    """Turn the nodes that mean a stop, in functions too, into the marked Identity, in place."""
    detached = [node for node in all_nodes(proto) if _is_detach(node)]
    domains = {node.domain for node in detached}
    for node in detached:
        node.domain, node.op_type, node.overload = "", "Identity", ""
        del node.attribute[:], node.input[1:]
        node.metadata_props.add(key=STOP, value="detach")
    for function in proto.functions:
        for node in function.node if function.name in _NAMES else ():
            if node.op_type == "Identity" and not is_stop(node):
                node.metadata_props.add(key=STOP, value=function.name)
        standard = any(not node.domain for node in all_nodes(function))
        if detached and standard and all(o.domain for o in function.opset_import):
            function.opset_import.extend(o for o in proto.opset_import if not o.domain)
    for domain in domains - {node.domain for node in all_nodes(proto)}:
        without_imports(proto, domain)
        for function in proto.functions:
            assign(function.opset_import, [o for o in function.opset_import if o.domain != domain])


def restore_detached(proto: ModelProto) -> list[str]:
    """Put back the stops that `torch.export` left out, in place; the nodes of which the file does not say which input.

    torch takes detach away, and the operation that read it still says so: `%mul : … (args = (%a, %detach_1), …)` of a
    node that reads a and the detached value. An operation may have become several nodes, and a node may stand for two
    operations that differ by a detach alone: it is read under the name of the other too. If torch has named the node
    after the one without, this is a guess, and only in a file of a module that detaches something.
    """
    nodes = list(proto.graph.node)
    texts = [next((e.value for e in node.metadata_props if e.key == FX), "") for node in nodes]
    constants = {t.name for t in proto.graph.initializer}
    constants |= {name for node in nodes if node.op_type == "Constant" for name in node.output}
    names = used_names(proto.graph)
    present = {name for node in nodes for name in node.output}
    unsaid = _merged(nodes, present) if any("%detach" in text for text in texts) else []
    for text in dict.fromkeys(text for text in texts if "%detach" in text):
        group = [node for node, other in zip(nodes, texts, strict=True) if other == text]
        places = _stopped(group, constants)
        results = {name for node in group for name in node.output}
        others = [node for node, other in zip(nodes, texts, strict=True) if other not in ("", text)]
        readers = [node for node in others if results.intersection(node.input)]
        named = text[1:].partition(" ")[0]
        if not places or any(_reads_another(node, named, present) for node in readers):
            unsaid.append(called(group[-1]))
            continue
        for node, index in places:
            stop = helper.make_node("Identity", [node.input[index]], [unique(f"{node.input[index]}/detached", names)])
            stop.name = stop.output[0]
            stop.metadata_props.add(key=STOP, value="detach")
            node.input[index] = stop.output[0]
            proto.graph.node.insert(next(n for n, one in enumerate(proto.graph.node) if one is node), stop)
    return unsaid


def _merged(nodes: Sequence[NodeProto], present: Collection[str]) -> list[str]:
    """The nodes of operations that detach nothing and are read under the name of another such operation."""
    read = {name: node for node in nodes for name in node.output}
    pairs = [(read[name], node, name) for node in nodes for name in node.input if name in read and called_with(node)]
    pairs = [pair for pair in pairs if "%detach" not in called_with(pair[0]) and merged_arguments(*pair[1:], present)]
    return list(dict.fromkeys(called(node) for node, *_ in pairs))


def _reads_another(node: NodeProto, name: str, present: Collection[str]) -> bool:
    """Whether a node that reads the result `tanh` was to read that of another such operation, as `tanh_1`."""
    return name not in arguments_of(node) or bool(set(merged_arguments(node, name, present)) - {name})


def _stopped(group: Sequence[NodeProto], constants: Collection[str]) -> list[tuple[NodeProto, int]]:
    """Where the nodes of one operation read a detached value, each with the input; empty if that is not clear."""
    results = {name for node in group for name in node.output}
    reads = [(node, n) for node in group for n, name in enumerate(node.input) if name and name not in constants]
    reads = [(node, n) for node, n in reads if node.input[n] not in results]
    arguments = [name for name in arguments_of(group[0]) if not name.startswith(("p_", "b_", "c_"))]
    live = {name for name in arguments if not _DETACHED.fullmatch(name)}
    values = {node.input[n] for node, n in reads}
    if live <= values and len(values - live) == len(set(arguments) - live):
        return [(node, n) for node, n in reads if node.input[n] not in live]
    if len(group) > 1 or len(reads) != len(arguments):
        return []
    pairs = [(place, name, place[0].input[place[1]]) for place, name in zip(reads, arguments, strict=True)]
    if any(name in live and name != value for _, name, value in pairs):
        return []
    return [place for place, name, _ in pairs if name not in live]


def _is_detach(node: NodeProto) -> bool:
    if (node.domain, node.op_type) in _DETACH:
        return True
    operator = attributes_of(node).get("operator") if (node.domain, node.op_type) in _ATEN else None
    return isinstance(operator, bytes) and operator.decode(errors="replace") in _NAMES
