"""Batches that do not fit: told by name, with what was expected, before anything runs; the state stays as it was."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import onnx_backprop as ob
from onnx_backprop.__main__ import main
from onnx_backprop.converters.training.losses import SoftmaxCrossEntropy
from onnx_backprop.training.inputs import cast
from tests.support.training_models import classifier, data, training

X, LABELS = data(10)["x"], data(10)["labels"]
OPTIONS = onnxruntime.SessionOptions()
OPTIONS.log_severity_level = 4

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"x": X}, "expected x, labels; 'labels' missing"),
    "unknown": ({"x": X, "labels": LABELS, "z": X}, "expected x, labels, got 'z'. Leave it out"),
    "near": ({"x": X, "label": LABELS}, "expected x, labels, got 'label'. Did you mean 'labels'?"),
    "another name": ({"image": X, "labels": LABELS}, "expected x, labels, got 'image'. Did you mean 'x'?"),
    "other names": ({"image": X, "y": LABELS}, "expected x, labels, got 'image'. Did you mean 'x', 'labels'?"),
    "kind": (
        {"x": X, "labels": LABELS.astype(float)},
        "'labels' has type int64, got an array of float64. Convert it: array.astype('int64')",
    ),
    "text": ({"x": X.astype(str), "labels": LABELS}, "'x' has type float32, got an array of <U"),
    "ragged": ({"x": [[1, 2, 3, 4], [1]], "labels": [0, 1]}, "'x': expected an array, got list: setting an array"),
    "nothing": ({"x": None, "labels": LABELS}, "'x' has type float32, got an array of object"),
    "rank": ({"x": X[0], "labels": LABELS}, "'x': expected the shape (N, 4), got (4). Give it 2 dimensions, not 1"),
    "fixed": (
        {"x": X[:, :3], "labels": LABELS},
        "'x': expected the shape (N, 4), got (10, 3). Give axis 1 the length 4",
    ),
    "symbol": ({"x": X, "labels": LABELS[:9]}, "'labels': expected the shape (N), got (9), but N is 10 in 'x'. Make"),
    "column": ({"x": X, "labels": LABELS[:, None]}, "'labels': expected the shape (N), got (10, 1). Give it 1 dim"),
    "class": ({"x": X, "labels": LABELS + 1}, "'labels': expected classes 0 … 2, got 3 at (2,). Number the classes fr"),
    "negative": ({"x": X, "labels": LABELS - 1}, "'labels': expected classes 0 … 2, got -1 at (1,)"),
    "OrtValue": (
        {"x": onnxruntime.OrtValue.ortvalue_from_numpy(X[:, :3]), "labels": LABELS},
        "'x': expected the shape (N, 4), got (10, 3)",
    ),
    "no rows": ({"x": X[:0], "labels": LABELS[:0]}, "'x': expected a batch of 1 row or more, got none. Leave it out"),
    "no mapping": (X, "expected x, labels; 'labels' missing"),  # pyright: ignore
}
CALLS: dict[str, Callable[[ob.Trainer, Any], object]] = {
    "step": lambda trainer, batch: trainer.step(batch),
    "predict": lambda trainer, batch: trainer.predict(batch),
    "evaluate": lambda trainer, batch: trainer.evaluate([batch]),
    "fit": lambda trainer, batch: trainer.fit([batch], 1, progress=False),
    "evaluation": lambda trainer, batch: trainer.fit(
        [{"x": X, "labels": LABELS}], 1, evaluation=[batch], progress=False
    ),
}


@contextlib.contextmanager
def unchanged(trainer: ob.Trainer, message: str) -> Any:
    """An error of ours, after which the trainer is as it was."""
    before = trainer.state()
    with pytest.raises(ob.InvalidArgumentError, match=message):
        yield
    assert (trainer.steps, trainer.epoch, trainer.batch) == (0, 0, 0)
    for name, value in trainer.state().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@pytest.fixture(scope="module")
def trainer() -> ob.Trainer:
    return ob.Trainer(training())


@pytest.mark.parametrize(
    ("case", "call"),
    [(case, call) for case in REFUSED for call in CALLS if call != "predict" or case not in ("missing", "no mapping")],
)
def test_refused_before_anything_runs(
    trainer: ob.Trainer, monkeypatch: pytest.MonkeyPatch, case: str, call: str
) -> None:
    batch, message = REFUSED[case]
    if case == "no mapping" and call != "step":
        message = "a batch must be a mapping"
    monkeypatch.setattr("onnx_backprop.training.buffers.run_bound", lambda *_: pytest.fail("it runs"))
    with unchanged(trainer, re.escape(message)):
        CALLS[call](trainer, batch)


def test_a_batch_in_the_order_of_the_inputs() -> None:
    """By place, as one tuple or list, and mixed with names: the same step as by name."""
    calls: list[Callable[[ob.Trainer], float]] = [
        lambda t: t.step(x=X, labels=LABELS),
        lambda t: t.step(X, LABELS),
        lambda t: t.step((X, LABELS)),
        lambda t: t.step([X, LABELS]),
        lambda t: t.step(X, labels=LABELS),
    ]
    trainers = [ob.Trainer(training()) for _ in calls]
    losses = [call(trainer) for call, trainer in zip(calls, trainers, strict=True)]
    assert losses == losses[:1] * len(calls)
    for trainer in trainers[1:]:
        np.testing.assert_equal(trainer.parameters(), trainers[0].parameters())
    assert trainers[0].predict(X, LABELS).keys() == trainers[0].predict(x=X, labels=LABELS).keys()


@pytest.mark.parametrize(
    ("batch", "names", "message"),
    [
        ((X, LABELS, X), {}, "expected x, labels, got 3 arrays. Leave some out"),
        (((X, LABELS, X),), {}, "expected x, labels, got 3 arrays"),
        ((X,), {"x": X, "labels": LABELS}, "'x' is given twice: by its place and by its name"),
        ((X,), {"label": LABELS}, "expected x, labels, got 'label'. Did you mean 'labels'?"),
        ((LABELS, X), {}, "'labels' has type int64, got an array of float32"),
        (({"x": X, "labels": LABELS}, LABELS), {}, "'x' has type float32, got an array of object"),
    ],
)
def test_places_are_checked(trainer: ob.Trainer, batch: Any, names: dict[str, Any], message: str) -> None:
    with unchanged(trainer, re.escape(message)):
        trainer.step(*batch, **names)


def test_labels_to_ignore_are_no_class() -> None:
    loss = SoftmaxCrossEntropy(ignore_index=-100)
    trainer = ob.Trainer(ob.training_graph(classifier(), loss=loss, optimizer="sgd"))
    labels = np.where(LABELS == 1, -100, LABELS)
    with unchanged(trainer, "expected classes 0 … 2, got -1"):
        trainer.step(x=X, labels=LABELS - 1)
    assert np.isfinite(trainer.step(x=X, labels=labels))


def reshaping() -> onnx.ModelProto:
    """A model whose lengths are known at run time alone: rows of x in pairs."""
    return parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]> pairs (float[N, 4] x) => (float[P, 8] y)
        <float[8] w = {1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0}, int64[2] shape = {-1, 8}>
        { r = Reshape(x, shape) y = Mul(r, w) }
    """)


@pytest.mark.parametrize("call", ["step", "predict"])
def test_what_onnxruntime_alone_finds(call: str) -> None:
    trainer = ob.Trainer(ob.training_graph(reshaping(), loss="mse", optimizer="adamw"), session_options=OPTIONS)
    good = {"x": X, "target": np.zeros((5, 8), np.float32)}
    for bad, why in (
        (good | {"x": X[:9]}, ".*Reshape"),
        (good | {"target": np.zeros((6, 8), np.float32)}, "'target' must have the shape of 'y'$"),
    ):
        with unchanged(trainer, rf"onnxruntime cannot run this batch, 'x' \((9|10), 4\), 'target' \(., 8\): {why}"):
            CALLS[call](trainer, bad)
    other = ob.Trainer(trainer.graph)
    assert trainer.step(good) == other.step(good)
    for name, value in other.state().items():
        np.testing.assert_array_equal(trainer.state()[name], value)


def test_all_rows_are_checked_before_the_first_step(trainer: ob.Trainer) -> None:
    labels = LABELS.copy()
    labels[9] = 3
    for given in ({"evaluation": ob.Batches({"x": X, "labels": labels}, 4)}, {}):
        loader = ob.Batches({"x": X, "labels": LABELS if given else labels}, 4)
        with unchanged(trainer, r"expected classes 0 … 2, got 3 at \(9,\)"):
            trainer.fit(loader, 1, progress=False, **given)


def test_a_smaller_last_batch_where_their_size_is_fixed() -> None:
    model = classifier()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 4
    trainer = ob.Trainer(ob.training_graph(model, loss="softmax_cross_entropy", optimizer="sgd"))
    with unchanged(trainer, r"'x': expected the shape \(4, 4\), got \(2, 4\). Give axis 0 the length 4, not 2"):
        trainer.fit(ob.Batches({"x": X, "labels": LABELS}, 4), 1, progress=False)
    assert len(trainer.fit(ob.Batches({"x": X, "labels": LABELS}, 4, drop_last=True), 1, progress=False)) == 2


COMMAND = {
    "shape": ({"x": X[:, :3], "labels": LABELS}, "'x': expected the shape (N, 4), got (5, 3)"),
    "rank": ({"x": X[:, :, None], "labels": LABELS}, "'x': expected the shape (N, 4), got (5, 4, 1)"),
    "rows": ({"x": X, "labels": LABELS[:9]}, "expected arrays with one number of rows, got 'x': 10, 'labels': 9"),
    "column": ({"x": X, "labels": LABELS[:, None]}, "'labels': expected the shape (N), got (5, 1)"),
    "class": ({"x": X, "labels": LABELS + 1}, "'labels': expected classes 0 … 2, got 3 at"),
    "float": ({"x": X, "labels": LABELS + 0.5}, "'labels' has type int64, got an array of float64"),
    "number": ({"x": np.float32(1), "labels": np.int64(1)}, "expected arrays with one number of rows, got 'x': 0"),
    "no rows": ({"x": X[:0], "labels": LABELS[:0]}, "arrays: expected at least one row, got none in x, labels"),
}


@pytest.mark.parametrize("option", ["--data", "--evaluation"])
@pytest.mark.parametrize("case", COMMAND)
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, option: str) -> None:
    arrays, message = COMMAND[case]
    onnx.save(classifier(), tmp_path / "model.onnx")
    np.savez(tmp_path / "good.npz", x=X, labels=LABELS)
    np.savez(tmp_path / "bad.npz", **arrays)
    given = ["train", str(tmp_path / "model.onnx"), "--loss", "softmax_cross_entropy", "--batch-size", "5"]
    given += ["--data", str(tmp_path / "good.npz"), "-o", str(tmp_path / "out.onnx")]
    assert main([*given, option, str(tmp_path / "bad.npz")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"onnx-backprop: error: {option}: " in err
    assert message in err
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "good.npz", "bad.npz"}


def test_the_command_ends_in_one_line_where_onnxruntime_alone_finds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(reshaping(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=X, target=np.zeros((10, 8), np.float32))
    given = ["train", str(tmp_path / "model.onnx"), "--loss", "mse", "-o", str(tmp_path / "out.onnx"), "--quiet"]
    assert main([*given, "--data", str(tmp_path / "data.npz")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "error: onnxruntime cannot run this batch, 'x' (10, 4), 'target' (10, 8): " in err


def test_numbers_beyond_the_type_of_an_input() -> None:
    fed = {"x": np.array([[1.0, 2.0], [1e300, np.inf]])}
    with pytest.raises(
        ob.InvalidArgumentError, match=r"'x' has type float32, got 1e\+300 at \(1, 0\), which is beyond"
    ):
        cast("x", fed["x"], np.dtype(np.float32))
    np.testing.assert_array_equal(cast("x", np.array([np.inf, 1.0]), np.dtype(np.float32)), [np.inf, 1])
