"""A rank's half of a step: the gradients of its rows, summed over all ranks, which the update then reads.

    gradient = Σ_r share_r · gradient_r,   share_r = weight_r / Σ weight,   the loss and running statistics likewise

One buffer holds everything that is summed, so that there is one message; with accumulation the gradients' part of it is
summed in the last step of an update only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, helper

from onnx_backprop.converters.training.names import MICRO_STEP, RANDOM_STATE
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.split import Split
from onnx_backprop.distributed.batch_norm import synchronise
from onnx_backprop.distributed.communicator import Communicator, gathered
from onnx_backprop.distributed.shards import Shard, Weights
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError
from onnx_backprop.ort_ops.numpy_route import SUM, summing

OrtValue = onnxruntime.OrtValue
Run = Callable[[onnxruntime.InferenceSession, onnxruntime.IOBinding], None]
_NEXT_TO_NOTHING = 2.0**-40  # a share below all rounding, whose inverse float32 still has room for
_MOST_AXES = 16  # of an input
_ALIGNED = 64  # bytes: tensors begin with a cache line
_SALT = 0x9E3779B97F4A7C15  # odd: ranks have different seeds, rank 0 the one that was given


class Replica:
    """The first half of a split training graph in a session, and what its outputs are summed in."""

    def __init__(
        self,
        graph: TrainingGraph,
        parts: Split,
        communicator: Communicator,
        open_session: Callable[[ModelProto], onnxruntime.InferenceSession],
        *,
        sync_batch_norm: bool,
    ) -> None:
        """Errors: UnsupportedError for gradients in bfloat16, and what `synchronise` raises."""
        self._synchronised = sync_batch_norm and synchronise(parts.gradients) > 0
        self._communicator, self._graph = communicator, graph
        self._passed, self._statistics = parts.passed, parts.statistics
        self._weights = Weights(graph)
        self._accumulate = int((graph.settings.get("optimizer") or {}).get("accumulate", 1))
        self._scaled = any(name.startswith("loss_scale") for name in graph.fill)
        self._inputs = list(parts.gradients.graph.input)
        self._session = open_session(parts.gradients)
        self._read = [value.name for value in self._session.get_inputs() if value.name in graph.updates]
        self._buffer = _Buffer(parts)
        self._micro = next((name for name in graph.fill if name.startswith(MICRO_STEP)), None)
        self._sums = self._accumulated(parts) if self._accumulate > 1 else {}
        self._waits = False  # whether gradients wait to be summed

    def _accumulated(self, parts: Split) -> dict[str, str]:
        """The state that holds the sum of each gradient between updates."""
        result = {g: f"{p}.accumulated" for p, g in parts.of.items()}
        for name in result.values():
            if name not in self._graph.fill:
                raise UnsupportedError(
                    f"accumulation on several ranks: expected a state {name!r}. Rename the initializer that has that "
                    "name in the model"
                )
        return result

    def step(
        self, shard: Shard, fed: Mapping[str, OrtValue], state: Mapping[str, OrtValue], run: Run
    ) -> dict[str, OrtValue]:
        """What the update reads, the same on all ranks. shard: this rank's rows; fed: as onnxruntime takes them.

        Errors: InvalidArgumentError, on all ranks, where none has a row.
        """
        buffer, rows = self._buffer, shard.rows
        weight = self._weights.of(shard)
        total = np.array([weight, rows], np.float64)
        self._communicator.sum(total)
        if not total[1]:
            raise InvalidArgumentError(
                "expected a batch of 1 row or more on all ranks together, got none. Leave it out"
            )
        counted = weight / total[0] if total[0] else 0.0
        share = 1.0 if self._weights.summed and rows else counted
        counts = rows > 0 and (weight > 0 or not total[0])  # a loss of ignored labels alone is NaN, as on one rank
        if self._synchronised:
            fed = self._with_a_row(shard, fed)
            if rows and not counts:  # its rows are in the statistics, through which the loss of others depends on them
                fed = {**fed, **{n: OrtValue.ortvalue_from_numpy(v) for n, v in self._weights.stand_in(shard).items()}}
                share, counts = _NEXT_TO_NOTHING, True
            with self._summing(share, rows):
                run(self._session, self._bound(fed, state))
        elif counts:
            run(self._session, self._bound(fed, state))
        if counts:
            buffer.take()
        else:
            buffer.clear()
        buffer.scale(share, counted)
        if self._accumulate == 1:
            buffer.sum(self._communicator)
        else:
            self._accumulated_step(state)
        return {self._passed[name]: value for name, value in buffer.values()}

    @contextmanager
    def _summing(self, share: float, rows: int) -> Iterator[None]:
        """A block in whose runs statistics are summed over all ranks, of which those without rows have none."""

        def by(name: str, array: np.ndarray) -> None:
            weight = float(rows > 0) if name == SUM else share
            array[...] = array * weight if weight else 0
            self._communicator.sum(array)
            array /= weight if weight else 1

        summing.by, summing.error = by, None
        try:
            yield
        finally:
            del summing.by
        if summing.error is not None:
            raise summing.error

    def _with_a_row(self, shard: Shard, fed: Mapping[str, OrtValue]) -> Mapping[str, OrtValue]:
        """What is fed, or where that has no rows one of zeros, so that the sums of all ranks take place everywhere."""
        declared = {v.name: v.type.tensor_type for v in self._inputs if v.name in self._graph.inputs}
        shapes = np.zeros((len(declared), _MOST_AXES), np.int64)
        for row, name in zip(shapes, declared, strict=True):
            if shard.rows:
                row[: np.ndim(shard[name])] = np.shape(shard[name])
        known = gathered(self._communicator, shapes).max(axis=0)
        if shard.rows:
            return fed
        return {
            name: OrtValue.ortvalue_from_numpy(
                np.zeros((1, *row[1 : len(kind.shape.dim)]), helper.tensor_dtype_to_np_dtype(kind.elem_type))
            )
            for row, (name, kind) in zip(known, declared.items(), strict=True)
        }

    def _bound(self, fed: Mapping[str, OrtValue], state: Mapping[str, OrtValue]) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        for name, value in fed.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._read:
            binding.bind_ortvalue_input(name, self._own_masks(state[name]) if name == RANDOM_STATE else state[name])
        self._buffer.bind(binding)
        return binding

    def _own_masks(self, state: OrtValue) -> OrtValue:
        """The seed of this rank, and the number of the run."""
        seed, run = (int(n) for n in state.numpy())
        own = (seed + self._communicator.rank * _SALT) & (2**63 - 1) if self._communicator.rank else seed
        return OrtValue.ortvalue_from_numpy(np.array([own, run], np.int64))

    def _accumulated_step(self, state: Mapping[str, OrtValue]) -> None:
        """Gradients wait until the update is due, which until then reads zeros, and NaN where one is not finite."""
        buffer = self._buffer
        assert self._micro is not None
        finite = not self._scaled or buffer.finite()
        bad = np.array([not finite], np.int64)
        buffer.sum_rest(self._communicator)
        self._communicator.sum(bad)
        if bad[0]:
            buffer.fill_gradients(np.nan)
            return
        buffer.accumulate()
        self._waits = True
        if int(state[self._micro].numpy()) + 1 >= self._accumulate:
            buffer.release()
            buffer.sum_gradients(self._communicator)
            self._waits = False
        else:
            buffer.fill_gradients(0)

    def settled(self, state: Mapping[str, OrtValue]) -> dict[str, np.ndarray]:
        """The state in which no gradients wait, so that it is that of all ranks: what is new in it.

        All ranks call this, where accumulation is in the middle of an update.
        """
        if not self._waits:
            return {}
        buffer = self._buffer
        buffer.release()
        buffer.sum_gradients(self._communicator)
        self._waits = False
        result: dict[str, np.ndarray] = {}
        for name, value in buffer.values():
            if name in self._sums:
                old = state[self._sums[name]].numpy()
                result[self._sums[name]] = old + value.numpy().astype(old.dtype) * old.dtype.type(1 / self._accumulate)
        return result


class _Buffer:
    """Tensors side by side in memory, those of one type in one array; gradients first, then what every step sums."""

    def __init__(self, parts: Split) -> None:
        declared = {v.name: v.type.tensor_type for v in parts.gradients.graph.output}
        self._gradient_names = gradients = set(parts.of.values())
        self._arrays: dict[np.dtype, np.ndarray] = {}
        self._ends: dict[np.dtype, int] = {}  # of the gradients in the arrays
        self._views: dict[str, np.ndarray] = {}
        self._outputs: dict[str, np.ndarray] = {}  # where the session writes: views, but for float16
        self._counted: dict[np.dtype, int] = {}  # where the statistics begin, which come last
        statistics = set(parts.statistics.values())
        lengths: dict[np.dtype, int] = {}
        places: dict[str, tuple[np.dtype, int, tuple[int, ...]]] = {}
        for name in sorted(declared, key=lambda name: 0 if name in gradients else 2 if name in statistics else 1):
            if declared[name].elem_type == TensorProto.BFLOAT16:
                raise UnsupportedError(f"{name!r}: gradients in bfloat16 are not summed. Use float32 or float16")
            own = helper.tensor_dtype_to_np_dtype(declared[name].elem_type)
            wide = np.dtype(np.float32) if own == np.float16 else own
            shape = tuple(d.dim_value for d in declared[name].shape.dim)
            start = lengths.setdefault(wide, 0)
            places[name] = wide, start, shape
            lengths[wide] = -(-(start + prod(shape)) * wide.itemsize // _ALIGNED) * _ALIGNED // wide.itemsize
            if name in gradients:
                self._ends[wide] = lengths[wide]
            if name not in statistics:
                self._counted[wide] = lengths[wide]
        for dtype, length in lengths.items():
            self._arrays[dtype] = _aligned(length, dtype)
        for name, (dtype, start, shape) in places.items():
            view = self._arrays[dtype][start : start + prod(shape)].reshape(shape)
            own = helper.tensor_dtype_to_np_dtype(declared[name].elem_type)
            self._views[name] = view
            self._outputs[name] = view if own == dtype else np.zeros(shape, own)
        self._values = {name: OrtValue.ortvalue_from_numpy(array) for name, array in self._outputs.items()}
        self._pending: dict[np.dtype, np.ndarray] = {}

    def bind(self, binding: onnxruntime.IOBinding) -> None:
        for name, value in self._values.items():
            binding.bind_ortvalue_output(name, value)

    def take(self) -> None:
        """Take over what the session has written elsewhere."""
        for name, view in self._views.items():
            if view is not self._outputs[name]:
                view[...] = self._outputs[name]

    def scale(self, share: float, counted: float) -> None:
        """Weigh what the session has written; running statistics as the mean over the ranks."""
        for dtype, array in self._arrays.items():
            start = self._counted.get(dtype, 0)
            array[:start] *= dtype.type(share)
            array[start:] *= dtype.type(counted)

    def sum(self, communicator: Communicator) -> None:
        for array in self._arrays.values():
            communicator.sum(array)

    def sum_gradients(self, communicator: Communicator) -> None:
        for gradients in self._gradients():
            communicator.sum(gradients)

    def sum_rest(self, communicator: Communicator) -> None:
        """Sum what is no gradient."""
        for dtype, array in self._arrays.items():
            communicator.sum(array[self._ends.get(dtype, 0) :])

    def _gradients(self) -> Iterator[np.ndarray]:
        return (self._arrays[dtype][:end] for dtype, end in self._ends.items())

    def finite(self) -> bool:
        return all(np.isfinite(gradients).all() for gradients in self._gradients())

    def clear(self) -> None:
        for array in self._arrays.values():
            array[...] = 0

    def fill_gradients(self, number: float) -> None:
        for name in self._gradient_names:  # not what lies between them, which stays 0
            self._views[name][...] = number

    def accumulate(self) -> None:
        for gradients in self._gradients():
            if gradients.dtype in self._pending:
                self._pending[gradients.dtype] += gradients
            else:
                self._pending[gradients.dtype] = gradients.copy()

    def release(self) -> None:
        """Gradients ← the sum of those that were accumulated, of which none is left."""
        for gradients in self._gradients():
            gradients[...] = self._pending.pop(gradients.dtype, 0)

    def values(self) -> Iterator[tuple[str, OrtValue]]:
        for name, view in self._views.items():
            if view is not self._outputs[name]:
                self._outputs[name][...] = view
            yield name, self._values[name]


def _aligned(length: int, dtype: np.dtype) -> np.ndarray:
    """Zeros that begin with a cache line."""
    block = np.zeros(length * dtype.itemsize + _ALIGNED, np.uint8)
    start = -block.ctypes.data % _ALIGNED
    return block[start : start + length * dtype.itemsize].view(dtype)
