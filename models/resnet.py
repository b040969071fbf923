"""ResNet-18 for small images, BatchNormalization in training mode.

Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from onnx import ModelProto

from models.graphs import Network, Value, main


def build(
    *, channels: int = 3, classes: int = 10, features: int = 8, blocks: Sequence[int] = (2, 2, 2, 2), seed: int = 0
) -> ModelProto:
    """ResNet: image (N, channels, H, W) -> logits (N, classes).

    3×3 Conv, then stages of residual blocks, each stage with twice the features of the one before and, from the
    second on, half the image size. ResNet-18 has features=64; the convolutions carry no bias, the normalisation does.
    """
    net = Network("resnet", seed=seed)
    x = net.relu(net.batch_norm(net.conv(net.input("image", channels), features, kernel=3, bias=False)))
    for stage, count in enumerate(blocks):
        for block in range(count):
            x = _block(net, x, features << stage, stride=2 if stage and not block else 1)
    return net.model("logits", net.classify(x, classes), size=())


def _block(net: Network, x: Value, features: int, *, stride: int) -> Value:
    """relu(x + F(x)), with a 1×1 Conv on x where the shape changes."""
    y = net.relu(net.batch_norm(net.conv(x, features, kernel=3, stride=stride, bias=False)))
    y = net.batch_norm(net.conv(y, features, kernel=3, bias=False))
    if stride != 1 or x.channels != features:
        x = net.batch_norm(net.conv(x, features, kernel=1, stride=stride, bias=False))
    return net.relu(net.add(x, y))


if __name__ == "__main__":
    sys.exit(main(build))
