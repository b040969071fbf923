"""A training step that a GPU runs through onnxruntime-web's WebGPU kernels, which are float32 kernels.

Three things of an inlined step have no kernel there, and are written in others:
- the float64 in which the optimizer works out its numbers: they are float32, and 1 - βᵗ, of which float32 would leave
  few digits, comes from a series;
- the Indices of MaxPool, by which MaxPoolBackward finds the winners: tap after tap of the windows is compared instead;
- attributes of Conv and ConvTranspose that are left to their defaults: they are written down.

Lengths are those of the data and of the batch, so no arithmetic on shapes is left to the run.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.prepare.load import infer
from onnx_backprop.converters.prepare.writing.inline import inlined
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.opset.core.schema import attributes_of
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.types import shapes_of
from onnx_backprop.opset.maths import pooling
from onnx_backprop.opset.operators.max_pool_backward import OP as MAX_POOL_BACKWARD
from onnx_backprop.web.bundle import bundle

_SERIES = 8  # terms of exp at most at 1/2: the next one is 10⁻⁸ of the sum
_SWITCH = 0.5


def fix_lengths(model: ModelProto, lengths: Mapping[str, Sequence[int]]) -> ModelProto:
    """A copy of a forward model whose inputs have these lengths."""
    result = copied(model)
    for value in result.graph.input:
        if value.name in lengths:
            for dim, length in zip(value.type.tensor_type.shape.dim, lengths[value.name], strict=True):
                dim.dim_value = length
    return result


def webgpu_bundle(graph: TrainingGraph, forward: ModelProto) -> dict[str, bytes]:
    """What `bundle` gives, for WebGPU; see `webgpu_step`. forward: the inference model, its lengths as they came."""
    return bundle(graph, step=webgpu_step(graph), forward=forward)


def webgpu_step(graph: TrainingGraph) -> ModelProto:
    """The step of a training graph that is not inlined and whose lengths are all known, for WebGPU.

    Errors: UnsupportedError for what it has no form for: unknown lengths, float64 parameters, a MaxPool whose gradient
    goes by Indices.
    """
    model = infer(graph.model)
    _spread_pools(model)
    result = infer(inlined(model))
    _write_attributes(result.graph)
    _in_float32(result)
    return infer(result)


class _Writer(Emitter):
    """Emits nodes and float32 constants under names of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(name, set())

    def constant(self, value: Any, dtype: type[np.generic] | None = np.float32) -> str:
        return super().constant(value, dtype)


def _shapes(graph: GraphProto) -> dict[str, list[int]]:
    """The shapes of the tensors whose lengths are all known."""
    shapes = shapes_of(graph)
    known = {name: [d for d in dims if isinstance(d, int)] for name, dims in shapes.items()}
    return {name: lengths for name, lengths in known.items() if len(lengths) == len(shapes[name])}


def _spread_pools(model: ModelProto) -> None:
    """Write MaxPoolBackward out, and refuse what else asks for the Indices of a MaxPool."""
    shapes = _shapes(model.graph)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if (node.domain, node.op_type) == (DOMAIN, "MaxPoolBackward"):
            nodes += _max_pool_backward(node, shapes)
        elif node.op_type == "MaxPool" and len(node.output) > 1 and node.output[1]:
            raise UnsupportedError(
                f"WebGPU: MaxPool {node.name!r}: its gradient goes by the pool's Indices, which no kernel gives. "
                "Expected a pool that MaxPoolBackward takes: float32, padding shorter than the kernel, no SAME with "
                "dilations. Use the site without --webgpu"
            )
        else:
            nodes.append(node)
    assign(model.graph.node, nodes)


def _max_pool_backward(node: NodeProto, shapes: Mapping[str, Sequence[int]]) -> list[NodeProto]:
    """dx of MaxPoolBackward: tap k of a window wins if it is the first, or greater than the best, and no later one.

    best ← where(taken_k, x_k, best), taken_k = x_k > best;  won_k = taken_k · Π_{j>k} (1 - taken_j);
    dx = Σ_k won_k · dy, put where tap k lies. Taps that lie in the padding are never taken.
    """
    attrs = Attributes(MAX_POOL_BACKWARD, attributes_of(node))
    source, gradient = node.input
    if attrs["data_format"] != "NCX" or source not in shapes or gradient not in shapes:
        raise UnsupportedError(
            f"WebGPU: MaxPoolBackward {node.name!r}: expected data_format NCX and known lengths, got "
            f"{attrs['data_format']} and {shapes.get(source, 'unknown')}. Use the site without --webgpu"
        )
    op = _Writer(node.name or node.output[0])
    spatial = range(2, len(shapes[source]))
    axes = pooling.axes_of(attrs, shapes[source][2:], shapes[gradient][2:])
    before = [axis.begin for axis in axes]
    reach = [(axis.out - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1 for axis in axes]
    after = [max(0, r - b - axis.length) for axis, r, b in zip(axes, reach, before, strict=True)]
    total = [b + axis.length + a for axis, b, a in zip(axes, before, after, strict=True)]
    pads = [0, 0, *before, 0, 0, *after]
    padded = op.Pad(source, op.constant(pads, np.int64)) if any(pads) else source
    taps = list(np.ndindex(*(axis.kernel for axis in axes)))
    starts = {tap: [k * axis.dilation for k, axis in zip(tap, axes, strict=True)] for tap in taps}

    def part(tap: tuple[int, ...]) -> str:
        ends = [s + (axis.out - 1) * axis.stride + 1 for s, axis in zip(starts[tap], axes, strict=True)]
        steps = [axis.stride for axis in axes]
        return op.Slice(padded, *(op.constant(list(v), np.int64) for v in (starts[tap], ends, spatial, steps)))

    reached = np.zeros([axis.out for axis in axes], bool)
    best, taken = "", dict[tuple[int, ...], str]()
    for tap in taps:
        value, inside = part(tap), _inside(tap, axes)
        if not inside.any():
            continue
        first = op.constant((inside & ~reached)[None, None].astype(np.float32))
        if not best:
            taken[tap] = op.Expand(first, op.constant(shapes[gradient], np.int64))
        else:
            later = op.Cast(op.Greater(value, best), to=TensorProto.FLOAT)
            if not (inside & reached).all():
                # where nothing was reached before, `best` is padding: the comparison does not count there
                later = op.Max(op.Mul(later, op.constant((inside & reached)[None, None].astype(np.float32))), first)
            taken[tap] = later
        best = op.Where(op.Greater(taken[tap], op.constant(0.5)), value, best) if best else value
        reached |= inside
    result = ""
    rest = gradient  # of dy, what no later tap has won
    for tap in reversed(taken):
        won = op.Mul(rest, taken[tap])
        rest = op.Sub(rest, won)
        put = _put_back(op, won, shapes[gradient], axes, starts[tap], total)
        result = op.Add(result, put) if result else put
    if any(pads):
        ends = [b + axis.length for b, axis in zip(before, axes, strict=True)]
        result = op.Slice(result, *(op.constant(list(v), np.int64) for v in (before, ends, spatial)))
    op.nodes.append(helper.make_node("Identity", [result], [node.output[0]], name=f"{op.prefix}/dx"))
    return op.nodes


def _inside(tap: tuple[int, ...], axes: Sequence[pooling.Windows]) -> np.ndarray:
    """In which windows a tap lies inside the source."""
    result = np.ones((), bool)
    for k, axis in zip(tap, axes, strict=True):
        place = np.arange(axis.out) * axis.stride + k * axis.dilation - axis.begin
        result = result[..., None] & ((place >= 0) & (place < axis.length))
    return result


def _put_back(
    op: _Writer,
    value: str,
    shape: Sequence[int],
    axes: Sequence[pooling.Windows],
    start: Sequence[int],
    total: Sequence[int],
) -> str:
    """The adjoint of a Slice with steps: zeros between the elements, then around them."""
    steps = [axis.stride for axis in axes]
    lengths = [axis.out for axis in axes]
    if any(step > 1 for step in steps):
        spaced = [n for axis in zip(lengths, [1] * len(axes), strict=True) for n in axis]
        gaps = [n for step in steps for n in (0, step - 1)]
        value = op.Reshape(value, op.constant([*shape[:2], *spaced], np.int64))
        value = op.Pad(value, op.constant([0, 0, *[0] * len(gaps), 0, 0, *gaps], np.int64))
        lengths = [n * step for n, step in zip(lengths, steps, strict=True)]
        value = op.Reshape(value, op.constant([*shape[:2], *lengths], np.int64))
    # a last gap may reach beyond the end, which a negative pad cuts
    ends = [t - s - n for t, s, n in zip(total, start, lengths, strict=True)]
    return op.Pad(value, op.constant([0, 0, *start, 0, 0, *ends], np.int64))


def _write_attributes(graph: GraphProto) -> None:
    """Strides, dilations and padding of Conv and ConvTranspose that are left to their defaults."""
    shapes = _shapes(graph)
    for node in graph.node:
        if node.op_type in ("Conv", "ConvTranspose"):
            given = {a.name for a in node.attribute}
            kernel = shapes[node.input[1]][2:]
            defaults = {"kernel_shape": kernel, "strides": [1] * len(kernel), "dilations": [1] * len(kernel)}
            if not given & {"auto_pad", "output_shape"}:
                defaults["pads"] = [0, 0] * len(kernel)
                if node.op_type == "ConvTranspose":
                    defaults["output_padding"] = [0] * len(kernel)
            node.attribute.extend(helper.make_attribute(n, v) for n, v in defaults.items() if n not in given)


def _in_float32(model: ModelProto) -> None:
    """Every float64 number of the optimizer in float32, with 1 - βᵗ by `_one_less_power`."""
    graph = model.graph
    numbers = _numbers(graph)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.DOUBLE and value.name not in numbers:
            raise UnsupportedError(f"WebGPU: {value.name!r} is float64. Convert the model to float32")
    powers = {n.output[0]: n for n in graph.node if n.op_type == "Pow" and n.input[0] in numbers}
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.op_type == "Sub" and node.input[1] in powers:
            power = powers[node.input[1]]
            nodes += _one_less_power(node, numbers[power.input[0]], power.input[1])
            continue
        if node.op_type == "Sub" and all(name in numbers for name in node.input):
            difference = np.array(
                numbers[node.input[0]] - numbers[node.input[1]], np.float32
            )  # 1 - β before it is rounded
            value = numpy_helper.from_array(difference)
            nodes.append(helper.make_node("Constant", [], node.output, name=node.name, value=value))
            continue
        if any(a.type == AttributeProto.GRAPH for a in node.attribute):
            raise UnsupportedError(f"WebGPU: {node.op_type} {node.name!r} has a branch. Leave accumulate at 1")
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                _narrow(attribute.t)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.DOUBLE:
                attribute.i = TensorProto.FLOAT
        nodes.append(node)
    read = {name for node in nodes for name in node.input}
    assign(graph.node, [n for n in nodes if n.output[0] not in powers or n.output[0] in read])
    for tensor in graph.initializer:
        _narrow(tensor)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.DOUBLE:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    del graph.value_info[:]


def _numbers(graph: GraphProto) -> dict[str, float]:
    """The float64 numbers that stand in the graph."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].type == AttributeProto.TENSOR:
            tensors[node.output[0]] = node.attribute[0].t
    return {
        name: float(numpy_helper.to_array(tensor))
        for name, tensor in tensors.items()
        if tensor.data_type == TensorProto.DOUBLE and not tensor.dims
    }


def _narrow(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.DOUBLE:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def _one_less_power(node: NodeProto, base: float, exponent: str) -> list[NodeProto]:
    """1 - βᵗ = 1 - exp(-u), u = -t·ln β; for u < 1/2 by the series u·(1 - u/2·(1 - u/3·(1 - …)))."""
    op = _Writer(node.name or node.output[0])
    if base == 0:
        op.nodes.append(helper.make_node("Identity", [op.constant(1)], [node.output[0]]))
        return op.nodes
    u = op.Mul(exponent, op.constant(-math.log(base)))
    one = op.constant(1)
    series = one
    for n in range(_SERIES, 1, -1):
        series = op.Sub(one, op.Mul(op.Mul(u, op.constant(1 / n)), series))
    series = op.Mul(u, series)
    whole = op.Sub(one, op.Exp(op.Neg(u)))
    small = op.Less(u, op.constant(_SWITCH))
    op.nodes.append(helper.make_node("Where", [small, series, whole], [node.output[0]], name=f"{op.prefix}/1-power"))
    return op.nodes
