"""Calls of native operators by their shapes alone, however large: the tensors' bytes, and the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from onnx_backprop.opset.core.op import Arg, Attributes
from onnx_backprop.opset.functions.native import NATIVE_PREFIX
from onnx_backprop.opset.operators.registry import BY_NAME
from onnx_backprop.ort_ops.compiler.llvm import ITEM_SIZE
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.convolution.gather import bands
from onnx_backprop.ort_ops.convolution.weights import plan as weights_plan
from onnx_backprop.ort_ops.convolution.winograd import plan as winograd_plan
from onnx_backprop.ort_ops.convolution.winograd import tiles
from onnx_backprop.ort_ops.native_table import KERNELS
from onnx_backprop.ort_ops.runtime.bridge import Request
from onnx_backprop.ort_ops.runtime.stages import Plan
from tests.operators.convolution.calls import CONV_FORMATS, CONV_TRANSPOSE_FORMATS, conv_order, conv_transpose_order
from tests.support.single_op import ELEMENT_TYPES

Shape = tuple[int, ...]
Rng = np.random.Generator
CONV_OPS = (
    "Convolution",
    "ConvolutionBackwardData",
    "ConvolutionBackwardWeights",
    "ConvTransposeBackwardData",
    "ConvTransposeBackwardWeights",
    "ConvTransposeBackpropFilters",
)


@dataclass(frozen=True)
class Shapes:
    """One call of an operator: attributes and the shapes of its inputs, None for an absent one."""

    op: str
    attributes: Mapping[str, Any]
    inputs: tuple[Shape | None, ...]

    def call(self, dtype: str) -> Request:
        """What a kernel makes its plan for. Raises what the operator has to say against the shapes."""
        op = BY_NAME[self.op]
        attributes = Attributes(KERNELS[NATIVE_PREFIX + self.op].op, self.attributes)  # which may have more
        inputs = (*self.inputs, *[None] * (len(op.inputs) - len(self.inputs)))
        outputs = op.run_shapes(attributes, [None if shape is None else Arg(shape) for shape in inputs])
        return Request(attributes, ELEMENT_TYPES[dtype], inputs, (None,) * len(inputs), outputs)

    def plan(self, dtype: str) -> Plan:
        return KERNELS[NATIVE_PREFIX + self.op].plan(self.call(dtype))

    def tensor_bytes(self, dtype: str) -> int:
        """Of inputs and outputs."""
        call, op = self.call(dtype), BY_NAME[self.op]
        both = [*zip(op.inputs, call.inputs, strict=True), *zip(op.outputs, call.outputs, strict=True)]
        sizes = {"T1": ITEM_SIZE[ELEMENT_TYPES[dtype]], "T6": 1}
        return sum(math.prod(shape) * sizes.get(spec.type_name, 4) for spec, shape in both if shape is not None)


def without_matrix_tiles(monkeypatch: Any) -> None:
    """Plans as on a processor that has no registers of matrices."""
    for module in (bands, weights_plan, tiles, winograd_plan):
        monkeypatch.setattr(module, "matrix_tiles", lambda: False)


R = TypeVar("R", bound=Record)


def numbers(plan: Plan, record: type[R]) -> R:
    """The parameters of a plan, which are of that kind."""
    assert isinstance(plan.parameters, record)
    return plan.parameters


def to_data(shape: Sequence[int], data_format: str) -> Shape:
    """NCX into a data format."""
    n, c, *cells = shape
    return (n, c, *cells) if data_format == "NCX" else (n, *cells, c)


def _to_weights(shape: Sequence[int], order: str) -> Shape:
    """(D, S/g, k…) into a weights format of three letters that say where D, S and the kernel go."""
    d, s, *kernel = shape
    return tuple(length for letter in order for length in {"D": [d], "S": [s], "X": kernel}[letter])


def convolution(
    op: str,
    batch: int,
    channels: tuple[int, int],
    outs: Sequence[int],
    kernel: Sequence[int],
    *,
    strides: Sequence[int] = (),
    pads: Sequence[int] = (),
    dilations: Sequence[int] = (),
    groups: int = 1,
    data_format: str = "NCX",
    weights_format: str = "",
    lengths: Sequence[int] = (),
) -> Shapes:
    """A correlation of `channels` (source, destination) as a call; `outs` are the lengths of the destination.

    `lengths` are those of the source, where they are not the least that give `outs`.
    """
    axes = len(outs)
    strides, dilations, pads = strides or (1,) * axes, dilations or (1,) * axes, pads or (0,) * axes
    zipped = zip(outs, kernel, strides, dilations, pads, strict=True)
    longs = [stride * (out - 1) + (k - 1) * dilation + 1 - 2 * pad for out, k, stride, dilation, pad in zipped]
    (s, d), longs = channels, lengths or longs
    source, destination = (to_data((batch, *shape), data_format) for shape in ((s, *longs), (d, *outs)))
    transposed = op.startswith("ConvTranspose")
    weights_format = weights_format or ("IOX" if transposed else "OIX")
    order = conv_transpose_order(weights_format) if transposed else conv_order(weights_format)
    weights = _to_weights((d, s // groups, *kernel), order)
    name = "filter" if op == "ConvTransposeBackpropFilters" else "weights"
    attributes: dict[str, Any] = {
        "strides": strides,
        "dilations": dilations,
        "pads_begin": pads,
        "pads_end": pads,
        "groups": groups,
        "data_format": data_format,
        f"{name}_format": weights_format,
    }
    if op == "ConvolutionBackwardData":
        return Shapes(op, attributes | {"dst_shape": source}, (destination, weights))
    if op in ("Convolution", "ConvTransposeBackwardData"):
        return Shapes(op, attributes, (source, weights))
    images = (destination, source) if transposed else (source, destination)
    return Shapes(op, attributes | {f"{name}_shape": weights}, images)


def _pick(rng: Rng, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def random_convolution(rng: Rng, most: float = 2e9) -> Shapes:
    """Of up to `most` bytes of float32: any geometry, from large images and few channels to the opposite."""
    while True:
        axes = int(rng.integers(1, 4))
        op, data_format = _pick(rng, *CONV_OPS), _pick(rng, "NCX", "NXC")
        weights_format = _pick(rng, *(CONV_TRANSPOSE_FORMATS if op.startswith("ConvTranspose") else CONV_FORMATS))
        groups = int(_pick(rng, 1, 1, 1, 1, 2, 3, 16, 32, 200, 512))
        s, d = (int(2 ** rng.uniform(0, 12)) for _ in range(2))
        if groups > 3 and rng.random() < 0.5:
            s = d = 1  # depthwise
        kernel = [int(_pick(rng, 1, 1, 2, 3, 3, 3, 4, 5, 7, 31 if axes < 3 else 3)) for _ in range(axes)]
        strides = [int(_pick(rng, 1, 1, 1, 2, 3, 4)) for _ in range(axes)]
        dilations = [int(_pick(rng, 1, 1, 1, 2, 4)) for _ in range(axes)]
        if rng.random() < 0.3:  # by Winograd's tiles
            axes, data_format, kernel, strides, dilations = 2, "NCX", [3, 3], [1, 1], [1, 1]
            groups = min(groups, 32)
        pads = [int(rng.integers(0, k)) for k in kernel]
        outs = [int(2 ** rng.uniform(0, {1: 20, 2: 10.5, 3: 7}[axes])) for _ in range(axes)]
        batch = int(_pick(rng, 1, 1, 2, 8, 32))
        if any(
            st * (o - 1) + (k - 1) * dl + 1 <= 2 * p
            for o, k, st, dl, p in zip(outs, kernel, strides, dilations, pads, strict=True)
        ):
            continue
        call = convolution(
            op,
            batch,
            (groups * s, groups * d),
            outs,
            kernel,
            strides=strides,
            pads=pads,
            dilations=dilations,
            groups=groups,
            data_format=data_format,
            weights_format=weights_format,
        )
        if call.tensor_bytes("f32") <= most:
            return call


def pool(
    batch: int,
    channels: int,
    lengths: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    data_format: str,
) -> Shapes:
    """A MaxPoolBackward."""
    zipped = zip(lengths, kernel, strides, pads, strict=True)
    outs = [(length + 2 * pad - k) // stride + 1 for length, k, stride, pad in zipped]
    attributes = {"kernel": kernel, "strides": strides, "pads_begin": pads, "pads_end": pads}
    inputs = tuple(to_data((batch, channels, *shape), data_format) for shape in (lengths, outs))
    return Shapes("MaxPoolBackward", {**attributes, "data_format": data_format}, inputs)


def random_pool(rng: Rng) -> Shapes:
    """Of up to 300 million elements: windows side by side or over each other, and of the whole image."""
    while True:
        axes, data_format = int(rng.integers(1, 4)), _pick(rng, "NCX", "NXC")
        lengths = [int(2 ** rng.uniform(0, {1: 23, 2: 11.5, 3: 7.5}[axes])) for _ in range(axes)]
        kernel = [min(length, int(_pick(rng, 1, 2, 2, 3, 3, 5, 7, 31, length))) for length in lengths]
        strides = [int(_pick(rng, 1, 1, 2, 2, 3, k)) for k in kernel]
        pads = [int(rng.integers(0, k // 2 + 1)) if k < 10 else 0 for k in kernel]
        batch, channels = int(_pick(rng, 1, 1, 2, 8)), int(2 ** rng.uniform(0, 9))
        if batch * channels * math.prod(lengths) <= 3e8:
            return pool(batch, channels, lengths, kernel, strides, pads, data_format)
