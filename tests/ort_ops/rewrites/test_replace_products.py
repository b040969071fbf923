"""Large products of float32 become MatrixProduct, and compute the same; small ones and batches stay."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.walk import all_nodes, attributes_of
from onnx_backprop.ort_ops import native_graph, native_kernels_work
from onnx_backprop.ort_ops.compiler.machine import matrix_tiles
from onnx_backprop.ort_ops.rewrites.replace_products import replace_products
from tests.ort_ops.products.test_matrix_product import options

PRODUCT = "OnnxBackprop_MatrixProduct"
WORK = native_kernels_work() and matrix_tiles()


def model(
    nodes: str, x: str = "float[2,N,96]", w: str = "float[96,80]", more: str = "", y: str = "float"
) -> ModelProto:
    return parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g ({x} x, {w} w{more}) => ({y} y) {{ {nodes} }}""")


def compare(changed: ModelProto, feeds: dict[str, np.ndarray], expected: list) -> None:
    if WORK:
        got = onnxruntime.InferenceSession(changed.SerializeToString(), options()).run(None, feeds)
        np.testing.assert_allclose(np.asarray(got[0]), np.asarray(expected[0]), rtol=0, atol=3e-5)


def test_which_products(rng) -> None:
    turned = "t = Transpose(w) "
    cases = [
        (model("y = MatMul(x, w)"), (0, 0), []),
        (model(f"{turned} y = MatMul(x, t)", w="float[80,96]"), (0, 1), []),
        (model("t = Transpose<perm = [1, 0]>(w) y = Gemm(x, t)", "float[40,96]", "float[80,96]"), (0, 1), []),
        (model("y = Gemm<transB = 1>(x, w)", "float[40,96]", "float[80,96]"), (0, 1), []),
        (model("y = Gemm<transA = 1>(x, w)", "float[70,96]", "float[70,80]"), (1, 0), []),
        (model("t = Transpose(x) y = Gemm<transA = 1>(t, w)", "float[40,96]"), (0, 0), []),
        (model("y = Gemm<transA = 1>(x, w)", "float[?,L]", "float[?,80]", y="float[96,80]"), (1, 0), []),
        (model("y = Gemm(x, w, b)", "float[40,96]", more=", float[80] b"), (0, 0), ["Add"]),
        (
            model(f"{turned} z = MatMul(x, t) y = Add(z, t)", "float[96,96]", "float[96,96]"),
            (0, 1),
            ["Add", "Transpose"],
        ),
        (model("t = Transpose<perm = [1, 0]>(w) u = Transpose<perm = [1, 0]>(t) y = MatMul(x, u)"), (0, 0), []),
        (model("z = MatMul(x, w) y = Transpose(z)", "float[40,96]"), (1, 1), []),
        (model("z = Gemm<transA = 1>(x, w) y = Transpose(z)", "float[70,96]", "float[70,80]"), (1, 0), []),
        (model("z = Gemm<transB = 1>(x, w) y = Transpose(z)", "float[40,96]", "float[80,96]"), (0, 1), []),
        (
            model("z = MatMul(x, w) t = Transpose(z) y = Add(z, t)", "float[96,96]", "float[96,96]"),
            (0, 0),
            ["Add", "Transpose"],
        ),
        (model("z = MatMul(x, w) t = Transpose(z) y = Relu(t)", "float[2,40,96]"), (0, 0), ["Relu", "Transpose"]),
        (model("t = Transpose<perm = [0, 2, 1]>(x) y = MatMul(t, w)", "float[2,96,N]"), (0, 0), ["Transpose"]),
    ]
    for given, sides, left in cases:
        feeds = {}
        for value in given.graph.input:
            dims = [d.dim_value or 96 for d in value.type.tensor_type.shape.dim]
            feeds[value.name] = rng.standard_normal(dims, np.float32)
        expected = onnxruntime.InferenceSession(given.SerializeToString()).run(None, feeds)
        if left == ["Transpose"]:  # whose lengths nobody else states
            given.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, [2, "N", 96]))
        changed = replace_products(given)
        (product,) = (node for node in changed.graph.node if node.op_type == PRODUCT)
        assert (attributes_of(product)["transA"], attributes_of(product)["transB"]) == sides
        assert sorted(n.op_type for n in changed.graph.node if n is not product) == left
        compare(changed, feeds, expected)


def test_what_stays() -> None:
    cases = [
        model("y = MatMul(x, w)", "float[2,8,96]"),  # rows
        model("y = MatMul(x, w)", w="float[96,8]"),
        model("y = MatMul(x, w)", "float[N,96]"),  # a batch's rows
        model("y = Gemm<transA = 1>(x, w)", "float[N,96]", "float[N,80]"),
        model("y = MatMul(x, w)", "float[N,8]", "float[8,80]"),
        model("y = MatMul(x, w)", "float[2,N,96]", "float[2,96,80]"),  # a batch
        model("y = MatMul(x, w)", "float[N,96]", "float[K,L]"),  # of which too little is known
        model("y = MatMul(x, w)", "float16[40,96]", "float16[96,80]", y="float16"),
        model("y = MatMul(x, w)", "double[40,96]", "double[96,80]", y="double"),
        model("y = Gemm<alpha = 2.0>(x, w)", "float[40,96]"),
        model("y = Gemm<beta = 0.5>(x, w, b)", "float[40,96]", more=", float[80] b"),
    ]
    for given in cases:
        before = [node.op_type for node in given.graph.node]
        assert [node.op_type for node in replace_products(given).graph.node] == before


def test_products_inside_a_loop(rng) -> None:
    given = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[40,96] x, float[96,96] w, int64 n, bool more) => (float y) {
          y = Loop (n, more, x) <body = b (int64 i, bool go, float[40,96] a) => (bool on, float[40,96] c) {
            on = Identity(go)  c = MatMul(a, w) }>
        }""")
    feeds = {"x": rng.standard_normal((40, 96), np.float32), "w": rng.standard_normal((96, 96), np.float32) / 10}
    feeds |= {"n": np.array(3), "more": np.array(True)}
    expected = onnxruntime.InferenceSession(given.SerializeToString()).run(None, feeds)
    changed = replace_products(given)
    assert PRODUCT in [node.op_type for node in all_nodes(changed)]
    compare(changed, feeds, expected)


@pytest.mark.skipif(not WORK, reason="this processor has no registers of matrices")
def test_a_step_here_has_them_and_one_for_elsewhere_has_not(rng) -> None:
    given = model("h = MatMul(x, w) y = Relu(h)", "float[64,96]", y="float[64,80]")
    given.graph.input.pop()
    given.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((96, 80), np.float32), "w"))
    graph = ob.training_graph(given, loss="mse", prediction="y", wrt_inputs=["x"])
    models = [
        native_graph.lower(copied(graph.model), "native", [graph.loss], matrices=both).model for both in (True, False)
    ]
    products = [[attributes_of(node) for node in lowered.graph.node if node.op_type == PRODUCT] for lowered in models]
    assert sorted((a["transA"], a["transB"]) for a in products[0]) == [(0, 0), (0, 1), (1, 0)]
    assert products[1] == []
    feeds = {"x": rng.standard_normal((64, 96), np.float32), "target": rng.standard_normal((64, 80), np.float32)}
    results = [ob.session(lowered, kernels=None).run(None, feeds) for lowered in models]
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-5, atol=1e-5)
