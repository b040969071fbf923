"""Gradients of activation functions."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, parser

import onnx_backprop as ob
from tests.support.gradient_checks import PIECEWISE, SMOOTH, VARIANTS, case, check_cases, retyped, spread

SHAPE = (2, 3, 4)

CASES = [
    *(case(f"y = {op}(x)", x=SHAPE) for op in ("Relu", "LeakyRelu", "Elu", "Sigmoid", "Tanh", "Softplus")),
    *(case(f"y = {op}(x)", x=3 * spread(SHAPE)) for op in ("HardSigmoid", "HardSwish")),
    *(case(f"y = {op} <alpha = {alpha}> (x)", x=SHAPE) for op in ("LeakyRelu", "Elu") for alpha in (0.3, -0.7)),
    *(
        case(f"y = HardSigmoid <alpha = {alpha}, beta = {beta}> (x)", x=SHAPE)
        for alpha, beta in [(0.6, 0.3), (-0.6, 0.3)]
    ),
    *(case("y = PRelu(x, s)", x=SHAPE, s=s) for s in (SHAPE, (3, 1), (1,), (4,), (), (1, 1, 4))),
    *(case(f'y = Gelu <approximate = "{how}"> (x)', x=SHAPE, since=20, oracle=SMOOTH) for how in ("none", "tanh")),
    case("y = Gelu(x)", x=SHAPE, since=20, oracle=SMOOTH),
    *(case(f"y = {op}(x)", x=2 * spread(SHAPE)) for op in ("Selu", "Softsign", "ThresholdedRelu", "Shrink")),
    *(case("y = Mish(x)", x=2 * spread(SHAPE), since=since, oracle=SMOOTH) for since in (18, 22)),
    *(
        case(f"y = Selu <alpha = {alpha}, gamma = {gamma}> (x)", x=SHAPE)
        for alpha, gamma in [(0.5, 2.5), (-0.7, 1.3), (0.5, -1.5)]
    ),
    case("y = Celu(x)", x=SHAPE, skips=["half"]),
    *(case(f"y = Celu <alpha = {alpha}> (x)", x=SHAPE, skips=["half"]) for alpha in (0.5, 2.5, -1.5)),
    *(case(f"y = ThresholdedRelu <alpha = {alpha}> (x)", x=SHAPE) for alpha in (0.03, -0.53)),
    *(
        case(f"y = Shrink <lambd = {limit}, bias = {bias}> (x)", x=SHAPE, oracle=PIECEWISE)
        for limit, bias in [(0.53, 0.2), (0.03, 1.5), (-0.53, 0.1)]
    ),
    # onnxruntime 1.31 runs Swish in opset 24 only
    case("y = Swish(x)", x=SHAPE, since=24, until=24, oracle=SMOOTH),
    *(case(f"y = Swish <alpha = {alpha}> (x)", x=SHAPE, since=24, until=24, oracle=SMOOTH) for alpha in (1.7, -0.5)),
    case("y = Identity(x)", x=SHAPE),
    case("y = Dropout(x)", x=SHAPE),
    case("y = Dropout(x, ratio)", x=SHAPE, constants={"ratio": spread(())}),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


TRAINED = """<ir_version: 10, opset_import: ["" : {opset}]> g ({inputs}) => (float[4,50] y{more}) {{ {nodes} }}"""
KEPT_AND_NAMED = "y, kept = Dropout <seed = 3> (x, ratio, training)"


def dropout(nodes: str, *inputs: str, opset: int = 18, more: str = "") -> ModelProto:
    return parser.parse_model(TRAINED.format(inputs=", ".join(inputs), nodes=nodes, opset=opset, more=more))


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize("shape", ["[4,50]", "[N,M]"])
@pytest.mark.parametrize(
    ("nodes", "fed"),
    [
        ("y = Dropout (x, ratio, training)", ("ratio", "training")),
        ("y = Dropout <seed = 3> (x, , training)", ("training",)),
        (KEPT_AND_NAMED, ("ratio", "training")),
        ("training = Constant <value = bool {1}> ()  y = Dropout (x, ratio, training)", ("ratio",)),
        ("training = Constant <value = bool {1}> ()  y = Dropout (x, , training)", ()),
    ],
)
def test_dropout_in_training_drops_in_the_gradient_what_it_dropped(
    nodes: str, fed: tuple, opset: int, shape: str
) -> None:
    """Y is x times something, element by element, and the gradient is dy times the same."""
    values = {"ratio": np.array(0.3, np.float32), "training": np.array(True)}
    types = {"ratio": "float ratio", "training": "bool training"}
    model = dropout(nodes, f"float{shape} x", *(types[name] for name in fed), opset=opset)
    x, dy = spread((4, 50), 1), spread((4, 50), 2)
    training = ob.backward(model, wrt=["x"])
    session = ob.session(training)
    feeds = {name: values[name] for name in fed}
    for mode in {True, "training" not in fed}:
        feeds |= {"training": np.array(mode)} if "training" in fed else {}
        y, dx = (np.asarray(v) for v in session.run(None, {"x": x, "y_grad": dy, **feeds}))
        np.testing.assert_allclose(dx, dy * (y / x), rtol=1e-6)
        assert 20 < (y == 0).sum() < 160 if mode else (dx == dy).all()


def test_dropout_is_the_identity_where_the_run_says_so() -> None:
    model = dropout(KEPT_AND_NAMED, "float[4,50] x", "float ratio", "bool training")
    session = ob.session(ob.backward(model, wrt=["x", "ratio"]))
    x, dy = spread((4, 50), 1), spread((4, 50), 2)
    feeds = {"x": x, "y_grad": dy, "ratio": np.array(0.3, np.float32), "training": np.array(False)}
    y, dx, dratio = (np.asarray(v) for v in session.run(None, feeds))
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(dx, dy)
    assert dratio == 0


def test_dropout_ratio() -> None:
    """Y = x · mask / (1 - r) with the mask held: dr = Σ dy · Y / (1 - r)."""
    model = dropout(KEPT_AND_NAMED, "float[4,50] x", "float ratio", "bool training")
    session = ob.session(ob.backward(model, wrt=["ratio"]))
    x, dy, r = spread((4, 50), 1), spread((4, 50), 2), 0.3
    feeds = {"x": x, "y_grad": dy, "ratio": np.array(r, np.float32), "training": np.array(True)}
    y, dratio = (np.asarray(v) for v in session.run(None, feeds))
    np.testing.assert_allclose(dratio, (dy * y).sum() / (1 - r), rtol=1e-5)


def test_dropout_in_half_precision() -> None:
    model = dropout("training = Constant <value = bool {1}> ()  y = Dropout (x, , training)", "float[4,50] x")
    session = ob.session(ob.backward(retyped(model, TensorProto.FLOAT16), wrt=["x"]))
    x, dy = (spread((4, 50), seed).astype(np.float16) for seed in (1, 2))
    y, dx = (np.asarray(v) for v in session.run(None, {"x": x, "y_grad": dy}))
    assert dx.dtype == np.float16
    np.testing.assert_allclose(dx.astype(np.float32), dy * (y.astype(np.float32) / x), rtol=2e-3)
