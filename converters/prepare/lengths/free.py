"""A fixed length of an input made symbolic: the constants that hold it, in Reshape above all, are rewritten.

Lengths are inferred twice, for the number n that the file has and for n·101: a length that becomes 101 times as much
follows the freed one. A Reshape keeps the order of elements, so that the stride of the batch among them says in which
entry of a constant shape the batch can be. Where several can hold it, each is tried until nothing contradicts.
"""

from collections.abc import Mapping

from onnx import GraphProto, ModelProto

from onnx_backprop.converters.prepare.large_weights import set_aside
from onnx_backprop.converters.prepare.lengths.fold import folded
from onnx_backprop.converters.prepare.lengths.search import Search, with_lengths
from onnx_backprop.converters.prepare.load import Free, prepare
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import suggest


def free_lengths(proto: ModelProto, free: Free) -> ModelProto:
    """A prepared model with other declared lengths of its inputs, prepared again.

    Raises: InvalidArgumentError for names, axes and symbols that do not fit, UnsupportedError for a node that keeps to
    the old length, by name.
    """
    light, weights = set_aside(proto)
    by_symbol = _checked(proto.graph, free)
    light = folded(light)
    for symbol, places in by_symbol.items():
        light = Search(light, symbol, places).solved()
    lengths = {(name, axis): symbol for symbol, places in by_symbol.items() for name, axis in places}
    return prepare(weights.put_back(with_lengths(light, lengths)))


def _checked(graph: GraphProto, free: Free) -> dict[str, list[tuple[str, int]]]:
    """The places of each symbol, by input and axis."""
    stored = {tensor.name for tensor in graph.initializer}
    inputs = {v.name: v.type.tensor_type.shape.dim for v in graph.input if v.name not in stored}
    example = "free={'x': {0: 'batch'}}"
    if not isinstance(free, Mapping) or not free:
        raise InvalidArgumentError(f"expected axes by input, as {example}, got {free!r}", "free")
    result: dict[str, list[tuple[str, int]]] = {}
    for name, axes in free.items():
        if name not in inputs:
            hint = suggest(str(name), list(inputs))
            raise InvalidArgumentError(f"expected the name of an input of the model, got {name!r}{hint}", "free")
        if not isinstance(axes, Mapping):
            raise InvalidArgumentError(f"{name!r}: expected symbols by axis, as {example}, got {axes!r}", "free")
        for axis, symbol in axes.items():
            rank = len(inputs[name])
            if not isinstance(axis, int) or not -rank <= axis < rank:
                raise InvalidArgumentError(f"{name!r} has {rank} axes, got axis {axis!r}", "free")
            if not isinstance(symbol, str) or not symbol.isidentifier():
                raise InvalidArgumentError(f"{name!r}: expected a name for axis {axis}, got {symbol!r}", "free")
            dim = inputs[name][axis]
            if not dim.dim_value:
                has = f"has the length {dim.dim_param!r}" if dim.dim_param else "has no fixed length"
                raise InvalidArgumentError(f"axis {axis} of {name!r} {has} already. Leave it out", "free")
            result.setdefault(symbol, []).append((name, axis % rank))
    for symbol, places in result.items():
        if len(numbers := {inputs[name][axis].dim_value for name, axis in places}) > 1:
            raise InvalidArgumentError(f"{symbol!r} stands for different lengths, {sorted(numbers)}", "free")
    return result
