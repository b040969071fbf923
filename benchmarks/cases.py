"""What is timed: the shapes of the table, and the arrays of each."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

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

    gradients = ("data", "weights")

    @property
    def name(self) -> str:
        image = "x".join(map(str, self.lengths))
        extras = f" d{self.dilation}" if self.dilation > 1 else ""
        extras += f" g{self.groups}" if self.groups > 1 else ""
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


Case = Convolution | Interpolation

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
CASES: tuple[Case, ...] = (*CONVOLUTIONS, *INTERPOLATIONS)
BY_NAME = {case.name: case for case in CASES}
