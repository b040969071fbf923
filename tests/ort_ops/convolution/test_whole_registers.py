"""Channels last, in numbers of channels that fill registers: tiles that go straight into the output, if it is float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnx_backprop.ort_ops.compiler.machine import VECTOR
from tests.support import single_op
from tests.support.checks import assert_rounded, evaluate

f32 = np.float32


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("registers", [1, 2, 3])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 2)])
def test_exact_sums(rng: np.random.Generator, kernel: tuple[int, int], registers: int, dtype: str) -> None:
    """Sums of small integers are exact in every type, and rounded once."""
    channels, lengths = registers * VECTOR, (7, 29)
    ends = [k - 1 for k in kernel]
    attrs: dict[str, Any] = {"strides": [1, 1], "dilations": [1, 1], "pads_begin": [0, 0], "pads_end": ends}
    attrs |= {"data_format": "NXC", "weights_format": "OIX"}
    x = rng.integers(-3, 4, (2, *lengths, channels)).astype(f32)
    w = rng.integers(-1, 2, (channels, channels, *kernel)).astype(f32)
    dy = rng.integers(-3, 4, (2, *lengths, channels)).astype(f32)
    bias = rng.integers(-9, 10, channels).astype(f32)
    for op, more, inputs in (
        ("Convolution", {}, [x, w]),
        ("Convolution", {}, [x, w, bias]),
        ("ConvolutionBackwardData", {"dst_shape": list(x.shape)}, [dy, w]),
    ):
        expected = evaluate(op, attrs | more, inputs, dtype).astype(f32)
        got = single_op.run(op, attrs | more, inputs, dtype=dtype, kernels="native")
        assert_rounded(got, expected, dtype, error=0.0, message=f"{op} {kernel}")
