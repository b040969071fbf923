"""Einsum, Attention and STFT nodes whose output onnx's shape inference gets wrong.

Of a letter or an axis of the ellipsis that several operands of an Einsum have, it takes the length of one of them,
though any may be 1 and be stretched to another: where they are symbols that differ, the run alone tells. In Attention
it counts lengths that it does not know as 0, in the sum of past and new keys and in the last axis of three. An STFT
that does not state onesided, which is 1 then, it takes for two-sided.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from onnx import GraphProto, NodeProto, ValueInfoProto

from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.types import Dims, shapes_of
from onnx_backprop.opset.graphs.walk import is_standard

Certain = Callable[[ValueInfoProto], ValueInfoProto]
PAST, KEYS = 4, 3  # of Attention: the input of past keys, the output with an axis of all keys


def misread(graph: GraphProto) -> dict[int, Certain]:
    """The nodes of a graph that are misread, by position, with what leaves of a shape that is stated what is certain.

    All Einsum nodes where one of them is misread: others may read what that one makes.
    """
    nodes = [(n, node) for n, node in enumerate(graph.node) if is_standard(node, "Einsum", "Attention", "STFT")]
    known = shapes_of(graph) if nodes else {}
    summed = [(n, node) for n, node in nodes if node.op_type == "Einsum"]
    result: dict[int, Certain] = {}
    if any(_is_misread(node, known) for _, node in summed):
        result = dict.fromkeys((n for n, _ in summed), without_guesses)
    for n, node in nodes:
        if node.op_type == "Attention" and _counts_unknown(node, known):
            result[n] = partial(_without_last, node)
        elif node.op_type == "STFT" and not any(a.name == "onesided" for a in node.attribute):
            result[n] = _without_bins
    return result


def _counts_unknown(node: NodeProto, known: Mapping[str, Dims]) -> bool:
    """Whether an output of an Attention has a length 0, or that of new keys where that of past ones is unknown."""
    past = known.get(node.input[PAST]) if len(node.input) > PAST and node.input[PAST] else (0,)
    unknown = past is None or not all(isinstance(length, int) for length in past[2:3])
    return unknown or any(0 in (known.get(name) or ())[-1:] for name in node.output)


def _without_last(node: NodeProto, value: ValueInfoProto) -> ValueInfoProto:
    """The shape of an output of Attention without a last length of 0, or of all keys."""
    result = copied(value)
    for dim in result.type.tensor_type.shape.dim[-1:]:
        if value.name in node.output[KEYS:] or (dim.HasField("dim_value") and not dim.dim_value):
            dim.Clear()
    return result


def _without_bins(value: ValueInfoProto) -> ValueInfoProto:
    """The shape of the output of an STFT but for the number of frequencies."""
    result = copied(value)
    for dim in result.type.tensor_type.shape.dim[2:3]:
        dim.Clear()
    return result


def without_guesses(value: ValueInfoProto) -> ValueInfoProto:
    """The shape of an Einsum's output as far as it is certain: lengths that no operand can stretch."""
    result = copied(value)
    for dim in result.type.tensor_type.shape.dim:
        if dim.HasField("dim_param") or dim.dim_value == 1:
            dim.Clear()
    return result


def _is_misread(node: NodeProto, known: Mapping[str, Dims]) -> bool:
    equation = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"), "")
    axes: defaultdict[object, set[object]] = defaultdict(set)
    for name, term in zip(node.input, equation.replace(" ", "").partition("->")[0].split(","), strict=False):
        lengths = known.get(name)
        if lengths is None:
            continue
        for axis, length in zip(_axes(term, len(lengths)), lengths, strict=False):
            axes[axis].add(length)
    return any(len(lengths) > 1 and not all(isinstance(n, int) for n in lengths) for lengths in axes.values())


def _axes(term: str, rank: int) -> Iterator[object]:
    """What each axis of an operand is called: a letter, or its place from the end of the ellipsis."""
    before, dots, behind = term.partition("...")
    yield from before
    if dots:
        yield from range(len(before) + len(behind) - rank, 0)
    yield from behind
