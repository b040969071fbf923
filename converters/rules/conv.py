"""Gradients of Conv and ConvTranspose, as the convolution operators of our domain.

Those take pads >= 0 that are attributes. ONNX's ConvTranspose may have pads that only the run knows (from output_shape,
or SAME with a kernel of unknown length), and onnxruntime runs negative pads where its inference does not see them. Both
are met by moving padding from the operator to its data, which is the same sum.
"""

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims, known_lengths
from onnx_backprop.converters.reverse.registry import Builder, Forward, Grads, gradient
from onnx_backprop.converters.rules.common import padded
from onnx_backprop.opset.core.shapes import Dims
from onnx_backprop.opset.maths.convolution import MAX_RANK, extent, onnx_conv_transpose_pads

AUTO_PADS = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
Pads = tuple[list[int], list[int]]  # at the beginning and at the end of each spatial axis


@dataclass(frozen=True)
class ConvAttributes:
    """Attributes of a Conv or ConvTranspose with their defaults filled in, one entry per spatial axis."""

    strides: list[int]
    dilations: list[int]
    pads: Pads
    auto_pad: str
    group: int
    kernel: Dims

    @property
    def spatial(self) -> range:
        """The axes of X and Y that the kernel moves along."""
        return range(2, 2 + len(self.kernel))

    @property
    def upper(self) -> bool:
        return self.auto_pad == "SAME_UPPER"

    def extents(self) -> list[int] | None:
        """(K - 1) · dilation + 1 per axis, None when a kernel length is not known at conversion."""
        known = [k for k in self.kernel if isinstance(k, int)]
        if len(known) < len(self.kernel):
            return None
        return [extent(k, d) for k, d in zip(known, self.dilations, strict=True)]

    def crop(self) -> Pads | None:
        """The negative part of the pads, None when there is none."""
        begin, end = ([min(p, 0) for p in pads] for pads in self.pads)
        return (begin, end) if any(begin + end) else None

    def common(self, pads: Pads, weights_format: str) -> dict[str, Any]:
        """What every operator of our domain is told; the negative part of the pads is left to `crop`."""
        return {
            "strides": self.strides,
            "dilations": self.dilations,
            "pads_begin": [max(p, 0) for p in pads[0]],
            "pads_end": [max(p, 0) for p in pads[1]],
            "groups": self.group,
            "data_format": "NCX",
            "weights_format": weights_format,
        }


@gradient("Conv", versions=(11, 22))
def conv(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = x ⋆ w + b  =>  dx = ConvolutionBackwardData(dy, w), dw = ConvolutionBackwardWeights(x, dy), db = Σ dy."""
    x, w = node.input(0), node.input(1)
    attributes = read_attributes(node)
    common = attributes.common(attributes.pads, "OIX")
    common["auto_pad"] = "None" if attributes.auto_pad == "NOTSET" else attributes.auto_pad
    crop = attributes.crop()
    seen = x if crop is None else _pad(op, attributes, x, crop)
    shape, shape_input = wanted_shape(op, seen)
    dx = op.domain.ConvolutionBackwardData(dy, w, *shape_input, dst_shape=shape, **common)
    if crop is not None:
        dx = _pad(op, attributes, dx, ([-p for p in crop[0]], [-p for p in crop[1]]))
    shape, shape_input = wanted_shape(op, w)
    dw = op.domain.ConvolutionBackwardWeights(seen, dy, *shape_input, weights_shape=shape, **common)
    return dx, dw, bias_gradient(op, node, dy)


@gradient("ConvTranspose", versions=(11, 22))
def conv_transpose(op: Builder, node: Forward, dy: ir.Value) -> Grads:
    """Y = xᵀ-convolved with w, + b  =>  dx = ConvTransposeBackwardData(dy, w), dw = …BackwardWeights(x, dy), db = Σ dy.

    Pads are resolved here the way onnxruntime resolves them, so the gradient is of what runs: to numbers where
    everything that decides them is known, else dy is brought to the length that no padding makes.
    """
    x, w = node.input(0), node.input(1)
    attributes = read_attributes(node)
    pads = _conv_transpose_pads(node, attributes)
    seen = dy
    if pads is None:
        pads = ([0] * len(attributes.kernel), [0] * len(attributes.kernel))
        seen = _unpadded(op, node, attributes, dy)
    elif min(*pads[0], *pads[1]) < 0:
        crop = attributes.crop()
        assert crop is not None
        seen = _pad(op, attributes, dy, crop)
    common = attributes.common(pads, "IOX")
    dx = op.domain.ConvTransposeBackwardData(seen, w, **common)
    shape, shape_input = wanted_shape(op, w)
    dw = op.domain.ConvTransposeBackwardWeights(x, seen, *shape_input, weights_shape=shape, **common)
    return dx, dw, bias_gradient(op, node, dy)


def wanted_shape(op: Builder, value: ir.Value) -> tuple[list[int] | None, list[ir.Value]]:
    """The shape of a value for an operator that takes it as attribute (known) or as input (symbolic)."""
    known = known_lengths(value)
    return (None, [op.shape_s32(value)]) if known is None else (known, [])


def bias_gradient(op: Builder, node: Forward, dy: ir.Value) -> ir.Value | None:
    """Σ dy over all but the channels, for a node that has a bias."""
    return op.domain.BiasAddBackward(dy, data_format="NCX") if node.has(2) else None


def read_attributes(node: Forward) -> ConvAttributes:
    """Read and check what Conv and ConvTranspose have in common."""
    kernel = _kernel(node)
    axes = len(kernel)
    auto_pad = node.one_of("auto_pad", "NOTSET", AUTO_PADS)
    pads = node.ints("pads", [0] * 2 * axes)
    if auto_pad != "NOTSET" and any(pads):
        raise node.invalid(f"attribute pads: expected none beside auto_pad {auto_pad}, got {pads}")
    strides = node.ints("strides", [1] * axes)
    dilations = node.ints("dilations", [1] * axes)
    # onnxruntime runs negative pads where it does not know the ranks beforehand, and refuses them where it does
    hidden = dims(node.input(0)) is None or dims(node.input(1)) is None
    for name, values, count, low in (
        ("pads", pads, 2 * axes, min(pads, default=0) if hidden else 0),
        ("strides", strides, axes, 1),
        ("dilations", dilations, axes, 1),
    ):
        if len(values) != count or min(values) < low:
            raise node.invalid(f"attribute {name}: expected {count} values >= {low}, got {values}")
    if node.int("group", 1) < 1:
        raise node.invalid(f"group: expected 1 or more, got {node.int('group', 1)}")
    return ConvAttributes(strides, dilations, (pads[:axes], pads[axes:]), auto_pad, node.int("group", 1), kernel)


def _kernel(node: Forward) -> Dims:
    """The lengths of the kernel, as many as there are spatial axes; None for what is not known at conversion."""
    weights = dims(node.input(1))
    kernel: Dims | None = None if weights is None else weights[2:]
    stated = node.ints("kernel_shape")
    if stated and kernel is not None and not _may_equal(kernel, stated):
        raise node.invalid(f"attribute kernel_shape: expected W's spatial shape {kernel}, got {stated}")
    if stated:
        kernel = tuple(stated)
    axes = _axes(node) if kernel is None else len(kernel)
    if not 1 <= axes <= MAX_RANK - 2:
        raise node.unsupported(f"expected one to {MAX_RANK - 2} spatial axes, got {axes}")
    return (None,) * axes if kernel is None else kernel


def _may_equal(kernel: Dims, stated: list[int]) -> bool:
    return len(kernel) == len(stated) and all(
        k == s or not isinstance(k, int) for k, s in zip(kernel, stated, strict=False)
    )


def _axes(node: Forward) -> int:
    """The number of spatial axes, from whatever knows it besides W."""
    for value in (node.input(0), node.output()):
        known = dims(value)
        if known is not None:
            return len(known) - 2
    for name, per_axis in (("strides", 1), ("dilations", 1), ("pads", 2), ("output_padding", 1)):
        values = node.ints(name)
        if values:
            return len(values) // per_axis
    raise node.unsupported(
        "the ranks of X, W and Y are unknown and no attribute has one entry per axis; give one of them a shape"
    )


def _conv_transpose_pads(node: Forward, attributes: ConvAttributes) -> Pads | None:
    """The pads of a ConvTranspose as numbers, None when only the run can tell."""
    axes = len(attributes.kernel)
    extra = _output_padding(node, attributes)
    wanted = _output_shape(node, attributes)
    extents = attributes.extents()
    if wanted is None and attributes.auto_pad in ("NOTSET", "VALID"):
        return attributes.pads
    if extents is None:
        return None
    lengths = (dims(node.input(0)) or (None,) * (axes + 2))[2:]
    known = [length for length in lengths if isinstance(length, int)]
    if wanted is not None and len(known) < axes:
        return None
    pads = onnx_conv_transpose_pads(
        extents, attributes.strides, extra, upper=attributes.upper, lengths=known, wanted=wanted or ()
    )
    for axis, (one, stride) in enumerate(zip(pads, attributes.strides, strict=True)):
        if wanted is not None and not 0 <= one.beyond < stride:
            natural = wanted[axis] - one.beyond
            raise node.refuse(
                "output_shape", wanted, f"within one stride of the natural output (axis {axis}: {natural})"
            )
    return [one.begin for one in pads], [one.end for one in pads]


def _output_padding(node: Forward, attributes: ConvAttributes) -> list[int]:
    axes = len(attributes.kernel)
    extra = node.ints("output_padding", [0] * axes)
    if len(extra) != axes or min(extra) < 0:
        raise node.invalid(f"attribute output_padding: expected {axes} values >= 0, got {extra}")
    if any(padding >= stride for padding, stride in zip(extra, attributes.strides, strict=True)):
        # onnxruntime refuses to run it
        raise node.refuse("output_padding", extra, f"below the stride {attributes.strides}")
    return extra


def _output_shape(node: Forward, attributes: ConvAttributes) -> list[int] | None:
    """The spatial part of output_shape; onnxruntime takes a full shape too where the rank of X is hidden from it."""
    wanted = node.ints("output_shape")
    if not wanted:
        return None
    axes = len(attributes.kernel)
    if len(wanted) not in (axes, axes + 2):
        raise node.invalid(f"attribute output_shape: expected {axes} values, got {wanted}")
    return wanted[-axes:]


def _unpadded(op: Builder, node: Forward, attributes: ConvAttributes, dy: ir.Value) -> ir.Value:
    """Dy at the length s·(in-1) + EK, zeros where padding cut the output off, by amounts that the run finds.

    A dy of another shape than Y fails the run: the amounts would hide it.
    """
    axes, extents = op.ints(attributes.spatial), attributes.extents()
    source = op.Gather(op.shape(node.input(0)), axes)
    if extents is None:
        kernel = op.Gather(op.shape(node.input(1)), axes)
        covered = op.Add(op.Mul(op.Sub(kernel, [1]), attributes.dilations), [1])
    else:
        covered = op.ints(extents)
    full = op.Add(op.Mul(op.Sub(source, [1]), attributes.strides), covered)
    wanted = _output_shape(node, attributes)
    out = op.Mul(source, attributes.strides) if wanted is None else op.ints(wanted)
    total = op.Max(op.Sub(op.Add(full, _output_padding(node, attributes)), out), [0])
    half = op.Div(total, [2])
    begin = half if attributes.upper else op.Sub(total, half)
    shape = op.shape(node.output())
    end = op.Sub(op.Sub(full, begin), op.Gather(shape, axes))
    begin = op.Add(begin, _zero_if_equal(op, op.Shape(dy), shape, "the gradient of Y has another shape than Y"))
    return padded(op, dy, op.Concat(begin, end, axis=0), axes)


def _zero_if_equal(op: Builder, a: ir.Value, b: ir.Value, message: str) -> ir.Value:
    """0 (1-D int64); a run where two shapes differ fails in a node that is named after the message."""
    differ = op.ReduceMax(op.Cast(op.Not(op.Equal(a, b)), to=ir.DataType.INT64), keepdims=1)
    prefix, op.prefix = op.prefix, f"{op.prefix}: {message}"
    zero = op.Gather([0], differ)
    op.prefix = prefix
    return zero


def _pad(op: Builder, attributes: ConvAttributes, value: ir.Value, pads: Pads) -> ir.Value:
    """Zeros around the spatial axes; a negative number cuts off instead."""
    return padded(op, value, op.ints([*pads[0], *pads[1]]), op.ints(attributes.spatial))
