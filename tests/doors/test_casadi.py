"""Families that CasADi's pip wheel reads: values, Jacobians and exact Hessians beside CasADi's own operators."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import InvalidArgumentError
from tests.docs.blocks import ROOT, blocks, run
from tests.doors.surrogates import KINDS, SHAPES, build, symbolic

casadi: Any = pytest.importorskip("casadi")
LIBRARY = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.*"), None)
os.environ.setdefault("CASADI_ONNXRUNTIME_LIB", str(LIBRARY))
pytestmark = pytest.mark.filterwarnings("default:builtin type")  # SWIG's


def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks(ROOT / "docs" / "casadi.md") if block.language]
    run(block, {"__name__": "casadi_page"})
    assert "[4.91318, 4.91318]" in capfd.readouterr().out


def test_control(capsys: pytest.CaptureFixture[str]) -> None:
    """IPOPT swings a pendulum up that a network stands for, with exact Hessians."""
    assert runpy.run_path(str(ROOT / "examples" / "mpc.py"))["main"]() == 0
    assert "Solve_Succeeded" in capsys.readouterr().out


def opened(path: Path) -> Any:
    return casadi.GraphBuilder(str(path)).create("f")


def derivatives(xs: list[Any], ys: list[Any], seeds: list[Any], **options: Any) -> Any:
    """A function of xs and seeds: values, the Jacobian, gradient and Hessian of Σ seed · y."""
    y = casadi.veccat(*ys)
    total = casadi.dot(y, casadi.veccat(*seeds))
    jacobian = casadi.horzcat(*[casadi.jacobian(y, one) for one in xs])
    gradient = casadi.veccat(*[casadi.gradient(total, one) for one in xs])
    hessian = casadi.horzcat(*[casadi.jacobian(gradient, one) for one in xs])
    return casadi.Function("d", [*xs, *seeds], [y, jacobian, gradient, hessian], options)


def compare(
    model: onnx.ModelProto, formula: Callable[..., list[Any]], folder: Path, bound: float, **options: Any
) -> None:
    """All derivatives of a family beside those of a formula."""
    ob.family(model, folder / "f.onnx")
    f = opened(folder / "f.onnx")
    xs = [casadi.MX.sym(f"x{n}", *f.size_in(n)) for n in range(f.n_in())]
    seeds = [casadi.MX.sym(f"w{n}", *f.size_out(n)) for n in range(f.n_out())]
    rng = np.random.default_rng(3)
    point = [rng.uniform(0.5, 1.5, one.shape) for one in (*xs, *seeds)]
    for n in range(f.n_in()):
        if not f.is_diff_in(n):
            point[n] = np.zeros(xs[n].shape)
    computed = derivatives(xs, list(f.call(xs)), seeds, **options)
    true = derivatives(xs, formula(*xs), seeds)
    for what, ours, theirs in zip(
        ("y", "jacobian", "gradient", "hessian"), computed(*point), true(*point), strict=True
    ):
        difference = np.abs(np.array(ours) - np.array(theirs)).max()
        assert difference <= bound * max(1.0, np.abs(np.array(theirs)).max()), (what, difference)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-12), (np.float32, 5e-6)], ids=["double", "float"])
def test_surrogates(kind: str, dtype: type[np.floating], bound: float, tmp_path: Path) -> None:
    compare(build(kind, dtype), lambda x: [symbolic(kind, x, casadi)], tmp_path, bound)
    assert np.prod(opened(tmp_path / "f.onnx").size_in(0)) == np.prod(SHAPES[kind])


def model_of(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {text}')


LAYOUTS: dict[str, tuple[str, Callable[..., list[Any]]]] = {
    "a matrix and its transpose": (
        "(double[2, 3] x) => (double[3, 2] y) { t = Transpose (x) e = Exp (t) y = Mul (e, t) }",
        lambda x: [casadi.exp(x.T) * x.T],
    ),
    "several": (
        "(double[2, 3] x, double[3, 4] z) => (double[2, 4] y, double s)"
        " { y = MatMul (x, z) e = Exp (x) s = ReduceSum <keepdims = 0> (e) }",
        lambda x, z: [x @ z, casadi.sum1(casadi.sum2(casadi.exp(x)))],
    ),
    "scalars": (
        "(double x, double[1] z) => (double y, double[1, 1] k)"
        " { y = Sin (x) a = Mul (x, z) b = Mul (a, z) i = Constant <value_ints = [1, 1]> () k = Reshape (b, i) }",
        lambda x, z: [casadi.sin(x), x * z**2],
    ),
    "a row": (
        "(double[1, 3] x) => (double[1, 2] y) <double[3, 2] w = {1, 2, 3, 4, 5, 6}> { a = Tanh (x) y = MatMul (a, w) }",
        lambda x: [casadi.tanh(x) @ np.array([[1, 2], [3, 4], [5, 6.0]])],
    ),
    "more axes": (
        "(double[2, 2, 2] x) => (double[2, 2, 2] y) { t = Transpose <perm = [2, 0, 1]> (x) e = Exp (x) y = Mul (t, e) }",
        lambda x: [x[[0, 2, 4, 6, 1, 3, 5, 7]] * casadi.exp(x)],
    ),
    "integers": (
        "(double[3] x, int64[2] i) => (double[2] y, int64[1, 2] k)"
        " { e = Exp (x) y = Gather (e, i) o = Constant <value_ints = [1, 2]> () k = Reshape (i, o) }",
        lambda x, i: [casadi.exp(x[[0, 0]]) + 0 * i, casadi.MX.zeros(1, 2)],
    ),
    "zeros": (
        "(double[3] x, double[2] z) => (double[3] y, double[2] k) { y = Exp (x) k = Sign (z) }",
        lambda x, z: [casadi.exp(x), casadi.MX.ones(2) + 0 * z],
    ),
    "a name that a derivative has": (
        "(double[3] adj_x, double[3] fwd_u) => (double[3] adj_y)"
        " { adj2_x = Exp (adj_x) fwd2_adj2_adj_x = Mul (adj2_x, fwd_u) adj_y = Identity (fwd2_adj2_adj_x) }",
        lambda x, u: [casadi.exp(x) * u],
    ),
}


@pytest.mark.filterwarnings("ignore:.*is zero:onnx_backprop.OnnxBackpropWarning")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"ad_weight": 0.0}, {"ad_weight": 1.0}], ids=["auto", "forward", "reverse"])
def test_layouts(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    text, formula = LAYOUTS[name]
    compare(model_of(text), formula, tmp_path, 1e-12, **options)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("(double[N, 3] x) => (double[N, 3] y) { a = Exp (x) y = Mul (a, x) }", {"N": 2}),
        ("(double[N, 2, M] x) => (double[N, 2, M] y) { a = Exp (x) y = Mul (a, x) }", {"N": 2, "M": 3}),
    ],
)
def test_symbolic_lengths(text: str, lengths: dict[str, int], tmp_path: Path) -> None:
    ob.family(model_of(text), tmp_path / "f.onnx")
    builder = casadi.GraphBuilder(str(tmp_path / "f.onnx"))
    for name, length in lengths.items():
        builder.bind_dim(name, length)
    f = builder.create("f")
    x, seed = (casadi.MX.sym(name, *f.size_in(0)) for name in "xw")
    point = [np.random.default_rng(4).uniform(0.5, 1.5, x.shape) for _ in range(2)]
    computed, true = (derivatives([x], [y], [seed])(*point) for y in (f(x), casadi.exp(x) * x))
    for ours, theirs in zip(computed, true, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-12)


def test_files(tmp_path: Path) -> None:
    """Beside a file, which stays as it is, whatever its name; CasADi finds them there."""
    path = tmp_path / "my plant-2.v1.onnx"
    onnx.save(model_of("(double[2] x) => (double[2] y) { y = Exp (x) }"), path)
    before = path.read_bytes()
    written = ob.family(path)
    assert [file.name for file in written] == [f"{kind}_my plant-2.v1.onnx" for kind in ("fwd", "adj", "fwd_adj")]
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == sorted([path, *written])
    x = casadi.MX.sym("x", 2)
    hessian = casadi.hessian(casadi.sum1(opened(path)(x)), x)[0]
    value = np.array(casadi.Function("h", [x], [hessian])([1, 2]))
    np.testing.assert_allclose(value, np.diag(np.exp([1, 2])), atol=1e-14)


def test_names_that_are_no_identifiers(tmp_path: Path) -> None:
    model = model_of("(double[2] x) => (double[2] y) { y = Exp (x) }")
    model.graph.input[0].name = model.graph.node[0].input[0] = "input.1/a:0"
    model.graph.output[0].name = model.graph.node[0].output[0] = "1"
    compare(model, lambda x: [casadi.exp(x)], tmp_path, 1e-12)


def test_inputs_that_are_held(tmp_path: Path) -> None:
    """`wrt`: CasADi takes what is left out for constant."""
    ob.family(
        model_of("(double[2] x, double[2] p) => (double[2] y) { y = Mul (x, p) }"), tmp_path / "f.onnx", wrt=["x"]
    )
    f = opened(tmp_path / "f.onnx")
    assert [f.is_diff_in(n) for n in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("(double[2] adjacent_x) => (double[2] y) { y = Exp (adjacent_x) }", {}, "CasADi misreads 'adjacent_x'"),
        ("(double[nadj] x) => (double[nadj] y) { y = Exp (x) }", {}, "'x' has a length 'nadj'"),
        ("(double[2] x) => (double[2] y) { y = Exp (x) }", {"wrt": ["z"]}, "wrt: 'z' is no input"),
        (
            "(double[2] x) => (double[2] y) { y = Exp (x) }",
            {"layout": "acados"},
            "layout: expected 'casadi', got 'acados'",
        ),
        ("(double[2] x) => (double y) { y = Exp (x) }", {"path": None}, "path: expected the name of a file"),
    ],
)
def test_refusals(text: str, arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        ob.family(model_of(text), **{"path": tmp_path / "f.onnx", **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_nothing_runs(tmp_path: Path) -> None:
    onnx.save(build("conv", np.float64), tmp_path / "f.onnx")
    with pytest.raises(
        InvalidArgumentError, match="^path: onnxruntime has no kernels of Conv, GRU, LSTM and RNN in float64"
    ):
        ob.family(tmp_path / "f.onnx")
    assert len(list(tmp_path.iterdir())) == 1


def test_weights_in_other_files(tmp_path: Path) -> None:
    model = build("mlp", np.float64)
    onnx.save(model, tmp_path / "f.onnx", save_as_external_data=True, location="f.data", size_threshold=0)
    with pytest.raises(InvalidArgumentError, match="weights of .* lie in f.data"):
        ob.family(tmp_path / "f.onnx")
    ob.family(tmp_path / "f.onnx", tmp_path / "whole" / "f.onnx")
    assert opened(tmp_path / "whole" / "f.onnx")(np.ones(8)).shape == (3, 1)
