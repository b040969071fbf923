"""The types that models declare of values, as Python values."""

from onnx import GraphProto, TensorShapeProto, TypeProto

Dim = int | str | None  # a number, the name of a symbol, or None where nothing is known
Dims = tuple[Dim, ...]


def type_dims(proto: TypeProto) -> Dims | None:
    """The dimensions of a tensor type; None when the rank is unknown."""
    return shape_dims(proto.tensor_type.shape) if proto.tensor_type.HasField("shape") else None


def shape_dims(shape: TensorShapeProto) -> Dims:
    """The dimensions of a shape."""
    return tuple(d.dim_value or d.dim_param or (0 if d.HasField("dim_value") else None) for d in shape.dim)


def shapes_of(graph: GraphProto) -> dict[str, Dims]:
    """The dimensions of a graph's own values, as far as their number is known."""
    result: dict[str, Dims] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.output, *graph.input):
        if (dims := type_dims(value.type)) is not None:
            result[value.name] = dims
    return result
