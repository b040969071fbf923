"""The mark of a stop: y = stop(x) is x, and dy/dx = 0. One mark says so everywhere.

It is the entry `onnx_backprop.stop` in the metadata of an Identity. Nodes of exporters that mean the same become one.
A runtime may take such an Identity out, since the mark counts at conversion alone.
"""

import re

from onnx import ModelProto, NodeProto, helper

from onnx_backprop.converters.prepare.graphs import (
    all_nodes,
    assign,
    attributes_of,
    called,
    unique,
    used_names,
    without_imports,
)
from onnx_backprop.opset.core.lazy import ir

STOP = "onnx_backprop.stop"  # in an Identity's metadata, with any value
_DETACH = {("org.chainer", "detach"), ("org.pytorch.aten", "detach"), ("aten", "detach")}
_ATEN = {("org.pytorch.aten", "ATen"), ("aten", "ATen")}  # which say in an attribute what they are
_FX = "pkg.torch.onnx.fx_node"  # a node's metadata: the operation of torch that it was, with its arguments
_ARGUMENTS = re.compile(r"\(args = \((.*)\), kwargs = ")
_DETACHED = re.compile(r"%detach(_\d+)?")
_NAMES = ("detach", "aten_detach", "aten::detach")  # of functions of exporters, and of what an ATen node is


def is_stop(node: ir.Node | NodeProto) -> bool:
    """Whether a node is an Identity with the mark."""
    if node.op_type != "Identity" or node.domain not in ("", "ai.onnx"):
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

    torch takes detach away, and what read it still says so: `args = (%a, %detach_1)`, a being the node's first input.
    """
    nodes = list(proto.graph.node)
    said = {id(node): next((e.value for e in node.metadata_props if e.key == _FX), "") for node in nodes}
    names = used_names(proto.graph)
    restored: set[str] = set()
    for node in nodes:
        match = _ARGUMENTS.search(said[id(node)]) if "%detach" in said[id(node)] else None
        arguments = [text.strip() for text in match[1].split(",") if text.strip()] if match else []
        inputs = [name.replace(".", "_") for name in node.input]
        pairs = list(zip(arguments, inputs, strict=False))
        if len(arguments) != len(inputs) or not all(
            _DETACHED.fullmatch(text) or text.removeprefix("%").removeprefix("p_") == name for text, name in pairs
        ):
            continue
        for index, (text, _) in enumerate(pairs):
            if _DETACHED.fullmatch(text) and not is_stop(node):
                stopped = unique(f"{node.input[index]}/detached", names)
                stop = helper.make_node("Identity", [node.input[index]], [stopped], stopped)
                stop.metadata_props.add(key=STOP, value="detach")
                node.input[index] = stopped
                proto.graph.node.insert(next(n for n, one in enumerate(proto.graph.node) if one is node), stop)
        restored.add(said[id(node)])
    rest = [node for node in nodes if _DETACHED.search(said[id(node)]) and said[id(node)] not in restored]
    return list(dict.fromkeys(called(node) for node in rest))


def _is_detach(node: NodeProto) -> bool:
    if (node.domain, node.op_type) in _DETACH:
        return True
    operator = attributes_of(node).get("operator") if (node.domain, node.op_type) in _ATEN else None
    return isinstance(operator, bytes) and operator.decode(errors="replace") in _NAMES
