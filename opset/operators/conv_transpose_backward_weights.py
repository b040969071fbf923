"""ConvTransposeBackwardWeights: the gradient of a transposed convolution with respect to its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx_backprop.opset.bodies import convolution
from onnx_backprop.opset.bodies.builder import Body, Tensor
from onnx_backprop.opset.bodies.convolution_weights import backward_weights as backward_weights_body
from onnx_backprop.opset.core.layout import conv_transpose_weights_to_canonical, inverse
from onnx_backprop.opset.core.op import Arg, Attributes, Float64Array, Input, Op, Output
from onnx_backprop.opset.core.shapes import Dims, permute
from onnx_backprop.opset.maths import convolution_attributes as spec
from onnx_backprop.opset.maths.convolution import Resolved, backward_weights, geometry, require_output_padding, resolve

MATHS = """
dW[ic,oc,k] = Σ_{n, i: 0 <= i·S + k·D - P < len(dy)} x[n,ic,i] · dy[n, q·OC/g + oc, i·S + k·D - P],  q = ic // (IC/g)
"""

DOC = f"""{MATHS}
The adjoint of ConvTranspose with the same attributes: x = src, dy = diff_dst, dW = diff_weights.

Shapes (NCX, IOX): src (N, IC, in…), diff_dst (N, OC, out…) -> diff_weights (IC, OC/g, k…), with one to three spatial
axes and in = (out + P + E - EK) // S + 1, EK = (K-1)·D + 1. The lengths leave K open, so weights_shape (in
weights_format order) must be given.

Units: strides S, dilations D, kernel lengths K and the pads P (begin) and E (end) count cells. g = groups.

Edge cases: an empty batch gives zeros.

Errors: no weights_shape; weights_shape of another rank or with other channels; lengths that the geometry does not
join; channels that the groups do not divide; an output_padding that does not fit the lengths.
"""


@dataclass(frozen=True)
class Names:
    """How one of the two operators of this kind calls its inputs, weights shape and weights format."""

    src: str
    diff_dst: str
    weights_shape: str
    weights_format: str

    def resolve(self, attrs: Attributes, src: Arg | None, diff_dst: Arg | None, target: Dims | None) -> Resolved | None:
        """The ConvTranspose's output is the correlation's source, its input the destination."""
        order = None if target is None else self.order(attrs, len(target))
        resolved = resolve(
            attrs,
            source=spec.ncx(attrs, spec.dims_of(diff_dst, attrs, self.diff_dst)),
            destination=spec.ncx(attrs, spec.dims_of(src, attrs, self.src)),
            weights=None if target is None or order is None else permute(target, order),
            names=(self.diff_dst, self.src, self.weights_shape),
            transposed=True,
        )
        if resolved is not None:
            require_output_padding(attrs, resolved.source, resolved.destination, resolved, self.diff_dst)
        return resolved

    def order(self, attrs: Attributes, rank: int) -> tuple[int, ...]:
        """Permutation from the weights format to (D, S/g, k…)."""
        return conv_transpose_weights_to_canonical(attrs[self.weights_format], rank)

    def shape(self, attrs: Attributes, args: Sequence[Arg | None]) -> Dims | None:
        src, diff_dst, weights_shape = args
        resolved = self.resolve(attrs, src, diff_dst, spec.wanted_shape(attrs, self.weights_shape, weights_shape))
        if resolved is None:
            return None
        return permute(resolved.weights, inverse(self.order(attrs, len(resolved.weights))))

    def reference(
        self,
        attrs: Attributes,
        out: tuple[int, ...],
        src: Float64Array,
        diff_dst: Float64Array,
        _weights_shape: tuple[int, ...] | None,
    ) -> Float64Array:
        resolved = self.resolve(attrs, Arg(src.shape), Arg(diff_dst.shape), out)
        assert resolved is not None
        order = self.order(attrs, len(out))
        kernel = [out[axis] for axis in order[2:]]
        geo = geometry(attrs, resolved)
        dw = backward_weights(spec.ncx_array(attrs, diff_dst), spec.ncx_array(attrs, src), kernel, geo)
        return dw.transpose(inverse(order))

    def body(
        self,
        b: Body,
        attrs: Attributes,
        src: Tensor,
        diff_dst: Tensor,
        weights_shape: Tensor | None,
    ) -> str:
        """Matrix products of src with the cells of diff_dst that each kernel cell meets."""
        order = self.order(attrs, len(attrs["strides"]) + 2)
        target = convolution.stated(b, attrs, self.weights_shape, weights_shape, order)
        x = convolution.ncx(b, attrs, convolution.ranked(b, attrs, diff_dst, self.diff_dst))
        y = convolution.ncx(b, attrs, convolution.ranked(b, attrs, src, self.src))
        short = convolution.shape(b, y).take(range(2, len(order)))
        c = convolution.correlation(b, attrs, convolution.shape(b, x), target, transposed=True, short=short)
        zero = convolution.conditions(c, target.take([1]), (self.diff_dst, self.src, self.weights_shape))
        message = f"{self.src} does not fit {self.diff_dst}, {self.weights_shape}, strides, dilations and pads"
        y = convolution.checked_destination(c, y, zero, message)
        dw = backward_weights_body(c, convolution.guarded(c, x, zero), y)
        return convolution.transpose(b, Tensor(dw), inverse(order)).name

    def attributes(self, default_format: str) -> tuple[spec.Attribute, ...]:
        return (
            spec.STRIDES,
            spec.PADS_BEGIN,
            spec.PADS_END,
            spec.DILATIONS,
            spec.CONV_TRANSPOSE_AUTO_PAD,
            spec.OUTPUT_PADDING,
            spec.GROUPS,
            spec.DATA_FORMAT,
            spec.conv_transpose_weights_format(self.weights_format, default_format),
            spec.shape_attribute(self.weights_shape, self.shape_doc),
        )

    def inputs(self) -> tuple[Input, ...]:
        return (
            Input(self.src, "T1", "Input of the ConvTranspose."),
            Input(self.diff_dst, "T1", "Gradient with respect to the ConvTranspose's output."),
            spec.shape_input(self.weights_shape, self.shape_doc),
        )

    @property
    def shape_doc(self) -> str:
        return f"Full shape of the weights, in {self.weights_format} order."


NAMES = Names("src", "diff_dst", "weights_shape", "weights_format")

OP = Op(
    name="ConvTransposeBackwardWeights",
    doc=DOC,
    source="oneDNN Graph, ConvTransposeBackwardWeights",
    attributes=NAMES.attributes("XOI"),
    inputs=NAMES.inputs(),
    outputs=(Output("diff_weights", "Gradient with respect to the weights, shaped weights_shape."),),
    shape=NAMES.shape,
    reference=NAMES.reference,
    body=NAMES.body,
)
