"""The straight-through estimator, against differences of the function it differentiates: a clip."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from tests.support.gradient_checks import Oracle, case, check_cases, retyped, session_run
from tests.support.rule_checks import symbolic

SEED = 23
RANGES = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767), "uint16": (0, 65535)}


def quantized(kind: str, scale: list[float], zero: list[int] | None, axis: int, *, opset: int = 21) -> ModelProto:
    shape = f"[{len(scale)}]" if len(scale) > 1 else ""
    values = ", ".join(map(str, scale))
    point = f", {kind}{shape} z = {{{', '.join(map(str, zero))}}}" if zero else ""
    z = ", z" if zero else ""
    return parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : {opset}]>
        g (float[3,4] x) => (float[3,4] y) <float{shape} s = {{{values}}}{point}> {{
            [round] q = QuantizeLinear <axis = {axis}> (x, s{z})
            [back] y = DequantizeLinear <axis = {axis}> (q, s{z}) }}"""
    )


def data(scale: list[float], zero: list[int] | None, axis: int, kind: str) -> tuple[np.ndarray, ...]:
    """x around the whole range and beyond it, and the scale, zero point and range aligned with it."""
    rng = np.random.default_rng(SEED)
    shape = [1, 1]
    if len(scale) > 1:
        shape[axis] = len(scale)
    s, z = np.reshape(scale, shape), np.reshape(zero or [0], shape if zero and len(zero) > 1 else [1, 1])
    low, high = RANGES[kind]
    places = rng.uniform(low - (high - low) / 3, high + (high - low) / 3, (3, 4))
    return ((places - z) * s).astype(np.float32), s, z


CASES = [  # type, scale, zero point, axis
    ("int8", [0.5], [3], 1),
    ("uint8", [0.25], [100], 1),
    ("uint8", [0.125], None, 1),
    ("int8", [0.5, 0.25, 2.0, 1.0], [0, 5, -7, 100], 1),
    ("uint8", [0.5, 0.25, 2.0], [0, 5, 128], 0),
    ("int8", [0.5, 0.25, 2.0, 1.0], [0, 5, -7, 100], -1),
    ("uint16", [0.125], [1000], 1),
    ("int16", [0.5], [-20], 1),
]


@pytest.mark.parametrize("form", ["static", "symbolic"])
@pytest.mark.parametrize("opset", [21, 24])
@pytest.mark.parametrize(("kind", "scale", "zero", "axis"), CASES)
def test_the_gradient_is_that_of_a_clip(
    kind: str, scale: list[float], zero: list[int] | None, axis: int, opset: int, form: str
) -> None:
    """1 within the range of the integers, 0 beyond; and by the scale what rounding and clipping leave over."""
    model = quantized(kind, scale, zero, axis, opset=opset)
    x, s, z = data(scale, zero, axis, kind)
    dy = np.random.default_rng(SEED + 1).uniform(-1, 1, x.shape).astype(np.float32)
    training = ob.backward(symbolic(model) if form == "symbolic" else model, wrt=["x", "s"], straight_through=True)
    y, dx, ds = session_run(training)({"x": x, "s": np.float32(scale).reshape(model_scale_shape(scale)), "y_grad": dy})
    low, high = RANGES[kind]
    places = np.round(x / s) + z
    inside = (places >= low) & (places <= high)
    assert 0.2 < inside.mean() < 0.9
    np.testing.assert_array_equal(y, ((np.clip(places, low, high) - z) * s).astype(np.float32))
    np.testing.assert_allclose(dx, dy * inside, rtol=1e-6)
    by_scale = dy * np.where(inside, places - z - x / s, np.clip(places, low, high) - z)
    others = tuple(n for n in range(2) if s.shape[n] == 1)
    np.testing.assert_allclose(ds, by_scale.sum(others).reshape(ds.shape), rtol=1e-4, atol=1e-3)


def model_scale_shape(scale: list[float]) -> tuple[int, ...]:
    return (len(scale),) if len(scale) > 1 else ()


def test_half() -> None:
    model = retyped(quantized("int8", [0.5], [3], 1, opset=21), 10)
    x, _, _ = data([0.5], [3], 1, "int8")
    training = ob.backward(model, wrt=["x"], straight_through=True)
    _, dx = session_run(training)({"x": x.astype(np.float16), "y_grad": np.ones((3, 4), np.float16)})
    assert dx.dtype == np.float16
    places = np.round(x.astype(np.float16) / np.float16(0.5)) + 3
    np.testing.assert_array_equal(dx, (places >= -128) & (places <= 127))


def test_the_scale_of_stored_integers_needs_no_estimator() -> None:
    """y = (q - z) s is linear in s."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (int8[2,3] q) => (float[2,3] y)
        <float[3] s = {0.5, 1.0, 2.0}, int8[3] z = {1, 0, -4}> { y = DequantizeLinear(q, s, z) }"""
    )
    q, dy = np.int8([[1, -2, 3], [100, -128, 7]]), np.float32([[1, 2, 3], [-1, 0.5, 4]])
    _, ds = session_run(ob.backward(model, wrt=["s"]))({"q": q, "y_grad": dy})
    np.testing.assert_allclose(ds, (dy * (q.astype(np.float64) - np.array([1, 0, -4]))).sum(0), rtol=1e-6)


def test_without_the_option_rounding_is_refused_by_name() -> None:
    for wrt in (["x"], ["s"]):
        with pytest.raises(ob.UnsupportedError, match=r"QuantizeLinear 'round': .*straight_through=True"):
            ob.backward(quantized("int8", [0.5], [3], 1), wrt=wrt)


def test_training_graph_takes_the_option() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 2] x) => (float[N, 3] y)
        <float[2,3] w = {0.3, -0.7, 1.2, 0.4, 9.0, -0.2}, float s = {0.03125}, int8 z = {0}> {
            [round] q = QuantizeLinear(w, s, z)  v = DequantizeLinear(q, s, z)  y = MatMul(x, v) }"""
    )
    with pytest.raises(ob.UnsupportedError, match="QuantizeLinear 'round'"):
        ob.training_graph(model, loss="mse", trainable=["w"])
    training = ob.training_graph(model, loss="mse", trainable=["w"], straight_through=True)
    x = np.float32([[1, 2], [3, 4]])
    outputs = dict(
        zip(
            [o.name for o in training.model.graph.output],
            session_run(training.model)({"x": x, "target": np.zeros((2, 3), np.float32)}),
            strict=True,
        )
    )
    want = x.T @ (outputs["y"] * 2 / 6)
    want[1, 1] = 0  # 9 is beyond the range
    np.testing.assert_allclose(outputs["w_grad"], want, rtol=1e-5)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("q = QuantizeLinear <block_size = 2, axis = 1> (x, b)  y = DequantizeLinear <block_size = 2, axis = 1> (q, b)",
         "block_size of 0 only; got 2|scale of rank 0 or 1"),
        ("q = QuantizeLinear(x, s, f)  y = DequantizeLinear(q, s, f)", "output type of INT8, .*got 'FLOAT8E4M3FN'"),
    ],
)  # fmt: skip
def test_refused(node: str, message: str) -> None:
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[2,4] x, float[2,2] b, float s, float8e4m3fn f)
        => (float[2,4] y) {{ {node} }}"""
    )
    with pytest.raises(ob.UnsupportedError, match=message):
        ob.backward(model, wrt=["x"], straight_through=True)


DYNAMIC = [
    case(
        "q, y, z = DynamicQuantizeLinear(x)",
        op="DynamicQuantizeLinear",
        x=np.float32(x),
        oracle=Oracle("onnxruntime", 2.0**-6, 1e-4),
        skips=["half"],
    )
    for x in ([[0.5, -2, 3], [1, 2.5, -1]], [[1, 2, 4]], [[-1, -5], [-2, -1]], [3.0], [[-1.5, 4]])
]


@pytest.mark.parametrize("variant", ["static", "symbolic", "unranked"])
def test_the_dynamic_scale_needs_no_estimator(variant: str) -> None:
    check_cases(DYNAMIC, variant)


@pytest.mark.parametrize("x", [[[0.5, -2, 3], [1, 2.5, -1]], [[4, 1, 4], [2, 3, 0]], [[-1, -2, -3], [-3, -1, -3]]])
def test_the_dynamic_estimator(x: list) -> None:
    """y = s (q - z) with dq = dx / s: dx = dy, and what s adds at the ends of the range."""
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[2,3] x) => (float[2,3] y) '
        "{ q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z) }"
    )
    with pytest.raises(ob.UnsupportedError, match="DynamicQuantizeLinear .*straight_through=True"):
        ob.backward(model, wrt=["x"])
    point = np.float32(x)
    dy = np.float32([[1, -2, 3], [0.5, 4, -1]])
    y, got = session_run(ob.backward(model, wrt=["x"], straight_through=True))({"x": point, "y_grad": dy})
    low, high = min(point.min(), 0), max(point.max(), 0)
    share = float((dy * (y - point)).sum()) / (high - low)  # ds / 255: dy (q - z - x / s) summed, over the range
    want = np.array(dy, np.float64)
    for end, sign in ((high, 1), (low, -1)):
        ties = (point == end) & (point != 0)
        want[ties] += sign * share / max(ties.sum(), 1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# Integer products of what was rounded, as quantize_dynamic writes them: the gradient is that of the float model at the
# rounded numbers, plus what flows through the dynamic scale, which `wrt` = the rounded numbers themselves leaves out.

PRODUCTS = {  # nodes from the integers q (uint8) with zero point z to y; the same in floats, from v = float(q) - z
    "matrix": ("i = MatMulInteger(q, b, z)", "i = MatMul(v, bf)", (3, 4), (4, 5)),
    "batched": ("i = MatMulInteger(q, b, z)", "i = MatMul(v, bf)", (2, 3, 4), (2, 4, 5)),
    "broadcast": ("i = MatMulInteger(q, b, z)", "i = MatMul(v, bf)", (2, 3, 4), (4, 5)),
    "zero point per column": ("i = MatMulInteger(q, b, z, zb)", "w = Sub(bf, zbf) i = MatMul(v, w)", (3, 4), (4, 5)),
    "convolution": (
        "i = ConvInteger<pads=[1,0,0,1], strides=[2,1], dilations=[1,2]>(q, b, z)",
        "i = Conv<pads=[1,0,0,1], strides=[2,1], dilations=[1,2]>(v, bf)",
        (2, 3, 5, 6),
        (4, 3, 2, 2),
    ),
    "convolution of groups": (
        "i = ConvInteger<group=2>(q, b, z)",
        "i = Conv<group=2>(v, bf)",
        (2, 4, 5, 6),
        (6, 2, 3, 3),
    ),
    "convolution, both zero points": (
        "i = ConvInteger(q, b, z, z1)",
        "w = Sub(bf, z1f) i = Conv(v, w)",
        (1, 3, 5, 6),
        (5, 3, 3, 3),
    ),
    "behind a transposition": (
        "p = Transpose(q) n = Unsqueeze(p, axes) r = Squeeze(n, axes) i = MatMulInteger(r, b, z)",
        "p = Transpose(v) i = MatMul(p, bf)",
        (4, 3),
        (4, 5),
    ),
}


@pytest.mark.parametrize("form", ["static", "symbolic"])
@pytest.mark.parametrize("case", PRODUCTS)
def test_integer_products(case: str, form: str) -> None:
    """s · (the product of round(x / s)): with round' = 1 the gradient by x is the float product's at the rounded x."""
    integers, floats, shape, shape_b = PRODUCTS[case]
    rng = np.random.default_rng(SEED)
    b = rng.integers(-9, 9, shape_b).astype(np.int8)
    constants = {
        "b": b,
        "bf": b.astype(np.float32),
        "s": np.float32(0.25),
        "z": np.uint8(7),
        "zb": np.arange(-2, 3, dtype=np.int8),
        "zbf": np.arange(-2, 3, dtype=np.float32),
        "z1": np.array([3], np.int8),
        "z1f": np.array([3], np.float32),
        "axes": np.array([0]),
    }
    lengths = ",".join(f"L{n}" for n in range(len(shape))) if form == "symbolic" else ",".join(map(str, shape))
    head = f'<ir_version: 10, opset_import: ["": 21]> g (float[{lengths}] x) => (float y)'
    rounded = parser.parse_model(f"{head} {{ q = QuantizeLinear(x, s, z) {integers} f = Cast<to=1>(i) y = Mul(f, s) }}")
    plain = parser.parse_model(f"{head} {{ d = Div(x, s) v = Round(d) {floats} y = Mul(i, s) }}")
    linear = parser.parse_model(f"{head} {{ v = Div(x, s) {floats} y = Mul(i, s) }}")
    for model in (rounded, plain, linear):
        read = {name for node in model.graph.node for name in node.input}
        arrays = {name: value for name, value in constants.items() if name in read}
        model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in arrays.items())
    x = (rng.integers(-7, 60, shape) * 0.25).astype(np.float32)
    with pytest.raises(ob.UnsupportedError, match=r"(MatMul|Conv)Integer 'i': it rounds.*straight_through=True"):
        ob.backward(rounded, wrt=["x"])
    (y,) = session_run(plain)({"x": x})
    dy = rng.uniform(-1, 1, y.shape).astype(np.float32)
    got_y, dx = session_run(ob.backward(rounded, wrt=["x"], straight_through=True))({"x": x, "y_grad": dy})
    _, want = session_run(ob.backward(linear, wrt=["x"]))({"x": x, "y_grad": dy})
    np.testing.assert_array_equal(got_y, y)
    np.testing.assert_allclose(dx, want, rtol=1e-5, atol=1e-5)


def dynamic() -> ModelProto:
    """What quantize_dynamic makes of y = (x · s) · W."""
    rng = np.random.default_rng(SEED)
    w = rng.standard_normal((4, 3)).astype(np.float32)
    step = np.float32(np.abs(w).max() / 127)
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[5,4] x) => (float[5,3] y) {
            xs = Mul(x, s) [dynamic] q, scale, zero = DynamicQuantizeLinear(xs) [product] i = MatMulInteger(q, b, zero)
            f = Cast<to=1>(i) k = Mul(scale, step) y = Mul(f, k) }"""
    )
    tensors = {"s": np.ones(4, np.float32), "b": np.round(w / step).astype(np.int8), "step": step}
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in tensors.items())
    return model


def test_dynamic_quantization() -> None:
    """By x it is nearly the float model's: the estimator holds but for the element that sets the scale."""
    model = dynamic()
    with pytest.raises(ob.UnsupportedError, match=r"MatMulInteger 'product': .*straight_through=True"):
        ob.backward(model, wrt=["x", "s"])
    explanation = ob.explain_gradients(model, wrt=["x"])
    assert not explanation.ok
    assert "straight_through" in str(explanation)
    rng = np.random.default_rng(SEED + 1)
    x, dy = (rng.standard_normal(n).astype(np.float32) for n in ((5, 4), (5, 3)))
    converted = ob.backward(model, wrt=["x"], straight_through=True)
    _, dx = session_run(converted)({"x": x, "y_grad": dy})
    tensors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    want = dy @ (tensors["b"].T * tensors["step"])
    extreme = (x == x.max()) | (x == x.min())
    np.testing.assert_allclose(dx[~extreme], want[~extreme], rtol=1e-4, atol=1e-6)


def test_products_in_qlinear_form_are_refused_by_name() -> None:
    body = (
        "q = QuantizeLinear(x, s, z) [product] p = QLinearMatMul(q, s, z, b, s, z, s, z) y = DequantizeLinear(p, s, z)"
    )
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[2,2] x) => (float[2,2] y) <float s = {{0.5}}, uint8 z = {{3}}, '
        f"uint8[2,2] b = {{1,2,3,4}}> {{ {body} }}"
    )
    for straight_through in (False, True):
        with pytest.raises(ob.UnsupportedError, match=r"QLinearMatMul 'product': it rounds.*ob\.dequantize"):
            ob.backward(model, wrt=["x"], straight_through=straight_through)
    assert not ob.explain_gradients(model, wrt=["x"]).ok


def test_rounded_numbers_that_no_rule_knows_are_refused() -> None:
    body = "q = QuantizeLinear(x, s, z) [pool] p = MaxPool<kernel_shape=[2]>(q) y = DequantizeLinear(p, s, z)"
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[1,1,4] x) => (float y) <float s = {{0.5}}, uint8 z = {{3}}> '
        f"{{ {body} }}"
    )
    with pytest.raises(ob.UnsupportedError, match=r"MaxPool 'pool': it works on rounded numbers"):
        ob.backward(model, wrt=["x"], straight_through=True)


@pytest.mark.parametrize("count", [1, 3])
def test_scales_of_a_length_that_only_the_run_knows(count: int) -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (int8[2,3] q, float[K] s, int8[K] z) => (float[2,3] y)
        { y = DequantizeLinear(q, s, z) }"""
    )
    q, dy = np.int8([[1, -2, 3], [100, -128, 7]]), np.float32([[1, 2, 3], [-1, 0.5, 4]])
    s, z = np.full(count, 0.5, np.float32), np.ones(count, np.int8)
    ds = session_run(ob.backward(model, wrt=["s"]))({"q": q, "s": s, "z": z, "y_grad": dy})[1]
    terms = dy * (q.astype(np.float64) - 1)
    assert ds.shape == (count,)
    np.testing.assert_allclose(ds, terms.sum(0) if count == 3 else [terms.sum()], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.* numbers of the file are trained")
def test_scales_of_integer_products_are_no_parameters() -> None:
    """Per channel they have several elements, and Mul reads them."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[5,4] x) => (float[5,3] y) {
            q, scale, zero = DynamicQuantizeLinear(x) i = MatMulInteger(q, b, zero)
            f = Cast<to=1>(i) k = Mul(scale, step) m = Mul(f, k) y = Add(m, bias) }"""
    )
    tensors = {
        "b": np.arange(12, dtype=np.int8).reshape(4, 3),
        "step": np.float32([0.3, 0.1, 0.7]),
        "bias": np.float32([0.1, 0.2, 0.4]),
    }
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in tensors.items())
    graph = ob.training_graph(model, loss="mse")
    assert list(graph.parameters) == ["bias"]
    assert graph.left_out == {"step": "quantization scale of DynamicQuantizeLinear"}


def test_weights_stored_as_integers_are_told() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N,2] x) => (float[N,3] y)
        <int8[2,3] q = {1, 2, 3, 4, 5, 6}, float s = {0.5}> { w = DequantizeLinear(q, s) y = MatMul(x, w) }"""
    )
    with pytest.raises(ob.InvalidArgumentError, match=r"'s' \(quantization scale.*stored as integers.*ob\.dequantize"):
        ob.training_graph(model, loss="mse")
    assert list(ob.training_graph(model, loss="mse", trainable=["s"]).parameters) == ["s"]


INSIDE = {
    "branch": "q = If(c) <then_branch = t () => (int8[3, 4] a) { a = QuantizeLinear(x, s, z) }, "
    "else_branch = e () => (int8[3, 4] b) { b = QuantizeLinear(x, s, z) }> d = DequantizeLinear(q, s, z)",
    "scan": "q = Scan<num_scan_inputs = 1, body = b (float[4] r) => (int8[4] a) { a = QuantizeLinear(r, s, z) }>(x) "
    "d = DequantizeLinear(q, s, z)",
    "read": "q = QuantizeLinear(x, s, z) d = If(c) <then_branch = t () => (float[3, 4] a) "
    "{ a = DequantizeLinear(q, s, z) }, else_branch = e () => (float[3, 4] b) { b = DequantizeLinear(q, s, z) }>",
}


@pytest.mark.parametrize("name", INSIDE)
def test_rounded_numbers_of_branches_and_loops(name: str) -> None:
    """A gradient goes through what a branch has rounded; elsewhere it is refused, and never left out."""
    head = '<ir_version: 10, opset_import: ["": 21]> g (float[3, 4] x) => (float[3, 4] y) <float s = {0.1}, int8 z = {3}, bool n = {0}>'
    model = parser.parse_model(f"{head} {{ c = Not(n) {INSIDE[name]} y = Mul(d, d) }}")
    if name != "branch":
        with pytest.raises(ob.UnsupportedError, match="works on rounded numbers"):
            ob.vjp(model, ["x"], ["y"], straight_through=True)
        return
    derived = ob.vjp(model, ["x"], ["y"], straight_through=True)
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    (dx,) = ob.session(derived).run(["x_grad"], {"x": x, "y_grad": np.ones_like(x)})
    np.testing.assert_allclose(np.asarray(dx), 2 * 0.1 * np.round(x / 0.1), rtol=1e-5, atol=1e-6)
