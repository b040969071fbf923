"""How a tensor of a file lies in the module that it was exported from: under which name, transposed or reshaped."""

from typing import NamedTuple

import onnx_ir as ir

from onnx_backprop.converters.parameters.structure import is_vector, uses_of
from onnx_backprop.converters.prepare.exporters.origins import FOLDED, PARAMETER, origin_of
from onnx_backprop.opset.core.errors import printable


class Layout(NamedTuple):
    """The name of a tensor in the module's `state_dict()`; its shape in the file; whether it is transposed there.

    A tensor of one axis in the module, as the scale of a GroupNorm, may have more of length 1 in the file.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    flat: bool = False


def layout_of(value: ir.Value) -> Layout:
    """Where an initializer lies in the module; as it lies in the file if that does not say.

    Of what an exporter gave a name of its own, a matrix that a MatMul reads on the right is the transposed weight of a
    Linear, and a vector of several axes a bias or a scale that was reshaped.
    """
    name, origin = str(value.name), origin_of(value)
    shape = () if value.const_value is None else tuple(value.const_value.shape.numpy())
    if origin.kind not in (FOLDED, PARAMETER) or origin.parts or origin.name in ("", name):
        return Layout(origin.name or name if not origin.parts else name, shape)
    products = all(node.op_type == "MatMul" and index == 1 for node, index in uses_of(value))
    if len(shape) == 2 and products:
        return Layout(origin.name, shape, transposed=True)
    return Layout(origin.name, shape, flat=len(shape) > 1 and is_vector(value))


def shown(value: ir.Value) -> str:
    """What to call a tensor: by its name in the module, and by that in the file where it is another."""
    name, graph_name = origin_of(value).name, str(value.name)
    return repr(printable(graph_name)) if name in ("", graph_name) else f"{printable(name)!r} ({printable(graph_name)})"


def size(value: ir.Value) -> int:
    """The number of a tensor's elements."""
    return 0 if value.const_value is None else int(value.const_value.size)
