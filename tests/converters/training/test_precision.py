"""Mixed precision: what is rounded, what is stored, that evaluation is float32, and what is refused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, NodeProto, TensorProto, checker, numpy_helper, parser

import onnx_backprop as ob
from models import resnet, transformer, unet_resize
from onnx_backprop.converters.training.rewrites.precision import PRECISIONS
from onnx_backprop.converters.training.update.loss_scale import INITIAL
from tests.support.training_models import classifier

EPSILON = {"bf16": 2.0**-8, "fp16": 2.0**-11}
RNG = np.random.default_rng(7)


def model(text: str, **shapes: tuple[int, ...]) -> ModelProto:
    result = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
    rng = np.random.default_rng(5)
    for name, shape in shapes.items():
        result.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return result


def gradients(graph: ob.TrainingGraph, feeds: dict[str, np.ndarray], **more: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(graph.model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [graph.loss, *graph.parameters.values()]
    results = map(np.asarray, session.run(names, {**feeds, **more}))
    return dict(zip(["loss", *graph.parameters], results, strict=True))


def _image(size: int) -> np.ndarray:
    return RNG.standard_normal((2, 1, size, size)).astype(np.float32)


CASES = {
    "U-Net": (unet_resize.build(features=4, levels=2), _image(16), RNG.random((2, 1, 16, 16)).astype("f"), "mse"),
    "ResNet": (
        resnet.build(features=4),
        RNG.standard_normal((4, 3, 16, 16)).astype(np.float32),
        RNG.integers(0, 10, 4),
        "softmax_cross_entropy",
    ),
    "transformer": (
        transformer.build(),
        RNG.standard_normal((3, 7, 6)).astype(np.float32),
        RNG.integers(0, 5, 3),
        "softmax_cross_entropy",
    ),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [("U-Net", "bf16"), ("U-Net", "fp16"), ("ResNet", "bf16"), ("transformer", "bf16"), ("transformer", "fp16")],
)
def test_gradients_are_those_of_float32_within_the_half_types_epsilon(name: str, precision: str) -> None:
    forward, x, target, loss = CASES[name]
    exact, mixed = (ob.training_graph(forward, loss=loss, precision=p) for p in (None, precision))
    checker.check_model(mixed.model, full_check=True)
    assert mixed.target is not None
    feeds = {mixed.inputs[0]: x, mixed.target: target}
    right, got = gradients(exact, feeds), gradients(mixed, feeds)
    rng = np.random.default_rng(3)
    moved = {
        name: (value * (1 + EPSILON[precision] * rng.uniform(-1, 1, value.shape))).astype(np.float32)
        for name, value in exact.initial_values().items()
    }

    def away(other: dict[str, np.ndarray]) -> float:
        return float(np.sqrt(sum(((other[p] - right[p]) ** 2).sum() for p in exact.parameters)))

    # as far as the gradient itself moves when the weights do by as much, through Relu and small batches
    assert 0 < away(got) <= 4 * away(gradients(exact, feeds, **moved))
    assert all(got[p].dtype == np.float32 for p in exact.parameters)
    assert abs(got["loss"] - right["loss"]) <= 4 * EPSILON[precision] * abs(right["loss"])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_operands_are_rounded_and_sums_are_not(precision: str) -> None:
    forward = model("g (float[N,4] x) => (float[N,3] y) { y = MatMul(x, w) }", w=(4, 3))
    graph = ob.training_graph(
        forward, loss=lambda op, outputs: op.ReduceSum(outputs["y"], keepdims=0), precision=precision
    )
    x = RNG.standard_normal((5, 4)).astype(np.float32)
    got = gradients(graph, {"x": x})
    half = PRECISIONS[precision].numpy()

    def rounded(array: np.ndarray) -> np.ndarray:
        return array.astype(half).astype(np.float32)

    np.testing.assert_allclose(got["loss"], (rounded(x) @ rounded(graph.initial_values()["w"])).sum(), rtol=1e-5)
    np.testing.assert_allclose(got["w"], rounded(x).T @ np.ones((5, 3), np.float32), rtol=1e-6)
    assert np.abs(got["w"] - x.T @ np.ones((5, 3), np.float32)).max() > 1e-5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_a_product_the_bits_are_those_of_float32(precision: str) -> None:
    forward = model("g (float[N,4] x) => (float[N,4] y) { a = Mul(x, w) b = Exp(a) y = Add(b, v) }", w=(1, 4), v=(4,))
    x, target = RNG.standard_normal((2, 5, 4)).astype(np.float32)
    states = []
    for chosen in (None, precision):
        graph = ob.training_graph(forward, loss="mse", optimizer="adamw", precision=chosen, trainable=["w", "v"])
        trainer = ob.Trainer(graph, learning_rate=0.1)
        for _ in range(3):
            trainer.step(x=x, target=target)
        states.append(trainer.parameters())
    for name, value in states[0].items():
        np.testing.assert_array_equal(states[1][name], value)


def live(graph: ob.TrainingGraph) -> Counter[str]:
    """How many values of each type, of 1000 elements and more, the backward pass reads of the forward pass."""
    declared = {v.name: v.type.tensor_type for v in (*graph.model.graph.value_info, *graph.model.graph.output)}
    names = [node.name for node in graph.model.graph.node]
    first = next(n for n, name in enumerate(names) if "_grad" in name)
    written = {y for node in graph.model.graph.node[:first] for y in node.output}
    read = {x for node in graph.model.graph.node[first:] for x in node.input if x in written}
    kinds: dict[int, str] = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "half", TensorProto.BFLOAT16: "half"}
    sizes = {x: np.prod([d.dim_value for d in declared[x].shape.dim]) for x in read if x in declared}
    return Counter(kinds.get(declared[x].elem_type, "other") for x, size in sizes.items() if size >= 1000)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_the_backward_pass_reads_is_stored_in_half(precision: str) -> None:
    forward, x, _, _ = CASES["U-Net"]
    forward = ModelProto.FromString(forward.SerializeToString())
    for value in forward.graph.input:
        for n, length in enumerate(x.shape):
            value.type.tensor_type.shape.dim[n].dim_value = length
    del forward.graph.value_info[:]
    exact, mixed = (ob.training_graph(forward, loss="mse", precision=p) for p in (None, precision))
    plain, halved = live(exact), live(mixed)
    assert plain["float32"] > 5
    assert not plain["half"]
    assert halved["half"] > 5
    assert not halved["float32"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_exports_keep_no_cast_to_half_for_a_shape(precision: str) -> None:
    """Of a rounded value whose shape the model itself asks for."""
    source = model(
        """g (float[N, 3, H, W] x) => (float[N, 4, H, W] y) {
            a = Conv<pads = [1, 1, 1, 1]>(x, w1) b = Relu(a) c = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(b, w2)
            s = Shape<start = 2, end = 4>(b) n = Shape<start = 0, end = 2>(c) l = Concat<axis = 0>(n, s)
            r = Resize<mode = "linear">(c, , , l) y = Conv(r, w3) }""",
        w1=(8, 3, 3, 3),
        w2=(8, 8, 3, 3),
        w3=(4, 8, 1, 1),
    )
    graph = ob.training_graph(source, loss="mse", optimizer="sgd", precision=precision)
    exported = graph.inference_model()
    assert [node.op_type for node in exported.graph.node] == [node.op_type for node in source.graph.node]
    half = TensorProto.FLOAT16, TensorProto.BFLOAT16
    assert [node for node in graph.eval_model().graph.node if node.op_type == "Cast" and _to(node) in half] == []
    x = RNG.standard_normal((1, 3, 6, 10)).astype(np.float32)
    run = [
        onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for m in (source, exported)
    ]
    np.testing.assert_array_equal(*run)


def _to(node: NodeProto) -> int:
    return next(a.i for a in node.attribute if a.name == "to")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_evaluation_and_export_are_float32_as_the_model_came(precision: str) -> None:
    exact, mixed = (
        ob.training_graph(classifier(), loss="softmax_cross_entropy", optimizer="sgd", training_mode=True, precision=p)
        for p in (None, precision)
    )
    for part in ("inference_model", "eval_model"):
        ours, plain = getattr(mixed, part)(), getattr(exact, part)()
        assert [n.op_type for n in ours.graph.node] == [n.op_type for n in plain.graph.node]
        assert [v.name for v in ours.graph.input] == [v.name for v in plain.graph.input]


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_functions_branches_old_opsets_and_integers(precision: str, inline: bool) -> None:
    text = """
        <ir_version: 8, opset_import: ["": 12, "local": 1]>
        g (int64[N] ids, bool c) => (float[N,3] y) {
            e = Gather(table, ids)
            h = local.dense(e, a)
            z = If(c) <then_branch = t () => (float[N,5] p) { p = Relu(h) },
                       else_branch = f () => (float[N,5] q) { q = Tanh(h) }>
            y = MatMul(z, b)
        }
        <domain: "local", opset_import: ["": 12]> dense (x, w) => (r) { m = MatMul(x, w) r = Sigmoid(m) }
    """
    forward = parser.parse_model(text)
    for name, shape in (("table", (6, 4)), ("a", (4, 5)), ("b", (5, 3))):
        drawn = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
        forward.graph.initializer.append(numpy_helper.from_array(drawn, name))
    exact, mixed = (ob.training_graph(forward, loss="mse", precision=p, inline=inline) for p in (None, precision))
    target = RNG.standard_normal((4, 3)).astype(np.float32)
    for condition in (True, False):
        feeds = {"ids": np.array([1, 5, 1, 0]), "c": np.array(condition), "target": target}
        right, got = gradients(exact, feeds), gradients(mixed, feeds)
        for name in exact.parameters:
            limit = 16 * EPSILON[precision] * np.abs(right[name]).max()
            np.testing.assert_allclose(got[name], right[name], atol=limit, rtol=0)


def test_fp16_without_an_optimizer_has_a_scale_with_a_default() -> None:
    forward = model("g (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w) y = MatMul(h, v) }", w=(4, 4), v=(4, 3))
    graph = ob.training_graph(
        forward, loss=lambda op, o: op.Mul(op.ReduceSum(o["y"], keepdims=0), 1e-9), precision="fp16"
    )
    x = RNG.standard_normal((5, 4)).astype(np.float32)
    right = gradients(
        ob.training_graph(forward, loss=lambda op, o: op.Mul(op.ReduceSum(o["y"], keepdims=0), 1e-9)), {"x": x}
    )
    scaled = gradients(graph, {"x": x})
    assert {t.name: numpy_helper.to_array(t) for t in graph.model.graph.initializer}["loss_scale"] == INITIAL
    plain = gradients(graph, {"x": x}, loss_scale=np.array(1, np.float32))
    for name in graph.parameters:  # 10⁻⁹ is 0 in float16
        assert not plain[name].any()
        np.testing.assert_allclose(scaled[name], right[name], rtol=0.02, atol=1e-3 * np.abs(right[name]).max())


def test_refusals() -> None:
    double = model("g (double[N,4] x) => (double[N,3] y) { y = MatMul(x, w) }")
    double.graph.initializer.append(numpy_helper.from_array(RNG.standard_normal((4, 3)), "w"))
    with pytest.raises(ob.InvalidArgumentError, match="precision: the model has no float32 weights"):
        ob.training_graph(double, loss="mse", precision="bf16")
    forward = model("g (float[N,4] x) => (float[N,3] y) { y = MatMul(x, w) }", w=(4, 3))
    with pytest.raises(ob.InvalidArgumentError, match="precision: expected None or one of 'bf16', 'fp16', got 'half'"):
        ob.training_graph(forward, loss="mse", precision="half")
    for kind in ("float16", "bfloat16"):
        half = model(f"g ({kind}[N,4] x) => ({kind}[N,3] y) {{ y = MatMul(x, w) }}")
        drawn = RNG.standard_normal((4, 3)).astype(PRECISIONS["fp16" if kind == "float16" else "bf16"].numpy())
        half.graph.initializer.append(numpy_helper.from_array(drawn, "w"))
        with pytest.raises(
            ob.InvalidArgumentError, match=f"precision: 'w' has type {kind.upper()}.*from float32 weights"
        ):
            ob.training_graph(half, loss="mse", precision="fp16")
