"""One network, trained on a device and on the CPU: `python -m tests.devices.beside DEVICE CASE STEPS`, which writes JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import onnx_backprop as ob
from onnx_backprop.training.evaluation import lengths_of
from tests.devices.networks import CASES, Case


def beside(case: Case, device: str, steps: int, **options: Any) -> dict[str, Any]:
    """Losses of a training on the CPU and of one on the device, and what is known of the latter.

    unlike: the largest difference of the losses, also of the first one behind a checkpoint of the device that the CPU
    goes on from. copied: tensors of the state that were copied back in the steps, and in saving and exporting.
    No steps: where the nodes are placed, and nothing is run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ob.OnnxBackpropWarning)  # of a decoder's cache
        graph = case.graph()
    batches = list(case.batches(steps + 1))
    if not steps:
        trainer = ob.Trainer(graph, device=device, **options)
        assert trainer._placed is not None
        trainer._placed.session(lengths_of(trainer.inputs.ort_values(batches[0])))
        return _placed(trainer)
    reference = ob.Trainer(graph, learning_rate=case.rate, kernels="onnx")
    expected = [reference.step(batch) for batch in batches]
    trainer = ob.Trainer(graph, learning_rate=case.rate, device=device, **options)
    start = time.perf_counter()
    trainer.step(batches[0])
    first = time.perf_counter() - start
    for batch in batches[1:-1]:
        trainer.step(batch)
    trainer.read_losses()
    copied = trainer.copies.to_host
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        trainer.save(checkpoint)
        saved = trainer.copies.to_host - copied
        on_cpu = ob.Trainer(graph, learning_rate=case.rate, kernels="onnx").load(checkpoint)
    trainer.step(batches[-1])
    trainer.read_losses()
    losses = [loss for _, loss in trainer.losses.points]
    unlike = float(np.abs(np.subtract(losses, expected)).max())
    unlike = max(unlike, abs(on_cpu.step(batches[-1]) - expected[-1]))
    return _placed(trainer) | {
        "steps": steps,
        "unlike": unlike,
        "losses": [expected[0], expected[-1]],
        "copied": copied,
        "saved": saved,
        "state": len(graph.state),
        "first_step": first,
    }


def _placed(trainer: ob.Trainer) -> dict[str, Any]:
    place = trainer.placement
    assert place is not None
    return {
        "nodes": place.nodes,
        "on_device": place.on_device,
        "elsewhere": [[node.op_type, node.reason] for node in place.elsewhere],
    }


if __name__ == "__main__":
    device, name, steps = sys.argv[1:]
    (case,) = (case for case in CASES if case.name == name)
    print(json.dumps(beside(case, device, int(steps))))
