"""Nodes of ONNX become nodes of our domain where our kernels are faster, and compute the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from onnx import ModelProto, helper, parser

import onnx_backprop as ob
from onnx_backprop.ort_ops.rewrites.replace_operators import replace_operators


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
@pytest.mark.parametrize("kernels", ["native", "onnx"])
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
    changed = replace_operators(model(attributes, bias=bias, **shapes))
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
    assert replace_operators(kept).SerializeToString() == before


def test_constant_weights_stay(rng) -> None:
    """onnxruntime arranges those when it creates the session."""
    graph = model("group = 1")
    weights = rng.standard_normal((32, 16, 3, 3), np.float32)
    graph.graph.initializer.add(name="w", data_type=1, dims=weights.shape, raw_data=weights.tobytes())
    assert [n.op_type for n in replace_operators(graph).graph.node] == ["Conv"]


# ----- BatchNormalization ---------------------------------------------------------------------------------------------

NORM = "epsilon = 0.01, momentum = 0.75, training_mode = 1"


def norm_model(
    attributes: str = NORM,
    *,
    kind: str = "float",
    x: str = "N,C,H,W",
    read: str = "yde",
    statistics: str = "float",
    opset: int = 18,
) -> ModelProto:
    per_channel = ", ".join(f"{kind if name in 'sb' else statistics}[C] {name}" for name in "sbmv")
    outputs = ", ".join(f"{kind if name == 'y' else statistics} {name}" for name in read)
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": {opset}]>
        g ({kind}[{x}] x, {per_channel}) => ({outputs})
        {{ y, d, e = BatchNormalization<{attributes}>(x, s, b, m, v) }}""")
    node = model.graph.node[0]
    names = ["y"] if "training_mode = 1" not in attributes else [name if name in read else "" for name in "yde"]
    node.output[:] = names
    return model


def norm_feeds(rng, shape: Sequence[int]) -> dict[str, np.ndarray]:
    feeds = {"x": (rng.standard_normal(shape) * 2 + 1).astype(np.float32)}
    return feeds | {name: (rng.random(shape[1]) + 0.5).astype(np.float32) for name in "sbmv"}


def operators(model: ModelProto) -> list[tuple[str, str]]:
    return [(node.domain, node.op_type) for node in model.graph.node]


@pytest.mark.parametrize("kernels", ["native", "onnx"])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (3, 70, 4, 5), (2, 3, 2, 3, 4)])
@pytest.mark.parametrize("read", ["yde", "y", "yd", "ye", "d", "de"])
@pytest.mark.parametrize("attributes", [NORM, "training_mode = 1"])
def test_the_same_batch_norm(rng, attributes: str, read: str, shape: tuple[int, ...], kernels: str) -> None:
    """Also where outputs are left out, at which onnxruntime's kernel crashes."""
    feeds, lengths = norm_feeds(rng, shape), ",".join("NCDHW"[: len(shape)])
    whole = ob.session(norm_model(attributes, x=lengths)).run(None, feeds)
    expected = [np.asarray(value) for name, value in zip("yde", whole, strict=True) if name in read]
    changed = replace_operators(norm_model(attributes, x=lengths, read=read))
    assert operators(changed) == [(ob.DOMAIN, "BatchNormForwardTraining")]
    names = changed.graph.node[0].output
    assert len(names) == 5
    assert len({name for name in names if name}) == len(expected) + 2
    got = ob.session(changed, kernels=kernels).run(None, feeds)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=2e-6, atol=4e-6, strict=True)


@pytest.mark.parametrize(
    "kept",
    [
        norm_model("training_mode = 0", read="y"),
        norm_model("epsilon = 0.01", read="y"),
        norm_model(kind="float16"),
        norm_model(kind="float16", statistics="float16"),
        norm_model(kind="double", statistics="double"),
        norm_model(kind="float", statistics="double"),
        norm_model(opset=17),
        norm_model(opset=14),
        norm_model(x="N"),
        norm_model("training_mode = 1, epsilon = -0.01"),
    ],
    ids=["inference", "default", "half", "all half", "double", "double beside", "17", "14", "rank 1", "epsilon"],
)
def test_other_batch_norms_stay(kept: ModelProto) -> None:
    before = kept.SerializeToString()
    assert replace_operators(kept).SerializeToString() == before


def test_an_input_of_unknown_rank_stays() -> None:
    """It may have rank 1, as which onnxruntime runs it with one channel."""
    kept = norm_model()
    kept.graph.input[0].type.tensor_type.ClearField("shape")
    assert operators(replace_operators(kept)) == [("", "BatchNormalization")]


def two_norms(*, same: bool) -> ModelProto:
    """Two BatchNormalization nodes of one input, or of two, with gradients by all of it."""
    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[N,3,4,5] x, float[3] s, float[3] b, float[3] m, float[3] v, float[3] t) => (float[N,3,4,5] z)
        {{
            w = Tanh(x)
            y, d, e = BatchNormalization<{NORM}>(w, s, b, m, v)
            u, f, h = BatchNormalization<training_mode = 1, epsilon = 0.5>({"w" if same else "y"}, t, b, m, v)
            z = Mul(u, y)
        }}""")
    derived = ob.backward(model, wrt=["x", "s", "b", "t"])
    derived.graph.value_info.extend(helper.make_tensor_value_info(name, 1, ["N", 3, 4, 5]) for name in "wy")
    return derived


@pytest.mark.parametrize("same", [True, False])
def test_gradients_read_the_statistics_and_agree(rng, same: bool) -> None:
    plain = two_norms(same=same)
    changed = replace_operators(ModelProto.FromString(plain.SerializeToString()))
    nodes = [node for node in changed.graph.node if node.op_type.startswith("BatchNorm")]
    forward = {n.output[0]: n for n in nodes if n.op_type == "BatchNormForwardTraining"}
    backward = [n for n in nodes if n.op_type == "BatchNormTrainingBackward"]
    assert (len(nodes), set(forward), len(backward)) == (4, {"y", "u"}, 2)
    gammas = {n.input[3]: n.input[0] for n in forward.values()}
    for node in backward:
        of = [n for n in forward.values() if n.input[0] == node.input[0]]
        assert list(node.input[2:4]) in [list(n.output[3:]) for n in of]
        assert gammas[node.input[4]] == node.input[0]
    feeds = norm_feeds(rng, (6, 3, 4, 5)) | {"t": np.array([1, -2, 0.5], np.float32)}
    seeds = [v.name for v in plain.graph.input if v.name not in feeds]
    feeds |= {name: rng.standard_normal((6, 3, 4, 5)).astype(np.float32) for name in seeds}
    for kernels in ("native", "onnx"):
        expected = ob.session(plain, kernels=kernels).run(None, feeds)
        got = ob.session(changed, kernels=kernels).run(None, feeds)
        assert len(got) == 5
        for one, other in zip(got, expected, strict=True):
            one, other = np.asarray(one), np.asarray(other)
            scale = float(np.abs(other).max())
            np.testing.assert_allclose(one, other, rtol=0, atol=4e-6 * max(1, scale), strict=True)


@pytest.mark.parametrize(("layout", "given", "reads"), [("NCX", "", True), ("NXC", "", False), ("NCX", "m", False)])
def test_another_gradient_of_the_same_values_keeps_what_it_reads(layout: str, given: str, reads: bool) -> None:
    """One of other channels, or that was given a statistic."""
    model = parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["": 18, "{ob.DOMAIN}": 1]>
        g (float[3,3] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float y, float dx)
        {{
            y = BatchNormalization<{NORM}>(x, s, b, m, v)
            dx = {ob.DOMAIN}.BatchNormTrainingBackward<epsilon = 0.01, data_format = "{layout}">(x, y, {given})
        }}""".replace(", )", ")")
    )
    before = list(model.graph.node[1].input)
    forward, backward = replace_operators(model).graph.node
    assert list(backward.input) == ([*before, *forward.output[3:]] if reads else before)


def test_names_that_are_taken_stay_whose_they_are(rng) -> None:
    model = norm_model()
    taken = model.graph.node.add(op_type="Neg", input=["v"], output=["y/mean"])
    model.graph.output.add(name=taken.output[0]).type.tensor_type.elem_type = 1
    feeds = norm_feeds(rng, (2, 3, 4, 5))
    got = ob.session(replace_operators(model), kernels="native").run(["y/mean"], feeds)
    np.testing.assert_array_equal(np.asarray(got[0]), -feeds["v"])
