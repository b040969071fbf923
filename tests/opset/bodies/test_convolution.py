"""The convolution operators in standard ONNX operators: every form that a body takes, and what it must refuse.

Random geometries on both routes are in tests/property; here each form is met on purpose.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, checker, helper, shape_inference

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.support import single_op
from tests.support.adjoint import forward_session
from tests.support.checks import evaluate, one_node_model

f32 = np.float32
CONV = {"data_format": "NCX", "weights_format": "OIX"}


def attributes(axes: int, **changes: Any) -> dict[str, Any]:
    ones, zeros = [1] * axes, [0] * axes
    return {"strides": ones, "dilations": ones, "pads_begin": zeros, "pads_end": zeros} | CONV | changes


def assert_right(op: str, attrs: dict[str, Any], inputs: list[np.ndarray | None], expected_ops: set[str]) -> None:
    """The body agrees with the reference with lengths known and unknown; known lengths give the expected form."""
    expected = evaluate(op, attrs, inputs)
    feeds = single_op.feeds(op, inputs)
    static = one_node_model(op, attrs, [None if i is None else list(i.shape) for i in inputs])
    for model in (static, single_op.model(op, attrs, inputs)):
        result = ob.use_kernels(model, "onnx")
        if model is static:
            shape_inference.infer_shapes(result, check_type=True, strict_mode=True, data_prop=True)
            used = {node.op_type for node in result.functions[0].node}
            assert expected_ops <= used, used
        (got,) = forward_session(result).run(None, feeds)
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(np.asarray(got), expected, rtol=0, atol=1e-5 * scale, strict=True)


@pytest.mark.parametrize(
    ("form", "source", "channels", "kernel", "changes"),
    [
        ("planes", (6, 5, 4), (4, 3), (3, 2, 2), {"pads_begin": [1, 0, 1], "pads_end": [2, 1, 0]}),
        ("planes, one cell deep", (3, 5, 4), (4, 3), (1, 2, 2), {}),
        ("planes that a cell never meets", (1, 2, 2), (4, 3), (3, 2, 2), {"pads_begin": [2, 0, 0]}),
        ("planes, dilated", (7, 5, 4), (4, 3), (3, 2, 2), {"dilations": [2, 1, 2], "pads_begin": [3, 0, 0]}),
        ("stride 1 turns the kernel round", (6, 5), (4, 3), (3, 2), {"pads_begin": [1, 0], "pads_end": [2, 1]}),
        ("padding beyond the kernel is cut", (6,), (4, 3), (2,), {"pads_begin": [3], "pads_end": [2]}),
        ("groups", (6, 5), (4, 6), (3, 2), {"groups": 2}),
        ("depthwise", (6, 5), (4, 4), (3, 3), {"groups": 4, "pads_begin": [1, 1], "pads_end": [1, 1]}),
        ("one cell", (6, 5), (3, 4), (1, 1), {}),
    ],
)
def test_data_gradient_of_stride_1(rng, form: str, source, channels, kernel, changes) -> None:
    attrs = attributes(len(source), **changes)
    s, d = channels
    begin, end = np.array(attrs["pads_begin"]), np.array(attrs["pads_end"])
    out = tuple(np.array(source) + begin + end - np.array(attrs["dilations"]) * (np.array(kernel) - 1))
    dy = rng.standard_normal((2, d, *out), f32)
    w = rng.standard_normal((d, s // attrs.get("groups", 1), *kernel), f32)
    attrs |= {"dst_shape": [2, s, *source]}
    assert_right("ConvolutionBackwardData", attrs, [dy, w], {"Conv"})


def test_data_gradient_of_few_channels(rng) -> None:
    """Of stride 1, and yet a ConvTranspose."""
    attrs = attributes(2, pads_begin=[1, 3], pads_end=[2, 0], dst_shape=[2, 3, 6, 5])
    dy, w = rng.standard_normal((2, 7, 7, 7), f32), rng.standard_normal((7, 3, 3, 2), f32)
    assert_right("ConvolutionBackwardData", attrs, [dy, w], {"ConvTranspose"})


@pytest.mark.parametrize("rest", [0, 1, 2])
@pytest.mark.parametrize("pads", [(0, 0), (1, 2), (4, 5)])
def test_data_gradient_of_a_stride(rng, rest: int, pads: tuple[int, int]) -> None:
    """Several source lengths fit one destination length; pads may pass the kernel."""
    out = 4
    source = 3 * (out - 1) + 4 - sum(pads) + rest
    attrs = attributes(1, strides=[3], pads_begin=[pads[0]], pads_end=[pads[1]], dst_shape=[2, 3, source])
    dy, w = rng.standard_normal((2, 4, out), f32), rng.standard_normal((4, 3, 4), f32)
    assert_right("ConvolutionBackwardData", attrs, [dy, w], {"ConvTranspose"})


@pytest.mark.parametrize(
    ("form", "channels", "kernel", "groups", "expected_ops"),
    [
        ("whole runs of channels are gathered", (32, 5), (3, 2), 1, {"MatMul", "Gather"}),
        ("slices of few channels", (3, 5), (1, 3), 1, {"MatMul", "Slice"}),
        ("no copy for one cell", (32, 5), (1, 1), 1, {"MatMul"}),
        ("groups", (64, 6), (2, 2), 2, {"MatMul", "Gather"}),
        ("depthwise", (5, 5), (3, 3), 5, {"MatMul", "Gather"}),
        ("depthwise, two channels out", (5, 10), (3, 3), 5, {"MatMul", "Gather"}),
        ("slices, groups", (4, 6), (3, 3), 2, {"MatMul", "Slice"}),
        ("many cells", (2, 3), (17, 16), 1, {"MatMul", "Gather"}),
        ("many cells, groups", (4, 6), (17, 16), 2, {"MatMul", "Gather"}),
    ],
)
@pytest.mark.parametrize("stride", [1, 2])
def test_weight_gradient(rng, form: str, channels, kernel, groups: int, expected_ops: set[str], stride: int) -> None:
    s, d = channels
    attrs = attributes(2, strides=[stride] * 2, groups=groups, weights_shape=[d, s // groups, *kernel])
    out = (3, 4)
    source = [stride * (o - 1) + k + (stride - 1) for o, k in zip(out, kernel, strict=True)]
    x, dy = rng.standard_normal((2, s, *source), f32), rng.standard_normal((2, d, *out), f32)
    assert_right("ConvolutionBackwardWeights", attrs, [x, dy], expected_ops)
    by_input = {k: v for k, v in attrs.items() if k != "weights_shape"}
    got = single_op.run(
        "ConvolutionBackwardWeights", by_input, [x, dy, np.int32(attrs["weights_shape"])], kernels="onnx"
    )
    np.testing.assert_allclose(got, evaluate("ConvolutionBackwardWeights", attrs, [x, dy]), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "source", "channels", "kernel", "changes"),
    [
        ("a product for each column", (40, 6), (64, 5), (3, 3), {"pads_begin": [1, 1], "pads_end": [1, 1]}),
        ("longer columns first", (40, 6), (70, 5), (3, 2), {}),
        ("groups", (40, 6), (128, 6), (2, 3), {"groups": 2, "dilations": [1, 2], "pads_end": [0, 3]}),
        ("a cell meets nothing behind", (40, 1), (64, 5), (3, 3), {"pads_begin": [0, 2]}),
        ("a cell meets nothing before", (40, 1), (64, 5), (3, 3), {"pads_end": [0, 2]}),
        ("padding alone, depthwise", (3, 2), (4, 4), (2, 3), {"groups": 4, "pads_begin": [0, 4], "pads_end": [0, 4]}),
        ("one cell", (6, 5), (3, 4), (1, 1), {}),
    ],
)
def test_weight_gradient_of_shifted_columns(rng, form: str, source, channels, kernel, changes) -> None:
    attrs = attributes(2, **changes)
    s, d = channels
    pads = np.array(attrs["pads_begin"]) + np.array(attrs["pads_end"])
    out = tuple(np.array(source) + pads - np.array(attrs["dilations"]) * (np.array(kernel) - 1))
    x, dy = rng.standard_normal((2, s, *source), f32), rng.standard_normal((2, d, *out), f32)
    attrs |= {"weights_shape": [d, s // attrs.get("groups", 1), *kernel]}
    assert_right("ConvolutionBackwardWeights", attrs, [x, dy], {"MatMul"} if kernel == (1, 1) else {"MatMul", "Pad"})


@pytest.mark.parametrize(
    ("source", "kernel", "pads"),
    [
        ((6, 9), (2, 3), (0, 0)),
        ((7, 11), (4, 3), (1, 2)),
        ((3, 2), (6, 1), (4, 5)),
        ((13,), (4,), (3,)),
        ((5, 4, 7), (2, 1, 3), (0, 1, 1)),
    ],
)
@pytest.mark.parametrize("channels", [(3, 4), (40, 5)])
def test_weight_gradient_of_patches(rng, source, kernel, pads, channels) -> None:
    s, d = channels
    attrs = attributes(len(source), strides=list(kernel), pads_begin=list(pads), pads_end=list(pads[::-1]))
    out = (np.array(source) + np.array(pads) + np.array(pads[::-1]) - kernel) // kernel + 1
    x, dy = rng.standard_normal((2, s, *source), f32), rng.standard_normal((2, d, *out), f32)
    attrs |= {"weights_shape": [d, s, *kernel]}
    assert_right("ConvolutionBackwardWeights", attrs, [x, dy], {"Split"})


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_no_channels_to_sum_over(rng, kernels: str, known: bool, data_format: str) -> None:
    """onnxruntime's own Conv with pads never ends there."""
    axes = {"data_format": data_format, "pads_begin": [1, 1], "pads_end": [1, 1]}
    bias = rng.standard_normal(7, f32)
    last = data_format == "NXC"
    empty, full = ((2, 9, 40, 0), (2, 9, 40, 3)) if last else ((2, 0, 9, 40), (2, 3, 9, 40))
    no_in, no_out = np.ones((7, 0, 3, 3), f32), np.ones((0, 3, 3, 3), f32)
    calls: list[tuple[str, dict[str, Any], list[np.ndarray | None]]] = [
        ("Convolution", attributes(2, **axes), [np.ones(empty, f32), no_in]),
        ("Convolution", attributes(2, **axes), [np.ones(empty, f32), no_in, bias]),
        ("ConvolutionBackwardData", attributes(2, **axes, dst_shape=list(full)), [np.ones(empty, f32), no_out]),
        ("ConvTransposeBackwardData", attributes(2, **axes) | {"weights_format": "IOX"}, [np.ones(empty, f32), no_in]),
    ]
    for op, attrs, inputs in calls:
        expected = evaluate(op, attrs, inputs)
        model = single_op.model(op, attrs, inputs)
        if known:
            model = one_node_model(op, attrs, [None if i is None else list(i.shape) for i in inputs])
        (got,) = ob.session(model, kernels=kernels).run(None, single_op.feeds(op, inputs))
        np.testing.assert_array_equal(np.asarray(got), expected, strict=True)


@pytest.mark.parametrize("kernels", ["onnx", "numpy"])
def test_an_empty_batch(kernels: str) -> None:
    attrs = attributes(1, weights_shape=[4, 3, 2])
    dw = single_op.run(
        "ConvolutionBackwardWeights", attrs, [np.ones((0, 3, 5), f32), np.ones((0, 4, 4), f32)], kernels=kernels
    )
    np.testing.assert_array_equal(dw, np.zeros((4, 3, 2), f32), strict=True)
    attrs = attributes(1, dst_shape=[0, 3, 5])
    dx = single_op.run(
        "ConvolutionBackwardData", attrs, [np.ones((0, 4, 4), f32), np.ones((4, 3, 2), f32)], kernels=kernels
    )
    assert dx.shape == (0, 3, 5)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("op", ["ConvolutionBackwardData", "ConvolutionBackwardWeights"])
def test_a_source_of_padding_only(rng, op: str, stride: int) -> None:
    """The source has no cells, the destination has one, all of it padding."""
    attrs = attributes(1, strides=[stride], pads_begin=[1], pads_end=[1], groups=2)
    dy, w = rng.standard_normal((2, 4, 1), f32), rng.standard_normal((4, 3, 2), f32)
    if op == "ConvolutionBackwardData":
        assert_right(op, attrs | {"dst_shape": [2, 6, 0]}, [dy, w], set())
    else:
        assert_right(op, attrs | {"weights_shape": [4, 3, 2]}, [np.zeros((2, 6, 0), f32), dy], set())


def test_a_batch_of_one_is_not_stretched() -> None:
    """MatMul would broadcast it without a word."""
    attrs = attributes(1, weights_shape=[4, 3, 2])
    session = forward_session(
        ob.use_kernels(single_op.model("ConvolutionBackwardWeights", attrs, [np.ones((3, 3, 5), f32)] * 2), "onnx")
    )
    x, dy = np.ones((3, 3, 5), f32), np.ones((3, 4, 4), f32)
    assert np.asarray(session.run(None, {"src": x, "diff_dst": dy})[0]).shape == (4, 3, 2)
    for bad_x, bad_dy in (
        (x[:1], dy),
        (x, dy[:1]),
        (x, dy[:, :, :1]),
        (x[:, :1], dy),
        (x, dy[:, :1]),
        (x[:, :, :4], dy),
    ):
        with pytest.raises(Exception, match="ConvolutionBackwardWeights: ") as e:
            session.run(None, {"src": bad_x, "diff_dst": bad_dy})
        assert type(e.value).__module__.startswith("onnxruntime")


def test_lengths_found_in_the_run_are_those_of_same_padding(rng) -> None:
    """SAME pads with the lengths, and even the kernel's lengths, unknown at conversion."""
    for upper in ("SAME_UPPER", "SAME_LOWER"):
        for length in range(1, 9):
            for stride in (1, 2, 3):
                attrs = attributes(1, auto_pad=upper, strides=[stride], dst_shape=[1, 2, length])
                dy = rng.standard_normal((1, 3, -(-length // stride)), f32)
                w = rng.standard_normal((3, 2, 4), f32)
                expected = evaluate("ConvolutionBackwardData", attrs, [dy, w])
                got = single_op.run("ConvolutionBackwardData", attrs, [dy, w], kernels="onnx")
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5, err_msg=f"{upper} {length} {stride}")


def test_the_rank_may_be_unknown(rng) -> None:
    """The strides tell it; a tensor of another rank fails the run."""
    attrs = attributes(1, weights_shape=[4, 3, 2])
    node = helper.make_node("ConvolutionBackwardWeights", ["x", "dy"], ["dw"], domain=ob.DOMAIN, **attrs)
    nodes = [helper.make_node("Reshape", [f"{n}_given", f"{n}_shape"], [n]) for n in ("x", "dy")]
    infos = [helper.make_tensor_value_info(f"{n}_given", TensorProto.FLOAT, [f"{n}_all"]) for n in ("x", "dy")]
    infos += [helper.make_tensor_value_info(f"{n}_shape", TensorProto.INT64, [f"{n}_rank"]) for n in ("x", "dy")]
    graph = helper.make_graph(
        [*nodes, node], "g", infos, [helper.make_tensor_value_info("dw", TensorProto.FLOAT, [4, 3, 2])]
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ob.DOMAIN, 1)]
    model = ob.use_kernels(helper.make_model(graph, opset_imports=opsets, ir_version=10), "onnx")
    checker.check_model(model, full_check=True)
    session = forward_session(model)
    x, dy = rng.standard_normal((2, 3, 5), f32), rng.standard_normal((2, 4, 4), f32)
    feeds = {"x_given": x.ravel(), "dy_given": dy.ravel(), "dy_shape": np.array(dy.shape)}
    (got,) = session.run(None, feeds | {"x_shape": np.array(x.shape)})
    np.testing.assert_allclose(
        np.asarray(got), evaluate("ConvolutionBackwardWeights", attrs, [x, dy]), rtol=0, atol=1e-5
    )
    with pytest.raises(Exception, match="node"):
        session.run(None, feeds | {"x_shape": np.array([2, 3, 5, 1])})
