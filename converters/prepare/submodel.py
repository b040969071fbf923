"""A few nodes of a model as a model of their own, at the values that reach them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.walk import constant_tensor, reads


def boundary(nodes: Sequence[NodeProto]) -> list[str]:
    """The names that some nodes read and do not make, in order of first use."""
    produced = {name for node in nodes for name in node.output}
    inputs: dict[str, None] = {}
    for node in nodes:
        captured = sorted(reads(node) - set(node.input))
        inputs.update((name, None) for name in (*node.input, *captured) if name and name not in produced)
    return list(inputs)


class Submodels:
    """Takes sub-models out of one model whose types are inferred."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        graph = model.graph
        self.nodes = list(graph.node)
        self._declared = {v.name: v for v in (*graph.value_info, *graph.output, *graph.input)}
        fed = {v.name for v in graph.input}
        self.constants: dict[str, TensorProto] = {t.name: t for t in graph.initializer if t.name not in fed}
        for node in self.nodes:
            if (tensor := constant_tensor(node)) is not None:
                self.constants[node.output[0]] = tensor
        self._outputs = {v.name for v in graph.output}
        self._readers: dict[str, set[int]] = defaultdict(set)
        for node in self.nodes:
            for name in reads(node):
                self._readers[name].add(id(node))

    def inputs(self, nodes: Sequence[NodeProto]) -> list[str]:
        """What the nodes need that is not constant."""
        return [name for name in boundary(nodes) if name not in self.constants]

    def extract(
        self, nodes: Sequence[NodeProto], values: Mapping[str, np.ndarray], *, variables: Collection[str] = ()
    ) -> ModelProto:
        """The nodes as a model; what they read is a graph input whose default is its value here, if there is one.

        Constants stay constants, but those in `variables` become inputs too. Declared shapes stay as they are, since
        how a node is differentiated depends on what is known of them. The outputs are what other nodes, or the model,
        have from these.
        """
        inside = {id(node) for node in nodes}
        names = boundary(nodes)
        constants = [self._named(name) for name in names if name in self.constants and name not in variables]
        inputs = [name for name in names if self._is_input(name, variables)]
        defaults = [numpy_helper.from_array(np.asarray(values[name]), name) for name in inputs if name in values]
        produced = [name for node in nodes for name in node.output if name]
        outputs = [n for n in produced if n in self._outputs or self._readers.get(n, inside) - inside] or produced
        graph = helper.make_graph(
            list(nodes),
            "submodel",
            [self._info(name, values) for name in inputs],
            [self._info(name, values) for name in outputs],
            [*constants, *defaults],
            value_info=[self._declared[n] for n in produced if n in self._declared and n not in outputs],
        )
        return helper.make_model(
            graph,
            ir_version=max(self.model.ir_version, 10),
            opset_imports=list(self.model.opset_import),
            functions=list(self.model.functions),
        )

    def _is_input(self, name: str, variables: Collection[str]) -> bool:
        return name not in self.constants or name in variables

    def _named(self, name: str) -> TensorProto:
        tensor = copied(self.constants[name])
        tensor.name = name
        return tensor

    def _info(self, name: str, values: Mapping[str, np.ndarray]) -> ValueInfoProto:
        declared = self._declared.get(name)
        if declared is not None and declared.type.tensor_type.HasField("shape"):
            return declared
        if name in values:
            array = np.asarray(values[name])
            element = helper.np_dtype_to_tensor_dtype(array.dtype)
            constant = name in self.constants
            shape = array.shape if constant else [f"{name}_{axis}" for axis in range(array.ndim)]
            return helper.make_tensor_value_info(name, element, shape)
        return declared or ValueInfoProto(name=name)


def with_outputs(model: ModelProto, names: Iterable[str]) -> ModelProto:
    """The model with other outputs: any values of its main graph."""
    graph = model.graph
    declared = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
    result = copied(model)
    del result.graph.output[:]
    result.graph.output.extend(declared.get(name, ValueInfoProto(name=name)) for name in names)
    return result


def chunks(items: Sequence[NodeProto], size: int) -> Iterator[Sequence[NodeProto]]:
    """The items in runs of `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
