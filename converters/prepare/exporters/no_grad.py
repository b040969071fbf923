"""Blocks of a module that torch's dynamo exporter wrote without what surrounds them, as `with torch.no_grad():`.

torch.export makes a graph of a block and later puts its operations back among the others. From then on they were traced
in that graph's code, which nobody wrote:

    File "<eval_with_key>.36", line 5, in forward
        linear = torch.ops.aten.linear.default(x, p_fc_weight, p_fc_bias)

A block of torch.autocast is such a graph too. It calls the parameters that it reads `arg0_1`, one of torch.no_grad has
their names. So a block that names a parameter stops gradients; of another one the file does not say which it is. Nor
does it of any block, if one that names a parameter computes all outputs, of which PyTorch itself would train nothing:
that is what follows a torch.autograd.Function that switches gradients off and on again, as reentrant checkpointing
does, which torch.export takes for a block.
"""

import re
from collections.abc import Collection, Iterator, Mapping

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backprop.converters.prepare.exporters.origins import arguments_of, merged_arguments
from onnx_backprop.converters.prepare.exporters.torch_metadata import FROZEN, PARAMETER, STOP, TIES, signature
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes, called, reads

_TRACE = "pkg.torch.onnx.stack_trace"  # a node's metadata: the lines that it comes from, the innermost one last
_BLOCK = re.compile(r'(?:.*\n)*\s*File "<eval_with_key>\.(\d+)", line \d+, in forward\n\s+\w+ = torch\.ops\.(.*)')
_NAME = re.compile(r"\w+")
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
Block = dict[str, NodeProto]  # the nodes of a block by their outputs


def restore_no_grad(proto: ModelProto) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Stop the gradients of blocks of torch.no_grad, in place.

    Returns the values that leave such a block, where gradients now stop; those that leave a block of which the file
    does not say what it is, where gradients pass; and those of the first with a reader that gradients pass to, since
    the exporter has merged the block with the same operations outside, as of a network that is its own target.
    """
    if any(entry.key == TIES for entry in proto.graph.metadata_props):  # ob.torch.export's, which has the stops
        return [], [], []
    parameters = {entry.input for entry in signature(proto) if entry.kind in (PARAMETER, FROZEN)}
    outputs = {value.name for value in proto.graph.output}
    names = used_names(proto.graph)
    present = {name for node in all_nodes(proto.graph) for name in node.output}
    stopped: list[str] = []
    unsaid: list[str] = []
    merged: list[tuple[str, str]] = []
    blocks = list(_blocks(proto))
    doubtful = any(outputs.issubset(block) and not parameters.isdisjoint(code) for _, block, code in blocks)
    for graph, block, code in blocks:
        leaving = _leaving(graph, block)
        if doubtful or parameters.isdisjoint(code):
            unsaid += leaving
        else:
            merged += _stop(graph, block, {name: unique(f"{name}/no_grad", names) for name in leaving}, present)
            stopped += leaving
    return stopped, unsaid, merged


def _blocks(proto: ModelProto) -> Iterator[tuple[GraphProto, Block, set[str]]]:
    """The blocks of a model, each with its graph and all names in its code; none if nothing is outside of one."""
    blocks: dict[str, tuple[GraphProto, Block, set[str]]] = {}
    outside = False
    for graph in all_graphs(proto.graph):
        for node in graph.node:
            trace = next((entry.value for entry in node.metadata_props if entry.key == _TRACE), "")
            match = _BLOCK.fullmatch(trace.rstrip())
            if match is None or trace.count("File ") != trace.count('File "<eval_with_key>'):
                outside = outside or bool(trace)
                continue
            _, block, names = blocks.setdefault(match[1], (graph, {}, set()))
            block.update(dict.fromkeys(node.output, node))
            names.update(_NAME.findall(match[2]))
    if outside:
        yield from blocks.values()


def _leaving(graph: GraphProto, block: Block) -> list[str]:
    """The values of a block, of a float type or an unknown one, that others read or that are outputs of the graph."""
    inside = {id(node) for node in block.values()}
    read = {value.name for value in graph.output}.union(*(reads(n) for n in graph.node if id(n) not in inside))
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    return [name for name in block if name in read and (types.get(name) or TensorProto.FLOAT) in _FLOATS]


def _stop(
    graph: GraphProto, block: Block, renamed: Mapping[str, str], present: Collection[str]
) -> list[tuple[str, str]]:
    """Let each value pass a stop under its name; inside the block, and for readers of a merged one, it has another."""
    inside = {id(node): node for node in block.values()}
    merged: list[tuple[str, str]] = []
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in renamed and (id(node) in inside or _reads_merged(node, index, present)):
                node.input[index] = renamed[name]
                merged += [(name, called(node))] if id(node) not in inside else []
        if id(node) in inside:
            node.output[:] = [renamed.get(name, name) for name in node.output]
    for name, inner in renamed.items():
        stop = helper.make_node("Identity", [inner], [name], name=inner)
        stop.metadata_props.add(key=STOP, value="no_grad")
        place = next(n for n, node in enumerate(graph.node) if inner in node.output)
        graph.node.insert(place + 1, stop)
    return merged


def _reads_merged(node: NodeProto, index: int, present: Collection[str]) -> bool:
    """Whether torch's operation read `tanh_1`, which is not in the file, where a node reads `tanh`."""
    name, arguments = node.input[index], arguments_of(node)
    others = merged_arguments(node, name, present)
    if name in arguments and others:
        return len(arguments) == len(node.input) and arguments[index] != name
    return bool(others)
