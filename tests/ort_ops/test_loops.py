"""The route "numba": which operators have loops, that sessions run them, and what is said without Numba."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from onnx_backprop.opset.maths.interpolation import Taps, matrix
from onnx_backprop.opset.maths.resize import COORDINATES, NEAREST_MODES, ResizeAxis, resize_taps
from onnx_backprop.ort_ops import loops, numpy_route
from onnx_backprop.ort_ops.loops import axis as one_axis
from onnx_backprop.ort_ops.loops import resize
from tests.declarations.registry import VALID
from tests.support import single_op

f32 = np.float32
OPERATORS = {
    "InterpolateBackward",
    "InterpolateBackprop",
    "ResampleGrad",
    "ResizeGrad",
    "Convolution",
    "ConvolutionBackwardData",
    "ConvolutionBackwardWeights",
    "ConvTransposeBackwardData",
    "ConvTransposeBackwardWeights",
    "ConvTransposeBackpropFilters",
}
WEIGHTED: list[dict[str, Any]] = [
    {"mode": mode, "exclude_outside": exclude, "antialias": antialias, "cubic_coeff_a": a}
    for mode, exclude, antialias in product(("linear", "cubic"), (False, True), (False, True))
    for a in ((-0.75, -0.5) if mode == "cubic" else (-0.75,))
]
NEAREST: list[dict[str, Any]] = [{"mode": "nearest", "nearest_mode": mode} for mode in NEAREST_MODES]


def test_the_operators_of_the_specifications_have_loops() -> None:
    assert set(loops.BY_LOOPS) == OPERATORS


@pytest.mark.parametrize("op", sorted(VALID))
def test_sessions_run_the_loops_and_the_references_of_others(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def noted(name: str, reference: Any) -> Any:
        return lambda *arguments: (ran.append(name), reference(*arguments))[1]

    by_loops = {n: replace(o, reference=noted(n, o.reference)) for n, o in loops.BY_LOOPS.items()}
    monkeypatch.setattr(numpy_route, "by_loops", lambda: by_loops)
    attributes, inputs = VALID[op]
    arrays = [np.ones(i, f32) if isinstance(i, tuple) else i for i in inputs]
    results = [single_op.run_all(op, attributes, arrays, kernels=kernels) for kernels in ("numba", "numpy")]
    assert ran == ([op] if op in OPERATORS else [])
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, strict=True)


@pytest.mark.parametrize("attributes", [*NEAREST, *WEIGHTED], ids=lambda a: "-".join(map(str, a.values())))
def test_taps_of_resize(attributes: Mapping[str, Any]) -> None:
    """Written out once more, they are those of the reference; both compute x in float32, so ties are the same.

    With exclude_outside cubic weights are divided by a sum that may be a thousandth: float64 has 13 digits left then.
    """
    atol = 0 if attributes["mode"] == "nearest" else 1e-11
    lengths, scales = product((1, 2, 3, 5, 8, 14), (1, 2, 3, 6, 7, 17)), (None, 0.4, 1.0, 1.7)
    for coordinates, (length, out), scale in product(COORDINATES, lengths, scales):
        axis = ResizeAxis(
            length=length,
            out=out,
            scale=float(f32(out) / f32(length)) if scale is None else float(f32(scale)),
            coordinates=coordinates,
            roi=(0.2, 0.7) if out % 2 else (-0.5, 1.25),
            copied=length == out and bool(attributes.get("antialias")),
            **attributes,
        )
        got, expected = matrix(Taps(*resize.taps(axis), length)), matrix(resize_taps(axis))
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol, strict=True, err_msg=str(axis))


@pytest.mark.parametrize("antialias", [0, 1])
def test_an_empty_gradient_of_resize_gives_zeros(antialias: int) -> None:
    """Its scale, O/I, is 0: nothing may be divided by it."""
    inputs = [np.ones((2, 0), f32), np.ones((2, 3), f32), None, None, np.array([2, 0], np.int64)]
    dx = loops.BY_LOOPS["ResizeGrad"].evaluate(inputs, {"mode": "linear", "antialias": antialias})
    np.testing.assert_array_equal(dx, np.zeros((2, 3), f32), strict=True)


@pytest.mark.parametrize("pixel", [-1, 3])
def test_a_tap_outside_is_refused_before_the_loop_writes_there(pixel: int) -> None:
    taps = np.array([[0], [pixel]]), np.ones((2, 1))
    with pytest.raises(IndexError, match=r"to . of axis 1, which has 3"):
        one_axis.transposed(taps, np.ones((2, 2)), 1, 3)


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import numpy as np, onnxruntime, onnx_backprop as ob
from tests.ort_ops.test_numpy_route import CONV_DATA, DY, W
from tests.support import single_op
model = single_op.model("ConvolutionBackwardData", CONV_DATA | {"dst_shape": [1, 1, 5]}, [DY, W])
for kernels in ("numpy", "onnx"):
    print(ob.session(model, kernels=kernels).run(None, {"diff_dst": DY, "weights": W})[0].ravel().tolist())
def in_a_stock_session():
    options = ob.register_ops(onnxruntime.SessionOptions())
    attached = ob.use_kernels(model, "numba").SerializeToString()
    onnxruntime.InferenceSession(attached, options).run(None, {"diff_dst": DY, "weights": W})
for refused in (lambda: ob.session(model, kernels="numba"), in_a_stock_session):
    try:
        refused()
    except Exception as e:
        print(type(e).__name__, str(e))
"""


def test_without_numba_a_sentence_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *answers, refused, failed = done.stdout.splitlines()
    assert answers == ["[10.0, 102.0, 20.0, 203.0, 30.0]"] * 2
    sentence = 'kernels="numba" needs Numba: '
    assert refused.startswith(f"KernelError {sentence}")
    assert sentence in failed
    assert "pip install 'onnx-backprop[numba]'" in refused
    assert "pip install 'onnx-backprop[numba]'" in failed
