"""FMUs in FMPy: valid, simulated, and with derivatives that are the model's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, parser

import onnx_backprop as ob
from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError
from onnx_backprop.ort_ops.plugin import targets
from tests.docs.blocks import ROOT, blocks, run

fmpy: Any = pytest.importorskip("fmpy")
fmi3: Any = pytest.importorskip("fmpy.fmi3")
validate_fmu: Any = pytest.importorskip("fmpy.validation").validate_fmu

LIBRARY = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.*"), None)
OSCILLATOR = """(double[2] x, double u) => (double[2] dx, double energy) <double mu = {5}, double one = {1}> {
    a, b = Split <num_outputs = 2> (x) aa = Mul (a, a) c = Sub (one, aa) d = Mul (c, b) e = Mul (mu, d)
    f = Sub (e, a) g = Add (f, u) dx = Concat <axis = 0> (b, g) s = Mul (x, x) energy = ReduceSum <keepdims = 0> (s) }"""
FUNCTION = """(float[2, N] a, float[3] b) => (float[2, 3] y, float total) <float[3] w = {1, 2, 3}> {
    m = Mul (a, b) t = Tanh (m) y = Mul (t, w) total = ReduceSum <keepdims = 0> (y) }"""


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXRUNTIME_LIB", str(LIBRARY))


def model_of(text: str) -> ModelProto:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {text}')


@contextmanager
def instance(
    path: Path, *, slave: bool = False, messages: list[str] | None = None
) -> Iterator[tuple[Any, dict[str, int]]]:
    """An FMU that simulates, and the references of its variables."""
    description = fmpy.read_model_description(str(path))
    folder = fmpy.extract(str(path), str(path.with_suffix("")))
    part = description.coSimulation if slave else description.modelExchange
    fmu = (fmi3.FMU3Slave if slave else fmi3.FMU3Model)(
        guid=description.guid, unzipDirectory=folder, modelIdentifier=part.modelIdentifier, instanceName="it"
    )
    heard = [] if messages is None else messages
    fmu.instantiate(logMessage=lambda _env, _status, _category, message: heard.append(message.decode()))
    fmu.enterInitializationMode()
    fmu.exitInitializationMode()
    if slave:
        fmu.enterStepMode()
    else:
        fmu.enterContinuousTimeMode()
    yield fmu, {variable.name: variable.valueReference for variable in description.modelVariables}
    fmu.terminate()
    fmu.freeInstance()


def simulated(path: Path, **arguments: Any) -> Any:
    assert validate_fmu(str(path)) == []
    return fmpy.simulate_fmu(str(path), **arguments)


def rates(x: np.ndarray, u: float = 0.0) -> np.ndarray:
    return np.array([x[1], 5 * (1 - x[0] ** 2) * x[1] - x[0] + u])


def test_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "fmi_page"}
    for block in [block for block in blocks(ROOT / "docs" / "fmi.md") if block.language]:
        run(block, names)
    assert 0.5 < np.abs(names["result"]["x"][-1]).max() < 4
    assert validate_fmu("same.fmu") == []


def test_an_equation_in_cvode(tmp_path: Path) -> None:
    """Van der Pol's oscillator, by FMPy's CVode, beside the formula in SciPy."""
    integrate = pytest.importorskip("scipy.integrate")
    path = ob.fmu(model_of(OSCILLATOR), tmp_path / "o.fmu", states={"x": "dx"}, start={"x": [2, 0]}, runtime=False)
    result = simulated(path, stop_time=5.0, relative_tolerance=1e-8, output=["energy"], solver="CVode")
    true = integrate.solve_ivp(lambda _, x: rates(x), (0, 5), [2, 0], rtol=1e-9, atol=1e-10, t_eval=result["time"])
    np.testing.assert_allclose(result["energy"], (true.y**2).sum(0), rtol=1e-4)


def test_a_solver_that_asks_for_derivatives(tmp_path: Path) -> None:
    """Radau with Jacobians of fmi3GetDirectionalDerivative asks for fewer rates than with differences, and ends there too."""
    integrate = pytest.importorskip("scipy.integrate")
    path = ob.fmu(model_of(OSCILLATOR), tmp_path / "o.fmu", states={"x": "dx"}, runtime=False)
    with instance(path) as (fmu, reference):
        calls = []

        def rate(t: float, x: np.ndarray) -> np.ndarray:
            calls.append(t)
            fmu.setFloat64([reference["x"]], x)
            return np.array(fmu.getFloat64([reference["dx"]], nValues=2))

        def jacobian(_: float, x: np.ndarray) -> np.ndarray:
            fmu.setFloat64([reference["x"]], x)
            columns = [fmu.getDirectionalDerivative([reference["dx"]], [reference["x"]], e, 2) for e in np.eye(2)]
            return np.array(columns).T

        solution = integrate.solve_ivp(rate, (0, 5), [2, 0], "Radau", jac=jacobian)
        asked = len(calls)
        integrate.solve_ivp(rate, (0, 5), [2, 0], "Radau")
        x = np.array([1.5, -0.3])
        np.testing.assert_allclose(jacobian(0, x), [[0, 1], [-10 * x[0] * x[1] - 1, 5 * (1 - x[0] ** 2)]], rtol=1e-14)
    assert solution.success
    assert asked < len(calls) - asked
    true = integrate.solve_ivp(lambda _, x: rates(x), (0, 5), [2, 0], rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(solution.y[:, -1], true.y[:, -1], atol=5e-3)


def test_derivatives_are_those_of_the_model(tmp_path: Path) -> None:
    """Directional and adjoint ones of arrays of Float32, in several variables at once, beside `jvp` and `vjp`."""
    model = model_of(FUNCTION)
    path = ob.fmu(model, tmp_path / "f.fmu", lengths={"N": 3}, runtime=False)
    assert validate_fmu(str(path)) == []
    rng = np.random.default_rng(0)
    a, da, y = (rng.standard_normal((2, 3)).astype(np.float32) for _ in range(3))
    b, db = (rng.standard_normal(3).astype(np.float32) for _ in range(2))
    feeds, total = {"a": a, "b": b}, np.array(0.7, np.float32)
    forward, backward = ob.session(ob.jvp(model, ["a", "b"])), ob.session(ob.vjp(model, ["a", "b"]))
    tangents: Any = forward.run(["y_tangent", "total_tangent"], {**feeds, "a_tangent": da, "b_tangent": db})
    gradients: Any = backward.run(["a_grad", "b_grad"], {**feeds, "y_grad": y, "total_grad": total})
    with instance(path) as (fmu, r):
        fmu.setFloat32([r["b"], r["a"]], [*b, *a.ravel()])
        outputs = fmu.getFloat32([r["total"], r["y"]], nValues=7)
        derivative = fmu.getDirectionalDerivative([r["y"], r["total"]], [r["b"], r["a"]], [*db, *da.ravel()], 7)
        np.testing.assert_allclose(derivative, np.append(tangents[0], tangents[1]), rtol=1e-5)
        derivative = fmu.getAdjointDerivative([r["total"], r["y"]], [r["a"], r["b"]], [total, *y.ravel()], 9)
        np.testing.assert_allclose(derivative, np.append(gradients[0], gradients[1]), rtol=1e-5)
        derivative = fmu.getDirectionalDerivative([r["total"]], [r["b"]], db)  # the others are held
        held: Any = forward.run(["total_tangent"], {**feeds, "a_tangent": 0 * da, "b_tangent": db})
        np.testing.assert_allclose(derivative, held, rtol=1e-5)
    expected: Any = ob.session(model).run(["total", "y"], feeds)
    np.testing.assert_allclose(outputs, np.append(*expected), rtol=1e-6)


@pytest.mark.parametrize("kind", ["CoSimulation", "ModelExchange"])
def test_a_function_follows_its_inputs(kind: str, tmp_path: Path) -> None:
    model = model_of("(double u) => (double y) { y = Sin (u) }")
    model.graph.input[0].name = model.graph.node[0].input[0] = "u <1> & 'more'"
    path = ob.fmu(model, tmp_path / "2 odd-names.fmu", start={"u <1> & 'more'": 0.5}, runtime=False)
    result = simulated(path, fmi_type=kind, stop_time=1.0)
    np.testing.assert_allclose(result["y"], np.sin(0.5), rtol=1e-15)
    u = np.array([(t, np.cos(t)) for t in np.linspace(0, 1, 11)], [("time", float), ("u <1> & 'more'", float)])
    result = simulated(path, fmi_type=kind, stop_time=1.0, input=u, output_interval=0.1)
    np.testing.assert_allclose(result["y"][1:], np.sin(np.cos(result["time"][1:])), atol=0.1)
    assert np.ptp(result["y"]) > 0.1


def test_states_are_kept_and_restored(tmp_path: Path) -> None:
    path = ob.fmu(model_of(OSCILLATOR), tmp_path / "o.fmu", states={"x": "dx"}, start={"x": [2, 1]}, runtime=False)
    with instance(path) as (fmu, r):
        state = fmu.getFMUState()
        copy = fmu.deserializeFMUState(fmu.serializeFMUState(state))
        fmu.setFloat64([r["x"]], [7, 8])
        assert fmu.getFloat64([r["energy"]]) == [113]
        fmu.setFMUState(copy)
        assert fmu.getFloat64([r["energy"], r["x"]], nValues=3) == [5, 2, 1]
        for one in (state, copy):
            fmu.freeFMUState(one)
        fmu.setFloat64([r["x"]], [7, 8])
        fmu.reset()
        assert fmu.getFloat64([r["x"]], nValues=2) == [2, 1]


def test_error_messages(tmp_path: Path) -> None:
    path, messages = ob.fmu(model_of(OSCILLATOR), tmp_path / "o.fmu", states={"x": "dx"}, runtime=False), []
    with instance(path, messages=messages) as (fmu, r):
        for call, message in (
            (lambda: fmu.setFloat64([r["energy"]], [1]), "energy is computed and cannot be set"),
            (lambda: fmu.getFloat32([r["u"]]), "u is a Float64, not a Float32"),
            (lambda: fmu.getFloat64([99]), "no variable has the value reference 99"),
            (lambda: fmu.getFloat64([r["x"]]), "x has 2 elements, and 1 are left"),
            (lambda: fmu.getInt32([r["x"]]), "there are no variables of type Int32"),
            (lambda: fmu.getDirectionalDerivative([r["u"]], [r["x"]], [1, 0]), "u is no output and no derivative"),
            (lambda: fmu.getDirectionalDerivative([r["dx"]], [r["energy"]], [1], 2), "energy is no input and no state"),
            (
                lambda: fmu.getAdjointDerivative([r["dx"]], [r["u"]], [1], 1),
                "dx has 2 elements, more than are left of 1",
            ),
        ):
            with pytest.raises(Exception, match="failed with status 3|fmi3"):
                call()
            assert re.search(message, messages[-1]), messages


def test_without_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, messages = ob.fmu(model_of(OSCILLATOR), tmp_path / "o.fmu", states={"x": "dx"}, runtime=False), []
    monkeypatch.setenv("ONNXRUNTIME_LIB", "/no/such/library.so")
    with pytest.raises(Exception, match="instantiate"), instance(path, messages=messages):
        pass
    assert re.search(r"was not found: /no/such/library.so. Set ONNXRUNTIME_LIB", messages[-1])


def test_an_equation_without_a_solver(tmp_path: Path) -> None:
    path, messages = ob.fmu(model_of(OSCILLATOR), tmp_path / "o.fmu", states={"x": "dx"}, runtime=False), []
    fmu = fmi3.FMU3Slave(
        guid="", unzipDirectory=fmpy.extract(str(path), str(tmp_path / "o")), modelIdentifier="o", instanceName="it"
    )
    with pytest.raises(Exception, match="instantiate"):
        fmu.instantiate(logMessage=lambda _env, _status, _category, message: messages.append(message.decode()))
    assert messages == ["the FMU has states and no solver: it is for Model Exchange"]


def test_the_runtime_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of who runs it."""
    monkeypatch.delenv("ONNXRUNTIME_LIB")
    path = ob.fmu(model_of(OSCILLATOR), tmp_path / "o.fmu", states={"x": "dx"}, start={"x": [2, 0]})
    assert any(name.startswith("documentation/licenses/onnxruntime/") for name in ZipFile(path).namelist())
    assert simulated(path, stop_time=0.1, output=["energy"])["energy"][0] == 4


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (OSCILLATOR, {"states": {"x": "energy"}}, "states: 'energy' is of float64[], and the state 'x' of float64[2]"),
        (OSCILLATOR, {"states": {"z": "dx"}}, "states: expected names of inputs ('x', 'u'), got 'z'"),
        (OSCILLATOR, {"states": {"x": "dx", "u": "dx"}}, "states: expected another derivative for each state"),
        (OSCILLATOR, {"start": {"x": [1, 2, 3]}}, "start: 'x' has the shape [2], got one of [3]"),
        (OSCILLATOR, {"of": ["enrgy"]}, "of: expected names of outputs ('dx', 'energy'), got 'enrgy'"),
        (FUNCTION, {}, "lengths: expected the length of 'N' (of 'a')"),
        (FUNCTION, {"lengths": {"N": 4}}, "onnxruntime does not run the model for these lengths and starts:"),
        ("(int64 n) => (int64 m) { m = Neg (n) }", {}, "the input 'n' is int64, an FMU has float and double"),
        (OSCILLATOR, {"target": "amiga"}, "target: expected "),
    ],
)
def test_refusals(text: str, arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}"):
        ob.fmu(model_of(text), tmp_path / "x.fmu", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_every_platform(tmp_path: Path) -> None:
    names = ["linux-x86_64", "linux-aarch64", "windows-x86_64", "macos-x86_64", "macos-arm64"]
    try:
        for name in names:
            targets.checked(name)
    except KernelError as e:
        pytest.skip(str(e))
    path = ob.fmu(model_of(OSCILLATOR), tmp_path / "o.fmu", states={"x": "dx"}, target=names, runtime=False)
    with ZipFile(path) as archive:
        binaries = {name: archive.read(name)[:4] for name in archive.namelist() if name.startswith("binaries")}
    elf, mach = b"\x7fELF", b"\xcf\xfa\xed\xfe"
    assert binaries == {
        "binaries/x86_64-linux/o.so": elf,
        "binaries/aarch64-linux/o.so": elf,
        "binaries/x86_64-windows/o.dll": b"MZ\x90\x00",
        "binaries/x86_64-darwin/o.dylib": mach,
        "binaries/aarch64-darwin/o.dylib": mach,
    }
    assert validate_fmu(str(path)) == []
