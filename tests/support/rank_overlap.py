"""On every rank of an MPI job: sums beside the backward pass and divided updates against sums behind it.

Ranks stay equal bit for bit, which the trainer verifies after every step; on two ranks, where a sum has one order, the
three ways are. On more the library sums a bucket and a whole in orders of its own: rounding. With an argument: rank 1
fails in the middle of a backward pass, while the others wait for its sums.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

import onnx_backprop as ob
from models import resnet
from onnx_backprop.distributed import replica

WAYS: tuple[dict[str, Any], ...] = ({"overlap": False}, {}, {"shard_update": True}, {"sync_batch_norm": True})
STEPS, ROUNDING = 6, 1e-5


def fail_beside(trainer: ob.Trainer, batch: dict[str, np.ndarray]) -> None:
    """Where gradients have been computed, and some sent."""
    ranks = trainer._ranks
    assert ranks is not None

    def failing() -> None:
        time.sleep(0.05)
        raise RuntimeError(f"no more memory at {time.time()}")

    if trainer.communicator.rank == 1:
        ranks.replica._buffer.take = failing
    trainer.step(batch)
    raise SystemExit("a step has ended without rank 1")


def main() -> int:
    world = MPI.COMM_WORLD
    replica.BUCKET_BYTES = 2**12
    optimizer = ob.optimizers.SGD(momentum=0.9, clip_norm=1.0)
    graph = ob.training_graph(
        resnet.build(features=8, blocks=(1, 1, 1)), loss="softmax_cross_entropy", optimizer=optimizer
    )
    rng = np.random.default_rng(1)
    batches = [
        {"image": rng.random((rows, 3, 16, 16), np.float32), "labels": rng.integers(0, 10, rows)}
        for rows in [9, 9, 2, 9, 2, 9][:STEPS]
    ]
    states, counts = [], []
    for way in WAYS:
        trainer = ob.Trainer(graph, learning_rate=0.01, communicator=world, verify_every=1, **way)
        for batch in batches:
            trainer.step(batch)
            if len(sys.argv) > 1 and way == {}:
                fail_beside(trainer, batch)
        states.append(trainer.parameters())
        ranks = trainer._ranks
        assert ranks is not None
        counts.append(len(ranks.replica._buffer.buckets) if ranks.replica.overlap else 0)
    assert counts[0] == 0, counts
    assert min(counts[1:]) > 5, counts
    apart = [max(float(np.abs(states[0][name] - other[name]).max()) for name in other) for other in states[1:3]]
    if world.Get_rank() == 0:
        print(f"{world.Get_size()} ranks, {counts[1]} buckets: {apart}")
    return int(max(apart) > (0 if world.Get_size() == 2 else ROUNDING))


if __name__ == "__main__":
    sys.exit(main())
