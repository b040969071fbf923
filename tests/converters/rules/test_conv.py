"""Gradients of Conv and ConvTranspose in the cases that need care; tests/conformance/conv.py has the breadth."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, parser

import onnx_backprop as ob
from onnx_backprop.opset import KERNELS
from tests.support.adjoint import Adjoint, adjoint_mismatches, check_adjoints, forward_session, run
from tests.support.checks import evaluate

SEED = 7
each_route = pytest.mark.parametrize("kernels", KERNELS)


def single(op_type: str, shapes: dict[str, list[int]], *, symbolic: bool, opset: int = 18, **attributes) -> ModelProto:
    """One node whose inputs are all graph inputs; with `symbolic`, batch and spatial sizes of X have no number."""
    inputs = []
    for name, shape in shapes.items():
        dims: list[int | str] = list(shape)
        if symbolic and name == "x":
            dims = [f"d{axis}" if axis != 1 else size for axis, size in enumerate(shape)]
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
    node = helper.make_node(op_type, list(shapes), ["y"], name="node", **attributes)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shapes["x"]))
    return helper.make_model(
        helper.make_graph([node], "g", inputs, [output]), opset_imports=[helper.make_opsetid("", opset)], ir_version=8
    )


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_conv_same_with_dilation_is_the_adjoint_of_the_explicit_pads(auto_pad: str) -> None:
    """onnxruntime runs no SAME with dilation; the specification's pads for it are known, so compare with those."""
    x, w = [1, 2, 7], [2, 2, 3]  # EK = 5, stride 2: total = 5 - 1 = 4
    same = single("Conv", {"x": x, "w": w}, symbolic=False, strides=[2], dilations=[2], auto_pad=auto_pad)
    explicit = single("Conv", {"x": x, "w": w}, symbolic=False, strides=[2], dilations=[2], pads=[2, 2])
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal(x).astype(np.float32),
        "w": rng.standard_normal(w).astype(np.float32),
        "y_grad": rng.standard_normal((1, 2, 4)).astype(np.float32),
    }
    gradients = []
    for model in (same, explicit):
        # the backward nodes alone: without the forward nothing needs onnxruntime's Conv
        graph = ob.backward(model, wrt=["x", "w"])
        del graph.graph.node[0]
        del graph.graph.output[0]
        gradients.append([np.asarray(g) for g in ob.session(graph).run(None, feeds)])
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_array_equal(a, b)


def feeds_of(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(SEED)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@each_route
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("opset", [1, 11, 22])
def test_conv_transpose_output_shape(opset: int, symbolic: bool, kernels: str) -> None:
    """The natural output is 9 × 10; the odd cell of the padding moves with auto_pad.

    The text of opset 1 puts it at the other end; onnxruntime does not.
    """
    shapes = {"x": [2, 4, 4, 5], "w": [4, 2, 3, 2], "b": [4]}
    problems = []
    for output_shape, auto_pad in itertools.product(
        ([7, 8], [8, 9], [8, 8], [9, 9], [10, 11], [3, 1]), ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
    ):
        attributes = {"strides": [2, 2], "group": 2, "output_shape": output_shape, "auto_pad": auto_pad}
        model = single("ConvTranspose", shapes, symbolic=symbolic, opset=opset, **attributes)
        problems.append(Adjoint(f"{output_shape} {auto_pad}", model, feeds_of(shapes), list(shapes)))
    check_adjoints(problems, kernels)


@each_route
@pytest.mark.parametrize(
    ("source", "declared"),
    [
        ("float[2,4,4,5] x", ""),
        ("float[N,4,4,5] x", ""),
        ("float[N,4,H,5] x", ""),
        ("float[N,4,4,5] x", "float[N,4,2,8] c, float[N,4,2,8] a"),
        ("float[2,4,4,5] x", "float[2,4] c"),
        ("float[N,4,H,W] x", ""),
    ],
)
def test_output_shape_below_the_input_in_a_network(source: str, declared: str, kernels: str) -> None:
    """Onnx's inference leaves a wrong rank behind, which is not what the rest of the network is told."""
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g ({source}, float[4,4,3,2] w, float[4,2,1] v) => (float[a,b,c,d] y) <{declared}> {{
            [node] c = ConvTranspose <strides = [2, 2], output_shape = [2, 8]> (x, w)
            a = Mul (c, c)
            y = Mul (a, v)
        }}""")
    feeds = feeds_of({"x": [2, 4, 4, 5], "w": [4, 4, 3, 2], "v": [4, 2, 1]})
    assert not adjoint_mismatches(model, feeds, ["v"], kernels=kernels)
    twin = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[2,4,4,5] x, float[4,4,3,2] w, float[4,2,1] v) => (float[a,b,c,d] y) {
            [node] c = ConvTranspose <strides = [2, 2], pads = [4, 1, 3, 1]> (x, w)
            a = Mul (c, c)
            y = Mul (a, v)
        }""")
    both = [gradients_of(m, feeds, ["x", "w", "v"], kernels) for m in (model, twin)]
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def gradients_of(model: ModelProto, feeds: dict[str, np.ndarray], wrt: list[str], kernels: str) -> list[np.ndarray]:
    """The forward's outputs and the gradients, for a dy that depends on the output's shape alone."""
    (y,) = run(forward_session(model), feeds)
    dy = np.random.default_rng(SEED).standard_normal(y.shape).astype(np.float32)
    session = ob.session(ob.backward(model, wrt=wrt, kernels=kernels), kernels=None)
    return [np.asarray(value) for value in session.run(None, feeds | {"y_grad": dy})]


@each_route
@pytest.mark.parametrize("declared", [[1, 3, 9, 9], [1, 3, None, None], [1, 3, 8, 8]])
def test_same_with_output_padding_follows_the_run(declared: list[int | None], kernels: str) -> None:
    """4 · 2 = 8 cells are made by onnxruntime; onnx's inference says 9, and models are saved with what it says."""
    shapes = {"x": [1, 2, 4, 4], "w": [2, 3, 3, 3]}
    attributes = {"strides": [2, 2], "output_padding": [1, 1], "auto_pad": "SAME_LOWER"}
    model = single("ConvTranspose", shapes, symbolic=False, **attributes)
    model.graph.node[0].output[0] = "c"
    model.graph.node.append(helper.make_node("Identity", ["c"], ["y"]))
    model.graph.value_info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, declared))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, declared))
    graph = ob.backward(model, wrt=["x", "w"], kernels=kernels)
    (seed,) = [i for i in graph.graph.input if i.name == "y_grad"]
    assert [d.dim_value for d in seed.type.tensor_type.shape.dim] == [1, 3, 8, 8]
    assert not adjoint_mismatches(model, feeds_of(shapes), list(shapes), kernels=kernels)
    assert model.graph.node[0].attribute[-1].name != "pads", "the given model stays what it is"


@each_route
@pytest.mark.parametrize("attributes", [{"auto_pad": "SAME_UPPER"}, {"output_shape": [6, 9]}, {"output_shape": [8, 3]}])
def test_kernel_lengths_of_the_run(attributes: dict[str, object], kernels: str) -> None:
    shapes = {"x": [2, 2, 3, 4], "w": [2, 3, 3, 2], "b": [3]}
    model = single("ConvTranspose", shapes, symbolic=True, strides=[2, 2], dilations=[1, 2], **attributes)
    model.graph.input[1].CopyFrom(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 3, "kh", "kw"]))
    assert not adjoint_mismatches(model, feeds_of(shapes), list(shapes), kernels=kernels)


RANKS_OF_THE_RUN = [
    ("Conv", {"pads": [-1, 0, 2, -2]}),
    ("Conv", {"pads": [1, -2, -1, 1], "strides": [2, 2]}),
    ("ConvTranspose", {"pads": [-1, 0, 2, -2], "strides": [2, 1]}),
    ("ConvTranspose", {"pads": [1, -2, -1, 1], "strides": [2, 2], "output_padding": [1, 0]}),
    ("ConvTranspose", {"output_shape": [2, 2, 9, 8], "strides": [2, 2], "pads": [-1, 0, 0, 0]}),
    ("Conv", {"auto_pad": "SAME_LOWER", "strides": [2, 1]}),
    ("ConvTranspose", {"auto_pad": "SAME_LOWER", "strides": [2, 1], "output_padding": [1, 0]}),
]


@each_route
def test_ranks_of_the_run(kernels: str) -> None:
    """Where nobody knows the ranks beforehand, onnxruntime runs negative pads and an output_shape of full rank."""
    text = """
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[2,2,5,6] x, float[2,2,3,2] w, int64[a] xs, int64[b] ws) => (float[c,d,e,f] y) {
            xh = Reshape (x, xs)
            wh = Reshape (w, ws)
        }"""
    shapes = {"x": [2, 2, 5, 6], "w": [2, 2, 3, 2]}
    feeds = feeds_of(shapes) | {f"{name}s": np.array(shape, np.int64) for name, shape in shapes.items()}
    problems = []
    for op_type, attributes in RANKS_OF_THE_RUN:
        model = parser.parse_model(text)
        model.graph.node.append(helper.make_node(op_type, ["xh", "wh"], ["y"], name="node", **attributes))
        problems.append(Adjoint(f"{op_type} {attributes}", model, feeds, ["x", "w"]))
    check_adjoints(problems, kernels)


@each_route
def test_a_dy_of_another_shape_fails_where_the_run_finds_the_pads(kernels: str) -> None:
    model = single("ConvTranspose", {"x": [1, 2, 6, 6], "w": [2, 2, 3, 3]}, symbolic=True, output_shape=[8, 8])
    for value in model.graph.output:
        value.CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, "h", "w"]))
    graph = ob.backward(model, wrt=["x", "w"], kernels=kernels)
    (seed,) = [i for i in graph.graph.input if i.name == "y_grad"]
    for dim in seed.type.tensor_type.shape.dim:
        dim.dim_param = "any" + dim.dim_param
    session = ob.session(graph, kernels=None)
    feeds = feeds_of({"x": [1, 2, 6, 6], "w": [2, 2, 3, 3]})
    session.run(None, feeds | {"y_grad": np.zeros((1, 2, 8, 8), np.float32)})
    for wrong in ((1, 2, 8, 9), (1, 2, 6, 8), (2, 2, 8, 8)):
        with pytest.raises(Exception, match="the gradient of Y has another shape than Y"):
            session.run(None, feeds | {"y_grad": np.zeros(wrong, np.float32)})


def test_only_what_is_wanted_is_computed() -> None:
    """The gradient of an image batch is the costliest and nobody asks for it when training."""
    model = single("Conv", {"x": [1, 2, 5, 5], "w": [3, 2, 3, 3], "b": [3]}, symbolic=False)
    graph = ob.backward(model, wrt=["w"])
    ours = [n.op_type for n in graph.graph.node if n.domain == ob.DOMAIN]
    assert ours == ["ConvolutionBackwardWeights"]


def test_known_shapes_become_attributes_and_symbolic_ones_inputs() -> None:
    for symbolic, inputs in ((False, 2), (True, 3)):
        model = single("Conv", {"x": [1, 2, 5, 5], "w": [3, 2, 3, 3]}, symbolic=symbolic)
        graph = ob.backward(model, wrt=["x"])
        (node,) = [n for n in graph.graph.node if n.domain == ob.DOMAIN]
        assert len(node.input) == inputs
        assert ("dst_shape" in {a.name for a in node.attribute}) is not symbolic


@pytest.mark.parametrize(
    ("op_type", "attributes", "error", "message"),
    [
        ("Conv", {"pads": [1, 1, 1]}, ob.InvalidModelError, "attribute pads: expected 4 values >= 0, got [1, 1, 1]"),
        ("Conv", {"pads": [0, 0, -1, 0]}, ob.InvalidModelError, "attribute pads: expected 4 values >= 0"),
        (
            "Conv",
            {"strides": [1, 0]},
            ob.InvalidModelError,
            "attribute 'strides': expected numbers from 1 to 2147483648, got [1, 0]",
        ),
        (
            "Conv",
            {"dilations": [1, -2]},
            ob.InvalidModelError,
            "attribute 'dilations': expected numbers from 1 to 2147483648, got [1, -2]",
        ),
        ("Conv", {"auto_pad": "SAME"}, ob.InvalidModelError, "attribute auto_pad: expected one of NOTSET"),
        (
            "Conv",
            {"auto_pad": "SAME_UPPER", "pads": [1, 1, 1, 1]},
            ob.InvalidModelError,
            "attribute pads: expected none beside auto_pad SAME_UPPER",
        ),
        ("Conv", {"kernel_shape": [3, 2]}, ob.InvalidModelError, "attribute kernel_shape: expected W's spatial shape"),
        ("Conv", {"group": 3}, ob.ShapeError, "groups (3) × channels per group of weights"),
        (
            "ConvTranspose",
            {"output_padding": [2, 0], "strides": [2, 2]},
            ob.UnsupportedAttributeError,
            "ConvTranspose 'node': the gradient handles output_padding below the stride [2, 2]; got [2, 0]",
        ),
        ("ConvTranspose", {"output_padding": [1]}, ob.InvalidModelError, "output_padding: expected 2 values >= 0"),
        (
            "ConvTranspose",
            {"output_shape": [40, 40]},
            ob.UnsupportedAttributeError,
            "the gradient handles output_shape within one stride of the natural output",
        ),
    ],
)
def test_refusals(op_type: str, attributes: dict[str, object], error: type[Exception], message: str) -> None:
    shapes = {"x": [1, 2, 6, 6], "w": [2, 2, 3, 3]}
    with pytest.raises(error, match=re.escape(message)):
        ob.backward(single(op_type, shapes, symbolic=False, **attributes), wrt=["x"])


@pytest.mark.parametrize("stated", ["output_padding", "output_shape"])
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_what_same_means_in_the_domain_is_a_true_adjoint(auto_pad: str, stated: str) -> None:
    """With output_padding, of the forward that pads by max(EK - s, 0); without, of the one told its output_shape."""
    checked = 0
    for s, k, d, length in itertools.product(range(1, 5), range(1, 5), (1, 2), range(1, 10)):
        extent, rng = (k - 1) * d + 1, np.random.default_rng(SEED)
        if stated == "output_padding":
            total, extra, source = max(extent - s, 0), length % s, length
            pads = (total // 2, total - total // 2) if auto_pad == "SAME_UPPER" else (total - total // 2, total // 2)
            padding, out = {"output_padding": [extra]}, s * (source - 1) + extent - total + extra
            forward: dict[str, Any] = padding | {"pads": pads}
        else:
            padding, out, source = {}, length, -(-length // s)
            forward = {"output_shape": [out], "auto_pad": auto_pad}
        shapes = {"x": [2, 2, source], "w": [2, 3, k]}
        model = single("ConvTranspose", shapes, symbolic=False, strides=[s], dilations=[d], **forward)
        feeds = feeds_of(shapes)
        (y,) = run(forward_session(model), feeds)
        assert y.shape == (2, 3, out)
        dy = rng.standard_normal(y.shape).astype(np.float32)
        ours = {"strides": [s], "dilations": [d], "pads_begin": [], "pads_end": [], "auto_pad": auto_pad}
        ours |= padding | {"data_format": "NCX", "weights_format": "IOX"}
        dx = evaluate("ConvTransposeBackwardData", ours, [dy, feeds["w"]])
        weights = ours | {"weights_shape": shapes["w"]}
        dw = evaluate("ConvTransposeBackwardWeights", weights, [feeds["x"], dy])
        weights.pop("output_padding", None)  # the length of x says enough
        np.testing.assert_array_equal(evaluate("ConvTransposeBackwardWeights", weights, [feeds["x"], dy]), dw)
        products = [float((a * b).sum()) for a, b in ((y, dy), (feeds["x"], dx), (feeds["w"], dw))]
        np.testing.assert_allclose(products, products[0], rtol=1e-4, atol=1e-4, err_msg=f"{s} {k} {d} {length}")
        checked += 1
    assert checked == 288


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_four_spatial_axes_are_refused(op_type: str) -> None:
    model = single(op_type, {"x": [1, 2, 3, 3, 3, 3], "w": [2, 2, 1, 2, 1, 2]}, symbolic=False)
    with pytest.raises(ob.UnsupportedError, match=f"{op_type} 'node': expected one to 3 spatial axes, got 4"):
        ob.backward(model, wrt=["x"])


def test_a_rank_that_nothing_tells_is_refused() -> None:
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[n] x, float[m] w, int64[a] xs, int64[b] ws) => (float y) {
            xh = Reshape (x, xs)
            wh = Reshape (w, ws)
            [node] c = Conv (xh, wh)
            y = ReduceSum <keepdims = 0> (c)
        }""")
    with pytest.raises(ob.UnsupportedError, match="Conv 'node': the ranks of X, W and Y are unknown"):
        ob.backward(model, wrt=["x"])


def test_a_run_that_contradicts_the_declared_shapes_fails() -> None:
    """A gradient of another size than the output's is a failed run, not another gradient."""
    model = single("Conv", {"x": [1, 2, 5, 5], "w": [3, 2, 3, 3]}, symbolic=True)
    session = ob.session(ob.backward(model, wrt=["w"]), kernels=None)
    feeds = {"x": np.zeros((1, 2, 5, 5), np.float32), "w": np.zeros((3, 2, 3, 3), np.float32)}
    with pytest.raises(Exception, match="ConvolutionBackwardWeights: diff_dst does not fit src"):
        session.run(None, feeds | {"y_grad": np.zeros((1, 3, 4, 4), np.float32)})


def test_double_models_are_refused_by_type() -> None:
    """The domain's operators take f32, f16 and bf16, and stock onnxruntime has no float64 Conv either."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        g (double[1,1,5] x, double[1,1,3] w) => (double[1,1,3] y) { [c] y = Conv (x, w) }""")
    with pytest.raises(ob.UnsupportedError, match=r"Conv 'c': its gradient is ConvolutionBackwardData.*got float64"):
        ob.backward(model, wrt=["x"])


@pytest.mark.parametrize("element", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_precision_graphs_pass_the_checker(element: int) -> None:
    model = single("Conv", {"x": [1, 2, 5, 5], "w": [3, 2, 3, 3], "b": [3]}, symbolic=True, opset=22)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = element
    graph = ob.backward(model, wrt=["x", "w", "b"])
    onnx.checker.check_model(graph, full_check=True)
    assert {o.type.tensor_type.elem_type for o in graph.graph.output} == {element}
