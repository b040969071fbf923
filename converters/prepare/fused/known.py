"""Element types, ranks and short constants, followed node by node through a graph that is being rewritten."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from onnx import (
    GraphProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    TensorShapeProto,
    TypeProto,
    defs,
    helper,
    numpy_helper,
    shape_inference,
)

from onnx_backprop.opset.graphs.walk import constant_tensor, is_standard, subgraphs

_SHORT = 64  # elements of a constant whose numbers are remembered


class Known:
    """What is known of the values that a graph's nodes may name; `learn` adds what a further node makes.

    The lengths are those of onnx's inference for one node at a time and may be wrong where that is; ranks are not.
    """

    def __init__(
        self,
        graph: GraphProto,
        opsets: Sequence[OperatorSetIdProto],
        declared: Mapping[str, TypeProto],
        outer: "Known | None" = None,
    ) -> None:
        self.opsets = opsets
        self._versions = {o.domain: o.version for o in opsets}
        self._declared = declared
        self._types: ChainMap[str, TypeProto] = ChainMap({}, *(outer._types.maps if outer else ()))
        self._data: ChainMap[str, TensorProto] = ChainMap({}, *(outer._data.maps if outer else ()))
        for value in graph.input:
            self._types[value.name] = value.type
        inputs = {value.name for value in graph.input}
        for tensor in graph.initializer:
            self.learn_tensor(tensor.name, tensor, constant=tensor.name not in inputs)

    def version(self, domain: str) -> int:
        """The version of a domain that the model imports, 0 for one that it does not."""
        return self._versions.get(domain, 0)

    def learn_tensor(self, name: str, tensor: TensorProto, *, constant: bool = True) -> None:
        """Note an initializer or the value of a Constant."""
        self._types[name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        if constant and prod(tensor.dims) <= _SHORT:
            self._data[name] = tensor

    def learn(self, node: NodeProto) -> None:
        """Note what a node makes, as far as onnx infers it; else what the file declares."""
        tensor = constant_tensor(node)
        if tensor is not None:
            self.learn_tensor(node.output[0], tensor)
            return
        inferred = self._inferred(node)
        for name in filter(None, node.output):
            type_ = inferred.get(name, TypeProto())
            stated = self._declared.get(name, TypeProto())
            if type_.WhichOneof("value") is None and not stated.HasField("tensor_type"):
                type_ = stated
            elif type_.WhichOneof("value") in (None, "tensor_type"):
                _complete(type_.tensor_type, stated.tensor_type)
            self._types[name] = type_

    def learn_branches(self, node: NodeProto, branches: Sequence["Known"]) -> None:
        """Note what an If makes after what its branches make."""
        for index, name in enumerate(node.output):
            ends = [g.output[index].name for g in subgraphs(node)]
            types = [k._types.get(end, TypeProto()) for k, end in zip(branches, ends, strict=True)]
            elements = {t.tensor_type.elem_type for t in types}
            shapes = [t.tensor_type.shape for t in types if t.tensor_type.HasField("shape")]
            ranks = {len(shape.dim) for shape in shapes}
            if len(elements) == 1 and len(shapes) == len(types) and len(ranks) == 1:
                self._types[name] = helper.make_tensor_type_proto(elements.pop(), [None] * ranks.pop())

    def element(self, name: str) -> int:
        """The element type of a value, 0 where it is unknown."""
        return self._types.get(name, TypeProto()).tensor_type.elem_type

    def rank(self, name: str) -> int | None:
        """The number of axes of a value, None where it is unknown."""
        type_ = self._types.get(name, TypeProto()).tensor_type
        return len(type_.shape.dim) if type_.HasField("shape") else None

    def length(self, name: str, axis: int) -> int | None:
        """The length of an axis of a value, None where it is unknown."""
        dims = self._types.get(name, TypeProto()).tensor_type.shape.dim
        one = dims[axis] if -len(dims) <= axis < len(dims) else None
        return one.dim_value if one is not None and one.HasField("dim_value") else None

    def constant(self, name: str) -> np.ndarray | None:
        """A short constant, None where the value is none."""
        return numpy_helper.to_array(self._data[name]) if name in self._data else None

    def _inferred(self, node: NodeProto) -> Mapping[str, TypeProto]:
        if subgraphs(node):
            return {}
        try:
            schema = defs.get_schema(node.op_type, self._versions[node.domain], node.domain)
            types = {name: self._types.get(name, TypeProto()) for name in node.input if name}
            data = {name: self._data[name] for name in node.input if name in self._data}
            outputs = shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=list(self.opsets))
        except Exception:  # noqa: BLE001 - onnx raises of several kinds; the whole model is inferred and judged later
            return {}
        if is_standard(node, "Reshape", "Expand"):
            self._rank_from_length(node, outputs[node.output[0]])
        return outputs

    def _rank_from_length(self, node: NodeProto, type_: TypeProto) -> None:
        """Reshape has as many axes as its shape has entries, Expand at least those of its data."""
        rank = self.length(node.input[1], 0)
        if node.op_type == "Expand" and rank is not None:
            data = self.rank(node.input[0])
            rank = None if data is None else max(rank, data)
        type_.tensor_type.elem_type = type_.tensor_type.elem_type or self.element(node.input[0])
        if rank is not None and not type_.tensor_type.HasField("shape"):
            type_.tensor_type.shape.SetInParent()
            for _ in range(rank):
                type_.tensor_type.shape.dim.add()


def _complete(type_: TypeProto.Tensor, stated: TypeProto.Tensor) -> None:
    """Take over the element type and the rank, which the run checks; stated lengths may be of another time."""
    type_.elem_type = type_.elem_type or stated.elem_type
    if stated.HasField("shape") and not type_.HasField("shape"):
        type_.shape.SetInParent()
        type_.shape.dim.extend(TensorShapeProto.Dimension() for _ in stated.shape.dim)
