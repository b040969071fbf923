"""What is timed: the shapes of the table, and the arrays of each."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Convolution:
    """A Conv or, transposed, a ConvTranspose: X (N, C, length…) -> Y (N, D, …), square kernels.

    Gradients: "data" (wrt X) and "weights" (wrt W).
    """

    batch: int
    channels: int
    outputs: int
    lengths: tuple[int, ...]
    kernel: int
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    channels_last: bool = False  # of X and Y; for our own kernels

    gradients = ("data", "weights")

    @property
    def name(self) -> str:
        image = "x".join(map(str, self.lengths))
        extras = f" d{self.dilation}" if self.dilation > 1 else ""
        extras += f" g{self.groups}" if self.groups > 1 else ""
        extras += " NXC" if self.channels_last else ""
        kind = "ConvTranspose" if self.transposed else "Conv"
        return (
            f"{kind}{len(self.lengths)}d N{self.batch} C{self.channels} O{self.outputs} {image} "
            f"k{self.kernel} s{self.stride} p{self.pad}{extras}"
        )

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *self.lengths)

    @property
    def w_shape(self) -> tuple[int, ...]:
        first, second = (self.channels, self.outputs) if self.transposed else (self.outputs, self.channels)
        return (first, second // self.groups, *[self.kernel] * len(self.lengths))

    @property
    def y_shape(self) -> tuple[int, ...]:
        extent = (self.kernel - 1) * self.dilation + 1
        if self.transposed:
            outs = [self.stride * (n - 1) + extent - 2 * self.pad for n in self.lengths]
        else:
            outs = [(n + 2 * self.pad - extent) // self.stride + 1 for n in self.lengths]
        return (self.batch, self.outputs, *outs)

    @property
    def flops(self) -> int:
        """Multiplications and additions of either gradient."""
        cells = prod((self.x_shape if self.transposed else self.y_shape)[2:])
        return 2 * self.batch * cells * prod(self.w_shape)

    @property
    def bytes(self) -> int:
        """What either gradient must read and write at least."""
        return 4 * (prod(self.x_shape) + prod(self.w_shape) + prod(self.y_shape))

    def arrays(self) -> dict[str, np.ndarray]:
        """X, w and dy, the same in every process."""
        rng = np.random.default_rng(0)
        shapes = {"x": self.x_shape, "w": self.w_shape, "dy": self.y_shape}
        return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Interpolation:
    """A Resize of the spatial axes, half_pixel; "cubic" with a = -0.75. Gradient: "data"."""

    batch: int
    channels: int
    lengths: tuple[int, int]
    outs: tuple[int, int]
    mode: str
    channels_last: bool = False

    gradients = ("data",)

    @property
    def name(self) -> str:
        before, after = ("x".join(map(str, size)) for size in (self.lengths, self.outs))
        layout = " NXC" if self.channels_last else ""
        return f"{self.mode} N{self.batch} C{self.channels} {before} -> {after}{layout}"

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *self.lengths)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *self.outs)

    @property
    def flops(self) -> int:
        taps = {"nearest": 1, "linear": 2, "cubic": 4}[self.mode]
        return 2 * taps * taps * prod(self.y_shape)

    @property
    def bytes(self) -> int:
        return 4 * (prod(self.x_shape) + prod(self.y_shape))

    def arrays(self) -> dict[str, np.ndarray]:
        """X (only its shape matters) and dy, NCX."""
        rng = np.random.default_rng(0)
        return {"x": np.zeros(self.x_shape, np.float32), "dy": rng.standard_normal(self.y_shape, np.float32)}


@dataclass(frozen=True)
class Layer:
    """One forward operator of ONNX, differentiated wrt its inputs from x on by the converter.

    Measured are the "forward" alone and the forward with all gradients, "both".
    """

    op_type: str
    shape: tuple[int, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    parameters: int = 0  # further inputs, of one entry per channel (or of the last axis) each
    out: tuple[int, ...] | None = None  # spatial lengths of y, where they are not those of x

    gradients = ("forward", "both")

    @property
    def name(self) -> str:
        shown = "x".join(map(str, self.shape))
        letters = {"kernel_shape": "k", "strides": "s", "pads": "p"}
        extras = "".join(
            f" {letters[key]}{value[0]}"
            for key, value in self.attributes
            if key in letters and isinstance(value, tuple)
        )
        return f"{self.op_type} {shown}{extras}"

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.shape if self.out is None else (*self.shape[:2], *self.out)

    @property
    def flops(self) -> int:
        return prod(self.x_shape)

    @property
    def bytes(self) -> int:
        """Of the gradient: x and dy read, dx written."""
        return 4 * (2 * prod(self.x_shape) + prod(self.y_shape))

    def arrays(self) -> dict[str, np.ndarray]:
        """X, the parameters and dy."""
        rng = np.random.default_rng(0)
        axis = 1 if self.op_type == "BatchNormalization" else -1
        arrays = {"x": rng.standard_normal(self.x_shape, np.float32)}
        arrays |= {f"p{n}": rng.random(self.shape[axis], np.float32) + 0.5 for n in range(self.parameters)}
        return arrays | {"dy": rng.standard_normal(self.y_shape, np.float32)}


Case = Convolution | Interpolation | Layer

CONVOLUTIONS = (
    Convolution(8, 64, 64, (56, 56), 3, 1, 1),
    Convolution(8, 128, 128, (28, 28), 3, 1, 1),
    Convolution(8, 256, 256, (14, 14), 3, 1, 1),
    Convolution(8, 256, 64, (56, 56), 1),
    Convolution(8, 64, 256, (56, 56), 1),
    Convolution(8, 128, 128, (56, 56), 3, 2, 1),
    Convolution(4, 3, 64, (224, 224), 7, 2, 3),
    Convolution(8, 128, 128, (56, 56), 3, 1, 1, groups=128),
    Convolution(4, 64, 64, (56, 56), 3, 1, 2, dilation=2),
    Convolution(8, 64, 32, (56, 56), 2, 2, transposed=True),
    Convolution(8, 64, 64, (28, 28), 4, 2, 1, transposed=True),
    Convolution(4, 32, 1, (64, 64), 9, 3, 4, transposed=True),
    Convolution(8, 64, 64, (4096,), 7),
    Convolution(2, 16, 32, (32, 32, 16), 3),
    Convolution(1, 64, 64, (56, 56), 3, 1, 1),
)
SIZES = (
    (8, 64, (64, 64), (128, 128)),
    (8, 64, (128, 128), (64, 64)),
    (4, 32, (100, 100), (333, 217)),
    (1, 3, (1080, 1920), (2160, 3840)),
)
INTERPOLATIONS = tuple(
    Interpolation(*size, mode, channels_last)
    for size in SIZES
    for mode in ("nearest", "linear", "cubic")
    for channels_last in (False, True)
)
_HALF = (("kernel_shape", (2, 2)), ("strides", (2, 2)))
_STEM = (("kernel_shape", (3, 3)), ("strides", (2, 2)), ("pads", (1, 1, 1, 1)))
_SAME = (("kernel_shape", (3, 3)), ("strides", (1, 1)), ("pads", (1, 1, 1, 1)))
LAYERS = (
    Layer("MaxPool", (4, 32, 128, 128), _HALF, out=(64, 64)),
    Layer("MaxPool", (8, 64, 112, 112), _STEM, out=(56, 56)),
    Layer("AveragePool", (4, 32, 128, 128), _HALF, out=(64, 64)),
    Layer("AveragePool", (8, 64, 112, 112), _STEM, out=(56, 56)),
    Layer("AveragePool", (8, 64, 56, 56), _SAME, out=(56, 56)),
    Layer("AveragePool", (8, 512, 7, 7), (("kernel_shape", (7, 7)), ("strides", (1, 1))), out=(1, 1)),
    Layer("Relu", (8, 64, 56, 56)),
    Layer("BatchNormalization", (8, 64, 56, 56), (("training_mode", 1),), parameters=4),
    Layer("Softmax", (8, 8, 256, 256)),
    Layer("LayerNormalization", (8, 256, 512), parameters=2),
)
CASES: tuple[Case, ...] = (*CONVOLUTIONS, *INTERPOLATIONS, *LAYERS)
BY_NAME = {case.name: case for case in CASES}
