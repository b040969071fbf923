"""`lora`: low-rank adapters beside frozen weights."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.converters.finetune.forms import form_of
from onnx_backprop.converters.finetune.linear import Layers, Linear, as_read
from onnx_backprop.converters.finetune.targets import Place, choose
from onnx_backprop.converters.prepare.decoder import with_cache_alone
from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.converters.prepare.load import unfolded
from onnx_backprop.converters.prepare.selection import Patterns, select
from onnx_backprop.opset.core.errors import InvalidArgumentError, printable, require_numbers, warn
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.core.mapped import computed, is_mapped, to_array, whole_if_possible
from onnx_backprop.opset.graphs.edit import copied, replace_values, without_tensors
from onnx_backprop.opset.graphs.names import unique

Values = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class _Adapter:
    """The factors of the change of one weight, and where it is read in one way: inputs of nodes of the base."""

    down: str
    up: str
    places: tuple[Place, ...]


@dataclass(frozen=True, repr=False)
class LoraModel:
    """A model with low-rank adapters, the result of `lora`.

    model: the base with its adapters; these, and the tensors of `also`, are graph inputs with defaults.
    trainable: the names of these inputs, for `training_graph(…, trainable=…)`.
    base: the original model.
    scale: alpha / rank.
    """

    model: ModelProto
    trainable: tuple[str, ...]
    base: ModelProto
    rank: int
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
        """The base with the weights W + ΔW, without extra nodes or inputs.

        values: of all of `trainable`, as `Trainer.parameters()` gives them, and of any other initializers. A quantized
        weight would have to be rounded again to take up ΔW, as would one that is stored in another type than it is used
        in: there the adapter stays, as constants, and `merge_adapter` rounds. For a base with more than 2 GB in files
        the result refers to these; `save_model` writes it.
        Errors: InvalidArgumentError for an unknown or a missing name, or another shape than the model's.
        """
        return whole_if_possible(self.by_reference(values))

    def by_reference(self, values: Values) -> ModelProto:
        """`merge`, but weights in files are computed when somebody reads them, as `save_model` does, one at a time."""
        arrays = self._arrays(values)
        model = without_tensors(self.base, ())
        for tensor in model.graph.initializer:
            if tensor.name in arrays:
                replace_values(tensor, arrays[tensor.name])
        layers = Layers(model)
        nodes = list(model.graph.node)
        replaced: dict[int, list[NodeProto]] = {}
        for adapter in self._adapters:
            adapted = [one for n, place in adapter.places for one in layers.layers(nodes[n]) if one.place == place]
            factors = (adapter.down, adapter.up)
            if adapted[0].exact:
                tensor = layers.tensors[adapted[0].weight.tensor]
                new = partial(_merged, adapted[0], copied(tensor), self.scale, *(arrays[name] for name in factors))
                new = computed(tensor.data_type, adapted[0].weight.dims, new) if is_mapped(tensor) else new()
                layers.put([(layer.node, layer.place) for layer in adapted], new)
                continue
            for name in factors:
                layers.add(numpy_helper.from_array(arrays[name], name))
            _add(layers, adapted, adapter, self.scale, replaced)
        layers.finish(replaced)
        return model

    def onto(self, base: ModelProto, names: Mapping[str, str], values: Values) -> "tuple[LoraModel, Values]":
        """These adapters beside the weights of another base that computes the same, and values by the names there.

        names: what the tensors of this base are called in the other, where they have another name.
        Errors: InvalidArgumentError for a weight that has no adapter of its kind in the other.
        """
        moved = self._arrays(values)
        by_reading = _by_reading(self.base, self._adapters)
        tensors = list(dict.fromkeys(names.get(tensor, tensor) for tensor, _ in by_reading))
        other = lora(base, tensors, self.rank, alpha=self.scale * self.rank)
        there = _by_reading(base, other._adapters)  # those without a counterpart here change nothing
        for (tensor, output), adapter in by_reading.items():
            name = names.get(tensor, tensor)
            alone = [reading for reading in there if reading[0] == name]
            counterpart = there.get((name, output)) or (there[alone[0]] if len(alone) == 1 else None)
            if counterpart is None:
                raise InvalidArgumentError(f"the adapter of {tensor!r} has no place in the other model")
            moved |= {counterpart.down: moved.pop(adapter.down), counterpart.up: moved.pop(adapter.up)}
        tensors = {tensor.name: tensor for tensor in other.model.graph.initializer}
        return other, {name: to_array(tensors[name]) for name in other.trainable if name not in moved} | moved

    def _arrays(self, values: Values) -> dict[str, np.ndarray]:
        """The values, which are those of `trainable` and perhaps further ones, in the types of the model."""
        tensors = {tensor.name: tensor for tensor in self.model.graph.initializer}
        arrays: dict[str, np.ndarray] = {}
        for name, value in values.items():
            if name not in tensors:
                raise InvalidArgumentError(f"values: expected names of initializers, got {name!r}{near(name, tensors)}")
            if tuple(tensors[name].dims) != np.shape(value):
                raise InvalidArgumentError(
                    f"values: {name!r} has shape {tuple(tensors[name].dims)}, got an array of {np.shape(value)}"
                )
            arrays[name] = np.asarray(value).astype(helper.tensor_dtype_to_np_dtype(tensors[name].data_type))
        if missing := [name for name in self.trainable if name not in arrays]:
            shown = ", ".join(map(repr, missing[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise InvalidArgumentError(
                f"values: expected all {len(self.trainable)} of `trainable`, as Trainer.parameters() gives them; "
                f"{shown} missing"
            )
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
    """y = x·W + (alpha / rank)·(x·A)·B instead of y = x·W, with W frozen: W + ΔW with a ΔW of low rank.

        adapted = ob.lora("model.onnx", ["*attn*"], rank=8)
        graph = ob.training_graph(adapted.model, loss="mse", trainable=adapted.trainable, optimizer="adamw")
        trainer = ob.Trainer(graph)
        trainer.fit(batches, epochs=3)
        onnx.save(adapted.merge(trainer.parameters()), "tuned.onnx")

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed.
        targets: the weights of Gemm, MatMul, Conv, ConvTranspose, GRU, LSTM, RNN, com.microsoft's Attention,
            MatMulNBits and MatMulBnb4, and tables of Gather and its GatherBlockQuantized, also quantized ones behind
            DequantizeLinear: names, globs or regular expressions of tensors, nodes, or PyTorch modules, if the exporter
            has written these into the file. ["*"]: all.
        rank: of ΔW, at most.
        alpha: ΔW's scale times its rank. Default: the rank.
        also: initializers that are trained whole and saved with the adapters, such as a new head's.
        seed: of A, and of B of tables.

    Shapes, both of the type that W is multiplied in:

    - MatMul and Gemm, W (K, N): A (K, rank), B (rank, N), whether or not the file has W transposed. If W (M, K) is the
      left operand, A (rank, K), B (M, rank).
    - Conv with g groups, W (O, I/g, k…): A (g·rank, I/g, k…), a Conv like W, B (O, rank, 1…), a Conv of g groups.
    - ConvTranspose, W (I, O/g, k…): A (I, rank, k…), a ConvTranspose like W, B (O, rank, 1…), a Conv of g groups.
    - Gather along axis 0, W (V, D): A (V, rank), B (rank, D).
    - GRU, LSTM and RNN, W and R (directions, N, K), each separately: A (directions, rank, K), B (directions, N, rank).
      MatMul with W (…, K, N) of more than two axes, and Attention, W (K, N): A (…, K, rank), B (…, rank, N). These
      nodes read the sum W + (alpha / rank)·ΔW, which each run computes.

    A is uniform in ±1/√K, where each output is a sum over K numbers, and B is zero; for tables A is zero and B standard
    normal, as in PEFT. So the model first computes what it did before. They are called `<W>.lora_A` and `<W>.lora_B`.
    Nodes that read one weight in the same way share them. A tied embedding and head have their own adapters, and are
    two tensors when merged. Other readers of a weight keep it unchanged.

    Warns: OnnxBackpropWarning for matrices and kernels that a target names and that get no adapter: of Einsum, of a
    branch's MatMul, or computed ones. They stay frozen, unless `also` has them.

    Errors: InvalidArgumentError for a pattern that matches no such weight, a rank below 1, an alpha that is no number
    above 0; what `training_graph` raises for a file.
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise InvalidArgumentError(f"rank: expected a whole number of 1 or more, got {rank!r}")
    require_numbers(0, whole=True, seed=seed)
    scale = 1.0 if alpha is None else alpha / rank
    if not (math.isfinite(scale) and scale > 0):
        raise InvalidArgumentError(f"alpha: expected a number above 0, got {alpha!r}")
    base = unfolded(model)
    if with_cache_alone(base):
        warn("lora: the model holds a decoder with a cache and one without; the one with it takes the place of both")
    changed = without_tensors(base, ())
    layers = Layers(changed)
    floats = [tensor.name for tensor in changed.graph.initializer if tensor.data_type in FLOATS]
    whole = select("also", also, floats) if also else []
    rng = np.random.default_rng(seed)
    replaced: dict[int, list[NodeProto]] = {}
    adapters: list[_Adapter] = []
    chosen, warning = choose(layers, targets, whole)
    if warning:
        warn(warning)
    for group in chosen:
        first = next(iter(group.values()))
        down, up = (unique(f"{first.weight.tensor}.{factor}", layers.taken) for factor in ("lora_A", "lora_B"))
        adapter = _Adapter(down, up, tuple(group))
        kind = helper.tensor_dtype_to_np_dtype(first.weight.dtype)
        for name, array in zip((down, up), form_of(first).start(rank, rng), strict=True):
            layers.add(numpy_helper.from_array(array.astype(kind), name))
        _add(layers, group.values(), adapter, scale, replaced)
        adapters.append(adapter)
    layers.finish(replaced)
    trainable = [name for adapter in adapters for name in (adapter.down, adapter.up)] + whole
    declared = {value.name for value in changed.graph.input}
    for name in trainable:
        if name not in declared:
            tensor = layers.tensors[name]
            changed.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    return LoraModel(changed, tuple(trainable), base, rank, scale, tuple(adapters))


def _merged(layer: Linear, tensor: TensorProto, scale: float, *factors: np.ndarray) -> np.ndarray:
    """W + ΔW, in the type of W, which `tensor` holds."""
    weight = as_read(layer.weight, tensor)
    change = np.asarray(form_of(layer).product(*(factor.astype(np.float64) for factor in factors)))
    change *= scale
    change += weight
    return change.astype(weight.dtype)


def _by_reading(base: ModelProto, adapters: Iterable[_Adapter]) -> dict[tuple[str, str], _Adapter]:
    """Adapters by the tensor that each changes, and what the first node that reads it gives out."""
    layers, nodes = Layers(base), list(base.graph.node)
    result: dict[tuple[str, str], _Adapter] = {}
    for adapter in adapters:
        n, place = adapter.places[0]
        layer = next(one for one in layers.layers(nodes[n]) if one.place == place)
        result[layer.weight.tensor, nodes[n].output[0]] = adapter
    return result


def _add(
    layers: Layers, adapted: Iterable[Linear], adapter: _Adapter, scale: float, replaced: dict[int, list[NodeProto]]
) -> None:
    """Add an adapter's nodes to what stands in the place of each layer's node, by its id."""
    for layer in adapted:
        nodes = replaced.get(id(layer.node), [layer.node])
        before, behind = form_of(layer).nodes(layers, adapter.down, adapter.up, scale)
        replaced[id(layer.node)] = [*before, *nodes, *behind]
