"""Conv nodes with weights that change become Convolution nodes where those are faster, and compute the same."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, parser

import onnx_backprop as ob
from onnx_backprop.ort_ops.forward_operators import own_operators


def model(
    attributes: str,
    *,
    w: str = "float[32,16,3,3]",
    x: str = "float[N,C,H,W]",
    bias: bool = False,
    initial: str = "",
    opset: int = 18,
) -> ModelProto:
    given = "x, w, b" if bias else "x, w"
    return parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": {opset}]>
        g ({x} x, {w} w, float[32] b) => (float y) {initial}
        {{ y = Conv<{attributes}>({given}) }}""")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("attributes", "weights", "lengths"),
    [
        ("kernel_shape = [3, 3]", (32, 16, 3, 3), (9, 12)),
        ("pads = [1, 0, 2, 1]", (32, 16, 3, 3), (9, 12)),
        ('auto_pad = "VALID"', (32, 16, 3, 3), (9, 12)),
        ("group = 2", (32, 16, 3, 3), (9, 12)),
        ("group = 32, strides = [2, 1], pads = [1, 1, 1, 1]", (32, 1, 3, 3), (9, 12)),
        ("strides = [2, 2], dilations = [1, 2], pads = [3, 3, 2, 3]", (32, 3, 7, 5), (17, 14)),
        ("pads = [2, 1], strides = [2]", (32, 4, 5), (21,)),
        ("group = 16, pads = [1, 0, 1, 1, 0, 1]", (32, 1, 3, 1, 2), (4, 5, 6)),
    ],
)
@pytest.mark.parametrize("kernels", ["numba", "onnx"])
def test_the_same_convolution(rng, attributes: str, weights: tuple, lengths: tuple, bias: bool, kernels: str) -> None:
    groups = int(attributes.partition("group = ")[2].split(",")[0] or 1)
    feeds = {
        "x": rng.standard_normal((2, weights[1] * groups, *lengths), np.float32),
        "w": rng.standard_normal(weights, np.float32),
        "b": rng.standard_normal(32, np.float32),
    }
    shapes = {name: f"float[{','.join(map(str, feeds[name].shape))}]" for name in "xw"}
    plain = model(attributes, bias=bias, **shapes)
    (expected,) = ob.session(plain).run(None, feeds)
    changed = own_operators(model(attributes, bias=bias, **shapes))
    assert [(n.domain, n.op_type) for n in changed.graph.node] == [(ob.DOMAIN, "Convolution")]
    (got,) = ob.session(changed, kernels=kernels).run(None, feeds)
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=0, atol=1e-4, strict=True)


@pytest.mark.parametrize(
    "kept",
    [
        model("strides = [2, 1]", w="float[32,16,1,1]"),
        model('auto_pad = "SAME_UPPER"'),
        model("pads = [1, 1, 1, -1]"),
        model("group = 1", w="float[32,C,3,3]"),
        model("group = 1", w="float16[32,16,3,3]"),
        model("group = 1", opset=17),
        model("group = 1", w="float[1,1,1,1]", initial="<float[1,1,1,1] w = {1.0}>"),
    ],
    ids=["one cell", "same", "negative", "open", "type", "opset", "constant"],
)
def test_others_stay(kept: ModelProto) -> None:
    before = kept.SerializeToString()
    assert own_operators(kept).SerializeToString() == before


def test_constant_weights_stay(rng) -> None:
    """onnxruntime arranges those when it creates the session."""
    graph = model("group = 1")
    weights = rng.standard_normal((32, 16, 3, 3), np.float32)
    graph.graph.initializer.add(name="w", data_type=1, dims=weights.shape, raw_data=weights.tobytes())
    assert [n.op_type for n in own_operators(graph).graph.node] == ["Conv"]
