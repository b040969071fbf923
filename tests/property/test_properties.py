"""What must hold for every valid call: routes, shape inference, element types, repetition and the adjoint identity.

Hypothesis draws the calls, the same ones in every run (derandomized). Those of an operator run in one session; a failure
names the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, helper

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from onnx_backprop.opset.operators.registry import BY_NAME
from onnx_backprop.ort_ops.loops import BY_LOOPS
from tests.property.calls import CALLS, Call, Correlation, correlations
from tests.support import single_op
from tests.support.adjoint import forward_session
from tests.support.batch import calls_together, check_each, together
from tests.support.checks import DTYPES, evaluate, evaluate_all, infer, inferred, one_node_model

quick = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
each_op = pytest.mark.parametrize("op", sorted(CALLS))
each_route = pytest.mark.parametrize("kernels", KERNELS)
# without loops of its own an operator of the route "numba" is that of "numpy"
each_op_and_route = pytest.mark.parametrize(
    ("op", "kernels"), [(op, k) for op in sorted(CALLS) for k in KERNELS if k != "numba" or op in BY_LOOPS]
)

# Sums of a few dozen products of multiples of 1/64 are exact in float32; interpolation weights are not.
TOLERANCE = 2e-5
HALF = ("f16", "bf16")


def test_every_operator_is_drawn() -> None:
    assert set(CALLS) == set(BY_NAME)


@cache
def drawn(strategy: Callable[..., st.SearchStrategy[Any]], **settings: object) -> list[Any]:
    """The draws of a strategy that all tests share."""
    draws: list[Any] = []

    @quick
    @given(strategy(**settings))
    def draw(value: object) -> None:
        draws.append(value)

    draw()
    return draws


def session_on(calls: Sequence[Call], kernels: str, **settings: Any) -> Callable[[], list[list[np.ndarray]]]:
    """A run of all calls in one session gives the outputs of each."""
    return calls_together([(call.op, call.attributes, call.inputs) for call in calls], kernels, **settings)


@each_op_and_route
def test_sessions_agree_with_the_reference(op: str, kernels: str) -> None:
    """On two threads, on two again, with what the session kept from the first run, and on one: the same bits.

    The inputs are exact in every type, so the answers in half types are float32's, rounded once: in f16 of a graph as
    onnxruntime's optimisers leave it, in bf16 of the bodies as they are written, which costs a third.
    """

    def run(calls: Sequence[Call]) -> list[tuple[list[np.ndarray], ...]]:
        halves = [session_on(calls, kernels, dtype=dtype, optimised=dtype == "f16")() for dtype in HALF]
        wide = session_on(calls, kernels)
        runs = [wide(), wide()]
        if kernels != "onnx":  # see the next test
            runs.append(session_on(calls, kernels, threads=1)())
        return list(zip(*halves, *runs, strict=True))

    def check(call: Call, answers: tuple[list[np.ndarray], ...]) -> None:
        f16, bf16, wide, *again = answers
        assert_close(call, wide)
        for other in again:
            assert [a.tobytes() for a in other] == [a.tobytes() for a in wide], "other bits in another run"
        for dtype, narrow in zip(HALF, (f16, bf16), strict=True):
            for spec, got, expected in zip(BY_NAME[op].outputs, narrow, wide, strict=True):
                rounded = expected.astype(DTYPES[dtype]).astype(np.float32) if spec.type_name == "T1" else expected
                np.testing.assert_array_equal(got, rounded, err_msg=dtype)

    check_each(drawn(CALLS[op]), run, check)


@each_op
def test_one_thread_of_onnxruntime_gives_the_same_bits(op: str) -> None:
    """Its sessions take seconds to begin, so of a quarter of the calls."""
    calls = drawn(CALLS[op])[::4]
    one, two = (session_on(calls, "onnx", threads=threads)() for threads in (1, 2))
    for call, answers, others in zip(calls, one, two, strict=True):
        assert [a.tobytes() for a in answers] == [a.tobytes() for a in others], call


def test_max_pools_with_pixels_between_windows() -> None:
    attributes = {"kernel": [2], "strides": [4], "pads_begin": [0], "pads_end": [0], "auto_pad": "SAME_UPPER"}
    x, dy = np.float32([[[1, 0, 2, 3]]]), np.float32([[[1]]])
    dx = single_op.run("MaxPoolBackward", attributes | {"data_format": "NCX"}, [x, dy], kernels="onnx")
    np.testing.assert_array_equal(dx, [[[1, 0, 0, 0]]])


@each_op
def test_known_shapes_agree_with_run_time_shapes(op: str) -> None:
    """A body written for known lengths gives what one written for symbols gives."""

    def run(calls: Sequence[Call]) -> list[list[np.ndarray]]:
        feeds = [single_op.feeds(call.op, call.inputs) for call in calls]
        return together([static_model(call) for call in calls], feeds, partial(ob.session, kernels="onnx"))()

    check_each(drawn(CALLS[op]), run, assert_close)


def assert_close(call: Call, answers: list[np.ndarray]) -> None:
    """Every output is the reference's, up to float32."""
    for got, expected in zip(answers, evaluate_all(call.op, call.attributes, call.inputs), strict=True):
        scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * scale, strict=True)


def static_model(call: Call):
    """Tensors with their shapes, numbers as initializers."""
    operands = [
        None if i is None else list(i.shape) if spec.tensor else i
        for spec, i in zip(BY_NAME[call.op].inputs, call.inputs, strict=False)
    ]
    return one_node_model(call.op, call.attributes, operands)


@each_op
def test_inference_agrees_with_the_executed_shape(op: str) -> None:
    """Where the lengths are known, and where nothing but the run knows them."""
    for call in drawn(CALLS[op]):
        shape = evaluate(call.op, call.attributes, call.inputs).shape
        assert inferred(static_model(call)) == list(shape), call
        dims = single_op_result(single_op.model(call.op, call.attributes, call.inputs))
        if dims is not None:
            assert len(dims) == len(shape), call
            for dim, length in zip(dims, shape, strict=True):
                assert dim in (None, length) or isinstance(dim, str), call


def single_op_result(model) -> list[int | str | None] | None:
    """The inferred dimensions of the operator's result in a `single_op` model."""
    value = next((v for v in infer(model).graph.value_info if v.name == "result"), None)
    if value is None or not value.type.tensor_type.HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("op", ["InterpolateBackward", "InterpolateBackprop", "ResampleGrad"])
def test_interpolation_keeps_the_sum(op: str) -> None:
    """The rows of W sum to 1."""
    for call in drawn(CALLS[op]):
        dy = call.inputs[0 if op == "ResampleGrad" else 1]
        assert dy is not None
        dx = evaluate(call.op, call.attributes, call.inputs)
        total = float(dy.astype(np.float64).sum())
        assert abs(float(dx.astype(np.float64).sum()) - total) <= 1e-4 * max(1.0, float(np.abs(dy).sum())), call


@each_route
def test_adjoint_of_onnxruntime_conv(kernels: str) -> None:
    """<Conv(x, w), dy> = <x, ConvolutionBackwardData(dy, w)> = <w, ConvolutionBackwardWeights(x, dy)>."""
    shapes = {"data_format": "NCX", "weights_format": "OIX"}

    def calls_of(c: Correlation) -> list[Call]:
        a = c.attributes | shapes
        data, weights = {"dst_shape": list(c.source.shape)}, {"weights_shape": list(c.weights.shape)}
        return [
            Call("Convolution", a, [c.source, c.weights], c.seed),
            Call("ConvolutionBackwardData", a | data, [c.destination, c.weights], c.seed),
            Call("ConvolutionBackwardWeights", a | weights, [c.source, c.destination], c.seed),
        ]

    def check(c: Correlation, answers: list[np.ndarray]) -> None:
        y, ours, dx, dw = answers
        assert y.shape == c.destination.shape, c
        np.testing.assert_allclose(ours, y, rtol=0, atol=TOLERANCE * max(1, np.abs(y).max(initial=0)))
        assert_adjoint((y, c.destination), (c.source, dx), (c.weights, dw))

    def run(cases: Sequence[Correlation]) -> list[list[np.ndarray]]:
        forwards = [forward("Conv", c, c.source, c.weights) for c in cases]
        return run_beside(forwards, [calls_of(c) for c in cases], kernels)

    check_each([c for c in drawn(correlations, transposed=False) if onnxruntime_runs(c)], run, check)


@each_route
def test_adjoint_of_onnxruntime_conv_transpose(kernels: str) -> None:
    """<ConvTranspose(x, w), dy> = <x, ConvTransposeBackwardData(dy, w)> = <w, ConvTransposeBackwardWeights(x, dy)>."""
    shapes = {"data_format": "NCX", "weights_format": "IOX"}

    def padding_of(c: Correlation) -> list[int]:
        a, rest = c.attributes, []
        for axis, stride in enumerate(a["strides"]):
            extent = (c.weights.shape[axis + 2] - 1) * a["dilations"][axis] + 1
            total = a["pads_begin"][axis] + a["pads_end"][axis] if a["auto_pad"] == "None" else 0
            if a["auto_pad"].startswith("SAME"):
                total = max(extent - stride, 0)
            rest.append(c.source.shape[axis + 2] - (stride * (c.destination.shape[axis + 2] - 1) + extent - total))
        return rest

    def calls_of(c: Correlation) -> list[Call]:
        a, weights = c.attributes | shapes, {"weights_shape": list(c.weights.shape)}
        return [
            Call("ConvTransposeBackwardData", a, [c.source, c.weights], c.seed),
            Call("ConvTransposeBackwardWeights", a | weights, [c.destination, c.source], c.seed),
        ]

    def check(c: Correlation, answers: list[np.ndarray]) -> None:
        y, dx, dw = answers
        assert y.shape == c.source.shape, c
        assert_adjoint((y, c.source), (c.destination, dx), (c.weights, dw))

    def run(cases: Sequence[Correlation]) -> list[list[np.ndarray]]:
        forwards = [forward("ConvTranspose", c, c.destination, c.weights, output_padding=padding_of(c)) for c in cases]
        return run_beside(forwards, [calls_of(c) for c in cases], kernels)

    check_each([c for c in drawn(correlations, transposed=True) if onnxruntime_runs(c)], run, check)


def onnxruntime_runs(c: Correlation) -> bool:
    """It refuses the forward with SAME_* and dilations."""
    return not c.attributes["auto_pad"].startswith("SAME") or max(c.attributes["dilations"]) == 1


def run_beside(
    forwards: Sequence[tuple[ModelProto, dict[str, np.ndarray]]], calls: Sequence[Sequence[Call]], kernels: str
) -> list[list[np.ndarray]]:
    """Per case the output of onnxruntime's own operator, then the first ones of our calls."""
    models, feeds = zip(*forwards, strict=True)
    y = together(models, feeds, forward_session)()
    ours = iter(session_on([call for several in calls for call in several], kernels)())
    return [[*forward, *(next(ours)[0] for _ in several)] for forward, several in zip(y, calls, strict=True)]


def forward(
    op: str, c: Correlation, x: np.ndarray, w: np.ndarray, **more: object
) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """A model of onnxruntime's own Conv or ConvTranspose and its feeds."""
    a = c.attributes
    attributes: dict[str, object] = {"strides": a["strides"], "dilations": a["dilations"], "group": a["groups"]} | more
    if a["auto_pad"] == "None":
        attributes["pads"] = a["pads_begin"] + a["pads_end"]
    else:
        attributes["auto_pad"] = a["auto_pad"]
    node = helper.make_node(op, ["x", "w"], ["y"], **attributes)
    infos = [helper.make_tensor_value_info(n, 1, v.shape) for n, v in (("x", x), ("w", w))]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return model, {"x": x, "w": w}


def assert_adjoint(*pairs: tuple[np.ndarray, np.ndarray]) -> None:
    """All inner products are equal."""
    products = [float((a.astype(np.float64) * b).sum()) for a, b in pairs]
    scale = max(1.0, *(float((np.abs(a).astype(np.float64) * np.abs(b)).sum()) for a, b in pairs))
    assert max(products) - min(products) <= 1e-5 * scale, products
