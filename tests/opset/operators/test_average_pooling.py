"""AvgPoolBackward against index loops and as the adjoint of onnxruntime's AveragePool, on every route."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from onnx import checker, helper, shape_inference

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.declarations.calls import Call, to_data
from tests.opset.bodies.body_models import KNOWLEDGE, answer
from tests.opset.operators import naive
from tests.opset.operators.test_pooling import geometry
from tests.support import single_op
from tests.support.adjoint import forward_session
from tests.support.batch import calls_together, check_each
from tests.support.checks import evaluate, one_node_model

f32 = np.float32
AP = "AvgPoolBackward"
NCX = {"data_format": "NCX"}
Inputs = list[np.ndarray | None]


def dense(rng: np.random.Generator) -> tuple[dict[str, Any], list[int], list[int], list[int]]:
    """Attributes, lengths, and the windows rounded down and up; no dilations."""
    while True:
        attributes, lengths, down, up = geometry(rng)
        if max(attributes["dilations"]) == 1:
            return {k: v for k, v in attributes.items() if k != "dilations"}, lengths, down, up


def shape_of(head: tuple[int, int], lengths: list[int], layout: str) -> np.ndarray:
    """src_shape as an input."""
    return np.array(to_data(np.empty((*head, *lengths)), layout).shape, np.int64)


@pytest.mark.parametrize("kernels", KERNELS)
def test_against_loops(kernels: str) -> None:
    """40 geometries, windows rounded down and up, with pads counted and not: all in one session."""
    calls, expected = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        attributes, lengths, down, up = dense(rng)
        c = naive.Correlation(
            source=tuple(lengths),
            kernel=tuple(attributes["kernel"]),
            strides=tuple(attributes["strides"]),
            dilations=(1,) * len(lengths),
            pads_begin=tuple(attributes["pads_begin"]),
            pads_end=tuple(attributes["pads_end"]),
            groups=1,
        )
        for outs in (down, up):
            dy, layout = rng.integers(-8, 9, (2, 3, *outs)).astype(f32), ("NCX", "NXC")[seed % 2]
            for exclude_pad in (0, 1):
                answer = naive.avg_pool_backward(c, dy, exclude_pad=bool(exclude_pad))
                expected.append((seed, to_data(answer, layout).astype(f32)))
                given = attributes | {"data_format": layout, "exclude_pad": exclude_pad}
                calls.append((AP, given, [to_data(dy, layout), shape_of((2, 3), lengths, layout)]))
    answers = calls_together(calls, kernels)()
    for (seed, exact), (_, given, inputs), (got,) in zip(expected, calls, answers, strict=True):
        message = f"seed {seed} {given} {inputs[1]} {inputs[0].shape}"
        np.testing.assert_allclose(got, exact, rtol=0, atol=2e-6, err_msg=message, strict=True)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
def test_adjoint_of_onnxruntime(auto_pad: str, kernels: str) -> None:
    """<AveragePool(x), dy> = <x, dx> for whatever dy, so that AveragePool of the unit vectors gives dx."""
    rng = np.random.default_rng(3)
    for count_include_pad, kernel, stride, pads in (
        (0, [2, 2], [2, 2], [0, 0, 0, 0]),
        (1, [3, 2], [2, 1], [1, 0, 1, 1]),
        (0, [3, 4], [1, 3], [2, 1, 0, 3]),
    ):
        x = rng.standard_normal((2, 3, 7, 9)).astype(f32)
        attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": stride, "count_include_pad": count_include_pad}
        attributes |= {"pads": pads} if auto_pad == "NOTSET" else {"auto_pad": auto_pad}
        node = helper.make_node("AveragePool", ["x"], ["y"], **attributes)
        infos = [helper.make_tensor_value_info(name, 1, [None] * 4) for name in "xy"]
        model = helper.make_model(
            helper.make_graph([node], "g", infos[:1], infos[1:]),
            opset_imports=[helper.make_opsetid("", 18)],
            ir_version=10,
        )
        session = forward_session(model)
        units = np.eye(63, dtype=f32).reshape(63, 1, 7, 9)
        pooled, y = (np.asarray(session.run(None, {"x": value})[0]) for value in (units, x))
        dy = rng.standard_normal(y.shape).astype(f32)
        expected = np.einsum("khw,nchw->nck", pooled[:, 0], dy).reshape(x.shape)
        given = {
            "kernel": kernel,
            "strides": stride,
            "pads_begin": pads[:2],
            "pads_end": pads[2:],
            "auto_pad": auto_pad,
            "exclude_pad": 1 - count_include_pad,
            "src_shape": list(x.shape),
        } | NCX
        got = single_op.run(AP, given, [dy], kernels=kernels)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5, err_msg=str(given), strict=True)


@pytest.mark.parametrize("constants", [True, False])
@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("seed", range(8))
def test_body(seed: int, knowledge: str, constants: bool) -> None:
    """Right whatever the model tells of the shapes, and accepted by onnx's strict inference."""
    rng = np.random.default_rng(2000 + seed)
    attributes, lengths, down, up = dense(rng)
    layout = ("NCX", "NXC")[seed % 2]
    attributes |= {"data_format": layout, "exclude_pad": seed // 2 % 2}
    for outs in (down, up):
        dy = to_data(rng.integers(-8, 9, (2, 3, *outs)).astype(f32), layout)
        inputs: Inputs = [dy, shape_of((2, 3), lengths, layout)]
        got = answer(AP, attributes, inputs, knowledge, constants=constants)
        expected = evaluate(AP, attributes, inputs)
        message = f"{attributes} {lengths} {outs}"
        np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6, err_msg=message, strict=True)
        if knowledge == "static":
            stated = attributes | {"src_shape": inputs[1]}
            model = ob.use_kernels(one_node_model(AP, stated, [list(dy.shape)], output_ranks=[dy.ndim]), "onnx")
            checker.check_model(model, full_check=True)
            shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


@pytest.mark.parametrize("knowledge", ["static", "batch"])
@pytest.mark.parametrize(
    ("lengths", "kernel", "strides", "begin", "end"),
    [
        ([5, 4], [3, 3], [1, 1], [1, 1], [1, 1]),  # the first and the last window have fewer cells than the others
        ([5, 4], [5, 4], [1, 1], [0, 0], [0, 0]),  # one window over all cells
        ([2, 4], [4, 5], [9, 9], [1, 1], [1, 0]),  # also with padding
        ([3, 2], [3, 2], [4, 4], [1, 0], [0, 0]),  # one window that leaves out a row
        ([4, 4], [2, 2], [2, 2], [0, 0], [0, 0]),
        ([1, 2], [1, 4], [1, 1], [0, 1], [0, 3]),  # the first of three windows lies over all, the last does not
    ],
)
def test_body_of_known_lengths(rng, lengths, kernel, strides, begin, end, knowledge: str) -> None:
    outs = [(n + p + e - k) // s + 1 for n, p, e, k, s in zip(lengths, begin, end, kernel, strides, strict=True)]
    dy = rng.integers(-8, 9, (2, 3, *outs)).astype(f32)
    inputs: Inputs = [dy, shape_of((2, 3), lengths, "NCX")]
    for exclude_pad in (0, 1):
        attributes = {"kernel": kernel, "strides": strides, "pads_begin": begin, "pads_end": end} | NCX
        attributes |= {"exclude_pad": exclude_pad}
        got = answer(AP, attributes, inputs, knowledge, constants=True)
        np.testing.assert_allclose(got, evaluate(AP, attributes, inputs), rtol=0, atol=2e-6, strict=True)


@pytest.mark.parametrize("knowledge", ["static", "symbolic", "rank", "nothing"])
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_body_finds_same_pads(rng, auto_pad: str, knowledge: str) -> None:
    for length in range(1, 9):
        attributes = {"kernel": [3], "strides": [2], "pads_begin": [], "pads_end": [], "auto_pad": auto_pad} | NCX
        attributes |= {"exclude_pad": 1}
        dy = rng.integers(1, 9, (1, 3, -(-length // 2))).astype(f32)
        inputs: Inputs = [dy, np.array([1, 3, length], np.int64)]
        got = answer(AP, attributes, inputs, knowledge, constants=False)
        np.testing.assert_allclose(got, evaluate(AP, attributes, inputs), rtol=1e-6)


WRONG = [  # src_shape and the shape of diff_dst, which do not fit, and what the body says
    ((1, 2, 7), (2, 2, 4), "batch sizes of src and diff_dst"),
    ((1, 2, 7), (1, 1, 4), "channels of src and diff_dst"),
    ((1, 2, 7), (1, 2, 3), "diff_dst does not fit src"),
    ((1, 2, 7), (1, 2, 5), "diff_dst does not fit src"),
    ((1, 2, 0), (1, 2, 1), "lengths of src"),
    ((1, 2, 7), (1, 2, 4, 4), "of rank 3"),
    ((1, 2, 7, 7), (1, 2, 4), "src_shape: expected 3 entries"),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("src", "diff_dst", "message"), WRONG)
def test_what_does_not_fit_fails_the_run(src, diff_dst, message: str, kernels: str) -> None:
    attributes = {"kernel": [3], "strides": [2], "pads_begin": [1], "pads_end": [1], "exclude_pad": 1} | NCX
    model = single_op.model(AP, attributes, [np.zeros((1, 1, 1), f32), np.zeros(3, np.int64)])
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    session = ob.session(model, kernels=kernels)
    with pytest.raises(Exception, match=message if kernels == "onnx" else f"{AP}: "):
        session.run(None, {"src_shape": np.array(src), "diff_dst": np.ones(diff_dst, f32)})


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize(("head", "length", "out"), [((0, 3), 6, 3), ((2, 0), 6, 3), ((0, 0), 6, 3), ((2, 3), 1, 0)])
def test_no_images_no_channels_or_no_window(
    head: tuple[int, int], length: int, out: int, layout: str, kernels: str
) -> None:
    attributes = {"kernel": [2], "strides": [2], "pads_begin": [], "pads_end": [], "data_format": layout}
    inputs: Inputs = [to_data(np.ones((*head, out), f32), layout), shape_of(head, [length], layout)]
    got = single_op.run(AP, attributes | {"exclude_pad": 1}, inputs, kernels=kernels)
    np.testing.assert_array_equal(got, to_data(np.zeros((*head, length), f32), layout), strict=True)


SIZES = [  # lengths, kernel, strides, pads: whole registers and their tails, one window, one row
    ([70, 67], [3, 3], [1, 1], [1, 1]),
    ([64, 96], [2, 2], [2, 2], [0, 0]),
    ([33, 50], [3, 3], [2, 2], [1, 1]),
    ([33, 50], [3, 2], [3, 4], [0, 0]),
    ([7, 7], [7, 7], [1, 1], [0, 0]),
    ([20, 300], [5, 40], [2, 3], [2, 20]),
    ([300], [7], [5], [3]),
    ([6, 7, 40], [2, 3, 3], [1, 2, 1], [1, 1, 1]),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_sizes(rng, dtype: str, kernels: str) -> None:
    calls: list[Call] = []
    for (lengths, kernel, strides, pads), layout in product(SIZES, ("NCX", "NXC")):
        outs = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(lengths, kernel, strides, pads, strict=True)]
        inputs: Inputs = [
            to_data(rng.standard_normal((2, 21, *outs)).astype(f32), layout),
            shape_of((2, 21), lengths, layout),
        ]
        attributes = {"kernel": kernel, "strides": strides, "pads_begin": pads, "pads_end": pads, "data_format": layout}
        calls += [Call(AP, attributes | {"exclude_pad": exclude_pad}, inputs, 0) for exclude_pad in (0, 1)]

    def run(some: Sequence[Call]) -> list[list[np.ndarray]]:
        return calls_together([(c.op, c.attributes, c.inputs) for c in some], kernels, dtype=dtype)()

    def check(call: Call, answers: list[np.ndarray]) -> None:
        expected = evaluate(AP, call.attributes, call.inputs, dtype).astype(f32)
        bound = {"f32": 2e-6, "f16": 2e-3, "bf16": 2e-2}[dtype] * max(1, float(np.abs(expected).max()))
        np.testing.assert_allclose(answers[0], expected, rtol=0, atol=bound)

    check_each(calls, run, check)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_overlapping_windows_are_summed_in_float32(layout: str, kernels: str) -> None:
    """300 shares of 1 and one of 2^-3 on one cell: bfloat16 would stop at 256."""
    dy = np.full((1, 1, 301, 1), 512, f32)
    dy[0, 0, 7] = 64
    attributes = {"kernel": [512, 1], "strides": [1, 1], "pads_begin": [], "pads_end": [], "data_format": layout}
    inputs: Inputs = [to_data(dy, layout), shape_of((1, 1), [812, 1], layout)]
    got = single_op.run(AP, attributes | {"exclude_pad": 0}, inputs, dtype="bf16", kernels=kernels)
    assert got.reshape(-1)[400] == 300


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("width", [6, 64])
def test_gradients_that_are_not_finite_stay_in_their_windows(width: int, kernels: str) -> None:
    attributes = {"kernel": [2], "strides": [2], "pads_begin": [], "pads_end": [], "src_shape": [2, 1, width]} | NCX
    dy = np.ones((2, 1, width // 2), f32)
    dy[1, 0, 1:3] = np.nan, np.inf
    got = single_op.run(AP, attributes | {"exclude_pad": 1}, [dy], kernels=kernels)
    expected = np.full((2, 1, width), 0.5, f32)
    expected[1, 0, 2:6] = np.nan, np.nan, np.inf, np.inf
    np.testing.assert_array_equal(got, expected)
