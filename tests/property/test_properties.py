"""What must hold for every valid call: routes, shape inference, element types, repetition and the adjoint identity.

Hypothesis draws the calls, the same ones in every run (derandomized); a failure prints the smallest call that shows it.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from onnx_backprop.opset.operators.registry import BY_NAME
from onnx_backprop.ort_ops.loops import BY_LOOPS
from tests.property.calls import CALLS, Call, Correlation, correlations
from tests.support import single_op
from tests.support.adjoint import forward_session
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


def test_every_operator_is_drawn() -> None:
    assert set(CALLS) == set(BY_NAME)


@each_op_and_route
def test_a_session_agrees_with_the_reference(op: str, kernels: str) -> None:
    @quick
    @given(CALLS[op]())
    def check(call: Call) -> None:
        answers = single_op.run_all(call.op, call.attributes, call.inputs, kernels=kernels)
        assert_close(call, answers)

    check()


@each_op
def test_known_shapes_agree_with_run_time_shapes(op: str) -> None:
    """A body written for known lengths gives what one written for symbols gives."""

    @quick
    @given(CALLS[op]())
    def check(call: Call) -> None:
        model = static_model(call)
        session = ob.session(model, kernels="onnx")
        feeds = {i.name: single_op.feeds(call.op, call.inputs)[i.name] for i in session.get_inputs()}
        assert_close(call, [np.asarray(value) for value in session.run(None, feeds)])

    check()


def assert_close(call: Call, answers: list[np.ndarray]) -> None:
    """Every output is the reference's, up to float32."""
    for got, expected in zip(answers, evaluate_all(call.op, call.attributes, call.inputs), strict=True):
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * scale, strict=True, err_msg=repr(call))


def static_model(call: Call):
    """Tensors with their shapes, numbers as initializers."""
    operands = [
        None if i is None else list(i.shape) if spec.tensor else i
        for spec, i in zip(BY_NAME[call.op].inputs, call.inputs, strict=False)
    ]
    return one_node_model(call.op, call.attributes, operands)


@each_op
def test_inference_agrees_with_the_executed_shape(op: str) -> None:
    @quick
    @given(CALLS[op](), st.booleans())
    def check(call: Call, known: bool) -> None:
        shape = evaluate(call.op, call.attributes, call.inputs).shape
        model = static_model(call) if known else single_op.model(call.op, call.attributes, call.inputs)
        dims = inferred(model) if known else single_op_result(model)
        assert dims is not None or not known, call
        if dims is not None:
            assert len(dims) == len(shape), call
            for dim, length in zip(dims, shape, strict=True):
                assert dim == length if known else dim in (None, length) or isinstance(dim, str), call

    check()


def single_op_result(model) -> list[int | str | None] | None:
    """The inferred dimensions of the operator's result in a `single_op` model."""
    value = next((v for v in infer(model).graph.value_info if v.name == "result"), None)
    if value is None or not value.type.tensor_type.HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in value.type.tensor_type.shape.dim]


@each_op_and_route
def test_half_types_are_one_rounding_away(op: str, kernels: str) -> None:
    """The inputs are exact in every type, so the answer is float32's, rounded once."""

    @quick
    @given(CALLS[op]())
    def check(call: Call) -> None:
        wide = single_op.run_all(call.op, call.attributes, call.inputs, kernels=kernels)
        for dtype in ("f16", "bf16"):
            narrow = single_op.run_all(call.op, call.attributes, call.inputs, dtype=dtype, kernels=kernels)
            for spec, got, expected in zip(BY_NAME[op].outputs, narrow, wide, strict=True):
                rounded = expected.astype(DTYPES[dtype]).astype(np.float32) if spec.type_name == "T1" else expected
                np.testing.assert_array_equal(got, rounded, err_msg=f"{dtype} {call!r}")

    check()


@each_op_and_route
def test_repetition_gives_the_same_bits(op: str, kernels: str) -> None:
    """On one thread, on two, and on two again, with what the session kept from the first run."""

    @quick
    @given(CALLS[op]())
    def check(call: Call) -> None:
        runs = []
        model = single_op.model(call.op, call.attributes, call.inputs)
        for threads, times in ((1, 1), (2, 2)):
            session = ob.session(model, kernels=kernels, session_options=single_op.options(threads))
            for _ in range(times):
                answers = session.run(None, single_op.feeds(call.op, call.inputs))
                runs.append(b"".join(np.asarray(answer).tobytes() for answer in answers))
        assert runs[0] == runs[1] == runs[2], call

    check()


@pytest.mark.parametrize("op", ["InterpolateBackward", "InterpolateBackprop", "ResampleGrad"])
def test_interpolation_keeps_the_sum(op: str) -> None:
    """The rows of W sum to 1."""

    @quick
    @given(CALLS[op]())
    def check(call: Call) -> None:
        dy = call.inputs[0 if op == "ResampleGrad" else 1]
        assert dy is not None
        dx = evaluate(call.op, call.attributes, call.inputs)
        total = float(dy.astype(np.float64).sum())
        assert abs(float(dx.astype(np.float64).sum()) - total) <= 1e-4 * max(1.0, float(np.abs(dy).sum())), call

    check()


@each_route
def test_adjoint_of_onnxruntime_conv(kernels: str) -> None:
    """<Conv(x, w), dy> = <x, ConvolutionBackwardData(dy, w)> = <w, ConvolutionBackwardWeights(x, dy)>."""

    @quick
    @given(correlations(transposed=False))
    def check(c: Correlation) -> None:
        if c.attributes["auto_pad"].startswith("SAME") and max(c.attributes["dilations"]) > 1:
            return  # onnxruntime refuses the forward
        y = forward("Conv", c, c.source, c.weights)
        assert y.shape == c.destination.shape, c
        shapes = {"data_format": "NCX", "weights_format": "OIX"}
        own = single_op.run("Convolution", c.attributes | shapes, [c.source, c.weights], kernels=kernels)
        np.testing.assert_allclose(own, y, rtol=0, atol=TOLERANCE * max(1, np.abs(y).max(initial=0)), err_msg=repr(c))
        dx = single_op.run(
            "ConvolutionBackwardData",
            c.attributes | shapes | {"dst_shape": list(c.source.shape)},
            [c.destination, c.weights],
            kernels=kernels,
        )
        dw = single_op.run(
            "ConvolutionBackwardWeights",
            c.attributes | shapes | {"weights_shape": list(c.weights.shape)},
            [c.source, c.destination],
            kernels=kernels,
        )
        assert_adjoint(c, (y, c.destination), (c.source, dx), (c.weights, dw))

    check()


@each_route
def test_adjoint_of_onnxruntime_conv_transpose(kernels: str) -> None:
    """<ConvTranspose(x, w), dy> = <x, ConvTransposeBackwardData(dy, w)> = <w, ConvTransposeBackwardWeights(x, dy)>."""

    @quick
    @given(correlations(transposed=True))
    def check(c: Correlation) -> None:
        a = c.attributes
        if a["auto_pad"].startswith("SAME") and max(a["dilations"]) > 1:
            return  # onnxruntime refuses the forward
        rest = []
        for axis, stride in enumerate(a["strides"]):
            extent = (c.weights.shape[axis + 2] - 1) * a["dilations"][axis] + 1
            total = a["pads_begin"][axis] + a["pads_end"][axis] if a["auto_pad"] == "None" else 0
            if a["auto_pad"].startswith("SAME"):
                total = max(extent - stride, 0)
            rest.append(c.source.shape[axis + 2] - (stride * (c.destination.shape[axis + 2] - 1) + extent - total))
        y = forward("ConvTranspose", c, c.destination, c.weights, output_padding=rest)
        assert y.shape == c.source.shape, c
        shapes = {"data_format": "NCX", "weights_format": "IOX"}
        dx = single_op.run("ConvTransposeBackwardData", a | shapes, [c.source, c.weights], kernels=kernels)
        dw = single_op.run(
            "ConvTransposeBackwardWeights",
            a | shapes | {"weights_shape": list(c.weights.shape)},
            [c.destination, c.source],
            kernels=kernels,
        )
        assert_adjoint(c, (y, c.source), (c.destination, dx), (c.weights, dw))

    check()


def forward(op: str, c: Correlation, x: np.ndarray, w: np.ndarray, **more: object) -> np.ndarray:
    """onnxruntime's own Conv or ConvTranspose."""
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
    session = forward_session(model)
    return np.asarray(session.run(None, {"x": x, "w": w})[0])


def assert_adjoint(call: object, *pairs: tuple[np.ndarray, np.ndarray]) -> None:
    """All inner products are equal."""
    products = [float((a.astype(np.float64) * b).sum()) for a, b in pairs]
    scale = max(1.0, *(float((np.abs(a).astype(np.float64) * np.abs(b)).sum()) for a, b in pairs))
    assert max(products) - min(products) <= 1e-5 * scale, f"{products} of {call}"
