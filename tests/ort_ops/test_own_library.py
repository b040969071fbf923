"""The library that takes the place of onnxruntime-extensions' on Windows, on this machine: built, and trained with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_backprop.opset.functions.native import OPERATORS_VARIABLE

SOURCE = Path(__file__).parents[2] / "ort_ops" / "runtime" / "operators.c"
SCRIPT = """
import json, sys
import numpy as np
from onnx import parser
import onnx_backprop as ob
from onnx_backprop.opset.functions.native import NATIVE_DOMAIN
from onnx_backprop.ort_ops.native_route import reason_against

model = parser.parse_model('''
    <ir_version: 10, opset_import: ["": 18]>
    image (float[N,2,H,W] x) => (float[N,1,H,W] y) <float[1,2,3,3] w = {
        0.1, 0.2, -0.1, 0.3, 0.1, 0, 0.2, -0.2, 0.1, 0.1, 0.2, -0.1, 0.3, 0.1, 0, 0.2, -0.2, 0.1}> {
        a = Conv <pads = [1, 1, 1, 1]> (x, w) y = Relu (a) }''')
rng = np.random.default_rng(0)
batch = {"x": rng.random((3, 2, 7, 8), np.float32), "target": rng.random((3, 1, 7, 8), np.float32)}
graph, losses = ob.training_graph(model, loss="mse", optimizer="adamw"), {}
for kernels in ("native", "numpy", "onnx"):  # in one process, on two libraries
    trainer = ob.Trainer(graph, learning_rate=0.01, kernels=kernels)
    losses[kernels] = [trainer.step(batch) for _ in range(3)]
losses["batch of 2"] = ob.Trainer(graph).step({name: array[:2] for name, array in batch.items()})
print(json.dumps([NATIVE_DOMAIN, reason_against(), losses]))
"""


def _losses_with(**environment: str) -> list[object]:
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    losses: list[object] = json.loads(done.stdout)
    return losses


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_losses_with_the_library_for_windows(tmp_path: Path) -> None:
    library = tmp_path / "operators.so"
    command = ["cc", "-O2", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    domain, reason, losses = _losses_with(**{OPERATORS_VARIABLE: str(library)})
    assert (domain, reason) == ("onnx_backprop.native", "")
    assert [domain, reason, losses] == ["onnx_backprop.native", *_losses_with()[1:]]


def test_an_installation_without_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from onnx_backprop.ort_ops.native_route import *; print(reason_against())"]
    environment = {**os.environ, OPERATORS_VARIABLE: str(tmp_path / "operators.dll")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == f"this installation has no {tmp_path / 'operators.dll'}. The wheel for Windows does"


def test_what_a_wheel_for_windows_carries_is_what_llvmlite_loads_there() -> None:
    """llvmlite asks LLVM for ELF in a process on Windows; one that has loaded COFF ends at the next function."""
    code = (
        "from onnx_backprop.ort_ops.compiler.objects import _target, backend\n"
        "module = backend().parse_assembly('define void @f() { ret void }')\n"
        "print(*(_target(linked=linked).emit_object(module)[:4].hex() for linked in (False, True)))"
    )
    environment = {**os.environ, "ONNX_BACKPROP_TRIPLE": "x86_64-pc-windows-msvc", "NUMBA_CPU_NAME": "x86-64-v3"}
    environment["NUMBA_CPU_FEATURES"] = ""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    in_process, for_a_linker = done.stdout.split()
    assert in_process == b"\x7fELF".hex()
    assert for_a_linker.startswith("6486"), "COFF for x86-64"


def test_no_call_is_missing_on_windows() -> None:
    code = (
        "import os; del os.fork, os.register_at_fork, os.sched_getaffinity\nimport sys; sys.modules['fcntl'] = None\n"
        + SCRIPT
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
