"""What `training_graph` takes and refuses: selections of parameters, losses, numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnx_backprop as ob
from onnx_backprop.converters.training.losses import LossBuilder
from onnx_backprop.converters.training.optimizers import SGD, AdamW, Group
from tests.converters.training.classifier import SEED, batch, network, run

SELECTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "glob": ({"trainable": ["head.*"]}, ["head.weight", "head.bias"]),
    "regex": ({"trainable": [r"re:.*\.weight"]}, ["layer.weight", "head.weight"]),
    "compiled": ({"trainable": [re.compile(r"head\.\w+")]}, ["head.weight", "head.bias"]),
    "names and patterns": ({"trainable": ["head.bias", "*.weight"]}, ["head.bias", "layer.weight", "head.weight"]),
    "a glob leaves statistics out": (
        {"trainable": ["layer.*"]}, ["layer.scale", "layer.shift", "layer.weight", "layer.bias"],
    ),
    "frozen glob": ({"frozen": ["layer.*"]}, ["head.weight", "head.bias"]),
    "frozen out of trainable": ({"trainable": ["*.weight"], "frozen": ["layer.*"]}, ["head.weight"]),
    "frozen group": (
        {"optimizer": SGD(groups=[Group(parameters=["layer.*"], frozen=True)])}, ["head.weight", "head.bias"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SELECTIONS)
def test_selection(case: str) -> None:
    arguments, expected = SELECTIONS[case]
    graph = ob.training_graph(network(), loss="softmax_cross_entropy", **arguments)
    assert list(graph.parameters) == expected
    everything = {"layer.scale", "layer.shift", "layer.weight", "layer.bias", "head.weight", "head.bias"}
    assert set(graph.frozen) == everything - set(expected)


NOT_FOUND = {
    "glob": ({"trainable": ["haed.*"]}, r"trainable: 'haed\.\*' matches no initializer\. (Did you mean|There are)"),
    "near miss of a glob": ({"trainable": ["head.weigth*"]}, r"matches no initializer\. Did you mean 'head.weight'"),
    "frozen regex": ({"frozen": ["re:body.*"]}, r"frozen: 're:body\.\*' matches no initializer"),
    "bad regex": ({"frozen": ["re:("]}, r"frozen: 're:\(' is not a regular expression"),
    "everything frozen": ({"trainable": ["head.*"], "frozen": ["*"]}, "frozen leaves nothing"),
    "group": ({"optimizer": SGD(groups=[Group(parameters=["heads"])])}, r"groups\[0\]\.parameters: .*got 'heads'"),
}


@pytest.mark.parametrize("case", NOT_FOUND)
def test_nothing_found(case: str) -> None:
    arguments, message = NOT_FOUND[case]
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.training_graph(network(), loss="softmax_cross_entropy", **arguments)


def relative(op: LossBuilder, outputs: Mapping[str, ir.Value]) -> ir.Value:
    y = outputs["y"]
    t, w = op.input("truth", y), op.input("importance", dtype=ir.DataType.FLOAT, shape=("N", 1))
    return op.ReduceMean(op.Mul(w, op.Abs(op.Sub(y, t))), keepdims=0)


def test_loss_that_is_a_callable() -> None:
    graph = ob.training_graph(network(), loss=relative, trainable=["head.bias"])
    assert graph.inputs == ("x", "truth", "importance")
    assert graph.target == "truth"
    rng = np.random.default_rng(SEED)
    x, t, w = batch()["x"], rng.standard_normal((6, 3)).astype(np.float32), rng.random((6, 1)).astype(np.float32)
    result = run(graph.model, {"x": x, "truth": t, "importance": w})
    np.testing.assert_allclose(result["loss"], np.mean(w * np.abs(result["y"] - t)), rtol=1e-5)
    np.testing.assert_allclose(
        result["head.bias_grad"], np.sum(w * np.sign(result["y"] - t), axis=0) / 18, rtol=1e-5, atol=1e-7
    )
    assert [v.name for v in graph.inference_model().graph.input] == ["x"]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda op, outputs: op.Mul(outputs["y"], outputs["y"]), "expected one element"),
        (lambda *_: 3, "must return a value of the graph, got 3"),
    ],
)
def test_callables_that_are_refused(loss: Any, message: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=message):
        ob.training_graph(network(), loss=loss)


REFUSED_NUMBERS = {
    "momentum": (lambda: SGD(momentum=1.0), r"SGD: momentum: expected 0 or more and less than 1, got 1.0"),
    "nesterov": (lambda: SGD(nesterov=True), "SGD: nesterov: expected a momentum above 0"),
    "decay": (lambda: AdamW(weight_decay=-1), "AdamW: weight_decay: expected 0 or more, got -1"),
    "epsilon": (lambda: AdamW(epsilon=float("nan")), "AdamW: epsilon: expected 0 or more, got nan"),
    "clip": (lambda: SGD(clip_norm=0), "SGD: clip_norm: expected None or more than 0, got 0"),
    "accumulate": (lambda: SGD(accumulate=0), "SGD: accumulate: expected 1 or more, got 0"),
    "ema": (lambda: SGD(ema=1.0), "SGD: ema: expected 0 or more and less than 1"),
    "group": (lambda: Group(parameters=["a"], rate=-1), "Group: rate: expected 0 or more, got -1"),
    "delta": (lambda: ob.losses.Huber(delta=0), "huber: delta: expected more than 0, got 0"),
    "smoothing": (lambda: ob.losses.SoftmaxCrossEntropy(label_smoothing=1.5), "label_smoothing: expected 0 … 1"),
    "reduction": (lambda: ob.losses.MSE(reduction="none"), "mse: reduction: expected 'mean' or 'sum', got 'none'"),
}


@pytest.mark.parametrize("case", REFUSED_NUMBERS)
def test_refused_numbers(case: str) -> None:
    make, message = REFUSED_NUMBERS[case]
    with pytest.raises(ob.InvalidArgumentError, match=message):
        make()


def test_class_weights_of_another_length() -> None:
    loss = ob.losses.SoftmaxCrossEntropy(weight=[1, 2])
    with pytest.raises(
        ob.InvalidArgumentError, match=r"one number for each of 3 classes, got an array of shape \(2,\)"
    ):
        ob.training_graph(network(), loss=loss)
