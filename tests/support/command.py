"""A small model for the command, and the command in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL = """
    <ir_version: 10, opset_import: ["": 18]>
    small (float[N, 1, 4, 4] x) => (float[N, 2, 4, 4] y)
    <float[2, 1, 1, 1] weight = {0.5, -1.5}, float[2] bias = {0.25, 1.0}, float[2, 1, 1] gain = {2.0, 3.0}>
    { [conv] c = Conv(x, weight, bias)  [relu] r = Relu(c)  [scale] y = Mul(r, gain) }
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "onnx_backprop", *arguments], capture_output=True, text=True, check=False
    )


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
