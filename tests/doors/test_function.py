"""`function`: values, products and Jacobians of every order beside formulas, and what is refused."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob
from tests.doors.models import B, K, W, X, jacobian_of_waves, row, waves


def test_values_and_both_products() -> None:
    f = ob.function(waves())
    assert (f.inputs, f.variables, f.targets) == (("x", "b", "k"), ("x", "b"), ("y", "z"))
    assert (f.shapes["x"], f.shapes["z"], f.types["k"]) == ((None, 3), (), np.dtype(np.int64))
    y, z, c = f(X, B, K)
    np.testing.assert_allclose(y, np.sin(X + B) @ W)
    assert (z, c) == (pytest.approx((y**2).sum()), 6)
    expected = jacobian_of_waves(X, B)
    rng = np.random.default_rng(1)
    u, v = rng.standard_normal((4, 2)), rng.standard_normal((4, 3))
    dx, db = f.vjp(X, B, K, u, np.array(2.0))
    np.testing.assert_allclose(np.concatenate([dx.ravel(), db]), np.append(u, 2.0) @ expected)
    dy, dz = f.jvp(X, B, K, v, 3 * B)
    np.testing.assert_allclose(np.append(dy, dz), expected @ np.append(v, 3 * B))
    blocks = f.jacobian(X, B, K)
    assert [block.shape for block in blocks] == [(4, 2, 4, 3), (4, 2, 3), (4, 3), (3,)]
    np.testing.assert_allclose(
        np.concatenate([blocks[0].reshape(8, 12), blocks[1].reshape(8, 3)], axis=1), expected[:8]
    )
    np.testing.assert_allclose(np.concatenate([blocks[2].ravel(), blocks[3]]), expected[8])


def test_derivatives_of_derivatives() -> None:
    f = ob.function(waves(), of=["y"], wrt=["x"])
    u = np.random.default_rng(2).standard_normal((4, 2))
    curvature = -np.sin(X + B) * (u @ W.T)  # of uᵀy by x, elementwise
    by_x, by_u = f.vjp.jacobian(X, B, K, u)
    np.testing.assert_allclose(by_x.reshape(12, 12), np.diag(curvature.ravel()), atol=1e-12)
    assert by_u.shape == (4, 3, 4, 2)
    dx, du = f.vjp.vjp(X, B, K, u, np.ones((4, 3)))
    np.testing.assert_allclose(dx, curvature)
    np.testing.assert_allclose(du, np.cos(X + B) @ W)
    third = f.vjp.vjp.vjp(X, B, K, u, np.ones((4, 3)), np.ones((4, 3)), np.zeros((4, 2)))[0]
    np.testing.assert_allclose(third, -np.cos(X + B) * (u @ W.T))


def test_weights_and_inner_values() -> None:
    f = ob.function(waves("float"), wrt=["W", "b"], of=["wave", "y"])
    assert (f.inputs, f.variables, f.outputs) == (("x", "b", "k", "W"), ("W", "b"), ("wave", "y"))
    np.testing.assert_array_equal(f.values["W"], W)
    wave, y = f(X, B, K, 2 * W)  # float64 is cast
    assert (wave.dtype, y.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(y, np.sin(X + B) @ W * 2, rtol=1e-5, atol=1e-6)
    dw, _ = f.vjp(X, B, K, W, np.zeros((4, 3)), np.ones((4, 2)))
    np.testing.assert_allclose(dw, np.sin(X + B).T @ np.ones((4, 2)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(f.showing(["shifted"])(X, B, K, W)[0], (X.astype("f") + B.astype("f")))


def test_rows_of_a_file_of_one() -> None:
    one, many = ob.function(row()), ob.function(row(), free={"x": {0: "rows"}})
    x = np.random.default_rng(3).standard_normal((7, 3)).astype("f")
    np.testing.assert_allclose(many(x)[0], np.concatenate([one(r[None])[0] for r in x]), rtol=1e-6)
    gradients = [one.vjp(r[None], np.ones((1, 1)))[0] for r in x]
    np.testing.assert_allclose(many.vjp(x, np.ones((7, 1)))[0], np.concatenate(gradients), rtol=1e-5, atol=1e-6)
    assert many.lengths((5, 3)) == [(5, 1)]


def test_options_of_backward() -> None:
    stepped = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (double[2] x) => (double[2] y) { s = Sign (x) y = Mul (s, x) z = Identity (s) }""")
    with pytest.raises(ob.InvalidArgumentError, match="the derivative by 'x' is zero|does not depend|Sign"):
        _ = ob.function(stepped, of=["s"], strict=True).vjp
    stopped = ob.function(stepped, stop=["s"])
    np.testing.assert_array_equal(stopped.vjp([2.0, -3.0], [1.0, 1.0])[0], [1.0, -1.0])


def test_threads_and_copies() -> None:
    f = ob.function(waves())
    expected = [f.vjp(n * X, B, K, np.ones((4, 2)), 1.0)[0] for n in range(20)]
    copy = pickle.loads(pickle.dumps(f))
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda n: copy.vjp(n * X, B, K, np.ones((4, 2)), 1.0)[0], range(20)))
    np.testing.assert_array_equal(got, expected)


def _in_child(f: Any, queue: Any) -> None:
    try:
        queue.put(f(X, B, K)[1])
    except ob.KernelError as e:
        queue.put(str(e))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_says_so() -> None:
    f = ob.function(waves())
    f(X, B, K)
    queue = get_context("fork").Queue()
    process = get_context("fork").Process(target=_in_child, args=(f, queue))
    process.start()
    assert 'get_context("spawn")' in queue.get(timeout=60)
    process.join()


def test_invalid_use_is_refused() -> None:
    f = ob.function(waves())
    with pytest.raises(ob.InvalidArgumentError, match="expected x, b, k, got 2 arrays"):
        f(X, B)
    with pytest.raises(ob.InvalidArgumentError, match="'k' has type int64, got an array of float64"):
        f(X, B, X[0])
    with pytest.raises(ob.InvalidArgumentError, match="expected the name of a graph input or an initializer, got 'w'"):
        ob.function(waves(), wrt=["w"])
    with pytest.raises(ob.InvalidArgumentError, match="'k' has type"):
        ob.function(waves(), wrt=["k"])
    with pytest.raises(ob.InvalidArgumentError, match="of: expected the name of a graph output.*got 'q'"):
        ob.function(waves(), of=["q"])
    noisy = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[2] x) => (float[2] y) { e = RandomNormalLike (x) y = Mul (x, e) }""")
    with pytest.raises(ob.UnsupportedError, match="RandomNormalLike .* draws random numbers"):
        ob.function(noisy)
    lists = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[2] x) => (seq(float[2]) y) { y = SequenceConstruct (x, x) }""")
    with pytest.raises(ob.UnsupportedError, match="'y' is no tensor"):
        ob.function(lists)


@pytest.mark.parametrize("rows", ["N", "?"])
@pytest.mark.parametrize("count", [1, 3])
def test_lengths_that_contradict_each_other(rows: str, count: int) -> None:
    f = ob.function(
        parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[{rows}, 4] x, float[4] c) => (float[{rows}, 4] y) {{ y = Add (x, c) }}""")
    )
    x, c, other = np.ones((10, 4), "f"), np.ones(4, "f"), np.ones((count, 4), "f")
    with pytest.raises(ob.InvalidArgumentError, match=rf"'y_grad': .* got \({count}, 4\), but .* is 10 in 'x'"):
        f.vjp(x, c, other)
    with pytest.raises(ob.InvalidArgumentError, match=rf"'x_tangent': .* got \({count}, 4\), but .* is 10 in 'x'"):
        f.jvp(x, c, other, c)


def test_shapes_that_the_model_does_not_have() -> None:
    f = ob.function(waves())
    with pytest.raises(ob.InvalidArgumentError, match=r"'x': expected the shape \(N, 3\), got \(3\). Give it 2 dim"):
        f(X[0], B, K)
    with pytest.raises(ob.InvalidArgumentError, match=r"'x': expected the shape \(N, 3\), got \(4, 2\). Give axis 1"):
        f(X[:, :2], B, K)
    with pytest.raises(ob.InvalidArgumentError, match=r"free=\{'x': \{0: 'batch'\}\}"):
        ob.function(row())(np.ones((2, 3), "f"))
    any_rank = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float x, float[] z) => (y) {y = Add(x, z)}'
    )
    any_rank.graph.input[0].type.tensor_type.ClearField("shape")
    any_rank.graph.input[1].type.tensor_type.ClearField("shape")
    with pytest.raises(ob.InvalidArgumentError, match=r"cannot run these arrays, 'x' \(2\), 'z' \(3\): "):
        ob.function(any_rank)(np.ones(2), np.ones(3))
