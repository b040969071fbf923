"""Pipelines of scikit-learn, fitted to small data and written by skl2onnx."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tests.field.sources import Feeds, Source

FEATURES = 6


def _data(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
    return x, x @ rng.standard_normal(FEATURES) + np.sin(2 * x[:, 0])


def _feeds(_: np.random.Generator) -> Feeds:
    return {"X": _data(8, 7)[0]}


def _source(name: str, make: Callable[[Any], Any], *, classes: int = 0, zipmap: bool = True) -> Source:
    def write(path: Path) -> None:
        sklearn = _Modules()
        x, y = _data(120, 1)
        estimator = make(sklearn)
        labels = np.digitize(y, np.quantile(y, np.arange(1, classes) / classes)) if classes else y
        estimator.fit(x, labels)
        skl2onnx = import_module("skl2onnx")
        options = {id(estimator): {"zipmap": False}} if classes and not zipmap else None
        model = skl2onnx.to_onnx(estimator, x[:1], options=options, target_opset=18)
        path.write_bytes(model.SerializeToString())

    prediction = None
    if classes:
        prediction = "output_probability" if zipmap else "probabilities"
    return Source(name, f"skl2onnx {version('skl2onnx')}", write, _feeds, prediction=prediction, kind="sklearn")


class _Modules:
    """`s.linear_model` is sklearn.linear_model."""

    def __getattr__(self, name: str) -> Any:
        return import_module(f"sklearn.{name}")


def pipelines() -> list[Source]:
    def piped(*steps: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda s: s.pipeline.make_pipeline(*(step(s) for step in steps))

    def scaler(s: Any) -> Any:
        return s.preprocessing.StandardScaler()

    def network(s: Any) -> Any:
        return s.neural_network.MLPRegressor(hidden_layer_sizes=(16, 8), max_iter=50, random_state=0)

    def classifier(s: Any) -> Any:
        return s.neural_network.MLPClassifier(hidden_layer_sizes=(16,), max_iter=50, random_state=0)

    return [
        _source("sklearn-linear", lambda s: s.linear_model.LinearRegression()),
        _source("sklearn-ridge-scaled", piped(scaler, lambda s: s.linear_model.Ridge())),
        _source("sklearn-mlp", piped(scaler, network)),
        _source(
            "sklearn-minmax-polynomial",
            piped(
                lambda s: s.preprocessing.MinMaxScaler(),
                lambda s: s.preprocessing.PolynomialFeatures(2),
                lambda s: s.linear_model.Ridge(),
            ),
        ),
        _source("sklearn-pca", piped(lambda s: s.decomposition.PCA(3), lambda s: s.linear_model.LinearRegression())),
        _source("sklearn-normalizer", piped(lambda s: s.preprocessing.Normalizer(), network)),
        _source("sklearn-imputer", piped(lambda s: s.impute.SimpleImputer(), lambda s: s.linear_model.Ridge())),
        _source("sklearn-logistic", lambda s: s.linear_model.LogisticRegression(), classes=3, zipmap=False),
        _source("sklearn-mlp-zipmap", piped(scaler, classifier), classes=3),
        _source("sklearn-mlp-classifier", piped(scaler, classifier), classes=3, zipmap=False),
        _source("sklearn-svr", piped(scaler, lambda s: s.svm.SVR())),
        _source("sklearn-svc", lambda s: s.svm.SVC(probability=True, random_state=0), classes=2, zipmap=False),
        _source("sklearn-forest", lambda s: s.ensemble.RandomForestRegressor(5, max_depth=3, random_state=0)),
        _source(
            "sklearn-boosting",
            lambda s: s.ensemble.GradientBoostingClassifier(n_estimators=5, random_state=0),
            classes=2,
            zipmap=False,
        ),
        _source("sklearn-neighbours", lambda s: s.neighbors.KNeighborsRegressor(3)),
        _source("sklearn-gaussian-process", lambda s: s.gaussian_process.GaussianProcessRegressor()),
    ]
