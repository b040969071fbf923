"""Attributes, inputs and layout handling that the convolution operators share.

Attribute names, defaults and values are those of the oneDNN Graph specification.
"""

import numpy as np

from onnx_backprop.opset.core.errors import ShapeError
from onnx_backprop.opset.core.layout import data_to_ncx, inverse
from onnx_backprop.opset.core.op import Arg, Attribute, Attributes, Float64Array, Input
from onnx_backprop.opset.core.shapes import Dims, permute, require_rank, stated_shape
from onnx_backprop.opset.maths.convolution import MAX_RANK, MIN_RANK

AUTO_PAD_ALIASES = {
    "none": "None",
    "notset": "None",
    "same_upper": "SAME_UPPER",
    "same_lower": "SAME_LOWER",
    "valid": "VALID",
}

STRIDES = Attribute("strides", "ints", "Stride along each spatial axis, in pixels, >= 1.", required=True)
DILATIONS = Attribute(
    "dilations", "ints", "Distance between kernel positions along each spatial axis, >= 1; 1 is dense.", required=True
)
PADS_BEGIN, PADS_END = (
    Attribute(
        name,
        "ints",
        f"Zeros {where} pixel of each spatial axis, >= 0; ignored unless auto_pad is None. [] means zeros.",
        required=True,
    )
    for name, where in (("pads_begin", "before the first"), ("pads_end", "after the last"))
)
GROUPS = Attribute("groups", "int", "Number of groups, >= 1; divides the channels on both sides.", default=1)
DATA_FORMAT = Attribute(
    "data_format",
    "string",
    "Axis order of data: NXC (batch, spatial…, channels) or NCX (batch, channels, spatial…), which is ONNX's.",
    default="NXC",
    choices=("NXC", "NCX"),
)
OUTPUT_PADDING_DOC = (
    "Extra length of the transposed convolution's output along each spatial axis, >= 0. Only checked against the "
    "lengths when given: they already say where the output ends. Whether it is given decides what SAME means in the "
    "gradients of ConvTranspose."
)
OUTPUT_PADDING = Attribute("output_padding", "ints", OUTPUT_PADDING_DOC)


def auto_pad(rule: str) -> Attribute:
    """The auto_pad attribute; `rule` says how SAME finds the padding."""
    return Attribute(
        "auto_pad",
        "string",
        "None: use pads_begin and pads_end. VALID: no padding. SAME_UPPER, SAME_LOWER: "
        f"{rule}; an odd pixel goes to the end (upper) or to the beginning (lower). "
        "Also accepted in lower case, and NOTSET for None.",
        default="None",
        choices=("None", "SAME_UPPER", "SAME_LOWER", "VALID"),
        aliases=AUTO_PAD_ALIASES,
    )


CONV_AUTO_PAD = auto_pad(
    "with in the length of the convolution's source and EK = (K-1)·dilation + 1, total = "
    "max(EK - (in mod stride or stride), 0), so that out = ceil(in / stride)"
)
CONV_TRANSPOSE_AUTO_PAD = auto_pad(
    "with EK = (K-1)·dilation + 1 and len the length of the ConvTranspose's output: with output_padding total = "
    "max(EK - stride, 0), the rule of the forward ConvTranspose; without it total = "
    "max(EK - (len mod stride or stride), 0), which is the same number for every len of a ConvTranspose without "
    "output_padding, and else the padding that gives len from ceil(len / stride) pixels (ONNX's output_shape)."
    " If the length of the ConvTranspose's input is known and only the former total leads to it, the former is used"
)


def geometry_attributes(auto_pad: Attribute, *, output_padding: bool) -> tuple[Attribute, ...]:
    """What says which pixels meet which, and the axis order of data."""
    padding = (OUTPUT_PADDING,) if output_padding else ()
    return STRIDES, PADS_BEGIN, PADS_END, DILATIONS, auto_pad, *padding, GROUPS, DATA_FORMAT


CONV_WEIGHTS_FORMAT = Attribute(
    "weights_format",
    "string",
    "Axis order of the weights: XIO (k…, IC/g, OC) or OIX (OC, IC/g, k…), which is ONNX's.",
    default="XIO",
    choices=("XIO", "OIX"),
)


def conv_transpose_weights_format(name: str, default: str) -> Attribute:
    """Weights layout of a transposed convolution; I are the channels of its input, O of its output."""
    return Attribute(
        name,
        "string",
        "Axis order of the weights, I being the channels of the ConvTranspose's input (stored whole) and O those of "
        "its output (stored divided by the groups): XOI (k…, OC/g, IC), IOX (IC, OC/g, k…), which is ONNX's, "
        "XIO (k…, IC, OC/g), OIX (OC/g, IC, k…).",
        default=default,
        choices=("XOI", "IOX", "XIO", "OIX"),
    )


def shape_attribute(name: str, doc: str) -> Attribute:
    """A shape that may be given as an attribute or as an input of the same name."""
    return Attribute(name, "ints", f"{doc} The input of the same name, when connected, is used instead.")


def shape_input(name: str, doc: str) -> Input:
    """The optional s32 input that carries a shape."""
    return Input(name, "T2", doc, optional=True)


def ncx(attrs: Attributes, dims: Dims | None) -> Dims | None:
    """Dimensions of data in NCX order."""
    return None if dims is None else permute(dims, data_to_ncx(attrs["data_format"], len(dims)))


def from_ncx(attrs: Attributes, dims: Dims) -> Dims:
    """Dimensions of data from NCX into data_format order."""
    return permute(dims, inverse(data_to_ncx(attrs["data_format"], len(dims))))


def ncx_array(attrs: Attributes, x: Float64Array) -> Float64Array:
    """Data in NCX order, contiguous so that the products below run at full speed."""
    return np.ascontiguousarray(x.transpose(data_to_ncx(attrs["data_format"], x.ndim)))


def from_ncx_array(attrs: Attributes, x: Float64Array) -> Float64Array:
    """Data from NCX into data_format order."""
    return x.transpose(inverse(data_to_ncx(attrs["data_format"], x.ndim)))


def wanted_shape(attrs: Attributes, name: str, given: Arg | None) -> Dims | None:
    """The value of a shape stated by the input `given` or the attribute `name`; None while unknown.

    Raises ShapeError when neither is there, the rank is not 3 to 5, or an entry is negative.
    """
    if given is None and attrs[name] is None:
        raise ShapeError(f"expected {name} as attribute or input, got neither", op_type=attrs.op)
    subject = f"attribute {name}" if given is None else f"input {name}"
    dims, value = (None, attrs[name]) if given is None else (given.dims, given.value)
    return stated_shape(dims, value, MIN_RANK, MAX_RANK, op=attrs.op, subject=subject)


def dims_of(arg: Arg | None, attrs: Attributes, name: str) -> Dims | None:
    """Dimensions of a required input, its rank checked; None while unknown."""
    assert arg is not None, f"{name} is required"
    if arg.dims is not None:
        require_rank(arg.dims, MIN_RANK, MAX_RANK, op=attrs.op, subject=name)
    return arg.dims
