"""Which BatchNormalizations and Dropouts a training switches, and which statistics it carries on."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, StringStringEntryProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.exporters.torch_metadata import SIGNATURE

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((6, 3, 4)).astype(np.float32)
TARGET = np.zeros((6, 3, 4), np.float32)
HEADER = '<ir_version: 10, opset_import: ["": 18]> g (float[6,3,4] x) => (float[6,3,4] y) '


def _normalised(x: np.ndarray, mean: np.ndarray, var: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    def column(v: np.ndarray) -> np.ndarray:
        return v.reshape(3, 1)

    return (x - column(mean)) / np.sqrt(column(var) + 1e-5) * column(scale) + column(bias)


def _by_batch(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return _normalised(x, x.mean((0, 2)), x.var((0, 2)), scale, bias)


def _two(*, mode: int = 0, affine: bool = True, nodes: tuple[str, str] = ("first", "second")) -> ModelProto:
    """Two BatchNormalizations, `body.…` and `head.…`, with statistics other than those of the data."""
    more = f"training_mode={mode}"
    outputs = ("a, am, av", "y, ym, yv") if mode else ("a", "y")
    weights = "body.weight, body.bias" if affine else "one, zero"
    text = (
        f"{{ one = Constant<value = float[3] {{1, 1, 1}}>() zero = Constant<value = float[3] {{0, 0, 0}}>() "
        f"{outputs[0]} = BatchNormalization<{more}>(x, {weights}, body.running_mean, body.running_var) "
        f"{outputs[1]} = BatchNormalization<{more}>(a, head.weight, head.bias, head.running_mean, head.running_var) }}"
    )
    for name in ("body", "head"):
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            text = text.replace(f"{name}.{leaf}", f"{name}_{leaf}")
    model = parser.parse_model(HEADER + text)
    if affine:
        del model.graph.node[:2]
    else:
        model.producer_name = "pytorch"  # whose files have no parameters as Constants
    names: set[str] = set()
    for node, name in zip(model.graph.node[-2:], nodes, strict=True):
        node.name = name
        for n, value in enumerate(node.input):
            node.input[n] = value.replace("_", ".", 1) if value.startswith(("body_", "head_")) else value
        names.update(value for value in node.input if "." in value)
    for name in sorted(names):
        values = np.abs(RANDOM.standard_normal(3)).astype(np.float32) + 0.5
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def _values(model: ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def _statistics(graph: ob.TrainingGraph) -> set[str]:
    return {name for name in graph.updates if "running" in name}


def _loss(graph: ob.TrainingGraph) -> float:
    return float(ob.Trainer(graph, learning_rate=0.0).step(x=X, target=TARGET))


BODY = {"body.running_mean", "body.running_var"}
HEAD = {"head.running_mean", "head.running_var"}
CHOICES = {
    "frozen": {"frozen": ["body.*"]},
    "frozen by names": {"frozen": ["body.weight", "body.bias"]},
    "not chosen": {"trainable": ["head.*"]},
    "not chosen by names": {"trainable": ["head.weight", "head.bias"]},
}


@pytest.mark.parametrize("nodes", [("first", "second"), ("", ""), ("/a b", "é/:0")], ids=["named", "unnamed", "odd"])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=list(CHOICES))
def test_frozen_nodes_keep_their_statistics(choice: dict[str, list[str]], mode: int, nodes: tuple[str, str]) -> None:
    model = _two(mode=mode, nodes=nodes)
    v = _values(model)
    graph = ob.training_graph(model, loss="mse", optimizer="sgd", training_mode=not mode, **choice)
    assert _statistics(graph) == HEAD
    body = _normalised(X, *(v[f"body.{leaf}"] for leaf in ("running_mean", "running_var", "weight", "bias")))
    expected = float((_by_batch(body, v["head.weight"], v["head.bias"]) ** 2).mean())
    assert _loss(graph) == pytest.approx(expected, rel=1e-5)
    assert graph.settings["frozen_statistics"] == [nodes[0] or "a"]
    assert any("inference mode" in line and (nodes[0] or "a") in line for line in graph.totals())


@pytest.mark.parametrize("mode", [0, 1])
def test_freezing_changes_no_mode_where_that_is_asked_for(mode: int) -> None:
    model = _two(mode=mode)
    v = _values(model)
    graph = ob.training_graph(
        model, loss="mse", optimizer="sgd", training_mode=not mode, frozen=["body.*"], frozen_statistics=False
    )
    assert _statistics(graph) == BODY | HEAD
    body = _by_batch(X, v["body.weight"], v["body.bias"])
    expected = float((_by_batch(body, v["head.weight"], v["head.bias"]) ** 2).mean())
    assert _loss(graph) == pytest.approx(expected, rel=1e-5)
    assert "frozen_statistics" not in graph.settings


def test_one_of_scale_and_bias_freezes_no_statistics() -> None:
    graph = ob.training_graph(_two(), loss="mse", optimizer="sgd", training_mode=True, frozen=["body.weight"])
    assert _statistics(graph) == BODY | HEAD


def test_nothing_frozen_keeps_no_statistics() -> None:
    assert _statistics(ob.training_graph(_two(mode=1), loss="mse", optimizer="sgd")) == BODY | HEAD


@pytest.mark.filterwarnings("ignore:.*numbers of the file are trained")
@pytest.mark.parametrize(
    ("choice", "renewed"),
    [
        ({"frozen": ["body.*"]}, HEAD),
        ({"trainable": ["head.*"]}, HEAD),
        ({"frozen": ["head.bias"]}, BODY | HEAD),
        ({}, BODY | HEAD),
    ],
    ids=["frozen", "not chosen", "another frozen", "nothing frozen"],
)
def test_nodes_without_scale_and_bias_go_by_their_statistics(choice: dict[str, list[str]], renewed: set[str]) -> None:
    graph = ob.training_graph(_two(affine=False), loss="mse", optimizer="sgd", training_mode=True, **choice)
    assert _statistics(graph) == renewed


def test_a_training_mode_with_nothing_to_switch_says_so_and_names_what_was_folded() -> None:
    model = parser.parse_model(HEADER + "<float[3,1] w = {1, 2, 3}> { y = Mul(x, w) }")
    with pytest.warns(ob.OnnxBackpropWarning, match="nothing to switch.*optimize=False") as caught:
        ob.training_graph(model, loss="mse", training_mode=True)
    assert "folded '" not in str(caught[0].message)
    text = "\n# inputs\np_w: PARAMETER target='w'\n" + "".join(
        f"b_{n}: BUFFER target='layer.{n}.bn.running_mean' persistent=True\n" for n in range(6)
    )
    model.graph.metadata_props.append(StringStringEntryProto(key=SIGNATURE, value=text))
    with pytest.warns(ob.OnnxBackpropWarning, match=r"'layer.0.bn', .*'layer.3.bn' and 2 more into other layers"):
        ob.training_graph(model, loss="mse", training_mode=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ob.training_graph(model, loss="mse")


def _standardised(mode: int = 1) -> ModelProto:
    """A weight that is standardised by BatchNormalization in both modes, as timm's ScaledStdConv2d by TorchScript."""
    text = (
        '<ir_version: 10, opset_import: ["": 18]> g (float[2,3,5,5] x) => (float[2,4,3,3] y) '
        "<int64[3] flat = {1, 4, -1}, int64[4] shape = {4, 3, 3, 3}, int64[2] axes = {0, 2}> {"
        "f = Reshape(w, flat) m = ReduceMean<keepdims=0>(f, axes) ff = Mul(f, f) v = ReduceMean<keepdims=0>(ff, axes) "
        "s, rm, rv = BatchNormalization<training_mode=1, epsilon=0.000001, momentum=1.0>(f, gain, zero, m, v) "
        "k = Reshape(s, shape) y = Conv(x, k) }"
    )
    model = parser.parse_model(text)
    for name, values in {
        "w": RANDOM.standard_normal((4, 3, 3, 3)) * 2 + 1,
        "gain": RANDOM.standard_normal(4),
        "zero": RANDOM.standard_normal(4),
    }.items():
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    return model


@pytest.mark.parametrize("training_mode", [False, True])
def test_statistics_that_are_computed_are_no_state(training_mode: bool) -> None:
    """Neither renewed nor switched: by the statistics of the weight in training, evaluation and inference."""
    model = _standardised()
    v = _values(model)
    x, target = RANDOM.standard_normal((2, 3, 5, 5)).astype(np.float32), np.zeros((2, 4, 3, 3), np.float32)
    flat = v["w"].reshape(4, -1).astype(np.float64)
    normal = (flat - flat.mean(1, keepdims=True)) / np.sqrt(flat.var(1, keepdims=True) + 1e-6)
    kernel = (normal * v["gain"][:, None] + v["zero"][:, None]).reshape(4, 3, 3, 3)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), axis=(2, 3))
    y = np.einsum("nchwij,ocij->nohw", windows, kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ob.OnnxBackpropWarning)  # of nothing to switch
        graph = ob.training_graph(
            model, loss="mse", optimizer="sgd", training_mode=training_mode, trainable=["w", "gain", "zero"]
        )
    assert set(graph.updates) >= {"w", "gain", "zero"}
    assert not any(name in graph.updates for name in ("m", "v"))
    trainer = ob.Trainer(graph, learning_rate=0.0)
    assert trainer.step(x=x, target=target) == pytest.approx((y**2).mean(), rel=1e-5)
    assert trainer.evaluate(x=x, target=target) == pytest.approx((y**2).mean(), rel=1e-5)
    plain = graph.inference_model(trainer.parameters())
    (node,) = (n for n in plain.graph.node if n.op_type == "BatchNormalization")
    assert [a.i for a in node.attribute if a.name == "training_mode"] == [1]
    assert len(node.output) == 3
    np.testing.assert_allclose(np.asarray(ob.session(plain).run(None, {"x": x})[0]), y, rtol=1e-4, atol=1e-4)
    onnx.checker.check_model(plain, full_check=True)
    assert ob.check_gradients(model).ok


def test_an_inference_node_with_computed_statistics_stays_one() -> None:
    """Of the squares, not of the variance: in training mode it would compute something else."""
    model = parser.parse_model(
        HEADER + "<float[3] s = {1, 2, 3}, float[3] b = {0, 1, 0}, int64[2] axes = {0, 2}> {"
        "m = ReduceMean<keepdims=0>(x, axes) q = Mul(x, x) v = ReduceMean<keepdims=0>(q, axes) t = Add(v, v) "
        "y = BatchNormalization(x, s, b, m, t) }"
    )
    with pytest.warns(ob.OnnxBackpropWarning, match="nothing to switch"):
        graph = ob.training_graph(model, loss="mse", optimizer="sgd", training_mode=True)
    v = _values(model)
    y = _normalised(X, X.mean((0, 2)), 2 * (X**2).mean((0, 2)), v["s"], v["b"])
    assert _loss(graph) == pytest.approx(float((y**2).mean()), rel=1e-5)


def test_the_exported_model_reads_the_statistics_that_are_stored(tmp_path: Path) -> None:
    """z adds the mean that training mode renews; the exported model, in inference mode, adds the mean that is stored."""
    text = "{ n, m, v = BatchNormalization<training_mode=1>(x, w, b, mean, var) r = Reshape(m, k) y = Add(n, r) }"
    weights = "<float[3] w = {1, 2, 3}, float[3] b = {0, 1, 0}, float[3] mean = {1, 0, 2}, float[3] var = {1, 2, 4}, "
    model = parser.parse_model(HEADER + weights + "int64[2] k = {3, 1}> " + text)
    graph = ob.training_graph(model, loss="mse", optimizer="sgd")
    trainer = ob.Trainer(graph, learning_rate=0.1)
    trainer.step({"x": X, "target": TARGET})
    trainer.export(tmp_path / "model.onnx")
    exported = onnx.load(tmp_path / "model.onnx")
    v = _values(exported)
    (y,) = ob.session(exported).run(None, {"x": X})
    expected = _normalised(X, v["mean"], v["var"], v["w"], v["b"]) + v["mean"].reshape(3, 1)
    np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(v["mean"], 0.9 * np.float32([1, 0, 2]) + 0.1 * X.mean((0, 2)), rtol=1e-5)


@pytest.mark.parametrize("handed", ["m1, v1", "mi, vi"])
def test_statistics_that_one_normalization_hands_on_to_another(handed: str, tmp_path: Path) -> None:
    """Both renew one state, in turn, through Identity nodes too, and both are in inference mode when exported."""
    text = (
        "a, m1, v1 = BatchNormalization<training_mode=1>(x, w, b, mean, var) mi = Identity(m1) vi = Identity(v1) "
        f"y, m2, v2 = BatchNormalization<training_mode=1>(a, u, b, {handed})"
    )
    weights = "<float[3] w = {1, 2, 3}, float[3] u = {2, 1, 1}, float[3] b = {0, 1, 0}, float[3] mean = {1, 0, 2}, "
    model = parser.parse_model(f"{HEADER}{weights} float[3] var = {{1, 2, 4}}> {{ {text} }}")
    graph = ob.training_graph(model, loss="mse", optimizer="sgd", tie=[])
    trainer = ob.Trainer(graph, learning_rate=0.0)
    trainer.step({"x": X, "target": TARGET})
    trainer.export(tmp_path / "model.onnx")
    exported = onnx.load(tmp_path / "model.onnx")
    nodes = [node for node in exported.graph.node if node.op_type == "BatchNormalization"]
    assert [(list(node.input[3:]), len(node.output)) for node in nodes] == [(["mean", "var"], 1)] * 2
    assert not any(a.i for node in nodes for a in node.attribute if a.name == "training_mode")
    v = _values(exported)
    once = 0.9 * np.float32([1, 0, 2]) + 0.1 * X.mean((0, 2))
    np.testing.assert_allclose(v["mean"], 0.9 * once + 0.1 * np.float32([0, 1, 0]), rtol=1e-4, atol=1e-5)


def test_a_normalization_in_a_branch_is_named() -> None:
    text = (
        "y = If(c) <then_branch = t () => (float[N,3,L] a) { a, m, v = BatchNormalization<training_mode=1>(x, w, b, mean, var) },"
        " else_branch = e () => (float[N,3,L] d) { d = Neg(x) }>"
    )
    weights = "<float[3] w = {1, 2, 3}, float[3] b = {0, 1, 0}, float[3] mean = {1, 0, 2}, float[3] var = {1, 2, 4}>"
    model = parser.parse_model(HEADER.replace(" x)", " x, bool c)") + weights + f"{{ {text} }}")
    with pytest.warns(
        ob.OnnxBackpropWarning, match="no step renews the running statistics of BatchNormalization 'a' in a"
    ):
        ob.training_graph(model, loss="mse", optimizer="sgd")
    with pytest.warns(ob.OnnxBackpropWarning) as caught:
        ob.training_graph(model, loss="mse", optimizer="sgd", training_mode=True)
    texts = [str(warning.message) for warning in caught]
    assert any("training_mode leaves 'a' as they are, which are in a branch or a loop" in text for text in texts)
