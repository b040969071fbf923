"""What conversion knows of a value: its type, its lengths, and its numbers where no run can change them."""

import numpy as np
import onnx_ir as ir

from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.graphs.walk import is_standard


def dims(value: ir.Value) -> Dims | None:
    """Dimensions of a value as ints, symbol names or None; None when the rank is unknown."""
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def known_lengths(value: ir.Value, start: int = 0, end: int | None = None) -> list[int] | None:
    """The lengths of the axes start … end - 1, None unless all of them are known."""
    lengths = dims(value)
    if lengths is None:
        return None
    numbers = [n for n in lengths[start:end] if isinstance(n, int)]
    return numbers if len(numbers) == len(lengths[start:end]) else None


def is_float(value: ir.Value) -> bool:
    """Whether a value has a type that gradients exist for."""
    return value.dtype is not None and value.dtype.is_floating_point()


def type_name(value: ir.Value) -> str:
    """The element type of a value, for messages."""
    return "unknown" if value.dtype is None else value.dtype.name


def element_type(value: ir.Value) -> ir.DataType:
    """The element type of a value; the model is at fault when inference could not find it."""
    if value.dtype is None:
        raise InvalidModelError(f"the element type of {value.name!r} is unknown; shape inference must find it")
    return value.dtype


def constant_value(value: ir.Value | None) -> np.ndarray | None:
    """The array of an initializer or Constant node, cast or not; None when a run may feed something else."""
    if value is None or value.is_graph_input():
        return None
    node = value.producer()
    if node is not None and is_standard(node, "Cast", "CastLike") and value.dtype is not None:
        before = constant_value(node.inputs[0])
        return None if before is None else before.astype(value.dtype.numpy())
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def inputs_of(graph: ir.Graph) -> dict[str, ir.Value]:
    """Inputs and initializers by name."""
    return {str(value.name): value for value in (*graph.inputs, *graph.initializers.values())}


def in_training(node: ir.Node) -> bool:
    """Whether a node is a BatchNormalization with the statistics of its batch."""
    mode = node.attributes.get("training_mode")
    return is_standard(node, "BatchNormalization") and mode is not None and bool(mode.as_int())
