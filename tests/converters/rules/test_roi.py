"""Gradients of RoiAlign, against onnxruntime's own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import onnx_backprop as ob
from tests.support.gradient_checks import LINEAR, Case, build, case, check_cases
from tests.support.rule_checks import model_of

ROIS = np.array(
    [[1, 1, 5, 4], [0, 0, 7, 6], [2.3, 1.2, 3.1, 5.7], [-2, -1, 9, 3], [4, 4, 3, 2], [6.5, 5.5, 9, 12], [1, 1, 1, 1]],
    np.float32,
)
IMAGES = np.array([0, 1, 1, 0, 1, 0, 0])
# onnxruntime 1.31 has no RoiAlign of version 22, so none for models of opset 22 and later
LAST_OPSET = 21


def aligned(attributes: str, x: tuple[int, ...] = (2, 2, 6, 7), out: tuple[int, int] = (2, 3)) -> Case:
    nodes = f"y = RoiAlign <output_height = {out[0]}, output_width = {out[1]}{attributes}> (x, rois, images)"
    return case(nodes, x=x, constants={"rois": ROIS, "images": IMAGES}, wrt=["x"], oracle=LINEAR, until=LAST_OPSET)


CASES = [
    *(
        aligned(f', coordinate_transformation_mode = "{mode}", sampling_ratio = {ratio}, spatial_scale = {scale}')
        for mode, ratio, scale in itertools.product(("half_pixel", "output_half_pixel"), (0, 1, 2), (1.0, 0.5))
    ),
    aligned("", out=(1, 1)),
    aligned("", x=(3, 1, 1, 4), out=(3, 2)),
]


@pytest.mark.parametrize("variant", ["static", "symbolic", "fed", "unranked", "half"])
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


def test_no_region_at_all() -> None:
    none = {"rois": np.zeros((0, 4), np.float32), "images": np.zeros(0, np.int64)}
    empty = case("y = RoiAlign (x, rois, images)", x=(1, 2, 3, 3), constants=none, wrt=["x"], oracle=LINEAR)
    check_cases([empty], "fed", opset=LAST_OPSET)


def test_max_is_refused() -> None:
    """onnxruntime takes the largest weighted pixel, the operator's text the largest sample."""
    model, _, wrt = build(aligned(', mode = "max"'), opset=LAST_OPSET)
    with pytest.raises(ob.UnsupportedAttributeError, match="RoiAlign 'roialign_0': .*mode avg only.*'max'"):
        ob.backward(model, wrt=wrt)


def test_regions_get_no_gradient() -> None:
    model, _, _ = build(aligned(""), opset=LAST_OPSET, variant="fed")
    with pytest.raises(ob.InvalidArgumentError, match="'rois' does not influence .*no gradient flows to that input"):
        ob.backward(model, wrt=["rois"])


def test_lengths_that_onnxruntime_alone_knows() -> None:
    """Of a length as a float, that of Range too, it has the number as an integer, and refused the file."""
    model = model_of(
        """g (float[3,1] v, float[2,4] rois, int64[2] images) => (float[N,3,2,2] y) <float[2,2] w = {1,2,3,4}> {
        s, z = Scan <num_scan_inputs = 1, body = body (float[3,1] a, float[1] b) => (float[3,1] c, float[h,i,j] d) {
            k = Constant <value = int64[3] {0,-1,1}> ()
            r = Reshape(v, k)
            e = Constant <value = float[3] {1,1,2}> ()
            d = Resize <mode = "nearest"> (r, , e)
            c = Identity(a)
        }> (v, v)
        u = MatMul(z, w)
        y = RoiAlign <output_height = 2, output_width = 2> (u, rois, images)
        }""",
        opset=16,
    )
    v, rois = np.ones((3, 1), np.float32), np.array([[0, 0, 1, 0], [0, 0, 2, 1]], np.float32)
    feeds = {"v": v, "rois": rois, "images": np.array([0, 1]), "y_grad": np.ones((2, 3, 2, 2), np.float32)}
    y, dw = map(np.asarray, ob.session(ob.backward(model, wrt=["w"])).run(["y", "w_grad"], feeds))
    assert y.any()
    np.testing.assert_allclose((dw * [[1, 2], [3, 4]]).sum(), y.sum(), rtol=1e-5)  # y is linear in w
