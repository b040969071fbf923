"""`Adam`, `Adagrad` and `Momentum` of ai.onnx.preview.training: onnx's own node tests in stock onnxruntime."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, checker, helper, parser
from onnx.backend.test.case.test_case import TestCase as BackendCase

import onnx_backprop as ob
from onnx_backprop.opset.functions.overloads import REFUSAL
from tests.support.onnx_cases import node_cases

NAMES = (
    "test_adagrad",
    "test_adagrad_multiple",
    "test_adam",
    "test_adam_multiple",
    "test_momentum",
    "test_momentum_multiple",
    "test_nesterov_momentum",
)
IMPORTS = '<ir_version: 10, opset_import: ["": 18, "ai.onnx.preview.training": 1]>'
DOMAIN = "ai.onnx.preview.training"


@cache
def cases() -> dict[str, BackendCase]:
    collected = node_cases("adagrad", "adam", "momentum")
    return {name: case for name, case in collected.items() if name in NAMES}


def run(model: ModelProto, *inputs: object) -> list[np.ndarray]:
    expanded = ob.expand_gradients(model)
    checker.check_model(expanded, full_check=True)
    session = onnxruntime.InferenceSession(expanded.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = dict(zip([i.name for i in session.get_inputs()], map(np.asarray, inputs), strict=True))
    return [np.asarray(value) for value in session.run(None, feeds)]


@pytest.mark.parametrize("name", NAMES)
def test_the_cases_of_onnx(name: str) -> None:
    case = cases()[name]
    assert case.model is not None
    assert case.data_sets
    for inputs, outputs in case.data_sets:
        results = run(case.model, *inputs)
        for got, want in zip(results, outputs, strict=True):
            np.testing.assert_allclose(got, np.asarray(want), rtol=1e-6, atol=1e-7, strict=True)


def node(
    op_type: str, attributes: str, *, kinds: int, outputs: int, tensors: int = 1, element: str = "float"
) -> ModelProto:
    """A model of one optimizer node whose tensors have two elements."""
    inputs = [f"{element}[2] i{n}" for n in range(kinds * tensors)]
    results = [f"{element}[2] o{n}" for n in range(outputs * tensors)]
    names = ", ".join(text.split()[-1] for text in inputs)
    output_names = ", ".join(text.split()[-1] for text in results)
    return parser.parse_model(
        f"{IMPORTS} g ({element} R, int64 T, {', '.join(inputs)}) => ({', '.join(results)})"
        f"{{ [step] {output_names} = {DOMAIN}.{op_type}<{attributes}>(R, T, {names}) }}"
    )


def tensors(count: int, dtype: type[np.floating] = np.float64, seed: int = 0) -> list[np.ndarray]:
    return [np.abs(x).astype(dtype) for x in np.random.default_rng(seed).standard_normal((count, 2))]


F = np.float32  # attributes are float32 whatever the tensors are


@pytest.mark.parametrize("t", [0, 1, 1000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adam_with_every_attribute(t: int, dtype: type[np.floating]) -> None:
    element = "float" if dtype is np.float32 else "double"
    attributes = "alpha = 0.8, beta = 0.99, epsilon = 0.001, norm_coefficient = 0.1, norm_coefficient_post = 0.2"
    model = node("Adam", attributes, kinds=4, outputs=3, element=element)
    x, g, v, h = tensors(4, dtype)
    results = run(model, np.array(0.3, dtype), np.array(t), x, g, v, h)
    alpha, beta, epsilon, norm, post = (float(F(a)) for a in (0.8, 0.99, 0.001, 0.1, 0.2))
    g = g.astype(float) + norm * x
    v_new, h_new = alpha * v + (1 - alpha) * g, beta * h + (1 - beta) * g * g
    rate = float(dtype(0.3)) * (np.sqrt(1 - beta**t) / (1 - alpha**t) if t else 1)
    x_new = (1 - post) * (x - rate * v_new / (np.sqrt(h_new) + epsilon))
    for got, want in zip(results, (x_new, v_new, h_new), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, rtol=1e-12 if dtype is np.float64 else 1e-5)


def test_adam_default_attributes() -> None:
    x, g, v, h = tensors(4)
    model = node("Adam", "alpha = 0.5", kinds=4, outputs=3, element="double")
    model.graph.node[0].ClearField("attribute")
    got = run(model, 0.1, np.array(3), x, g, v, h)
    alpha, beta, epsilon = float(F(0.9)), float(F(0.999)), float(F(1e-6))
    v_new, h_new = alpha * v + (1 - alpha) * g, beta * h + (1 - beta) * g * g
    rate = 0.1 * np.sqrt(1 - beta**3) / (1 - alpha**3)
    np.testing.assert_allclose(got[0], x - rate * v_new / (np.sqrt(h_new) + epsilon), rtol=1e-12)


@pytest.mark.parametrize("t", [0, 5])
def test_adagrad_with_every_attribute(t: int) -> None:
    attributes = "decay_factor = 0.3, epsilon = 0.01, norm_coefficient = 0.1"
    x, g, h = tensors(3)
    results = run(node("Adagrad", attributes, kinds=3, outputs=2, element="double"), 0.2, np.array(t), x, g, h)
    decay, epsilon, norm = (float(F(a)) for a in (0.3, 0.01, 0.1))
    g = g + norm * x
    h_new = h + g * g
    x_new = x - 0.2 / (1 + t * decay) * g / (np.sqrt(h_new) + epsilon)
    for got, want in zip(results, (x_new, h_new), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("mode", ["standard", "nesterov"])
@pytest.mark.parametrize("t", [0, 5])
def test_momentum_with_two_tensors(mode: str, t: int) -> None:
    attributes = f'alpha = 0.7, beta = 0.4, norm_coefficient = 0.1, mode = "{mode}"'
    x0, x1, g0, g1, v0, v1 = tensors(6)
    model = node("Momentum", attributes, kinds=3, outputs=2, tensors=2, element="double")
    results = run(model, 0.2, np.array(t), x0, x1, g0, g1, v0, v1)
    alpha, beta, norm = (float(F(a)) for a in (0.7, 0.4, 0.1))
    expected = []
    for x, g, v in ((x0, g0, v0), (x1, g1, v1)):
        g = g + norm * x
        v_new = alpha * v + (beta if t else 1) * g
        expected.append((x - 0.2 * (g + alpha * v_new if mode == "nesterov" else v_new), v_new))
    for got, want in zip(results, (*(x for x, _ in expected), *(v for _, v in expected)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_several_nodes_and_both_modes_in_one_model() -> None:
    """One function for each number of tensors and each mode, shared by equal nodes."""
    model = node("Momentum", 'alpha = 0.7, beta = 0.4, norm_coefficient = 0.0, mode = "standard"', kinds=3, outputs=2)
    first = model.graph.node[0]
    for n, mode in enumerate(("standard", "nesterov")):
        other = model.graph.node.add()
        other.CopyFrom(first)
        other.name, other.output[:] = f"step_{n}", [f"x{n}", f"v{n}"]
        next(a for a in other.attribute if a.name == "mode").s = mode.encode()
        model.graph.output.append(helper.make_tensor_value_info(f"x{n}", 1, [2]))
    expanded = ob.expand_gradients(model)
    assert sorted(f.overload for f in expanded.functions) == ["nesterov_1", REFUSAL, "standard_1"]
    x, g, v = tensors(3, np.float32)
    standard, _, again, nesterov = run(model, F(0.2).reshape(()), np.array(1), x, g, v)
    np.testing.assert_array_equal(standard, again)
    assert not np.allclose(standard, nesterov)


def test_the_rate_may_be_of_another_type_and_of_one_element() -> None:
    model = parser.parse_model(
        f"{IMPORTS} g (float[1] R, int64[1] T, double x, double g, double h) => (double y, double z)"
        f"{{ y, z = {DOMAIN}.Adagrad<epsilon = 0.5>(R, T, x, g, h) }}"
    )
    y, z = run(model, F([0.5]), np.array([2]), 1.0, 3.0, 16.0)
    assert z == pytest.approx(25.0)
    assert y == pytest.approx(1 - 0.5 * 3 / 5.5)
    assert y.shape == ()


@pytest.mark.parametrize(
    ("op_type", "attributes", "kinds", "message"),
    [
        ("Adam", "alpha = 0.9", 3, "expected R, T and 4 inputs for every tensor, got 5"),
        ("Adagrad", "epsilon = 0.1", 4, "expected R, T and 3 inputs for every tensor, got 6"),
        (
            "Momentum",
            'alpha = 0.1, beta = 0.1, norm_coefficient = 0.0, mode = "heavy"',
            3,
            "mode: expected 'standard' or 'nesterov', got 'heavy'",
        ),
    ],
)
def test_refused(op_type: str, attributes: str, kinds: int, message: str) -> None:
    with pytest.raises(ob.InvalidModelError, match=f"{op_type} 'step': {message}"):
        ob.expand_gradients(node(op_type, attributes, kinds=kinds, outputs=2))
