"""Feature pyramid network for dense prediction: the pyramid enlarges by nearest-neighbour Resize.

Sources: Lin et al., "Feature Pyramid Networks for Object Detection", CVPR 2017; the sum of all levels as in Kirillov
et al., "Panoptic Feature Pyramid Networks", CVPR 2019.
"""

from __future__ import annotations

import sys

from onnx import ModelProto

from models.graphs import Network, Value, main


def build(*, channels: int = 3, classes: int = 4, features: int = 8, levels: int = 3, seed: int = 0) -> ModelProto:
    """FPN: image (N, channels, H, W) -> logits (N, classes, H, W); H and W are multiples of 2^levels.

    Bottom-up: 3×3 Conv + Relu of stride 2 per level, `features` doubling. Top-down: a 1×1 Conv per level, and the
    coarser level added after Resize nearest; every level's 3×3 Conv is enlarged to the finest and all are summed;
    a 1×1 Conv gives the classes, enlarged to the size of the image. Other sizes fail at the first Add.
    """
    net = Network("fpn", seed=seed)
    x = net.input("image", channels)
    bottom_up: list[Value] = []
    for level in range(levels):
        x = net.relu(net.conv(x, features << level, kernel=3, stride=2))
        bottom_up.append(x)
    lateral = [net.conv(x, features, kernel=1) for x in bottom_up]
    top = lateral[-1]
    total = net.conv(top, features, kernel=3)
    for finer in reversed(lateral[:-1]):
        top = net.add(finer, _nearest(net, top))
        total = net.add(net.conv(top, features, kernel=3), _nearest(net, total))
    return net.model("logits", _nearest(net, net.conv(net.relu(total), classes, kernel=1)))


def _nearest(net: Network, x: Value) -> Value:
    """Every pixel twice along both axes, written as PyTorch exports Upsample(scale_factor=2, mode="nearest")."""
    return net.resize(
        x, 2, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor", cubic_coeff_a=-0.75
    )


if __name__ == "__main__":
    sys.exit(main(build))
