"""Sums in stages: exact to 1e-6 over millions of elements, where onnxruntime's own are not, and what they leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.ir_models import to_ir, to_proto
from onnx_backprop.converters.training.rewrites.sums import stage_sums
from onnx_backprop.opset import KERNELS
from onnx_backprop.opset.graphs.names import used_names
from tests.support.numeric import outputs

losses = ob.losses
SHAPE = (4, 4, 512, 512)  # 2²² elements, 2²⁰ positions
WEIGHT = np.array([0.1, 1, 2, 4])


def scaled(symbolic: bool, dtype: type = np.float32) -> ModelProto:
    """y = z · s with s = 1."""
    shape = "N,4,H,W" if symbolic else ",".join(map(str, SHAPE))
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]> g (float[{shape}] z) => (float[{shape}] y) {{ y = Mul(z, s) }}"""
    )
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 1, 1, 1), dtype), "s"))
    return model


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    z = rng.random(SHAPE, np.float32) * np.float32(0.9) + np.float32(0.05)
    labels = rng.choice(4, p=[0.9, 0.05, 0.03, 0.02], size=(4, 512, 512))
    return z, (rng.random(SHAPE) < 0.1).astype(np.float32), labels


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def picked(z: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.take_along_axis(z, labels[:, None], axis=1)[:, 0]


def weighted(z: np.ndarray, labels: np.ndarray) -> float:
    w = WEIGHT[labels]
    return float((-w * picked(log_softmax(z), labels)).sum() / w.sum())


def kept(z: np.ndarray, labels: np.ndarray) -> float:
    return float(-picked(log_softmax(z), labels)[labels != 3].mean())


def smooth(z: np.ndarray, labels: np.ndarray) -> float:
    log_p, w = log_softmax(z), WEIGHT[labels]
    even = -(log_p * WEIGHT[:, None, None]).sum(axis=1)
    return float((0.9 * -w * picked(log_p, labels) + 0.1 / 4 * even).sum() / w.sum())


def nll(z: np.ndarray, labels: np.ndarray) -> float:
    w = WEIGHT[labels]
    return float((-w * np.log(picked(z, labels))).sum() / w.sum())


def dice(z: np.ndarray, t: np.ndarray) -> float:
    over = (2, 3)
    return float(np.mean(1 - (2 * (z * t).sum(over) + 1) / (z.sum(over) + t.sum(over) + 1)))


CASES: dict[str, tuple[Any, Any]] = {
    "mse": (losses.MSE(), lambda z, t: np.mean((z - t) ** 2)),
    "mse_sum": (losses.MSE(reduction="sum"), lambda z, t: np.sum((z - t) ** 2)),
    "bce": (losses.BCE(), lambda z, t: -np.mean(t * np.log(z) + (1 - t) * np.log(1 - z))),
    "dice": (losses.Dice(), dice),
    "kl_div": (losses.KLDivergence(form="probabilities"), lambda z, t: np.sum(-t * np.log(z)) / len(z)),
    "cross_entropy": (losses.SoftmaxCrossEntropy(), lambda z, t: -picked(log_softmax(z), t).mean()),
    "cross_entropy_sum": (losses.SoftmaxCrossEntropy(reduction="sum"), lambda z, t: -picked(log_softmax(z), t).sum()),
    "cross_entropy_weight": (losses.SoftmaxCrossEntropy(weight=WEIGHT), weighted),
    "cross_entropy_ignore": (losses.SoftmaxCrossEntropy(ignore_index=3), kept),
    "cross_entropy_smooth": (losses.SoftmaxCrossEntropy(weight=WEIGHT, label_smoothing=0.1), smooth),
    "nll": (losses.NLL(weight=WEIGHT), nll),
    "callable": (
        lambda op, o: op.ReduceMean(op.Mul(o["y"], op.input("target", o["y"])), keepdims=0),
        lambda z, t: np.mean(z * t),
    ),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_value(name: str, symbolic: bool) -> None:
    loss, formula = CASES[name]
    z, t, labels = data()
    graph = ob.training_graph(scaled(symbolic), loss=loss)
    target = labels if graph.target == "labels" else t
    (value,) = ob.session(graph.model).run([graph.loss], {"z": z, str(graph.target): target})
    expected = formula(z.astype(np.float64), target if target is labels else t.astype(np.float64))
    np.testing.assert_allclose(np.asarray(value), expected, rtol=5e-7)


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_route(kernels: str) -> None:
    """The numerator, the sum of the weights, and the gradients, which are all divided by that sum."""
    z, _, labels = data()
    model = scaled(symbolic=True)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones(SHAPE, np.float32), "s"))
    graph = ob.training_graph(model, loss=losses.SoftmaxCrossEntropy(weight=WEIGHT), trainable=["s"], kernels=kernels)
    loss, gradient = ob.session(graph.model).run(["loss", "s_grad"], {"z": z, "labels": labels})
    wide, w = z.astype(np.float64), WEIGHT[labels]
    np.testing.assert_allclose(np.asarray(loss), weighted(wide, labels), rtol=5e-7)
    onehot = np.moveaxis(np.eye(4)[labels], -1, 1)
    expected = (w / w.sum())[:, None] * (np.exp(log_softmax(wide)) - onehot) * wide
    np.testing.assert_allclose(np.asarray(gradient), expected, atol=1e-6 * np.abs(expected).max(), rtol=0)


def test_onnxruntime_alone_is_not_exact() -> None:
    """If this fails, stages are not needed any more."""
    z, _, labels = data()
    node = helper.make_node("SoftmaxCrossEntropyLoss", ["z", "t", "w"], ["loss"], reduction="mean")
    values = [helper.make_tensor_value_info("z", 1, SHAPE), helper.make_tensor_value_info("t", 7, labels.shape)]
    weight = numpy_helper.from_array(WEIGHT.astype(np.float32), "w")
    graph = helper.make_graph([node], "g", values, [helper.make_tensor_value_info("loss", 1, [])], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    got = outputs(model, {"z": z, "t": labels})["loss"]
    assert abs(got / weighted(z.astype(np.float64), labels) - 1) > 1e-5


def staged_model(text: str, **more: Any) -> ModelProto:
    model = to_ir(parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}'))
    stage_sums(model.graph, more.pop("kept", ()), more.pop("losses", ()))
    return to_proto(model)


SUMS = {
    "no axes": "y = ReduceSum<keepdims = 0>(x)",
    "all axes": "axes = Constant<value_ints = [0, -1]>() y = ReduceMean<keepdims = 0>(x, axes)",
    "kept": "y = ReduceSum(x)",
    "squares": "y = ReduceSumSquare<keepdims = 0>(x)",
    "norm": "y = ReduceL2<keepdims = 0>(x)",
    "L1": "y = ReduceL1<keepdims = 0>(x)",
}


@pytest.mark.parametrize("lengths", ["64, 100", "N, 100", "N, M", "N, 7"])
@pytest.mark.parametrize("name", SUMS)
def test_stages_give_the_same(rng, name: str, lengths: str) -> None:
    rank = "1, 1" if name == "kept" else ""
    text = f"g (float[{lengths}] x) => (float[{rank}] y) {{ {SUMS[name]} }}"
    model = staged_model(text)
    x = rng.standard_normal((64, 7 if lengths.endswith("7") else 100), np.float32)
    plain = parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
    assert len(model.graph.node) > len(plain.graph.node)
    got, expected = outputs(model, {"x": x})["y"], outputs(plain, {"x": x})["y"]
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "g (float[8, 100] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }",
        "g (double[N, 100] x) => (double y) { y = ReduceSum<keepdims = 0>(x) }",
        "g (float[N, 100] x) => (float[N] y) { axes = Constant<value_ints = [1]>() y = ReduceSum<keepdims = 0>(x, axes) }",
        "g (float[N, M] x) => (float[N, M] y) { y = ReduceSum<noop_with_empty_axes = 1>(x) }",
        "g (float[N, M] x, int64[K] axes) => (float[A, B] y) { y = ReduceSum(x, axes) }",
        "g (float[N, M] x) => (float[1, 1] y) { y = ReduceMax(x) }",
    ],
)
def test_left_alone(text: str) -> None:
    assert not [node for node in staged_model(text, losses=["y"]).graph.node if node.metadata_props]


def test_what_the_model_has_stays() -> None:
    text = "g (float[N, 100] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }"
    assert [node.op_type for node in staged_model(text, kept=["y"]).graph.node] == ["ReduceSum"]


def test_branches_and_unnamed_nodes(rng) -> None:
    """Norms of gradients are computed in a branch; nodes have no names there."""
    model = staged_model("""
        g (float[N, 100] x, bool c) => (float y) {
            y = If(c) <then_branch = t () => (float a) { a = ReduceL2<keepdims = 0>(x) },
                       else_branch = e () => (float b) { b = ReduceSum<keepdims = 0>(x) }> }""")
    branches = [attribute.g.node for attribute in model.graph.node[0].attribute]
    assert all(any(node.op_type == "Cast" for node in nodes) for nodes in branches)
    x = rng.standard_normal((64, 100), np.float32)
    for c, expected in ((True, np.sqrt((x.astype(float) ** 2).sum())), (False, x.astype(float).sum())):
        np.testing.assert_allclose(outputs(model, {"x": x, "c": np.array(c)})["y"], expected, rtol=1e-5)


def test_names_stay_unique() -> None:
    graph = ob.training_graph(scaled(symbolic=True), loss=losses.SoftmaxCrossEntropy(weight=WEIGHT, ignore_index=1))
    names = [node.name for node in graph.model.graph.node]
    assert len(names) == len(set(names))
    assert isinstance(to_ir(graph.model), ir.Model)
    assert len(used_names(graph.model.graph)) > len(names)
