"""Conv, GRU, LSTM and RNN in other operators: onnxruntime computes the same, in float64 too, for which it has no kernels."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

from onnx_backprop.converters.derivatives.written_out import LONGEST, written_out

LSTM = {"w": (1, 16, 3), "r": (1, 16, 4)}
BOTH = {"w": (2, 16, 3), "r": (2, 16, 4), "b": (2, 32), "h0": (2, 2, 4), "c0": (2, 2, 4)}
# graph in double, weights, x, whether it is written out
CASES = {
    "strides, pads, dilations, groups": (
        "(double[2, 4, 7, 6] x) => (double[2, 6, 3, 3] y)"
        " { y = Conv <strides = [2, 2], pads = [1, 0, 0, 1], dilations = [1, 2], group = 2> (x, w, b) }",
        {"w": (6, 2, 2, 2), "b": (6,)},
        (2, 4, 7, 6),
        True,
    ),
    "1-D": ("(double[2, 4, 7] x) => (double[2, 6, 5] y) { y = Conv (x, w) }", {"w": (6, 4, 3)}, (2, 4, 7), True),
    "3-D, any batch": (
        "(double[N, 4, 3, 3, 3] x) => (double[N, 6, 2, 2, 2] y) { y = Conv (x, w) }",
        {"w": (6, 4, 2, 2, 2)},
        (2, 4, 3, 3, 3),
        True,
    ),
    "same pads": (
        '(double[2, 4, 7] x) => (double[2, 6, 7] y) { y = Conv <auto_pad = "SAME_UPPER"> (x, w) }',
        {"w": (6, 4, 3)},
        (2, 4, 7),
        False,
    ),
    "both directions": (
        "(double[5, 2, 3] x) => (double[5, 2, 2, 4] y, double[2, 2, 4] h, double[2, 2, 4] c)"
        ' { y, h, c = LSTM <hidden_size = 4, direction = "bidirectional"> (x, w, r, b, , h0, c0) }',
        BOTH,
        (5, 2, 3),
        True,
    ),
    "reverse, any batch": (
        '(double[5, N, 3] x) => (double[1, N, 4] h) { y, h = LSTM <hidden_size = 4, direction = "reverse"> (x, w, r) }',
        LSTM,
        (5, 2, 3),
        True,
    ),
    "one step": (
        "(double[1, 2, 3] x) => (double[1, 1, 2, 4] y) { y = LSTM <hidden_size = 4> (x, w, r) }",
        LSTM,
        (1, 2, 3),
        True,
    ),
    "GRU": (
        "(double[5, 2, 3] x) => (double[5, 2, 2, 4] y, double[2, 2, 4] h)"
        ' { y, h = GRU <hidden_size = 4, direction = "bidirectional"> (x, w, r, b, , h0) }',
        {"w": (2, 12, 3), "r": (2, 12, 4), "b": (2, 24), "h0": (2, 2, 4)},
        (5, 2, 3),
        True,
    ),
    "GRU, linear before reset": (
        "(double[5, N, 3] x) => (double[1, N, 4] h)"
        ' { y, h = GRU <hidden_size = 4, linear_before_reset = 1, direction = "reverse"> (x, w, r, b) }',
        {"w": (1, 12, 3), "r": (1, 12, 4), "b": (1, 24)},
        (5, 2, 3),
        True,
    ),
    "GRU without biases": (
        "(double[3, 2, 3] x) => (double[3, 1, 2, 4] y, double[3, 1, 2, 4] late)"
        " { y = GRU <hidden_size = 4> (x, w, r) late = GRU <hidden_size = 4, linear_before_reset = 1> (x, w, r) }",
        {"w": (1, 12, 3), "r": (1, 12, 4)},
        (3, 2, 3),
        True,
    ),
    "RNN": (
        "(double[5, 2, 3] x) => (double[5, 1, 2, 4] y, double[1, 2, 4] h) { y, h = RNN <hidden_size = 4> (x, w, r, b, , h0) }",
        {"w": (1, 4, 3), "r": (1, 4, 4), "b": (1, 8), "h0": (1, 2, 4)},
        (5, 2, 3),
        True,
    ),
    "clipped": (
        "(double[5, 2, 3] x) => (double[1, 2, 4] h) { y, h = LSTM <hidden_size = 4, clip = 0.5> (x, w, r) }",
        LSTM,
        (5, 2, 3),
        False,
    ),
    "long": (
        f"(double[{LONGEST + 1}, 2, 3] x) => (double[1, 2, 4] h) {{ y, h = LSTM <hidden_size = 4> (x, w, r) }}",
        LSTM,
        (LONGEST + 1, 2, 3),
        False,
    ),
}


def run(model: ModelProto, x: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(value) for value in onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})]


@pytest.mark.parametrize("name", CASES)
def test_same_values(name: str) -> None:
    text, shapes, size, handled = CASES[name]
    rng = np.random.default_rng(0)
    weights = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
    models = {}
    for word, dtype in (("double", np.float64), ("float", np.float32)):
        model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {text.replace("double", word)}')
        model.graph.initializer.extend(numpy_helper.from_array(w.astype(dtype), key) for key, w in weights.items())
        models[word] = model
    x = rng.standard_normal(size)
    double, single = written_out(models["double"], steps=False), written_out(models["float"], steps=True)
    assert (double is not models["double"]) == handled
    assert written_out(models["float"], steps=False) is models["float"]
    assert (single is not models["float"]) == handled
    assert not any(node.metadata_props for node in (*double.graph.node, *single.graph.node))
    expected = run(models["float"], x.astype(np.float32))
    for actual in [run(single, x.astype(np.float32)), *([run(double, x)] if handled else [])]:
        for value, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(value, other, atol=1e-5)


def test_a_large_image_of_float32_is_left_to_its_kernel() -> None:
    text = "(float[1, 4, 12, 12] x) => (float[1, 4, 10, 10] y) { y = Conv (x, w) }"
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {text}')
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4, 3, 3), np.float32), "w"))
    assert written_out(model, steps=True) is model
