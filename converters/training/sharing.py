"""Tensors that several places share by an exporter's thrift, and weights that belong together and were copied."""

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.detached import is_stop
from onnx_backprop.converters.prepare.exporters.origins import inherit, module_of
from onnx_backprop.converters.prepare.exporters.torch_metadata import TIES
from onnx_backprop.converters.prepare.load import pick
from onnx_backprop.converters.reverse.forward import label
from onnx_backprop.converters.reverse.known import is_float
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.graphs.names import unique, used_names

Ties = Sequence[tuple[str, str]]
Use = tuple[ir.Node, int]
_NAMED = 40  # tensors whose readers a warning leaves out
_SHOWN = 4  # places that a warning lists


def tie(graph: ir.Graph, pairs: Ties) -> None:
    """b := a for every (a, b), or aᵀ where that is what b holds, as the head of a language model does; b goes.

    Raises: InvalidArgumentError for unknown names, and for two tensors that hold different numbers.
    """
    if not isinstance(pairs, Iterable):
        raise InvalidArgumentError(f"expected pairs of names, got {pairs!r}. Write [('a', 'b')]", "tie")
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise InvalidArgumentError(f"expected pairs of names, got {pair!r}. Write [('a', 'b')]", "tie")
        stored = {str(v.name): v for v in graph.initializers.values()}
        a, b = pick(pair, stored, argument="tie", what="an initializer")
        first, second = (np.asarray(v.const_value.numpy()) for v in (a, b) if v.const_value is not None)
        same = first.dtype == second.dtype and np.array_equal(first, second)
        transposed = first.ndim == 2 and first.dtype == second.dtype and np.array_equal(first.T, second)
        if not same and not transposed:
            raise InvalidArgumentError(
                f"{a.name!r} {first.dtype}{list(first.shape)} and {b.name!r} {second.dtype}{list(second.shape)} "
                "hold different numbers. Tie copies of one tensor, or of its transpose",
                "tie",
            )
        name = str(b.name)
        graph.initializers.pop(name)
        if b.is_graph_input():
            graph.inputs.remove(b)
        b.name = None
        tied = ir.node("Identity" if same else "Transpose", [a], {} if same else {"perm": [1, 0]}, name=f"{name}/tied")
        (output,) = tied.outputs
        output.name, output.type, output.shape = name, b.type, b.shape
        graph.insert_before(graph[0], tied)
        b.replace_all_uses_with(output, replace_graph_outputs=True)


def untie(graph: ir.Graph) -> None:
    """Give every place that reads a tensor of equal numbers one of its own.

    Where an Identity hands it on, as PyTorch's exporter writes tensors that it found equal, the new one has the name
    that the Identity gave; elsewhere that of the module that reads it, or else a number behind its own. A file that
    says that nothing was merged stays as it is.
    """
    if TIES in graph.metadata_props:
        return
    names = used_names(graph)
    for value in list(graph.initializers.values()):
        if not _is_merged(value):
            continue
        for node in [node for node, _ in value.uses() if _hands_on(node) and not is_stop(node)]:
            (output,) = node.outputs
            name, output.name = str(output.name), None
            _copy_for(graph, value, name, [(reader, n) for reader, n in output.uses()])
            (node.graph or graph).remove(node, safe=True)
        first = True
        for node, index in [(node, n) for node, n in value.uses() if not is_stop(node)]:
            if not first:
                _copy_for(graph, value, unique(_name_beside(value, node), names), [(node, index)])
            first = False
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[str(value.name)]


def shared(graph: ir.Graph) -> dict[str, list[str]]:
    """The tensors that an exporter seems to have merged for being equal, and the nodes that read each."""
    values = () if TIES in graph.metadata_props else graph.initializers.values()
    merged = {str(value.name): [label(node) for node, _ in _places(value)] for value in values if _is_merged(value)}
    return {name: list(dict.fromkeys(readers)) for name, readers in merged.items()}


def describe_shared(readers_of: dict[str, list[str]]) -> str:
    """A sentence about them."""
    texts: list[str] = []
    for name, readers in list(readers_of.items())[:_SHOWN]:
        more = f" and {len(readers) - _SHOWN} more" if len(readers) > _SHOWN else ""
        texts.append(f"{name!r} is read by {', '.join(readers[:_SHOWN])}{more}")
    others = list(readers_of)[_SHOWN:]
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    rest = f"; so are {', '.join(map(repr, others[:_NAMED]))}{more}" if others else ""
    return (
        f"trained as one, since the file holds one tensor of equal numbers for several places: {'; '.join(texts)}"
        f"{rest}. Where an exporter merged them, untie=True gives each its own"
    )


def _is_merged(value: ir.Value) -> bool:
    """Whether a float tensor of several numbers, all of them equal, is read in several places."""
    tensor = value.const_value
    if tensor is None or not is_float(value) or tensor.size < 2 or len(_places(value)) < 2:
        return False
    flat = tensor.numpy().ravel()
    return bool(flat[0] == flat[-1] and (flat == flat[0]).all())


def _places(value: ir.Value) -> list[Use]:
    """Where a value is read, by itself or from an Identity."""
    uses = [(node, n) for node, n in value.uses() if not is_stop(node)]  # which trains nothing
    return [place for node, n in uses for place in (node.outputs[0].uses() if _hands_on(node) else [(node, n)])]


def _hands_on(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type == "Identity" and not node.outputs[0].is_graph_output()


def _name_beside(value: ir.Value, node: ir.Node) -> str:
    """The name of a tensor of another module: `layer2.bias`, read by a node of layer2, for `layer1.bias`."""
    module, leaf = module_of(node), str(value.name).rpartition(".")[2]
    return f"{module}.{leaf}" if module else str(value.name)


def _copy_for(graph: ir.Graph, value: ir.Value, name: str, uses: Sequence[Use]) -> None:
    """A tensor of the same numbers, read in some places instead."""
    assert value.const_value is not None
    tensor = ir.tensor(value.const_value.numpy().copy(), name=name)
    inherit(tensor, value.const_value, name)
    new = ir.Value(name=name, type=value.type, shape=value.shape, const_value=tensor)
    graph.register_initializer(new)
    for node, index in uses:
        node.replace_input_with(index, new)
