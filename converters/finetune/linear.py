"""Linear layers of a model: the nodes, which tensors of the file are their weights, and putting others there."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.prepare.accept import MICROSOFT
from onnx_backprop.converters.prepare.exporters.origins import module_of
from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import producers
from onnx_backprop.opset.graphs.walk import attributes_of, is_standard, reads

PACKED = "MatMulNBits"  # of com.microsoft: its weight is no tensor that another could take the place of
PACKED_PRODUCTS = (PACKED, "MatMulBnb4")
PACKED_TABLE = "GatherBlockQuantized"
RECURRENT = ("GRU", "LSTM", "RNN")
# the inputs that may be weights, by domain and operator; MatMul has one weight
PLACES = {("", op_type): (1,) for op_type in ("Conv", "ConvTranspose", "Gemm")} | {("", "Gather"): (0,)}
PLACES |= {("", "MatMul"): (1, 0), (MICROSOFT, "Attention"): (1,)} | {("", op_type): (1, 2) for op_type in RECURRENT}
PLACES |= {(MICROSOFT, PACKED): (1,), (MICROSOFT, PACKED_TABLE): (0,)}  # scales and zero points are no weights
_CHAIN = ("Cast", "DequantizeLinear", "Identity", "Transpose")  # between a tensor and the node that multiplies by it


class Stored(NamedTuple):
    """A value that is made of one tensor of the file: its lengths and type, and the nodes from the tensor on."""

    tensor: str
    dims: tuple[int, ...]
    dtype: int
    chain: tuple[NodeProto, ...] = ()


def as_read(weight: Stored, tensor: TensorProto) -> np.ndarray:
    """The numbers of the tensor that a weight is made of, as the node of an exact layer reads them."""
    array = to_array(tensor)
    for link in weight.chain:
        if link.op_type == "Transpose":
            array = array.transpose(attributes_of(link).get("perm"))
    return array


@dataclass(frozen=True)
class Linear:
    """A node that multiplies by a weight, or reads rows of one.

    place: the input that is the weight. weight: as the node reads it; of MatMulNBits (K, N).
    """

    node: NodeProto
    place: int
    weight: Stored

    @property
    def dims(self) -> tuple[int, ...]:
        """The lengths of the weight."""
        return self.weight.dims

    @property
    def exact(self) -> bool:
        """Whether the weight is the tensor itself, perhaps transposed."""
        plain = all(link.op_type in ("Identity", "Transpose") for link in self.weight.chain)
        return plain and self.node.op_type not in (*PACKED_PRODUCTS, PACKED_TABLE)

    @property
    def names(self) -> list[str]:
        """What it may be called: by its weight, its node, or the module of PyTorch that the node was."""
        return list(dict.fromkeys((self.weight.tensor, *names_of(self.node))))

    @property
    def output_axis(self) -> int:
        """The axis of the weight along which the outputs lie; of ConvTranspose, those of one group."""
        op_type, rank = self.node.op_type, len(self.dims)
        if op_type == "Gemm":
            return 0 if attributes_of(self.node).get("transB") else 1
        if op_type in ("Conv", "ConvTranspose", "Gather", PACKED_TABLE):
            return 0 if op_type == "Conv" else 1
        return rank - 2 if op_type in RECURRENT or self.place == 0 else rank - 1


class Layers:
    """The main graph of a model, to be changed: its linear layers, tensors by name, and who reads what."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.graph: GraphProto = model.graph
        self.taken = used_names(self.graph)
        self.tensors = {tensor.name: tensor for tensor in self.graph.initializer}
        self.tensors |= {node.output[0]: t for node in self.graph.node if (t := _constant(node)) is not None}
        self.makers = producers(self.graph.node)
        self.readers = Counter(name for node in self.graph.node for name in node.input)
        self.readers.update(name for node in self.graph.node for name in reads(node).difference(node.input))
        self.readers.update(value.name for value in self.graph.output)

    def linear(self, node: NodeProto) -> Linear | None:
        """A Gemm, MatMul, MatMulNBits or Conv that multiplies by a matrix or kernel; None for another node."""
        heads = ("Conv", "Gemm", "MatMul", *PACKED_PRODUCTS)
        candidates = (layer for layer in self.layers(node) if node.op_type == "Conv" or len(layer.dims) == 2)
        return next(candidates, None) if node.op_type in heads else None

    def layers(self, node: NodeProto) -> list[Linear]:
        """A node with each of its weights; nothing for another node, and where the weights are computed."""
        if node.domain == MICROSOFT and node.op_type in (*PACKED_PRODUCTS, PACKED_TABLE):
            return self._packed(node)
        result: list[Linear] = []
        for place in PLACES.get((node.domain, node.op_type), ()):
            weight = self.stored(node.input[place])
            if weight is not None and weight.dtype in FLOATS and _multiplies(node, len(weight.dims)):
                result.append(Linear(node, place, weight))
        return result[:1] if node.op_type == "MatMul" else result

    def _packed(self, node: NodeProto) -> list[Linear]:
        place = 0 if node.op_type == PACKED_TABLE else 1
        values, data, scales = attributes_of(node), *(self.tensors.get(node.input[n]) for n in (place, 2))
        if data is None or scales is None:
            return []
        if place == 1:
            return [Linear(node, 1, Stored(node.input[place], (values["K"], values["N"]), scales.data_type))]
        if len(data.dims) != 2 or values.get("gather_axis", 0) not in (0, -2):
            return []
        in_a_byte = 8 // values.get("bits", 4) if data.data_type == TensorProto.UINT8 else 1
        return [Linear(node, 0, Stored(node.input[place], (data.dims[0], data.dims[1] * in_a_byte), scales.data_type))]

    def sources(self, name: str) -> set[str]:
        """The tensors of the file that a value is computed from; none if anything else is, or a layer, on the way."""
        result: set[str] = set()
        todo = [name] if name in self.tensors or name in self._constant else []
        seen: set[str] = set()
        while todo:
            if (one := todo.pop()) in self.tensors:
                result.add(one)
            elif one not in seen:
                seen.add(one)
                todo += reads(self.makers[one])
        return result

    @cached_property
    def _constant(self) -> set[str]:
        """The values that nodes that are no layers compute from tensors of the file alone."""
        result: set[str] = set()
        for node in self.graph.node:
            names = reads(node)
            if names and all(name in self.tensors or name in result for name in names) and not self.layers(node):
                result.update(node.output)
        return result

    def stored(self, name: str) -> Stored | None:
        """A value that is a tensor of the file, but cast, dequantized or transposed; None for another."""
        chain: list[NodeProto] = []
        while name not in self.tensors:
            node = self.makers.get(name)
            if node is None or not _hands_on(node):
                return None
            chain.insert(0, node)
            name = node.input[0]
        tensor = self.tensors[name]
        dims, dtype = list(tensor.dims), tensor.data_type
        for node in chain:
            given = attributes_of(node)
            if node.op_type == "Transpose":
                dims = [dims[axis] for axis in given.get("perm", range(len(dims))[::-1])]
            elif node.op_type == "Cast":
                dtype = given["to"]
            elif node.op_type == "DequantizeLinear":
                scale = self.tensors.get(node.input[1])
                dtype = given.get("output_dtype") or (TensorProto.UNDEFINED if scale is None else scale.data_type)
        return Stored(name, tuple(dims), dtype, tuple(chain))

    def array(self, weight: Stored) -> np.ndarray:
        """The weight of an exact layer as its node reads it."""
        return as_read(weight, self.tensors[weight.tensor])

    def put(self, ends: Sequence[tuple[NodeProto, int]], new: np.ndarray | TensorProto) -> str:
        """Let nodes, each at an input, read another tensor; its name, that of the old where nobody else reads it."""
        old = {node.input[place] for node, place in ends}
        name = min(old)
        alone = len(old) == 1 and name in self.tensors and name not in self.makers and self.readers[name] == len(ends)
        name = name if alone else unique(f"{name}.new", self.taken)
        tensor = new if isinstance(new, TensorProto) else numpy_helper.from_array(np.ascontiguousarray(new))
        tensor.name = name
        if alone:
            self.tensors[name].CopyFrom(tensor)
            for value in self.graph.input:
                if value.name == name:
                    value.CopyFrom(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
        else:
            self.add(tensor)
        for node, place in ends:
            node.input[place] = name
        return name

    def add(self, tensor: TensorProto) -> None:
        """One more initializer."""
        self.graph.initializer.append(tensor)
        self.tensors[tensor.name] = self.graph.initializer[-1]

    def finish(self, replaced: Mapping[int, list[NodeProto]]) -> None:
        """Put nodes in the place of others, by their id, and drop what nobody reads any more of a weight."""
        nodes = [new for node in self.graph.node for new in replaced.get(id(node), [node])]
        read = {value.name for value in self.graph.output}
        kept: list[NodeProto] = []
        for node in reversed(nodes):
            constant = is_standard(node, "Constant")
            if not (constant or _hands_on(node)) or not read.isdisjoint(node.output):
                kept.append(node)
                read |= reads(node)
        assign(self.graph.node, kept[::-1])
        gone = {name for name in self.tensors if name in self.readers and name not in read}
        assign(self.graph.initializer, [t for t in self.graph.initializer if t.name not in gone])
        assign(self.graph.input, [value for value in self.graph.input if value.name not in gone])


def _multiplies(node: NodeProto, rank: int) -> bool:
    """Whether a node multiplies by, or reads rows of, a weight of so many axes."""
    if node.op_type in ("Conv", "ConvTranspose", "MatMul"):
        return rank > 1 if node.op_type == "MatMul" else rank > 2
    if node.op_type == "Gather":
        return rank == 2 and attributes_of(node).get("axis", 0) in (0, -2)
    return rank == (3 if node.op_type in RECURRENT else 2)


def _hands_on(node: NodeProto) -> bool:
    """Whether a node gives its first input as another type, as what it was quantized from, or transposed."""
    return node.op_type in _CHAIN and node.domain in ("", MICROSOFT)


def _constant(node: NodeProto) -> TensorProto | None:
    """What a Constant holds, but for text."""
    if not is_standard(node, "Constant") or not node.attribute:
        return None
    (given,) = node.attribute
    if given.name == "value":
        return given.t
    if given.name in ("value_int", "value_ints", "value_float", "value_floats"):
        kind = np.int64 if "int" in given.name else np.float32
        return numpy_helper.from_array(np.array(helper.get_attribute_value(given), kind))
    return None


def names_of(node: NodeProto) -> list[str]:
    """What a node may be called: by its name, or the module of PyTorch that it was."""
    return [name for name in (node.name, module_of(node)) if name]
