"""Models that onnxruntime's optimisers have fused have the outputs and gradients of the models from before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.fused.table import EXPANSIONS
from onnx_backprop.converters.prepare.load import prepare
from onnx_backprop.opset.core.errors import UnsupportedError
from tests.support.adjoint import forward_session, run
from tests.support.fused_checks import one_node
from tests.support.transformer import transformer

RNG = np.random.default_rng(6)
PARTS = {
    "conv": (
        "(float[n, 3, h, 6] x) => (float[n, 4, p, q] y) { c = Conv<pads = [1, 1, 1, 1]>(x, w, b) y = LeakyRelu<alpha = 0.2>(c) }",
        {"w": (4, 3, 3, 3), "b": (4,)},
        (2, 3, 5, 6),
        "FusedConv",
    ),
    "gemm": (
        "(float[n, 6] x) => (float[n, 4] y) { g = Gemm<transB = 1>(x, w, b) y = Tanh(g) }",
        {"w": (4, 6), "b": (4,)},
        (5, 6),
        "FusedGemm",
    ),
    "quick": (
        "(float[n, 6] x) => (float[n, 6] y) { a = Constant<value = float {1.702}>() g = MatMul(x, w) t = Mul(g, a) s = Sigmoid(t) y = Mul(g, s) }",
        {"w": (6, 6)},
        (5, 6),
        "QuickGelu",
    ),
    "root": (
        "(float[n, l, 6] x) => (float[n, l, 6] y) { p = Constant<value = float {2}>() e = Constant<value = float {0.001}>() "
        "x2 = Pow(x, p) m = ReduceMean<axes = [-1]>(x2) me = Add(m, e) r = Sqrt(me) n = Div(x, r) y = Mul(n, w) }",
        {"w": (6,)},
        (2, 3, 6),
        "SimplifiedLayerNormalization",
    ),
    "product": (
        "(float[n, 4, 6] x) => (float[n, 5, 4] y) { a = Constant<value = float {0.3}>() t = Transpose<perm = [0, 2, 1]>(x) m = MatMul(w, t) y = Mul(m, a) }",
        {"w": (5, 6)},
        (2, 4, 6),
        "FusedMatMul",
    ),
}


def optimised(model: ModelProto, folder: Path, level: str = "EXTENDED") -> ModelProto:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimised.onnx")


def part(name: str) -> ModelProto:
    text, weights, _, _ = PARTS[name]
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> part {text}')
    arrays = {n: RNG.standard_normal(shape).astype(np.float32) for n, shape in weights.items()}
    model.graph.initializer.extend(numpy_helper.from_array(array, n) for n, array in arrays.items())
    return model


def fused_in(model: ModelProto) -> set[str]:
    named = {node.op_type for node in model.graph.node if (node.domain or "com.microsoft", node.op_type) in EXPANSIONS}
    return named - {"LayerNormalization"}


def gradients(model: ModelProto, feeds: Mapping[str, np.ndarray], wrt: list[str]) -> dict[str, np.ndarray]:
    session = ob.session(ob.backward(model, wrt=wrt))
    return dict(zip([o.name for o in session.get_outputs()], run(session, dict(feeds)), strict=True))


def same(before: ModelProto, after: ModelProto, feeds: Mapping[str, np.ndarray], wrt: list[str]) -> None:
    expected, got = (gradients(model, feeds, wrt) for model in (before, after))
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=2e-4, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("name", PARTS)
def test_what_onnxruntime_fuses(name: str, tmp_path: Path) -> None:
    model = part(name)
    after = optimised(model, tmp_path)
    assert PARTS[name][3] in fused_in(after)
    x = RNG.standard_normal(PARTS[name][2]).astype(np.float32)
    (y,) = run(ob.session(model), {"x": x})
    kept = {tensor.name for tensor in after.graph.initializer}
    wrt = ["x", *(n for n in PARTS[name][1] if n in kept)]
    same(model, after, {"x": x, "y_grad": RNG.standard_normal(y.shape).astype(np.float32)}, wrt)


IDS = {"ids": RNG.integers(0, 9, (2, 5)), "mask": np.int64([[1] * 5, [1, 1, 1, 0, 0]])}
SEED = {"y_grad": RNG.standard_normal((2, 5, 8)).astype(np.float32)}


def test_a_transformer_that_a_session_has_optimised(tmp_path: Path) -> None:
    model = transformer()
    after = optimised(model, tmp_path)
    assert {"BiasGelu", "FusedMatMul"} <= fused_in(after)
    kept = {t.name for t in after.graph.initializer} & {t.name for t in model.graph.initializer}
    assert len(kept) > 15
    same(model, after, IDS | SEED, sorted(kept))
    report = ob.check_gradients(after, wrt=["w_q", "gamma1"], feeds=IDS)
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.filterwarnings("ignore")
def test_a_transformer_that_the_transformer_optimizer_has_fused(kind: str, tmp_path: Path) -> None:
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    model = transformer()
    onnx.save(model, tmp_path / "before.onnx")
    settings = {"model_type": kind, "num_heads": 2, "hidden_size": 8, "opt_level": 0}
    optimizer.optimize_model(str(tmp_path / "before.onnx"), **settings).save_model_to_file(str(tmp_path / "after.onnx"))
    after = onnx.load(tmp_path / "after.onnx")
    assert {"SkipLayerNormalization", "BiasGelu"} | ({"Attention"} if kind == "bert" else set()) <= fused_in(after)
    kept = {t.name for t in after.graph.initializer} & {t.name for t in model.graph.initializer}
    assert "words" in kept
    same(model, after, IDS | SEED, sorted(kept))
    assert ob.explain_gradients(after, wrt=sorted(kept)).ok


def test_the_layout_of_an_inference_is_refused_by_name(tmp_path: Path) -> None:
    model = part("conv")
    for tensor in list(model.graph.initializer):  # onnxruntime blocks channels by 8 or 16
        array = np.resize(numpy_helper.to_array(tensor), (64, *tensor.dims[1:])).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 64
    after = optimised(model, tmp_path, "ALL")
    if all(node.domain != "com.microsoft.nchwc" for node in after.graph.node):
        pytest.skip("onnxruntime does not block channels on this processor")
    with pytest.raises(UnsupportedError, match=r"nchwc::Conv .*inference-time layout.*ORT_ENABLE_EXTENDED"):
        ob.backward(after, wrt=["x"])
    assert "inference-time layout" in str(ob.explain_gradients(after, wrt=["x"]))


BRANCHES = """
<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
branches (bool c, float[n, 4] x, float[4] b) => (float[m, 4] y) {{
    t = If (c) <
        then_branch = one () => (float[n, 4] z) {{ s = Add(x, b) {quick} }},
        else_branch = other () => (float[n, 4] z2) {{ {gelu} }}
    >
    {product}
}}
"""
FUSED = {
    "quick": "z = com.microsoft.QuickGelu<alpha = 1.5>(s)",
    "gelu": "z2 = com.microsoft.BiasGelu(x, b)",
    "product": "y = com.microsoft.FusedMatMul<transA = 1>(t, t)",
}
PLAIN = {
    "quick": "k = Constant<value = float {1.5}>() m = Mul(s, k) g = Sigmoid(m) z = Mul(s, g)",
    "gelu": "h = Constant<value = float {0.5}>() o = Constant<value = float {1}>() r = Constant<value = float {0.70710678}>() "
    "s2 = Add(x, b) d = Mul(s2, r) e = Erf(d) e1 = Add(e, o) hs = Mul(s2, h) z2 = Mul(hs, e1)",
    "product": "tt = Transpose<perm = [1, 0]>(t) y = MatMul(tt, t)",
}


@pytest.mark.parametrize("c", [False, True])
def test_inside_a_branch(c: bool) -> None:
    plain, fused = (parser.parse_model(BRANCHES.format(**parts)) for parts in (PLAIN, FUSED))
    feeds = {"x": RNG.standard_normal((3, 4)).astype(np.float32), "b": RNG.standard_normal(4).astype(np.float32)}
    feeds |= {"c": np.array(c), "y_grad": RNG.standard_normal((4, 4)).astype(np.float32)}
    same(plain, fused, feeds, ["x", "b"])


def test_a_refused_form_beside_the_path_does_not_matter() -> None:
    model = parser.parse_model("""
    <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    beside (float[n, 3, 4] x, float[n, 3, 4] frozen, float[4] w) => (float[n, 3, 4] y) {
        g = com.microsoft.SkipLayerNormalization<of_tomorrow = 1>(frozen, frozen, w)
        y = Mul(x, g)
    }
    """)
    gradient = ob.backward(model, wrt=["x"])
    assert any(node.op_type == "SkipLayerNormalization" for node in gradient.graph.node)
    with pytest.raises(UnsupportedError, match="'of_tomorrow' is not handled"):
        ob.backward(model, wrt=["frozen"])


def test_what_stands_for_a_node_is_explained_under_its_name() -> None:
    model = parser.parse_model("""
    <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    named (float[n, 4] x) => (float[n, 4] y) { [activation] y = com.microsoft.FastGelu(x) }
    """)
    explanation = ob.explain_gradients(model)
    assert explanation.ok
    assert all(node.node.startswith("activation/") for node in explanation.nodes)
    assert {"Tanh-13", "Mul-14"} <= {node.op for node in explanation.nodes}


def test_a_rank_that_nobody_knows_is_asked_for() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1, "elsewhere": 1]>
    ranks (float[n, 4] x, float[n, 4] w) => (float[p, q] y) {
        u = elsewhere.Unknown(x)
        y = com.microsoft.FusedMatMul<transA = 1>(u, w)
    }
    """
    model = parser.parse_model(text)
    with pytest.raises(UnsupportedError, match="number of axes of 'u' must be known to be transposed"):
        ob.backward(model, wrt=["w"])
    model.graph.value_info.append(helper.make_tensor_value_info("u", TensorProto.FLOAT, ["n", 4]))
    after = prepare(model)  # the declared rank is believed where inference finds none
    assert "FusedMatMul" not in {node.op_type for node in after.graph.node}


def test_every_operator_that_is_written_out_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "fused.md").read_text()
    assert not [op_type for _, op_type in EXPANSIONS if op_type not in page]


@pytest.mark.parametrize(
    ("op_type", "way"),
    [
        ("QLinearAdd", r"ob\.dequantize"),
        ("QAttention", r"ob\.dequantize"),
        ("DynamicQuantizeLSTM", r"ob\.dequantize"),
        ("QOrderedMatMul", "Differentiate"),
        ("SparseAttention", "Export"),
    ],
)
def test_what_stays_refused_says_what_to_do(op_type: str, way: str) -> None:
    model = parser.parse_model(f"""
    <ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    refused (float[n, 4] x) => (float[n, 4] y) {{ [it] y = com.microsoft.{op_type}(x) }}
    """)
    with pytest.raises(UnsupportedError, match=rf"com.microsoft::{op_type} \(.*{way}.*'it'"):
        ob.backward(model, wrt=["x"])


@pytest.mark.filterwarnings("ignore:.* numbers of the file are trained")
def test_scales_and_tables_of_rotations_are_not_trained_unless_named() -> None:
    arrays = {"w": RNG.integers(0, 256, (6, 2, 8)).astype(np.uint8), "s": np.ones((6, 2), np.float32)}
    feeds = {"x": np.ones((3, 32), np.float32), **arrays, "z": 7.5 * np.ones((6, 2), np.float32), "g": None}
    feeds["b"] = RNG.standard_normal(6).astype(np.float32)
    model = one_node("MatMulNBits", feeds, constants=["w", "s", "z", "b"], K=32, N=6, block_size=16)
    assert set(ob.training_graph(model, loss="mse").parameters) == {"b"}
    assert set(ob.training_graph(model, loss="mse", trainable=["s", "b"]).parameters) == {"s", "b"}
    feeds = {"q": arrays["w"].reshape(6, 16), "ids": np.int64([[0, 1]]), "s": np.ones((6, 2), np.float32)}
    model = one_node("GatherBlockQuantized", feeds, constants=["q", "s"], block_size=16)
    model.graph.node.append(helper.make_node("Mul", ["y0", "k"], ["y"]))
    model.graph.output[0].name = "y"
    model.graph.initializer.append(numpy_helper.from_array(RNG.standard_normal(32).astype(np.float32), "k"))
    assert set(ob.training_graph(model, loss="mse").parameters) == {"k"}
    tables = {name: RNG.standard_normal((7, 2)).astype(np.float32) for name in ("cos", "sin")}
    feeds = {"x": np.ones((1, 3, 8), np.float32), "ids": np.int64([[0, 1, 2]]), **tables}
    model = one_node("RotaryEmbedding", feeds, constants=["cos", "sin"])
    model.graph.node.insert(0, helper.make_node("Mul", ["x", "k"], ["x2"]))
    model.graph.node[1].input[0] = "x2"
    model.graph.initializer.append(numpy_helper.from_array(RNG.standard_normal(8).astype(np.float32), "k"))
    assert set(ob.training_graph(model, loss="mse").parameters) == {"k"}


@pytest.mark.parametrize(("op_type", "domain"), [("Gelu", "com.microsoft"), ("Normalizer", "ai.onnx.ml")])
def test_a_domain_that_is_used_and_not_imported(op_type: str, domain: str) -> None:
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    model = one_node(op_type, {"x": x}, domain=domain)
    del model.opset_import[1:]
    run(forward_session(model), {"x": x})  # onnxruntime takes it
    assert ob.explain_gradients(model).ok
