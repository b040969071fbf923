"""Gradients of DFT and STFT."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob
from tests.support.gradient_checks import VARIANTS, Case, Oracle, build, case, check_cases, session_run

WIDE = Oracle("onnxruntime", 0.5, 2e-5)  # the transforms are linear in each input
N = [("", {}), (", n", {"n": np.array(3)}), (", n", {"n": np.array(4)}), (", n", {"n": np.array(8)})]
ROWS = (2, 5, 3)  # batch, signal, signal
REAL = "inverse = 1, onesided = 1"


def fourier(attributes: str, more: str, constants: dict, x: tuple[int, ...], **given: object) -> Case:
    return case(f"y = DFT <{attributes}> (x{more})", x=x, constants=constants, oracle=WIDE, skips=["half"], **given)


CASES = [
    *(
        fourier(f"axis = {axis}, {flags}", more, constants, (*ROWS, parts), until=19, note="17")
        for axis, flags, parts in [
            (1, "inverse = 0", 1),
            (1, "inverse = 0", 2),
            (2, "inverse = 1", 2),
            (1, "inverse = 1", 1),
            (-3, "onesided = 1", 1),
        ]
        for more, constants in N
    ),
    *(
        fourier(flags, more, constants, (*ROWS, parts), since=20)
        for flags, parts in [("inverse = 0", 1), ("inverse = 0", 2), ("inverse = 1", 2), ("inverse = 1", 1),
                             ("onesided = 1", 1)]
        for more, constants in N
    ),
    *(
        fourier(flags, ", n, axis", {"n": np.array(n), "axis": np.array(axis)}, (*ROWS, parts), since=20)
        for flags, parts in [("inverse = 0", 2), ("onesided = 1", 1)]
        for n in (4, 7)
        for axis in (0, 1, -3)
    ),
    # the inverse of a one-sided spectrum: with 3 entries 4 or 5 samples, without a number 2 (entries - 1)
    *(
        fourier(REAL, ", n, axis", {"n": np.array(n), "axis": np.array(axis)}, (*x, 2), since=20)
        for n in (4, 5)
        for x, axis in [((3, 2), 0), ((1, 3, 2), 1), ((2, 3), -2)]
    ),
    *(fourier(REAL, more, {"n": np.array(7)} if more else {}, (2, 4, 2), since=20) for more in ("", ", n")),
    fourier(REAL, ', "", axis', {"axis": np.array(1)}, (*ROWS, 2), since=20),
    *(
        case(f"y = STFT <onesided = {sided}> (x, s{more})", x=(2, 9, parts), oracle=WIDE, skips=["half"],
             constants={"s": np.array(step)} | constants, **window)
        for sided, parts in [(1, 1), (0, 1), (0, 2)]
        for step in (1, 3)
        for more, constants, window in [
            (", w", {}, {"w": (4,)}),
            (", w, n", {"n": np.array(5)}, {"w": (5,)}),
            (', "", n', {"n": np.array(4)}, {}),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


def test_a_spectrum_with_too_many_or_too_few_entries() -> None:
    """onnxruntime neither cuts nor fills it as the standard has it, so there is no gradient that is right by both."""
    for entries in (2, 4):
        case = fourier(REAL, ", n", {"n": np.array(5)}, (1, entries, 2), since=20)
        model, _, wrt = build(case, opset=20)
        with pytest.raises(
            ob.UnsupportedAttributeError, match=f"dft_length that fits a one-sided spectrum of {entries}"
        ):
            ob.backward(model, wrt=wrt)
        model, feeds, wrt = build(case, opset=20, variant="fed")
        training = session_run(ob.backward(model, wrt=wrt))
        with pytest.raises(Exception, match="Reshape"):
            training(feeds | {"y_grad": np.ones((1, 5, 1), np.float32)})


@pytest.mark.parametrize("n", [8, 37, 48])
def test_doubles_stay_doubles(n: int, rng: np.random.Generator) -> None:
    """onnxruntime's inverse transform divides by a length in float32, so that the gradient does without one."""
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (double[1, {n}, 1] x) => (double[1, {n}, 2] y) {{ y = DFT<axis = 1>(x) }}'
    )
    feeds = {"x": rng.standard_normal((1, n, 1)), "y_grad": rng.standard_normal((1, n, 2))}
    (dx,) = ob.session(ob.backward(model, wrt=["x"])).run(["x_grad"], feeds)
    matrix = np.fft.fft(np.eye(n))
    expected = matrix.real @ feeds["y_grad"][0, :, 0] + matrix.imag @ feeds["y_grad"][0, :, 1]
    np.testing.assert_allclose(np.asarray(dx)[0, :, 0], expected, rtol=0, atol=1e-12)
