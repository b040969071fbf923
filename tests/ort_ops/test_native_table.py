"""The table of native kernels."""

from __future__ import annotations

from onnx_backprop.opset import DOMAIN, OPS
from onnx_backprop.ort_ops.native_table import KERNELS


def test_every_operator_has_one_native_kernel() -> None:
    """The route "native" has no other one: a forgotten entry would be a model that no session can load."""
    names = sorted(k.op.name for k in KERNELS.values() if k.op.domain == DOMAIN)
    assert names == sorted(["MatrixProduct", *(op.name for op in OPS)])
