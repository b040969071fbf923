"""vmap of every form: operators, branches, loops, sequences, recurrent layers, quantised ones."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_backprop as ob
from onnx_backprop.converters.reverse.batching.elementwise import POINTWISE
from tests.support.vmap_checks import Feeds, check, drawn, model_of, run

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
    "one row, without its axes of length 1": (
        "(float[1, 3] x) => (float[3] y) { n = NonZero(zeros) a = Squeeze(n, zero) y = Squeeze(x, a) }",
        {"x": drawn(1, 1, 3)},
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
    fed = {k: v for k, v in feeds.items() if k in inputs}
    check(model, fed, dict.fromkeys(fed, 0))


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
    nodes: list[str] = []
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
                nodes.append(node)
    assert {node.partition("<")[0].partition("(")[0] for node in nodes} == set(POINTWISE) - {
        "RegexFullMatch",
        "StringConcat",
    }
    outputs = ", ".join(f"y{n}" for n in range(len(nodes)))
    body = " ".join(f"y{n} = {node}" for n, node in enumerate(nodes))
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


@pytest.mark.parametrize(
    ("opset", "node"),
    [(17, "LayerNormalization <epsilon = 0.1> (v, w)"), (23, "RMSNormalization <epsilon = 0.1> (v, w)")],
)
def test_normalizations_of_float64_written_out_stay_in_it(opset: int, node: str) -> None:
    """Their bodies, which rows of the scale need, say float32; a value of a sequence has no shape for a rule."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g (double[1, 3, 3] x, double[3] w, int64 i) => (double[] y) '
        f"{{ s = SequenceConstruct (x, x) v = SequenceAt (s, i) y = {node} }}"
    )
    rng = np.random.default_rng(opset)
    x, w, dy = rng.standard_normal((1, 3, 3)), rng.standard_normal((3, 3)), rng.standard_normal((3, 1, 3, 3))
    i = np.array(1)
    forward, gradient = model, ob.backward(model, wrt=["x", "w"], of=["y"])
    for written, rows in ((forward, {"w": w}), (gradient, {"w": w, "y_grad": dy})):
        got = ob.session(ob.vmap(written, dict.fromkeys(rows, 0))).run(None, {"x": x, "i": i, **rows})
        one = ob.session(written)
        each = [one.run(None, {"x": x, "i": i, **{name: v[k] for name, v in rows.items()}}) for k in range(3)]
        for batched, expected in zip(got, zip(*each, strict=True), strict=True):
            np.testing.assert_allclose(np.asarray(batched), np.stack(expected), rtol=1e-12, atol=1e-13)


def test_a_norm_of_float64_written_out_stays_in_it() -> None:
    """The body of ReduceL2, which rows of unknown rank need, takes the root in float32."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 23]> g (double[2, 2, 1] x, double[2] w) => (double[] y) '
        "{ v = GroupNormalization <num_groups = 1> (x, w, w) y = ReduceL2 (v) }"
    )
    rng = np.random.default_rng(2)
    feeds = {"x": rng.standard_normal((3, 2, 2, 1)), "w": rng.standard_normal(2), "y_grad": np.ones((3, 1, 1, 1))}
    gradient = ob.backward(model, wrt=["x"], of=["y"])
    (got,) = ob.session(ob.vmap(gradient, {"x": 0, "y_grad": 0})).run(["x_grad"], feeds)
    one = ob.session(gradient)
    expected = [np.asarray(one.run(["x_grad"], feeds | {"x": x, "y_grad": np.ones((1, 1, 1))})[0]) for x in feeds["x"]]
    np.testing.assert_allclose(np.asarray(got), np.stack(expected), rtol=1e-12)


def test_a_loop_of_no_steps_stacks_as_many_rows() -> None:
    """Of what its body gives: onnxruntime takes a length without a number for 0 there."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (int64 n, double[1, 6] x) => (double[2, 6] y) {
            r = Loop (n, , x) <body = b (int64 i, bool go, double[1, 6] s) => (bool on, double[p, q] t) {
                above = GreaterOrEqual (s, k) t = Where (above, s, k) on = Identity (go) }>
            both = SequenceConstruct (r, r) y = ConcatFromSequence <axis = 0> (both)
        }"""
    )
    k = np.array([[0, 0.1, -0.2, 0.3, -0.4, 0.5]])
    model.graph.initializer.append(onnx.numpy_helper.from_array(k, "k"))
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((3, 1, 6)), rng.standard_normal((3, 2, 6))
    session = ob.session(ob.vmap(ob.backward(model, wrt=["x"], of=["y"]), {"x": 0, "y_grad": 0}))
    for steps in range(3):
        y, dx = session.run(None, {"n": np.array(steps), "x": x, "y_grad": dy})
        once = np.maximum(x, k) if steps else x
        np.testing.assert_allclose(np.asarray(y), np.concatenate([once, once], axis=1))
        np.testing.assert_allclose(np.asarray(dx), np.where((x >= k) | (steps == 0), dy.sum(1, keepdims=True), 0))
