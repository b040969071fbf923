"""MaxPool with SAME padding: MaxPoolBackward stands for its gradient unless a dilation or a long stride is along any axis.

Where lengths are known, the padding of dilated windows is, too.
"""

from __future__ import annotations

import pytest
from onnx import parser

import onnx_backprop as ob


@pytest.mark.parametrize(
    ("dilations", "strides", "expected"),
    [
        ([1, 1], [1, 1], True),
        ([1, 1], [2, 3], True),
        ([1, 2], [1, 1], False),
        ([2, 1], [1, 1], False),
        ([1, 1], [1, 4], False),
        ([1, 1], [3, 1], False),
    ],
)
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("lengths", ["9,9", "H,W"])
def test_which_gradients(lengths: str, auto_pad: str, dilations: list[int], strides: list[int], expected: bool) -> None:
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[1,2,{lengths}] x) => (float[?,?,?,?] y)
        {{ y = MaxPool<kernel_shape = [2, 3], auto_pad = "{auto_pad}", dilations = {dilations}, strides = {strides}>(x) }}
    """)
    used = {
        node.op_type for node in ob.backward(model, wrt=["x"], kernels="native").graph.node if node.domain == ob.DOMAIN
    }
    assert ("MaxPoolBackward" in used) == (expected or (lengths == "9,9" and max(dilations) > 1))
