"""Gradients of element-wise arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnx_backprop as ob
from tests.support.adjoint import run
from tests.support.gradient_checks import LINEAR, SMOOTH, VARIANTS, case, check_cases, positive, spread
from tests.support.rule_checks import model_of

SHAPE = (2, 3, 4)
BROADCASTS = [
    (SHAPE, SHAPE),
    (SHAPE, (4,)),
    (SHAPE, (3, 1)),
    (SHAPE, (1,)),
    (SHAPE, ()),
    ((3, 1), SHAPE),
    ((), SHAPE),
    ((2, 1, 4), (3, 1)),
    ((1, 3, 1), (2, 1, 1)),
    ((1, 1), (1, 1)),
    ((), ()),
    ((0, 3), (3,)),
    ((2, 1), (2, 0)),
]

CASES = [
    *(case(f"y = {op}(a, b)", a=a, b=b) for op in ("Add", "Sub", "Mul") for a, b in BROADCASTS),
    *(case("y = Div(a, b)", a=a, b=positive(b)) for a, b in BROADCASTS),
    *(case("y = Pow(x, p)", x=positive(x), p=np.abs(spread(p)) / 4) for x, p in BROADCASTS),
    *(case("y = Where(c, a, b)", c=np.array([[True], [False], [True]]), a=a, b=b) for a, b in BROADCASTS[:7]),
    case("y = Where(c, a, b)", c=spread((2, 1, 4)) > 0, a=(1,), b=()),
    case("y = Mod <fmod = 1> (a, b)", a=SHAPE, b=np.array([[0.9], [-0.7], [0.3]], np.float32)),
    *(case(f"y = {op}(a)", a=SHAPE) for op in ("Sum", "Mean", "Max", "Min", "Neg", "Abs", "Exp")),
    *(case(f"y = {op}(a, b, c)", a=SHAPE, b=(3, 1), c=(1, 4)) for op in ("Sum", "Mean", "Max", "Min")),
    case("y = Sum(a, b, a)", a=(3, 1), b=(4,)),
    case("y = Mean(a, b, a)", a=(3, 1), b=(4,), oracle=LINEAR),
    case("y = Erf(x)", x=SHAPE, oracle=SMOOTH),
    *(case(f"y = {op}(x)", x=positive(SHAPE)) for op in ("Sqrt", "Log", "Reciprocal")),
    case("y = Pow(x, p)", x=SHAPE, constants={"p": np.float32(2)}, wrt=["x"]),
    case("y = Pow(x, p)", x=SHAPE, constants={"p": np.float32(3)}, wrt=["x"]),
    case("y = Pow(x, p)", x=SHAPE, constants={"p": np.array([0, 1, 2, 3], np.float32)}, wrt=["x"]),
    case("y = Pow(x, p)", x=SHAPE, constants={"p": np.array([-2, 1, 2, 3], np.int64)}),
    case("y = Clip(x)", x=SHAPE),
    case("y = Clip(x, low)", x=SHAPE, low=np.array(-0.53, np.float32)),
    case('y = Clip(x, "", high)', x=SHAPE, high=np.array(0.53, np.float32)),
    case("y = Clip(x, low, high)", x=SHAPE, low=np.array(-0.53, np.float32), high=np.array(1.03, np.float32)),
    case(
        "y = Clip(x, low, high)",
        x=SHAPE,
        low=np.array(0.53, np.float32),
        high=np.array(-0.53, np.float32),
        note="crossed",
    ),
    case("y = Clip(x, low, high)", x=SHAPE, wrt=["x"], constants={"low": np.float32(0), "high": np.float32(1.03)}),
    case("y = CastLike(x, t)", x=SHAPE, t=np.zeros(1, np.float32), wrt=["x"]),
    case("z = Identity(x) y = CastLike(z, x)", x=SHAPE),
    *(
        case(f"y = CumSum <exclusive = {exclusive}, reverse = {reverse}> (x, axis)", x=SHAPE, constants={"axis": axis})
        for exclusive, reverse, axis in [(0, 0, 0), (1, 0, 1), (0, 1, -1), (1, 1, 2)]
    ),
    case("y = Range(a, b, d)", a=np.float32(0.5), b=np.float32(3.1), d=np.float32(0.7), wrt=["a", "d"], skips=["half"]),
    case(
        "y = Range(a, b, d)",
        a=np.float32(3.1),
        b=np.float32(-0.2),
        d=np.float32(-0.7),
        wrt=["d"],
        skips=["half"],
        note="down",
    ),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


def test_cast_like_takes_the_type_alone_of_its_second_input() -> None:
    text = "g (int64[n] i, float[n] x) => (float[n] y) { f = CastLike(i, x) y = Mul(f, x) }"
    feeds = {"i": np.int64([1, -2, 3]), "x": np.float32([0.5, 1, 2]), "y_grad": np.ones(3, np.float32)}
    _, dx = run(ob.session(ob.backward(model_of(text), wrt=["x"])), feeds)
    np.testing.assert_array_equal(dx, feeds["i"].astype(np.float32))


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 6, [0, 0, 1, 0, 0]), (-1, 6, [1, 1, 1, 1, 0]), (0, 5, [0, 1, 1, 0, 0])]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_clip_at_its_limits(low: float, high: float, expected: list[float], dtype: type) -> None:
    """ReLU6, which exporters write as Clip from 0 to 6, has no gradient at its limits; torch.clamp has."""
    name = "float" if dtype == np.float32 else "float16"
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g ({name}[5] x) => ({name}[5] y) {{ y = Clip(x, low, high) }}'
    )
    for tensor, value in (("low", low), ("high", high)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), tensor))
    x = np.array([-0.5, 0, 3, 6, 7], dtype)
    (dx,) = ob.session(ob.backward(model, wrt=["x"])).run(["x_grad"], {"x": x, "y_grad": np.ones(5, dtype)})
    np.testing.assert_array_equal(np.asarray(dx), expected)
