"""The same answers with registers of another length than this processor's."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from onnx_backprop.ort_ops.runtime.compile import VECTOR
from tests.ort_ops import registers
from tests.ort_ops.convolution import test_depthwise, test_depthwise_cells, test_panels
from tests.ort_ops.interpolation import test_gather
from tests.support import single_op
from tests.support.checks import evaluate


def check() -> None:
    """Some cases of every kind of kernel that has vector code of its own; one process compiles them once."""
    for case in test_depthwise.CASES[::2]:
        test_depthwise.run_case(case, "f32", np.random.default_rng(5))
    for case in test_depthwise_cells.CASES[1:13:2]:
        test_depthwise_cells.run_case(case, "f32", np.random.default_rng(5))
    for case in test_panels.CASES[::2]:
        test_panels.run_case(case, "f32", np.random.default_rng(5))
    test_gather.check(5)
    ones = {key: [1, 1] for key in ("strides", "dilations", "pads_begin", "pads_end")}
    attributes = ones | {"data_format": "NCX", "weights_format": "OIX"}  # Winograd's tiles
    rng = np.random.default_rng(5)
    x, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((2, 18, 11, 21), (31, 18, 3, 3)))
    got = single_op.run("Convolution", attributes, [x, w], kernels="numba")
    np.testing.assert_array_equal(got, evaluate("Convolution", attributes, [x, w]))


# 4: see test_native_safety, which calls every operator
@pytest.mark.parametrize("length", sorted({8, 16} - {VECTOR}))
def test_other_registers(length: int) -> None:
    code = "from tests.ort_ops.test_other_registers import check; check(); print('equal')"
    environment = os.environ | registers.environment(length)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "equal\n", done.stderr
