"""The routes "numpy" and "numba": Python operators inside stock onnxruntime sessions."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import checker, helper, parser, shape_inference

import onnx_backprop as ob
from onnx_backprop.opset.functions.numpy import NUMPY_DOMAIN
from onnx_backprop.opset.functions.use_kernels import PYTHON_KERNELS
from onnx_backprop.ort_ops.runtime.extensions import RawArray
from tests.declarations.declaration import Example
from tests.declarations.registry import EXAMPLES
from tests.support import single_op
from tests.support.batch import calls_together, check_each

f32 = np.float32
CONV_DATA = {
    "strides": [2],
    "pads_begin": [1],
    "pads_end": [1],
    "dilations": [1],
    "data_format": "NCX",
    "weights_format": "OIX",
}
DY = f32([[[1, 2, 3]]])
W = f32([[[1, 10, 100]]])
each_route = pytest.mark.parametrize("kernels", PYTHON_KERNELS)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_worked_examples(dtype: str) -> None:
    """The examples are small numbers: only what a type cannot hold is rounded, once."""
    tolerance = {"f32": 1e-6, "f16": 2.0**-11, "bf16": 2.0**-8}[dtype]

    def run(examples: Sequence[Example]) -> list[list[np.ndarray]]:
        return calls_together([(e.op, e.attributes, e.arrays()) for e in examples], "numpy", dtype=dtype)()

    def check(example: Example, answers: list[np.ndarray]) -> None:
        expected = f32(example.expected)
        np.testing.assert_allclose(answers[0], expected, rtol=tolerance, atol=0)
        assert answers[0].shape == expected.shape

    check_each(EXAMPLES, run, check)


def test_models_pass_the_checker_before_and_after_attaching_kernels() -> None:
    for example in EXAMPLES:
        plain = single_op.model(example.op, example.attributes, example.arrays())
        results = shape_inference.infer_shapes(plain).graph.output
        for model in (plain, ob.use_kernels(plain, "numpy")):
            # an output without a shape is legal, yet full_check asks for one
            model.graph.output[0].type.tensor_type.shape.CopyFrom(onnx.TensorShapeProto())
            for axis in range(f32(example.expected).ndim):
                model.graph.output[0].type.tensor_type.shape.dim.add().dim_param = f"out_{axis}"
            for output, inferred in zip(model.graph.output[1:], results[1:], strict=True):
                output.CopyFrom(inferred)
            checker.check_model(model, full_check=True)
            shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def test_bf16_accumulates_beyond_its_own_precision() -> None:
    """600 ones into one pixel: an accumulator in bf16 would stop at 256."""
    attributes = {"mode": "nearest", "data_format": "NCX", "sizes": [600]}
    inputs = [np.zeros((1, 1, 1), f32), np.ones((1, 1, 600), f32)]
    assert single_op.run("InterpolateBackward", attributes, inputs, dtype="bf16").item() == 600


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 5)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    attributes = {"mode": "linear", "data_format": "NCX"}
    source = (shape[0], 3, 4)
    got = single_op.run("InterpolateBackward", attributes, [np.ones(source, f32), np.ones(shape, f32)])
    np.testing.assert_array_equal(got, np.zeros(source, f32), strict=True)


@each_route
def test_a_refused_run_is_a_failed_status_with_the_reason(kernels: str) -> None:
    session = ob.session(
        single_op.model("ConvolutionBackwardData", CONV_DATA, [DY, W, np.zeros(3, np.int32)]), kernels=kernels
    )
    for length in (4, 7, 2**31 - 1):
        with pytest.raises(Exception, match="ConvolutionBackwardData: .*expects diff_dst length .*, got 3") as e:
            session.run(None, {"diff_dst": DY, "weights": W, "dst_shape": np.int32([1, 1, length])})
        assert type(e.value).__module__.startswith("onnxruntime")
    (dx,) = session.run(None, {"diff_dst": DY, "weights": W, "dst_shape": np.int32([1, 1, 5])})
    np.testing.assert_array_equal(dx, [[[10, 102, 20, 203, 30]]])


@each_route
def test_what_cannot_be_allocated_is_a_failed_status(kernels: str) -> None:
    attributes = CONV_DATA | {"strides": [2**31 - 1], "pads_begin": [0], "pads_end": [0]}
    inputs = [np.ones((1, 1, 2**9), f32), np.ones((1, 1, 1), f32), np.int32([1, 1, 2**31 - 1])]
    with pytest.raises(Exception, match="ConvolutionBackwardData"):
        single_op.run("ConvolutionBackwardData", attributes, inputs, kernels=kernels)
    sizes = {"interpolation_mode": "LINEAR", "scales": [], "input_pixel_offsets": [], "output_pixel_offsets": []}
    huge = sizes | {"output_sizes": [2**40, 2**40]}
    with pytest.raises(Exception, match="ResampleGrad: .*does not fit in memory"):
        single_op.run("ResampleGrad", huge, [np.ones((2, 2), f32)], kernels=kernels)


def test_an_unexpected_python_error_is_a_failed_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, an exception inside a Python operator ends the process."""
    monkeypatch.setattr(np, "matmul", lambda *_: 1 / 0)
    attributes = CONV_DATA | {"dst_shape": [1, 1, 5]}
    with pytest.raises(Exception, match="ConvolutionBackwardData: ZeroDivisionError"):
        single_op.run("ConvolutionBackwardData", attributes, [DY, W])


def test_without_the_native_check_the_run_still_fails() -> None:
    """Where the library takes no native operators, the reason is logged and the run fails all the same."""
    script = """
import logging, numpy as np
from onnx_backprop.ort_ops.runtime import c_abi
def missing(library, op): raise AttributeError("AddExternalCustomOp")
c_abi.add_external_custom_op = missing
from tests.support import single_op
from tests.ort_ops.test_numpy_route import CONV_DATA, DY, W
print(single_op.run("ConvolutionBackwardData", CONV_DATA | {"dst_shape": [1, 1, 5]}, [DY, W]).ravel().tolist())
try:
    single_op.run("ConvolutionBackwardData", CONV_DATA | {"dst_shape": [1, 1, 7]}, [DY, W])
except Exception as e:
    print("failed", type(e).__module__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[10.0, 102.0, 20.0, 203.0, 30.0]",
        "failed onnxruntime.capi.onnxruntime_pybind11_state",
    ]
    assert "expects diff_dst length 4, got 3" in done.stderr
    assert "takes no native operators" in done.stderr


def test_results_go_back_without_a_list_of_python_numbers() -> None:
    strided = np.arange(6, dtype=np.float64).reshape(2, 3).T
    result = RawArray(strided, np.float32)
    data = result.flatten().tolist()
    assert isinstance(data, np.ndarray)
    assert data.dtype == np.float32
    assert data.flags.c_contiguous
    assert result.shape == (3, 2)


@each_route
def test_sessions_in_threads_agree(kernels: str) -> None:
    attributes = CONV_DATA | {"dst_shape": [1, 1, 5]}
    model = single_op.model("ConvolutionBackwardData", attributes, [DY, W])
    answers: list[np.ndarray] = []

    def work() -> None:
        session = ob.session(model, kernels=kernels)
        answers.extend(np.asarray(session.run(None, {"diff_dst": DY, "weights": W})[0]) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 80
    for answer in answers:
        np.testing.assert_array_equal(answer, [[[10, 102, 20, 203, 30]]])


def test_own_session_options() -> None:
    model = ob.use_kernels(single_op.model("BiasAddBackward", {"data_format": "NCX"}, [DY]), "numpy")
    options = onnxruntime.SessionOptions()
    assert ob.register_ops(options) is options
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    np.testing.assert_array_equal(np.asarray(session.run(None, {"diff_dst": DY})[0]), [6])
    session = ob.session(model, kernels=None, session_options=options)
    np.testing.assert_array_equal(np.asarray(session.run(None, {"diff_dst": DY})[0]), [6])


def test_session_from_a_path(tmp_path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(single_op.model("BiasAddBackward", {"data_format": "NCX"}, [DY]), path)
    session = ob.session(path, kernels="numpy")
    assert isinstance(session, onnxruntime.InferenceSession)
    np.testing.assert_array_equal(np.asarray(session.run(None, {"diff_dst": DY})[0]), [6])
    with pytest.raises(ob.InvalidArgumentError, match="no such file"):
        ob.session(tmp_path / "missing.onnx")


def test_use_kernels_keeps_the_graph_and_is_idempotent() -> None:
    plain = single_op.model("ConvolutionBackwardData", CONV_DATA | {"dst_shape": [1, 1, 5]}, [DY, W])
    before = plain.SerializeToString(deterministic=True)
    once = ob.use_kernels(plain, "numpy")
    assert plain.SerializeToString(deterministic=True) == before
    assert [n.op_type for n in once.graph.node] == [n.op_type for n in plain.graph.node]
    assert [(f.domain, f.name, f.overload) for f in once.functions] == [
        (ob.DOMAIN, "ConvolutionBackwardData", "without_dst_shape")
    ]
    twice = ob.use_kernels(once, "numpy")
    assert twice.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)


def test_both_presence_patterns_in_one_model() -> None:
    """An optional input makes an overload of its own."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18, "onnx_backprop" : 1]>
        g (float[N,C,I] src, float[N,C,O] dy, int32[K] sizes) => (float[N,C,I] a, float[N,C,I] b) {
            a = onnx_backprop.InterpolateBackward <mode="linear", data_format="NCX"> (src, dy)
            b = onnx_backprop.InterpolateBackward <mode="linear", data_format="NCX"> (src, dy, sizes)
        }""")
    session = ob.session(model, kernels="numpy")
    feeds = {"src": np.zeros((1, 1, 3), f32), "dy": f32([[[1, 2, 3, 4, 5]]])}
    a, b = (np.asarray(x) for x in session.run(None, feeds | {"sizes": np.int32([5])}))
    np.testing.assert_allclose(a, [[[2.2, 5.4, 7.4]]], rtol=1e-6)
    np.testing.assert_array_equal(a, b)
    with pytest.raises(Exception, match="InterpolateBackward: .*input sizes must agree, got 5 and 4"):
        session.run(None, feeds | {"sizes": np.int32([4])})


def test_nodes_inside_subgraphs_and_functions_get_bodies() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18, "onnx_backprop" : 1, "local" : 1]>
        g (bool c, float[N,C,X] dy) => (float[C] y) {
            y = If (c) <
                then_branch = t () => (float[C] a) { a = onnx_backprop.BiasAddBackward <data_format="NCX"> (dy) },
                else_branch = e () => (float[C] b) { b = local.Twice (dy) }>
        }
        <opset_import: ["" : 18, "onnx_backprop" : 1], domain: "local">
        Twice (x) => (y) { s = onnx_backprop.BiasAddBackward <data_format="NCX"> (x)  y = Add (s, s) }""")
    session = ob.session(model, kernels="numpy")
    for condition, expected in ((True, [6]), (False, [12])):
        (got,) = session.run(None, {"c": np.array(condition), "dy": DY})
        np.testing.assert_array_equal(np.asarray(got), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"kernels": "cuda"},
            ob.InvalidArgumentError,
            "expected one of 'onnx', 'numpy', 'native', 'numba', got 'cuda'",
        ),
        ({"op_type": "Nonsense"}, ob.InvalidModelError, "Nonsense 'the_node': no such operator"),
        ({"group": 2}, ob.InvalidModelError, "'the_node': unknown attribute group; it takes strides"),
        ({"strides": None}, ob.InvalidModelError, "'the_node': required attribute strides is missing"),
        ({"data_format": "NHWC"}, ob.InvalidModelError, "attribute data_format: expected one of NXC, NCX, got"),
        ({"groups": 1.5}, ob.InvalidModelError, "attribute groups: expected int, got 1.5"),
        ({"opset": 17}, ob.InvalidModelError, "need opset 18 or later, got a model of opset 17"),
    ],
)
def test_use_kernels_refuses(change: dict[str, object], error: type[Exception], message: str) -> None:
    attributes = CONV_DATA | {"dst_shape": [1, 1, 5]} | change
    kernels, opset = attributes.pop("kernels", "numpy"), attributes.pop("opset", 18)
    op_type = attributes.pop("op_type", "ConvolutionBackwardData")
    given = {k: v for k, v in attributes.items() if v is not None}
    model = single_op.model("ConvolutionBackwardData", given, [DY, W], opset=int(str(opset)))
    model.graph.node[0].op_type = str(op_type)
    with pytest.raises(error, match=message):
        ob.use_kernels(model, str(kernels))


def test_bodies_are_functions_of_the_domain() -> None:
    """A viewer shows the specification's node; its body holds one kernel node."""
    model = ob.use_kernels(single_op.model("BiasAddBackward", {}, [DY]), "numpy")
    assert model.graph.node[0].domain == ob.DOMAIN
    (body,) = model.functions
    assert [n.op_type for n in body.node if n.domain == NUMPY_DOMAIN] == ["BiasAddBackward"]
    assert model.ir_version >= 10
    assert helper.make_opsetid(ob.DOMAIN, 1) in model.opset_import
