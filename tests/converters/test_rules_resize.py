"""Gradients of Resize are the adjoint of onnxruntime's own forward, as the operator that means exactly the same."""

from __future__ import annotations

import logging
import random
import re
from collections import Counter

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from tests.adjoint import adjoint_mismatches, forward_session

SAMPLES = 600
COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def resize(
    shape: list[int] | list[str] | list[int | str],
    *,
    scales: list[float] | None = None,
    sizes: list[int] | None = None,
    opset: int = 19,
    **attributes: object,
) -> ModelProto:
    """One Resize with constant scales or sizes."""
    parameter = np.float32(scales) if scales is not None else np.array(sizes, np.int64)
    inputs = ["x", "", "parameter"] if scales is not None else ["x", "", "", "parameter"]
    node = helper.make_node("Resize", inputs, ["y"], name="node", **attributes)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape))],
        [numpy_helper.from_array(parameter, "parameter")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def chosen(model: ModelProto) -> str:
    """The gradient operator that conversion picked."""
    graph = ob.backward(model, wrt=["x"])
    return next((n.op_type for n in graph.graph.node if n.domain == ob.DOMAIN), "Identity")


def random_case(rng: random.Random) -> tuple[list[int], dict[str, object]]:
    batch, channels = rng.randint(1, 2), rng.randint(1, 3)
    shape = [batch, channels, rng.randint(1, 9), rng.randint(1, 9)]
    wanted = [batch, channels, rng.randint(1, 9), rng.randint(1, 9)]
    mode = rng.choice(["nearest", "linear"])
    settings: dict[str, object] = {"mode": mode, "coordinate_transformation_mode": rng.choice(COORDINATES)}
    if mode == "nearest":
        settings["nearest_mode"] = rng.choice(ROUNDINGS)
    kind = rng.choice(["sizes", "sizes", "ratio", "whole", "any", "policy"])
    if kind == "sizes":
        settings["sizes"] = wanted
    elif kind == "policy":
        settings |= {"sizes": wanted[2:], "axes": [2, 3]}
        settings["keep_aspect_ratio_policy"] = rng.choice(["not_larger", "not_smaller"])
    else:
        pick = {
            "ratio": lambda i, o: o / i,
            "whole": lambda _i, _o: float(rng.randint(1, 4)),
            "any": lambda _i, _o: rng.uniform(0.4, 3.0),
        }[kind]
        settings["scales"] = [1.0, 1.0, *(pick(i, o) for i, o in zip(shape[2:], wanted[2:], strict=True))]
    return shape, settings


def test_random_configurations_against_the_forward() -> None:
    """Right or refused, with the lengths known and with all of them symbolic."""
    verdicts: Counter[str] = Counter()
    for seed in range(SAMPLES):
        rng = random.Random(seed)
        shape, settings = random_case(rng)
        symbolic = seed % 3 == 0
        model = resize([*"NCHW"] if symbolic else shape, **settings)
        x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        try:
            y = np.asarray(forward_session(model).run(None, {"x": x})[0])
        except Exception:  # noqa: BLE001 - onnxruntime refuses: not a case
            continue
        if y.size == 0:
            continue
        try:
            wrong = adjoint_mismatches(model, {"x": x}, ["x"], seed=seed)
        except ob.UnsupportedError as e:
            assert re.match("Resize 'node': ", str(e)), f"seed {seed}: {e}"  # noqa: PT017
            verdicts["refused, symbolic" if symbolic else "refused"] += 1
            continue
        assert not wrong, f"seed {seed}: {shape} {settings} symbolic={symbolic}: {wrong}"
        verdicts["right, symbolic" if symbolic else "right"] += 1
    print(dict(verdicts))
    assert verdicts["right"] >= 300
    assert verdicts["refused"] <= 30, "known lengths are refused only where neither operator has such taps"
    assert verdicts["right, symbolic"] >= 40


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_any_rank_and_any_axis(rank: int) -> None:
    """Batch and channel axes are resized as well; InterpolateBackward cannot, ResampleGrad can."""
    shape = [3, 4, 2, 3, 2][:rank]
    for axis in range(rank):
        sizes = list(shape)
        sizes[axis] += 2
        model = resize(shape, sizes=sizes, mode="nearest", nearest_mode="round_prefer_ceil")
        x = np.random.default_rng(axis).standard_normal(shape).astype(np.float32)
        assert not adjoint_mismatches(model, {"x": x}, ["x"])
        expected = "InterpolateBackward" if rank >= 3 and axis >= 2 else "ResampleGrad"
        assert chosen(model) == expected


@pytest.mark.parametrize(
    ("shape", "settings", "operator"),
    [
        # what PyTorch exports
        (["N", 3, "H", "W"], {"scales": [1, 1, 2, 2], "mode": "nearest", "nearest_mode": "floor",
                              "coordinate_transformation_mode": "asymmetric"}, "InterpolateBackward"),
        (["N", 3, "H", "W"], {"scales": [1, 1, 2, 2], "mode": "linear",
                              "coordinate_transformation_mode": "pytorch_half_pixel"}, "InterpolateBackward"),
        (["N", 3, "H", "W"], {"scales": [1, 1, 2, 2], "mode": "linear",
                              "coordinate_transformation_mode": "align_corners"}, "InterpolateBackward"),
        ([1, 3, 5, 7], {"sizes": [1, 3, 1, 4], "mode": "linear",
                        "coordinate_transformation_mode": "pytorch_half_pixel"}, "ResampleGrad"),
        # ties: the default rounds down, oneDNN rounds up
        ([1, 1, 4, 4], {"sizes": [1, 1, 2, 2], "mode": "nearest"}, "ResampleGrad"),
        ([1, 1, 4, 4], {"sizes": [1, 1, 2, 2], "mode": "nearest", "nearest_mode": "round_prefer_ceil"},
         "InterpolateBackward"),
        ([1, 1, 4, 4], {"sizes": [1, 1, 8, 8], "mode": "nearest"}, "InterpolateBackward"),
        # the given scale is not O / I
        ([1, 1, 10, 10], {"scales": [1, 1, 1.28, 1.28], "mode": "linear"}, "ResampleGrad"),
        (["N", 1, "H", "W"], {"scales": [1, 1, 0.7, 0.7], "mode": "linear"}, "ResampleGrad"),
        (["N", 1, "H", "W"], {"scales": [1, 1, 2.5, 2.5], "mode": "linear",
                              "coordinate_transformation_mode": "asymmetric"}, "ResampleGrad"),
        ([2, 3, 4], {"scales": [1, 1, 1], "mode": "linear"}, "Identity"),
    ],
)  # fmt: skip
def test_operator_of_choice(shape: list, settings: dict, operator: str, caplog: pytest.LogCaptureFixture) -> None:
    model = resize(shape, **settings)
    with caplog.at_level(logging.INFO, "onnx_backprop"):
        assert chosen(model) == operator
    if operator != "Identity":
        assert f"Resize 'node' ({settings['mode']}" in caplog.text
        assert f"{operator} means exactly the same" in caplog.text
    numbers = [d if isinstance(d, int) else {"N": 2, "H": 5, "W": 6}[d] for d in shape]
    x = np.random.default_rng(0).standard_normal(numbers).astype(np.float32)
    assert not adjoint_mismatches(model, {"x": x}, ["x"])


@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners"])
def test_sizes_computed_in_the_graph(coordinates: str) -> None:
    """A U-Net resizes to the size of its skip connection, which only the run knows."""
    nodes = [
        helper.make_node("Shape", ["like"], ["sizes"]),
        helper.make_node(
            "Resize",
            ["x", "", "", "sizes"],
            ["y"],
            name="node",
            mode="linear",
            coordinate_transformation_mode=coordinates,
        ),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", TensorProto.FLOAT, ["N", 2, "H", "W"]), info("like", TensorProto.FLOAT, ["N", 2, "P", "Q"])],
        [info("y", TensorProto.FLOAT, ["N", 2, "P", "Q"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8)
    rng = np.random.default_rng(0)
    for small, large in (((3, 5), (7, 9)), ((8, 8), (3, 5)), ((1, 4), (4, 1))):
        feeds = {
            "x": rng.standard_normal((2, 2, *small)).astype(np.float32),
            "like": np.zeros((2, 2, *large), np.float32),
        }
        assert not adjoint_mismatches(model, feeds, ["x"])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"sizes": [1, 1, 8], "mode": "cubic"}, ob.UnsupportedAttributeError, "mode nearest and linear; got 'cubic'"),
        ({"sizes": [1, 1, 2], "mode": "linear", "antialias": 1}, ob.UnsupportedAttributeError, "antialias 0; got 1"),
        ({"sizes": [1, 1, 2], "mode": "linear", "exclude_outside": 1}, ob.UnsupportedAttributeError,
         "exclude_outside 0; got 1"),
        ({"scales": [1, 1, 1.2], "mode": "linear"}, ob.UnsupportedError, "keep every length"),
        ({"sizes": [1, 1], "mode": "linear"}, ob.InvalidModelError, "sizes: expected 3 values, got [1, 1]"),
        ({"sizes": [1, 1, 5], "mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"},
         ob.UnsupportedAttributeError, "coordinate_transformation_mode"),
    ],
)  # fmt: skip
def test_refusals(settings: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as e:
        ob.backward(resize([1, 1, 4], **settings), wrt=["x"])
    assert "Resize 'node'" in str(e.value)


def test_a_scale_that_two_libraries_read_differently_is_refused() -> None:
    """5/3 as float32 times 3 is 4.99999990 in float64 and 5 in float32: onnx infers 4 pixels, onnxruntime makes 5."""
    model = resize([1, 1, 3], scales=[1, 1, 5 / 3], mode="linear")
    assert np.asarray(forward_session(model).run(None, {"x": np.ones((1, 1, 3), np.float32)})[0]).shape == (1, 1, 5)
    with pytest.raises(ob.UnsupportedError, match="makes 4 pixels of 3 by onnx's shape inference, 5 by onnxruntime"):
        ob.backward(model, wrt=["x"])


def test_scales_beside_trainable_weights_are_left_alone() -> None:
    """Scales are a float initializer too; a Resize that only they reach needs no gradient, so may be of any kind."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[1,1,4] x) => (float[1,1,8] y) <float[3] s = {1,1,2}, float[1] w = {3}> {
            [skip] r = Resize <mode="cubic"> (x, , s)
            y = Mul (r, w)
        }""")
    assert [o.name for o in ob.backward(model).graph.output] == ["y", "w_grad"]
    with pytest.raises(ob.InvalidArgumentError, match="'s' does not influence y .*Resize 'skip' stops it"):
        ob.backward(model, wrt=["s"])
    with pytest.raises(ob.UnsupportedAttributeError, match="Resize 'skip': .*got 'cubic'"):
        ob.backward(model, wrt=["x"])
