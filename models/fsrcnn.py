"""FSRCNN-style super-resolution: all layers work at low resolution, one transposed convolution enlarges at the end.

Source: Dong, Loy, Tang, "Accelerating the Super-Resolution Convolutional Neural Network", ECCV 2016.
"""

from __future__ import annotations

import sys

from onnx import ModelProto

from models.graphs import Network, main


def build(
    *, scale: int = 3, features: int = 32, shrunk: int = 8, mappings: int = 3, channels: int = 1, seed: int = 0
) -> ModelProto:
    """FSRCNN(features, shrunk, mappings): image (N, channels, H, W) -> upscaled (N, channels, scale·H, scale·W).

    Feature extraction 5×5, shrinking 1×1, `mappings` times 3×3, expanding 1×1, each with PRelu; then a 9×9
    ConvTranspose with stride = scale, pads 4 and output_padding = scale - 1, which is why its gradient is not
    symmetric in the two ends of an axis.
    """
    net = Network("fsrcnn", seed=seed)
    x = net.input("image", channels)
    x = net.prelu(net.conv(x, features, kernel=5))
    x = net.prelu(net.conv(x, shrunk, kernel=1))
    for _ in range(mappings):
        x = net.prelu(net.conv(x, shrunk, kernel=3))
    x = net.prelu(net.conv(x, features, kernel=1))
    y = net.conv_transpose(x, channels, kernel=9, scale=scale, pad=4)
    return net.model("upscaled", y, size=("H_up", "W_up"))


if __name__ == "__main__":
    sys.exit(main(build))
