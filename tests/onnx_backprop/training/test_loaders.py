"""Loaders and batches as people have them: functions, generators, nested batches, datasets, files elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
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


def test_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 as moto serves it: arrays and a folder of images are copied, and what is written stays here."""
    pytest.importorskip("s3fs", reason="s3fs is not installed here")
    server = pytest.importorskip("moto.server", reason="moto is not installed here").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    about = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}
    about["ENDPOINT_URL"] = f"http://{host}:{port}"
    for name, value in about.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        store = import_module("s3fs").S3FileSystem(skip_instance_cache=True)
        store.mkdir("bucket")
        np.savez(tmp_path / "data.npz", x=X, target=2 * X)
        store.put(str(tmp_path / "data.npz"), "bucket/data.npz")
        store.put(str(tmp_path / "data.npz"), "bucket/parts/0.npz")
        np.testing.assert_array_equal(read_rows("s3://bucket/data.npz")["target"], 2 * X)
        np.testing.assert_array_equal(read_rows("s3://bucket/parts")["x"][:], X)
        for url in ("s3://bucket/none.npz", "s3://other/data.npz"):
            with pytest.raises(ob.InvalidArgumentError, match=f"--data: there is no {url}"):
                read_rows(url, what="--data")
    finally:
        server.stop()


def test_what_is_written_is_no_url() -> None:
    it, url = trainer(), "s3://bucket/out"
    tries: list[Callable[[], Any]] = [lambda: it.save(url), lambda: it.load(url), lambda: it.export(url)]
    tries += [lambda: it.fit([(X, X, X)], 1, checkpoint=url), lambda: ob.training_graph(url, loss="mse")]
    for each in tries:
        with pytest.raises(ob.InvalidArgumentError, match=f"path: {url} is a URL. Name a file of this machine"):
            each()
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
