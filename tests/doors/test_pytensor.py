"""`ob.pytensor.op` beside PyTensor's own mathematics, and a likelihood of one row sampled by PyMC's NUTS."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from tests.doors.models import B, K, W, X, row, waves, weights_of

pytensor: Any = pytest.importorskip("pytensor", minversion="2.38", reason="needs pytensor: make doors")
pt: Any = pytest.importorskip("pytensor.tensor")
MODE = pytensor.compile.mode.Mode(linker="py", optimizer="fast_compile")  # without a C compiler
pytestmark = pytest.mark.filterwarnings("ignore")  # those of PyTensor's own modules


def test_gradients_and_tangents() -> None:
    x, b, k = pt.dmatrix(), pt.dvector(), pt.lvector()

    def formula(x: Any, b: Any, k: Any) -> Any:
        y = pt.dot(pt.sin(x + b), W)
        return y, (y**2).sum(), k.sum()

    def graph(function: Any) -> list[Any]:
        y, z, c = function(x, b, k)
        loss = (y**3).sum() * z * c
        first = pt.grad(loss, [x, b])
        tangents = [
            pytensor.gradient.Rop(y, [x], [2 * x], **more) for more in ({}, {"use_op_rop_implementation": True})
        ]
        return [y, z, c, *first, *pt.grad((first[0] ** 2).sum(), [x, b]), *tangents]

    op = ob.pytensor.op(waves())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, expected = (pytensor.function([x, b, k], graph(one), mode=MODE)(X, B, K) for one in (op, formula))
    for a, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-9 * np.abs(e).max())


def test_a_likelihood_in_nuts() -> None:
    """The posterior of a network's two parameters, of 40 trials, beside its density on a grid."""
    pm = pytest.importorskip("pymc", minversion="5.28", reason="needs pymc: make doors")
    times, w = np.linspace(-1, 1, 40), weights_of(row())
    op = ob.pytensor.op(row(), free={"x": {0: "trials"}})
    with pm.Model(), pytensor.config.change_flags(mode=MODE):
        drift, bound = pm.Normal("drift", 0, 0.5), pm.Normal("bound", 0, 0.5)
        rows = pt.stack([drift * np.ones(40), bound * np.ones(40), times], axis=1)
        pm.Potential("data", 0.05 * op(rows).sum())
        trace = pm.sample(
            400, tune=400, chains=2, cores=1, random_seed=3, progressbar=False, compute_convergence_checks=False
        )
    grid = np.linspace(-2.5, 2.5, 101)
    a, b = np.meshgrid(grid, grid, indexing="ij")
    inputs = np.stack([*np.broadcast_arrays(a[..., None], b[..., None], times)], axis=-1)
    log = 0.05 * (np.tanh(inputs @ w["w"]) @ w["v"]).sum(axis=(-1, -2)) - 2 * (a**2 + b**2)
    density = np.exp(log - log.max())
    for name, values in (("drift", a), ("bound", b)):
        mean = (values * density).sum() / density.sum()
        spread = np.sqrt(((values - mean) ** 2 * density).sum() / density.sum())
        draws = trace.posterior[name].values
        assert abs(draws.mean() - mean) < 0.25 * spread, (name, draws.mean(), mean, spread)
        assert draws.std() == pytest.approx(spread, rel=0.2), name


def test_invalid_use_is_refused() -> None:
    op = ob.pytensor.op(waves(), wrt=["x"])
    with pytest.raises(ob.InvalidArgumentError, match="expected x, b, k, got 2 arguments"):
        op(X, B)
    with pytest.raises(ob.InvalidArgumentError, match="'k' has type int64, got a tensor of float64"):
        op(X, B, B)
    with pytest.raises(ob.InvalidArgumentError, match="'b' has 1 axes, got a tensor of 2"):
        op(X, X, K)
    b = pt.dvector()
    with pytest.raises(Exception, match="'b' is not among those to differentiate by"):
        pt.grad(op(X, b, K)[1], b)
