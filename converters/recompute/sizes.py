"""How large the values of a graph are and how long its nodes take, for given lengths of its symbolic dimensions."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.prepare.ir_models import to_proto
from onnx_backprop.converters.prepare.large_weights import set_aside
from onnx_backprop.converters.prepare.load import infer
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.functions.long_vectors import is_nameless
from onnx_backprop.opset.graphs.facts import FREE, PASSES
from onnx_backprop.opset.graphs.walk import values_read

Shape = tuple[int, ...]
OPERATIONS_PER_BYTE = 16  # floating-point operations of a product in the time that one byte takes to be moved
# operators of products, and which tensor has one element for every row of products that the weights of the next give
_PER_ELEMENT = {
    "Conv": ("output", 0, 1),
    "Convolution": ("output", 0, 1),
    "ConvTranspose": ("input", 0, 1),
    "ConvolutionBackwardData": ("input", 0, 1),
    "ConvTransposeBackwardData": ("output", 0, 1),
    "ConvolutionBackwardWeights": ("input", 1, None),
    "ConvTransposeBackwardWeights": ("input", 0, None),
}


@dataclass(frozen=True)
class Sizes:
    """shapes: of every value whose lengths are all numbers. nbytes: of every value."""

    shapes: Mapping[ir.Value, Shape]
    nbytes: Mapping[ir.Value, int]

    def cost(self, node: ir.Node) -> float:
        """The time of a node, in bytes that could be moved meanwhile: they are moved, or products are computed."""
        if node in FREE:
            return 0.0
        moved = sum(self.nbytes.get(v, 0) for v in (*values_read(node), *node.outputs))
        return moved * PASSES.get(node.op_type, 1) + 2 * self.products(node) / OPERATIONS_PER_BYTE

    def products(self, node: ir.Node) -> int:
        """The multiplications of a node that is made of sums of products; 0 for any other."""
        if node.op_type in _PER_ELEMENT:
            side, index, weights = _PER_ELEMENT[node.op_type]
            elements = self.shapes.get((node.outputs if side == "output" else node.inputs)[index] or ir.Value(), ())
            kernel = self.shapes.get((node.outputs[0] if weights is None else node.inputs[weights]) or ir.Value(), ())
            return prod(elements) * prod(kernel[1:])
        if node.op_type in ("MatMul", "Gemm", "MatMulInteger", "MatMulNBits", "MatMulNBitsBackwardData"):
            first, result = (self.shapes.get(v or ir.Value(), ()) for v in (node.inputs[0], node.outputs[0]))
            inner = first[-1] if first else 0
            transposed = node.attributes.get("transA")
            if node.op_type == "Gemm" and transposed is not None and transposed.as_int() and first:
                inner = first[0]
            return prod(result) * inner
        return 0


def _with_place(model: ModelProto, name: str) -> str:
    """A symbol, and the axis of the first input that has it."""
    places = (
        f"{name!r} (axis {axis} of {value.name!r})"
        for value in model.graph.input
        for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        if dim.dim_param == name
    )
    return next(places, repr(name))


def sizes(model: ir.Model, lengths: Mapping[str, int]) -> Sizes:
    """The sizes of all values of a model, whose shapes are noted meanwhile.

    Where inference finds none it is that of the largest input of the node.

    Errors: InvalidArgumentError where a graph input has a symbolic dimension that `lengths` does not give.
    """
    light, _ = set_aside(to_proto(model))
    _note_shapes(model, light)
    del light.graph.value_info[:]
    for value in light.graph.output:
        value.type.tensor_type.ClearField("shape")
    known = dict(lengths)
    missing = _filled_in(light, known)
    inferred = _inferred_shapes(light)
    if missing:  # of targets, which have the lengths of what they are compared with
        for value in (value for node in model.graph for value in node.outputs if value.shape is not None):
            for dim, length in zip(value.shape or (), inferred.get(str(value.name), ()), strict=False):
                if not isinstance(dim, int) and dim.value is not None:
                    known.setdefault(dim.value, length)
        if missing := _filled_in(light, known):
            missing = [name for name in missing if not is_nameless(name)] or missing
            raise InvalidArgumentError(
                f"the lengths of {', '.join(_with_place(light, name) for name in missing)} are not known, on which the "
                "memory of a step depends. "
                f"Give them, as lengths={{{missing[0]!r}: 8}}",
                "memory",
            )
        inferred = _inferred_shapes(light)
    shapes: dict[ir.Value, Shape] = {}
    nbytes: dict[ir.Value, int] = {}
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        _note(value, inferred.get(str(value.name)), shapes, nbytes)
    for node in model.graph:
        for value in node.outputs:
            shape = inferred.get(str(value.name))
            if shape is None and value.shape is not None:
                shape = _numbers(value.shape, lengths)
            _note(value, shape, shapes, nbytes)
            if shape is None:
                nbytes[value] = max((nbytes.get(v, 0) for v in values_read(node)), default=0)
    return Sizes(shapes, nbytes)


def _note_shapes(model: ir.Model, proto: ModelProto) -> None:
    """Give every value without a shape the one that inference finds, symbolic dimensions kept."""
    inferred = {value.name: value for value in infer(proto).graph.value_info}
    for value in (v for node in model.graph for v in node.outputs if v.shape is None and v.name in inferred):
        declared = inferred[str(value.name)].type.tensor_type
        if declared.HasField("shape"):
            dims = declared.shape.dim
            value.shape = ir.Shape([d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims])


def _filled_in(model: ModelProto, lengths: Mapping[str, int]) -> list[str]:
    """Put numbers for the symbols in the inputs of a model; the names of those that have none."""
    missing: dict[str, None] = {}
    defaults = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if value.name in defaults and not dim.HasField("dim_value"):
                dim.dim_value = defaults[value.name][axis]
            elif dim.dim_param in lengths:
                dim.dim_value = lengths[dim.dim_param]
            elif not dim.HasField("dim_value"):
                missing[dim.dim_param or f"an axis of {value.name} without a name"] = None
    return list(missing)


def _inferred_shapes(model: ModelProto) -> dict[str, Shape]:
    """The shapes that inference finds numbers for."""
    graph = infer(model).graph
    result: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims):
            result[value.name] = tuple(d.dim_value for d in dims)
    return result


def _numbers(shape: ir.Shape, lengths: Mapping[str, int]) -> Shape | None:
    known = [d if isinstance(d, int) else lengths.get(str(d.value)) for d in shape]
    return tuple(d for d in known if d is not None) if None not in known else None


def _note(value: ir.Value, shape: Shape | None, shapes: dict[ir.Value, Shape], nbytes: dict[ir.Value, int]) -> None:
    if shape is not None:
        shapes[value] = shape
        nbytes[value] = round(prod(shape) * (4 if value.dtype is None else value.dtype.itemsize))
