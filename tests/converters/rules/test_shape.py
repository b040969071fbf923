"""Gradients of operators that move elements between shapes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from tests.support.gradient_checks import LINEAR, VARIANTS, Case, case, check_cases
from tests.support.rule_checks import model_of

SHAPE = (2, 3, 4)


def moved(nodes: str, **given: Any) -> Case:
    return case(nodes, oracle=LINEAR, **given)


CASES = [
    *(moved("y = Reshape(x, s)", x=SHAPE, constants={"s": s}) for s in ([6, 4], [-1], [0, -1, 2, 2], [4, 0, 2])),
    moved("y = Reshape(x, s)", x=(1, 1), constants={"s": np.zeros(0, np.int64)}),
    moved("y = Reshape(x, s)", x=(), constants={"s": [1, 1]}),
    moved("y = Reshape <allowzero = 1> (x, s)", x=(0, 3), constants={"s": [2, 0]}),
    moved("y = Reshape(x, s)", x=(0, 3), constants={"s": [0, 3, 1]}),
    *(moved(f"y = Flatten <axis = {axis}> (x)", x=SHAPE) for axis in (-1, 0, 1, 2, 3)),
    moved("y = Flatten(x)", x=(3,)),
    moved("y = Squeeze(x)", x=(1, 3, 1)),
    *(moved("y = Squeeze(x, axes)", x=(1, 3, 1), constants={"axes": axes}) for axes in ([0], [-1], [2, 0])),
    *(moved("y = Unsqueeze(x, axes)", x=(2, 3), constants={"axes": axes}) for axes in ([0], [-1], [3, 1])),
    moved("y = Transpose(x)", x=SHAPE),
    *(
        moved(f"y = Transpose <perm = {list(perm)}> (x)", x=SHAPE, refuses=[])
        for perm in itertools.permutations(range(3))
    ),
    moved("y = Concat <axis = 0> (a)", a=SHAPE),
    *(moved(f"y = Concat <axis = {axis}> (a, b, c)", a=(1, 3, 4), b=SHAPE, c=(3, 3, 4)) for axis in (0, -3)),
    *(moved(f"y = Concat <axis = {axis}> (a, b)", a=(2, 3, 1), b=SHAPE) for axis in (2, -1)),
    moved("y = Concat <axis = 1> (a, b, a)", a=(2, 2), b=(2, 0)),
    moved("y = Concat <axis = 1> (a, b, c)", a=(2, 2), b=(2, 3), c=(2, 1), wrt=["b"]),
    moved("a, b = Split <axis = 1, num_outputs = 2> (x) y = Concat <axis = 1> (b, a)", x=SHAPE, op="Split"),
    moved("a, y, c = Split <axis = -1> (x, n)", x=(2, 7), constants={"n": [2, 4, 1]}),
    moved("y, b = Split <num_outputs = 2> (x)", x=(3, 2)),
    moved("a, b, y = Split(x, n)", x=(5, 2), constants={"n": [2, 0, 3]}),
    *(
        moved("y = Expand(x, s)", x=x, constants={"s": s})
        for x, s in [((3, 1), [2, 3, 4]), ((3, 1), [1, 4]), ((3, 4), [1, 1]), ((), [2, 2]), ((2, 3), [2, 3])]
    ),
    *(
        moved("y = Tile(x, r)", x=x, constants={"r": np.array(r, np.int64)})
        for x, r in [
            ((2, 3), [2, 1]),
            ((2, 3), [3, 2]),
            ((2, 3), [1, 1]),
            ((4,), [3]),
            ((2, 1, 2), [2, 3, 2]),
            ((), []),
        ]
    ),
    *(moved(f"y = SpaceToDepth <blocksize = {b}> (x)", x=(2, 3, 2 * b, 3 * b)) for b in (1, 2, 3)),
    moved("y = DepthToSpace <blocksize = 2> (x)", x=(2, 8, 2, 3)),
    *(
        moved(f'y = DepthToSpace <blocksize = {b}, mode = "{mode}"> (x)', x=(n, 2 * b * b, 2, 3))
        for b, mode, n in [(2, "DCR", 1), (2, "CRD", 2), (3, "CRD", 1), (2, "CRD", 0)]
    ),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


AXES = {
    "initializer": (21, "<int64[0] e = {}> { s = Squeeze(x, e) y = MatMul(s, w) }"),
    "Constant": (21, "{ e = Constant <value = int64[0] {}> () s = Squeeze(x, e) y = MatMul(s, w) }"),
    "attribute": (11, "{ s = Squeeze <axes: ints = []> (x) y = MatMul(s, w) }"),
    "function": (21, "{ y = f.squeezed(x, w) } <domain: \"f\", opset_import: [\"\": 21]> squeezed (x, w) => (y) "
                     "{ e = Constant <value = int64[0] {}> () s = Squeeze(x, e) y = MatMul(s, w) }"),
}  # fmt: skip


@pytest.mark.parametrize(("opset", "body"), AXES.values(), ids=AXES)
def test_an_empty_list_of_axes_squeezes_all(opset: int, body: str) -> None:
    """To onnxruntime; onnx's inference takes it for none, so that y would have the rank 2."""
    model = model_of(f"g (float[1,3] x, float[3,2] w) => (float[2] y) {body}", opset=opset)
    if model.functions:
        model.opset_import.add(domain="f", version=1)
    graph = ob.backward(model, wrt=["x", "w"])
    feeds = {"x": np.array([[0, 1, 2]], np.float32), "w": np.arange(1, 7, dtype=np.float32).reshape(3, 2)}
    y, dx, dw = ob.session(graph).run(None, feeds | {"y_grad": np.array([1, 10], np.float32)})
    np.testing.assert_array_equal(np.asarray(y), [13, 16])
    np.testing.assert_array_equal(np.asarray(dx), [[21, 43, 65]])
    np.testing.assert_array_equal(np.asarray(dw), np.outer([0, 1, 2], [1, 10]))
