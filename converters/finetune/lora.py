"""`lora`: low-rank adapters beside frozen weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.finetune.linear import Layers, Linear
from onnx_backprop.converters.prepare.graphs import all_nodes, attributes_of, called, reads, unique, without_tensors
from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.converters.prepare.load import unfolded
from onnx_backprop.converters.prepare.selection import Patterns, select
from onnx_backprop.opset.core.errors import InvalidArgumentError, printable
from onnx_backprop.opset.core.hints import near

Values = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class _Adapter:
    """The factors of the change of one weight, and the nodes, by their places, that read the weight in one way."""

    down: str
    up: str
    nodes: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class LoraModel:
    """A model with low-rank adapters, as `lora` makes it.

    model: the base with its adapters; these, and what `also` has chosen, are graph inputs with defaults.
    trainable: the names of these inputs, for `training_graph(…, trainable=…)`.
    base: the model that came.
    scale: alpha / rank.
    """

    model: ModelProto
    trainable: tuple[str, ...]
    base: ModelProto
    scale: float
    _adapters: tuple[_Adapter, ...]

    def __repr__(self) -> str:
        """How much is trained of how much, in one line."""
        sizes = {tensor.name: math.prod(tensor.dims) for tensor in self.model.graph.initializer}
        trained = sum(sizes[name] for name in self.trainable)
        return (
            f"<LoraModel {printable(self.base.graph.name)!r}: {len(self._adapters)} adapters; "
            f"{trained:,} of {sum(sizes.values()):,} elements trained>"
        )

    def merge(self, values: Values) -> ModelProto:
        """The base with the weights W + ΔW and no node or input more.

        values: of `trainable` and any other initializers, as `Trainer.parameters()` gives them; those left out are as
        in `model`. A quantized weight would have to be rounded anew to take up ΔW, and one that is stored in another
        type than it is used in: beside such the adapter stays, as constants.
        Errors: InvalidArgumentError for an unknown name, or another shape than the model's.
        """
        arrays = self._arrays(values)
        model = without_tensors(self.base, ())
        for tensor in model.graph.initializer:
            if tensor.name in arrays:
                tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name], tensor.name))
        layers = Layers(model)
        nodes = list(model.graph.node)
        replaced: dict[int, list[NodeProto]] = {}
        for adapter in self._adapters:
            own = [layer for n in adapter.nodes if (layer := layers.linear(nodes[n])) is not None]
            if own[0].exact:
                weight = layers.array(own[0].weight)
                change = self.scale * _product(own[0], arrays[adapter.down], arrays[adapter.up])
                merged = (weight.astype(np.float64) + change).astype(weight.dtype)
                layers.put([(layer.node, layer.place) for layer in own], merged)
                continue
            for name in (adapter.down, adapter.up):
                layers.add(numpy_helper.from_array(arrays[name], name))
            replaced |= _beside(layers, own, adapter, self.scale)
        layers.finish(replaced)
        return model

    def _arrays(self, values: Values) -> dict[str, np.ndarray]:
        """The values of `trainable`, those given in the place of the model's; and further ones that are given."""
        tensors = {tensor.name: tensor for tensor in self.model.graph.initializer}
        arrays = {name: numpy_helper.to_array(tensors[name]) for name in self.trainable}
        for name, value in values.items():
            if name not in tensors:
                raise InvalidArgumentError(f"values: expected names of initializers, got {name!r}{near(name, tensors)}")
            if tuple(tensors[name].dims) != np.shape(value):
                raise InvalidArgumentError(
                    f"values: {name!r} has shape {tuple(tensors[name].dims)}, got an array of {np.shape(value)}"
                )
            arrays[name] = np.asarray(value).astype(helper.tensor_dtype_to_np_dtype(tensors[name].data_type))
        return arrays


def lora(
    model: ModelProto | ir.Model | str | Path,
    targets: Patterns,
    rank: int,
    *,
    alpha: float | None = None,
    also: Patterns = (),
    seed: int = 0,
) -> LoraModel:
    """y = x·W + (alpha / rank)·(x·A)·B in the place of y = x·W, W being frozen: W + ΔW, ΔW of a low rank.

        adapted = ob.lora("model.onnx", ["*attn*"], rank=8)
        graph = ob.training_graph(adapted.model, loss="mse", trainable=adapted.trainable, optimizer="adamw")
        trainer = ob.Trainer(graph)
        trainer.fit(batches, epochs=3)
        onnx.save(adapted.merge(trainer.parameters()), "tuned.onnx")

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed.
        targets: the weights of Gemm, MatMul, Conv and com.microsoft's MatMulNBits, quantized ones behind
            DequantizeLinear included: names, globs or regular expressions of tensors, nodes, or modules of PyTorch,
            where its exporter has written these into the file. ["*"]: all.
        rank: of ΔW, at most.
        alpha: ΔW's scale times its rank. Default: the rank.
        also: initializers that are trained whole and travel with the adapters, as a new head's.
        seed: of A.

    Shapes: of MatMul and Gemm, W (K, N), A (K, rank), B (rank, N), whether or not the file has W transposed. Where W
    (M, K) is the left operand, A (rank, K), B (M, rank). Of Conv with g groups and W (O, I/g, k…), A (g·rank, I/g, k…)
    is a Conv like W and B (O, rank, 1…) one of g groups behind it. Both have the type that W is multiplied in.

    A is uniform in ±1/√K, B zero: the model computes what it did. They are called `<W>.lora_A` and `<W>.lora_B`; nodes
    that read one weight share them. A weight that is read elsewhere too, as by Gather, is changed beside the chosen
    nodes alone.

    Errors: InvalidArgumentError for a pattern that matches no such weight, a rank below 1, an alpha that is no number
    above 0; what `training_graph` raises for a file.
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise InvalidArgumentError(f"rank: expected a whole number of 1 or more, got {rank!r}")
    scale = 1.0 if alpha is None else alpha / rank
    if not (math.isfinite(scale) and scale > 0):
        raise InvalidArgumentError(f"alpha: expected a number above 0, got {alpha!r}")
    base = unfolded(model)
    changed = without_tensors(base, ())
    layers = Layers(changed)
    floats = [tensor.name for tensor in changed.graph.initializer if tensor.data_type in FLOATS]
    whole = select("also", also, floats) if also else []
    rng = np.random.default_rng(seed)
    replaced: dict[int, list[NodeProto]] = {}
    adapters: list[_Adapter] = []
    for own in _chosen(layers, targets):
        first = own[0][1]
        names = [unique(f"{first.weight.tensor}.{factor}", layers.taken) for factor in ("lora_A", "lora_B")]
        adapter = _Adapter(*names, tuple(n for n, _ in own))
        down, up = _shapes(first, rank)
        bound = 1 / math.sqrt(_inputs(first))
        for name, array in zip(names, (rng.uniform(-bound, bound, down), np.zeros(up)), strict=True):
            kind = helper.tensor_dtype_to_np_dtype(first.weight.dtype)
            layers.add(numpy_helper.from_array(array.astype(kind), name))
        replaced |= _beside(layers, [layer for _, layer in own], adapter, scale)
        adapters.append(adapter)
    layers.finish(replaced)
    trainable = [name for adapter in adapters for name in (adapter.down, adapter.up)] + whole
    declared = {value.name for value in changed.graph.input}
    for name in trainable:
        if name not in declared:
            tensor = layers.tensors[name]
            changed.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    return LoraModel(changed, tuple(trainable), base, scale, tuple(adapters))


def _chosen(layers: Layers, targets: Patterns) -> list[list[tuple[int, Linear]]]:
    """The layers that the targets choose, each with its place; together those that read one weight in one way."""
    names: dict[str, set[int]] = defaultdict(set)
    found: dict[int, Linear] = {}
    for n, node in enumerate(layers.graph.node):
        layer = layers.linear(node)
        if layer is not None:
            found[n] = layer
            for name in layer.names:
                names[name].add(n)
    for target in targets if not isinstance(targets, str) else ():
        if isinstance(target, str) and target not in names:
            _refuse(layers, target)
    chosen = {n for name in select("targets", targets, list(names)) for n in names[name]}
    together: dict[object, list[tuple[int, Linear]]] = defaultdict(list)
    for n in sorted(chosen):
        together[_reading(found[n])].append((n, found[n]))
    return list(together.values())


def _refuse(layers: Layers, target: str) -> None:
    """Say why what a target names is no weight that adapters go beside."""
    for node in all_nodes(layers.graph):
        if node.name == target or (target in reads(node) and target in layers.tensors):
            raise InvalidArgumentError(
                f"targets: {target!r} is {'the' if node.name == target else 'read by the'} {node.op_type} "
                f"'{called(node)}'; expected a matrix that a Gemm, MatMul or MatMulNBits of the main graph multiplies "
                "by, or the kernel of a Conv. Leave it out, or train it whole: also=[…]"
            )


def _reading(layer: Linear) -> tuple[object, ...]:
    """What two nodes that read a weight in one way have in common."""
    links = tuple((link.op_type, *link.input[1:]) for link in layer.weight.chain)
    return layer.weight.tensor, layer.node.op_type, layer.place, layer.dims, layer.output_axis, links, _groups(layer)


def _groups(layer: Linear) -> int:
    return int(attributes_of(layer.node).get("group", 1)) if layer.node.op_type == "Conv" else 1


def _inputs(layer: Linear) -> int:
    """How many numbers each output is a sum over."""
    return math.prod(layer.dims) // layer.dims[layer.output_axis]


def _shapes(layer: Linear, rank: int) -> tuple[list[int], list[int]]:
    """Those of A and B."""
    if layer.node.op_type == "Conv":
        outputs, *rest = layer.dims
        return [_groups(layer) * rank, *rest], [outputs, rank, *[1] * (len(rest) - 1)]
    inputs, outputs = layer.dims[::-1] if layer.output_axis == 0 else layer.dims
    return ([rank, inputs], [outputs, rank]) if layer.place == 0 else ([inputs, rank], [rank, outputs])


def _product(layer: Linear, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A · B in float64, with the axes of the weight as its node reads it."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    if layer.node.op_type == "Conv":
        groups, rank = _groups(layer), b.shape[1]
        return (b.reshape(groups, -1, rank) @ a.reshape(groups, rank, -1)).reshape(layer.dims)
    if layer.place == 0:
        return b @ a
    return (a @ b).T if layer.output_axis == 0 else a @ b


def _beside(layers: Layers, own: Sequence[Linear], adapter: _Adapter, scale: float) -> dict[int, list[NodeProto]]:
    """Each layer's node, and those that add what the adapter makes of its input, under the name of its output."""
    return {id(layer.node): _branch(layers, layer, adapter, scale) for layer in own}


def _branch(layers: Layers, layer: Linear, adapter: _Adapter, scale: float) -> list[NodeProto]:
    node, given = layer.node, attributes_of(layer.node)
    y, x = node.output[0], node.input[1 - layer.place]
    new: list[NodeProto] = []

    def emit(op_type: str, *inputs: str, **attributes: object) -> str:
        name = unique(f"{called(node)}/lora/{op_type}", layers.taken)
        new.append(helper.make_node(op_type, inputs, [name], name, **attributes))
        return name

    node.output[0] = unique(f"{y}.frozen", layers.taken)
    if node.op_type == "Conv":
        inner = emit("Conv", x, adapter.down)
        new[-1].attribute.extend(node.attribute)
    else:
        x = emit("Transpose", x, perm=[1, 0]) if node.op_type == "Gemm" and given.get("transA") else x
        inner = emit("MatMul", *((adapter.down, x) if layer.place == 0 else (x, adapter.down)))
    if node.op_type == "Gemm":
        scale = scale * given.get("alpha", 1.0)
    if scale != 1:
        inner = emit("Mul", inner, _number(layers, scale, layer.weight.dtype))
    if node.op_type == "Conv":
        change = emit("Conv", inner, adapter.up, group=_groups(layer))
    else:
        change = emit("MatMul", *((adapter.up, inner) if layer.place == 0 else (inner, adapter.up)))
    new.append(helper.make_node("Add", [node.output[0], change], [y], unique(f"{called(node)}/lora", layers.taken)))
    return [node, *new]


def _number(layers: Layers, value: float, dtype: int) -> str:
    """A 0-D initializer, one for each value and type."""
    name = f"lora_scale/{TensorProto.DataType.Name(dtype)}/{value!r}"
    if name not in layers.tensors:
        layers.taken.add(name)
        layers.add(helper.make_tensor(name, dtype, [], [value]))
    return name
