"""Nodes that one Scan has to hold together: values between them have no form with the rows along an axis.

A sequence, an optional value and a map have no axes; rows of a tensor whose shape depends on numbers that differ
between rows need not have one shape.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import known_lengths
from onnx_backprop.opset.functions.declared import operator
from onnx_backprop.opset.graphs.walk import is_standard, subgraphs, values_read

ComesApart = Callable[[ir.Node, set[ir.Value]], bool]
# Inputs whose numbers decide the shape of a result; () for all of them.
_SHAPED_BY: Mapping[str, tuple[int, ...]] = {
    "AffineGrid": (1,), "BlackmanWindow": (0,), "CenterCropPad": (1,), "Col2Im": (1, 2), "Compress": (1,),
    "ConstantOfShape": (0,), "DFT": (1,), "Expand": (1,), "HammingWindow": (0,), "HannWindow": (0,),
    "ImageDecoder": (), "Loop": (), "If": (), "MaxUnpool": (2,), "MelWeightMatrix": (0, 1), "NonMaxSuppression": (),
    "NonZero": (), "OneHot": (1,), "Pad": (1, 3), "Range": (), "Reshape": (1,), "Resize": (1, 2, 3), "STFT": (1, 3),
    "Scan": (), "SequenceAt": (), "SequenceMap": (), "Slice": (1, 2, 3, 4), "Split": (1,), "SplitToSequence": (1,),
    "Squeeze": (1,), "StringSplit": (), "TfIdfVectorizer": (), "Tile": (1,), "TopK": (1,), "Unique": (),
    "Unsqueeze": (1,), "Upsample": (1,),
}  # fmt: skip


def spans(
    nodes: Sequence[ir.Node], seeds: Iterable[ir.Value], comes_apart: ComesApart
) -> tuple[dict[int, int], set[ir.Node], set[ir.Value]]:
    """{the first: the last} position of nodes between which some value has no rows; the nodes at such values; these.

    comes_apart: whether a branch or a loop is batched by its bodies, so that its results have rows.
    """
    differing = set(seeds)
    loose: dict[ir.Value, int] = {}
    ends: dict[int, int] = {}
    bound: set[ir.Node] = set()
    for n, node in enumerate(nodes):
        reads = values_read(node)
        for value in reads & loose.keys():
            ends[loose[value]] = n
            bound.add(node)
        if reads.isdisjoint(differing) or (is_standard(node, "Shape", "Size") and reads.isdisjoint(loose)):
            continue
        differing.update(node.outputs)
        shaped = not reads.isdisjoint(loose) or _decided_by(node, differing, comes_apart)
        for value in node.outputs:
            if not is_tensor(value) or (shaped and known_lengths(value) is None):
                loose[value] = n
                ends.setdefault(n, n)
                bound.add(node)
    merged: dict[int, int] = {}
    for first, last in sorted(ends.items()):
        before = next(reversed(merged), None)
        if before is not None and first <= merged[before]:
            merged[before] = max(merged[before], last)
        else:
            merged[first] = last
    return merged, bound, set(loose)


def _decided_by(node: ir.Node, differing: set[ir.Value], comes_apart: ComesApart) -> bool:
    """Whether numbers that differ between rows may decide a shape."""
    if subgraphs(node):
        return not comes_apart(node, differing)
    if node.op_type.startswith("Reduce") and is_standard(node):
        return len(node.inputs) > 1 and node.inputs[1] in differing
    if (op := operator(node)) is not None:
        return any(v in differing and not spec.tensor for v, spec in zip(node.inputs, op.inputs, strict=False))
    if not is_standard(node):
        return True
    places = _SHAPED_BY.get(node.op_type)
    if places is None:
        return False
    return any(value in differing for n, value in enumerate(node.inputs) if not places or n in places)


def is_tensor(value: ir.Value) -> bool:
    """Whether a value has axes."""
    return value.type is None or isinstance(value.type, ir.TensorType)
