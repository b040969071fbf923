"""What a `Trainer` does otherwise where it is one of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnx import ModelProto

from onnx_backprop.converters.training.slots import RANDOM
from onnx_backprop.converters.training.split import split
from onnx_backprop.distributed.agreement import check_equal, named
from onnx_backprop.distributed.communicator import broadcast_json, gathered, start_of
from onnx_backprop.distributed.failures import end_all_on_uncaught
from onnx_backprop.distributed.replica import Replica
from onnx_backprop.distributed.sharded import Division
from onnx_backprop.distributed.shards import shard_rows
from onnx_backprop.opset.core.errors import CheckpointError, InvalidArgumentError
from onnx_backprop.ort_ops import lower, run_bound, session
from onnx_backprop.training.data.batches import Batches
from onnx_backprop.training.inputs import refusals

if TYPE_CHECKING:
    from onnx_backprop.training.trainer import Trainer

OrtValue = onnxruntime.OrtValue
_PROGRAMS = ("onnxruntime", "onnx", "numpy", "llvmlite")  # whose versions decide about bits


class Ranks:
    """The rank of a trainer among others. update: the model that it runs behind the summed gradients."""

    def __init__(
        self,
        trainer: Trainer,
        model: ModelProto,
        verify_every: int,
        *,
        sync_batch_norm: bool,
        overlap: bool,
        shard_update: bool,
    ) -> None:
        """All ranks do this. Errors: ReplicaError where their graphs or programs are not the same."""
        self._trainer, self._every, self.communicator = trainer, verify_every, trainer.communicator
        if (privacy := trainer.graph.options.privacy) and not privacy.get("expected"):
            raise InvalidArgumentError(
                "per_sample_clip on several ranks: no rank knows the rows of all. Make the graph with expected_batch, "
                "the rows that are expected of a whole batch"
            )
        end_all_on_uncaught(self.communicator)
        advice = "Install the same everywhere"
        check_equal(
            self.communicator, "other versions", [f"{name} {version(name)}".encode() for name in _PROGRAMS], advice
        )
        start = start_of(self.communicator) if overlap and trainer.kernels == "native" else None
        options = f"{trainer.kernels} {sync_batch_norm} {start is not None} {shard_update}"
        graph = [model.SerializeToString(deterministic=True), options.encode()]
        check_equal(self.communicator, "another training graph", graph, "Give every rank the same model and options")
        parts = split(trainer.graph, model)
        self.update = parts.update
        self.division = Division(trainer.graph, parts.update, self.communicator) if shard_update else None
        self.replica = Replica(
            trainer.graph, parts, self.communicator, self._open, sync_batch_norm=sync_batch_norm, start=start
        )

    def _open(self, model: ModelProto) -> onnxruntime.InferenceSession:
        native = lower(model, self._trainer.kernels, [self._trainer.graph.loss])
        return session(native.model, kernels=None, session_options=self._trainer.session_options)

    def start(self, state: dict[str, np.ndarray]) -> None:
        """Give all ranks rank 0's values; what graphs state to be zeros or copies is the same anyway."""
        graph = self._trainer.graph
        random = graph.slot(RANDOM)
        for name in sorted(state):
            if name == random or name not in graph.fill:
                self.communicator.broadcast(state[name])

    def summed(self, batch: Mapping[str, Any], state: Mapping[str, OrtValue]) -> dict[str, OrtValue]:
        """What the update reads: gradients, loss and statistics of the whole batch."""
        inputs = self._trainer.inputs
        shard = shard_rows(batch, self.communicator.rank, self.communicator.size)
        fed = inputs.ort_values(shard) if shard.rows else {}

        def run(session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, again: bool) -> None:
            with refusals(fed):
                if again:
                    run_bound(session, binding)
                else:
                    session.run_with_iobinding(binding)

        return self.replica.step(shard, fed, state, run)

    def sum_waiting(self, state: Mapping[str, OrtValue]) -> dict[str, np.ndarray]:
        """What is new in the state once no gradients wait to be summed."""
        return self.replica.sum_waiting(state)

    def verify(self) -> None:
        """Every so many steps: ReplicaError where a rank has come to another state, which is never put right."""
        if self._every and self._trainer.steps % self._every == 0:
            state = self._trainer.held_by_all()
            parts = [f"{self._trainer.steps} {self._trainer.learning_rate!r}".encode(), *named(state)]
            what = f"after step {self._trainer.steps} another state"
            check_equal(
                self.communicator, what, parts, "Ranks need equal processors and programs; resume from a checkpoint"
            )

    def whole_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Every size-th batch of a loader, beginning with that of the rank."""
        if isinstance(loader, Batches):
            return loader.every(self.communicator.rank, self.communicator.size)
        return islice(loader, self.communicator.rank, None, self.communicator.size)

    def totals(self, total: float, seen: float) -> tuple[float, float]:
        """The sums of two numbers over all ranks, in the order of the ranks."""
        rows_of_all = gathered(self.communicator, np.array([total, seen], np.float64))
        return float(sum(rows_of_all[:, 0].tolist())), float(sum(rows_of_all[:, 1].tolist()))

    def from_first(
        self, tensors: dict[str, np.ndarray], about: dict[str, Any], state: Mapping[str, tuple[Sequence[int], np.dtype]]
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """A checkpoint that rank 0 has read, on all ranks; CheckpointError on all where it is one of another graph.

        state: shapes and types of the graph's.
        """
        fits = {name: [list(a.shape), str(a.dtype)] for name, a in tensors.items()}
        about, fits = broadcast_json(self.communicator, [about, fits])
        if fits != {name: [list(shape), str(dtype)] for name, (shape, dtype) in state.items()}:
            if tensors:
                return tensors, about  # rank 0 says what is wrong
            raise CheckpointError("the checkpoint of rank 0 belongs to another training graph")
        tensors = tensors or {name: np.empty(shape, dtype) for name, (shape, dtype) in state.items()}
        for name in sorted(tensors):
            self.communicator.broadcast(tensors[name])
        return tensors, about
