"""The language of kernels has arithmetic with numbers alone."""

from __future__ import annotations

import pytest

from onnx_backprop.ort_ops.compiler.decorators import exported
from onnx_backprop.ort_ops.compiler.values import INT, CompileError


def test_tuples_are_no_numbers() -> None:
    @exported(INT, INT)
    def less(x):
        pair = x, x
        return 1 if pair < x else 0

    with pytest.raises(CompileError, match="no arithmetic with"):
        _ = less.address
