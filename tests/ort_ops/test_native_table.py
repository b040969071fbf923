"""The table of native kernels."""

from __future__ import annotations

from onnx_backprop.opset import DOMAIN, OPS
from onnx_backprop.opset.operators.registry import BY_STEM
from onnx_backprop.ort_ops import native_table
from onnx_backprop.ort_ops.native_table import KERNELS
from onnx_backprop.ort_ops.runtime.bridge import ELEMENT_TYPES


def test_every_operator_has_one_native_kernel() -> None:
    """The route "native" has no other one: a forgotten entry would be a model that no session can load."""
    names = sorted(k.op.name for k in KERNELS.values() if k.op.domain == DOMAIN)
    assert names == sorted(["MatrixProduct", *(op.name for op in OPS)])


def test_modules_have_the_kernels_that_are_expected_of_them() -> None:
    for module, stems in native_table._LATER.items():
        kernels = native_table._of(module)
        assert [id(kernel.op) for kernel in kernels] == [id(BY_STEM[stem]) for stem in stems], module
        assert {kernel.element_types for kernel in kernels} == {ELEMENT_TYPES}, module
