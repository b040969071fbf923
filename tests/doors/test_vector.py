"""`vector_function` beside differences, and in SciPy's solvers."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from onnx import parser
from scipy.optimize import NonlinearConstraint, approx_fprime, least_squares, minimize, root

import onnx_backprop as ob
from tests.doors.models import B, K, W, X, jacobian_of_waves, residuals, waves

T = np.linspace(0, 5, 60)
TRUE = np.array([2.0, 0.5, 3.0])
MEASURED = TRUE[0] * np.exp(-TRUE[1] * T) * np.sin(TRUE[2] * T)
START = np.array([1.0, 0.2, 2.7])
FEEDS = {"t": T, "measured": MEASURED}


def test_jacobian_and_products() -> None:
    r = ob.vector_function(waves(), feeds={"x": X, "b": B, "k": K})
    np.testing.assert_array_equal(r.start, np.append(X, B))
    expected = jacobian_of_waves(X, B)
    y = np.sin(X + B) @ W
    np.testing.assert_allclose(r(r.start), np.append(y, (y**2).sum()))
    np.testing.assert_allclose(r.jac(r.start), expected)
    operator = r.linear(r.start)
    np.testing.assert_allclose(operator @ np.eye(15), expected, atol=1e-12)
    np.testing.assert_allclose(operator.T @ np.eye(9), expected.T, atol=1e-12)


def test_hessian_beside_differences() -> None:
    r = ob.vector_function(residuals(), wrt=["df", "a"], of=["residual", "error"], feeds=FEEDS)
    x, v = np.array([0.2, 2.7, 1.0]), np.random.default_rng(0).standard_normal(61)
    differences: Any = approx_fprime(x, lambda x: v @ r.jac(x), 1e-6)
    np.testing.assert_allclose(r.hess(x, v), differences, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(r)).jac(x), r.jac(x))


def test_least_squares() -> None:
    r = ob.vector_function(residuals(), wrt=["a", "df"], of=["residual"], feeds=FEEDS)
    dense = least_squares(r, START, jac=r.jac)
    matrix_free = least_squares(r, START, jac=r.linear, tr_solver="lsmr")
    bounded = least_squares(r, START, jac=r.jac, bounds=([0, 0, 0], [1.5, 1, 4]))
    np.testing.assert_allclose(dense.x, TRUE, rtol=1e-6)
    np.testing.assert_allclose(matrix_free.x, TRUE, rtol=1e-6)
    assert bounded.x[0] == pytest.approx(1.5)
    assert dense.nfev < 20  # and none for differences


def test_root() -> None:
    text = """<ir_version: 10, opset_import: ["": 18]> circle (double[N] x) => (double s, double d) <int64 zero = {0}, int64 one = {1}>
        { s0 = ReduceSumSquare<keepdims = 0>(x) four = Constant<value_float = 4.0>() fourd = Cast<to = 11>(four) s = Sub(s0, fourd)
          a = Gather(x, zero) b = Gather(x, one) d = Sub(a, b) }"""
    r = ob.vector_function(parser.parse_model(text), feeds={"x": np.array([1.0, 3.0])})
    for method in ("hybr", "lm"):
        solution = root(r, r.start, jac=r.jac, method=method)
        np.testing.assert_allclose(solution.x, [2**0.5] * 2, err_msg=method)


def test_constraints() -> None:
    """The best fit whose wave stays within 0.9: its multipliers need the Hessians of a vector."""
    f = ob.value_and_grad(residuals(), wrt=["a", "df"], of=["error"], feeds=FEEDS, hvp=True)
    g = ob.vector_function(residuals(), wrt=["a", "df"], of=["y"], feeds=FEEDS)
    for method, options, more in (("trust-constr", {"hessp": f.hvp}, {"hess": g.hess}), ("SLSQP", {}, {})):
        bound = NonlinearConstraint(g, -0.9, 0.9, jac=g.jac, **more)
        solution = minimize(f, START, jac=True, method=method, constraints=[bound], **options)
        assert solution.fun < f(START)[0], method
        assert abs(g(solution.x)).max() == pytest.approx(0.9, abs=1e-3), method


def test_invalid_use_is_refused() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="feeds: expected a value of 'df'"):
        ob.vector_function(residuals(), wrt=["a"])
    with pytest.raises(ob.InvalidArgumentError, match="feeds: expected a value of 'x'"):
        ob.vector_function(waves(), feeds={"b": B, "k": K})
    with pytest.raises(ob.InvalidArgumentError, match="the model has no input 'q'"):
        ob.vector_function(waves(), feeds={"q": B})
    r = ob.vector_function(residuals(), wrt=["a"], feeds={**FEEDS, "df": np.ones(2)})
    with pytest.raises(ob.InvalidArgumentError, match=r"expected a vector of 1 numbers, got an array of shape \(2,\)"):
        r(np.ones(2))
