"""Indices outside of what they index, which a device's kernels read and write as they please: the CPU refuses them."""

from collections.abc import Callable, Container
from typing import TypeGuard

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto

from onnx_backprop.converters.devices.expand import Known
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.types import Dim
from onnx_backprop.opset.graphs.walk import attributes_of, is_standard

REFUSES = "it refuses indices that lie outside"
ML = "ai.onnx.ml"
Within = Callable[[Emitter, str, int], str]  # 0 … length - 1 at the indices: themselves, those below 0 from the end


def _by_gather(op: Emitter, indices: str, length: int) -> str:
    return op.Gather(op.constant(np.arange(length)), indices)


def _by_extractor(op: Emitter, indices: str, length: int) -> str:
    """By an operator that only the CPU has, where no annotation says that a Gather is for it.

    It takes a list of one index at least, and none below 0.
    """
    zero = op.constant([0], np.int64)
    wide = op.Reshape(op.Cast(indices, to=TensorProto.INT64), op.constant([-1], np.int64))
    counted = op.Where(op.Less(wide, zero), op.Add(wide, op.constant([length], np.int64)), wide)
    places = op.constant(np.arange(length, dtype=np.int64))
    taken = op.ArrayFeatureExtractor(places, op.Concat(counted, zero, axis=0), domain=ML)
    last = op.constant([-1], np.int64)
    return op.Reshape(op.Slice(op.Reshape(taken, last), zero, last), op.Shape(indices), allowzero=1)


def _along_axis(op: Emitter, node: NodeProto, known: Known, within: Within) -> str | None:
    dims = known.lengths.get(node.input[0])
    if not dims:
        return None
    length = dims[attributes_of(node).get("axis", 0) % len(dims)]
    return within(op, node.input[1], length) if _counts(length) else None


def _tuples(op: Emitter, node: NodeProto, known: Known, within: Within) -> str | None:
    """The last axis of the indices counts axes of the data, behind those of the batch."""
    data, indices = (known.lengths.get(name, ()) for name in node.input[:2])
    count, first = indices[-1] if indices else None, attributes_of(node).get("batch_dims", 0)
    lengths = [n for n in data[first : first + count] if _counts(n)] if _counts(count) else []
    if not lengths or len(lengths) != count:
        return None

    def column(n: int) -> str:
        return op.Slice(node.input[1], *(op.constant([k], np.int64) for k in (n, n + 1, -1)))

    columns = [within(op, column(n), length) for n, length in enumerate(lengths)]
    return columns[0] if len(columns) == 1 else op.Concat(*columns, axis=-1)


def _labels(op: Emitter, node: NodeProto, known: Known, within: Within) -> str | None:
    """Classes, of which none lies below 0, but for the label that counts nowhere."""
    dims = known.lengths.get(node.input[0], ())
    if len(dims) < 2 or not _counts(classes := dims[1]):
        return None
    ignored = attributes_of(node).get("ignore_index")
    labels = node.input[1]
    if known.types.get(labels) != TensorProto.INT64:
        labels = op.Cast(labels, to=TensorProto.INT64)
    beyond, nowhere, index = op.constant(classes, np.int64), "", labels
    if ignored is not None:
        nowhere = op.Equal(labels, op.constant(ignored, np.int64))
        index = op.Where(nowhere, op.constant(0, np.int64), labels)
    place = within(op, op.Where(op.Less(index, op.constant(0, np.int64)), beyond, index), classes)
    return op.Where(nowhere, labels, place) if nowhere else place


def _counts(length: Dim) -> TypeGuard[int]:
    return isinstance(length, int) and length > 0


_CHECKS: dict[str, Callable[[Emitter, NodeProto, Known, Within], str | None]] = {
    "Gather": _along_axis,
    "GatherElements": _along_axis,
    "ScatterElements": _along_axis,
    "GatherND": _tuples,
    "ScatterND": _tuples,
    "SoftmaxCrossEntropyLoss": _labels,
    "NegativeLogLikelihoodLoss": _labels,
}


def within_bounds(
    graph: GraphProto, known: Known, constants: Container[str], taken: set[str], *, annotations: bool = True
) -> set[str]:
    """Look indices up where they are data and lengths are known, in place; the outputs of the nodes that are to do it.

    Those are for the CPU, by an annotation or since nothing else has them. The gradient of Gather, which adds up at the
    indices of that, is taken for granted.
    """
    within = _by_gather if annotations else _by_extractor
    nodes, checks = list[NodeProto](), set[str]()
    for node in graph.node:
        check = _CHECKS.get(node.op_type) if is_standard(node) else None
        adds = attributes_of(node).get("reduction") == b"add"
        if check and not adds and node.input[1] not in constants:
            op = Emitter(node.name or node.output[0], taken)
            if indices := check(op, node, known, within):
                nodes += op.nodes
                looks_up = ("Gather", "ArrayFeatureExtractor")
                checks.update(added.output[0] for added in op.nodes if added.op_type in looks_up)
                node.input[1] = indices
        nodes.append(node)
    assign(graph.node, nodes)
    return checks
