"""Products with a weight of 4 bits behind DequantizeLinear, as MatMulNBits, which needs no weight in floats."""

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.opset.functions.mat_mul_n_bits import MICROSOFT, NAME
from onnx_backprop.opset.graphs.edit import add_import, assign
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.order import producers
from onnx_backprop.opset.graphs.walk import all_graphs, attributes_of, called, is_standard

SIZE = 128  # of the blocks of a weight whose columns have one scale each: it is repeated for each of them
_FOUR_BITS = (TensorProto.INT4, TensorProto.UINT4)
_SCALES = (TensorProto.FLOAT, TensorProto.FLOAT16)


def pack_products(proto: ModelProto, large: dict[str, TensorProto]) -> None:
    """a · dequantised(q, s, z) -> MatMulNBits(a, q, sᵀ, z), q and z packed along the columns of W (K, N), in place.

    Of the main graph, where q, s and z are constants and nobody else reads q or the weight in floats; scales lie along
    N, or in blocks along K. q and s keep their names. large: tensors that are not in the graph, which has inputs for
    them; of what is packed it has none any more. Where a is dequantized too, the node stays.
    """
    graph, makers = proto.graph, producers(proto.graph.node)
    inputs = {value.name for value in graph.input} - large.keys()
    stored = {t.name: t for t in graph.initializer if t.name not in inputs} | large
    readers = Counter(name for one in all_graphs(graph) for node in one.node for name in node.input)
    readers.update(value.name for one in all_graphs(graph) for value in one.output)
    replaced: dict[int, list[NodeProto]] = {}
    taken = used_names(graph)
    for maker in [node for node in graph.node if is_standard(node, "DequantizeLinear")]:
        uses = [n for n in graph.node if maker.output[0] in n.input]
        fit = [is_standard(n, "MatMul") and list(n.input).index(maker.output[0]) == 1 for n in uses]
        integers = [n for n in uses if (m := makers.get(n.input[0])) is not None and m.op_type == maker.op_type]
        alone = readers[maker.output[0]] == len(uses) > 0 and readers[maker.input[0]] == 1
        if not alone or not all(fit) or integers:
            continue
        packed = _packed(maker, stored)
        if packed is None:
            continue
        weight, points, sizes, lengths = packed
        op = Emitter(called(maker), taken)
        scales = maker.input[1]
        if len(stored[scales].dims) == 2:
            scales = op.Transpose(scales, perm=[1, 0])
        else:
            scales = op.Expand(op.Reshape(scales, op.constant([-1, 1], np.int64)), op.constant(lengths, np.int64))
        names = [weight.name, scales, *([] if points is None else [op.constant(points)])]
        large.pop(weight.name, None)
        assign(graph.input, [value for value in graph.input if value.name != weight.name])
        assign(graph.initializer, [*(t for t in graph.initializer if t.name != weight.name), weight])
        replaced[id(maker)] = op.nodes
        for node in uses:
            node.CopyFrom(
                helper.make_node(
                    NAME, [node.input[0], *names], node.output, name=called(node), domain=MICROSOFT, **sizes
                )
            )
    if replaced:
        assign(graph.node, [new for node in graph.node for new in replaced.get(id(node), [node])])
        add_import(proto, MICROSOFT, 1)


def _packed(
    node: NodeProto, stored: Mapping[str, TensorProto]
) -> tuple[TensorProto, np.ndarray | None, dict[str, Any], list[int]] | None:
    """The packed weight and zero points, attributes of the product, lengths of its scales; None for another form."""
    given = attributes_of(node)
    tensors = [stored.get(name) for name in node.input]
    q, scales, z = (*tensors, None)[:3]
    if q is None or scales is None or None in tensors or q.data_type not in _FOUR_BITS or len(q.dims) != 2:
        return None
    (k, n), axis, size = q.dims, given.get("axis", 1) % 2, given.get("block_size", 0)
    in_blocks = size >= 16 and size & (size - 1) == 0 and axis == 0 and len(scales.dims) == 2
    in_columns = not size and len(scales.dims) < 2 and (prod(scales.dims) == 1 or axis == 1)
    if not (in_blocks or in_columns) or scales.data_type not in _SCALES or given.get("output_dtype", 0):
        return None
    size = size or SIZE
    blocks = -(-k // size)
    if prod(scales.dims) not in ((n * blocks,) if in_blocks else (1, n)):
        return None
    offset = 8 if q.data_type == TensorProto.INT4 else 0
    numbers = np.full((n, blocks * size), 0, np.uint8)
    numbers[:, :k] = (_integers(q) + offset).T
    weight = numpy_helper.from_array(_in_bytes(numbers).reshape(n, blocks, size // 2), q.name)
    points = None
    if z is not None or not offset:  # without zero points MatMulNBits takes the middle, DequantizeLinear 0
        given_points = np.zeros(scales.dims, np.int16) if z is None else _integers(z).reshape(scales.dims)
        whole = given_points.T if in_blocks else given_points.reshape(-1, 1)
        points = _in_bytes((np.broadcast_to(whole, (n, blocks)) + offset).astype(np.uint8))
    return weight, points, {"K": k, "N": n, "bits": 4, "block_size": size}, [n, blocks]


def _integers(tensor: TensorProto) -> np.ndarray:
    return numpy_helper.to_array(tensor).astype(np.int16)


def _in_bytes(numbers: np.ndarray) -> np.ndarray:
    """Numbers of 4 bits in bytes along the last axis, the first in the low half."""
    even = np.pad(numbers, ((0, 0), (0, numbers.shape[1] % 2)))
    return even[:, ::2] | even[:, 1::2] << 4
