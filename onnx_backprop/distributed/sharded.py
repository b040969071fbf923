"""The update divided among the ranks: each renews a part of the elements of all parameters and has their moments alone.

Parameters lie behind each other in one array, which ranks divide evenly, whatever the tensors' sizes. A rank updates
its range of it and gets the rest from the others. Gradients are those of all elements on every rank, so that norms need
no messages of their own, and the new values are those of an undivided update, bit for bit.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnxruntime
from onnx import ModelProto, NodeProto, TypeProto, helper

from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.distributed.communicator import Communicator, exchange
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.core.op import UPDATE_DOMAIN
from onnx_backprop.opset.functions.update_functions import members
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.walk import all_graphs

OrtValue = onnxruntime.OrtValue
_ALIGNED = 64  # bytes: tensors, and parts of them but the first, begin with a cache line


@dataclass(frozen=True)
class Part:
    """Elements [start, end) of a tensor that lies at `place` of the array of its type; `shape` is the whole one's."""

    place: int
    start: int
    end: int
    shape: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of the part: of as many axes, but for numbers."""
        return (self.end - self.start, *[1] * (len(self.shape) - 1))


class Division:
    """Which part of the state this rank renews, and where the whole of the parameters is."""

    def __init__(self, graph: TrainingGraph, update: ModelProto, communicator: Communicator) -> None:
        """update: the second half of a split training graph, which is made to renew parts, in place.

        Errors: UnsupportedError for a graph whose update is not that of `training_graph`.
        """
        self._communicator = communicator
        types = {value.name: value.type.tensor_type for value in update.graph.input}
        nodes = [node for owner in all_graphs(update.graph) for node in owner.node]
        arguments = {p: entries for node in nodes for p, entries in _members(update, node).items()}
        renewed = [name for name in graph.parameters if name in arguments]
        if not renewed or set(renewed) != set(arguments):
            raise UnsupportedError(
                "shard_update: expected an update of parameters that training_graph has written. Leave it out"
            )
        self._lengths: dict[np.dtype, int] = {}
        self._dtypes = {name: helper.tensor_dtype_to_np_dtype(types[name].elem_type) for name in renewed}
        self._parameters = self._divided(renewed, types)
        self.parts = dict(self._parameters)  # by name; of what is kept for a parameter too
        for name, entries in arguments.items():
            self.parts |= {entry: self._parameters[name] for entry in entries if entry in graph.updates}
        self.parts |= {mean: self._parameters[p] for mean, p in graph.copies.items() if p in self._parameters}
        self._rewrite(graph, update)
        self._held: list[tuple[np.ndarray, list[tuple[OrtValue, OrtValue]]]] = []  # arrays; tensors in them and parts

    def _ends(self, dtype: np.dtype) -> list[int]:
        """Where the ranges of the ranks end in the array of a type."""
        length, size, step = self._lengths[dtype], self._communicator.size, _ALIGNED // dtype.itemsize
        return [min(length, -(-length * (rank + 1) // (size * step)) * step) for rank in range(size)]

    def _divided(self, names: list[str], types: Mapping[str, TypeProto.Tensor]) -> dict[str, Part]:
        shapes = {name: tuple(d.dim_value for d in types[name].shape.dim) for name in names}
        places: dict[str, int] = {}
        for name in names:
            dtype = self._dtypes[name]
            places[name] = self._lengths.get(dtype, 0)
            step = _ALIGNED // dtype.itemsize
            self._lengths[dtype] = -(-(places[name] + prod(shapes[name])) // step) * step
        result: dict[str, Part] = {}
        for name, place in places.items():
            ends, count = self._ends(self._dtypes[name]), prod(shapes[name])
            first, last = [0, *ends][self._communicator.rank], ends[self._communicator.rank]
            start, end = (min(max(limit - place, 0), count) for limit in (first, last))
            result[name] = Part(place, start, end, shapes[name])
        return result

    def _rewrite(self, graph: TrainingGraph, update: ModelProto) -> None:
        """Take parts of the gradients in front of the calls; declare parts of the rest."""
        reserved = used_names(update.graph)
        for owner in reversed(list(all_graphs(update.graph))):  # inner ones first: outer nodes are copied
            nodes: list[NodeProto] = []
            for node in owner.node:
                for p, entries in _members(update, node).items():
                    for name in entries:
                        if name not in graph.updates:
                            sliced = _slice(name, self._parameters[p], nodes, reserved)
                            node.input[:] = [sliced if given == name else given for given in node.input]
                nodes.append(node)
            if len(nodes) > len(owner.node):
                assign(owner.node, list(map(copied, nodes)))
            del owner.value_info[:]
            for value in owner.output:
                if owner.name != update.graph.name:
                    value.type.tensor_type.ClearField("shape")
        renewed = {graph.updates[name]: part for name, part in self.parts.items()} | self.parts
        for value in (*update.graph.input, *update.graph.output):
            if value.name in renewed:
                kind = value.type.tensor_type.elem_type
                value.CopyFrom(helper.make_tensor_value_info(value.name, kind, renewed[value.name].extent))

    def allocated(self, in_place: Collection[str]) -> tuple[dict[str, OrtValue], dict[str, OrtValue]]:
        """Memory for all parameters, whole, and for what steps write that read them there; what was, is forgotten."""
        self._held.clear()
        first = self._allocated()
        return first, first if set(in_place) >= set(self._parameters) else self._allocated()

    def _allocated(self) -> dict[str, OrtValue]:
        result: dict[str, OrtValue] = {}
        for dtype, length in self._lengths.items():
            block = np.zeros(length * dtype.itemsize + _ALIGNED, np.uint8)
            start = -block.ctypes.data % _ALIGNED
            array, pairs = block[start : start + length * dtype.itemsize].view(dtype), list[tuple[OrtValue, OrtValue]]()
            for name, part in self._parameters.items():
                if self._dtypes[name] != dtype:
                    continue
                flat = array[part.place : part.place + prod(part.shape)]
                whole = OrtValue.ortvalue_from_numpy(flat.reshape(part.shape))
                pairs.append((whole, OrtValue.ortvalue_from_numpy(flat[part.start : part.end].reshape(part.extent))))
                result[name] = whole
            self._held.append((array, pairs))
        return result

    @property
    def kept(self) -> set[str]:
        """The tensors of which this rank keeps a part alone."""
        return self.parts.keys() - self._parameters.keys()

    def part(self, name: str, value: OrtValue) -> OrtValue:
        """What the update reads or writes of a tensor: of a parameter its part, all else is that part already."""
        if name not in self._parameters:
            return value
        return next(part for _, pairs in self._held for whole, part in pairs if whole is value)

    def shard(self, name: str, array: np.ndarray) -> np.ndarray:
        """What this rank keeps of a tensor of the state."""
        part = self.parts.get(name)
        if part is None or name in self._parameters:
            return array
        return np.reshape(array, -1)[part.start : part.end].reshape(part.extent)

    def whole(self, name: str, array: np.ndarray) -> np.ndarray:
        """A tensor of the state of which this rank keeps a part. All ranks call this."""
        part = self.parts.get(name)
        if part is None or name in self._parameters:
            return array
        parameter = next(p for p, other in self._parameters.items() if other is part)
        result = np.zeros(prod(part.shape), array.dtype)
        result[part.start : part.end] = array.reshape(-1)
        ends = [min(max(end - part.place, 0), len(result)) for end in self._ends(self._dtypes[parameter])]
        exchange(self._communicator, result, ends)
        return result.reshape(part.shape)

    def exchange(self, values: Mapping[str, OrtValue]) -> None:
        """Get the parts of the parameters that the other ranks have renewed."""
        used = {id(values[name]) for name in self._parameters}
        for array, pairs in self._held:
            if any(id(whole) in used for whole, _ in pairs):
                exchange(self._communicator, array, self._ends(array.dtype))


def _members(update: ModelProto, call: NodeProto) -> dict[str, list[str]]:
    """Each parameter that the call of an update function renews, and all tensors that it does that with."""
    if call.domain != UPDATE_DOMAIN:
        return {}
    key = call.op_type, call.overload
    function = next(f for f in update.functions if f.domain == UPDATE_DOMAIN and (f.name, f.overload) == key)
    arguments = [[call.input[n] for n in member.inputs] for member in members(function)]
    return {parameter: [parameter, *others] for parameter, *others in arguments}


def _slice(name: str, part: Part, nodes: list[NodeProto], reserved: set[str]) -> str:
    """Elements [start, end) of a tensor, as the update takes them."""
    op = Emitter(f"{name}/part", reserved)
    result = op.Slice(op.Reshape(name, op.constant([-1])), op.constant([part.start]), op.constant([part.end]))
    axes = list(range(1, len(part.shape)))
    result = op.Unsqueeze(result, op.constant(axes)) if axes else result
    nodes += op.nodes
    return result
