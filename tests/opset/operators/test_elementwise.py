"""Operators on tensors of one shape: what their bodies refuse, and special numbers on every route."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.opset.bodies.body_models import KNOWLEDGE, answer
from tests.support import single_op
from tests.support.checks import evaluate

f32 = np.float32


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_relu_of_special_numbers(dtype: str, kernels: str) -> None:
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.0**-24, -(2.0**-24)]
    x, dy = (np.asarray(v, f32) for v in np.meshgrid(special, special))
    got = single_op.run("ReLUBackward", {}, [x, dy], dtype=dtype, kernels=kernels)
    np.testing.assert_array_equal(got, np.where(x > 0, dy, f32(0)))


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("shape", [(2, 3), (3,), (), (0, 3), (2, 1, 2, 1)])
def test_relu_body(rng, shape: tuple[int, ...], knowledge: str) -> None:
    if knowledge == "batch" and not shape:
        return
    x, dy = (np.asarray(rng.standard_normal(shape), f32) for _ in range(2))
    got = answer("ReLUBackward", {}, [x, dy], knowledge, constants=False)
    np.testing.assert_array_equal(got, evaluate("ReLUBackward", {}, [x, dy]), strict=True)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 5000), -1),
        ((2, 130, 3), 1),
        ((5, 3, 70), 0),
        ((1, 1), 0),
        ((0, 3), 1),
        ((3, 0), 1),
        ((70,), 0),
        ((2, 3, 200), 1),
    ],
)
def test_softmax_along_any_axis(rng, shape: tuple[int, ...], axis: int, kernels: str) -> None:
    y, dy = (np.asarray(rng.standard_normal(shape), f32) for _ in range(2))
    got = single_op.run("SoftMaxBackward", {"axis": axis}, [dy, y], kernels=kernels)
    expected = evaluate("SoftMaxBackward", {"axis": axis}, [dy, y])
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * scale, strict=True)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("op", ["ReLUBackward", "SoftMaxBackward"])
@pytest.mark.parametrize(
    ("src", "diff_dst"),
    [((2, 3), (3, 2)), ((2, 3), (2, 1)), ((2, 1), (2, 3)), ((2, 3), ()), ((2, 1), (1, 2)), ((6,), (2, 3))],
)
def test_shapes_that_differ_fail_the_run(src, diff_dst, op: str, kernels: str) -> None:
    names = ["src", "diff_dst"] if op == "ReLUBackward" else ["diff_dst", "dst"]
    attributes = {} if op == "ReLUBackward" else {"axis": -1}
    model = single_op.model(op, attributes, [np.zeros((1,), f32), np.zeros((1,), f32)])
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    session = ob.session(model, kernels=kernels)
    with pytest.raises(Exception, match=f"{op}: "):
        session.run(None, {names[0]: np.ones(src, f32), names[1]: np.ones(diff_dst, f32)})
