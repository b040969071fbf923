"""Products with packed weights against onnxruntime's own forward, and against weights that are unpacked here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

import onnx_backprop as ob
from tests.support.adjoint import forward_session, run

ROUTES = ("onnx", "native", "numpy", "numba")


@dataclass(frozen=True)
class Form:
    """One MatMulNBits: attributes, tensors by place, those that are initializers, and the lengths of a."""

    attributes: dict[str, int]
    tensors: dict[int, np.ndarray]
    constant: bool
    seed: int

    @property
    def a(self) -> np.ndarray:
        return self.tensors[0]

    def weight(self) -> np.ndarray:
        """W (N, K) in float64, number by number."""
        n, k, size, bits = (self.attributes[name] for name in ("N", "K", "block_size", "bits"))
        blocks, points = -(-k // size), self.tensors.get(3)
        stored, scales = self.tensors[1].reshape(n, -1), self.tensors[2].reshape(n, blocks).astype(np.float64)
        w = np.empty((n, k))
        for column in range(k):
            block = column // size
            z = np.full(n, 2.0 ** (bits - 1))
            if points is not None and points.dtype == np.uint8:
                z = read(points.reshape(n, -1), block, bits)
            elif points is not None:
                z = points.reshape(n, blocks)[:, block].astype(np.float64)
            w[:, column] = (read(stored, column, bits) - z) * scales[:, block]
        return w

    def model(self, *, symbolic: bool) -> ModelProto:
        """Names that mean nothing, a node without one; the weight as initializers, the rest too or as inputs."""
        names = {0: "x/in put", 1: "a.b:0", 2: "ω", 3: "//z", 5: "bias"}
        inputs = [names[n] if n in self.tensors else "" for n in range(max(self.tensors) + 1)]
        node = helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", **self.attributes)
        fixed = [n for n in self.tensors if n == 1 or (n and (self.constant or self.tensors[n].dtype == np.uint8))]
        element = helper.np_dtype_to_tensor_dtype(self.a.dtype)
        infos = [
            helper.make_tensor_value_info(
                names[n], element, [*"bt"[: x.ndim - 1], x.shape[-1]] if symbolic and not n else list(x.shape)
            )
            for n, x in self.tensors.items()
            if n not in fixed
        ]
        weights = [numpy_helper.from_array(self.tensors[n], names[n]) for n in fixed]
        graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", element, None)], weights)
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def feeds(self, model: ModelProto) -> dict[str, np.ndarray]:
        """Of the graph inputs, in the order in which `model` writes them."""
        floats = [x for n, x in self.tensors.items() if n != 1 and x.dtype != np.uint8 and not (n and self.constant)]
        return dict(zip([value.name for value in model.graph.input], floats, strict=True))


def read(packed: np.ndarray, place: int, bits: int) -> np.ndarray:
    """The number at a place of each row."""
    return (packed[:, place * bits // 8] >> (place * bits % 8) & (2**bits - 1)).astype(np.float64)


def drawn(seed: int, dtype: type = np.float32) -> Form:
    """A form that onnxruntime's kernel runs."""
    rng = np.random.default_rng(seed)
    bits, size = int(rng.choice([2, 4, 8])), int(2 ** rng.integers(4, 9))
    n, k = int(rng.integers(1, 80)), int(rng.integers(1, 300))
    shape = tuple(int(d) for d in rng.integers(1, 6, rng.integers(0, 3)))
    blocks = -(-k // size)
    tensors = {
        0: rng.standard_normal((*shape, k)).astype(dtype),
        1: rng.integers(0, 256, (n, blocks, size * bits // 8)).astype(np.uint8),
        2: rng.uniform(-0.2, 0.2, (n, blocks)).astype(dtype),
    }
    points = rng.choice(["", "packed", "floats" if bits != 8 else ""])
    if points == "packed":
        tensors[3] = rng.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8)
    elif points == "floats":
        tensors[3] = rng.uniform(0, 2**bits, (n, blocks)).astype(dtype)
    if rng.random() < 0.5:
        tensors[5] = rng.standard_normal(n).astype(dtype)
    if rng.random() < 0.2:  # as older quantisers write them
        tensors[2] = tensors[2].reshape(-1)
        if points == "packed":
            tensors[3] = tensors[3].reshape(-1)
    attributes = {"K": k, "N": n, "bits": bits, "block_size": size}
    if rng.random() < 0.5:
        attributes["accuracy_level"] = int(rng.choice([0, 1, 2, 3]))
    return Form(attributes, tensors, bool(rng.random() < 0.5), seed)


def gradients(form: Form, model: ModelProto, dy: np.ndarray, route: str) -> dict[str, np.ndarray]:
    graph = ob.backward(model, wrt=list(form.feeds(model)))
    session = ob.session(graph, kernels=route)
    fed = form.feeds(model) | {"y_grad": dy}
    accepted = {value.name for value in session.get_inputs()}
    answers = run(session, {name: x for name, x in fed.items() if name in accepted})
    found = dict(zip([value.name for value in session.get_outputs()], answers, strict=True))
    return {name: found[f"{name}_grad"] for name in form.feeds(model)}


@pytest.mark.parametrize("seed", range(48))
def test_any_form(seed: int) -> None:
    """<dy, F(x + v) - F(x - v)> / 2 = <dx, v> of onnxruntime's F, linear in each input; and dx = dy · W in float64."""
    form = drawn(seed)
    model = form.model(symbolic=seed % 2 == 0)
    feeds, session, rng = form.feeds(model), forward_session(model), np.random.default_rng(seed)
    y = run(session, feeds)[0]
    dy = rng.standard_normal(y.shape).astype(np.float32)
    found = gradients(form, model, dy, ROUTES[seed % len(ROUTES)])
    for name, x in feeds.items():
        v = rng.standard_normal(x.shape).astype(np.float32)
        above, below = (run(session, feeds | {name: x + s * v})[0].astype(np.float64) for s in (1, -1))
        terms, moved = found[name].astype(np.float64) * v, dy * (above - below) / 2
        scale = np.abs(dy * above).sum() + np.abs(terms).sum()
        assert found[name].shape == x.shape
        assert abs(terms.sum() - moved.sum()) <= 3e-6 * scale, (form, name, terms.sum(), moved.sum())
    exact = dy.astype(np.float64) @ form.weight()
    np.testing.assert_allclose(found["x/in put"], exact, rtol=0, atol=3e-6 * np.abs(exact).max())


@pytest.mark.parametrize("seed", range(100, 112))
def test_float16(seed: int) -> None:
    """Rounded once: the sums are of float32."""
    form = drawn(seed, np.float16)
    model = form.model(symbolic=seed % 2 == 0)
    y = run(forward_session(model), form.feeds(model))[0]
    dy = np.random.default_rng(seed).standard_normal(y.shape).astype(np.float16)
    found = gradients(form, model, dy, ROUTES[seed % len(ROUTES)])["x/in put"]
    exact = dy.astype(np.float64) @ form.weight()
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, exact, rtol=2**-10, atol=1e-5 * np.abs(exact).max())


def rounding(bits: int, *, points: bool, constant: bool) -> Form:
    """One of accuracy_level 4, which rounds a to 8 bits."""
    rng = np.random.default_rng(bits)
    tensors = {
        0: rng.standard_normal((8, 256)).astype(np.float32),
        1: rng.integers(0, 256, (64, 8, 4 * bits)).astype(np.uint8),
        2: rng.uniform(0.05, 0.1, (64, 8)).astype(np.float32),
    }
    if points:
        tensors[3] = rng.integers(0, 256, (64, bits)).astype(np.uint8)
    attributes = {"K": 256, "N": 64, "bits": bits, "block_size": 32, "accuracy_level": 4}
    return Form(attributes, tensors, constant, bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("points", [False, True])
def test_the_forward_rounds_and_the_gradient_does_not(bits: int, points: bool) -> None:
    """dx stays dy · W, which the forward follows to its rounding; the forward stays that of the file, to the bit."""
    form = rounding(bits, points=points, constant=True)
    model = form.model(symbolic=True)
    session, x, rng = forward_session(model), form.a, np.random.default_rng(bits)
    graph = ob.backward(model, wrt=["x/in put"])
    assert [a.i for node in graph.graph.node for a in node.attribute if a.name == "accuracy_level"] == [4]
    dy = rng.standard_normal((8, 64)).astype(np.float32)
    own = ob.session(graph)
    answers = run(own, {"x/in put": x, "y_grad": dy})
    found = dict(zip([value.name for value in own.get_outputs()], answers, strict=True))
    exact = dy.astype(np.float64) @ form.weight()
    np.testing.assert_allclose(found["x/in put_grad"], exact, rtol=0, atol=3e-6 * np.abs(exact).max())
    np.testing.assert_array_equal(found["y"], run(session, {"x/in put": x})[0])
    v = rng.standard_normal(x.shape).astype(np.float32)
    above, below = (run(session, {"x/in put": x + s * v})[0].astype(np.float64) for s in (1, -1))
    moved, along = (dy * (above - below)).sum() / 2, (exact * v).sum()
    assert abs(moved - along) <= 0.01 * np.linalg.norm(exact) * np.linalg.norm(v)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scales_that_are_no_constants_are_not_rounded_with(bits: int) -> None:
    """With accuracy_level 4 onnxruntime packs the weight without them, and the forward of the file itself is wrong."""
    form = rounding(bits, points=True, constant=False)
    model = form.model(symbolic=False)
    graph = ob.backward(model, wrt=["ω"])
    assert not [a for node in graph.graph.node for a in node.attribute if a.name == "accuracy_level"]
    dy = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    own = ob.session(graph)
    answers = run(own, form.feeds(model) | {"y_grad": dy})
    found = dict(zip([value.name for value in own.get_outputs()], answers, strict=True))
    exact = form.a.astype(np.float64) @ form.weight().T
    np.testing.assert_allclose(found["y"], exact, rtol=0, atol=3e-6 * np.abs(exact).max())
