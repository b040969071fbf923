"""Gradients of Conv and ConvTranspose, as the convolution operators of our domain."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..opset.errors import InvalidModelError, UnsupportedError
from ..opset.shapes import Dims
from .builder import Builder, dims
from .conv_geometry import output_shape_pads, same_pads
from .forward import Forward
from .registry import Grads, gradient

AUTO_PADS = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


@dataclass(frozen=True)
class ConvAttributes:
    """Attributes of a Conv or ConvTranspose with their defaults filled in, one entry per spatial axis."""

    strides: list[int]
    dilations: list[int]
    pads_begin: list[int]
    pads_end: list[int]
    auto_pad: str
    group: int
    kernel: Dims

    def extent(self, node: Forward, axis: int) -> int:
        """(K - 1) · dilation + 1; the kernel length must be known at conversion for this."""
        length = self.kernel[axis]
        if not isinstance(length, int):
            raise UnsupportedError(
                f"auto_pad and output_shape need the kernel's lengths at conversion, got W spatial shape {self.kernel}",
                op_type=node.op_type,
                node=node.name,
            )
        return (length - 1) * self.dilations[axis] + 1


@gradient("Conv", versions=(11, 22))
def conv(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x ⋆ w + b  =>  dx = ConvolutionBackwardData(dy, w), dw = ConvolutionBackwardWeights(x, dy), db = Σ dy."""
    x, w = node.input(0), node.input(1)
    attributes = read_attributes(node)
    common = {
        "strides": attributes.strides,
        "dilations": attributes.dilations,
        "pads_begin": attributes.pads_begin,
        "pads_end": attributes.pads_end,
        "auto_pad": "None" if attributes.auto_pad == "NOTSET" else attributes.auto_pad,
        "groups": attributes.group,
        "data_format": "NCX",
        "weights_format": "OIX",
    }
    dx = dw = None
    if node.wants(0):
        shape, shape_input = wanted_shape(op, x)
        dx = op.domain.ConvolutionBackwardData(dy, w, *shape_input, dst_shape=shape, **common)
    if node.wants(1):
        shape, shape_input = wanted_shape(op, w)
        dw = op.domain.ConvolutionBackwardWeights(x, dy, *shape_input, weights_shape=shape, **common)
    return (dx, dw, *bias_gradient(op, node, dy))


@gradient("ConvTranspose", versions=(11, 22))
def conv_transpose(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = xᵀ-convolved with w, + b  =>  dx = ConvTransposeBackwardData(dy, w), dw = …BackwardWeights(x, dy), db = Σ dy.

    Pads are resolved to numbers here, the way onnxruntime resolves them, so the gradient is of what runs.
    """
    x, w = node.input(0), node.input(1)
    attributes = read_attributes(node)
    pads_begin, pads_end = _conv_transpose_pads(node, attributes)
    common = {
        "strides": attributes.strides,
        "dilations": attributes.dilations,
        "pads_begin": pads_begin,
        "pads_end": pads_end,
        "groups": attributes.group,
        "data_format": "NCX",
        "weights_format": "IOX",
    }
    dx = dw = None
    if node.wants(0):
        dx = op.domain.ConvTransposeBackwardData(dy, w, **common)
    if node.wants(1):
        shape, shape_input = wanted_shape(op, w)
        dw = op.domain.ConvTransposeBackwardWeights(x, dy, *shape_input, weights_shape=shape, **common)
    return (dx, dw, *bias_gradient(op, node, dy))


def wanted_shape(op: Builder, value: ir.Value) -> tuple[list[int] | None, list[ir.Value]]:
    """The shape of a value for an operator that takes it as attribute (known) or as input (symbolic)."""
    known = dims(value)
    if known is not None and all(isinstance(d, int) for d in known):
        return [d for d in known if isinstance(d, int)], []
    return None, [op.shape_s32(value)]


def bias_gradient(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """One entry for a bias input that the node has, none otherwise."""
    if len(node.inputs) < 3:
        return ()
    return (op.domain.BiasAddBackward(dy, data_format="NCX") if node.wants(2) else None,)


def read_attributes(node: Forward) -> ConvAttributes:
    """Read and check what Conv and ConvTranspose have in common."""
    weights = dims(node.input(1))
    kernel: Dims | None = None if weights is None else weights[2:]
    stated = node.ints("kernel_shape")
    if stated is not None and kernel is not None:
        if len(stated) != len(kernel) or any(
            isinstance(k, int) and k != s for k, s in zip(kernel, stated, strict=True)
        ):
            raise _invalid(node, f"attribute kernel_shape: expected W's spatial shape {kernel}, got {stated}")
        kernel = tuple(stated)
    kernel = kernel or (tuple(stated) if stated else None)
    if kernel is None:
        raise UnsupportedError(
            "the rank of W is unknown and there is no kernel_shape; give W a shape",
            op_type=node.op_type,
            node=node.name,
        )
    axes = len(kernel)
    auto_pad = node.string("auto_pad", "NOTSET")
    if auto_pad not in AUTO_PADS:
        raise _invalid(node, f"attribute auto_pad: expected one of {', '.join(AUTO_PADS)}, got {auto_pad!r}")
    pads = node.ints("pads", [0] * 2 * axes) or []
    if auto_pad != "NOTSET" and any(pads):
        raise _invalid(node, f"attribute pads: expected none beside auto_pad {auto_pad}, got {pads}")
    strides = node.ints("strides", [1] * axes) or []
    dilations = node.ints("dilations", [1] * axes) or []
    for name, values, count, low in (
        ("pads", pads, 2 * axes, 0),
        ("strides", strides, axes, 1),
        ("dilations", dilations, axes, 1),
    ):
        if len(values) != count or min(values, default=low) < low:
            raise _invalid(node, f"attribute {name}: expected {count} values >= {low}, got {values}")
    return ConvAttributes(strides, dilations, pads[:axes], pads[axes:], auto_pad, node.int("group", 1), kernel)


def _conv_transpose_pads(node: Forward, attributes: ConvAttributes) -> tuple[list[int], list[int]]:
    axes = len(attributes.kernel)
    extra = node.ints("output_padding", [0] * axes) or []
    if len(extra) != axes or min(extra, default=0) < 0:
        raise _invalid(node, f"attribute output_padding: expected {axes} values >= 0, got {extra}")
    for axis, padding in enumerate(extra):
        if padding >= attributes.strides[axis]:
            raise node.refuse("output_padding", extra, f"below the stride {attributes.strides}")
    output_shape = node.ints("output_shape")
    upper = attributes.auto_pad == "SAME_UPPER"
    if output_shape is not None:
        return _output_shape_pads(node, attributes, extra, output_shape[-axes:])
    if attributes.auto_pad == "NOTSET":
        return attributes.pads_begin, attributes.pads_end
    if attributes.auto_pad == "VALID":
        return [0] * axes, [0] * axes
    for axis, padding in enumerate(extra):
        extent, stride = attributes.extent(node, axis), attributes.strides[axis]
        if same_pads(extent, stride, padding, upper=upper) != same_pads(extent, stride, 0, upper=upper):
            # onnx's shape inference adds output_padding to the length, onnxruntime to the padding
            raise node.refuse("output_padding", extra, f"of 0 beside auto_pad {attributes.auto_pad}; give pads instead")
    pairs = [
        same_pads(attributes.extent(node, axis), attributes.strides[axis], extra[axis], upper=upper)
        for axis in range(axes)
    ]
    return [begin for begin, _ in pairs], [end for _, end in pairs]


def _output_shape_pads(
    node: Forward, attributes: ConvAttributes, extra: list[int], output_shape: list[int]
) -> tuple[list[int], list[int]]:
    begins: list[int] = []
    ends: list[int] = []
    lengths = (dims(node.input(0)) or (None,) * (len(attributes.kernel) + 2))[2:]
    for axis, (length, out) in enumerate(zip(lengths, output_shape, strict=True)):
        if not isinstance(length, int):
            raise node.refuse("output_shape", output_shape, "when the spatial shape of X is known at conversion")
        extent, stride = attributes.extent(node, axis), attributes.strides[axis]
        upper = attributes.auto_pad == "SAME_UPPER"
        begin, end = output_shape_pads(length, out, extent, stride, extra[axis], upper=upper)
        beyond = out - (stride * (length - 1) + extent - begin - end)
        if not 0 <= beyond < stride:
            raise node.refuse(
                "output_shape",
                output_shape,
                f"within one stride of the natural output (axis {axis}: {out - beyond})",
            )
        begins.append(begin)
        ends.append(end)
    return begins, ends


def _invalid(node: Forward, message: str) -> InvalidModelError:
    return InvalidModelError(message, op_type=node.op_type, node=node.name)
