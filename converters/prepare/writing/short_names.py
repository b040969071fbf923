"""Short names for what a conversion has added, where nobody asks for it by name: they would be half of a small file."""

from collections import Counter
from collections.abc import Collection, Iterator

from onnx import GraphProto, ModelProto, NodeProto

from onnx_backprop.opset.graphs.names import named_after, used_names


def shorten_names(model: ModelProto, original: Collection[str]) -> ModelProto:
    """The model, changed: its values and nodes whose names are not among `original` have short ones.

    Inputs, outputs and initializers of the graph keep theirs. Any other value is called by a number, `_12`. A node
    keeps what it was named after, which errors tell, with a number for its operator: `p_grad/Mul_2` becomes
    `p_grad/2`. A Constant, which cannot fail, has no name.
    """
    graph = model.graph
    kept = {*original, *(v.name for v in (*graph.input, *graph.output, *graph.initializer)), ""}
    _Shortened(kept, used_names(graph)).rename(graph)
    return model


class _Shortened:
    def __init__(self, kept: set[str], taken: set[str]) -> None:
        self.kept = kept
        self.taken = taken | kept
        self.values: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def rename(self, graph: GraphProto) -> None:
        """Rename what a graph and those inside it name."""
        for node in graph.node:
            node.input[:] = map(self._value, node.input)
            node.output[:] = map(self._value, node.output)
            added = node.name not in self.kept
            if added:
                node.name = "" if node.op_type == "Constant" else self._node(node.name, node.op_type)
            for attribute, inner in _graphs_in(node):
                if added:
                    inner.name = attribute
                for value in (*inner.input, *inner.output, *inner.initializer):
                    value.name = self._value(value.name)
                self.rename(inner)
        for value in graph.value_info:
            value.name = self._value(value.name)

    def _value(self, name: str) -> str:
        if name in self.kept:
            return name
        if name not in self.values:
            self.values[name] = self._free("_")
        return self.values[name]

    def _node(self, name: str, op_type: str) -> str:
        prefix = named_after(name, op_type)
        return name if prefix is None else self._free(f"{prefix}/")

    def _free(self, prefix: str) -> str:
        while True:
            self.counts[prefix] += 1
            if (name := f"{prefix}{self.counts[prefix]}") not in self.taken:
                return name


def _graphs_in(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    for attribute in node.attribute:
        for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            yield attribute.name, inner
