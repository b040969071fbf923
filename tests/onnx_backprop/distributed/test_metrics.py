"""Metrics of several ranks: the sums of all, where one of them has no batch too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnx_backprop as ob
from tests.onnx_backprop.distributed.threads import Threads, on_ranks
from tests.support.metric_cases import parts, trainer


def test_metrics_are_those_of_one_rank(rng: np.random.Generator) -> None:
    x, t = rng.standard_normal((2, 9, 3)).astype(np.float32)
    labels = rng.integers(0, 3, 9)
    cases: list[tuple[Any, dict[str, np.ndarray], str]] = [
        ("mse", {"x": x, "target": t}, "mae,r2,rmse"),
        ("softmax_cross_entropy", {"x": x, "labels": labels}, "accuracy,f1,confusion_matrix,auroc"),
    ]
    for loss, feeds, asked in cases:
        for sizes in ((3, 1, 5), (4, 5)):
            expected = trainer("N, 3", loss).evaluate(parts(feeds, sizes), metrics=asked)

            def work(
                rank: Threads, loss: Any = loss, feeds: Any = feeds, sizes: Any = sizes, asked: str = asked
            ) -> Any:
                return trainer("N, 3", loss, communicator=rank).evaluate(parts(feeds, sizes), metrics=asked)

            one, *others = on_ranks(3, work)
            for other in others:
                assert float(other) == float(one)
                assert str(other.metrics) == str(one.metrics)
            for name, value in expected.metrics.items():
                np.testing.assert_allclose(one.metrics[name], value, rtol=1e-13, err_msg=name)


def test_metrics_of_whole_arrays_are_refused() -> None:
    feeds = {"x": np.ones((2, 3), np.float32), "target": np.ones((2, 3), np.float32)}

    asked: Any = {"own": lambda t, y: (t - y).max()}
    steps: list[int] = []

    def evaluates(rank: Threads) -> None:
        trainer("N, 3", "mse", communicator=rank).evaluate([feeds, feeds], metrics=asked)

    def trains(rank: Threads) -> None:
        it = trainer("N, 3", "mse", communicator=rank)
        it.fit([feeds], 1, evaluation=[feeds], metrics=asked, callbacks=[lambda _, record: steps.append(record.step)])

    for work in (evaluates, trains):
        with pytest.raises(ob.UnsupportedError, match="'own' is a function of all arrays together, of which each of 2"):
            on_ranks(2, work)
    assert not steps, "refused before the first"
