"""Linear layers of a model: the nodes, which tensor of the file is their weight, and putting another there."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.prepare.accept import MICROSOFT
from onnx_backprop.converters.prepare.graphs import assign, attributes_of, reads, unique, used_names
from onnx_backprop.converters.prepare.large_weights import FLOATS

PACKED = "MatMulNBits"  # of com.microsoft: its weight is no tensor that another could take the place of
_CHAIN = ("Cast", "DequantizeLinear", "Identity", "Transpose")  # between a tensor and the node that multiplies by it
_SCOPES = "pkg.torch.onnx.name_scopes"  # in a node's metadata: the modules of PyTorch that it comes from


class Stored(NamedTuple):
    """A value that is made of one tensor of the file: its lengths and type, and the nodes from the tensor on."""

    tensor: str
    dims: tuple[int, ...]
    dtype: int
    chain: tuple[NodeProto, ...] = ()


@dataclass(frozen=True)
class Linear:
    """A node that multiplies by a weight.

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
        return plain and self.node.op_type != PACKED

    @property
    def names(self) -> set[str]:
        """What it may be called: by its weight, its node, or the module of PyTorch that the node was."""
        return {self.weight.tensor, self.node.name, *_modules(self.node)} - {""}

    @property
    def output_axis(self) -> int:
        """The axis of the weight along which the outputs lie."""
        if self.node.op_type == "Gemm":
            return 0 if attributes_of(self.node).get("transB") else 1
        return 0 if self.node.op_type == "Conv" or self.place == 0 else 1


class Layers:
    """The main graph of a model, to be changed: its linear layers, tensors by name, and who reads what."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.graph: GraphProto = model.graph
        self.taken = used_names(self.graph)
        self.tensors = {tensor.name: tensor for tensor in self.graph.initializer}
        self.tensors |= {node.output[0]: t for node in self.graph.node if (t := _constant(node)) is not None}
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.readers = Counter(name for node in self.graph.node for name in reads(node))
        self.readers.update(value.name for value in self.graph.output)

    def linear(self, node: NodeProto) -> Linear | None:
        """A node as a linear layer; None for another, and for a weight that is no matrix or is computed."""
        if (node.domain, node.op_type) == (MICROSOFT, PACKED):
            values, scales = attributes_of(node), self.tensors.get(node.input[2])
            if node.input[1] not in self.tensors or scales is None:
                return None
            return Linear(node, 1, Stored(node.input[1], (values["K"], values["N"]), scales.data_type))
        if node.domain or node.op_type not in ("Conv", "Gemm", "MatMul"):
            return None
        for place in (1, 0) if node.op_type == "MatMul" else (1,):
            found = self.stored(node.input[place])
            if found is not None and found.dtype in FLOATS:
                rank = len(found.dims)
                if rank > 2 if node.op_type == "Conv" else rank == 2:
                    return Linear(node, place, found)
        return None

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
        array = numpy_helper.to_array(self.tensors[weight.tensor])
        for link in weight.chain:
            if link.op_type == "Transpose":
                array = array.transpose(attributes_of(link).get("perm"))
        return array

    def put(self, ends: Sequence[tuple[NodeProto, int]], array: np.ndarray) -> str:
        """Let nodes, each at an input, read another tensor; its name, that of the old where nobody else reads it."""
        old = {node.input[place] for node, place in ends}
        name = min(old)
        own = len(old) == 1 and name in self.tensors and name not in self.makers and self.readers[name] == len(ends)
        name = name if own else unique(f"{name}.new", self.taken)
        tensor = numpy_helper.from_array(np.ascontiguousarray(array), name)
        if own:
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
            constant = node.op_type == "Constant" and not node.domain
            if not (constant or _hands_on(node)) or not read.isdisjoint(node.output):
                kept.append(node)
                read |= reads(node)
        assign(self.graph.node, kept[::-1])
        gone = {name for name in self.tensors if name in self.readers and name not in read}
        assign(self.graph.initializer, [t for t in self.graph.initializer if t.name not in gone])
        assign(self.graph.input, [value for value in self.graph.input if value.name not in gone])


def _hands_on(node: NodeProto) -> bool:
    """Whether a node gives its first input as another type, as what it was quantized from, or transposed."""
    return node.op_type in _CHAIN and node.domain in ("", MICROSOFT)


def _constant(node: NodeProto) -> TensorProto | None:
    """What a Constant holds, but for text."""
    if node.op_type != "Constant" or node.domain or not node.attribute:
        return None
    (given,) = node.attribute
    if given.name == "value":
        return given.t
    if given.name in ("value_int", "value_ints", "value_float", "value_floats"):
        kind = np.int64 if "int" in given.name else np.float32
        return numpy_helper.from_array(np.array(helper.get_attribute_value(given), kind))
    return None


def _modules(node: NodeProto) -> list[str]:
    """The innermost module of PyTorch that a node of its exporter comes from, as `blocks.0.attn.qkv`."""
    text = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
    try:
        scopes = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [str(scopes[-2])] if isinstance(scopes, list) and len(scopes) > 1 else []
