"""Type and shape inference: contradictions and wrong types raise, with the operator's own words."""

from __future__ import annotations

import pytest
from onnx import checker, shape_inference

import onnx_backprop as ob
from tests.opset.core.inference_models import CONVT, DATA, INTERPOLATE, MAX_POOL, RESAMPLE, model
from tests.support.checks import infer


@pytest.mark.parametrize("strict", [False, True])
def test_a_contradiction_surfaces_unchanged(strict: bool) -> None:
    """Also without strict mode, where onnx swallows its own inference errors."""
    m = model("(float[2,3,4,5] src, float[2,4,8,9] dy) => (dx)", f"{INTERPOLATE} (src, dy)")
    message = "^InterpolateBackward: channels of src and diff_dst must agree, got 3 and 4$"
    with pytest.raises(ob.ShapeError, match=message):
        shape_inference.infer_shapes(m, strict_mode=strict)
    m.graph.output[0].type.CopyFrom(m.graph.input[0].type)
    with pytest.raises(ob.ShapeError, match=message):
        checker.check_model(m, full_check=True)


@pytest.mark.parametrize(
    ("signature", "body", "message"),
    [
        (
            "(float[2,C,P,Q] dy, float[6,4,3,2] w, int32[3] s) => (dx)",
            f"{DATA} (dy, w, s)",
            "ConvolutionBackwardData: dst_shape: expected rank 4, got 3 with shape (?, ?, ?)",
        ),
        (
            "(float[2,C,P,Q] dy, float[6,4,3,2] w, int32[2] s) => (dx)",
            f"{DATA} (dy, w, s)",
            "ConvolutionBackwardData: input dst_shape: expected 3 to 5 entries, got 2",
        ),
        (
            "(float[2,C,P,Q] dy, float[6,4,3,2] w, int32[2,2] s) => (dx)",
            f"{DATA} (dy, w, s)",
            "ConvolutionBackwardData: input dst_shape: expected rank 1, got 2 with shape (2, 2)",
        ),
        (
            "(float[3,4,H,W] x, float[2,C,P,Q] dy, float[6,4,3,2] w) => (dx)",
            f"s64 = Shape (x) s = Cast <to = 6> (s64) {DATA} (dy, w, s)",
            "ConvolutionBackwardData: batch sizes of dst_shape and diff_dst must agree, got 3 and 2",
        ),
        (
            "(float[2,C,4,Q] dy, float[6,4,3,2] w) => (dx) <int32[4] s = {2, 4, 9, 9}>",
            f"{DATA} (dy, w, s)",
            "ConvolutionBackwardData: spatial axis 0: dst_shape length 9 with kernel 3, stride 2, dilation 1, pads 1 "
            "and 1 expects diff_dst length 5, got 4",
        ),
        (
            "(float[N,C,4] src, float[N,C,7] dy, int32[2] s) => (dx)",
            f"{INTERPOLATE} (src, dy, s)",
            "InterpolateBackward: input sizes: expected 1 entries, got 2 in [None, None]",
        ),
        (
            "(float[N,C,H] src, float[N,C,7] dy) => (dx)",
            f"s = Constant <value = int32[1] {{8}}> () {INTERPOLATE} (src, dy, s)",
            "InterpolateBackward: the spatial shape of diff_dst and input sizes must agree, got 7 and 8",
        ),
        (
            "(float[N,C,H] src, float[N,C,P] dy) => (dx) <int32[1] s = {8}>",
            f"{INTERPOLATE.replace('>', ', sizes = [7]>')} (src, dy, s)",
            "InterpolateBackward: attribute sizes and input sizes must agree, got 7 and 8",
        ),
        (
            "(float[P,Q] dy, int32[3] s) => (dx)",
            f"dx = $ResampleGrad <{RESAMPLE}> (dy, s)",
            "ResampleGrad: output_sizes (one per axis): expected 2 entries, got 3 in [None, None, None]",
        ),
        (
            "(float[N,C] src, float[N,C,P] dy) => (dx)",
            f"{INTERPOLATE} (src, dy)",
            "InterpolateBackward: src: expected rank 3 to 5, got 2 with shape (N, C)",
        ),
        (
            "(float[N,C,9,W] x, float[M,3,5,Q] dy) => (dx)",
            f"{MAX_POOL} (x, dy)".replace("[2, 2]", "[3, 3]", 1),
            "MaxPoolBackward: spatial axis 0: src length 9 with kernel 3, stride 2, dilation 1, pads 0 and 0 expects "
            "diff_dst length 4, got 5",
        ),
        ("(float[N] dy) => (db)", "db = $BiasAddBackward (dy)", "BiasAddBackward: diff_dst: expected rank 2 to 64, got 1"),
        (
            "(float[N,C,9,9] dy, float[6,2,3] w) => (dx)",
            f"dx = $ConvTransposeBackwardData <{CONVT}> (dy, w)",
            "ConvTransposeBackwardData: diff_dst: expected rank 3, got 4 with shape (N, C, 9, 9)",
        ),
    ],
)  # fmt: skip
def test_contradictions(signature: str, body: str, message: str) -> None:
    with pytest.raises(ob.ShapeError) as e:
        infer(model(signature, body))
    assert str(e.value).startswith(message)


def test_too_few_inputs() -> None:
    """Inference may run on a model that nobody has checked."""
    with pytest.raises(
        ob.InvalidModelError, match=r"InterpolateBackward: expected inputs src, diff_dst, sizes\?, got 1"
    ):
        infer(model("(float[N,C,4] src) => (dx)", f"{INTERPOLATE} (src)"))
    with pytest.raises(ob.InvalidModelError, match=r"expected inputs src, diff_dst, sizes\?, got 1"):
        infer(model("(float[N,C,4] src) => (dx)", f'{INTERPOLATE} ("", src)'))


@pytest.mark.parametrize(
    ("signature", "node"),
    [
        ("(float[N,3,4] src, float16[N,3,7] dy) => (dx)", f"{INTERPOLATE} (src, dy)"),
        ("(double[N,3,4] src, double[N,3,7] dy) => (dx)", f"{INTERPOLATE} (src, dy)"),
        ("(float[N,3,4] src, float[N,3,7] dy, int64[1] s) => (dx)", f"{INTERPOLATE} (src, dy, s)"),
        ("(int32[N,4] dy) => (db)", "db = $BiasAddBackward (dy)"),
    ],
)
def test_element_types_outside_the_constraints(signature: str, node: str) -> None:
    with pytest.raises(shape_inference.InferenceError, match="unsupported type|inconsistent type"):
        infer(model(signature, node))
