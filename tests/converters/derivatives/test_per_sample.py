"""per_sample against the same of batches of one row: gradients, Jacobians, training graphs, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

import onnx_backprop as ob
from tests.support.vmap_checks import Feeds, model_of, run

SEED = 23
ROWS = 5


def drawn(*shape: int, seed: int = SEED) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


# {name: the model, the shapes of rows of its inputs}
MODELS: dict[str, tuple[ModelProto, dict[str, tuple[int, ...]]]] = {
    "products": (
        model_of(
            "(float[N, 4] x) => (float[N, 3] y) { a = Gemm(x, w, b) t = Tanh(a) c = MatMul(t, v) y = Softmax(c) }",
            w=drawn(4, 5), b=drawn(5), v=drawn(5, 3),
        ),
        {"x": (4,)},
    ),
    "convolutions": (
        model_of(
            "(float[N, 2, 8, 8] x) => (float[N, 3] y) { a = Conv<pads = [1, 1, 1, 1]>(x, w, b) r = Relu(a) "
            "p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) c = Conv<strides = [2, 2], group = 2>(p, k) "
            "n = BatchNormalization(c, s, z, m, q) f = Flatten(n) y = MatMul(f, v) }",
            w=drawn(4, 2, 3, 3), b=drawn(4), k=drawn(6, 2, 2, 2), v=drawn(24, 3),
            s=drawn(6), z=drawn(6), m=drawn(6), q=np.abs(drawn(6)) + 1,
        ),
        {"x": (2, 8, 8)},
    ),
    "a normalised sequence": (
        model_of(
            "(float[N, T, 6] x) => (float[N, T, 3] y) { a = LayerNormalization(x, g, b) q = MatMul(a, w) "
            "k = Transpose<perm = [0, 2, 1]>(q) s = MatMul(q, k) p = Softmax(s) m = MatMul(p, q) y = MatMul(m, v) }",
            g=drawn(6), b=drawn(6), w=drawn(6, 6) / 2, v=drawn(6, 3),
        ),
        {"x": (4, 6)},
    ),
    "an embedding": (
        model_of(
            "(int64[N, T] i, float[N, 1, 1] s) => (float[N, 3] y) { e = Gather(w, i) d = Mul(e, s) "
            "m = ReduceMean<keepdims = 0>(d, one) y = MatMul(m, v) }",
            w=drawn(7, 5), v=drawn(5, 3), one=np.array([1]),
        ),
        {"i": (4,), "s": (1, 1)},
    ),
    "a recurrent layer": (
        model_of(
            "(float[N, T, 2] x) => (float[N, 3] y) { t = Transpose<perm = [1, 0, 2]>(x) , h = GRU<hidden_size = 3>(t, w, r) "
            "y = Squeeze(h, zero) }",
            w=drawn(1, 9, 2), r=drawn(1, 9, 3), zero=np.array([0]),
        ),
        {"x": (4, 2)},
    ),
    "rows that meet": (  # each row alone is what counts
        model_of("(float[N, 3] x) => (float[N, 3] y) { a = Mul(x, w) y = Softmax<axis = 0>(a) }", w=drawn(3)),
        {"x": (3,)},
    ),
}  # fmt: skip


def feeds_of(shapes: dict[str, tuple[int, ...]], rows: int = ROWS) -> Feeds:
    rng = np.random.default_rng(SEED)
    return {k: rng.integers(0, 7, (rows, *s)) if k == "i" else drawn(rows, *s) for k, s in shapes.items()}


def check(whole: ModelProto, plain: ModelProto, feeds: Feeds, rows_of: Callable[[str], bool]) -> None:
    """Each row of what `per_sample` makes is what a batch of that row gives; rows_of: outputs that have rows already."""
    got = run(whole, feeds)
    for n in range(ROWS):
        one = run(plain, {k: v[n : n + 1] for k, v in feeds.items()})
        for name, value in got.items():
            want = one[name][0] if rows_of(name) else one[name]
            assert value.shape == (ROWS, *want.shape), name
            atol = 1e-5 * max(1, float(np.abs(want).max()))
            np.testing.assert_allclose(value[n], want, rtol=2e-5, atol=atol, err_msg=f"{name}, seed {SEED}")


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    model, shapes = MODELS[name]
    floats = [k for k in shapes if k != "i"]
    weights = [t.name for t in model.graph.initializer if t.data_type == 1 and t.name not in "mq"]
    options = {"wrt": [*floats, *weights], "of": ["y"]}
    derived = ob.backward(model, per_sample=True, **options)
    y = run(model, feeds_of(shapes))["y"]
    check(
        derived,
        ob.backward(model, **options),
        feeds_of(shapes) | {"y_grad": drawn(*y.shape)},
        lambda n: n in ("y", *(f"{f}_grad" for f in floats)),
    )
    scans = [node for node in derived.graph.node if node.op_type == "Scan"]
    assert len(scans) == (1 if "recurrent" in name else 0)
    assert all("scan_input_axes" in {a.name for a in node.attribute} for node in scans), "over steps, not over rows"
    assert ob.derivatives(derived)[-1] == ob.derivatives(ob.backward(model, **options))[-1]


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("name", ["products", "convolutions", "a normalised sequence"])
def test_jacobians(name: str, direction: str) -> None:
    """(N, *y, *x) of a row's own, and (N, *y, *w)."""
    model, shapes = MODELS[name]
    feeds, weight = feeds_of(shapes), "w" if name == "products" else "v"
    got = run(ob.jacobian(model, ["x", weight], ["y"], direction=direction, per_sample=True), feeds)
    plain = ob.session(ob.jacobian(model, ["x", weight], ["y"], direction=direction))
    for n in range(ROWS):
        names = ["y", "y_jacobian_x", f"y_jacobian_{weight}"]
        y, by_x, by_w = (np.asarray(value) for value in plain.run(names, {"x": feeds["x"][n : n + 1]}))
        axis = y.ndim
        np.testing.assert_allclose(got["y_jacobian_x"][n], np.take(by_x[0], 0, axis - 1), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got[f"y_jacobian_{weight}"][n], by_w[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["mse", "softmax_cross_entropy"])
@pytest.mark.parametrize("name", ["products", "convolutions"])
def test_training_graphs(name: str, loss: str) -> None:
    model, shapes = MODELS[name]
    read = {"prediction": "c" if name == "products" else "y", "wrt_inputs": ["x"]}
    graph = ob.training_graph(model, loss=loss, per_sample=True, **read)
    plain = ob.training_graph(model, loss=loss, **read)
    targets = drawn(ROWS, 3) if loss == "mse" else np.random.default_rng(SEED).integers(0, 3, ROWS)
    assert graph.target is not None
    check(graph.model, plain.model, feeds_of(shapes) | {graph.target: targets}, lambda n: n in ("y", "x_grad"))
    assert list(graph.parameters) == list(plain.parameters)


def test_a_number_for_each_row_is_seeded_with_1() -> None:
    model = model_of(
        "(float[N, 3] x) => (float[N] e) { s = Mul(x, x) e = ReduceSum<keepdims = 0>(s, one) }", one=np.array([1])
    )
    x = drawn(ROWS, 3)
    np.testing.assert_allclose(
        run(ob.backward(model, wrt=["x"], per_sample=True), {"x": x})["x_grad"], 2 * x, rtol=1e-6
    )


def test_a_mean_over_rows_has_a_row_each() -> None:
    model = model_of("(float[N, 3] x) => (float m) { s = Mul(x, w) m = ReduceMean<keepdims = 0>(s) }", w=drawn(3))
    got = run(ob.backward(model, wrt=["w"], per_sample=True), {"x": (x := drawn(ROWS, 3))})
    np.testing.assert_allclose(got["m"], (x * drawn(3)).mean(axis=1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["w_grad"], x / 3, rtol=1e-5)


def test_a_file_of_one_row_that_is_set_free() -> None:
    model = model_of("(float[1, 3] x) => (float[1, 2] y) { y = MatMul(x, w) }", w=drawn(3, 2))
    derived = ob.jacobian(model, ["x"], ["y"], per_sample=["x"], free={"x": {0: "batch"}})
    got = run(derived, {"x": drawn(4, 3)})["y_jacobian_x"]
    np.testing.assert_allclose(got, np.broadcast_to(drawn(3, 2).T, (4, 2, 3)), rtol=1e-6)


def test_what_mixes_rows_has_a_warning() -> None:
    text = "(float[N, 2, 4] x) => (float[N, 2, 4] y) { y, p, q = BatchNormalization<training_mode = 1>(x, s, b, m, v) }"
    model = model_of(text, s=drawn(2), b=drawn(2, seed=1), m=drawn(2, seed=2), v=np.array([1, 2], np.float32))
    with pytest.warns(
        ob.OnnxBackpropWarning, match="BatchNormalization 'y' in training mode has the statistics of each row"
    ):
        ob.backward(model, wrt=["s"], per_sample=True)


TWO = "(float[N, 3] x, float[M, 3] z) => (float[K, 3] y) { y = Add(x, z) }"
REFUSALS = [
    ("(float[2, 3] x) => (float[2, 3] y) { y = Exp(x) }", True, r"no input has a symbol for its number of rows: 'x' \[2, 3\]"),
    (TWO, True, r"which axis has the rows is not known of 'x' \['N', 3\], 'z' \['M', 3\]"),
    ("(float[N, N] x) => (float[N, N] y) { y = Exp(x) }", True, r"'x' has the shape \['N', 'N'\]: two axes of rows"),
    (TWO, "x", "expected True or a list of inputs, got 'x'"),
    (TWO, ["q"], "the model has no input 'q'"),
    ("(float[2, 3] x) => (float[2, 3] y) { y = Exp(x) }", ["x"], "'x': expected inputs with a symbol at axis 0"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "per_sample", "message"), REFUSALS)
def test_refusals(text: str, per_sample: Any, message: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.backward(model_of(text), wrt=["x"], per_sample=per_sample)


def test_rows_at_another_axis() -> None:
    """x and a state with its rows at axis 1; y, and its seed, have them there too."""
    text = "(float[N, 2] x, float[1, N, 3] h) => (float[1, N, 3] y) { a = MatMul(x, w) y = Mul(a, h) }"
    model = model_of(text, w=drawn(2, 3))
    got = run(
        ob.backward(model, wrt=["h", "w"], per_sample=True),
        {"x": drawn(ROWS, 2), "h": drawn(1, ROWS, 3), "y_grad": np.ones((1, ROWS, 3), np.float32)},
    )
    np.testing.assert_allclose(got["h_grad"], (drawn(ROWS, 2) @ drawn(2, 3))[None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["w_grad"], drawn(ROWS, 2)[:, :, None] * drawn(1, ROWS, 3)[0][:, None], rtol=1e-5)


def test_inputs_that_are_named() -> None:
    """Two symbols that are the same rows; and one that is shared."""
    x, z = drawn(ROWS, 3), drawn(ROWS, 3, seed=1)
    both = ob.backward(model_of(TWO.replace("Add", "Mul")), wrt=["x"], of=["y"], per_sample=["x", "z"])
    np.testing.assert_allclose(run(both, {"x": x, "z": z, "y_grad": z})["x_grad"], z * z, rtol=1e-6)


def test_an_optimizer_wants_one_gradient() -> None:
    model, _ = MODELS["products"]
    with pytest.raises(ob.InvalidArgumentError, match="the gradients of each row do not go with an optimizer"):
        ob.training_graph(model, loss="mse", per_sample=True, optimizer="sgd")
