"""Blocks of a module that torch's dynamo exporter wrote without what surrounds them, as `with torch.no_grad():`.

torch.export makes a graph of a block and later puts its operations back among the others. From then on they were traced
in that graph's code, which nobody wrote:

    File "<eval_with_key>.36", line 5, in forward
        linear = torch.ops.aten.linear.default(x, p_fc_weight, p_fc_bias)

A block of torch.autocast is such a graph too. It calls the parameters that it reads `arg0_1`, one of torch.no_grad has
their names. So a block that names a parameter stops gradients; of another one the file does not say which it is.
"""

import re
from collections.abc import Collection, Iterator

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backprop.converters.prepare.exporters.torch_metadata import FROZEN, PARAMETER, STOP, TIES, signature
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.walk import reads

_TRACE = "pkg.torch.onnx.stack_trace"  # a node's metadata: the lines that it comes from, the innermost one last
_BLOCK = re.compile(r'(?:.*\n)*\s*File "<eval_with_key>\.(\d+)", line \d+, in forward\n\s+\w+ = torch\.ops\.(.*)')
_NAME = re.compile(r"\w+")
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
Block = dict[str, NodeProto]  # the nodes of a block by their outputs


def restore_no_grad(proto: ModelProto) -> tuple[list[str], list[str]]:
    """Stop the gradients of blocks of torch.no_grad, in place.

    Returns the values that leave such a block, where gradients now stop; and those that leave a block of which the file
    does not say what it is, where gradients pass.
    """
    graph = proto.graph
    if any(entry.key == TIES for entry in graph.metadata_props):  # ob.torch.export's, which has the stops
        return [], []
    parameters = {entry.input for entry in signature(proto) if entry.kind in (PARAMETER, FROZEN)}
    stopped: list[str] = []
    unsaid: list[str] = []
    for block, names in list(_blocks(graph)):
        leaving = _leaving(graph, block)
        if parameters.isdisjoint(names):
            unsaid += leaving
        else:
            _stop(proto, block, leaving)
            stopped += leaving
    return stopped, unsaid


def _blocks(graph: GraphProto) -> Iterator[tuple[Block, set[str]]]:
    """The blocks of a graph, each with all names in its code; none if nothing is outside of one."""
    blocks: dict[str, Block] = {}
    names: dict[str, set[str]] = {}
    outside = False
    for node in graph.node:
        trace = next((entry.value for entry in node.metadata_props if entry.key == _TRACE), "")
        match = _BLOCK.fullmatch(trace.rstrip())
        if match is None or trace.count("File ") != trace.count('File "<eval_with_key>'):
            outside = outside or bool(trace)
            continue
        blocks.setdefault(match[1], {}).update(dict.fromkeys(node.output, node))
        names.setdefault(match[1], set()).update(_NAME.findall(match[2]))
    if outside:
        yield from ((block, names[key]) for key, block in blocks.items())


def _leaving(graph: GraphProto, block: Block) -> list[str]:
    """The values of a block, of a float type or an unknown one, that others read or that are outputs of the graph."""
    inside = {id(node) for node in block.values()}
    read = {value.name for value in graph.output}.union(*(reads(n) for n in graph.node if id(n) not in inside))
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    return [name for name in block if name in read and (types.get(name) or TensorProto.FLOAT) in _FLOATS]


def _stop(proto: ModelProto, block: Block, leaving: Collection[str]) -> None:
    """Let each value pass a stop under its name; inside the block it has another one."""
    names = used_names(proto.graph)
    renamed = {name: unique(f"{name}/no_grad", names) for name in leaving}
    for node in {id(node): node for node in block.values()}.values():
        for ends in (node.input, node.output):
            ends[:] = [renamed.get(name, name) for name in ends]
    for name, inner in renamed.items():
        stop = helper.make_node("Identity", [inner], [name], name=inner)
        stop.metadata_props.add(key=STOP, value="no_grad")
        place = next(n for n, node in enumerate(proto.graph.node) if inner in node.output)
        proto.graph.node.insert(place + 1, stop)
