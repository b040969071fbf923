"""What every route owes to the process it runs in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from onnx_backprop.opset import KERNELS

SESSIONS_AT_EXIT = """
import builtins, sys
import numpy as np
from onnx import parser
import onnx_backprop as ob

model = ob.backward(parser.parse_model('''
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[1, 1, n] x, float[1, 1, 3] w) => (float[1, 1, m] y) { y = Conv (x, w) }
'''), wrt=["w"])


class Node:
    def __init__(self):
        self.itself = self
        self.session = ob.session(model, kernels=sys.argv[1])


feeds = {"x": np.ones((1, 1, 5), np.float32), "w": np.ones((1, 1, 3), np.float32), "y_grad": np.ones((1, 1, 3), np.float32)}
here, builtins.there = Node(), Node()
print(*[node.session.run(["w_grad"], feeds)[0].ravel() for node in (here, builtins.there)])
"""


@pytest.mark.parametrize("kernels", KERNELS)
def test_sessions_may_outlive_the_modules(kernels: str) -> None:
    """Sessions in reference cycles are destroyed when nearly everything else of Python is gone."""
    done = subprocess.run(
        [sys.executable, "-c", SESSIONS_AT_EXIT, kernels], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout == "[3. 3. 3.] [3. 3. 3.]\n"
