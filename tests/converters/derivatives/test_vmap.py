"""vmap against a loop of onnxruntime over rows of the model that came: forms, names, shapes, nesting, refusals."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.reverse.batching.elementwise import POINTWISE
from tests.support.adjoint import run as run_session
from tests.support.renamed import STYLES, renamed

SEED = 11
Feeds = dict[str, np.ndarray]


def model_of(text: str, opset: int = 21, **weights: np.ndarray) -> ModelProto:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


def drawn(*shape: int, seed: int = SEED) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(model: ModelProto, feeds: Feeds) -> Feeds:
    session = ob.session(model)
    return dict(zip([value.name for value in session.get_outputs()], run_session(session, feeds), strict=True))


def dims(model: ModelProto, name: str) -> list[int | str]:
    (value,) = (v for v in (*model.graph.input, *model.graph.output) if v.name == name)
    return [d.dim_value or d.dim_param for d in value.type.tensor_type.shape.dim]


def check(
    model: ModelProto, feeds: Feeds, axes: Mapping[str, int], out_axes: int | Mapping[str, int] = 0, atol: float = 1e-6
) -> ModelProto:
    """`vmap` gives what a loop does; feeds have the rows along the axes."""
    mapped = ob.vmap(model, axes, out_axes)
    if all(value.type.tensor_type.HasField("shape") for value in model.graph.output):
        onnx.checker.check_model(mapped, full_check=True)
    got = run(mapped, feeds)
    (count,) = {feeds[name].shape[axis] for name, axis in axes.items()}
    rows = [{k: np.asarray(np.take(v, n, axes[k])) if k in axes else v for k, v in feeds.items()} for n in range(count)]
    session = ob.session(model)
    names = [value.name for value in model.graph.output]
    assert list(got) == names
    found = [dict(zip(names, run_session(session, row), strict=True)) for row in rows]
    for name in names:
        axis = out_axes if isinstance(out_axes, int) else out_axes.get(name, 0)
        want = np.stack([one[name] for one in found], axis)
        assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape), name
        if want.dtype.kind == "f":
            np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], want, err_msg=name)
    return mapped


NETWORK = "(float[1, 4] x, float[3] s) => (float[1, 3] y, float[5] h, float[3] t) { a = MatMul(x, w) z = Tanh(a) h = Squeeze(z, zero) b = MatMul(z, v) y = Mul(b, s) t = Exp(s) }"


def network() -> ModelProto:
    return model_of(NETWORK, w=drawn(4, 5), v=drawn(5, 3), zero=np.array([0]))


@pytest.mark.parametrize("rows", [4, 1])
def test_a_file_of_one_row(rows: int) -> None:
    mapped = check(network(), {"x": drawn(rows, 1, 4), "s": drawn(3)}, {"x": 0})
    assert dims(mapped, "x") == ["batch", 1, 4]
    assert [dims(mapped, name) for name in "yht"] == [["batch", 1, 3], ["batch", 5], ["batch", 3]]
    assert not [node for node in mapped.graph.node if node.op_type == "Scan"]


def test_no_rows() -> None:
    got = run(ob.vmap(network(), {"x": 0}), {"x": drawn(0, 1, 4), "s": drawn(3)})
    assert [value.shape for value in got.values()] == [(0, 1, 3), (0, 5), (0, 3)]


def test_axes_of_inputs_and_outputs() -> None:
    feeds = {"x": drawn(1, 4, 6), "s": drawn(6, 3)}
    check(network(), feeds, {"x": -1, "s": 0}, {"y": 1, "h": -1})
    mapped = check(network(), feeds, {"x": 2, "s": 0}, 1)
    assert dims(mapped, "x") == [1, 4, "batch"]
    assert dims(mapped, "h") == [5, "batch"]


@pytest.mark.parametrize("style", STYLES)
def test_names(style: str) -> None:
    model, names = renamed(network(), style)
    check(model, {names["x"]: drawn(3, 1, 4), names["s"]: drawn(3)}, {names["x"]: 0})


def test_an_output_that_is_an_input() -> None:
    """Inputs and weights keep their names, so that such an output gets another."""
    model = model_of(
        "(float[3] x, float[2] z) => (float[3] x, float[3] y, float[2] z, float[2] w) { y = Exp(x) }", w=drawn(2)
    )
    mapped = ob.vmap(model, {"x": 1}, {"x": 1, "y": 0})
    onnx.checker.check_model(mapped, full_check=True)
    x, z = drawn(3, 4), drawn(2)
    got = run(mapped, {"x": x, "z": z})
    assert list(got) == ["x_rows", "y", "z_rows", "w_rows"]
    np.testing.assert_array_equal(got["x_rows"], x)
    np.testing.assert_allclose(got["y"], np.exp(x.T), rtol=1e-5)
    np.testing.assert_array_equal(got["z_rows"], np.tile(z, (4, 1)))
    np.testing.assert_array_equal(got["w_rows"], np.tile(drawn(2), (4, 1)))


def test_weights_of_an_ensemble() -> None:
    """An initializer that is named is an input without a default; one that is an input too loses its default."""
    model = network()
    model.graph.input.append(helper.make_tensor_value_info("v", onnx.TensorProto.FLOAT, [5, 3]))
    mapped = ob.vmap(model, {"w": 0, "v": 0})
    assert {tensor.name for tensor in mapped.graph.initializer} == {"zero"}
    x, s, w, v = drawn(1, 4), drawn(3), drawn(6, 4, 5), drawn(6, 5, 3)
    got = run(mapped, {"x": x, "s": s, "w": w, "v": v})
    want = [np.tanh(x @ a) @ b * s for a, b in zip(w, v, strict=True)]
    np.testing.assert_allclose(got["y"], want, rtol=1e-5, atol=1e-6)
    shared = ob.vmap(model, {"x": 0})
    assert {tensor.name for tensor in shared.graph.initializer} == {"w", "v", "zero"}


def test_a_default_that_is_fed_holds_for_all_rows() -> None:
    model = network()
    model.graph.input.append(helper.make_tensor_value_info("v", onnx.TensorProto.FLOAT, [5, 3]))
    check(model, {"x": drawn(3, 1, 4), "s": drawn(3), "v": drawn(5, 3)}, {"x": 0})


CASES: dict[str, tuple[str, Feeds]] = {
    "the condition of an If": (
        "(bool c, float[3] x) => (float[3] y) { y = If <then_branch = a () => (float[3] p) { p = Neg(x) }, "
        "else_branch = b () => (float[3] q) { q = Exp(x) }> (c) }",
        {"c": np.array([True, False, True]), "x": drawn(3, 3)},
    ),
    "what a branch captures": (
        "(bool c, float[3] x) => (float[3] y, float[3] z) { z = Neg(x) y = If <then_branch = a () => (float[3] p) "
        "{ p = Add(z, x) }, else_branch = b () => (float[3] q) { q = Identity(z) }> (c) }",
        {"c": np.array([True, True, False]), "x": drawn(3, 3)},
    ),
    "how often a Loop runs": (
        "(int64 n, bool c, float[2] x) => (float[2] y) { y = Loop <body = b (int64 i, bool k, float[2] s) => "
        "(bool l, float[2] p) { l = Identity(k) p = Mul(s, s) }> (n, c, x) }",
        {"n": np.array([0, 3, 1]), "c": np.array([True] * 3), "x": drawn(3, 2)},
    ),
    "what a Loop captures": (
        "(int64[1] n, float[2] x) => (float[2] y) { m = Squeeze(n) a = Exp(x) y = Loop <body = b (int64 i, bool k, float[2] s) => (bool l, float[2] p) { l = Identity(k) p = Mul(s, x) }> (m, , a) }",
        {"n": np.array([[1], [2], [0]]), "x": drawn(3, 2)},
    ),
    "lengths that do not leave": (
        "(float[6] x) => (float y) { i = NonZero(x) j = Squeeze(i, zero) t = Gather(x, j) q = Mul(t, t) "
        "y = ReduceSum<keepdims = 0>(q) }",
        {"x": np.tril(drawn(6, 6))[[1, 5, 3]]},
    ),
    "lengths that do not leave a loop": (
        "(float[4] x) => (float y) { k = Loop<body = b (int64 i, bool c, float[n] s) => (bool l, float[m] p) "
        "{ l = Identity(c) j = NonZero(x) q = Squeeze(j, zero) p = Gather(x, q) }>(two, , x) y = ReduceSum<keepdims = 0>(k) }",
        {"x": np.tril(drawn(4, 4))[[1, 3, 0]]},
    ),
    "indices that differ": (
        "(float[2, 4, 3] x, int64[2] i, int32[1, 2] k) => (float[2, 2, 3] y, float[1, 2, 4, 3] z, float[2, 4, 1, 2] u) "
        "{ y = Gather<axis = 1>(x, i) z = Gather(x, k) u = Gather<axis = -1>(x, k) }",
        {"x": drawn(3, 2, 4, 3), "i": np.array([[0, 3], [-1, 2], [1, 1]]), "k": np.array([[[0, 1]], [[-1, 0]], [[1, 1]]], np.int32)},
    ),
    "a sequence": (
        "(float[4, 2] x) => (float[2] y) { s = SplitToSequence<keepdims = 0>(x) b = SequenceAt(s, two) e = Exp(x) "
        "f = SequenceInsert(s, b) y = SequenceAt(f, four) }",
        {"x": drawn(3, 4, 2)},
    ),
    "shapes that are computed": (
        "(float[N, M] x) => (float[K] y) { s = Shape(x) p = ReduceProd<keepdims = 1>(s) y = Reshape(x, p) }",
        {"x": drawn(3, 2, 5)},
    ),
    "a shape that differs": (
        "(float[6] x, int64[2] s) => (float z) { y = Reshape(x, s) t = ReduceSum(y, one) z = ReduceMax<keepdims = 0>(t) }",
        {"x": drawn(3, 6), "s": np.array([[2, 3], [3, 2], [1, 6]])},
    ),
    "the rank of nobody": (
        "(float[6] x, int64[r] s) => (float[] z) { y = Reshape(x, s) e = Exp(y) z = Tanh(e) }",
        {"x": drawn(3, 6), "s": np.array([[2, 3], [2, 3], [2, 3]])},
    ),
    "an operator of several optional outputs": (
        "(float[5, 1, 2] x) => (float[1, 1, 3] h) { , h = LSTM <hidden_size = 3> (x, w, r) }",
        {"x": drawn(4, 5, 1, 2)},
    ),
    "all outputs of an LSTM, a state, lengths": (
        "(float[5, 2, 2] x, int32[2] l, float[1, 2, 3] h0) => (float[5, 1, 2, 3] y, float[1, 2, 3] h, float[1, 2, 3] c) "
        "{ y, h, c = LSTM <hidden_size = 3> (x, w, r, , l, h0) }",
        {"x": drawn(3, 5, 2, 2), "l": np.array([[1, 5], [5, 2], [3, 3]], np.int32), "h0": drawn(3, 1, 2, 3)},
    ),
    "the indices of a pool": (
        "(float[1, 2, 4, 4] x) => (float[1, 2, 2, 2] y, int64[1, 2, 2, 2] i) "
        "{ y, i = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) }",
        {"x": drawn(3, 1, 2, 4, 4)},
    ),
    "kernels that differ": (
        "(float[2, 2, 4, 4] x, float[3, 2, 2, 2] k) => (float[2, 3, 3, 3] y) { y = Conv(x, k) }",
        {"x": drawn(3, 2, 2, 4, 4), "k": drawn(3, 3, 2, 2, 2)},
    ),
    "a batch normalisation in training": (
        "(float[4, 2, 3] x) => (float[4, 2, 3] y) { y, m, n = BatchNormalization<training_mode = 1>(x, ones, zeros, mean, var) }",
        {"x": drawn(3, 4, 2, 3)},
    ),
    "rows of texts": (
        "(string[2] x) => (string[2] y, bool[2] z) { y = StringConcat(x, x) z = RegexFullMatch<pattern = \"a.*\">(x) }",
        {"x": np.array([["a", "b"], ["ab", ""], ["", "a"]], object)},
    ),
    "an input as output, twice": (
        "(float[2] x) => (float[2] y, float[2] z, float[2] q) { y = Identity(x) z = Identity(y) q = Neg(x) }",
        {"x": drawn(3, 2)},
    ),
    "indices": (
        "(float[2, 4] x, int64[3] n) => (int64[2, 1] a, int64[1, 4] b, float[2, 4] h, float[5, 3] o, int64[2] s, int64 z) "
        "{ a = ArgMax<axis = 1>(x) b = ArgMin(x) h = Hardmax(x) o = OneHot<axis = 0>(n, five, halves2) s = Shape(x) "
        "z = Size(x) }",
        {"x": drawn(3, 2, 4), "n": np.array([[0, 4, 2], [1, 1, 3], [2, 0, 0]])},
    ),
    "quantised numbers": (
        "(float[1, 2, 4, 4] x, uint8[1, 2, 3, 3] u, uint8[4, 2] m) => (uint8[1, 2, 4, 4] q, int32[1, 3, 2, 2] c, "
        "uint8[1, 3, 2, 2] d, int32[4, 3] p) { q = QuantizeLinear<axis = 1>(x, two_scales, two_zeros) c = ConvInteger(u, k8) "
        "d = QLinearConv(u, tenth, zero8, k8, tenth, zero8, tenth, zero8) p = MatMulInteger(m, m8) }",
        {
            "x": drawn(3, 1, 2, 4, 4),
            "u": np.random.default_rng(6).integers(0, 255, (3, 1, 2, 3, 3)).astype(np.uint8),
            "m": np.random.default_rng(7).integers(0, 255, (3, 4, 2)).astype(np.uint8),
        },
    ),
    "types": (
        "(float16[2, 3] x, int64[2, 3] n, bool[3] b, double[3] d) => (float16[3] y, int64[2, 3] m, bool[2, 3] c, double[2, 3] e) "
        "{ w16 = Cast<to = 10>(halves) y = ReduceSum<keepdims = 0>(x, zero) m = Where(b, n, one) g = Greater(n, one) "
        "c = And(g, b) k = Cast<to = 11>(n) e = Mul(k, d) }",
        {
            "x": drawn(3, 2, 3).astype(np.float16),
            "n": np.arange(18).reshape(3, 2, 3),
            "b": np.array([[True, False, True]] * 3),
            "d": drawn(3, 3).astype(np.float64),
        },
    ),
}  # fmt: skip
CONSTANTS: Feeds = {
    "zero": np.array([0]), "one": np.array([1]), "two": np.array(2), "four": np.array(4),
    "w": drawn(1, 12, 2), "r": drawn(1, 12, 3), "ones": np.ones(2, np.float32), "zeros": np.zeros(2, np.float32), "mean": drawn(2), "var": np.array([1, 2], np.float32),
    "halves": drawn(3), "five": np.array(5), "halves2": np.array([0.5, 2], np.float32), "two_scales": np.array([0.1, 0.3], np.float32),
    "two_zeros": np.array([3, 100], np.uint8), "tenth": np.array(0.1, np.float32), "zero8": np.array(7, np.uint8),
    "k8": np.arange(24).reshape(3, 2, 2, 2).astype(np.uint8), "m8": np.arange(6).reshape(2, 3).astype(np.uint8),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_forms(name: str) -> None:
    text, feeds = CASES[name]
    read = {
        word for word in CONSTANTS if f"{word}" in text.replace(",", " ").replace(")", " ").replace("(", " ").split()
    }
    model = model_of(text, **{word: CONSTANTS[word] for word in read})
    inputs = {value.name for value in model.graph.input}
    own = {k: v for k, v in feeds.items() if k in inputs}
    check(model, own, dict.fromkeys(own, 0))


def test_a_course_that_all_rows_share() -> None:
    """Branches and loops have rows in their bodies; states and what is stacked, along any axis, too."""
    text = (
        "(float[4, 3] x, bool c, float[3] s) => (float[3] y, float[3, 2] r, float[3] f, float[3, 4] g) { a = Sin(x) "
        "b = ReduceSum<keepdims = 0>(a, zero) y = If<then_branch = p () => (float[3] u) { u = Neg(b) }, "
        "else_branch = q () => (float[3] v) { v = Identity(s) }>(c) "
        "e, t = Loop<body = l (int64 i, bool k, float[3] z) => (bool m, float[3] n, float[3] o) "
        "{ m = Identity(k) n = Mul(z, b) o = Exp(z) }>(two, , s) r = Transpose(t) "
        "f, g = Scan<num_scan_inputs = 2, scan_output_axes = [-1], body = h (float[3] z, float[3] p1, float[3] p2) => "
        "(float[3] n1, float[3] o1) { n1 = Add(z, p1) o1 = Mul(n1, p2) }>(s, a, halves3) }"
    )
    model = model_of(text, zero=CONSTANTS["zero"], two=CONSTANTS["two"], halves3=drawn(4, 3, seed=9))
    for given in (True, False):
        feeds = {"x": drawn(5, 4, 3), "c": np.array(given), "s": drawn(3)}
        mapped = check(model, feeds, {"x": 0})
        assert sorted(n.op_type for n in mapped.graph.node if n.op_type in ("If", "Loop", "Scan")) == [
            "If",
            "Loop",
            "Scan",
        ]
        check(model, {**feeds, "s": drawn(5, 3)}, {"x": 0, "s": 0})
        derived = ob.vjp(model, ["x", "s"], ["g", "y"])
        seeds = {"g_grad": drawn(5, 3, 4), "y_grad": drawn(5, 3)}
        check(derived, {**feeds, **seeds}, {"x": 0, "g_grad": 0, "y_grad": 0}, atol=1e-5)


def test_every_elementwise_operator() -> None:
    """In float16, float32, int64 and bool, where onnxruntime has it, all in one model; a number beside a matrix."""
    made: list[str] = []
    for name in POINTWISE:
        schema = onnx.defs.get_schema(name, 24)
        count = max(schema.min_input, 2 if schema.max_input > 2 and name != "Clip" else 1)
        attributes = {
            "Cast": "<to = 1>",
            "BitShift": '<direction = "LEFT">',
            "RegexFullMatch": None,
            "StringConcat": None,
        }
        text = attributes.get(name, "")
        if text is None:
            continue  # of texts, above
        for kind in ("a", "h", "n", "u", "c"):
            operands = ["c", "a", "v"][:3] if name == "Where" else [kind, f"{kind}2", kind][:count]
            operands[1:] = ["CAST"] if name == "CastLike" else operands[1:]
            node = f"{name}{text}({', '.join(operands)})"
            if runs(node):
                made.append(node)
    assert {node.partition("<")[0].partition("(")[0] for node in made} == set(POINTWISE) - {
        "RegexFullMatch",
        "StringConcat",
    }
    outputs = ", ".join(f"y{n}" for n in range(len(made)))
    body = " ".join(f"y{n} = {node}" for n, node in enumerate(made))
    model = model_of(f"({OPERANDS}) => ({outputs}) {{ {body} }}", 24, CAST=np.zeros(1))
    mapped = ob.vmap(model, dict.fromkeys(FEEDS, 0))
    assert not [node for node in mapped.graph.node if node.op_type == "Scan"]
    check(model, FEEDS, dict.fromkeys(FEEDS, 0), atol=2e-3)


OPERANDS = "float[2, 3] a, float a2, float16[2, 3] h, float16 h2, int64[2, 3] n, int64 n2, uint8[2, 3] u, uint8 u2, bool[2, 3] c, bool c2, float[3] v"
FEEDS: Feeds = {
    "a": np.random.default_rng(1).uniform(0.1, 0.9, (3, 2, 3)).astype(np.float32), "a2": np.array([0.5, 2, 1.5], np.float32),
    "h": np.random.default_rng(2).uniform(0.1, 0.9, (3, 2, 3)).astype(np.float16), "h2": np.array([0.5, 2, 1.5], np.float16),
    "n": np.random.default_rng(3).integers(1, 9, (3, 2, 3)), "n2": np.array([1, 2, 3]),
    "u": np.random.default_rng(4).integers(1, 9, (3, 2, 3)).astype(np.uint8), "u2": np.array([1, 2, 3], np.uint8),
    "c": np.random.default_rng(5).integers(0, 2, (3, 2, 3)).astype(bool), "c2": np.array([True, False, True]),
    "v": drawn(3, 3),
}  # fmt: skip


def runs(node: str) -> bool:
    """Whether onnxruntime has a kernel for these types."""
    try:
        model = model_of(f"({OPERANDS}) => (y) {{ y = {node} }}", 24, CAST=np.zeros(1))
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        run(model, {name: np.asarray(value[0]) for name, value in FEEDS.items()})
    except Exception:  # noqa: BLE001 - whatever it says, these types have none
        return False
    return True


def test_rows_draw_numbers_of_their_own() -> None:
    text = "(float[50] x) => (float[50] y, float[50] z) { y = RandomNormalLike(x) c = ConstantOfShape(n) z = RandomNormalLike(c) }"
    got = run(ob.vmap(model_of(text, n=np.array([50])), {"x": 0}), {"x": drawn(3, 50)})
    assert len(np.unique(got["y"], axis=0)) == 3
    assert len(np.unique(got["z"], axis=0)) == 1, "what reads no row is drawn once"


def test_nested() -> None:
    model = network()
    twice = ob.vmap(ob.vmap(model, {"x": 0}), {"x": 0, "s": 0}, 1)
    x, s = drawn(2, 4, 1, 4), drawn(2, 3)
    got = run(twice, {"x": x, "s": s})
    assert dims(twice, "x") == ["batch_2", "batch", 1, 4]
    assert dims(twice, "y") == ["batch", "batch_2", 1, 3]
    for i in range(2):
        for j in range(4):
            want = run(model, {"x": x[i, j], "s": s[i]})
            np.testing.assert_allclose(got["y"][j, i], want["y"], rtol=1e-5, atol=1e-6)


def test_jacobian_between_two() -> None:
    """vmap(jacobian(vmap f)), for all f of the outer rows, and the Jacobian of a vmap, which is block diagonal."""
    model = model_of("(float[2] x) => (float[2] y) { a = MatMul(x, w) y = Sin(a) }", w=drawn(2, 2))
    inner = ob.vmap(model, {"x": 0})
    jacobians = ob.vmap(ob.jacobian(inner, ["x"], ["y"]), {"x": 0})
    x, w = drawn(3, 4, 2), drawn(2, 2)
    got = run(jacobians, {"x": x})["y_jacobian_x"]
    assert got.shape == (3, 4, 2, 4, 2)
    for n in range(3):
        for i in range(4):
            for j in range(4):
                want = np.cos(x[n, i] @ w)[:, None] * w.T if i == j else np.zeros((2, 2))
                np.testing.assert_allclose(got[n, i, :, j, :], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_products_in_any_order(order: str) -> None:
    """vmap of a vjp, jvp and hvp, and those of a vmap, are the same; seeds get the axis of what they belong to."""
    model = model_of(
        "(float[3] x) => (float s, float[2] y) { y = MatMul(x, w) t = Tanh(y) s = ReduceSum<keepdims = 0>(t) }",
        w=drawn(3, 2),
    )
    x, v, u = drawn(4, 3), drawn(4, 3, seed=1), drawn(4, 2, seed=2)
    w = drawn(3, 2)
    f = lambda made: made if order == "inside" else ob.vmap(made, {"x": 0})  # noqa: E731
    g = lambda made: ob.vmap(made, {"x": 0}) if order == "inside" else made  # noqa: E731
    vjp, jvp = g(ob.vjp(f(model), ["x"], ["y"])), g(ob.jvp(f(model), ["x"], ["y"]))
    np.testing.assert_allclose(run(vjp, {"x": x, "y_grad": u})["x_grad"], u @ w.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(jvp, {"x": x, "x_tangent": v})["y_tangent"], v @ w, rtol=1e-5, atol=1e-6)
    assert dims(vjp, "y_grad") == ["batch", 2]
    (told,) = ob.derivatives(vjp)
    assert (told.seeds, told.results) == ({"y": "y_grad"}, {"x": "x_grad"})
    if order == "inside":
        hvp = ob.vmap(ob.hvp(model, ["x"], ["s"]), {"x": 0})
        t = np.tanh(x @ w)
        want = ((-2 * t * (1 - t * t)) * (v @ w)) @ w.T
        np.testing.assert_allclose(run(hvp, {"x": x, "x_direction": v})["x_hvp"], want, rtol=1e-4, atol=1e-5)


def test_a_seed_that_all_rows_share() -> None:
    made = ob.vmap(ob.vjp(network(), ["x"], ["y"]), {"x": 0, "y_grad": None})
    assert dims(made, "y_grad") == [1, 3]
    check(
        ob.vjp(network(), ["x"], ["y"]),
        {"x": drawn(3, 1, 4), "s": drawn(3), "y_grad": drawn(3, 1, 3)},
        {"x": 0, "y_grad": 0},
    )


@pytest.mark.parametrize(("batch", "merged"), [("1", "batch"), ("2", "batch*2"), ("M", "batch*M")])
def test_rows_in_a_batch_cost_no_copies(batch: str, merged: str) -> None:
    """Lengths that are equal have one symbol, by which onnxruntime reuses buffers; the last operator writes the output."""
    text = f"(float[{batch}, 4, 6, 6] x) => (float[{batch}, 4, 6, 6] y) {{ a = BatchNormalization(x, s, s, s, s) r = Relu(a) "
    model = model_of(
        text + "c = Conv<pads = [1, 1, 1, 1]>(r, k) y = Tanh(c) }", s=np.full(4, 0.5, "f"), k=drawn(4, 4, 3, 3)
    )
    mapped = check(model, {"x": drawn(3, 2 if batch == "M" else int(batch), 4, 6, 6)}, {"x": 0})
    made = {name: node for node in mapped.graph.node for name in node.output}
    assert made["y"].op_type == "Tanh"
    shapes = {v.name: v for v in onnx.shape_inference.infer_shapes(mapped).graph.value_info}
    lengths = {
        shapes[name].type.tensor_type.shape.dim[0].dim_param
        for name, node in made.items()
        if node.op_type in ("BatchNormalization", "Relu", "Conv")
    }
    assert lengths == {merged}
    assert not [node for node in made.values() if node.op_type == "Shape" and node.input[0] != "x"]


@pytest.mark.parametrize("batch", ["1", "2", "M"])
def test_a_quantised_network(batch: str) -> None:
    """As onnxruntime looks for it: nothing stands between what quantises and what it is for."""
    model = model_of(
        f"(float[{batch}, 2, 4, 4] x) => (float[{batch}, 3] y) {{ q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) "
        "w = DequantizeLinear(k, s, z) c = Conv(a, w) r = Relu(c) rq = QuantizeLinear(r, s, z) d = DequantizeLinear(rq, s, z) "
        "f = Flatten(d) v = DequantizeLinear(h, s, z) g = MatMul(f, v) gq = QuantizeLinear(g, s, z) "
        "y = DequantizeLinear(gq, s, z) }",
        s=np.array(0.04, "f"),
        z=np.array(0, np.int8),
        k=(9 * drawn(3, 2, 3, 3)).astype(np.int8),
        h=(9 * drawn(12, 3)).astype(np.int8),
    )
    mapped = check(model, {"x": drawn(3, 1 if batch == "1" else 2, 2, 4, 4)}, {"x": 0})
    made = {name: node.op_type for node in mapped.graph.node for name in node.output}
    assert made[next(node for node in mapped.graph.node if node.op_type == "Conv").input[0]] == "DequantizeLinear"


def test_gradients_where_the_scale_differs_between_rows() -> None:
    model = model_of(
        "(float[2, 4] x) => (float[2, 4] y) { q, s, z = DynamicQuantizeLinear(x) d = DequantizeLinear(q, s, z) y = Mul(d, d) }"
    )
    feeds = {"x": drawn(3, 2, 4), "y_grad": drawn(3, 2, 4, seed=3)}
    rows = check(ob.vjp(model, ["x"], ["y"], straight_through=True), feeds, {"x": 0, "y_grad": 0})
    whole = ob.vjp(ob.vmap(model, {"x": 0}), ["x"], ["y"], straight_through=True)
    np.testing.assert_allclose(run(whole, feeds)["x_grad"], run(rows, feeds)["x_grad"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", ["onnx", "native"])
def test_gradients_of_operators_of_this_domain(kernels: str) -> None:
    text = (
        "(float[1, 2, 8, 8] x) => (float[1, 3] y) { a = Conv<pads = [1, 1, 1, 1]>(x, k, b) r = Relu(a) "
        "p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) q = AveragePool<kernel_shape = [2, 2]>(p) f = Flatten(q) "
        "l = LayerNormalization(f, g) z = MatMul(l, v) y = Softmax(z) }"
    )
    model = model_of(text, k=drawn(4, 2, 3, 3), b=drawn(4), g=drawn(36), v=drawn(36, 3))
    derived = ob.vjp(model, ["x", "k", "b", "g", "v"], ["y"], kernels=kernels)
    feeds = {"x": drawn(3, 1, 2, 8, 8), "y_grad": drawn(3, 1, 3)}
    mapped = check(derived, feeds, dict.fromkeys(feeds, 0), atol=1e-5)
    assert not [node for node in mapped.graph.node if node.op_type == "Scan"]


def test_a_shared_seed_that_was_widened_and_narrowed() -> None:
    """Rows with as many steps as they say are a Scan, whose body reads the seed from outside."""
    text = (
        "(float[1, 2] x) => (float[1, 2] y) { a = Abs(x) m = ReduceMax<keepdims = 0>(a) b = Add(m, one) n = Cast<to = 7>(b) "
        "h = Loop(n, yes, x) <body = step (int64 i, bool c, float[1, 2] s) => (bool d, float[1, 2] t) "
        "{ t = Tanh(s) d = Identity(c) }> w = Cast<to = 11>(h) y = Cast<to = 1>(w) }"
    )
    model = ob.vjp(model_of(text, one=np.float32(1), yes=np.array(True)), ["x"], ["y"])
    mapped = ob.vmap(model, {"x": 0, "y_grad": None})
    x, dy = 2 * drawn(4, 1, 2), drawn(1, 2)
    got = run(mapped, {"x": x, "y_grad": dy})["x_grad"]
    np.testing.assert_allclose(got, [run(model, {"x": row, "y_grad": dy})["x_grad"] for row in x], rtol=1e-5)


def test_functions_of_the_model() -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "own": 1]> g (float[2, 3] x) => (float[3] y) { y = own.f(x) }
        <domain: "own", opset_import: ["": 21]> f (a) => (b) { c = Exp(a) b = ReduceSum<keepdims = 0>(c, axes) }"""
    model = parser.parse_model(text.replace("(c, axes)", "(c, k) k = Constant<value_ints = [0]>()"))
    body = model.functions[0]
    body.node.insert(0, body.node.pop())
    check(model, {"x": drawn(3, 2, 3)}, {"x": 0})


def test_a_path_and_an_ir_model(tmp_path: object) -> None:
    model = network()
    assert isinstance(ob.vmap(ir.from_proto(model), {"x": 0}), ir.Model)
    onnx.save(model, f"{tmp_path}/model.onnx")
    assert ob.vmap(f"{tmp_path}/model.onnx", {"x": 0}) == ob.vmap(model, {"x": 0})


REFUSALS = [
    ({}, 0, "axes: expected an axis by input, as axes={'x': 0}, got {}"),
    ({"z": 0}, 0, "axes: expected the name of an input or an initializer, got 'z'"),
    ({"x": 3}, 0, "axes: 'x' has 3 axes with the new one, got axis 3"),
    ({"x": True}, 0, "axes: 'x': expected the number of an axis, got True"),
    ({"x": None}, 0, "axes: expected an axis for one input at least"),
    ({"x": 0}, 2, "out_axes: 'h' has 2 axes with the new one, got axis 2"),
    ({"x": 0}, {"q": 0}, "out_axes: expected the name of an output, got 'q'"),
]


@pytest.mark.parametrize(("axes", "out_axes", "message"), REFUSALS)
def test_refusals(axes: dict[str, int], out_axes: int, message: str) -> None:
    with pytest.raises(ob.InvalidArgumentError) as caught:
        ob.vmap(network(), axes, out_axes)
    assert message in str(caught.value)


def test_an_output_that_is_no_tensor() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[4] x) => (seq(float[1]) s) { s = SplitToSequence(x) }'
    )
    with pytest.raises(ob.UnsupportedError, match="'s' is no tensor"):
        ob.vmap(model, {"x": 0})


def test_rows_of_different_lengths_are_an_error() -> None:
    model = model_of("(float[4] x) => (int64[1, n] i) { i = NonZero(x) }")
    mapped = ob.vmap(model, {"x": 0})
    same = np.eye(4, dtype=np.float32)
    np.testing.assert_array_equal(run(mapped, {"x": same})["i"], np.arange(4).reshape(4, 1, 1))
    with pytest.raises(Exception, match="[Ss]can"):
        run(mapped, {"x": np.tril(same + 1)})
