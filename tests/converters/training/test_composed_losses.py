"""Sums of losses, losses of several outputs and of values inside the model, and what is said about a wrong one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.distributed.shards import Weights
from tests.support.numeric import outputs

losses = ob.losses
NAMES = pytest.mark.parametrize("names", [("mask", "depth"), ("loss", "target"), ("1", "a/b c")], ids=str)


def two(mask: str = "mask", depth: str = "depth") -> ModelProto:
    """Two outputs (N, 3) of nodes without names."""
    nodes = [helper.make_node("MatMul", ["x", "v"], [mask]), helper.make_node("MatMul", ["x", "w"], [depth])]
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((4, 3), np.float32), name) for name in ("v", "w")]
    values = [helper.make_tensor_value_info(name, 1, ["N", 3]) for name in (mask, depth)]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, ["N", 4])], values, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def fed(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return rng.standard_normal((5, 4), np.float32), rng.random((5, 3), np.float32), rng.random((5, 3), np.float32)


def alone(output: str, loss: Any, x: np.ndarray, target: np.ndarray) -> dict[str, np.ndarray]:
    graph = ob.training_graph(two(), loss=loss, prediction=output, trainable=["v" if output == "mask" else "w"])
    return outputs(graph.model, {"x": x, str(graph.target): target})


def check(rng: np.random.Generator, loss: Any, factors: tuple[float, float] = (1, 1), **more: Any) -> ob.TrainingGraph:
    """bce_with_logits of the mask times a factor and mse of the depth times another."""
    x, mask, depth = fed(rng)
    graph = ob.training_graph(two(), loss=loss, **more)
    assert graph.inputs == ("x", "mask_target", "depth_target")
    got = outputs(graph.model, {"x": x, "mask_target": mask, "depth_target": depth})
    one, other = alone("mask", "bce_with_logits", x, mask), alone("depth", "mse", x, depth)
    np.testing.assert_allclose(got["loss"], factors[0] * one["loss"] + factors[1] * other["loss"], rtol=1e-6)
    np.testing.assert_allclose(got["v_grad"], factors[0] * one["v_grad"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got["w_grad"], factors[1] * other["w_grad"], rtol=1e-5, atol=1e-7)
    return graph


BCE, MSE = losses.BCEWithLogits("mask"), losses.MSE("depth")


@pytest.mark.parametrize(
    ("loss", "factors"),
    [
        (0.7 * BCE + MSE, (0.7, 1)),
        (BCE + MSE * np.float64(0.25), (1, 0.25)),
        (2 * (BCE + 0.5 * MSE) / 4, (0.5, 0.25)),
        (sum([BCE, MSE]), (1, 1)),
        ({"mask": "bce_with_logits", "depth": "mse"}, (1, 1)),
        ({"mask": 3 * losses.BCEWithLogits(), "depth": losses.MSE()}, (3, 1)),
        (BCE + (lambda op, o: losses.MSE()(op, o["depth"])), (1, 1)),
        (
            lambda op, o: op.Add(losses.BCEWithLogits()(op, o["mask"]), op.Mul(2.0, losses.MSE()(op, o["depth"]))),
            (1, 2),
        ),
    ],
    ids=["sum", "a factor of NumPy", "nested", "Python's sum", "dict", "dict of sums", "a callable", "in a callable"],
)
def test_sums(rng, loss: Any, factors: tuple[float, float]) -> None:
    check(rng, loss, factors)


def test_a_sum_is_kept_in_the_file(rng, tmp_path: Path) -> None:
    graph = check(rng, 0.7 * BCE + MSE, (0.7, 1))
    graph.save(tmp_path / "graph.onnx")
    loaded = ob.TrainingGraph.load(tmp_path / "graph.onnx")
    assert loaded.settings == graph.settings
    assert [factor for factor, _ in graph.settings["loss"]["terms"]] == [0.7, 1.0]
    x, mask, depth = fed(rng)
    trainer = ob.Trainer(ob.training_graph(two(), loss=0.7 * BCE + MSE, optimizer="sgd"), learning_rate=0.1)
    first = trainer.step(x=x, mask_target=mask, depth_target=depth)
    assert trainer.step(x=x, mask_target=mask, depth_target=depth) < first


@NAMES
def test_odd_names(rng, names: tuple[str, str]) -> None:
    x, mask, depth = fed(rng)
    graph = ob.training_graph(two(*names), loss=losses.BCEWithLogits(names[0]) + losses.MSE(names[1]))
    feeds = dict(zip(graph.inputs, (x, mask, depth), strict=True))
    expected = alone("mask", "bce_with_logits", x, mask)["loss"] + alone("depth", "mse", x, depth)["loss"]
    np.testing.assert_allclose(outputs(graph.model, feeds)[graph.loss], expected, rtol=1e-6)


def test_losses_of_one_prediction_share_its_target(rng) -> None:
    x, mask, _ = fed(rng)
    graph = ob.training_graph(two(), loss=losses.MSE() + losses.L1(), prediction="mask", trainable=["v"])
    assert graph.inputs == ("x", "target")
    expected = sum(alone("mask", name, x, mask)["loss"] for name in ("mse", "l1"))
    np.testing.assert_allclose(outputs(graph.model, {"x": x, "target": mask})["loss"], expected, rtol=1e-6)


def test_losses_that_name_a_target_share_it(rng) -> None:
    x, mask, _ = fed(rng)
    loss = losses.MSE("mask", target="truth") + 0.4 * losses.MSE("depth", target="truth")
    graph = ob.training_graph(two(), loss=loss)
    assert graph.inputs == ("x", "truth")
    expected = alone("mask", "mse", x, mask)["loss"] + 0.4 * alone("depth", "mse", x, mask)["loss"]
    np.testing.assert_allclose(outputs(graph.model, {"x": x, "truth": mask})["loss"], expected, rtol=1e-6)


def test_a_target_of_two_kinds_is_refused() -> None:
    loss = losses.MSE("mask", target="truth") + losses.SoftmaxCrossEntropy("depth", target="truth")
    with pytest.raises(
        ob.InvalidArgumentError, match=r"softmax_cross_entropy expects 'truth' of type INT64 and shape \(N\), and it is"
    ):
        ob.training_graph(two(), loss=loss)


def test_an_input_of_the_model_as_target(rng) -> None:
    """An autoencoder."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) }""")
    graph = ob.training_graph(model, loss=losses.MSE(target="x"))
    assert graph.inputs == ("x",)
    x = rng.standard_normal((3, 2), np.float32)
    expected = np.mean((x @ np.array([[1, 2], [3, 4]], np.float32) - x) ** 2)
    np.testing.assert_allclose(outputs(graph.model, {"x": x})["loss"], expected, rtol=1e-6)
    assert ob.Trainer(ob.training_graph(model, loss=losses.MSE(target="x"), optimizer="sgd")).step(x=x) > 0


def test_outputs_of_two_types(rng) -> None:
    model = two()
    model.graph.node.append(helper.make_node("Cast", ["depth"], ["deep"], to=11))
    model.graph.output[1].CopyFrom(helper.make_tensor_value_info("deep", 11, ["N", 3]))
    graph = ob.training_graph(model, loss=losses.MSE("mask") + losses.MSE("deep"))
    x, mask, depth = fed(rng)
    got = outputs(graph.model, {"x": x, "mask_target": mask, "deep_target": depth.astype(np.float64)})
    assert got["loss"].dtype == np.float64
    expected = alone("mask", "mse", x, mask)["loss"] + alone("depth", "mse", x, depth)["loss"]
    np.testing.assert_allclose(got["loss"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (losses.MSE("mask") + (lambda _, o: o["depth"]), r"the callable returned a value of the shape \(N, 3\)"),
        ({"mask": losses.MSE("depth")}, "'mask': expected a ready loss of this output, got one that reads 'depth'"),
        ({"mask": lambda _, o: o["mask"]}, "'mask': expected a ready loss of this output, got <function"),
        (
            {"maks": "mse"},
            "prediction: expected the name of a graph output, or of a value inside the graph, got 'maks'",
        ),
        ({"mask": "mes"}, "got 'mes'. Did you mean 'mse'"),
        ({}, "expected a loss for one output or more, got an empty dict"),
        ({1: "mse"}, "expected names of outputs, got 1"),
        (losses.MSE() + losses.L1(), "prediction: the model has 2 float outputs, 'mask', 'depth'. Name the one"),
    ],
)
def test_refused(loss: Any, message: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.training_graph(two(), loss=loss)


def test_no_losses() -> None:
    one: Any = losses.MSE()
    for wrong in (lambda: one + 1, lambda: "mse" + one, lambda: one * losses.L1(), lambda: one * True):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ob.InvalidArgumentError, match="expected a finite factor, got inf"):
        _ = one * np.inf


ARGUMENTS = {
    "reduction": (lambda: losses.MSE(reduction="mena"), "mse: reduction: expected 'mean' or 'sum', got 'mena'"),
    "three": (
        lambda: losses.KLDivergence(reduction="none"),
        "kl_div: reduction: expected 'batchmean', 'mean' or 'sum'",
    ),
    "prediction": (lambda: losses.MSE(cast(Any, 3)), "mse: prediction: expected a name, got 3"),
    "beta": (lambda: losses.SmoothL1(beta=0), "smooth_l1: beta: expected more than 0, got 0"),
    "alpha": (lambda: losses.Focal(alpha=2), "focal: alpha: expected 0 … 1 or None, got 2"),
    "gamma": (lambda: losses.Focal(gamma=0.5), "focal: gamma: expected 0, or 1 or more, got 0.5"),
    "activation": (lambda: losses.Dice(activation="relu"), "dice: activation: expected None, 'sigmoid' or 'softmax'"),
    "smooth": (lambda: losses.Dice(smooth=-1), "dice: smooth: expected 0 or more, got -1"),
    "tversky": (lambda: losses.Tversky(beta=-1), "tversky: beta: expected 0 or more, got -1"),
    "axis": (lambda: losses.SoftmaxCrossEntropy(axis=2), "softmax_cross_entropy: axis: expected 1 or -1, got 2"),
    "type": (lambda: losses.NLL(label_type="float32"), "nll: label_type: expected one of 'int64', .* got 'float32'"),
    "ignored": (lambda: losses.NLL(label_type="int8", ignore_index=255), "ignore_index: expected a label of type int8"),
    "form": (lambda: losses.KLDivergence(form="log"), "kl_div: form: expected 'log_probabilities', .* got 'log'"),
    "ctc": (lambda: losses.CTC(form="probabilities"), "ctc: form: expected 'log_probabilities' or 'logits', got"),
    "blank": (lambda: losses.CTC(blank=-1), "ctc: blank: expected the number of a class, got -1"),
    "other": (lambda: losses.CosineEmbedding("y", ""), "cosine_embedding: other: expected a name, got ''"),
    "margin": (lambda: losses.CosineEmbedding(margin=2), "cosine_embedding: margin: expected -1 … 1, got 2"),
}

NONSENSE = [
    *(lambda a=a, v=v: losses.Huber(**{a: v}) for a in ("delta",) for v in ("a", None, [1, 2], True, 1e50, 1e-50)),
    *(lambda v=v: losses.SoftmaxCrossEntropy(**v) for v in ({"label_smoothing": "a"}, {"axis": 1.0}, {"axis": "1"})),
    *(lambda v=v: losses.SoftmaxCrossEntropy(ignore_index=cast(Any, v)) for v in (True, 1.5, "a")),
    *(lambda a=a: losses.Focal(**{a: "a"}) for a in ("alpha", "gamma")),
    lambda: losses.NLL(label_type=cast(Any, ["int64"])),
    lambda: losses.CTC(blank=cast(Any, 1.0)),
    lambda: losses.KLDivergence(form="logits", axis=cast(Any, "a")),
    lambda: losses.MSE() / 0,
    *(lambda v=v: graph_of(v) for v in ("abc", [[1], [2, 3]], {0: 1}, [1, np.nan, 1], [1e39, 1, 1])),
    *(lambda f=f: ob.training_graph(two(), loss=f * losses.MSE("depth")) for f in (1e-60, 1e300)),
]


def graph_of(weight: Any) -> ob.TrainingGraph:
    return ob.training_graph(squashed("y = Identity(z)"), loss=losses.SoftmaxCrossEntropy(weight=weight))


@pytest.mark.parametrize("case", range(len(NONSENSE)))
def test_what_is_no_number_is_refused(case: int) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=r"expected (a |the |a label |numbers|one of|0 )"):
        NONSENSE[case]()


def test_numbers_of_numpy_are_numbers() -> None:
    loss = losses.SoftmaxCrossEntropy(ignore_index=np.int64(1), label_smoothing=np.float32(0.5), axis=np.int32(-1))
    assert (loss.ignore_index, loss.label_smoothing, loss.axis) == (1, 0.5, -1)
    assert loss == losses.SoftmaxCrossEntropy(ignore_index=1, label_smoothing=0.5, axis=-1)


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case: str) -> None:
    build, message = ARGUMENTS[case]
    with pytest.raises(ob.InvalidArgumentError, match=message):
        build()


SHAPES = {
    "dice": (
        losses.Dice("mask", activation="softmax"),
        "dice expects a prediction of 3 dimensions or more, a row, cla",
    ),
    "ctc": (losses.CTC("mask"), r"ctc expects a prediction of shape \(T, N, C\) with a class 0 .* shape \(N, 3\)"),
    "last": (losses.NLL("y", axis=-1), r"nll expects a prediction of shape \(N, C\) or \(N, d1, …, C\)"),
    "cosine": (losses.CosineEmbedding("y"), r"cosine_embedding expects predictions of shape \(N, D\) and of one type"),
    "kl": (losses.KLDivergence("mask", form="logits", axis=2), "kl_div expects a prediction with rows and axis 2, got"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case: str) -> None:
    loss, message = SHAPES[case]
    model = two()
    model.graph.node.append(helper.make_node("ReduceSum", ["depth", "axes"], ["y"], keepdims=0))
    model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "axes"))
    model.graph.output.append(helper.make_tensor_value_info("y", 1, ["N"]))
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.training_graph(model, loss=loss)


def squashed(nodes: str, output: str = "float[N, 3] y") -> ModelProto:
    return parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[N, 2] x) => ({output}) <float[2, 3] w = {{1, 2, 3, 4, 5, 6}}> {{ z = MatMul(x, w) {nodes} }}""")


@pytest.mark.parametrize(
    ("nodes", "loss", "instead"),
    [
        ("y = Softmax(z)", "softmax_cross_entropy", r"losses.NLL\(\)"),
        ("y = Sigmoid(z)", "bce_with_logits", r"losses.BCE\(\)"),
        ("s = Softmax(z) y = Identity(s)", "softmax_cross_entropy", r"losses.NLL\(\)"),
        ("y = Sigmoid(z)", losses.Focal(), r"losses.BCE\(\)"),
        ("y = Softmax(z)", losses.Dice(activation="sigmoid"), r"losses.NLL\(\)"),
        ("y = Softmax(z)", 0.5 * losses.SoftmaxCrossEntropy() + losses.MSE(), r"losses.NLL\(\)"),
    ],
)
def test_softmax_twice_is_said(nodes: str, loss: Any, instead: str) -> None:
    with pytest.warns(
        ob.OnnxBackpropWarning, match=rf"takes logits, and 'y' .* prediction='z', or .* {instead}"
    ) as caught:
        ob.training_graph(squashed(nodes), loss=loss)
    assert {Path(warning.filename).name for warning in caught} == {Path(__file__).name}


@pytest.mark.parametrize(
    ("nodes", "loss"),
    [
        ("y = LogSoftmax(z)", "softmax_cross_entropy"),
        ("y = Softmax(z)", "nll"),
        ("y = Sigmoid(z)", "bce"),
        ("y = Sigmoid(z)", "mse"),
        ("y = Softmax(z)", losses.Dice()),
        ("s = Sigmoid(z) y = Add(s, z)", "bce_with_logits"),
    ],
)
def test_nothing_is_said_of_the_right_loss(nodes: str, loss: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ob.training_graph(squashed(nodes), loss=loss)


def test_the_logits_inside(rng) -> None:
    """prediction names a value that is no output; the model keeps its outputs."""
    x, labels = rng.standard_normal((4, 2), np.float32), np.array([0, 1, 2, 1])
    graph = ob.training_graph(squashed("y = Softmax(z)"), loss="softmax_cross_entropy", prediction="z")
    assert (graph.outputs, graph.inputs) == (("y",), ("x", "labels"))
    plain = ob.training_graph(squashed("y = Identity(z)"), loss="softmax_cross_entropy")
    got, expected = (outputs(g.model, {"x": x, "labels": labels}) for g in (graph, plain))
    np.testing.assert_allclose(got["loss"], expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(got["w_grad"], expected["w_grad"], rtol=1e-5)
    nll = ob.training_graph(squashed("y = Softmax(z)"), loss="nll")
    of_probabilities = outputs(nll.model, {"x": x, "labels": labels})
    np.testing.assert_allclose(of_probabilities["w_grad"], expected["w_grad"], rtol=1e-4, atol=1e-6)
    with pytest.raises(ob.InvalidArgumentError, match="a value inside the graph, got 'zz'. Did you mean 'z'"):
        ob.training_graph(squashed("y = Softmax(z)"), loss="softmax_cross_entropy", prediction="zz")


def test_a_value_inside_for_a_callable(rng) -> None:
    graph = ob.training_graph(squashed("y = Softmax(z)"), loss=lambda op, o: losses.MSE()(op, o["z"]))
    assert graph.inputs == ("x", "z_target")


def test_probabilities_of_zero_and_one() -> None:
    """Their logarithm is -100, and the gradient is finite."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[2, 2] x) => (float[2, 2] y) <float[2, 2] w = {0, 1, 1, 0}> { y = Add(x, w) }""")
    x = np.zeros((2, 2), np.float32)
    got = outputs(
        ob.training_graph(model, loss="bce", trainable=["w"]).model,
        {"x": x, "target": np.array([[0, 1], [0, 1]], np.float32)},
    )
    assert (got["loss"], np.isfinite(got["w_grad"]).all()) == (50, True)
    got = outputs(ob.training_graph(model, loss="nll", trainable=["w"]).model, {"x": x, "labels": np.array([0, 0])})
    assert (got["loss"], np.isfinite(got["w_grad"]).all()) == (50, True)


def classes_last(steps: str = "T") -> ModelProto:
    return parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[N, {steps}, 2] x) => (float[N, {steps}, 3] y) <float[2, 3] w = {{1, 2, 3, 4, 5, 6}}> {{ y = MatMul(x, w) }}""")


def test_classes_on_the_last_axis_are_hinted_at(rng) -> None:
    x, labels = rng.standard_normal((4, 5, 2), np.float32), rng.integers(0, 3, (4, 5))
    loss = ob.losses.SoftmaxCrossEntropy(axis=1)
    trainer = ob.Trainer(ob.training_graph(classes_last(), loss=loss, optimizer="sgd"))
    with pytest.raises(
        ob.InvalidArgumentError, match=r"got \(4, 5\). If the classes are on the last axis, give .*axis=-1"
    ):
        trainer.step(x, labels)
    with pytest.raises(ob.InvalidArgumentError, match="one number for each of 5 classes.* give the loss axis=-1"):
        ob.training_graph(classes_last("5"), loss=losses.SoftmaxCrossEntropy(weight=[1, 2, 3], axis=1))
    trainer = ob.Trainer(ob.training_graph(classes_last(), loss="softmax_cross_entropy", optimizer="sgd"))
    assert trainer.step(x, labels) > 0  # found
    with pytest.raises(ob.InvalidArgumentError, match=r"got \(4, 3\).* If the classes are on axis 1, .*axis=1"):
        trainer.step(x, labels[:, :3])
    graph = ob.training_graph(classes_last(), loss=losses.SoftmaxCrossEntropy(axis=-1), optimizer="sgd")
    assert ob.Trainer(graph).step(x, labels) > 0
    with pytest.raises(ob.InvalidArgumentError, match=r"'labels': expected classes 0 … 2, got 3 at \(0, 0\)"):
        ob.Trainer(graph).step(x, np.full((4, 5), 3))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "uint32"])
@pytest.mark.parametrize("label_type", ["int64", "uint8"])
def test_trainer_takes_labels_of_any_whole_type(rng, dtype: str, label_type: str) -> None:
    x, labels = rng.standard_normal((4, 2), np.float32), np.array([0, 1, 1, 0])
    loss = losses.SoftmaxCrossEntropy(label_type=label_type)
    trainers = [
        ob.Trainer(ob.training_graph(squashed("y = Identity(z)"), loss=loss, optimizer="sgd")) for _ in range(2)
    ]
    assert trainers[0].step(x, labels.astype(dtype)) == trainers[1].step(x, labels.astype(label_type))


def test_labels_that_a_type_does_not_hold_are_refused(rng) -> None:
    graph = ob.training_graph(
        squashed("y = Identity(z)"), loss=losses.SoftmaxCrossEntropy(label_type="uint8"), optimizer="sgd"
    )
    with pytest.raises(ob.InvalidArgumentError, match="'labels' has type uint8, got a number outside 0 … 255, -1"):
        ob.Trainer(graph).step(np.zeros((1, 2), np.float32), np.array([-1]))


@pytest.mark.parametrize("label", [-1, 3])
@pytest.mark.parametrize(
    "loss", [losses.NLL(), losses.SoftmaxCrossEntropy(), losses.SoftmaxCrossEntropy(axis=-1)], ids=str
)
def test_a_class_that_there_is_not_fails_the_run(loss: Any, label: int) -> None:
    graph = ob.training_graph(squashed("y = Identity(z)"), loss=loss)
    session = ob.session(graph.model)
    with pytest.raises(Exception, match="Out of range|out of data bounds"):
        session.run(None, {"x": np.ones((2, 2), np.float32), "labels": np.array([0, label])})


@pytest.mark.parametrize("label", [-1, 3])
def test_a_class_that_there_is_not_fails_the_run_of_dice(label: int) -> None:
    graph = ob.training_graph(classes_last(), loss=losses.Dice(activation="softmax", axis=-1))
    session = ob.session(graph.model)
    x = np.ones((1, 2, 2), np.float32)
    session.run(None, {"x": x, "labels": np.array([[0, 2]])})
    with pytest.raises(Exception, match="out of data bounds"):
        session.run(None, {"x": x, "labels": np.array([[0, label]])})


def test_several_ranks() -> None:
    """A sum whose means have other denominators is refused; the others weigh rows."""
    weighted = losses.SoftmaxCrossEntropy("mask", ignore_index=0)
    with pytest.raises(ob.UnsupportedError, match="several ranks cannot divide a sum of losses"):
        Weights(ob.training_graph(two(), loss=weighted + losses.MSE("depth")))
    with pytest.raises(ob.UnsupportedError, match="several ranks cannot divide"):
        Weights(ob.training_graph(two(), loss=losses.MSE("mask", reduction="sum") + losses.MSE("depth")))
    assert not Weights(ob.training_graph(two(), loss=losses.MSE("mask") + losses.L1("depth"))).summed
    both = losses.MSE("mask", reduction="sum") + losses.L1("depth", reduction="sum")
    assert Weights(ob.training_graph(two(), loss=both)).summed


def test_dice_of_large_masks() -> None:
    """Sums over some axes are in stages too."""
    model = parser.parse_model("""<ir_version: 10, opset_import: ["": 18]>
        g (float[N, 1, H, W] x) => (float[N, 1, H, W] y) <float[1] w = {1}> { y = Mul(x, w) }""")
    rng = np.random.default_rng(0)
    x = rng.random((1, 1, 2048, 2048), np.float32) ** 4
    t = (rng.random(x.shape) < 0.1).astype(np.float32)
    graph = ob.training_graph(model, loss=losses.Dice(), trainable=["w"])
    (value,) = ob.session(graph.model).run(["loss"], {"x": x, "target": t})
    wide = x.astype(np.float64)
    expected = 1 - (2 * (wide * t).sum() + 1) / (wide.sum() + t.sum() + 1)
    np.testing.assert_allclose(np.asarray(value), expected, rtol=3e-7)


@pytest.mark.parametrize("length", ["1", "D"])
def test_embeddings_are_not_stretched(length: str) -> None:
    """A cosine between (N, 4) and (N, 1) is none."""
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
        net (float[N, 4] x, float[N, {length}] u) => (float[N, 4] y, float[N, {length}] v) {{ y = Mul(x, w) v = Neg(u) }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.full(4, 0.5, np.float32), "w"))
    loss = losses.CosineEmbedding("y", "v")
    if length == "1":
        with pytest.raises(ob.InvalidArgumentError, match="equal shapes, got 'y' of shape .*4.* and 'v'"):
            ob.training_graph(model, loss=loss)
        return
    graph = ob.training_graph(model, loss=loss)
    feeds = {"x": np.ones((2, 4), np.float32), "target": np.ones(2, np.float32), **graph.initial_values()}
    session = ob.session(graph.model)
    session.run(None, feeds | {"u": np.ones((2, 4), np.float32)})
    with pytest.raises(Exception, match="Reshape"):
        session.run(None, feeds | {"u": np.ones((2, 1), np.float32)})
