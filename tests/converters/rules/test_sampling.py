"""Gradients of GridSample and AffineGrid, against onnxruntime's own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob
from tests.support.gradient_checks import LINEAR, VARIANTS, Case, Oracle, build, case, check_cases, session_run

PIECEWISE = Oracle("onnxruntime", 2.0**-8, 3e-4)
CUBIC = Oracle("onnxruntime", 2.0**-8, 1e-3)
SEED = 11
PADDINGS = ("zeros", "border", "reflection")


def grid(batch: int, out: tuple[int, ...], image: tuple[int, ...], *, aligned: bool, seed: int = SEED) -> np.ndarray:
    """Points inside and around the image, none within 1/8 of a pixel of a whole or a half one."""
    rng = np.random.default_rng(seed)
    axes = []
    for n in reversed(image):
        pixels = rng.integers(-4 * n, 8 * n, (batch, *out)) / 4 + 0.125 + rng.uniform(-0.02, 0.02, (batch, *out))
        axes.append(2 * pixels / max(n - 1, 1) - 1 if aligned else (2 * pixels + 1) / n - 1)
    return np.stack(axes, -1).astype(np.float32)


def sampled(mode: str, padding: str, aligned: int, x: tuple[int, ...], out: tuple[int, ...], **given: Any) -> Case:
    nodes = f'y = GridSample <mode = "{mode}", padding_mode = "{padding}", align_corners = {aligned}> (x, g)'
    if "wrt" not in given:  # the rank is that of the grid, too
        given["refuses"] = ["unranked"]
    if mode.startswith("bi"):
        given["until"] = 19  # the names of before opset 20
    points = grid(x[0], out, x[2:], aligned=bool(aligned))
    return case(nodes, x=x, g=points, oracle=given.pop("oracle", PIECEWISE), **given)


FORMS = list(itertools.product(PADDINGS, (0, 1)))
CASES = [
    *(sampled("linear", p, a, (2, 2, 3, 4), (2, 5), since=20) for p, a in FORMS),
    *(sampled("bilinear", p, a, (1, 1, 4, 3), (6, 3)) for p, a in FORMS),
    *(sampled("nearest", p, a, (2, 2, 3, 4), (3, 5), wrt=["x"], oracle=LINEAR) for p, a in FORMS),
    *(sampled("bicubic", p, a, (2, 2, 3, 4), (2, 5), oracle=CUBIC) for p, a in FORMS),
    *(sampled("cubic", p, a, (1, 2, 5, 4), (4, 2), oracle=CUBIC, since=20) for p, a in FORMS),
    *(sampled("linear", p, a, (2, 2, 3, 2, 4), (2, 1, 3), since=20) for p, a in FORMS),
    *(sampled("nearest", p, a, (1, 2, 3, 2, 4), (2, 1, 3), wrt=["x"], oracle=LINEAR, since=20) for p, a in FORMS),
    sampled("linear", "zeros", 0, (1, 3, 1, 1), (2, 2), since=20),
    sampled("linear", "border", 1, (2, 1, 5, 2), (1, 1), since=20),
    *(
        case(f"y = AffineGrid <align_corners = {a}> (t, s)", t=t, constants={"s": np.array(s)}, oracle=LINEAR,
             since=20, skips=skips)
        for a in (0, 1)
        for t, s, skips in [
            ((2, 2, 3), [2, 3, 4, 5], ()),
            ((1, 2, 3), [1, 1, 2, 3], ("half",)),  # onnxruntime runs the function body, which fails for a batch of one
            ((2, 3, 4), [2, 1, 2, 3, 4], ()),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("n", [4, 5, 7])
def test_points_between_two_pixels_take_the_same_one_as_the_forward(n: int, padding: str, aligned: int) -> None:
    """Every whole and half pixel, and so every tie, far into the padding."""
    pixels = np.arange(-4 * n, 8 * n) / 2
    g = 2 * pixels / (n - 1) - 1 if aligned else (2 * pixels + 1) / n - 1
    points = np.stack([g, np.zeros_like(g)], -1).astype(np.float32).reshape(1, 1, -1, 2)
    nodes = f'y = GridSample <mode = "nearest", padding_mode = "{padding}", align_corners = {aligned}> (x, g)'
    check_cases([case(nodes, x=(1, 1, 3, n), g=points, wrt=["x"], oracle=LINEAR, since=20)], "static")


@pytest.mark.parametrize("padding", PADDINGS)
def test_linear_at_whole_pixels_has_the_slope_of_one_side(padding: str) -> None:
    model, _, _ = build(sampled("linear", padding, 1, (1, 1, 1, 4), (1, 3), since=20), opset=20)
    feeds = {
        "x": np.float32([1, 2, 4, 8]).reshape(1, 1, 1, 4),
        "g": np.stack([np.float32([-1 / 3, 1 / 3, 0]), np.zeros(3, np.float32)], -1).reshape(1, 1, 3, 2),
    }
    _, dg = session_run(ob.backward(model, wrt=["g"]))(feeds | {"y_grad": np.ones((1, 1, 1, 3), np.float32)})
    slopes = dg[0, 0, :, 0] / 1.5  # a step in the grid is 3/2 of a pixel
    assert slopes[0] in (1.0, 2.0)
    assert slopes[1] in (2.0, 4.0)
    assert slopes[2] == 2.0


def test_nearest_has_no_slope_by_the_grid() -> None:
    model, _, _ = build(sampled("nearest", "zeros", 0, (1, 1, 2, 2), (2, 2)), opset=18)
    with pytest.raises(ob.InvalidArgumentError, match="'g' does not influence"):
        ob.backward(model, wrt=["g"])


@pytest.mark.parametrize(
    ("mode", "padding", "message"),
    [("sinc", "zeros", "GridSample 'gridsample_0': .*mode .*'sinc'"), ("linear", "wrap", "padding_mode .*'wrap'")],
)
def test_refused_attributes(mode: str, padding: str, message: str) -> None:
    model, _, _ = build(sampled("linear", "zeros", 0, (1, 1, 2, 2), (2, 2), since=20), opset=20)
    for attribute in model.graph.node[0].attribute:
        if attribute.name in ("mode", "padding_mode"):
            attribute.s = (mode if attribute.name == "mode" else padding).encode()
    with pytest.raises(ob.UnsupportedAttributeError, match=message):
        ob.backward(model, wrt=["x"])


def test_cubic_in_three_dimensions_is_refused() -> None:
    """onnxruntime does not run it."""
    model, _, _ = build(sampled("linear", "zeros", 0, (1, 1, 2, 2, 2), (2, 2, 2), since=20), opset=20)
    next(a for a in model.graph.node[0].attribute if a.name == "mode").s = b"cubic"
    with pytest.raises(ob.UnsupportedAttributeError, match="mode for 2 spatial axes"):
        ob.backward(model, wrt=["x"])


@pytest.mark.parametrize(("x", "grid"), [("float[2, 3] x", "float g"), ("float x", "float[2, 3] g")])
def test_ranks_that_do_not_fit(x: str, grid: str) -> None:
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 20]> m ({x}, {grid}) => (float[] y) {{
            s = GridSample(x, g)
            y = ReduceSum<keepdims = 0>(s)
        }}
    """)
    with pytest.raises(
        ob.OnnxBackpropError, match="GridSample .*: expected X and grid of one rank, 3 or more, got 0 and 2"
    ):
        ob.backward(model, wrt=["x"])
