"""Other weights in a quantised file: integers of the kind that it has, with scales that fit them."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from onnx_backprop.converters.prepare.large_weights import FLOATS
from onnx_backprop.converters.quantized.numbers import Array, Range, scale_for, used, zero_for
from onnx_backprop.converters.quantized.records import Activation, Weight, array_of, product_of, put, range_of
from onnx_backprop.converters.quantized.walk import Walk
from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.core.mapped import is_mapped, to_array
from onnx_backprop.opset.graphs.edit import replace_values
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import producers
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes

Ranges = Mapping[str, tuple[float, float]]
_CLOSE = 1e-3  # relative, of the scale of a bias and the product of two that it usually is
_LONGEST = 2**31 - 1
_MUCH = 0.5  # of the square of what training has moved, lost by rounding


class _Floats(Mapping[str, Array]):
    """The float initializers of a model's graph, each read when somebody asks for it."""

    def __init__(self, model: ModelProto) -> None:
        self.tensors = {t.name: t for t in model.graph.initializer if t.data_type in FLOATS}

    def __getitem__(self, name: str) -> Array:
        return to_array(self.tensors[name])

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def put_floats(model: ModelProto, trained: ModelProto, kept: Sequence[str] = ()) -> None:
    """Give the float tensors of a model the values that they have in `trained`, in place.

    A training graph separates tensors that an exporter had merged; so does this. kept: names of trained tensors that
    are weights of integers in the model.
    Errors: InvalidArgumentError for another shape, or a tensor of `trained` that the model has no place for.
    """
    values = _Floats(trained)
    stored = {t.name: t for graph in all_graphs(model.graph) for t in graph.initializer if t.data_type in FLOATS}
    for name, tensor in stored.items():
        if name in values:
            source = values.tensors[name]
            if is_mapped(source) and (source.data_type, source.dims) == (tensor.data_type, tensor.dims):
                tensor.CopyFrom(source)
                continue
            check_shape(name, tuple(tensor.dims), values[name])
            replace_values(tensor, values[name].astype(array_of(tensor).dtype))
    rest = {name for name in values if name not in stored and name not in kept}
    if not rest:
        return
    makers = producers(trained.graph.node)
    for node in list(model.graph.node):
        if node.op_type == "Identity" and node.output[0] in rest:
            model.graph.node.remove(node)
            _add(model, node.output[0], values, rest)
            continue
        other = makers.get(node.output[0]) if node.output else None
        if other is None or other.op_type != node.op_type or len(other.input) != len(node.input):
            continue
        for n, name in enumerate(other.input):
            if name in rest or (name in values and node.input[n] in stored and name != node.input[n]):
                _add(model, name, values, rest)
                node.input[n] = name
    _check_rest(trained, values, rest)


def _add(model: ModelProto, name: str, values: Mapping[str, Array], rest: set[str]) -> None:
    if name in rest and all(t.name != name for t in model.graph.initializer):
        model.graph.initializer.append(numpy_helper.from_array(values[name], name))
    rest.discard(name)


def _check_rest(trained: ModelProto, values: Mapping[str, Array], rest: set[str]) -> None:
    """Constants that a training graph has added hold nothing that was trained."""
    read = {name for node in all_nodes(trained) for name in node.input}
    lost = sorted(name for name in rest & read if values[name].size > 1)
    if lost:
        raise InvalidArgumentError(
            f"trained: {lost[0]!r} has no place in the original. Train what ob.dequantize makes of that file"
        )


def check_shape(name: str, shape: tuple[int, ...], value: Array) -> None:
    """Raise InvalidArgumentError for an array of another shape."""
    if shape != value.shape:
        raise InvalidArgumentError(f"trained: {name!r} has shape {value.shape}, in the original it is {shape}")


def requantized(walk: Walk, trained: ModelProto, ranges: Ranges) -> ModelProto:
    """The model of a walk, changed: with the weights of `trained`, and scales of activations for `ranges`.

    ranges: the least and the largest number of values of the float model; scales of others stay.
    """
    values = _Floats(trained)
    weights = list(walk.weights.values())
    for weight in weights:
        if weight.name not in values:
            raise InvalidArgumentError(
                f"trained: the weight {weight.name!r} is missing{near(weight.name, values)}. Train what ob.dequantize "
                "makes of the original"
            )
    stored = [weight for weight in weights if weight.stored is not None]
    moved = sum(_distance(weight, values) for weight in stored)
    _Scales(walk.model, weights, list(walk.activations.values()), values, ranges).write()
    put_floats(walk.model, trained, [weight.name for weight in weights])
    lost = sum(_distance(weight, values) for weight in stored)
    if lost >= _MUCH * moved > 0:
        count = sum(prod(weight.blocks.shape) for weight in stored)
        warn(
            f"rounding to the integers of the original moves the weights by {(lost / count) ** 0.5:.1e} (root mean "
            f"square), training has moved them by {(moved / count) ** 0.5:.1e}: much of it may be lost. Train longer, "
            "with a larger learning rate, or keep the floats"
        )
    return walk.model


def _distance(weight: Weight, values: Mapping[str, Array]) -> float:
    """The sum of squares between the floats that integers stand for and others."""
    floats, other = weight.floats(), values[weight.name]
    check_shape(weight.name, floats.shape, other)
    return float(np.sum(np.square(floats.astype(np.float64) - other)))


class _Scales:
    """Which records share a scale, and those that are new."""

    def __init__(
        self,
        model: ModelProto,
        weights: list[Weight],
        activations: list[Activation],
        values: Mapping[str, Array],
        ranges: Ranges,
    ) -> None:
        self.model, self.values, self.ranges = model, values, ranges
        self.written: set[int] = set()
        self.biases = [weight for weight in weights if _is_bias(weight)]
        self.weights = [weight for weight in weights if weight not in self.biases]
        self.groups: dict[int, list[Weight | Activation]] = {}
        self.readers: dict[int, set[int]] = {}
        for operand in [*activations, *self.weights]:
            if operand.scale is None:
                continue
            self.groups.setdefault(id(operand.scale), []).append(operand)
            self.readers.setdefault(id(operand.zero), set()).add(id(operand.scale))

    def write(self) -> None:
        """New scales, zero points and integers; of activations first, which biases need."""
        stays = {
            id(operand.scale)
            for members in self.groups.values()
            if all(map(self._stays, members))
            for operand in members
        }
        for members in sorted(self.groups.values(), key=lambda g: any(isinstance(operand, Weight) for operand in g)):
            if id(members[0].scale) not in stays:
                self._group(members)
        for weight in self.weights:
            if id(weight.scale) not in stays:
                self._store(weight, weight.scales(), weight.zeros())
        for bias in self.biases:
            assert bias.of is not None
            scale = product_of(bias.of, bias.factor)
            if bias.scale is not None:
                put(bias.scale, scale)
                scale = array_of(bias.scale)
            self._store(bias, scale, np.array(0))

    def _stays(self, operand: Weight | Activation) -> bool:
        """Whether a record is a weight that training has not moved: its integers say what its floats are."""
        return (
            isinstance(operand, Weight)
            and operand.stored is not None
            and all(bias.of is None or bias.of[1] is not operand for bias in self.biases)
            and np.array_equal(operand.floats(), self.values[operand.name])
        )

    def _store(self, weight: Weight, scale: Array, zero: Array) -> None:
        """Put the integers in the file, as a tensor of their own where others that were equal need another one."""
        if weight.stored is None:
            return
        q = weight.rounded(self.values[weight.name], scale, zero).reshape(tuple(weight.stored.dims))
        if id(weight.stored) in self.written and not np.array_equal(array_of(weight.stored), q):
            if not weight.readers:
                raise InvalidArgumentError(
                    f"trained: {weight.name!r} and another weight share the integers {weight.stored.name!r} of the "
                    "original, and are no longer equal. tie=[…] keeps them equal"
                )
            new = self.model.graph.initializer.add()
            new.CopyFrom(weight.stored)
            reader, place = weight.readers[0]
            new.name = unique(reader.input[place], used_names(self.model.graph))
            for node, n in weight.readers:
                node.input[n] = new.name
            weight.stored = new
        put(weight.stored, q)
        self.written.add(id(weight.stored))

    def _group(self, members: list[Weight | Activation]) -> None:
        """One scale for all that read it, the least that fits each of them."""
        scale = members[0].scale
        assert scale is not None
        old = array_of(scale)
        sets: dict[int, list[Weight | Activation]] = {}
        for operand in members:
            sets.setdefault(id(operand.zero), []).append(operand)
        needed = np.zeros(old.size)
        chosen: list[tuple[Weight | Activation, Array, Range]] = []
        for some in sets.values():
            low, high, ints = self._extremes(some, old)
            if low is None or high is None:
                needed = np.maximum(needed, old.reshape(-1))
                continue
            zero = self._fixed_zero_point(some[0], old.size)
            if zero is not None and np.any(old < 0):  # the number that is farthest from 0 becomes the least integer
                sign = np.where(high > -low, -1.0, 1.0)
                needed = sign * np.maximum(high, -low) / (zero - ints.least)
                continue
            needed = np.maximum(needed, scale_for(low, high, zero, ints))
            if zero is None:
                chosen.append((some[0], low, ints))
        for operand in members:
            if isinstance(operand, Weight):
                needed = self._fit_bias(operand, needed)
        put(scale, np.where(needed == 0, old.reshape(-1), needed))
        for operand, low, ints in chosen:
            zero = zero_for(low, array_of(scale).astype(np.float64).reshape(-1), ints)
            operand.write_zeros(np.where(needed == 0, operand.zeros().reshape(-1), zero))  # with the scale that stays

    def _fixed_zero_point(self, operand: Weight | Activation, scales: int) -> Array | None:
        """The zero point, where it stays: 0 in the middle of a range, or one that other scales have too."""
        zero, stored = operand.zeros(), operand.zero
        free = stored is not None and len(self.readers[id(stored)]) == 1 and stored.data_type not in FLOATS
        if free and zero.size == scales and not np.all(zero == operand.whole.middle):
            return None
        return np.broadcast_to(zero.reshape(-1).astype(np.float64), (scales,))

    def _extremes(self, some: list[Weight | Activation], old: Array) -> tuple[Array | None, Array | None, Range]:
        """The least and largest numbers for each scale, None where nothing is known, and the integers for them."""
        low, high = np.zeros(old.size), np.zeros(old.size)
        least, most = [], []
        for operand in some:
            ints = _integers_for(operand)
            least.append(ints.least)
            most.append(ints.most)
            if isinstance(operand, Weight):
                below, above = operand.blocks.extremes(operand.as_stored(self.values[operand.name]))
            else:
                known = [self.ranges[name] for name in operand.values if name in self.ranges]
                if not known:
                    return None, None, ints
                below, above = (np.array(f(ends)) for f, ends in zip((min, max), zip(*known, strict=True), strict=True))
            low, high = np.minimum(low, below.reshape(-1)), np.maximum(high, above.reshape(-1))
        return low, high, Range(min(least), max(most))

    def _fit_bias(self, weight: Weight, needed: Array) -> Array:
        """A scale for which the biases that depend on it fit 32 bits."""
        for bias in self.biases:
            assert bias.of is not None
            if bias.of[1] is weight:
                x = abs(float(array_of(bias.of[0].scale).reshape(()))) * abs(bias.factor)
                least = np.abs(self.values[bias.name].astype(np.float64)).reshape(-1) / (x * _LONGEST)
                fits = least.max() if needed.size == 1 else least if least.size == needed.size else least.max()
                needed = np.maximum(needed, fits)
        return needed


def _integers_for(operand: Weight | Activation) -> Range:
    """The integers that numbers are rounded to: of a weight those that the file uses."""
    if isinstance(operand, Weight) and operand.stored is not None:
        zero = operand.zeros()
        return used(operand.integers(), operand.blocks.spread(zero), operand.whole)
    if isinstance(operand, Activation) and operand.ints is not None:
        return operand.ints
    whole = range_of(operand.element)
    symmetric = Range(2 * whole.middle - whole.most, whole.most)
    return symmetric if np.all(operand.zeros() == whole.middle) else whole


def _is_bias(weight: Weight) -> bool:
    """Whether a weight is a bias whose scale is the product of two others."""
    if weight.of is None or weight.element != TensorProto.INT32:
        return False
    if weight.scale is None:
        return True
    product, scale = product_of(weight.of, weight.factor), array_of(weight.scale).reshape(-1)
    return product.size in (1, scale.size) and bool(np.allclose(product, scale, rtol=_CLOSE, atol=0))
