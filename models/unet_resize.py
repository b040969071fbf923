"""U-Net whose decoder enlarges by linear interpolation, the common way around checkerboard patterns.

Sources: Ronneberger, Fischer, Brox, "U-Net", MICCAI 2015; Odena, Dumoulin, Olah, "Deconvolution and Checkerboard
Artifacts", Distill 2016.
"""

from __future__ import annotations

import sys

from onnx import ModelProto

from models.graphs import Network, Value, main


def build(
    *, channels: int = 1, classes: int = 1, features: int = 8, levels: int = 2, mode: str = "linear", seed: int = 0
) -> ModelProto:
    """U-Net: image (N, channels, H, W) -> logits (N, classes, H, W); H and W are multiples of 2^levels.

    Each level: 3×3 Conv + Relu, then MaxPool down, `features` doubling; on the way up Resize ("linear" or "nearest",
    half_pixel, scales 2), a 3×3 Conv + Relu to the level's width, and the level's features added. Other sizes fail at
    the Add.
    """
    net = Network("unet_resize", seed=seed)
    x = net.input("image", channels)
    skips: list[Value] = []
    for level in range(levels):
        x = net.relu(net.conv(x, features << level, kernel=3))
        skips.append(x)
        x = net.max_pool(x)
    x = net.relu(net.conv(x, features << levels, kernel=3))
    for skip in reversed(skips):
        x = net.resize(x, 2, mode=mode, coordinate_transformation_mode="half_pixel")
        x = net.add(skip, net.relu(net.conv(x, skip.channels, kernel=3)))
    return net.model("logits", net.conv(x, classes, kernel=1))


if __name__ == "__main__":
    sys.exit(main(build))
