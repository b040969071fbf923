"""`check_gradients`: right gradients pass, and what cannot be told is said."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.check import differences
from tests.support.broken_rules import SMALL, model_of, verdicts, wide_model

# --- right gradients


def test_weights_that_the_file_keeps_in_nodes() -> None:
    """In Constants, and in the attributes of a fused operator that is written out."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18, "ai.onnx.ml" : 1]>
        g (float[n, 3] x) => (float[n, 2] y) {
            w = Constant <value = float[3] {0.3, -1.0, 2.0}> ()
            h = Mul(x, w)
            y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0, 3.0, -1.0, 0.5, 2.0], targets = 2> (h)
        }
    """)
    assert verdicts(ob.check_gradients(model, nodes=True)) == dict.fromkeys(("x", "w", "y/coefficients"), "right")


def test_a_right_model() -> None:
    report = ob.check_gradients(model_of(SMALL))
    assert verdicts(report) == dict.fromkeys(("x", "weight", "bias", "gain"), "right")
    assert report.ok
    assert report.verdict == "right"
    assert report.nodes == ()
    assert report.repro is None
    assert report.forward == "float64, onnx's reference evaluator"
    for result in report.results:
        assert result.answer.error < 1e-5
        assert result.answer.expected == pytest.approx(result.answer.got, rel=1e-4)
        assert abs(result.answer.got) > 0.01
    text = str(report)
    assert text.startswith("gradients: right (compared with differences in float64")
    assert re.search(r"^weight +right +\d\.\de-\d\d +\S+ +\S+ +2 of 2$", text, re.M)


def test_every_node_on_request() -> None:
    report = ob.check_gradients(model_of(SMALL), nodes=True)
    assert {(n.op_type, n.node, n.verdict) for n in report.nodes} == {
        ("Conv", "conv", "right"),
        ("Relu", "relu", "right"),
        ("Mul", "scale", "right"),
    }
    assert re.search(r"^operator +node +worst input +verdict", str(report), re.M)


def test_rounding_beside_float64() -> None:
    """Of y = (10⁴·x + w) - 10⁴·x, dw is exact; of a mean of squares of what has cancelled, it has few digits left."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[64] x) => (float y) <float[64] w, float[1] v> {
            k = Constant <value = float {10000.0}> () big = Mul(x, k) sum = Add(big, w) left = Sub(sum, big)
            square = Mul(left, left) scaled = Mul(square, v) y = ReduceMean <keepdims = 0> (scaled) }
    """)
    rng = np.random.default_rng(2)
    w = rng.standard_normal(64).astype(np.float32)
    for name, value in {"w": w, "v": np.float32([2])}.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    x = rng.standard_normal(64).astype(np.float32)
    report = ob.check_gradients(model, wrt=["w", "v"], feeds={"x": x}, float64=True, nodes=True, tolerance=0.1)
    errors = {one.variable: one for one in report.rounding}
    assert [one.variable for one in report.rounding] == ["w", "v"]
    big = x * np.float32(10000)
    left = (big + w) - big
    np.testing.assert_allclose(errors["w"].largest, np.abs(left - w).max() / np.abs(w).max(), rtol=0.01)
    assert 1e-4 < errors["w"].typical < errors["w"].largest < 1e-2
    assert re.search(r"^w +\d\.\de-0[34] +\d\.\de-0[34] +\S+$", str(report), re.M)
    assert max(node.rounding for node in report.nodes) < 1e-6  # no node alone rounds so much
    assert "rounding of its gradient alone" in str(report)
    assert "Rounding" in report.html()
    assert str(errors["v"]).startswith("gradient of v: an error of at most ")
    assert not ob.check_gradients(model, wrt=["v"], feeds={"x": x}, tolerance=0.1).rounding


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_derivative_that_is_nothing_but_rounding(factor: float) -> None:
    """A bias in front of a BatchNormalization in training mode has none; the node that adds it is right by itself."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[2, 3, 16, 16] x) => (float[2, 8, 16, 16] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, w, b)
            n, v1, v2 = BatchNormalization <training_mode = 1> (a, s, c, mean, var) y = Mul(n, n) }
    """)
    rng = np.random.default_rng(0)
    for name, shape in {"w": (8, 3, 3, 3), "b": (8,), "s": (8,), "c": (8,), "mean": (8,), "var": (8,)}.items():
        value = factor * rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    report = ob.check_gradients(model, float64=True)
    assert report.ok
    assert len(report.nodes) == 3
    assert "each node is right" in str(report)
    (one,) = (str(one) for one in report.rounding if one.variable == "b")
    assert one.startswith("gradient of b: nothing but rounding, of ")


def test_wrt_and_of() -> None:
    model = model_of("""
        two (float[3] x, float[3] z) => (float[3] a, float[3] b) <float[3] w = {1.0, 2.0, 3.0}>
        { a = Mul(x, w)  p = Exp(z)  b = Mul(p, w) }
    """)
    assert set(verdicts(ob.check_gradients(model))) == {"x", "z", "w"}
    assert set(verdicts(ob.check_gradients(model, of=["a"]))) == {"x", "w"}
    assert set(verdicts(ob.check_gradients(model, wrt=["z"], of=["b"]))) == {"z"}
    with pytest.raises(ob.InvalidArgumentError, match="wrt: expected the name of"):
        ob.check_gradients(model, wrt=["v"])


def test_the_seed_makes_the_check() -> None:
    model = model_of(SMALL)
    assert ob.check_gradients(model, seed=3) == ob.check_gradients(model, seed=3)
    assert ob.check_gradients(model, seed=3) != ob.check_gradients(model, seed=4)


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_point_on_kinks_is_moved(scale: float) -> None:
    """Relu at 0, and MaxPool with equal numbers, have a gradient that no difference there shows."""
    model = model_of("""
        kinks (float[1, 1, 4, 4] x) => (float[1, 1, 2, 2] y)
        { r = Relu(x)  y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) }
    """)
    x = scale * np.round(np.random.default_rng(0).standard_normal((1, 1, 4, 4)))
    report = ob.check_gradients(model, feeds={"x": x.astype(np.float32)}, nodes=True)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("y = Log(x)", 0.0, 1.0), ("s = Neg(x)  y = Sqrt(s)", 0, 0), ("o = Sub(x, one) y = Log(o)", 1.0, 2.0)],
)
def test_random_inputs_lie_where_the_model_is_defined(text: str, low: float, high: float) -> None:
    model = model_of(f"g (float[40] x) => (float[40] y) <float one = {{1.0}}> {{ {text} }}")
    if low == high:
        with pytest.raises(ob.InvalidArgumentError, match=r"random values.*infinite or NaN.*--feeds"):
            ob.check_gradients(model, wrt=["x"])
    else:
        assert ob.check_gradients(model, wrt=["x"]).ok


def test_symbolic_axes_are_as_short_as_the_model_runs_with() -> None:
    text = """
        net (float[N, 3, H, W] x, float[N, H] z) => (float[N, 2, H2, W2] y, float[N, H] q)
        { w = ConstantOfShape<value = float[1] {0.5}>(shape)
          y = Conv<strides = [2, 2]>(x, w)  q = Exp(z) }
    """
    model = model_of(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array([2, 3, 7, 7]), "shape"))
    report = ob.check_gradients(model)
    assert verdicts(report) == {"x": "right", "z": "right"}


def test_equal_symbols_are_equal_lengths_also_with_feeds() -> None:
    model = model_of("g (float[A, 3] x, float[B, A] z) => (float[B, 3] y) { y = MatMul(z, x) }")
    assert ob.check_gradients(model).ok
    assert ob.check_gradients(model, feeds={"x": np.ones((5, 3), np.float32)}).ok


def test_integer_and_boolean_inputs_are_drawn() -> None:
    model = model_of("""
        g (float[N, 5] x, int64[K] i, bool[K, 5] c) => (float[K, 5] y)
        { p = Gather(x, i)  n = Neg(p)  y = Where(c, p, n) }
    """)
    assert verdicts(ob.check_gradients(model)) == {"x": "right"}


def test_float16() -> None:
    w = numpy_helper.from_array(np.linspace(-1, 1, 16).astype(np.float16).reshape(4, 4), "w")
    model = model_of("g (float16[3, 4] x) => (float16[3, 4] y) { a = MatMul(x, w)  y = Tanh(a) }")
    model.graph.initializer.append(w)
    report = ob.check_gradients(model)
    assert verdicts(report) == {"x": "right", "w": "right"}


def test_an_input_with_the_name_of_a_gradient() -> None:
    """It is no seed: that of `y` is `y_grad_2` then."""
    model = model_of("g (float[3] x, float[3] y_grad) => (float[3] y) { h = Mul(x, y_grad)  y = Exp(h) }")
    assert verdicts(ob.check_gradients(model)) == {"x": "right", "y_grad": "right"}


def test_a_model_of_an_old_opset_and_ir_version() -> None:
    model = model_of("old (float[2, 3] x, float[3] w) => (float[2, 3] y) { s = Mul(x, w)  y = Softmax(s) }", opset=9)
    model.ir_version = 3
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2, 3], np.float32), "w"))
    assert verdicts(ob.check_gradients(model)) == {"x": "right", "w": "right"}


def test_a_gradient_that_is_zero() -> None:
    report = ob.check_gradients(
        model_of("g (float[3, 4] x) => (float y) { s = Softmax(x)  y = ReduceSum<keepdims = 0>(s) }")
    )
    assert report.ok
    assert "hardly any influence" in str(report)


def test_large_models_are_compared_in_float32() -> None:
    model = wide_model()
    report = ob.check_gradients(model)
    assert report.forward == "float32, onnxruntime"
    assert report.ok, str(report)


def test_many_variables_are_checked_in_groups() -> None:
    names = [f"w{n}" for n in range(20)]
    body = " ".join(f"v{n + 1} = {op}({'x' if n == 0 else f'v{n}'}, {name})" for n, (name, op) in
                    enumerate(zip(names, ["Mul", "Add"] * 10, strict=True)))  # fmt: skip
    values = ", ".join(f"float[1] {name} = {{1.5}}" for name in names)
    model = model_of(f"many (float[3] x) => (float[3] v20) <{values}> {{ {body} }}")
    report = ob.check_gradients(model)
    assert report.results[0].variables == "x … w2 (4)"
    assert len(report.results) == 6
    assert report.ok


# --- what cannot be told


def test_nodes_tell_where_the_whole_model_does_not() -> None:
    """float32 rounds x to even numbers beside 3e7: the model has no usable differences, each of its nodes has."""
    model = model_of("g (float[30] x) => (float[30] y) <float big = {3e7}> { a = Add(x, big)  y = Sub(a, big) }")
    report = ob.check_gradients(model, wrt=["x"])
    assert verdicts(report) == {"x": "undecided"}
    assert [node.verdict for node in report.nodes] == ["right", "right"]
    assert report.ok
    assert "Not all differences of the whole model settle" in str(report)


def in_float32(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, slope: np.ndarray) -> differences.Point:
    """The sum of a function of each element, whose gradient is claimed to be `slope`."""
    values = {"x": x.astype(np.float32)}
    y = function(values["x"])
    return differences.Point(
        lambda at: {"y": function(np.asarray(at["x"]))}, values, {"y": np.ones_like(y)}, {"x": slope.astype(np.float32)}
    )


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "right"), (1.5, "wrong")])
def test_a_variable_far_smaller_than_what_it_is_added_to(factor: float, verdict: str) -> None:
    """Steps of its own size would be lost in the rounding."""
    x = np.full(20, 1e-9) * np.where(np.arange(20) % 3, 1, -1)
    point = in_float32(lambda b: np.sin(b + np.float32(1)), x, factor * np.cos(np.full(20, 1.0)))
    answer = differences.judge(point, ["x"], differences.FLOAT32, np.random.default_rng(0))
    assert answer.verdict == verdict


def test_a_small_variable_far_from_a_kink() -> None:
    """Longer steps reach the other side of the kink; the gradient is that of this side."""
    x = np.full(20, 1e-9) * np.where(np.arange(20) % 3, 1, -1)
    point = in_float32(lambda b: np.maximum(b - np.float32(1), 0) + np.float32(1), x, np.zeros(20))
    answer = differences.judge(point, ["x"], differences.FLOAT32, np.random.default_rng(0))
    assert (answer.verdict, answer.faint) == ("right", True)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "right"), (1.5, "wrong")])
def test_positive_variables_of_very_different_sizes_stay_positive(factor: float, verdict: str) -> None:
    """As the variances of channels: a step of the size of the largest would turn the others negative."""
    x = np.float64([1e-4, 1e-2, 1, 3, 40])
    point = in_float32(lambda v: np.float32(1) / np.sqrt(v), x, -0.5 * factor * x**-1.5)
    answer = differences.judge(point, ["x"], differences.FLOAT32, np.random.default_rng(0))
    assert answer.verdict == verdict


def test_a_tolerance_finer_than_the_forward_decides_nothing() -> None:
    report = ob.check_gradients(wide_model(), tolerance=1e-10)
    assert report.verdict == "undecided"
    assert not report.ok
    assert report.repro is None
    with pytest.raises(ob.InvalidArgumentError, match="nothing is wrong"):
        report.save_repro("none.onnx")


def test_a_model_that_draws_random_numbers() -> None:
    model = model_of("g (float[30] x) => (float[30] y) { n = RandomNormalLike(x)  y = Add(x, n) }")
    with pytest.raises(ob.InvalidModelError, match="two runs .* different values of 'y'"):
        ob.check_gradients(model)


def test_a_model_without_a_gradient() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="no gradient to check"):
        ob.check_gradients(model_of("g (int64[3] x) => (float[3] y) { y = Cast<to = 1>(x) }"))


def test_missing_rules_are_named() -> None:
    with pytest.raises(ob.UnsupportedOpError, match="MaxRoiPool: 'y'"):
        ob.check_gradients(
            model_of(
                "g (float[1,1,4,4] x) => (float[1,1,2,2] y) { rois = Constant<value = float[1,5] {0, 0, 0, 3, 2}>()"
                "y = MaxRoiPool<pooled_shape = [2, 2]>(x, rois) }"
            )
        )


FEEDS = {
    "sets a shape": (
        "g (float[A, B] x, int64[2] s) => (float[C, D] y) { y = Reshape(x, s) }",
        {},
        r"'s' sets a shape.* of Reshape 'y'.*feeds=\{'s': array\}",
    ),
    "sets a shape further on": (
        "g (float[A] x, int64 s) => (float[C] y) { z = Constant<value_ints = [0]>()  u = Unsqueeze(s, z)  y = Expand(x, u) }",
        {},
        r"'s' sets a shape.* of Expand 'y'",
    ),
    "text": ("g (float[3] x, string[1] s) => (float[3] y, string[1] t) { y = Exp(x) t = Identity(s) }", {}, "STRING"),
    "unknown": ("g (float[3] x) => (float[3] y) { y = Exp(x) }", {"z": np.ones(3)}, "got 'z'"),
    "type": ("g (float[3] x) => (float[3] y) { y = Exp(x) }", {"x": np.ones(3)}, "type float32.* float64"),
    "shape": ("g (float[N, 3] x) => (float[N, 3] y) { y = Exp(x) }", {"x": np.ones(3, np.float32)}, r"\['\?', 3\].*\[3\]"),
    "out of range": (
        "g (float[3] x, int64[2] i) => (float[2] y) { y = Gather(x, i) }",
        {"i": np.array([5, 9])},
        r"does not run on .*indices element out of data bounds.*",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FEEDS)
def test_feeds_that_do_not_fit(case: str) -> None:
    text, feeds, message = FEEDS[case]
    with pytest.raises(ob.InvalidArgumentError, match=f"feeds: .*{message}"):
        ob.check_gradients(model_of(text), feeds=feeds)


def test_given_feeds_are_used() -> None:
    model = model_of("g (float[A, B] x, int64[2] s) => (float[C, D] y) { y = Reshape(x, s) }")
    assert ob.check_gradients(model, feeds={"s": np.array([-1, 2]), "x": np.ones((4, 3), np.float32)}).ok


def test_an_exponent_at_negative_numbers_is_named() -> None:
    """By default it is no variable; where it is asked for, the message tells whose gradient is NaN."""
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[3,4] x) => (float[3,4] y) <float e = {3.0}, float[4] w = '
        "{1.0, 0.5, 0.25, 2.0}> { b = Mul(x, w) a = Abs(b) c = Neg(a) y = Pow(c, e) }"
    )
    report = ob.check_gradients(model)
    assert report.ok
    assert {result.variables for result in report.results} == {"x", "w"}
    with pytest.raises(ob.InvalidArgumentError, match="the gradient of e: empty, infinite or NaN"):
        ob.check_gradients(model, wrt=["w", "e"])


@pytest.mark.parametrize("attributes", ['auto_pad="SAME_UPPER"', "output_padding=[1,1]", "output_shape=[9,9]"])
def test_nothing_else_is_printed(attributes: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Transposed convolutions of symbolic lengths, tried with lengths that onnxruntime may refuse."""
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[N,2,H,W] x) => (float[N,3,P,Q] y) '
        f"{{ y = ConvTranspose<strides=[2,2], {attributes}>(x, w) }}"
    )
    w = np.random.default_rng(0).standard_normal((2, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    assert ob.check_gradients(model).ok
    assert capfd.readouterr() == ("", "")


def test_variables_without_axes() -> None:
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[1,3,9,9] x) => (float[1,4,7,7] y) <float s = {2.0}> '
        "{ a = Mul(x, s) y = Conv(a, w) }"
    )
    w = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    assert ob.check_gradients(model, wrt=["s", "w"]).ok
