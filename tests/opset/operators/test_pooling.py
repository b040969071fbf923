"""The gradients of pools against index loops, and MaxPoolBackward against the winners that onnxruntime itself names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import checker, helper, shape_inference

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.declarations.calls import to_data
from tests.opset.bodies.body_models import KNOWLEDGE, answer
from tests.opset.operators import naive
from tests.support import single_op
from tests.support.adjoint import forward_session
from tests.support.checks import evaluate, one_node_model

f32 = np.float32
NCX = {"data_format": "NCX"}


def geometry(rng: np.random.Generator) -> tuple[dict[str, Any], list[int], list[int], list[int]]:
    """Attributes, lengths of x, and the windows rounded down and up."""
    axes = int(rng.integers(1, 4))
    kernel, strides, dilations, begin, end, lengths, down, up = ([] for _ in range(8))
    for _ in range(axes):
        k, s, d, length = (int(rng.integers(1, high)) for high in (5, 4, 4, 8))
        p, e = (int(v) for v in rng.integers(0, k, 2))
        starts, extent = range(-p, length, s), (k - 1) * d + 1
        fitting = sum(start + extent <= length + e for start in starts)
        # a further one takes the cells behind the window before it, if there are any and x has some of its cells
        more = sum(start - s + extent < length + e for start in starts)
        for values, value in zip(
            (kernel, strides, dilations, begin, end, lengths, down, up),
            (k, s, d, p, e, length, fitting, more),
            strict=True,
        ):
            values.append(value)
    attributes = {"kernel": kernel, "strides": strides, "dilations": dilations, "pads_begin": begin, "pads_end": end}
    return attributes, lengths, down, up


def values_with_ties(rng: np.random.Generator, shape: list[int]) -> np.ndarray:
    """Small whole numbers, some minus infinities and NaNs."""
    x = rng.integers(-3, 4, shape).astype(f32)
    chance = rng.random(shape)
    x[chance < 0.06] = np.nan
    x[chance > 0.94] = -np.inf
    return x


@pytest.mark.parametrize("seed", range(60))
def test_max_pool_against_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    attributes, lengths, down, up = geometry(rng)
    x = values_with_ties(rng, [2, 3, *lengths])
    for outs in (down, up):
        dy = rng.integers(-8, 9, (2, 3, *outs)).astype(f32)
        c = naive.Correlation(
            source=tuple(lengths),
            kernel=tuple(attributes["kernel"]),
            strides=tuple(attributes["strides"]),
            dilations=tuple(attributes["dilations"]),
            pads_begin=tuple(attributes["pads_begin"]),
            pads_end=tuple(attributes["pads_end"]),
            groups=1,
        )
        expected = naive.max_pool_backward(c, x, dy)
        for layout in ("NCX", "NXC"):
            got = evaluate(
                "MaxPoolBackward", attributes | {"data_format": layout}, [to_data(x, layout), to_data(dy, layout)]
            )
            np.testing.assert_array_equal(got, to_data(expected.astype(f32), layout), err_msg=f"seed {seed} {layout}")


def winners(x: np.ndarray, **attributes: object) -> tuple[np.ndarray, np.ndarray]:
    """What onnxruntime's MaxPool answers: values, and positions in x."""
    node = helper.make_node("MaxPool", ["x"], ["y", "i"], **attributes)
    outputs = [helper.make_tensor_value_info("y", 1, None), helper.make_tensor_value_info("i", 7, None)]
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", 1, [None] * x.ndim)], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = forward_session(model)
    y, i = (np.asarray(value) for value in session.run(None, {"x": x}))
    return y, i


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("seed", range(12))
def test_max_pool_against_onnxruntime(seed: int, kernels: str) -> None:
    """Ties, NaN, minus infinity, padding, windows that step over x: whoever wins in the forward gets dy."""
    rng = np.random.default_rng(1000 + seed)
    for ceil_mode in (0, 1):
        attributes, lengths, down, _ = geometry(rng)
        while 0 in down:  # onnxruntime refuses windows that are too long
            attributes, lengths, down, _ = geometry(rng)
        x = values_with_ties(rng, [2, 3, *lengths])
        pads = attributes["pads_begin"] + attributes["pads_end"]
        y, i = winners(
            x,
            kernel_shape=attributes["kernel"],
            strides=attributes["strides"],
            dilations=attributes["dilations"],
            pads=pads,
            ceil_mode=ceil_mode,
        )
        dy = rng.integers(-8, 9, y.shape).astype(f32)
        expected = np.zeros(x.size, f32)
        won = y != np.finfo(f32).min  # that of a window without a cell
        np.add.at(expected, i[won], dy[won])
        for layout in ("NCX", "NXC"):
            inputs: list[np.ndarray | None] = [to_data(x, layout), to_data(dy, layout)]
            got = single_op.run("MaxPoolBackward", attributes | {"data_format": layout}, inputs, kernels=kernels)
            wanted = to_data(expected.reshape(x.shape), layout)
            np.testing.assert_array_equal(got, wanted, err_msg=f"{attributes} {lengths} {layout}")


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("seed", range(10))
def test_max_pool_body(seed: int, knowledge: str) -> None:
    """Right whatever the model tells of the shapes, and accepted by onnx's strict inference."""
    rng = np.random.default_rng(2000 + seed)
    attributes, lengths, down, up = geometry(rng)
    attributes |= {"data_format": ("NCX", "NXC")[seed % 2]}
    x = values_with_ties(rng, [2, 3, *lengths])
    for outs in (down, up):
        dy = rng.integers(-8, 9, (2, 3, *outs)).astype(f32)
        inputs: list[np.ndarray | None] = [to_data(v, attributes["data_format"]) for v in (x, dy)]
        got = answer("MaxPoolBackward", attributes, inputs, knowledge, constants=False)
        expected = evaluate("MaxPoolBackward", attributes, inputs)
        np.testing.assert_array_equal(got, expected, err_msg=f"{attributes} {lengths} {outs}", strict=True)
        if knowledge == "static":
            shapes = [list(v.shape) for v in inputs if v is not None]
            node = one_node_model("MaxPoolBackward", attributes, shapes, output_ranks=[len(shapes[0])])
            model = ob.use_kernels(node, "onnx")
            checker.check_model(model, full_check=True)
            shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


@pytest.mark.parametrize("knowledge", ["symbolic", "rank", "nothing"])
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_max_pool_body_finds_same_pads(rng, auto_pad: str, knowledge: str) -> None:
    for length in range(1, 9):
        attributes = {"kernel": [3], "strides": [2], "pads_begin": [], "pads_end": [], "auto_pad": auto_pad} | NCX
        x = rng.permutation(3 * length).reshape(1, 3, length).astype(f32)
        dy = rng.integers(1, 9, (1, 3, -(-length // 2))).astype(f32)
        got = answer("MaxPoolBackward", attributes, [x, dy], knowledge, constants=False)
        np.testing.assert_array_equal(got, evaluate("MaxPoolBackward", attributes, [x, dy]))


WRONG = [  # shapes of src and diff_dst that do not fit, and what the body says
    ((1, 2, 7), (2, 2, 4), "batch sizes of src and diff_dst"),
    ((1, 2, 7), (1, 1, 4), "channels of src and diff_dst"),
    ((1, 2, 7), (1, 2, 3), "diff_dst does not fit src"),
    ((1, 2, 7), (1, 2, 5), "diff_dst does not fit src"),
    ((1, 2, 0), (1, 2, 1), "lengths of src"),
    ((1, 2, 7, 7), (1, 2, 4, 4), "of rank 3"),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("src", "diff_dst", "message"), WRONG)
def test_what_does_not_fit_fails_the_run(src, diff_dst, message: str, kernels: str) -> None:
    attributes = {"kernel": [3], "strides": [2], "pads_begin": [1], "pads_end": [1]} | NCX
    model = single_op.model("MaxPoolBackward", attributes, [np.zeros((1, 1, 1)), np.zeros((1, 1, 1))])
    for value in model.graph.input:
        value.type.tensor_type.elem_type = 1
        value.type.tensor_type.ClearField("shape")
    session = ob.session(model, kernels=kernels)
    with pytest.raises(Exception, match=message if kernels == "onnx" else "MaxPoolBackward: "):
        session.run(None, {"src": np.ones(src, f32), "diff_dst": np.ones(diff_dst, f32)})


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("head", [(0, 3), (2, 0), (0, 0)])
def test_no_images_or_no_channels(head: tuple[int, int], layout: str, kernels: str) -> None:
    attributes = {"kernel": [2], "strides": [2], "pads_begin": [], "pads_end": [], "data_format": layout}
    inputs: list[np.ndarray | None] = [to_data(np.ones((*head, n), f32), layout) for n in (6, 3)]
    got = single_op.run("MaxPoolBackward", attributes, inputs, kernels=kernels)
    assert got.shape == to_data(np.ones((*head, 6), f32), layout).shape


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_overlapping_windows_are_summed_in_float32(layout: str, dtype: str) -> None:
    """300 windows of 1.0 and one of 2^-3 on one cell: bf16 would stop at 256. Large planes are cut into bands."""
    x = np.zeros((1, 1, 302, 200), f32)
    x[0, 0, 301, 199] = 5
    dy = np.ones((1, 1, 2, 150), f32)
    attributes = {
        "kernel": [301, 51],
        "strides": [1, 1],
        "pads_begin": [0, 0],
        "pads_end": [0, 0],
        "data_format": layout,
    }
    inputs: list[np.ndarray | None] = [to_data(x, layout), to_data(dy, layout)]
    expected = evaluate("MaxPoolBackward", attributes, inputs, dtype).astype(f32)
    for kernels in KERNELS:
        got = single_op.run("MaxPoolBackward", attributes, inputs, dtype=dtype, kernels=kernels)
        np.testing.assert_array_equal(got, expected, err_msg=kernels)
        assert float(got.sum()) == 300, kernels


@pytest.mark.parametrize("kernels", KERNELS)
def test_gradients_that_are_not_finite_stay_where_they_belong(kernels: str) -> None:
    attributes = {"kernel": [2], "strides": [2], "pads_begin": [], "pads_end": []} | NCX
    x = np.array([[[1, 2, 4, 3, 5, 6]]], f32)
    dy = np.array([[[np.nan, np.inf, 1]]], f32)
    got = single_op.run("MaxPoolBackward", attributes, [x, dy], kernels=kernels)
    np.testing.assert_array_equal(got, np.array([[[0, np.nan, np.inf, 0, 0, 1]]], f32))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_dilation_far_beyond_the_source(kernels: str) -> None:
    attributes = {"kernel": [3], "strides": [2**40], "pads_begin": [1], "pads_end": [2], "dilations": [2**39]} | NCX
    x, dy = np.ones((1, 1, 4), f32), np.ones((1, 1, 0), f32)
    got = single_op.run("MaxPoolBackward", attributes, [x, dy], kernels=kernels)
    np.testing.assert_array_equal(got, np.zeros((1, 1, 4), f32))
