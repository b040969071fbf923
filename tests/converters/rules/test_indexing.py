"""Gradients of operators that pick, pad or place elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from tests.support.gradient_checks import LINEAR, PIECEWISE, VARIANTS, Case, build, case, check_cases

SHAPE = (4, 5)
HUGE = 2**31 - 1


def linear(nodes: str, **given: Any) -> Case:
    return case(nodes, oracle=LINEAR, **given)


def ints(**values: Any) -> dict[str, np.ndarray]:
    return {name: np.array(value, np.int64) for name, value in values.items()}


SLICES = [  # starts, ends, axes, steps
    ([1, 0], [3, 4], None, None),
    ([1], [3], None, None),
    ([1], [3], [1], None),
    ([-3], [-1], [-1], None),
    ([0], [HUGE], [0], None),
    ([-100], [2], [1], None),
    ([2], [100], [1], [1]),
    ([3], [3], [1], None),
    ([4], [1], [1], [1]),
    ([9], [12], [1], None),
    ([1, 1], [4, 5], [1, 0], None),
    ([0], [5], [1], [2]),
    ([1], [5], [-1], [3]),
    ([-1], [-HUGE], [1], [-1]),
    ([3, 0], [0, 5], [0, 1], [-2, 1]),
    ([-2, 1], [0, HUGE], [1, 0], [-1, 2]),
]

PADS = [[1, 0, 2, 3], [0, 0, 0, 0], [0, 2, 0, 0], [-1, 0, 0, -2], [2, -1, -1, 1], [-1, -1, -1, -1]]
INDICES = [[0, 2, 1], [-1, 0, 3, 3, -4], [[1, 1], [0, -1]], 2, -1, [], [[0], [0]]]

CASES = [
    # onnxruntime's optimizer moves the transposes past the Pad in the gradient
    linear(
        "s = Transpose <perm = [0, 2, 3, 1]> (x)  t = Slice(s, starts, ends, axes)  y = Transpose <perm = [0, 3, 1, 2]> (t)",
        x=(2, 3, 4, 5),
        constants=ints(starts=[1, 1], ends=[3, 5], axes=[1, 2]),
    ),
    *(
        linear(
            f"y = ReverseSequence <batch_axis = {batch}, time_axis = {1 - batch}> (x, lengths)",
            x=shape,
            constants=ints(lengths=lengths),
        )
        for batch, shape, lengths in [(1, (4, 3), [1, 4, 3]), (0, (3, 4, 2), [4, 2, 1]), (1, (2, 1, 3), [2])]
    ),
    *(
        linear(f"y = CenterCropPad {axes} (x, shape)", x=(4, 5, 3), constants=ints(shape=shape))
        for axes, shape in [
            ("", [2, 2, 2]),
            ("", [7, 8, 6]),
            ("", [3, 8, 3]),
            ("<axes = [-1, 0]>", [6, 1]),
            ("<axes = [1]>", [2]),
            ("<axes = [1]>", [4]),
        ]
    ),
    *(
        linear(
            "y = Slice(x, starts, ends"
            + ("" if axes is None else ", axes")
            + ("" if steps is None else ", steps")
            + ")",
            x=SHAPE,
            constants=ints(
                starts=starts,
                ends=ends,
                **({} if axes is None else {"axes": axes}),
                **({} if steps is None else {"steps": steps}),
            ),
        )
        for starts, ends, axes, steps in SLICES
    ),
    linear('y = Slice(x, starts, ends, "", steps)', x=SHAPE, constants=ints(starts=[3, 1], ends=[0, 5], steps=[-1, 2])),
    linear(
        "y = Slice(x, starts, ends, axes)",
        x=SHAPE,
        constants={name: np.array(v, np.int32) for name, v in [("starts", [-3]), ("ends", [9]), ("axes", [1])]},
        note="int32",
    ),
    *(linear("y = Pad(x, pads)", x=SHAPE, constants=ints(pads=pads)) for pads in PADS),
    *(linear("y = Pad(x, pads, value)", x=SHAPE, value=(), constants=ints(pads=pads)) for pads in PADS),
    linear("y = Pad(x, pads, value)", x=SHAPE, value=(1,), constants=ints(pads=[1, 0, 2, 3])),
    linear("y = Pad(x, pads, value)", x=SHAPE, value=(), wrt=["value"], constants=ints(pads=[1, 0, 2, 3])),
    linear('y = Pad(x, pads, "", axes)', x=SHAPE, constants=ints(pads=[2, 1], axes=[1])),
    linear('y = Pad(x, pads, "", axes)', x=SHAPE, constants=ints(pads=[2, -1, 1, 0], axes=[-1, 0])),
    linear("y = Pad(x, pads, value, axes)", x=SHAPE, value=(), constants=ints(pads=[2, 1], axes=[-1])),
    *(
        linear(f'y = Pad <mode = "{mode}"> (x, pads)', x=SHAPE, constants=ints(pads=pads), since=since)
        for mode, since in [("reflect", 18), ("edge", 18), ("wrap", 19)]
        for pads in [[1, 0, 2, 3], [3, 2, 0, 1], [0, 0, 0, 0]]
    ),
    linear('y = Pad <mode = "reflect"> (x, pads, "", axes)', x=SHAPE, constants=ints(pads=[2, 1], axes=[1])),
    *(
        linear(f"y = Gather <axis = {axis}> (x, i)", x=(4, 4, 5), constants=ints(i=i))
        for axis in (0, 1, -2)
        for i in INDICES
    ),
    linear("y = Gather(x, i)", x=(4,), constants=ints(i=3)),
    linear("y = Gather <axis = -1> (x, i)", x=SHAPE, constants={"i": np.array([[-1, 2]], np.int32)}),
    *(
        linear(f"y = GatherElements <axis = {axis}> (x, i)", x=SHAPE, constants=ints(i=i))
        for axis, i in [(0, [[0, 1, 3, 3, -1], [0, 0, 0, 0, 0]]), (1, [[4], [-1]]), (-1, [[0, 0, 0, 1, 1, 2]] * 4)]
    ),
    *(linear(f"y = Trilu <upper = {upper}> (x)", x=SHAPE) for upper in (0, 1)),
    linear("y = Trilu(x)", x=(2, 3, 3)),
    *(
        linear(f"y = Trilu <upper = {upper}> (x, k)", x=SHAPE, constants=ints(k=k))
        for upper, k in [(0, 1), (1, 2), (0, -2), (1, -1), (1, 9)]
    ),
    *(
        linear(
            f"y = OneHot <axis = {axis}> (i, depth, v)",
            i=np.array([[0, 2], [-1, 7]]),
            v=(2,),
            constants=ints(depth=4),
            skips=["half"],
        )
        for axis in (-1, 0, 1)
    ),
    *(
        case(
            f"y, i = TopK <axis = {axis}, largest = {largest}, sorted = {ordered}> (x, k)",
            x=(3, 4, 2),
            constants=ints(k=[k]),
            oracle=PIECEWISE,
            since=since,
        )
        for axis, k in [(-1, 1), (0, 2), (1, 4), (-2, 3), (1, 0)]
        for largest, ordered, since in [(1, 1, 18), (0, 1, 18), (1, 0, 24)]
    ),
    case("y, i = TopK(x, k)", x=SHAPE, constants=ints(k=[3]), oracle=PIECEWISE),
    *(
        linear(f"y = Compress {axis} (x, c)", x=SHAPE, constants={"c": np.array(c, bool)})
        for axis, c in [
            ("<axis = 0>", [1, 0, 1, 1]),
            ("<axis = -1>", [0, 1, 1]),
            ("<axis = 1>", [0, 0, 0, 0, 0]),
            ("", [1, 0, 0, 1, 1, 0, 1, 1, 1]),
            ("", [0] * 7 + [1] * 13),
        ]
    ),
    linear("y = Compress(x, c)", x=(3,), constants={"c": np.array([False, True, True])}),
    *(
        case(f"y = Unique {attributes} (x)", x=x, oracle=PIECEWISE)
        for attributes in ("", "<sorted = 0>", "<axis = 0>", "<axis = 1, sorted = 0>", "<axis = -1>", "<axis = -2>")
        for x in [(3, 2), (2, 4, 3)]
    ),
    case("y, i, r, c = Unique(x)", x=(5,), oracle=PIECEWISE, op="Unique"),
    *(
        linear(f"y = ReverseSequence {attributes} (x, n)", x=x, constants=ints(n=n))
        for attributes, x, n in [
            ("", (4, 3), [1, 4, 2]),
            ("<batch_axis = 0, time_axis = 1>", (3, 4, 2), [4, 1, 3]),
            ("<batch_axis = 1, time_axis = 0>", (4, 2, 2), [3, 2]),
        ]
    ),
    *(
        linear(f"y = CenterCropPad {axes} (x, s)", x=x, constants=ints(s=s))
        for axes, x, s in [
            ("", SHAPE, [6, 3]),
            ("", SHAPE, [3, 8]),
            ("", (5, 5), [4, 6]),
            ("<axes = [1]>", SHAPE, [2]),
            ("<axes = [-1, 0]>", (5, 2, 3), [6, 2]),
            ("<axes = [1, 2]>", (1, 6, 3), [3, 6]),
        ]
    ),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


@pytest.mark.parametrize(
    ("attributes", "x", "dy", "want"),
    [
        ("", [[3, 1, 3], [3, 2, 1]], [6, 4, 9], [[3, 3, 3], [3, 4, 3]]),
        ("<sorted = 0>", [[3, 1, 3], [3, 2, 1]], [9, 6, 4], [[3, 3, 3], [3, 4, 3]]),
        ("<axis = 1>", [[2, 1, 2], [3, 4, 3]], [[1, 2], [3, 4]], [[1, 1, 1], [2, 3, 2]]),
        ("<axis = -1>", [[2, 1, 2], [3, 4, 3]], [[1, 2], [3, 4]], [[1, 1, 1], [2, 3, 2]]),
        ("<axis = 0>", [[2, 1], [0, 1], [2, 1]], [[1, 2], [3, 4]], [[1.5, 2], [1, 2], [1.5, 2]]),
    ],
)
def test_equal_elements_share_the_gradient_of_unique(attributes: str, x: list, dy: list, want: list) -> None:
    model, _, wrt = build(case(f"y = Unique {attributes} (x)", x=np.float32(x)), opset=18)
    feeds = {"x": np.float32(x), "y_grad": np.float32(dy)}
    _, dx = ob.session(ob.backward(model, wrt=wrt)).run(None, feeds)
    np.testing.assert_array_equal(np.asarray(dx), np.float32(want))
