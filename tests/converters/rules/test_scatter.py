"""Gradients of operators that address elements by tensors of indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob
from tests.support.gradient_checks import LINEAR, PIECEWISE, SMOOTH, VARIANTS, Case, build, case, check_cases, spread

SHAPE = (4, 3)
LINEAR_REDUCTIONS, OTHER_REDUCTIONS = ("none", "add"), ("mul", "max", "min")


def shifted(shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that differ from each other and from those of `spread`."""
    return spread(shape, seed=3) + np.float32(2.0**-6)


def scatter(op: str, data: tuple, indices: Any, updates: tuple, reduction: str, attributes: str = "", **given) -> Case:
    oracle = {"none": LINEAR, "add": LINEAR, "mul": SMOOTH}.get(reduction, PIECEWISE)
    half = reduction != "none" and (op, reduction) not in [("ScatterElements", "max"), ("ScatterElements", "min")]
    return case(
        f'y = {op} <reduction = "{reduction}"{attributes}> (x, i, u)',
        x=data,
        u=shifted(updates),
        constants={"i": np.array(indices, np.int64)},
        oracle=oracle,
        skips=["half"] if half else [],  # onnxruntime does not reduce half types
        **given,
    )


ELEMENTS = [  # data, axis, indices
    (SHAPE, 0, [[0, 2, 1]]),
    (SHAPE, 0, [[0, 2, 1], [3, -1, -4]]),
    (SHAPE, 1, [[2, 0], [1, -1]]),
    (SHAPE, -1, [[0], [-1], [1], [2]]),
    ((5,), 0, [4, 0, -2]),
    ((2, 3, 2), 1, [[[0, 1]], [[2, -1]]]),
    ((3,), 0, np.zeros(0, np.int64)),
]
REPEATED = [
    (SHAPE, 0, [[1, 2, 1], [1, 0, 1], [1, 2, -3]]),
    (SHAPE, 1, [[0, 0, 2, -3], [1, 2, 2, -1]]),
    ((4,), -1, [0, 1, 0, -4, 3]),
]
TUPLES = [  # data, indices
    (SHAPE, [[2], [0]]),
    (SHAPE, [[1, 2], [0, 0], [-1, -3]]),
    ((4,), [[1], [-1]]),
    ((2, 3, 2), [[[0, 2], [1, -1]], [[0, 0], [1, 0]]]),
    ((2, 3, 2), [[-1]]),
    (SHAPE, [1]),
    (SHAPE, [1, 2]),
    ((3, 2), np.zeros((0, 1), np.int64)),
]
REPEATED_TUPLES = [
    (SHAPE, [[2], [0], [2], [-2]]),
    (SHAPE, [[1, 2], [0, 0], [1, -1], [1, 2]]),
    ((2, 3, 2), [[[0, 2], [0, 2]], [[0, 0], [-2, -1]]]),
]


def picked(data: tuple[int, ...], indices: Any, batch: int = 0) -> tuple[int, ...]:
    shape = np.shape(indices)
    return (*shape[:-1], *data[batch + shape[-1] :])


CASES = [
    *(
        scatter("ScatterElements", data, i, np.shape(i), reduction, f", axis = {axis}")
        for reduction in (*LINEAR_REDUCTIONS, *OTHER_REDUCTIONS)
        for data, axis, i in ELEMENTS + REPEATED
    ),
    case("y = ScatterElements(x, i, u)", x=SHAPE, u=(1, 3), constants={"i": np.array([[0, 2, 1]], np.int32)}),
    *(
        scatter("ScatterElements", SHAPE, [[1, 2, 1], [1, 0, 1]], (2, 3), reduction, wrt=[name])
        for reduction in (*LINEAR_REDUCTIONS, *OTHER_REDUCTIONS)
        for name in "xu"
    ),
    *(
        scatter("ScatterND", data, i, picked(data, i), reduction)
        for reduction in (*LINEAR_REDUCTIONS, *OTHER_REDUCTIONS)
        for data, i in TUPLES + REPEATED_TUPLES
    ),
    *(
        scatter("ScatterND", SHAPE, [[2], [0], [2]], (3, 3), reduction, wrt=[name])
        for reduction in (*LINEAR_REDUCTIONS, *OTHER_REDUCTIONS)
        for name in "xu"
    ),
    *(
        case("y = GatherND(x, i)", x=data, constants={"i": np.array(i, np.int64)}, oracle=LINEAR)
        for data, i in TUPLES + REPEATED_TUPLES
    ),
    *(
        case(f"y = GatherND <batch_dims = {batch}> (x, i)", x=x, constants={"i": np.array(i)}, oracle=LINEAR)
        for batch, x, i in [
            (1, (2, 3, 2), [[1], [-1]]),
            (1, (2, 3, 2), [[[1], [1]], [[0], [2]]]),
            (1, (2, 3, 2), [[[1, 0], [1, -1]], [[0, 1], [2, 1]]]),
            (2, (2, 3, 2), [[[1], [0], [-1]], [[0], [0], [1]]]),
            (2, (2, 2, 3, 2), [[[[1]], [[0]]], [[[2]], [[-1]]]]),
        ]
    ),
    *(
        case(f"y = MaxUnpool <{attributes}> ({inputs})", x=x, constants={"i": np.array(i), **more}, oracle=LINEAR)
        for attributes, x, i, inputs, more in [
            ("kernel_shape = [2], strides = [2]", (1, 2, 3), [[[0, 3, 5], [7, 9, 10]]], "x, i", {}),
            ("kernel_shape = [2], strides = [2]", (1, 1, 3), [[[5, 3, 5]]], "x, i", {}),
            ("kernel_shape = [2, 2], strides = [2, 2]", (1, 1, 2, 2), [[[[0, 6], [8, 14]]]], "x, i", {}),
            ("kernel_shape = [3, 3], strides = [2, 2], pads = [1, 0, 0, 1]", (1, 1, 2, 2), [[[[0, 6], [8, 14]]]], "x, i", {}),
            ("kernel_shape = [2, 2], strides = [2, 2]", (1, 1, 2, 2), [[[[0, 6], [8, 14]]]], "x, i, s", {"s": np.array([1, 1, 5, 5])}),
        ]
    ),
    # where two windows meet the index appears twice
    case(
        "p, i = MaxPool <kernel_shape = [3, 3], strides = [1, 1]> (x) y = MaxUnpool <kernel_shape = [3, 3], strides = [1, 1]> (p, i)",
        x=(1, 2, 4, 5),
        oracle=PIECEWISE,
        op="MaxUnpool",
    ),
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("u", [[2, 0, 0, 3, 5], [2, 0, 7, 3, 5], [0, 1, 0, 0, 4], [1, 2, 3, 4, 5]])
def test_factors_of_zero(op: str, u: list[int]) -> None:
    """Y_j = x_j · Π u_k over the k that are put at j: the product of the others, also where one of them is 0."""
    where, x, dy = (
        np.array([0, 1, 1, 1, 3]),
        np.array([2, 3, 4, 5], np.float32),
        np.array([1, 10, 100, 1000], np.float32),
    )
    indices = where if op == "ScatterElements" else where[:, None]
    model, _, _ = build(
        case(f'y = {op} <reduction = "mul"> (x, i, u)', x=x, u=np.float32(u), constants={"i": indices}), opset=18
    )
    session = ob.session(ob.backward(model, wrt=["x", "u"]))
    _, dx, du = (np.asarray(v) for v in session.run(None, {"x": x, "u": np.float32(u), "y_grad": dy}))
    factors = np.array([np.prod([u[k] for k in range(5) if where[k] == j]) for j in range(4)])
    others = [np.prod([u[k] for k in range(5) if where[k] == where[n] and k != n]) for n in range(5)]
    np.testing.assert_allclose(dx, dy * factors)
    np.testing.assert_allclose(du, dy[where] * x[where] * others)


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("reduction", ["max", "min"])
def test_ties_share_equally(op: str, reduction: str) -> None:
    where, x = np.array([0, 1, 1, 2]), np.float32([2, 3, 4, 5])
    low, high = (1, 9) if reduction == "max" else (9, 1)
    u = np.float32([2, 3, 3, low])
    indices = where if op == "ScatterElements" else where[:, None]
    nodes = f'y = {op} <reduction = "{reduction}"> (x, i, u)'
    model, _, _ = build(case(nodes, x=x, u=u, constants={"i": indices}), opset=18)
    session = ob.session(ob.backward(model, wrt=["x", "u"]))
    dy = np.float32([6, 6, 6, 6])
    _, dx, du = (np.asarray(v) for v in session.run(None, {"x": x, "u": u, "y_grad": dy}))
    np.testing.assert_allclose(dx, [3, 2, 6, 6])
    np.testing.assert_allclose(du, [3, 2, 2, 0])
    _, dx, du = (np.asarray(v) for v in session.run(None, {"x": x, "u": u * 0 + high, "y_grad": dy}))
    np.testing.assert_allclose(dx, [0, 0, 0, 6])
    np.testing.assert_allclose(du, [6, 3, 3, 6])


def test_constant_indices_without_repetition_need_no_search_for_the_last() -> None:
    cases = {indices: ("ScatterElements", np.array(indices)) for indices in [(0, 2, -1), (0, 2, 2)]}
    count = {}
    for indices, (op, array) in cases.items():
        model, _, wrt = build(case(f"y = {op}(x, i, u)", x=(4,), u=(3,), constants={"i": array}), opset=18)
        count[indices] = [n.op_type for n in ob.backward(model, wrt=wrt).graph.node].count("Equal")
    assert count == {(0, 2, -1): 0, (0, 2, 2): 1}


def test_unknown_reductions_are_refused() -> None:
    model, _, wrt = build(
        case("y = ScatterElements(x, i, u)", x=(4,), u=(2,), constants={"i": np.array([0, 1])}), opset=18
    )
    model.graph.node[0].attribute.add(name="reduction", s=b"mean", type=3)
    with pytest.raises(ob.UnsupportedAttributeError, match=r"ScatterElements 'scatterelements_0'.*reduction.*'mean'"):
        ob.backward(model, wrt=wrt)


def test_scatter_of_old_models() -> None:
    """It becomes a ScatterElements of opset 18."""
    model = parser.parse_model(
        """<ir_version: 7, opset_import: ["" : 10]> g (float[3,3] x, int64[2,3] i, float[2,3] u) => (float[3,3] y)
        { y = Scatter <axis = 1> (x, i, u) }"""
    )
    feeds = {"x": spread((3, 3)), "i": np.array([[0, 2, 2], [1, 1, 0]]), "u": spread((2, 3)), "y_grad": shifted((3, 3))}
    y, dx, du = (np.asarray(v) for v in ob.session(ob.backward(model, wrt=["x", "u"])).run(None, feeds))
    dy = feeds["y_grad"]
    np.testing.assert_array_equal(dx, np.where(y == feeds["x"], dy, 0))
    np.testing.assert_array_equal(du, [[dy[0, 0], 0, dy[0, 2]], [0, dy[1, 1], dy[1, 0]]])
