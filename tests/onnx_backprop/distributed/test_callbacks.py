"""Callbacks on several ranks do what they do on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import onnx_backprop as ob
from onnx_backprop.converters.training.optimizers import SGD
from tests.onnx_backprop.distributed.threads import Threads, on_ranks
from tests.support.training_models import classifier, data


def test_ranks_stop_keep_and_average_together(tmp_path: Path) -> None:
    """Batches of 7 rows on two ranks, statistics of whole batches; no Dropout, whose masks are a rank's own."""
    model = classifier()
    for node in model.graph.node:
        if node.op_type == "Dropout":
            node.op_type = "Identity"
            del node.input[1:]
    graph = ob.training_graph(model, loss="softmax_cross_entropy", optimizer=SGD(), training_mode=True)
    evaluation = ob.Batches(data(), 9, shuffle=False)

    def work(communicator: Threads | None) -> Any:
        name = f"rank{communicator.rank}" if communicator else "alone"
        trainer = ob.Trainer(
            graph,
            learning_rate=0.3,
            kernels="onnx",
            communicator=communicator,
            sync_batch_norm=communicator is not None,
        )
        before = trainer.find_learning_rate(ob.Batches(data(), 7), 1e-4, 10.0, steps=12).suggestion
        best = ob.callbacks.KeepBest(tmp_path / f"{name}.best", "accuracy", restore=False)
        calls = [ob.callbacks.EarlyStopping("accuracy", patience=2), best]
        records = trainer.fit(
            ob.Batches(data(), 7, seed=1), 9, evaluation=evaluation, metrics="accuracy", callbacks=calls, progress=False
        )
        calls = [ob.callbacks.StochasticWeightAveraging(start=trainer.epoch)]
        trainer.fit(ob.Batches(data(), 7, seed=1), trainer.epoch + 2, callbacks=calls, progress=False)
        return before, [r.metrics for r in records], best.best_step, trainer.state()

    alone = work(None)
    ranks = on_ranks(2, work)
    for before, measured, step, state in ranks:
        assert (measured, step) == (alone[1], alone[2])
        np.testing.assert_allclose(before, alone[0], rtol=1e-6)
        for name, value in alone[3].items():
            np.testing.assert_allclose(state[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
            np.testing.assert_array_equal(state[name], ranks[0][3][name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.best", "rank0.best"]
