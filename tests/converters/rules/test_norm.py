"""Gradients of softmax, and of normalisations along axes or over neighbouring channels."""

from __future__ import annotations

import re

import numpy as np
import pytest
from onnx import TensorProto, parser

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.support.gradient_checks import FLOAT64, SMOOTH, VARIANTS, build, case, check_cases, positive, spread

SHAPE = (2, 3, 4)
TAILS = [  # x, axis, scale, bias
    (SHAPE, -1, (4,), (4,)),
    (SHAPE, 1, (3, 4), (3, 4)),
    (SHAPE, -2, (3, 1), (4,)),
    (SHAPE, 0, SHAPE, (1, 3, 1)),
    (SHAPE, 2, (1,), ()),
    ((5,), 0, (5,), (5,)),
    ((0, 3), -1, (3,), (3,)),
    (SHAPE, -1, (3, 4), (3, 4)),  # a scale with an axis before the normalised ones
    (SHAPE, -1, (2, 3, 1), (2, 3, 1)),
    (SHAPE, 1, (4,), (4,)),
]
STATISTICS = [
    "y = Mul(z, rate)",
    "y = Mul(mean, rate)",
    "u = Mul(z, mean) y = Add(u, rate)",
    "y = Identity(mean)",
    "y = Identity(rate)",
]

CASES = [
    *(case(f"y = {op}(x)", x=(3, 4)) for op in ("Softmax", "LogSoftmax")),
    *(case(f"y = {op} <axis = {axis}> (x)", x=SHAPE) for op in ("Softmax", "LogSoftmax") for axis in (-1, 0, 1, 2, -2)),
    *(case(f"y = {op}(x)", x=10 * positive((2, 5))) for op in ("Softmax", "LogSoftmax")),
    # layers
    *(
        case(f"y = LayerNormalization <axis = {axis}, epsilon = 0.1> (x, s, b)", x=x, s=s, b=b)
        for x, axis, s, b in TAILS
    ),
    case("y = LayerNormalization(x, s)", x=SHAPE, s=(4,)),
    case("y = LayerNormalization(x, s, b)", x=100 + spread(SHAPE), s=(4,), b=(4,), oracle=FLOAT64, skips=["half"]),
    *(case("y = LayerNormalization(x, s, b)", x=SHAPE, s=(4,), b=(4,), wrt=[name]) for name in "xsb"),
    *(
        case(
            f"z, mean, rate = LayerNormalization <axis = {axis}, epsilon = 0.1> (x, s, b) {end}",
            x=SHAPE,
            s=(4,),
            b=(4,),
            wrt="xsb" if "z" in end else "x",
            op="LayerNormalization",
            skips=["half"],  # the statistics are float32
        )
        for axis in (-1, 1)
        for end in STATISTICS
    ),
    case(
        "z, mean, rate = LayerNormalization <epsilon = 0.1> (x, s) m = CastLike(mean, z) r = CastLike(rate, z) "
        "u = Mul(z, r) y = Add(u, m)",
        x=SHAPE,
        s=(4,),
        op="LayerNormalization",
        oracle=SMOOTH,
    ),
    *(
        case(f"y = RMSNormalization <axis = {axis}, epsilon = 0.1> (x, s)", x=x, s=s, since=23, oracle=SMOOTH)
        for x, axis, s, _ in TAILS
    ),
    *(case("y = RMSNormalization(x, s)", x=SHAPE, s=(4,), wrt=[n], since=23, oracle=SMOOTH) for n in "xs"),
    # over axes; onnxruntime runs MeanVarianceNormalization in float32 only
    case("y = MeanVarianceNormalization <axes = [0, 2, 3]> (x)", x=(2, 2, 3, 2), skips=["half"], oracle=SMOOTH),
    *(
        case(f"y = MeanVarianceNormalization <axes = {axes}> (x)", x=SHAPE, skips=["half"], oracle=SMOOTH)
        for axes in ([0, 2], [1], [-1, 0], [0, 1, 2])
    ),
    *(  # onnx's reference evaluator divides by the sum of x, not of |x|, for p = 1
        case(f"y = LpNormalization <axis = {axis}, p = {p}> (x)", x=SHAPE, since=since, oracle=SMOOTH)
        for axis in (-1, 0, 1)
        for p in (1, 2)
        for since in (18, 22)
    ),
    case("y = LpNormalization(x)", x=SHAPE),
    # over channels; onnxruntime takes odd windows only
    *(
        case(f"y = LRN <size = {size}, alpha = {alpha}, beta = {beta}, bias = {bias}> (x)", x=x, oracle=SMOOTH)
        for size, alpha, beta, bias in [(3, 0.5, 0.75, 1.2), (5, 1.5, 0.3, 0.7), (1, 0.4, 1.0, 1.0)]
        for x in [(1, 4, 2, 3), (2, 2, 1, 2)]
    ),
    case("y = LRN <size = 3> (x)", x=30 * spread((1, 5, 2, 2)), oracle=SMOOTH, skips=["half"]),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("x", "axis", "s", "b"), [tail for tail in TAILS if 0 not in tail[0]])
def test_layer_normalization_on_every_route(x, axis: int, s, b, kernels: str) -> None:
    """The routes' gradients are those of float64, for which the converter writes standard operators."""
    text = f"y = LayerNormalization <axis = {axis}, epsilon = 0.1> (x, s, b)"
    model, feeds, wrt = build(case(text, x=x, s=s, b=b), opset=18)
    feeds["y_grad"] = spread(x, 7)
    got = ob.session(ob.backward(model, wrt=wrt), kernels=kernels).run(None, feeds)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    composed = ob.backward(model, wrt=wrt)
    assert not composed.functions
    expected = ob.session(composed).run(None, {k: v.astype(np.float64) for k, v in feeds.items()})
    for name, *values in zip(["y", *wrt], got, expected, strict=True):
        a, e = (np.asarray(value, np.float64) for value in values)
        np.testing.assert_allclose(a, e, rtol=0, atol=1e-5 * max(1, np.abs(e).max()), err_msg=name)


@pytest.mark.parametrize(
    ("text", "wrt", "emitted"),
    [
        ("y = LayerNormalization(x, s, b)", "xsb", True),
        ("y = LayerNormalization(x, s)", "xs", True),
        ("y = LayerNormalization <axis = 1> (x, s, b)", "xsb", True),  # stretched
        ("y, mean = LayerNormalization(x, s)", "s", True),
        ("y = LayerNormalization(x, s, b)", "b", False),  # a sum
        ("y = LayerNormalization(x, t)", "xt", False),
    ],
)
def test_what_layer_norm_backward_is_for(text: str, wrt: str, emitted: bool) -> None:
    shapes = {"x": SHAPE, "s": (4,), "b": (4,), "t": (3, 4)}
    given = {name: shape for name, shape in shapes.items() if re.search(rf"\b{name}\b", text.partition("=")[2])}
    model, _, _ = build(case(text, op="LayerNormalization", **given), opset=18)
    assert [f.name for f in ob.backward(model, wrt=list(wrt)).functions] == ["LayerNormBackward"] * emitted


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_scale_of_unknown_length_may_be_one(kernels: str) -> None:
    """Two lengths that nobody knows need not be equal; the gradient of the one is the sum of those of four."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]> g (float[?,?] x, float[?] s) => (float[?,?] y)
        { y = LayerNormalization <epsilon = 0.1> (x, s) }""")
    session = ob.session(ob.backward(model, wrt=["x", "s"]), kernels=kernels)
    feeds = {"x": spread((3, 4)), "y_grad": spread((3, 4), 5)}
    one, four = ([np.asarray(v) for v in session.run(None, feeds | {"s": np.full(n, 0.5, np.float32)})] for n in (1, 4))
    np.testing.assert_array_equal(one[1], four[1])
    np.testing.assert_allclose(one[2], four[2].sum(keepdims=True), rtol=1e-5, strict=True)


@pytest.mark.parametrize("power", [1, 2])
def test_lp_normalization_of_nothing(power: int) -> None:
    """A row of zeros stays one, and lets no gradient through."""
    model, _, wrt = build(case(f"y = LpNormalization <p = {power}> (x)", x=(2, 3)), opset=18)
    session = ob.session(ob.backward(model, wrt=wrt))
    x = np.float32([[0, 0, 0], [1, -2, 3]])
    _, dx = (np.asarray(v) for v in session.run(None, {"x": x, "y_grad": np.ones((2, 3), np.float32)}))
    np.testing.assert_array_equal(dx[0], 0)
    assert (dx[1] != 0).all()


def test_unknown_powers_are_refused() -> None:
    model, _, wrt = build(case("y = LpNormalization <p = 3> (x)", x=(2, 3)), opset=18)
    with pytest.raises(
        ob.UnsupportedAttributeError, match=r"LpNormalization 'lpnormalization_0'.* p of 1 and 2; got 3"
    ):
        ob.backward(model, wrt=wrt)


def test_mean_variance_normalization_without_axes() -> None:
    """They are 0, 2 and 3 then, which onnx's strict inference does not take though its documents say so."""
    results, feeds = [], {"x": spread((2, 2, 3, 2)), "y_grad": positive((2, 2, 3, 2))}
    for attributes in ("", "<axes = [0, 2, 3]>"):
        model, _, wrt = build(case(f"y = MeanVarianceNormalization {attributes} (x)", x=(2, 2, 3, 2)), opset=18)
        training = ob.session(ob.backward(model, wrt=wrt))
        results.append(training.run(None, feeds))
    np.testing.assert_array_equal(results[0][1], results[1][1])
