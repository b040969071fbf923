"""free: a fixed length becomes a symbol. A run of four rows is four runs of one, outputs and gradients alike."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob

RNG = np.random.default_rng(17)


def model_of(text: str, **tensors: tuple[int, ...]) -> ModelProto:
    """A model with random weights of the shapes given; those called s… are written in the text."""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g {text}')
    for name, shape in tensors.items():
        values = 0.5 * np.random.default_rng(len(name) + sum(shape)).standard_normal(shape)
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    return model


ATTENTION = """
    p = MatMul(x, wp) c = Concat<axis = 1>(cls, p) h = Add(c, pos)
    q0 = MatMul(h, wq) q1 = Reshape(q0, split) q2 = Transpose<perm = [0, 2, 1, 3]>(q1) q = Reshape(q2, merged)
    k0 = MatMul(h, wk) k1 = Reshape(k0, split) k2 = Transpose<perm = [0, 2, 3, 1]>(k1) k = Reshape(k2, merged_k)
    v0 = MatMul(h, wv) v1 = Reshape(v0, split) v2 = Transpose<perm = [0, 2, 1, 3]>(v1) v = Reshape(v2, merged)
    a0 = MatMul(q, k) a = Softmax<axis = -1>(a0) o0 = MatMul(a, v) o1 = Reshape(o0, apart)
    o2 = Transpose<perm = [0, 2, 1, 3]>(o1) o = Reshape(o2, joined)
    first = Gather<axis = 1>(o, zero) y = MatMul(first, wo)"""
SEQUENCE_FIRST = """
    h = MatMul(x, wp)
    q0 = MatMul(h, wq) q1 = Reshape(q0, heads) q = Transpose<perm = [1, 0, 2]>(q1)
    k0 = MatMul(h, wk) k1 = Reshape(k0, heads) k = Transpose<perm = [1, 2, 0]>(k1)
    a0 = MatMul(q, k) a = Softmax<axis = -1>(a0) o0 = MatMul(a, q)
    o1 = Transpose<perm = [1, 0, 2]>(o0) o2 = Reshape(o1, rows) o3 = Gemm(o2, wo, bo) y = Reshape(o3, back)"""
WEIGHTS = {"wp": (3, 8), "wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "wo": (8, 4)}

# name: (model, the shape of x for one row, axis of the batch in x and in y)
MODELS: dict[str, tuple[Callable[[], ModelProto], tuple[int, ...], int, int]] = {
    "flatten": (
        lambda: model_of(
            "(float[1,3,6,6] x) => (float[1,5] y) <int64[2] s = {1, 32}> { c = Conv(x, w) f = Reshape(c, s) y = Gemm(f, v) }",
            w=(2, 3, 3, 3),
            v=(32, 5),
        ),
        (1, 3, 6, 6),
        0,
        0,
    ),
    "flatten with -1 in the wrong place": (
        lambda: model_of(
            "(float[1,3,6,6] x) => (float[1,5] y) <int64[2] s = {1, -1}> { c = Conv(x, w) f = Reshape(c, s) y = Gemm(f, v) }",
            w=(2, 3, 3, 3),
            v=(32, 5),
        ),
        (1, 3, 6, 6),
        0,
        0,
    ),
    "a lonely axis": (
        lambda: model_of(
            "(float[1,4] x) => (float[1,1,4] y) <int64[3] s = {1, 1, 4}> { f = Reshape(x, s) y = MatMul(f, v) }",
            v=(4, 4),
        ),
        (1, 4),
        0,
        0,
    ),
    "groups": (
        lambda: model_of(
            "(float[1,4,3,3] x) => (float[1,4,3,3] y) <int64[3] s = {1, 2, -1}, int64[4] t = {1, 4, 3, 3},"
            " float[2] one = {1, 1}, float[2] zero = {0, 0}>"
            "{ a = Reshape(x, s) b = InstanceNormalization(a, one, zero) c = Reshape(b, t) y = Conv(c, w) }",
            w=(4, 4, 1, 1),
        ),
        (1, 4, 3, 3),
        0,
        0,
    ),
    "attention, batch first, a class token": (
        lambda: model_of(
            "(float[1,5,3] x) => (float[1,4] y) <int64[4] split = {1, 6, 2, 4}, int64[3] merged = {2, 6, 4},"
            " int64[3] merged_k = {2, 4, 6}, int64[4] apart = {1, 2, 6, 4}, int64[3] joined = {1, 6, 8}, int64 zero = {0}>"
            f"{{ {ATTENTION} }}",
            cls=(1, 1, 8),
            pos=(1, 6, 8),
            **WEIGHTS,
        ),
        (1, 5, 3),
        0,
        0,
    ),
    "attention, sequence first": (
        lambda: model_of(
            "(float[5,1,3] x) => (float[5,1,4] y) <int64[3] heads = {5, 2, 4}, int64[2] rows = {5, 8}, int64[3] back = {5, 1, 4}>"
            f"{{ {SEQUENCE_FIRST} }}",
            bo=(4,),
            **{name: shape for name, shape in WEIGHTS.items() if name != "wv"},
        ),
        (5, 1, 3),
        1,
        1,
    ),
    "LSTM": (
        lambda: model_of(
            "(float[5,1,3] x) => (float[1,1,4] y){ z, y = LSTM<hidden_size = 4>(x, w, r, b, , h, c) }",
            w=(1, 16, 3),
            r=(1, 16, 4),
            b=(1, 32),
            h=(1, 1, 4),
            c=(1, 1, 4),
        ),
        (5, 1, 3),
        1,
        1,
    ),
    "GRU from zeros of two rows": (
        lambda: model_of(
            "(float[5,2,3] x) => (float[1,2,4] y) <int64[3] s = {1, 2, 4}>"
            "{ h = Expand(zero, s) z, y = GRU<hidden_size = 4>(x, w, r, b, , h0) }",
            w=(1, 12, 3),
            r=(1, 12, 4),
            b=(1, 24),
        ),
        (5, 2, 3),
        1,
        1,
    ),
    "a table that is expanded": (
        lambda: model_of(
            "(float[1,5,3] x) => (float[1,7,3] y) <int64[3] s = {1, 2, 3}>"
            "{ t = Expand(token, s) u = Tanh(t) c = Concat<axis = 1>(x, u) y = Mul(c, c) }",
            token=(1, 1, 3),
        ),
        (1, 5, 3),
        0,
        0,
    ),
    "a shape that nodes make of constants": (
        lambda: model_of(
            "(float[1,5,3] x) => (float[1,6,3] y) <int64[3] s = {1, -1, -1}, int64[3] minus = {-1, -1, -1}, int64[3] ones = {1, 1, 1}>"
            "{ m = Equal(s, minus) e = Where(m, ones, s) t = Expand(token, e) c = Concat<axis = 1>(t, x) y = Mul(c, c) }",
            token=(1, 1, 3),
        ),
        (1, 5, 3),
        0,
        0,
    ),
    "expanded rows": (
        lambda: model_of(
            "(float[2,1,3] x) => (float[2,4,3] y) <int64[3] s = {2, 4, 3}> { a = Expand(x, s) b = Mul(a, w) y = Sin(b) }",
            w=(4, 3),
        ),
        (2, 1, 3),
        0,
        0,
    ),
    "sizes": (
        lambda: model_of(
            "(float[1,2,3,3] x) => (float[1,2,6,6] y) <int64[4] s = {1, 2, 6, 6}>"
            '{ a = Resize<mode = "linear">(x, , , s) y = Conv(a, w) }',
            w=(2, 2, 1, 1),
        ),
        (1, 2, 3, 3),
        0,
        0,
    ),
    **{
        f"{name} along the last of three axes, by default": (
            lambda name=name: model_of(
                f"(float[3,1,4] x) => (float[3,1,4] y) {{ a = MatMul(x, v) y = {name}(a) }}", v=(4, 4)
            ),
            (3, 1, 4),
            1,
            1,
        )
        for name in ("LogSoftmax", "LpNormalization", "Softmax")
    },
    "a batch of two": (
        lambda: model_of(
            "(float[2,3,4] x) => (float[2,6,2] y) <int64[2] s = {6, 4}, int64[3] t = {2, 6, 2}>"
            "{ a = Reshape(x, s) b = MatMul(a, v) y = Reshape(b, t) }",
            v=(4, 4),
        ),
        (2, 3, 4),
        0,
        0,
    ),
}


def gru_of_zeros(model: ModelProto) -> ModelProto:
    """Its first state as the zeros that an exporter keeps, for two rows."""
    del model.graph.node[0]
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 2, 4), np.float32), "h0"))
    return model


def outputs(model: ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = ob.session(model)
    return dict(zip([v.name for v in session.get_outputs()], map(np.asarray, session.run(None, feeds)), strict=True))


def parts(array: np.ndarray, axis: int, rows: int) -> list[np.ndarray]:
    return np.split(array, array.shape[axis] // rows, axis)


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.filterwarnings("ignore:free. the place of 'batch'")
def test_four_rows_are_four_runs_of_one(case: str) -> None:
    make, shape, axis, y_axis = MODELS[case]
    model = make() if "GRU" not in case else gru_of_zeros(make())
    weights = [
        t.name for t in model.graph.initializer if t.data_type == 1 and t.name not in ("h", "c", "h0", "one", "zero")
    ]
    wrt = ["x", *weights]
    one = ob.vjp(model, wrt=wrt, of=["y"])
    freed = ob.vjp(model, wrt=wrt, of=["y"], free={"x": {axis - len(shape): "batch"}})
    assert model.SerializeToString() == (make() if "GRU" not in case else gru_of_zeros(make())).SerializeToString()
    rows = shape[axis]
    x = RNG.standard_normal((*shape[:axis], 4 * rows, *shape[axis + 1 :])).astype(np.float32)
    single = outputs(one, {"x": parts(x, axis, rows)[0], "y_grad": np.zeros(dims(model, "y"), np.float32)})
    y_shape = list(single["y"].shape)
    dy = RNG.standard_normal([*y_shape[:y_axis], 4 * rows, *y_shape[y_axis + 1 :]]).astype(np.float32)
    got = outputs(freed, {"x": x, "y_grad": dy})
    each = [
        outputs(one, {"x": a, "y_grad": b}) for a, b in zip(parts(x, axis, rows), parts(dy, y_axis, rows), strict=True)
    ]
    np.testing.assert_allclose(got["y"], np.concatenate([e["y"] for e in each], y_axis), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["x_grad"], np.concatenate([e["x_grad"] for e in each], axis), rtol=1e-4, atol=1e-5)
    for name in weights:
        total = np.sum([e[f"{name}_grad"] for e in each], axis=0)
        np.testing.assert_allclose(got[f"{name}_grad"], total, rtol=1e-3, atol=1e-5, err_msg=name)


def dims(model: ModelProto, name: str) -> list[int]:
    (value,) = (v for v in model.graph.output if v.name == name)
    return [d.dim_value for d in value.type.tensor_type.shape.dim]


def test_training_of_a_file_of_one_row() -> None:
    model = MODELS["flatten"][0]()
    x, labels = RNG.standard_normal((4, 3, 6, 6)).astype(np.float32), np.arange(4)
    fixed = ob.Trainer(ob.training_graph(model, loss="softmax_cross_entropy", optimizer="sgd"))
    with pytest.raises(ob.InvalidArgumentError, match=r"not 4, or convert the model with free=\{'x': \{0: 'batch'\}\}"):
        fixed.step(x, labels)
    graph = ob.training_graph(model, loss="softmax_cross_entropy", optimizer="sgd", free={"x": {0: "batch"}})
    assert [d.dim_param for v in graph.model.graph.input[:2] for d in v.type.tensor_type.shape.dim][::4] == [
        "batch"
    ] * 2
    losses = [fixed.step(x[n : n + 1], labels[n : n + 1]) for n in range(4)]
    del losses[1:]  # the weights have changed
    assert np.isclose(ob.Trainer(graph).step(x[:1], labels[:1]), losses[0])
    assert np.isfinite(ob.Trainer(graph).step(x, labels))
    assert ob.explain_gradients(model, wrt=["x"], free={"x": {0: "batch"}}).ok


def test_what_only_later_nodes_decide_is_told() -> None:
    make, *_ = MODELS["attention, sequence first"]
    with pytest.warns(ob.OnnxBackpropWarning, match="the place of 'batch' in the shapes of .*'o2'.* Compare a run"):
        ob.backward(make(), wrt=["x"], free={"x": {1: "batch"}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ob.backward(MODELS["attention, batch first, a class token"][0](), wrt=["x"], free={"x": {0: "batch"}})


def test_two_symbols_and_two_inputs() -> None:
    model = model_of(
        "(float[1,5,3] x, float[1,5,3] z) => (float[1,15] y) <int64[2] s = {1, 15}> { a = Add(x, z) b = Sin(a) y = Reshape(b, s) }"
    )
    derived = ob.backward(model, wrt=["x"], free={"x": {0: "batch"}, "z": {0: "batch"}})
    x = RNG.standard_normal((4, 5, 3)).astype(np.float32)
    got = outputs(derived, {"x": x, "z": x, "y_grad": np.ones((4, 15), np.float32)})
    np.testing.assert_allclose(got["x_grad"], np.cos(2 * x), rtol=1e-5, atol=1e-6)
    both = model_of("(float[1,5,3] x) => (float[1,5,3] y) { y = Sin(x) }")
    derived = ob.backward(both, wrt=["x"], free={"x": {0: "batch", 1: "length"}})
    shape = [d.dim_param or d.dim_value for d in derived.graph.output[-1].type.tensor_type.shape.dim]
    assert shape == ["batch", "length", 3]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a row is taken": (
        "(float[1,4] x) => (float[1,4] y) <int64[1] a = {0}, int64[1] b = {1}> { y = Slice(x, a, b, a) }",
        {},
        r"Slice.*'y'.*of 'x' it gives the same shape for every length",
    ),
    "the axis goes": ("(float[1,4] x) => (float[4] y) <int64[1] a = {0}> { y = Squeeze(x, a) }", {}, r"Squeeze.*'y'"),
    "one row of them": (
        "(float[1,4] x) => (float[4] y) <int64 a = {0}> { y = Gather<axis = 0>(x, a) }",
        {},
        "Gather.*'y'.*the same shape",
    ),
    "rows of its own": (
        "(float[2,4] x) => (float[2,4] y) { y = Mul(x, rows) }",
        {"rows": (2, 4)},
        r"Mul.*'y'.*its inputs, 'x' \[2, 4\], 'rows' \[2, 4\], do not fit together",
    ),
    "states that differ": (
        "(float[5,2,3] x) => (float[1,2,4] y) { z, y = GRU<hidden_size = 4>(x, w, r, b, , h) }",
        {"w": (1, 12, 3), "r": (1, 12, 4), "b": (1, 24), "h": (1, 2, 4)},
        "GRU.*its input 'h' holds another row for each of 2",
    ),
    "a product over it": (
        "(float[1,4] x) => (float[5] y) <int64[1] s = {4}> { a = Reshape(x, s) y = MatMul(a, v) }",
        {"v": (4, 5)},
        "do not fit together",
    ),
    "shapes in a branch": (
        "(float[1,4] x) => (float[4] y) <bool n = {0}, int64[1] s = {4}>"
        "{ c = Not(n) y = If(c) <then_branch = t () => (float[4] p) { p = Reshape(x, s) }, else_branch = e () => (float[4] q) { q = Reshape(x, s) }> }",
        {},
        "If.*'y'.*there are shapes inside its branches or its body",
    ),
    "probabilities over rows": (
        "(float[1,4] x) => (float[1,4] y) { y = Softmax<axis = 0>(x) }",
        {},
        "Softmax.*'y'.*it works along that axis",
    ),
    **{
        f"{name} over rows": (
            f"(float[1,4] x) => (float[1,4] y) {{ y = {name}<axis = 0>(x) }}",
            {},
            f"{name}.*'y'.*it works along that axis",
        )
        for name in ("LogSoftmax", "LpNormalization")
    },
    "a mean of rows": (
        "(float[1,4] x) => (float[1,4] y) <int64[1] a = {0}> { m = ReduceMean(x, a) y = Sub(x, m) }",
        {},
        "ReduceMean.*'m'.*the same shape",
    ),
    "rows by rows": (
        "(float[1,4] x) => (float[1,1] y) { t = Transpose(x) y = MatMul(x, t) }",
        {},
        "MatMul.*'y'.*two axes of 'y' follow it, each row would meet every other",
    ),
    "a sum of rows": (
        "(float[1,4] x) => (float[4,4] y) { t = Transpose(x) y = MatMul(t, x) }",
        {},
        "MatMul.*'y'.*the same shape",
    ),
    "rows among channels": (
        "(float[1,1,5,5] x) => (float[1,1,3,3] y) <int64[4] s = {1, 1, 5, 5}>"
        "{ t = Transpose<perm = [1, 0, 2, 3]>(x) y = Conv<group = 1>(t, w) }",
        {"w": (1, 1, 3, 3)},
        "Conv.*'y'.*it works along that axis",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_keeps_to_the_length_is_named(case: str) -> None:
    text, tensors, message = REFUSED[case]
    axis = 1 if "5,2" in text else 0
    with pytest.raises(ob.UnsupportedError, match=message) as raised:
        ob.backward(model_of(text, **tensors), wrt=["x"], of=["y"], free={"x": {axis: "batch"}})
    assert re.search(r"free: it keeps to the length \d of axis \d of 'x'", str(raised.value))


ARGUMENTS: dict[str, tuple[Any, str]] = {
    "unknown": ({"xx": {0: "n"}}, "free: expected the name of an input of the model, got 'xx'. Did you mean 'x'"),
    "a weight": ({"v": {0: "n"}}, "free: expected the name of an input of the model, got 'v'"),
    "no mapping": ({"x": "n"}, "free: 'x': expected symbols by axis, as .*got 'n'"),
    "nothing": ({}, "free: expected axes by input"),
    "no axis": ({"x": {4: "n"}}, "free: 'x' has 4 axes, got axis 4"),
    "no name": ({"x": {0: "1n"}}, "free: 'x': expected a name for axis 0, got '1n'"),
    "two lengths": ({"x": {0: "n", 1: "n"}}, r"free: 'n' stands for different lengths, \[1, 3\]"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_bad_arguments(case: str) -> None:
    free, message = ARGUMENTS[case]
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.backward(MODELS["flatten"][0](), wrt=["x"], free=free)
    symbolic = model_of("(float[n,4] x) => (float[n,4] y) { y = Sin(x) }")
    with pytest.raises(ob.InvalidArgumentError, match="free: axis 0 of 'x' has the length 'n' already. Leave it out"):
        ob.backward(symbolic, wrt=["x"], free={"x": {0: "n"}})
