"""U-Net whose decoder enlarges by transposed convolution, as the original does.

Source: Ronneberger, Fischer, Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015.
"""

from __future__ import annotations

import sys

from onnx import ModelProto

from models.graphs import Network, Value, main


def build(*, channels: int = 1, classes: int = 1, features: int = 8, levels: int = 2, seed: int = 0) -> ModelProto:
    """U-Net: image (N, channels, H, W) -> logits (N, classes, H, W); H and W are multiples of 2^levels.

    Each level: two 3×3 Conv + Relu, then MaxPool down, `features` doubling; on the way up a 2×2 ConvTranspose with
    stride 2, Concat with the level's features, and two Conv + Relu again. Other sizes fail at the Concat.
    """
    net = Network("unet_conv_transpose", seed=seed)
    x = net.input("image", channels)
    skips: list[Value] = []
    for level in range(levels):
        x = _two_convolutions(net, x, features << level)
        skips.append(x)
        x = net.max_pool(x)
    x = _two_convolutions(net, x, features << levels)
    for skip in reversed(skips):
        x = net.conv_transpose(x, skip.channels, kernel=2, scale=2, pad=0)
        x = _two_convolutions(net, net.concat(skip, x), skip.channels)
    return net.model("logits", net.conv(x, classes, kernel=1))


def _two_convolutions(net: Network, x: Value, channels: int) -> Value:
    for _ in range(2):
        x = net.relu(net.conv(x, channels, kernel=3))
    return x


if __name__ == "__main__":
    sys.exit(main(build))
