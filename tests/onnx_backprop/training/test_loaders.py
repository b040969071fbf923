"""Loaders and batches as people have them: functions, generators, nested batches, datasets, files elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

import onnx_backprop as ob
from onnx_backprop.training.data.stored import read_rows

X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
MODEL = """
    <ir_version: 10, opset_import: ["": 18]>
    g (float[N, 4] x, float[N, 4] mask) => (float[N, 4] y) <float[1] w = {2}> { a = Mul (x, w) y = Mul (a, mask) }"""


def trainer() -> ob.Trainer:
    return ob.Trainer(ob.training_graph(parser.parse_model(MODEL), loss="mse", optimizer="sgd"), kernels="onnx")


def losses(loader: Any, epochs: int = 2) -> list[float]:
    return [record.loss for record in trainer().fit(loader, epochs)]


def test_functions_generators_and_nested_batches() -> None:
    expected = losses([(X, X, X)] * 3)
    loaders: list[Any] = [
        lambda: iter([(X, X, X)] * 3),
        lambda: ((X, X, X) for _ in range(3)),
        [((X, X), X)] * 3,
        [[[X, X], X]] * 3,
        [({"x": X, "mask": X}, X)] * 3,
        [({"mask": X}, X, X)] * 3,
        [{"x": X, "mask": X, "target": X}] * 3,
        [(X.tolist(), X.tolist(), X.tolist())] * 3,
        [(list(X), list(X), list(X))] * 3,
        [([list(row) for row in X], list(X), X)] * 3,
    ]
    for n, loader in enumerate(loaders):
        assert losses(loader) == expected, n
    assert losses((part for part in [(X, X, X)] * 3), 1) == expected[:3]


def test_a_generator_is_gone_through_once() -> None:
    with pytest.raises(ob.InvalidArgumentError, match="loader: a generator gives its batches once, and .* 2 times"):
        trainer().fit((part for part in [(X, X, X)]), 2)
    with pytest.raises(ob.InvalidArgumentError, match="evaluation: a list_iterator gives its batches once"):
        trainer().fit([(X, X, X)], 2, evaluation=iter([(X, X, X)]))
    trainer().fit([(X, X, X)], 1, evaluation=iter([(X, X, X)]))
    with pytest.raises(ob.InvalidArgumentError, match="the function returned int, expected batches"):
        trainer().fit(lambda: 3, 1)
    with pytest.raises(ob.InvalidArgumentError, match=r"a sequence of 3 arrays \(x, mask, target\), got tuple of 2"):
        trainer().fit([(X, X)], 1)


def test_predictions_need_no_target() -> None:
    trained = trainer()
    whole = trained.predict(X, X, X)
    alone = trained.predict(X, X)
    assert list(whole) == ["loss", "y"]
    assert list(alone) == ["y"]
    np.testing.assert_array_equal(alone["y"], whole["y"])
    trained.step(X, X, X)
    np.testing.assert_array_equal(trained.predict(X, mask=X)["y"], trained.predict(X, X, X)["y"])
    with pytest.raises(ob.InvalidArgumentError, match="'mask' missing"):
        trained.predict(X)


def test_a_target_that_the_outputs_need_is_asked_for() -> None:
    """The model reads its target itself."""
    graph = ob.training_graph(
        parser.parse_model(MODEL), loss=ob.losses.MSE(target="mask"), optimizer="sgd", trainable=["w"]
    )
    trained = ob.Trainer(graph, kernels="onnx")
    assert trained.predict(X, X)["y"].shape == X.shape
    with pytest.raises(ob.InvalidArgumentError, match="'mask' missing"):
        trained.predict(x=X)


def test_files_elsewhere(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="pip install fsspec")
    np.savez(tmp_path / "data.npz", x=X, target=2 * X)
    files = fsspec.filesystem("memory")
    files.pipe("/bucket/data.npz", (tmp_path / "data.npz").read_bytes())
    files.pipe("/bucket/parts/a.npz", (tmp_path / "data.npz").read_bytes())
    files.pipe("/bucket/parts/b.npz", (tmp_path / "data.npz").read_bytes())
    np.testing.assert_array_equal(read_rows("memory://bucket/data.npz")["target"], 2 * X)
    np.testing.assert_array_equal(read_rows("memory://bucket/parts")["x"][:], np.concatenate([X, X]))
    with pytest.raises(ob.InvalidArgumentError, match="--data: there is no memory://bucket/none.npz"):
        read_rows("memory://bucket/none.npz", what="--data")
    with pytest.raises(ob.InvalidArgumentError, match="cannot be read|read through"):
        read_rows("nosuchprotocol://bucket/none.npz", what="--data")


def test_datasets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    dataset = datasets.Dataset.from_dict({"x": X.tolist(), "target": (2 * X).tolist(), "text": ["a"] * 6})
    loader = ob.Batches(dataset.select_columns(["x", "target"]), 4, seed=1)
    expected = list(ob.Batches({"x": X, "target": 2 * X}, 4, seed=1))
    for batch, arrays in zip(loader, expected, strict=True):
        for name, array in arrays.items():
            np.testing.assert_array_equal(batch[name], array)
    with pytest.raises(ob.InvalidArgumentError, match="column 'text': expected numbers of one shape"):
        ob.Batches(dataset, 4)


def test_a_data_loader_with_workers() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(X), torch.from_numpy(X))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2)
    assert losses(loader) == losses([(X[n : n + 2],) * 3 for n in (0, 2, 4)])
