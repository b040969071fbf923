"""Third derivatives of x -> Σ op(x)³ along three directions, for smooth operators, against differences in float64.

Not of Erf, which onnx's reference evaluator computes in float32.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, parser

import onnx_backprop as ob
from tests.support.gradient_checks import float64_run, retyped, session_run

SMOOTH = {
    "Acos": "y = Acos(h)",
    "Asinh": "y = Asinh(x)",
    "Atan": "y = Atan(x)",
    "Cosh": "y = Cosh(x)",
    "Div": "y = Div(w, e)",
    "Einsum": 'y = Einsum<equation = "ij,kj->ik">(x, w)',
    "Elu": "y = Elu(e)",
    "Exp": "y = Exp(x)",
    "Gelu": 'y = Gelu<approximate = "tanh">(x)',
    "Gemm": "y = Gemm<transB = 1>(x, w)",
    "InstanceNormalization": "t = Unsqueeze(x, axes) y = InstanceNormalization<epsilon = 0.1>(t, s, s)",
    "LayerNormalization": "y = LayerNormalization<epsilon = 0.1>(x, b)",
    "Log": "y = Log(e)",
    "LogSoftmax": "y = LogSoftmax(x)",
    "MatMul": "t = Transpose(x) y = MatMul(x, t)",
    "Mish": "y = Mish(x)",
    "Mul": "y = Mul(x, w)",
    "Pow": "y = Pow(e, w)",
    "ReduceLogSumExp": "y = ReduceLogSumExp(x)",
    "ReduceProd": "y = ReduceProd(e)",
    "Sigmoid": "y = Sigmoid(x)",
    "Sin": "y = Sin(x)",
    "Softmax": "y = Softmax(x)",
    "Softplus": "y = Softplus(x)",
    "Tanh": "y = Tanh(x)",
}
SHAPE = (2, 3)


def model_of(text: str) -> ModelProto:
    """total = Σ y³; e > 0 and |h| < 1 for operators that want it."""
    return parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[2, 3] x) => (float total) '
        "<float[2, 3] w = {0.5, -1.25, 2.0, 1.5, -0.75, 1.0}, float[3] b = {1.0, 0.5, -2.0}, float[2] s = {1.0, 0.5}, "
        "int64[1] axes = {0}, float two = {2.0}> "
        f"{{ m = Mul(x, x) e = Add(m, two) t0 = Tanh(x) h = Div(t0, two) {text} "
        "c = Mul(y, y) d = Mul(c, y) total = ReduceSum<keepdims = 0>(d) }"
    )


@pytest.mark.parametrize("op", SMOOTH)
def test_third_derivative(op: str) -> None:
    """∂³s along u, v, w: <∇(<∇(<∇s, u>), v>), w>, every ∇ by `backward` of the result of the one before."""
    model = model_of(SMOOTH[op])
    rng = np.random.default_rng(len(op))
    x, u, v, w = (rng.uniform(-1, 1, SHAPE) for _ in "xuvw")
    derived = ob.backward(model, wrt=["x"], of=["total"])
    feeds = {"x": x.astype(np.float32)}
    for along in (u, v):
        gradient = ob.derivatives(derived)[-1].results["x"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ob.OnnxBackpropWarning)
            derived = ob.backward(derived, wrt=["x"], of=[gradient])
        feeds[ob.derivatives(derived)[-1].seeds[gradient]] = along.astype(np.float32)
    names = [value.name for value in derived.graph.output]
    third = dict(zip(names, session_run(derived)(feeds), strict=True))[ob.derivatives(derived)[-1].results["x"]]
    got = float((third.astype(np.float64) * w).sum())
    run = float64_run(retyped(model, TensorProto.FLOAT))
    h = 2e-3
    differences = sum(
        a * b * c * float(run({"x": x + h * (a * u + b * v + c * w)})[0])
        for a, b, c in itertools.product((1, -1), repeat=3)
    )
    expected = differences / (8 * h**3)
    scale = max(1.0, abs(expected), float(np.abs(third * w).sum()))
    assert abs(got - expected) <= 2e-4 * scale, (got, expected)
    assert abs(expected) > 1e-3
