"""The classifier of `models` as a module of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import ModelProto

from tests.doors.models import weights_of


def twin(model: ModelProto) -> Any:
    torch: Any = pytest.importorskip("torch", reason="needs torch: make doors")
    w = {name: torch.from_numpy(value.copy()) for name, value in weights_of(model).items()}

    class Twin(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = torch.nn.ReLU()

        def forward(self, image: Any) -> Any:
            f = torch.nn.functional
            features = self.features(f.conv2d(image, w["kernel"], w["bias"], padding=1))
            return f.avg_pool2d(features, 2).flatten(1) @ w["head"] + w["shift"]

    return Twin().eval()
