"""Where the float model gets back a Relu or a Clip that quantisers leave to the rounding behind it."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import onnx_backprop as ob
from tests.converters.quantized.form import F32, scale
from tests.converters.quantized.test_forms import run
from tests.converters.quantized.test_requantize import model

ROUND = " q = QuantizeLinear(p, s, z) h = DequantizeLinear(q, s, z) y = Neg(h)"
BEFORE = {
    "nothing is known": ("p = Neg(x)", True),
    "the input itself": ("p = Identity(x)", True),
    "Relu": ("p = Relu(x)", False),
    "Sigmoid": ("p = Sigmoid(x)", False),
    "behind a Relu": (
        "r = Relu(x) a = Mul(r, two) t = Transpose <perm = [1, 0]> (a) p = Concat <axis = 0> (t, t)",
        False,
    ),
    "one of two is positive": ("r = Relu(x) n = Neg(r) p = Concat <axis = 0> (r, n)", True),
    "times a negative number": ("r = Relu(x) p = Mul(r, less)", True),
    "a Clip from 0 on": ("p = Clip(x, nought, two)", False),
    "a Clip from -1 on": ("p = Clip(x, less, two)", True),
    "less one": ("r = Relu(x) p = Sub(r, two)", True),
}
X = np.array([[-1.0, 0.5, 1.5, 2.5], [0, -0.2, 3, 1]], F32)
NUMBERS = {"nought": scale(0), "two": scale(2), "less": scale(-1)}


@pytest.mark.parametrize("name", BEFORE)
def test_a_range_from_zero_on(name: str) -> None:
    """A Relu comes back where what is rounded may lie below 0, and nowhere else; y is what the file has."""
    before, cut = BEFORE[name]
    original = model(before + ROUND, {"s": scale(0.025), "z": np.array(-128, np.int8)} | NUMBERS)
    floats = ob.dequantize(original)
    relus = sum(n.op_type == "Relu" for n in floats.graph.node) - sum(n.op_type == "Relu" for n in original.graph.node)
    assert relus == cut
    np.testing.assert_allclose(run(floats, X), run(original, X), rtol=0, atol=0.0126)


@pytest.mark.parametrize(
    ("s", "z", "ends"),
    [
        (6 / 255, -128, (0, 6)),
        (1 / 255, -128, (0, 1)),
        (2 / 255, 0, (-1, 1)),
        (6 / 255, -127, None),
        (6.1 / 255, -128, (0, np.inf)),
        (0.02, 3, None),
        (-0.02, -128, None),
    ],
)
def test_ranges_of_clips(s: float, z: int, ends: tuple[float, float] | None) -> None:
    """0 to 6, 0 to 1 and -1 to 1 are those of Clip; other ends are where calibration has ended, and cut nothing."""
    original = model("p = Neg(x)" + ROUND, {"s": scale(s), "z": np.array(z, np.int8)})
    x = np.linspace(-9, 9, 8, dtype=F32).reshape(2, 4)
    expected = x if ends is None else -np.clip(-x, *ends)
    np.testing.assert_allclose(run(ob.dequantize(original), x), expected, rtol=1e-6)


def test_the_gradient_stops_where_the_file_cuts() -> None:
    original = model("p = Neg(x)" + ROUND, {"s": scale(0.025), "z": np.array(-128, np.int8)})
    graph = ob.backward(ob.dequantize(original), wrt=["x"])
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    dy = next(i.name for i in session.get_inputs() if i.name != "x") if len(session.get_inputs()) > 1 else ""
    feeds = {"x": X} | ({dy: np.ones_like(X)} if dy else {})
    np.testing.assert_array_equal(session.run(["x_grad"], feeds)[0], (X < 0).astype(F32))
