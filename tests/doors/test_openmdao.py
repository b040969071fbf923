"""`ob.openmdao.Component`: check_partials with both kinds of derivatives, and an optimisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob
from tests.doors.models import B, K, W, X, jacobian_of_waves, waves

om: Any = pytest.importorskip("openmdao.api", reason="needs openmdao: make doors")
pytestmark = pytest.mark.filterwarnings("ignore")  # OpenMDAO's reports warn of numbers among discrete outputs
SHAPES = {"x": (4, 3), "k": (4,)}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # OpenMDAO leaves folders where it runs


def problem(component: Any) -> Any:
    prob = om.Problem(reports=False)
    prob.model.add_subsystem("waves", component, promotes=["*"])
    prob.setup()
    for name, value in (("x", X), ("b", B), ("k", K)):
        prob.set_val(name, value)
    prob.run_model()
    return prob


@pytest.mark.parametrize("matrix_free", [False, True])
def test_partials(matrix_free: bool) -> None:
    prob = problem(ob.openmdao.Component(waves(), shapes=SHAPES, matrix_free=matrix_free))
    np.testing.assert_allclose(prob["y"], np.sin(X + B) @ W)
    assert prob["c"] == 6
    for mode in ("fwd", "rev"):
        prob.setup(mode=mode)
        for name, value in (("x", X), ("b", B)):
            prob.set_val(name, value)
        prob.run_model()
        totals = prob.compute_totals(of=["y", "z"], wrt=["x", "b"])
        whole = np.block([[totals[y, x] for x in ("x", "b")] for y in ("y", "z")])
        np.testing.assert_allclose(whole, jacobian_of_waves(X, B), atol=1e-12)
    prob.check_partials(
        out_stream=None, form="central", step=1e-5, abs_err_tol=1e-6, rel_err_tol=1e-6, show_only_incorrect=True
    )
    errors = prob.check_partials(out_stream=None, form="central", step=1e-5)["waves"]
    assert len(errors) == 4
    for pair, error in errors.items():
        np.testing.assert_allclose(error["J_fwd"], error["J_fd"], rtol=1e-6, atol=1e-8, err_msg=str(pair))


def test_float32_and_weights() -> None:
    component = ob.openmdao.Component(waves("float"), shapes=SHAPES, wrt=["x", "W"], of=["y"])
    prob = problem(component)
    np.testing.assert_array_equal(prob["W"], W)
    errors = prob.check_partials(out_stream=None, form="central", step=1e-2)["waves"]
    assert set(errors) == {("y", "x"), ("y", "W")}  # b is not in wrt, and discrete
    for pair, error in errors.items():
        np.testing.assert_allclose(error["J_fwd"], error["J_fd"], atol=1e-3, err_msg=str(pair))
    np.testing.assert_allclose(prob.compute_totals(["y"], ["x"])["y", "x"], jacobian_of_waves(X, B)[:8, :12], atol=1e-6)


def test_an_optimisation() -> None:
    """The point of x₀ + x₁ <= 2 that is next to (1, 2.5)."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        distance (double[2] x) => (double f, double total) <double[2] goal = {1.0, 2.5}> {
            d = Sub (x, goal) f = ReduceSumSquare <keepdims = 0> (d) total = ReduceSum <keepdims = 0> (x) }""")
    prob = om.Problem(reports=False)
    prob.model.add_subsystem("distance", ob.openmdao.Component(model), promotes=["*"])
    prob.driver = om.ScipyOptimizeDriver(optimizer="SLSQP", disp=False)
    prob.model.add_design_var("x")
    prob.model.add_objective("f")
    prob.model.add_constraint("total", upper=2.0)
    prob.setup()
    assert prob.run_driver().success
    np.testing.assert_allclose(prob["x"], [0.25, 1.75])


def test_names_and_what_is_refused() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (double[2] x) => (double[2] y) { y = Sin (x) }"""
    )
    model.graph.node[0].input[0] = model.graph.input[0].name = "in.0"
    model.graph.node[0].output[0] = model.graph.output[0].name = "in/0"
    assert ob.openmdao.Component(model).names == {"in.0": "in_0", "in/0": "in_0_2"}
    with pytest.raises(ob.InvalidArgumentError, match=r"'x' has the shape \(None, 3\). Give all its lengths"):
        ob.openmdao.Component(waves())
    with pytest.raises(ob.InvalidArgumentError, match=r"shapes: 'x' has the shape \(None, 3\), got \(4, 5\)"):
        ob.openmdao.Component(waves(), shapes={"x": (4, 5), "k": (4,)})
