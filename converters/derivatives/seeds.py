"""Several seeds in one run: which way to their results costs less."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import onnx_ir as ir

from onnx_backprop.converters.derivatives.work import Work
from onnx_backprop.converters.reverse.batching.folds import has_images
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import function_body, rename
from onnx_backprop.converters.reverse.forward import label
from onnx_backprop.converters.reverse.known import known_lengths
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.graphs.names import named_after, used_names
from onnx_backprop.opset.graphs.order import descendants

MOST_ELEMENTS = 2**23  # of a value for all unit seeds; beyond it a Scan takes the memory of one of them


def at_once(work: Work, names: Iterable[str], count: Callable[[], int | None] | None = None) -> bool:
    """Types for products with several seeds, and whether operators for all of them beat one Scan.

    A Scan where there are convolutions or pools, whose kernels do best with one image of known lengths (a Jacobian of
    a small network by 10 rows takes the native ones 1.3 ms, and 2.6 ms at once), and where unit seeds, of which there
    are `count()`, would take much memory or nobody knows how much.
    """
    work.infer_types()
    seeds = work.inputs(names)
    nodes = descendants(work.graph, seeds)
    result = not has_images(nodes)
    if count is not None:
        number, sizes = count(), [known_lengths(value) for node in nodes for value in node.outputs]
        result = result and number is not None
        result = result and all(one is not None and prod(one) * (number or 0) <= MOST_ELEMENTS for one in sizes)
    if not result and work.kernels == "onnx":
        write_out(work.graph, seeds, work.model.opset_imports)
    return result


def write_out(graph: ir.Graph, seeds: Sequence[ir.Value], opsets: Mapping[str, int]) -> None:
    """Put the body of each MaxPoolBackward of known lengths in its place, in which no seed decides who wins.

    The winners are found once then, not for every row. Bodies for unknown lengths ask the seed for its own; other
    operators of the domain do little without a seed, and as nodes they can change their kernels.
    """
    op = Builder(used_names(graph))
    for node in descendants(graph, seeds):
        if node.domain != DOMAIN or node.op_type != "MaxPoolBackward":
            continue
        if any(value is None or known_lengths(value) is None for value in node.inputs):
            continue
        body = function_body(node, opsets)
        assert body is not None
        graph.insert_before(node, body.nodes)
        for inner in body.nodes:
            rename(inner, named_after(label(node), node.op_type) or label(node), op.unique)
        (y,), (dx,) = node.outputs, body.outputs
        assert dx is not None
        y.replace_all_uses_with(dx, replace_graph_outputs=True)
        dx.name, y.name = y.name, None
        graph.remove(node, safe=True)
