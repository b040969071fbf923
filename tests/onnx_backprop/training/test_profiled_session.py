"""A profile is taken in a session like the trainer's."""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest

from onnx_backprop.training.reports import profiling


class OpenedError(Exception):
    """In place of the second trainer."""


SETTINGS = {
    "intra_op_num_threads": 3,
    "inter_op_num_threads": 2,
    "execution_mode": onnxruntime.ExecutionMode.ORT_PARALLEL,
    "execution_order": onnxruntime.ExecutionOrder.PRIORITY_BASED,
    "graph_optimization_level": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "enable_cpu_mem_arena": False,
    "enable_mem_pattern": False,
    "enable_mem_reuse": False,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Twin:
        graph, kernels, where = "graph", "native", {"device": "cpu"}
        session_options = onnxruntime.SessionOptions()

        def __init__(self, graph: str = "", **arguments: Any) -> None:
            if graph:
                seen.append((graph, arguments))
                raise OpenedError

    trainer: Any = Twin()
    assert getattr(trainer.session_options, name) != SETTINGS[name]
    setattr(trainer.session_options, name, SETTINGS[name])
    monkeypatch.setattr(profiling, "Trainer", Twin)
    with pytest.raises(OpenedError):
        profiling.profile(trainer, {})
    ((graph, arguments),) = seen
    assert (graph, arguments["kernels"], arguments["learning_rate"]) == ("graph", "native", 0.0)
    assert arguments["device"] == "cpu"
    assert getattr(arguments["session_options"], name) == SETTINGS[name]
    assert arguments["session_options"].enable_profiling
