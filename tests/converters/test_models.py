"""Whole networks: gradients by every weight and the input, against differences in float64, on every route."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

import onnx_backprop as ob
from onnx_backprop.converters.prepare.upgrade import upgrade
from onnx_backprop.opset import KERNELS
from tests.support.gradient_checks import float64_run, session_run

PATHS = {path.stem: path for path in Path(__file__).parents[1].joinpath("models", "data").rglob("*.onnx")}
NAMES = sorted(PATHS)
SYMBOLS = {"N": 2, "H": 16, "W": 24}
SEED, DIRECTIONS, STEP = 11, 4, 1e-7
# float32 sums of thousands of products on the left, steps of 1e-7 in float64 on the right
TOLERANCE = 5e-6

Feeds = dict[str, np.ndarray]


@cache
def network(name: str) -> ModelProto:
    return onnx.load(PATHS[name])


def variables(model: ModelProto) -> list[str]:
    """The input and every float initializer but the scales of a Resize, which no gradient flows to."""
    scales = {name for node in model.graph.node if node.op_type == "Resize" for name in node.input[1:]}
    weights = [i.name for i in model.graph.initializer if i.data_type == TensorProto.FLOAT and i.name not in scales]
    return [*weights, model.graph.input[0].name]


def given(model: ModelProto) -> Feeds:
    """The input and a dy for the output."""
    (x,) = model.graph.input
    shape = [d.dim_value or SYMBOLS[d.dim_param] for d in x.type.tensor_type.shape.dim]
    rng = np.random.default_rng(SEED)
    feeds = {x.name: rng.standard_normal(shape).astype(np.float32)}
    (y,) = session_run(model)(feeds)
    return feeds | {f"{model.graph.output[0].name}_grad": rng.standard_normal(y.shape).astype(np.float32)}


def point(model: ModelProto) -> Feeds:
    """The values of the variables in float64."""
    weights = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    x = model.graph.input[0].name
    return {n: np.asarray(given(model)[x] if n == x else weights[n], np.float64) for n in variables(model)}


def converted(name: str, kernels: str) -> ModelProto:
    return ob.backward(network(name), wrt=variables(network(name)), kernels=kernels)


@cache
def answers(name: str, kernels: str) -> Feeds:
    """All outputs of a converted network: its own, then the gradients."""
    session = ob.session(converted(name, kernels), kernels=None)
    values = session.run(None, given(network(name)))
    return dict(zip([o.name for o in session.get_outputs()], cast("list[np.ndarray]", values), strict=True))


def for_the_evaluator(name: str) -> ModelProto:
    """The network with its weights as inputs, in forms that onnx's reference evaluator computes."""
    model = ModelProto()
    model.CopyFrom(network(name))
    if name == "upsample9_nearest_as_resize10":  # no Resize-10 there
        model = upgrade(model)
    if name == "convtranspose_output_shape":  # natural length 21 cut to 20 and 21: one cell at the first beginning
        (node,) = [n for n in model.graph.node if n.op_type == "ConvTranspose"]
        (shape,) = [a for a in node.attribute if a.name == "output_shape"]
        assert list(shape.ints) == [20, 21]
        node.attribute.remove(shape)
        node.attribute.append(helper.make_attribute("pads", [1, 0, 0, 0]))
    names = variables(model)
    for tensor in [i for i in model.graph.initializer if i.name in names]:
        model.graph.initializer.remove(tensor)
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return model


def test_all_networks_are_here() -> None:
    assert len(NAMES) == 27
    assert all(len(variables(network(name))) >= 3 for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_differentiated_by_default(name: str) -> None:
    model = network(name)
    graph = ob.backward(model, kernels="numpy")
    gradients = [o.name for o in graph.graph.output][len(model.graph.output) :]
    weights = [n for n in variables(model)[:-1] if not n.endswith(("running_mean", "running_var"))]
    assert gradients == [f"{n}_grad" for n in weights]


@cache
def slopes(name: str) -> list[tuple[Feeds, float]]:
    """Random directions in all variables at once and the slope of <dy, y> along each.

    Every variable's part is scaled to weigh about as much as the others', so that none is lost in the sum.
    """
    model, at, got = network(name), point(network(name)), answers(name, "numpy")
    y = model.graph.output[0].name
    dy = given(model)[f"{y}_grad"]
    run = float64_run(for_the_evaluator(name))
    assert_close(run(at)[0], got[y], "onnx's reference evaluator and onnxruntime disagree about the forward")
    rng = np.random.default_rng(SEED)
    result = []
    for _ in range(DIRECTIONS):
        v = {n: rng.standard_normal(x.shape) / max(np.linalg.norm(got[f"{n}_grad"]), 1e-3) for n, x in at.items()}
        above, below = (run({n: at[n] + sign * STEP * v[n] for n in at})[0] for sign in (1, -1))
        result.append((v, float(((above - below) * dy).sum()) / (2 * STEP)))
    return result


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_differences(name: str, kernels: str) -> None:
    model, got = network(name), answers(name, kernels)
    y = model.graph.output[0].name
    assert_close(got[y], session_run(model)(given(model))[0], "the forward changed")  # what fuses may differ
    for n, x in point(model).items():
        assert got[f"{n}_grad"].shape == x.shape
    for v, want in slopes(name):
        parts = {n: float((got[f"{n}_grad"].astype(np.float64) * along).sum()) for n, along in v.items()}
        scale = sum(abs(part) for part in parts.values()) + 1
        assert abs(sum(parts.values()) - want) <= TOLERANCE * scale, (
            f"{sum(parts.values())}, differences say {want}; seed {SEED}, {parts}"
        )


@pytest.mark.parametrize("kernels", [k for k in KERNELS if k != "numpy"])
@pytest.mark.parametrize("name", NAMES)
def test_routes_agree(name: str, kernels: str) -> None:
    for what, expected in answers(name, "numpy").items():
        assert_close(answers(name, kernels)[what], expected, f"{name}, {what}")


def assert_close(got: np.ndarray, expected: np.ndarray, message: str) -> None:
    """Equal to within what float32 sums in another order differ by."""
    largest = float(np.abs(expected).max(initial=1e-30))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * largest, err_msg=message)


# Run by another Python process: none of the modules that the other routes need can be imported there.
ALONE = """
import importlib.abc, pathlib, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("onnxruntime_extensions", "numba", "onnx_backprop"):
            raise ModuleNotFoundError(f"{name} is not here")

sys.meta_path.insert(0, Blocked())
for name in ("onnxruntime_extensions", "numba", "onnx_backprop"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} can be imported")

import numpy, onnxruntime

for model in sorted(pathlib.Path(sys.argv[1]).glob("*.onnx")):
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    with numpy.load(model.with_suffix(".in.npz")) as feeds:
        values = session.run(None, dict(feeds))
    numpy.savez(model.with_suffix(".out.npz"), **dict(zip([o.name for o in session.get_outputs()], values)))
    print(model.stem)
"""


def test_files_of_route_onnx_need_nothing_of_ours(tmp_path: Path) -> None:
    """A process with onnxruntime alone loads the converted models and finds the same gradients."""
    for name in NAMES:
        onnx.save(converted(name, "onnx"), tmp_path / f"{name}.onnx")
        np.savez(tmp_path / f"{name}.in.npz", allow_pickle=False, **given(network(name)))
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == NAMES
    for name in NAMES:
        with np.load(tmp_path / f"{name}.out.npz") as alone:
            expected = answers(name, "numpy")
            assert sorted(alone.files) == sorted(expected)
            for what, value in expected.items():
                assert_close(alone[what], value, f"{name}, {what}")
