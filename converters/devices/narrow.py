"""float64 arithmetic on data in float32, for kernels that have no other; what constants decide keeps its digits."""

import math
from collections.abc import Iterable

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import rename, used_names
from onnx_backprop.opset.graphs.walk import all_graphs, constant_tensor, is_standard, reads, subgraphs

_SERIES = 8  # terms of exp at most at 1/2: the next one is 10⁻⁸ of the sum
_SWITCH = 0.5
_SHAPES = ("Shape", "Size")  # whose results no data decide


def to_float32(model: ModelProto) -> bool:
    """Narrow an inferred model's float64 arithmetic, in place; whether that was done: not for data in float64.

    0-D inputs and outputs in float64 stay what they are. Values that no data decide are computed as they were and then
    rounded: 1 - β keeps all its digits. 1 - βᵗ, of which float32 would leave few, comes from a series.
    """
    if any(_is_double(v.type.tensor_type.elem_type) and len(v.type.tensor_type.shape.dim) for v in model.graph.input):
        return False
    doubles = {t.name for graph in all_graphs(model) for t in graph.initializer if _is_double(t.data_type)}
    for graph in all_graphs(model):
        values = (*graph.input, *graph.output, *graph.value_info)
        doubles |= {value.name for value in values if _is_double(value.type.tensor_type.elem_type)}
        doubles |= {
            n.output[0] for n in graph.node if (t := constant_tensor(n)) is not None and _is_double(t.data_type)
        }
    narrowing = _Narrowing(model, doubles)
    narrowing.graph(model.graph, {value.name for value in model.graph.input})
    for graph in all_graphs(model):
        del graph.value_info[:]
    return True


class _Narrowing:
    def __init__(self, model: ModelProto, doubles: set[str]) -> None:
        self._doubles, self._taken = doubles, used_names(model.graph)
        self._constants: dict[str, float] = {}
        self._powers: dict[str, tuple[float, str]] = {}  # {βᵗ: β, t}
        self._outer = model.graph

    def graph(self, graph: GraphProto, data: Iterable[str]) -> None:
        """Narrow a graph in which some values are data."""
        outermost = graph is self._outer
        self._constants |= dict(_numbers(graph))
        data, rounded = set(data), dict[str, str]()
        nodes: list[NodeProto] = []
        casts = Emitter("float32", self._taken)

        def narrow(name: str) -> str:
            """A value that is not data, rounded."""
            if name not in rounded:
                rounded[name] = casts.Cast(name, to=TensorProto.FLOAT)
                nodes.append(casts.nodes.pop())
            return rounded[name]

        if outermost:
            for name in [value.name for value in graph.input if value.name in self._doubles]:
                rounded[name] = narrow(name)
        for node in graph.node:
            inner = subgraphs(node)
            if not inner and (is_standard(node, *_SHAPES) or not reads(node) & data):
                nodes.append(node)
                continue
            data.update(node.output)
            for part in inner:
                self.graph(part, data | {value.name for value in part.input})
            power = self._powers.get(node.input[1]) if is_standard(node, "Sub") else None
            if power is not None and self._constants.get(node.input[0]) == 1:
                nodes += _one_less_power(node, self._taken, *power)
                continue
            if is_standard(node, "Pow") and node.input[0] in self._constants and node.output[0] in self._doubles:
                self._powers[node.output[0]] = self._constants[node.input[0]], node.input[1]
            for n, name in enumerate(node.input):
                if name in self._doubles and (name not in data or name in rounded):
                    node.input[n] = narrow(name)
            for attribute in node.attribute:
                if attribute.name in ("to", "dtype") and _is_double(attribute.i):
                    attribute.i = TensorProto.FLOAT
                elif attribute.HasField("t") and _is_double(attribute.t.data_type):
                    value = numpy_helper.to_array(attribute.t).astype(np.float32)
                    attribute.t.CopyFrom(numpy_helper.from_array(value))
            nodes.append(node)
        kept = [value.name for value in graph.output if value.name in self._doubles]
        if outermost:
            results = {name: f"{name}/float32" for name in kept if name in data}
            for node in nodes:
                rename(node, results)
            nodes += [
                helper.make_node("Cast", [new], [name], f"{name}/float64", to=TensorProto.DOUBLE)
                for name, new in results.items()
            ]
        else:
            for value in (*graph.input, *graph.output):
                if value.name in self._doubles:
                    value.type.tensor_type.elem_type = TensorProto.FLOAT
            for value in graph.output:
                if value.name in self._doubles and value.name not in data:
                    value.name = narrow(value.name)
        read = {value.name for value in graph.output}.union(*map(reads, nodes))
        assign(graph.node, [node for node in nodes if node.output[0] not in self._powers or node.output[0] in read])


def _is_double(element_type: int) -> bool:
    return element_type == TensorProto.DOUBLE


def _numbers(graph: GraphProto) -> Iterable[tuple[str, float]]:
    """The float64 numbers that stand in a graph."""
    tensors = [(tensor.name, tensor) for tensor in graph.initializer]
    tensors += [(n.output[0], tensor) for n in graph.node if (tensor := constant_tensor(n)) is not None]
    for name, tensor in tensors:
        if _is_double(tensor.data_type) and not tensor.dims:
            yield name, float(numpy_helper.to_array(tensor))


def _one_less_power(node: NodeProto, taken: set[str], base: float, exponent: str) -> list[NodeProto]:
    """1 - βᵗ = 1 - exp(-u), u = -t·ln β; for u < 1/2 by the series u·(1 - u/2·(1 - u/3·(1 - …)))."""
    op = Emitter(node.name or node.output[0], taken)

    def number(value: float) -> str:
        return op.constant(value, np.float32)

    if base == 0:
        return op.finish({node.output[0]: number(1)})
    u = op.Mul(exponent, number(-math.log(base)))
    one = number(1)
    series = one
    for n in range(_SERIES, 1, -1):
        series = op.Sub(one, op.Mul(op.Mul(u, number(1 / n)), series))
    series = op.Mul(u, series)
    whole = op.Sub(one, op.Exp(op.Neg(u)))
    return op.finish({node.output[0]: op.Where(op.Less(u, number(_SWITCH)), series, whole)})
