"""A surrogate of an expensive function, fitted by Newton's method: SciPy's Newton-CG with exact Hessian products.

    python -m models.surrogate

A network of one hidden layer learns a wave of two variables from 200 points. `value_and_grad` gives the loss, its
gradient and the products of its Hessian with vectors; the same start goes through L-BFGS, which has gradients alone.
Exit code 0: the Newton fit ends below 1e-3, 1: not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, numpy_helper, parser
from scipy.optimize import minimize

import onnx_backprop as ob

PARAMETERS = ("w1", "b1", "w2", "b2")


def points(count: int, *, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Places (N, 2) in a square and what the expensive function is there, (N, 1)."""
    x = np.random.default_rng(seed).uniform(-1, 1, (count, 2))
    return x, np.sin(2 * x[:, :1]) * np.cos(x[:, 1:]) + 0.5 * x[:, :1] * x[:, 1:]


def build(hidden: int = 10, *, seed: int = 0) -> ModelProto:
    """x (N, 2), target (N, 1) -> loss, the mean squared error and a little of the weights' squares; in float64."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> surrogate (double[N, 2] x, double[N, 1] target) => (double loss) '
        "<double small = {1e-5}> {"
        " a = Gemm(x, w1, b1) t = Tanh(a) y = Gemm(t, w2, b2) d = Sub(y, target) e = Mul(d, d)"
        " error = ReduceMean <keepdims = 0> (e)"
        " s1 = ReduceSumSquare <keepdims = 0> (w1) s2 = ReduceSumSquare <keepdims = 0> (w2)"
        " s = Add(s1, s2) p = Mul(s, small) loss = Add(error, p) }"
    )
    rng = np.random.default_rng(seed)
    for name, shape in zip(PARAMETERS, ((2, hidden), (hidden,), (hidden, 1), (1,)), strict=True):
        values = rng.standard_normal(shape) if len(shape) > 1 else np.zeros(shape)
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


@dataclass(frozen=True)
class Fit:
    """How a method ended: the loss, the largest entry of the gradient, and how often it asked for what."""

    loss: float
    slope: float
    values: int
    products: int


def fit(method: str, *, count: int = 200, steps: int = 200) -> Fit:
    """Minimise the loss over all weights at once."""
    x, target = points(count)
    f = ob.value_and_grad(build(), PARAMETERS, ["loss"], feeds={"x": x, "target": target}, hvp=True)
    products = {"hessp": f.hvp} if method in ("Newton-CG", "trust-ncg") else {}
    best = minimize(f, f.start, jac=True, method=method, options={"maxiter": steps}, **products)
    return Fit(float(best.fun), float(np.abs(f(best.x)[1]).max()), int(best.nfev), int(best.get("nhev", 0)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit twice; returns the exit code."""
    options = argparse.ArgumentParser(prog="python -m models.surrogate", description=str(__doc__).partition("\n")[0])
    options.add_argument("--steps", type=int, default=200, help="at most (%(default)s)")
    given = options.parse_args(arguments)
    fits = {method: fit(method, steps=given.steps) for method in ("Newton-CG", "L-BFGS-B")}
    for method, one in fits.items():
        print(f"{method}: loss {one.loss:.3g}, slope {one.slope:.1g}, {one.values} gradients, {one.products} products")
    return 0 if fits["Newton-CG"].loss < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
