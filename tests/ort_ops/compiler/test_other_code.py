"""Machine code that is not that of the function asked for is not called."""

from __future__ import annotations

import pytest

from onnx_backprop.ort_ops.compiler import objects
from onnx_backprop.ort_ops.compiler.decorators import exported
from onnx_backprop.ort_ops.compiler.values import INT


def test_a_file_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    @exported(INT, INT)
    def quadruple(x):
        return 4 * x

    @exported(INT, INT)
    def quintuple(x):
        return 5 * x

    code = quadruple.machine_code()
    monkeypatch.setattr(objects, "read", lambda _: code)
    with pytest.raises(RuntimeError, match=f"no machine code for {quintuple.name}"):
        _ = quintuple.address
    assert quadruple.address
