"""What a newcomer hands over that does not fit: an error of ours in each case, with what was expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob
from tests.support.training_models import data, training

UNTYPED: Any = ob  # whose words no type checker knows


@cache
def graph() -> ob.TrainingGraph:
    return training()


def rows(count: int = 8) -> tuple[np.ndarray, np.ndarray]:
    arrays = data(count)
    return arrays["x"], arrays["labels"]


FITS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no loader": (None, {}, "loader: expected batches .* got NoneType"),
    "a number": (3, {}, "loader: expected batches .* got int"),
    "half an epoch": ([rows()], {"epochs": 1.5}, "epochs, every: expected whole numbers .* got 1.5, 0"),
    "no epochs": ([rows()], {"epochs": None}, "epochs, every: expected whole numbers .* got None, 0"),
    "one callback": ([rows()], {"callbacks": print}, "callbacks: expected a list of functions"),
    "a callback that is none": ([rows()], {"callbacks": [3]}, r"callbacks: expected a list of functions, got \(3,\)"),
    "a schedule by name": ([rows()], {"schedule": "cosine"}, "schedule: expected a function .* got 'cosine'"),
    "an evaluation that is no loader": ([rows()], {"evaluation": 3}, "loader: expected batches .* got int"),
}


@pytest.mark.parametrize("case", FITS)
def test_fit(case: str) -> None:
    loader, more, sentence = FITS[case]
    with pytest.raises(ob.InvalidArgumentError, match=sentence):
        ob.Trainer(graph(), kernels="onnx").fit(loader, **{"epochs": 1, **more})


KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "trainable": (
        lambda m: ob.training_graph(m, loss="mse", trainable=3),
        "trainable: expected a list of names, got 3",
    ),
    "frozen": (lambda m: ob.training_graph(m, loss="mse", frozen=3), "frozen: expected a list of names, got 3"),
    "wrt": (lambda m: ob.backward(m, wrt=3), "wrt: expected a list of names, got 3"),
    "of": (lambda m: ob.backward(m, of=3), "of: expected a list of names, got 3"),
    "explain": (lambda m: ob.explain_gradients(m, wrt=3), "wrt: expected a list of names, got 3"),
    "jacobian": (lambda m: ob.jacobian(m, wrt=3), "wrt: expected a list of names, got 3"),
    "stop": (lambda m: ob.training_graph(m, loss="mse", stop=3), "stop: expected a list of names, got 3"),
    "tie": (lambda m: ob.training_graph(m, loss="mse", tie=3), "tie: expected pairs of names, got 3"),
    "a pair": (lambda m: ob.training_graph(m, loss="mse", tie=[3]), "tie: expected pairs of names, got 3"),
    "lengths": (lambda m: ob.training_graph(m, loss="mse", lengths=3), "lengths: expected numbers by names"),
    "feeds": (lambda m: ob.check_gradients(m, feeds=3), "feeds: expected arrays by the names of inputs, got 3"),
    "feeds of a function": (lambda m: ob.value_and_grad(m, feeds=3), "feeds: expected arrays by the names of inputs"),
    "a number": (lambda _: ob.optimizers.Adam(beta1="a"), "beta1: expected 0 or more and less than 1, got 'a'"),
    "options": (lambda _: ob.register_ops(3), "session_options: expected onnxruntime.SessionOptions, got int"),
    "a model's path": (lambda m: ob.save_model(m, None), "path: expected the name of a file, got None"),
    "a graph's path": (lambda m: ob.training_graph(m, loss="mse").save(None), "path: expected the name of a file"),
    "an adapter": (lambda _: ob.save_adapter(3, "a.safetensors"), "values: expected at least one tensor by its name"),
    "an adapter's path": (lambda _: ob.save_adapter({}, 3), "path: expected the name of a file, got 3"),
    "an adapted model": (lambda m: ob.merge_adapter(m, {}), "adapted: expected what lora has made, got ModelProto"),
    "x and y": (lambda _: UNTYPED.Trainer(graph(), kernels="onnx").fit(*rows(), epochs=2), "fit: .*epochs.*ob.Batches"),
    "x, y": (
        lambda _: UNTYPED.Trainer(graph(), kernels="onnx").fit(*rows()),
        "epochs: expected a whole number, got an array. It takes batches.*ob.Batches",
    ),
    "another word": (
        lambda _: UNTYPED.Trainer(graph(), kernels="onnx").fit([rows()], 2, validation_data=[rows()]),
        "fit: .*'validation_data'. Did you mean 'evaluation'",
    ),
    "lr": (lambda _: UNTYPED.Trainer(graph(), lr=0.1), "Trainer: .*'lr'. Did you mean 'learning_rate'"),
    "no word": (lambda m: UNTYPED.training_graph(m, colour=1), "training_graph: .*'colour'. There are model, loss, "),
    "batch_size": (lambda _: UNTYPED.Batches({"x": np.zeros(3)}, batch_size=2), "Batches: .* Did you mean 'size'"),
    "no rows": (lambda _: ob.Batches({"x": np.zeros((0, 2))}, 2), "arrays: expected at least one row, got none in x"),
    "a seed": (lambda _: ob.Batches({"x": np.zeros(3)}, 2, seed=-1), "seed: expected a whole number of 0 or more"),
    "a seed of adapters": (lambda m: ob.lora(m, ["*"], 1, seed=-1), "seed: expected a whole number of 0 or more, got"),
    "a seed of a check": (lambda m: ob.check_gradients(m, seed=-1), "seed: expected a whole number of 0 or more, got"),
    "a tolerance": (lambda m: ob.check_gradients(m, tolerance=-1), "tolerance: expected a number of 0 or more, got -1"),
    "no tolerance": (lambda m: ob.check_gradients(m, tolerance=np.nan), "tolerance: expected a number of 0 or more"),
    "any tolerance": (lambda m: ob.check_gradients(m, tolerance=np.inf), "tolerance: expected a number of 0 or more"),
    "a log": (lambda _: UNTYPED.Trainer(graph()).fit([rows()], 1, log=3), "log: expected a file, a function, or"),
    "a callback": (lambda _: UNTYPED.Trainer(graph()).fit([rows()], 1, callbacks=3), "callbacks: expected a list of"),
    "no state": (
        lambda _: ob.Trainer(graph()).rewind({}, 3),
        "state: expected all .* tensors of the state; .* is missing",
    ),
    "complex numbers": (
        lambda _: ob.save_adapter({"w": np.ones(2, complex)}, "a.safetensors"),
        "values: expected numbers, 'w' has the type complex128",
    ),
    "rows": (lambda _: ob.Batches({"x": np.zeros(3)}, "2"), r"size: expected a whole number of 1 … 3, got '2'"),
}


def test_a_type_error_inside_is_none_of_the_arguments() -> None:
    def schedule(_: int) -> float:
        raise TypeError("of somebody else")

    with pytest.raises(TypeError, match="^of somebody else$"):
        ob.Trainer(graph(), kernels="onnx").fit([rows()], 1, schedule=schedule)


@pytest.mark.parametrize("case", KINDS)
def test_another_kind_of_argument(case: str) -> None:
    call, sentence = KINDS[case]
    with pytest.raises(ob.InvalidArgumentError, match=sentence):
        call(
            parser.parse_model(
                '<ir_version: 10, opset_import: ["": 18]> g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> '
                "{ y = Mul (x, w) }"
            )
        )


@pytest.mark.parametrize("method", ["save", "load", "export"])
def test_no_path(method: str) -> None:
    nothing: Any = None
    with pytest.raises(
        (ob.InvalidArgumentError, ob.CheckpointError), match="path: expected the name of a file, got None"
    ):
        getattr(ob.Trainer(graph(), kernels="onnx"), method)(nothing)


def test_memory_names_the_axes() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]> g (float[N, 4, s77] x) => (float[N, 4, s77] y) <float[1] w = {2}> {
            a = Mul (x, w) y = Sin (a) }""")
    with pytest.raises(ob.InvalidArgumentError, match=r"lengths of 'N' \(axis 0 of 'x'\), 's77' \(axis 2 of 'x'\)"):
        ob.training_graph(model, loss="mse", optimizer="sgd", memory="50%")


def test_numbers_of_numpy_are_numbers() -> None:
    trainer = ob.Trainer(graph(), kernels="onnx", seed=np.int64(3))
    assert len(trainer.fit([rows()], np.int64(2))) == 2


def test_a_batch_is_evaluated_as_step_takes_it() -> None:
    trainer = ob.Trainer(graph(), kernels="onnx")
    x, labels = rows()
    losses = {
        trainer.evaluate(x, labels),
        trainer.evaluate({"x": x, "labels": labels}),
        trainer.evaluate(x=x, labels=labels),
        trainer.evaluate(x, labels=labels),
    }
    assert len(losses) == 1
    assert trainer.evaluate([(x, labels)]) == pytest.approx(losses.pop())
    with pytest.raises(ob.InvalidArgumentError, match="loader: expected batches"):
        trainer.evaluate(3)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"seed": "a"}, "seed: expected a whole number of 64 bits, got 'a'"),
        ({"seed": 2**70}, "seed: expected a whole number of 64 bits"),
        ({"session_options": 3}, "session_options: expected onnxruntime.SessionOptions, got int"),
    ],
)
def test_trainer(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=sentence):
        ob.Trainer(graph(), **more)


@pytest.mark.parametrize("arrays", ["a", rows()])
def test_batches(arrays: Any) -> None:
    with pytest.raises(ob.InvalidArgumentError, match="arrays: expected arrays by the names of the inputs"):
        ob.Batches(arrays, 16)


class Nameless(ob.optimizers.Optimizer):
    def update(self, u: Any, x: Any, g: Any, *_slots: Any) -> Any:
        return u.Sub(x, g)


class WithoutField(Nameless):
    name = "WithoutField"
    hyper = ("beta",)


@dataclass(frozen=True, kw_only=True)
class Whole(WithoutField):
    beta: float = 0.5


@pytest.mark.parametrize(("optimizer", "lacking"), [(Nameless, "'name'"), (WithoutField, "'beta'")])
def test_an_optimizer_that_lacks_what_it_names(optimizer: type, lacking: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=f"{optimizer.__name__} has no {lacking}.*@dataclass"):
        optimizer()
    assert Whole().beta == 0.5
