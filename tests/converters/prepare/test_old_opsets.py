"""Models below opset 18: the gradient is that of the model as its own opset defines it.

Operators changed their meaning between versions (Softmax over flattened axes, attributes that became inputs, …), so
the differences are taken of the original model, which onnxruntime runs under its own opset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, parser

from tests.support.gradient_checks import SMOOTH, check_gradient, positive, spread

SHAPE = (2, 3, 4, 6)
I64 = np.int64

# nodes, opsets, what is not the default: shape of x, further inputs (arrays), names to differentiate by
CASES: list[tuple[str, list[int], dict[str, Any]]] = [
    *(
        (f"y = {op} {axis} (x)", opsets, {})
        for op in ("Softmax", "LogSoftmax")
        for axis, opsets in [("", [7, 11, 12, 13]), ("<axis = 2>", [7, 11, 13]), ("<axis = 0>", [7, 11, 13])]
    ),
    ("y = Softmax <axis = -1> (x)", [11, 13], {}),
    *(
        (f"h = Hardmax {axis} (x) s = Sin(x) y = Mul(h, s)", opsets, {})
        for axis, opsets in [("", [7, 12, 13]), ("<axis = 2>", [7, 12]), ("<axis = 0>", [7, 12]), ("<axis = -1>", [11])]
    ),
    ("y = Clip <min = -0.5, max = 0.5> (x)", [7, 10], {}),
    ("y = Clip <max = 0.3125> (x)", [7], {}),
    ("y = Dropout <ratio = 0.5> (x)", [7, 10], {}),
    ("y = Pad <pads = [0, 1, 0, 2, 0, 0, 1, 0]> (x)", [7, 10], {}),
    ('y = Pad <mode = "reflect", pads = [0, 1, 0, 2, 0, 0, 1, 0]> (x)', [7, 10], {}),
    ('y = Pad <mode = "edge", pads = [0, 0, 1, 2, 0, 0, 1, 0]> (x)', [7, 10], {}),
    ("y = Pad <pads = [0, 0, -1, 2, 0, 0, 1, 0], value = 0.7> (x)", [7], {}),
    *(
        (f'y = Pad <mode = "{mode}", pads = [0, 1, 0, 2, 0, 0, 1, 0], value = 2.0> (x)', [7, 10], {})
        for mode in ("reflect", "edge")  # which do not use the value
    ),
    ("y = Slice <starts = [1, 0], ends = [3, -1], axes = [1, 3]> (x)", [7, 9], {}),
    ("y = Slice <starts = [0, 1], ends = [2, 100]> (x)", [7], {}),
    ("y = ReduceSum <axes = [1, 3]> (x)", [7, 11], {}),
    ("y = ReduceSum <axes = [-1], keepdims = 0> (x)", [11], {}),
    ("y = ReduceMean <axes = [2], keepdims = 0> (x)", [7, 11, 13, 17], {}),
    ("y = ReduceMean (x)", [7, 13], {}),
    ("y = ReduceL2 <axes = [1]> (x)", [7, 13, 17], {}),
    ("y = ReduceMax <axes = [1]> (x)", [7, 11, 13], {}),
    ("y = ReduceLogSumExp <axes = [0, 1]> (x)", [11, 17], {}),
    ("z = Unsqueeze <axes = [0, 2]> (x) y = Squeeze <axes = [0]> (z)", [7, 11], {}),
    ("y = Unsqueeze <axes = [-1]> (x)", [7, 10], {}),  # which onnxruntime takes before opset 11, too
    ("y = Squeeze <axes = [-1]> (x)", [7, 10], {"shape": (2, 3, 1)}),
    ("y, z = Split <axis = 3, split = [2, 4]> (x)", [7, 11], {}),
    ("a, b = Split <axis = -1> (x) y = Mul(a, b)", [11, 13], {}),
    ("y = AveragePool <kernel_shape = [2, 3], pads = [0, 1, 1, 1], strides = [1, 2]> (x)", [7, 10, 11], {}),
    ("y = AveragePool <kernel_shape = [2, 2], count_include_pad = 1, pads = [1, 1, 1, 1]> (x)", [7, 10], {}),
    ("y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)", [7, 8, 10, 11, 12], {}),
    ('y = MaxPool <kernel_shape = [3, 3], auto_pad = "SAME_UPPER", strides = [2, 2]> (x)', [7, 11], {}),
    ("y = Flatten <axis = 2> (x)", [7, 9, 11], {}),
    ("y = Flatten <axis = -1> (x)", [11], {}),
    ("y = DepthToSpace <blocksize = 2> (x)", [7, 11, 13], {"shape": (2, 8, 2, 3)}),
    ('y = DepthToSpace <blocksize = 2, mode = "CRD"> (x)', [11], {"shape": (2, 8, 2, 3)}),
    (
        "y = BatchNormalization (x, s, b, m, v)",
        [7, 9, 14, 15],
        {"wrt": "xsb", **{name: positive((3,), 7) for name in "sbmv"}},
    ),
    ("y = PRelu (x, s)", [7, 9], {"wrt": "xs", "s": positive((3, 1, 1))}),
    ("y = Pow (x, s)", [7, 12, 13], {"s": np.float32([2, 3, 2, 3, 2, 1])}),
    (
        "y = Gemm <alpha = 0.5, beta = 2.0, transA = 1> (x, w, b)",
        [7, 9, 11],
        {"wrt": "xwb", "shape": (4, 3), "w": spread((4, 5)), "b": spread((5,))},
    ),
    ("y = MatMul (x, w)", [7, 9], {"wrt": "xw", "w": spread((6, 5))}),
    ("y = Sum (x, w, x)", [8], {"wrt": "xw", "w": spread((6,))}),
    ("y = Mean (x, w)", [8], {"wrt": "xw", "w": spread((6,))}),
    ("y = LeakyRelu <alpha = 0.2> (x)", [7, 15], {}),
    ("y = HardSigmoid (x)", [7], {}),
    ("y = Transpose (x)", [7, 13], {}),
    ("y = Cast <to = 1> (x)", [7, 9, 13], {}),
    ("y = Gather <axis = 1> (x, i)", [7, 11], {"i": I64([[0, 2], [1, 1]])}),
    ("y = Expand (x, i)", [8, 13], {"shape": (3, 1, 4), "i": I64([2, 3, 5, 4])}),
    ("y = Tile (x, i)", [7, 13], {"i": I64([1, 2, 1, 2])}),
    ("y = Where (k, x, w)", [9], {"wrt": "xw", "k": np.arange(6) % 2 > 0, "w": spread((6,))}),
    ("y = Concat <axis = 1> (x, x)", [7, 11], {}),
    ("y = Mod <fmod = 1> (x, w)", [10], {"w": np.float32([0.3, 0.4, 0.5, 0.6, 0.7, 0.8]) * 5}),
]


@pytest.mark.parametrize(
    ("nodes", "opset", "given"),
    [(nodes, opset, given) for nodes, opsets, given in CASES for opset in opsets],
    ids=lambda v: v if isinstance(v, int | str) else "",
)
def test_gradient(nodes: str, opset: int, given: dict[str, Any]) -> None:
    inputs = {k: v for k, v in given.items() if isinstance(v, np.ndarray)}
    feeds = {"x": spread(given.get("shape", SHAPE)), **inputs}
    model = parser.parse_model(f'<ir_version: 7, opset_import: ["" : {opset}]> g () => () {{ {nodes} }}')
    for name, array in feeds.items():
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.input.append(helper.make_tensor_value_info(name, element, array.shape))
    model.graph.output.append(helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(np.dtype("f4")), None))
    check_gradient(model, feeds, list(given.get("wrt", "x")), oracle=SMOOTH)
