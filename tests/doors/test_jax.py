"""`ob.jax.function` beside the same mathematics in JAX (0.10): jit, grad, vmap, second derivatives, both precisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from tests.doors.models import B, K, W, X, classifier, images, waves, weights_of

jax: Any = pytest.importorskip("jax", minversion="0.10", reason="needs jax: make doors")
jnp: Any = jax.numpy


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def reference(x: Any, b: Any, k: Any, w: Any = W) -> Any:
    y = jnp.sin(x + b) @ w
    return y, (y * y).sum(), k.sum()


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """A number that is not linear in the outputs."""

    def call(x: Any, b: Any, *w: Any) -> Any:
        y, z, c = function(x, b, K, *w)
        return (y**3).sum() * jnp.log(z) * c

    return call


def test_values() -> None:
    f = ob.jax.function(waves())
    for got in (f(X, B, K), jax.jit(f)(X, B, K), f(X, k=K, b=B)):
        for a, e in zip(got, reference(X, B, K), strict=True):
            np.testing.assert_allclose(a, e)
    integers_first = ob.jax.function(waves(), of=["c", "z"])
    slope = jax.grad(lambda x: integers_first(x, B, K)[1])(X)
    np.testing.assert_allclose(slope, jax.grad(lambda x: reference(x, B, K)[1])(X))
    x_alone = ob.jax.function(waves(), wrt=["x"])
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: x_alone(x, B, K)[1]))(X), slope)
    single = ob.jax.function(waves(), of=["z"])
    assert single(X, B, K).shape == ()
    assert single(X[:2], B, K.astype(np.int8)).dtype == np.float64


@pytest.mark.parametrize(
    "derivative",
    [
        lambda g: jax.grad(g, (0, 1, 2)),
        lambda g: jax.jit(jax.value_and_grad(g, 1)),
        lambda g: jax.jacrev(jax.grad(g)),
        lambda g: jax.jit(jax.jacrev(jax.jacrev(jax.grad(g, 1), 1), 1)),
        lambda g: jax.jit(jax.jacfwd(g, (0, 1))),
        lambda g: jax.hessian(g, (0, 1, 2)),
        lambda g: jax.jacfwd(jax.jacrev(jax.jacfwd(g, 1), 1), 1),
        lambda g: lambda x, b, w: jax.jvp(jax.grad(g, (0, 2)), (x, b, w), (jnp.cos(x), b, w + 1)),
        lambda g: lambda x, b, w: jax.linearize(g, x, b, w)[1](jnp.cos(x), 0 * b, w),
        lambda g: jax.grad(lambda x, b, w: jax.jvp(g, (x, b, w), (jnp.cos(x), b, w))[1], (0, 1)),
        lambda g: jax.vmap(jax.grad(g), (0, None, None)),
        lambda g: jax.jit(jax.vmap(jax.hessian(g, 1), (0, None, None))),
        lambda g: jax.grad(lambda x, b, w: jax.vmap(g, (0, None, None))(x, b, w).sum(), (0, 1, 2)),
        lambda g: jax.hessian(
            lambda x, b, w: jax.vmap(jax.vmap(g, (None, 0, None)), (0, None, None))(x, b, w).prod(), 1
        ),
        lambda g: jax.jit(jax.vmap(jax.vmap(g, (None, 0, None)), (0, None, None))),
    ],
    ids=[
        "grad",
        "jit",
        "second",
        "third",
        "forward",
        "hessian",
        "all three",
        "hvp",
        "linearize",
        "reverse over forward",
        "vmap",
        "vmap of a hessian",
        "gradient of vmap",
        "hessian of vmap twice",
        "vmap twice",
    ],
)
def test_derivatives(derivative: Any, request: pytest.FixtureRequest) -> None:
    f = ob.jax.function(waves(), wrt=["x", "b", "W"])
    np.testing.assert_array_equal(f.values["W"], W)
    batched = "vmap" in request.node.callspec.id
    x = np.random.default_rng(1).standard_normal((5, 4, 3)) if batched else X
    b = np.random.default_rng(2).standard_normal((2, 3)) if "twice" in request.node.callspec.id else B
    got, expected = (derivative(loss(function))(x, b, W) for function in (f, reference))
    for a, e in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-9 * np.abs(e).max())


def test_a_training_in_float32() -> None:
    with jax.enable_x64(False):
        f, model = ob.jax.function(classifier(), wrt=["head", "kernel"]), weights_of(classifier())
        x, labels = images(20), np.arange(20) % 3

        def twin(x: Any, head: Any, kernel: Any) -> Any:
            features = jax.nn.relu(jax.lax.conv(x, kernel, (1, 1), "SAME") + model["bias"][:, None, None])
            return features.reshape(20, 4, 3, 2, 3, 2).mean((3, 5)).reshape(20, 36) @ head + model["shift"]

        def losses(network: Any) -> list[float]:
            def cost(weights: dict[str, Any]) -> Any:
                return -jax.nn.log_softmax(network(x, **weights))[np.arange(20), labels].mean()

            step, weights, costs = jax.jit(jax.value_and_grad(cost)), dict(f.values), []
            for _ in range(20):
                value, gradients = step(weights)
                weights = {name: w - 0.5 * gradients[name] for name, w in weights.items()}
                costs.append(float(value))
            assert weights["head"].dtype == np.float32
            return costs

        got, expected = losses(f), losses(twin)
        np.testing.assert_allclose(got, expected, rtol=1e-4)
        assert got[-1] < 0.9 * got[0]


def test_invalid_use_is_refused() -> None:
    f = ob.jax.function(waves(), wrt=["x"])
    with pytest.raises(ob.InvalidArgumentError, match="'b' is not among those to differentiate by"):
        jax.jacfwd(lambda b: f(X, b, K)[0])(B)
    with pytest.raises(ob.InvalidArgumentError, match="'b' is not among those to differentiate by"):
        jax.grad(lambda b: f(X, b, K)[1])(B)
    with pytest.raises(ob.InvalidArgumentError, match="expected x, b, k, got the arguments 0, 1"):
        f(X, B)
    with pytest.raises(ob.InvalidArgumentError, match="'x' has type float64, got an array of float32"):
        f(X.astype("f"), B, K)
    with pytest.raises(ob.InvalidArgumentError, match="'k' has type int64, got an array of float64"):
        f(X, B, K * 1.0)
    with jax.enable_x64(False), pytest.raises(ob.InvalidArgumentError, match="jax_enable_x64"):
        f(X, B, K)
