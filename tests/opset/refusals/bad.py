"""A bad call: one valid call per operator, and a change to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import onnx_backprop as ob

Value = np.ndarray | tuple[int, ...] | None

_CONV = {"strides": [2], "pads_begin": [1], "pads_end": [1], "dilations": [1], "data_format": "NCX"}
_POOL = {"kernel": [3], "strides": [2], "pads_begin": [1], "pads_end": [1], "data_format": "NCX"}
_RESAMPLE = {
    "interpolation_mode": "LINEAR",
    "scales": [2.0, 2.0],
    "input_pixel_offsets": [0.5, 0.5],
    "output_pixel_offsets": [-0.5, -0.5],
}
# One valid call of each operator: attributes, the shapes of its tensors and what else it needs.
VALID: dict[str, tuple[dict[str, Any], list[Value]]] = {
    "InterpolateBackward": ({"mode": "linear", "data_format": "NCX"}, [(1, 2, 4), (1, 2, 7)]),
    "InterpolateBackprop": ({"mode": "nearest", "data_format": "NCX"}, [(1, 2, 4), (1, 2, 7)]),
    "ResampleGrad": (_RESAMPLE | {"output_sizes": [2, 3]}, [(4, 6)]),
    "ResizeGrad": ({"mode": "linear"}, [(2, 7), (2, 4), None, None, np.array([2, 7], np.int64)]),
    "Convolution": (_CONV | {"weights_format": "OIX"}, [(1, 4, 5), (6, 4, 3), (6,)]),
    "ConvolutionBackwardData": (_CONV | {"weights_format": "OIX", "dst_shape": [1, 4, 5]}, [(1, 6, 3), (6, 4, 3)]),
    "ConvolutionBackwardWeights": (
        _CONV | {"weights_format": "OIX", "weights_shape": [6, 4, 3]},
        [(1, 4, 5), (1, 6, 3)],
    ),
    "ConvTransposeBackwardData": (_CONV | {"weights_format": "IOX"}, [(1, 4, 5), (6, 4, 3)]),
    "ConvTransposeBackwardWeights": (
        _CONV | {"weights_format": "IOX", "weights_shape": [6, 4, 3]},
        [(1, 6, 3), (1, 4, 5)],
    ),
    "ConvTransposeBackpropFilters": (
        _CONV | {"filter_format": "OIX", "filter_shape": [4, 6, 3]},
        [(1, 6, 3), (1, 4, 5)],
    ),
    "BiasAddBackward": ({"data_format": "NCX"}, [(1, 2, 3)]),
    "ReLUBackward": ({}, [(2, 3), (2, 3)]),
    "SoftMaxBackward": ({}, [(2, 3), (2, 3)]),
    "BatchNormForwardTraining": (
        {"epsilon": 1e-5, "momentum": 0.9, "data_format": "NCX"},
        [(2, 3, 4), (3,), (3,), (3,), (3,)],
    ),
    "BatchNormTrainingBackward": ({"epsilon": 1e-5, "data_format": "NCX"}, [(2, 3, 4), (2, 3, 4), (3,), (3,), (3,)]),
    "LayerNormBackward": ({"begin_norm_axis": 1}, [(2, 3, 4), (2, 3, 4), (2,), (2,), (3, 4), (3, 4)]),
    "MaxPoolBackward": (_POOL, [(1, 2, 7), (1, 2, 4)]),
    "AvgPoolBackward": (_POOL | {"exclude_pad": 1, "src_shape": [1, 2, 7]}, [(1, 2, 4)]),
}

IB, IBP, RG, BIAS = "InterpolateBackward", "InterpolateBackprop", "ResampleGrad", "BiasAddBackward"
RZ = "ResizeGrad"
CD, CW = "ConvolutionBackwardData", "ConvolutionBackwardWeights"
TD, TW, TF = "ConvTransposeBackwardData", "ConvTransposeBackwardWeights", "ConvTransposeBackpropFilters"
SM = "SoftMaxBackward"
MP, RELU, BN = "MaxPoolBackward", "ReLUBackward", "BatchNormTrainingBackward"
BF = "BatchNormForwardTraining"
LN, AP = "LayerNormBackward", "AvgPoolBackward"
POOL_OPS = (MP, AP)
CV = "Convolution"
CONVOLUTION_OPS = (CV, CD, CW, TD, TW, TF)


@dataclass(frozen=True)
class Bad:
    """A change of the valid call and the whole sentence behind the operator's name. None removes."""

    op: str
    message: str
    attributes: dict[str, Any] = field(default_factory=dict)
    inputs: dict[int, Value] = field(default_factory=dict)
    error: type[Exception] = ob.ShapeError
    model_shows_it: bool = True

    @property
    def id(self) -> str:
        return f"{self.op}-{self.attributes or ''}{self.inputs or ''}"[:90]

    def call(self) -> tuple[dict[str, Any], list[Value]]:
        attributes, inputs = VALID[self.op]
        changed = {k: v for k, v in (attributes | self.attributes).items() if v is not None}
        given = dict(enumerate(inputs)) | self.inputs
        return changed, [given.get(n) for n in range(max(given) + 1)]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def invalid(op: str, message: str, attributes: dict[str, Any], *, model_shows_it: bool = True) -> Bad:
    return Bad(op, message, attributes, error=ob.InvalidModelError, model_shows_it=model_shows_it)
