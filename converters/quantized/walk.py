"""`Walk`: goes through a quantised model and writes the float model beside it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.converters.quantized.limits import is_positive, limits_of
from onnx_backprop.converters.quantized.numbers import Array, Blocks, blocks_along
from onnx_backprop.converters.quantized.records import (
    INTEGERS,
    Activation,
    Product,
    Quantized,
    Weight,
    array_of,
    range_of,
)
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.core.mapped import computed, is_mapped
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.names import rename, unique, used_names
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes, attributes_of, called, constant_tensor, subgraphs

_PARTS = ("stored", "scale", "zero")
_SUFFIXES = ("_quantized", "_DQ_Q4", "_DQ_Q8", "_Q2", "_Q4", "_Q8", "_quant", "_q")  # as quantisers add them


Handler = Callable[["Walk", NodeProto], None]


class Walk:
    """One model, and the float model `floats`.

    Fields that hold for the graph that is walked, and what it sees: tensors, the constants of the file; integers,
    products and casts, what stands for which floats; alias, values that are others in the float model; positive, the
    values there that are not negative; sources, the scales and weights that a value of the file comes from.
    """

    def __init__(self, model: ModelProto, table: dict[tuple[str, str], Handler], refused: Callable[..., str]) -> None:
        self.model, self.table, self.refused = model, table, refused
        self.opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
        self.tensors: dict[str, TensorProto] = {}
        self.makers: dict[str, NodeProto] = {}
        self.integers: dict[str, Quantized] = {}
        self.products: dict[str, Product] = {}
        self.casts: dict[str, tuple[str, str]] = {}
        self.alias: dict[str, str] = {}
        self.sources: dict[str, Activation | Weight] = {}
        self.positive: set[str] = set()
        self.nodes: list[NodeProto] = []
        self.weights: dict[tuple[Any, ...], Weight] = {}
        self.activations: dict[tuple[int, int], Activation] = {}
        self.added: list[TensorProto] = []
        self.taken = used_names(model.graph)
        self.reused: set[str] = set()
        self.readers: dict[str, list[NodeProto]] = {}
        for node in all_nodes(model):
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.outputs = {v.name for graph in all_graphs(model) for v in graph.output}
        self.floats = copied(model)
        self._graph(self.floats.graph, model.graph)
        _drop_unread(self.floats, model, {tensor.name for tensor in self.added})
        self.floats.graph.initializer.extend(self.added)

    def _graph(self, new: GraphProto, graph: GraphProto) -> None:
        """Write the nodes of a graph anew; `new`: a copy of it."""
        outer = {name: dict(value) for name, value in vars(self).items() if name in _SCOPED}
        kept, self.nodes = self.nodes, []
        self.tensors |= {t.name: t for t in graph.initializer}
        for node in graph.node:
            self.makers |= dict.fromkeys(node.output, node)
            tensor = constant_tensor(node)
            if tensor is not None:
                self.tensors[node.output[0]] = tensor
        for node in graph.node:
            self._node(node)
        self._finish(new)
        assign(new.node, self.nodes)
        del new.value_info[:]
        self.nodes = kept
        vars(self).update(outer)

    def _node(self, node: NodeProto) -> None:
        reason = self.refused(node)
        handler = None if reason else self.table.get((node.domain if node.domain != "ai.onnx" else "", node.op_type))
        if reason:
            raise self.refuse(node, reason)
        if handler is not None:
            handler(self, node)
        else:
            self.keep(node)

    def keep(self, node: NodeProto) -> None:
        """Write a node as it is; what it reads are floats."""
        for name in node.input:
            if name in self.integers or name in self.products:
                raise self.refuse(node, f"it reads the integers {name!r}, which stand for floats; {_AS_IT_IS}")
        new = copied(node)
        new.input[:] = [self.alias.get(name, name) for name in node.input]
        for inner, graph in zip(subgraphs(new), subgraphs(node), strict=True):
            self._graph(inner, graph)
        x, weight = (self.sources.get(name) for name in (*node.input[:2], "", "")[:2])
        for name in node.input[2:]:
            bias = self.sources.get(name)
            if isinstance(bias, Weight) and isinstance(x, Activation) and isinstance(weight, Weight):
                bias.of = (x, weight)
        self.put(new)

    def put(self, node: NodeProto) -> None:
        """Write a node that is of the float model already."""
        self.nodes.append(node)
        if is_positive(node, self._is_positive, self.array):
            self.positive |= set(node.output)

    def _is_positive(self, name: str) -> bool:
        constant = self.array(name)
        return name in self.positive or (
            constant is not None and constant.size == 1 and float(constant.reshape(())) >= 0
        )

    def emit(self, like: NodeProto, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **more: Any) -> None:
        """Write a node in the place of another; attributes of None, and lists of nothing, are left out."""
        given = {name: value for name, value in more.items() if value not in (None, [])}
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        name = self.stem(like.name, like.name) if like.name else ""
        node = helper.make_node(op_type, [self.alias.get(i, i) for i in inputs], outputs, name=name, **given)
        node.metadata_props.extend(like.metadata_props)
        self.put(node)

    def attributes(self, node: NodeProto, *left_out: str) -> dict[str, Any]:
        """The attributes of a node, but some."""
        if attributes_of(node).get("channels_last"):
            raise self.refuse(node, "channels_last=1 is not handled. Quantise without this layout")
        return {name: v for name, v in attributes_of(node).items() if name not in ("channels_last", *left_out)}

    def refuse(self, node: NodeProto, sentence: str) -> UnsupportedError:
        """The error that says what `dequantize` does not handle."""
        domain = f"{node.domain}::" if node.domain else ""
        return UnsupportedError(sentence, op_type=f"{domain}{node.op_type}", node=called(node))

    def stem(self, name: str, *gone: str) -> str:
        """A name without what quantisers add to it, which is taken from now on; `gone`: names that are free by now."""
        plain = next((name[: -len(end)] for end in _SUFFIXES if name.endswith(end) and name != end), name)
        free = [candidate for candidate in (plain, name) if candidate not in self.taken or candidate in gone]
        chosen = next((candidate for candidate in free if candidate not in self.reused), "") or unique(
            plain, self.taken
        )
        self.reused.add(chosen)
        self.taken.add(chosen)
        return chosen

    def array(self, name: str) -> Array | None:
        """The numbers of a constant."""
        tensor = self.tensors.get(name)
        return None if tensor is None else array_of(tensor)

    def new_constant(self, name: str, array: Array) -> str:
        """The name of a new tensor of the float model."""
        self.added.append(numpy_helper.from_array(array, unique(name, self.taken)))
        return self.added[-1].name

    def is_integers(self, name: str) -> bool:
        """Whether a name is that of integers in the file."""
        return name in self.tensors and self.tensors[name].data_type in INTEGERS

    def same(self, a: str, b: str) -> bool:
        """Whether two names are those of equal numbers; no zero point is 0."""
        if a == b:
            return True
        first, second = (self.array(name) if name else np.zeros(1) for name in (a, b))
        return first is not None and second is not None and bool(np.all(first == second))

    def real(
        self, node: NodeProto, q: str, scale: str, zero: str, axis: int = 1, length: int = 0, *, instead: str = ""
    ) -> str:
        """The float value that integers stand for, as a node reads them with a scale and a zero point."""
        known = self.integers.get(q)
        if known is not None:
            if not (self.same(known.scale, scale) and self.same(known.zero, zero)):
                raise self.refuse(
                    node,
                    f"{q!r} is read with the scale {scale!r} and the zero point {zero or 'none'!r}, and was written "
                    f"with {known.scale!r} and {known.zero or 'none'!r}; expected equal ones. {_AS_IT_IS}",
                )
            return known.value
        if not self.is_integers(q):
            raise self.refuse(node, f"{q!r} are integers that nothing before it makes of floats. {_AS_IT_IS}")
        shape = tuple(self.tensors[q].dims)
        scales = self.tensors.get(scale)
        if scales is None:
            raise self.refuse(node, f"the scale {scale!r} of the weight {q!r} is computed. {_AS_IT_IS}")
        blocks = blocks_along(shape, int(np.prod(scales.dims)), axis if len(shape) > 1 else 0, length)
        if blocks is None:
            raise self.refuse(node, f"{q!r} of {shape} has scales of {tuple(scales.dims)} along axis {axis}")
        return self.weight(node, q, scale, zero, blocks, instead=instead)

    def weight(
        self,
        node: NodeProto,
        q: str,
        scale: str,
        zero: str,
        blocks: Blocks,
        *,
        perm: tuple[int, ...] = (),
        bits: int = 0,
        of: tuple[Activation, Weight] | None = None,
        factor: float = 1.0,
        instead: str = "",
    ) -> str:
        """The name of the float tensor for a weight, see its record; `instead`: the value that it replaces."""
        stored, scales, zeros = self.tensors[q], self.tensors.get(scale), self.tensors.get(zero)
        if zero and zeros is None:
            raise self.refuse(node, f"the zero point {zero!r} of the weight {q!r} is computed. {_AS_IT_IS}")
        key = (id(stored), id(scales), id(zeros), blocks, bits, factor, tuple(map(id, of or ())))
        known = self.weights.get(key)
        if known is None:
            dtype = of[1].dtype if of else np.dtype(np.float32)
            dtype = dtype if scales is None else helper.tensor_dtype_to_np_dtype(scales.data_type)
            gone = (q,) if all(map(is_quantized, self.readers[q])) else ()
            name = self.stem(q, instead, *gone)
            known = Weight(name, stored, scales, zeros, blocks, stored.data_type, perm, bits, dtype, of, factor)
            if problem := known.problem():
                raise self.refuse(node, problem)
            self.weights[key] = known
            self.added.append(self._floats(known))
        known.readers += [(node, n) for n, name in enumerate(node.input) if name == q]
        self.sources[known.name] = known
        if known.perm == perm:
            return known.name
        turned = unique(f"{known.name}/transposed", self.taken)
        there = tuple(np.argsort(known.perm)) if known.perm else tuple(range(len(blocks.shape)))
        order = [int(there[n]) for n in (perm or range(len(blocks.shape)))]
        self.put(helper.make_node("Transpose", [known.name], [turned], name=turned, perm=order))
        return turned

    @staticmethod
    def _floats(weight: Weight) -> TensorProto:
        """The tensor of the floats; of integers in a file one that is computed when it is read."""
        stored = weight.stored
        if stored is None or weight.of or not is_mapped(stored):
            tensor = numpy_helper.from_array(np.array(weight.floats(), order="C"))
        else:
            parts = {part: None if (x := getattr(weight, part)) is None else copied(x) for part in _PARTS}
            came = replace(weight, readers=[], **parts)  # the parts themselves may be written to
            shape = weight.blocks.shape
            dims = [shape[axis] for axis in weight.perm or range(len(shape))]
            tensor = computed(helper.np_dtype_to_tensor_dtype(weight.dtype), dims, came.floats)
        tensor.name = weight.name
        return tensor

    def activation(self, scale: str, zero: str, element: int, value: str) -> Activation | None:
        """The record of a scale that the file holds."""
        scales, zeros = self.tensors.get(scale), self.tensors.get(zero)
        counts = {int(np.prod(tensor.dims)) for tensor in (scales, zeros) if tensor is not None}
        if scales is None or (zero and zeros is None) or counts != {1} or element not in INTEGERS:
            return None  # computed by each run, or along an axis: such scales stay
        activation = self.activations.setdefault((id(scales), id(zeros)), Activation(scales, zeros, element))
        activation.values.append(value)
        return activation

    def element_of(self, zero: str) -> int:
        """The type of integers with a zero point, uint8 where there is none."""
        return self.tensors[zero].data_type if zero in self.tensors else TensorProto.UINT8

    def name_of(self, q: str) -> str:
        """The name of the floats that integers stand for: that of what DequantizeLinear makes of them, if one does."""
        behind = [n.output[0] for n in self.readers.get(q, ()) if n.op_type == "DequantizeLinear"]
        value = next((name for name in behind if name in self.outputs), next(iter(behind), ""))
        return value or (q if q in self.outputs else self.stem(q))

    def result(self, q: str, scale: str, zero: str, emit: Callable[[str], None]) -> None:
        """Let `emit` write the node whose result are the integers q, and cut its floats where the file does."""
        value = self.name_of(q)
        emit(value)
        limits = self.limits(scale, zero)
        if limits and value not in self.positive:
            before = unique(f"{value}/unlimited", self.taken)
            rename(self.nodes[-1], {value: before})
            self.limit(before, value, limits, scale)
        self.integers[q] = Quantized(value, scale, zero, self.activation(scale, zero, self.element_of(zero), value))

    def limits(self, scale: str, zero: str) -> tuple[float, float] | None:
        """What rounding to a scale and a zero point cuts that a node is missing for."""
        scales, zeros = self.array(scale), self.array(zero) if zero else np.zeros(1)
        if scales is None or zeros is None or scales.size != 1 or self.element_of(zero) not in INTEGERS:
            return None
        return limits_of(float(scales.reshape(())), int(zeros.reshape(-1)[0]), range_of(self.element_of(zero)))

    def limit(self, value: str, result: str, limits: tuple[float, float], scale: str) -> None:
        """Write Relu or Clip."""
        least, most = limits
        if most == np.inf:
            self.put(helper.make_node("Relu", [value], [result], name=unique(f"{result}/Relu", self.taken)))
            return
        dtype = helper.tensor_dtype_to_np_dtype(self.tensors[scale].data_type)
        ends = [
            self.new_constant(f"{result}/{what}", np.array(v, dtype)) for what, v in (("min", least), ("max", most))
        ]
        name = unique(f"{result}/Clip", self.taken)
        if self.opset < 11:
            self.put(helper.make_node("Clip", [value], [result], name=name, min=least, max=most))
        else:
            self.put(helper.make_node("Clip", [value, *ends], [result], name=name))
        if least >= 0:
            self.positive.add(result)

    def _finish(self, graph: GraphProto) -> None:
        """Give the graph's outputs the names that they had."""
        names = {value.name for value in graph.output} | {value.name for value in graph.input}
        for output in graph.output:
            name = output.name
            if name in self.integers:
                source, scale = self.integers[name].value, self.tensors.get(self.integers[name].scale)
                output.type.tensor_type.elem_type = TensorProto.FLOAT if scale is None else scale.data_type
            elif name in self.products:
                raise self.refuse(self.products[name].node, "its sums are not multiplied by all scales of its operands")
            elif name in self.alias:
                source = self.alias[name]
            else:
                continue
            if source == name:
                continue
            produced = any(source in node.output for node in self.nodes)
            if not produced or source in names:
                self.put(helper.make_node("Identity", [source], [name], name=unique(f"{name}/Identity", self.taken)))
                continue
            for node in self.nodes:
                rename(node, {source: name})
            self.alias |= {old: name for old, new in self.alias.items() if new == source}
            self.integers |= {q: replace(one, value=name) for q, one in self.integers.items() if one.value == source}
            for one in self.activations.values():
                one.values[:] = [name if value == source else value for value in one.values]


_AS_IT_IS = "ob.dequantize has no float model for this; dequantise the file with the tool that has quantised it"
_ROUNDING = [
    "uantize",
    "Integer",
    "QLinear",
    "QGemm",
    "QAttention",
    "QEmbed",
    "QOrdered",
    "QMoE",
    "NBits",
    "Bnb4",
    "Q4",
]
_SCOPED = ("tensors", "makers", "integers", "products", "casts", "alias", "sources")


def is_quantized(node: NodeProto) -> bool:
    """Whether an operator makes integers of floats, or floats of integers, or computes in integers for floats."""
    return any(name in node.op_type for name in _ROUNDING)


def _drop_unread(floats: ModelProto, model: ModelProto, replaced: set[str]) -> None:
    """Take out what computed scales, integers whose names floats have now, and what only quantised nodes read."""
    dropped, read = True, set[str]()
    while dropped:
        dropped = False
        graphs = list(all_graphs(floats))
        read = {name for node in all_nodes(floats) for name in node.input}
        read |= {value.name for graph in graphs for value in graph.output}
        for graph in reversed(graphs):  # inner ones first: of these, copies take the place
            kept = [n for n in graph.node if not read.isdisjoint(n.output) and replaced.isdisjoint(n.output)]
            if len(kept) < len(graph.node):
                dropped = True
                assign(graph.node, kept)
    before = {name for node in all_nodes(model) for name in node.input}
    stored = {t.name for t in model.graph.initializer}
    graphs = list(all_graphs(floats))
    for graph in graphs:
        kept = [t for t in graph.initializer if (t.name in read or t.name not in before) and t.name not in replaced]
        assign(graph.initializer, kept)
        gone = stored - {t.name for t in kept} if graph is floats.graph else set[str]()
        assign(graph.input, [v for v in graph.input if v.name not in gone])


def floats_in(tensor: TensorProto | None) -> bool:
    """Whether a tensor is of floats."""
    return tensor is not None and tensor.data_type in FLOATS
