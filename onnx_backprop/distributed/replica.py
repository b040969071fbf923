"""A rank's half of a step: the gradients of its rows, summed over all ranks, which the update then reads.

    gradient = Σ_r share_r · gradient_r,   share_r = weight_r / Σ weight,   the loss and running statistics likewise

Where the loss is a mean, share_r is in the gradients already, whose divisor is that of the whole batch (`divisor`).
One buffer holds everything that is summed, so that there is one message, or one for each bucket of gradients where they
are sent beside the backward pass; with accumulation gradients are summed in the last step of an update only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, helper

from onnx_backprop.converters.training import slots
from onnx_backprop.converters.training.names import MICRO_STEP
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.split import Split
from onnx_backprop.distributed.batch_norm import synchronise
from onnx_backprop.distributed.communicator import Communicator, Start, gathered
from onnx_backprop.distributed.divisor import divide_by_all
from onnx_backprop.distributed.overlap import BUCKET_BYTES, Overlap, announce, filled, in_order
from onnx_backprop.distributed.shards import Shard, Weights
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError
from onnx_backprop.ort_ops.numpy_route import SUM, summed_by

OrtValue = onnxruntime.OrtValue
Run = Callable[[onnxruntime.InferenceSession, onnxruntime.IOBinding, bool], None]  # bool: it may take place twice
_NEXT_TO_NOTHING = 2.0**-40  # a share below all rounding, whose inverse float32 still has room for
_MOST_AXES = 16  # of an input
_FLOAT = np.dtype(np.float32)
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
        start: Start | None = None,
    ) -> None:
        """start: of sums that go on beside the backward pass, which takes the native kernels; None for one behind it.

        Errors: UnsupportedError for gradients in bfloat16, and what `synchronise` raises.
        """
        self._synchronised = sync_batch_norm and synchronise(parts.gradients) > 0
        self._communicator, self._graph = communicator, graph
        self._passed = parts.passed
        self._weights = Weights(graph)
        self._private = bool(graph.options.privacy)  # sums over rows, divided by a number
        whole = self._weights.summed or self._private
        self._scale = None if whole else divide_by_all(parts.gradients, graph.loss)
        self._accumulate = graph.options.accumulate
        self._scaled = graph.slot(slots.SCALE) is not None
        self._inputs = list(parts.gradients.graph.input)
        self._buffer = _Buffer(parts, in_order(parts.gradients, set(parts.of.values())))
        self.overlap = self._overlapping(parts.gradients, start) if start is not None else None
        self._session = open_session(parts.gradients)
        self._read = [value.name for value in self._session.get_inputs() if value.name in graph.updates]
        self._seen = set[tuple[tuple[int, ...], ...]]()  # shapes that a run has had, whose kernels are compiled
        self._micro = graph.slot(slots.COUNTER, MICRO_STEP)
        self._random = graph.slot(slots.RANDOM)
        sums = {slot.of: slot.name for slot in graph.state if slot.role == slots.SUM}
        self._sums = {g: sums[p] for p, g in parts.of.items() if p in sums}  # of each gradient, between updates
        self._waits = False  # whether gradients wait to be summed

    def _overlapping(self, model: ModelProto, start: Start) -> Overlap | None:
        """Sums beside the backward pass; None for one alone, gradients not in float32, or looked at before the sum."""
        buffer = self._buffer
        if not buffer.plain or (self._scaled and self._accumulate > 1):
            return None
        names = buffer.into_buckets(BUCKET_BYTES)
        return Overlap(start, announce(model, names), buffer.buckets, buffer.rest) if len(names) > 1 else None

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
        counts = rows > 0 and (weight > 0 or not total[0])  # a loss of ignored labels alone is NaN, as on one rank
        of_loss = 1.0 if self._weights.summed and rows else counted
        if self._synchronised:
            fed = self._with_a_row(shard, fed)
            if rows and not counts:  # its rows are in the statistics, through which the loss of others depends on them
                fed = {**fed, **{n: OrtValue.ortvalue_from_numpy(v) for n, v in self._weights.stand_in(shard).items()}}
                of_loss, counts = _NEXT_TO_NOTHING, True
        share = of_loss
        if self._scale is not None:
            fed = {**fed, self._scale: OrtValue.ortvalue_from_numpy(np.array(1 / of_loss if of_loss else 1.0))}
        if self._scale is not None or self._private:
            share = float(counts)
        due = self._micro is None or int(state[self._micro].numpy()) + 1 >= self._accumulate
        binding = self._bound(fed, state) if counts or self._synchronised else None
        shapes = tuple(tuple(value.shape()) for value in fed.values())
        overlap = self.overlap if due else None
        # of shapes that no run has had kernels may be missing, and the run then takes place twice (`ahead`)
        early = overlap if binding is not None and shapes in self._seen else None
        factor = share if counts else None
        weigh = partial(buffer.sent, share=factor)  # with what waits, which is none unless gradients are accumulated
        if early is not None:
            early.begin(weigh)
        try:
            if binding is not None:
                with summed_by(partial(self._sum_statistics, share=share, rows=rows)):
                    run(self._session, binding, early is None)
                self._seen.add(shapes)
            buffer.take()
            buffer.weigh_rest(of_loss if counts else None, counted)
            if overlap is None:
                self._sum(factor, due=due)
            else:
                if early is None:
                    overlap.begin(weigh, ready=True)
                overlap.finish()
                if self._succeeds():
                    self.forget()
        except BaseException:
            if overlap is not None:
                overlap.give_up()
            raise
        return {self._passed[name]: value for name, value in buffer.values()}

    def _sum_statistics(self, name: str, array: np.ndarray, *, share: float, rows: int) -> None:
        """Sum a statistic over all ranks, of which those without rows have none."""
        weight = float(rows > 0) if name == SUM else share
        array[...] = array * weight if weight else 0
        self._communicator.sum(array)
        array /= weight if weight else 1

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
        if self.overlap is not None:
            self.overlap.bind(binding)
        for name, value in fed.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._read:
            binding.bind_ortvalue_input(name, self._rank_seed(state[name]) if name == self._random else state[name])
        self._buffer.bind(binding)
        return binding

    def _rank_seed(self, state: OrtValue) -> OrtValue:
        """The seed of this rank, and the number of the run."""
        seed, run = (int(n) for n in state.numpy())
        rank_seed = (seed + self._communicator.rank * _SALT) & (2**63 - 1) if self._communicator.rank else seed
        return OrtValue.ortvalue_from_numpy(np.array([rank_seed, run], np.int64))

    def _sum(self, share: float | None, *, due: bool) -> None:
        """Sum what the session has written; with accumulation, gradients wait until the update is due.

        Until then it reads zeros, and NaN where one is not finite.
        """
        buffer = self._buffer
        buffer.weigh(share)
        if self._accumulate == 1:
            buffer.sum(self._communicator)
            return
        finite = not self._scaled or buffer.finite()
        bad = np.array([not finite], np.int64)
        buffer.sum_rest(self._communicator)
        self._communicator.sum(bad)
        if not self._succeeds():
            return
        if bad[0]:
            buffer.fill_gradients(np.nan)
            return
        buffer.accumulate()
        self._waits = True
        if due:
            buffer.release()
            buffer.sum_gradients(self._communicator)
            self._waits = False
        else:
            buffer.fill_gradients(0)

    def _succeeds(self) -> bool:
        """Whether the loss, summed by now, is a number. Otherwise the step fails, and what waits goes on waiting."""
        return bool(np.isfinite(self._buffer[self._graph.loss]).all())

    def forget(self) -> None:
        """Let no gradients wait: they have been sent, or the state is another one."""
        self._buffer.forget()
        self._waits = False

    def sum_waiting(self, state: Mapping[str, OrtValue]) -> dict[str, np.ndarray]:
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

    def __init__(self, parts: Split, order: Sequence[str]) -> None:
        """order: of the gradients."""
        declared = {v.name: v.type.tensor_type for v in parts.gradients.graph.output}
        self._order, gradients = order, set(order)
        self._arrays: dict[np.dtype, np.ndarray] = {}
        self._ends: dict[np.dtype, int] = {}  # of the gradients in the arrays
        self._views: dict[str, np.ndarray] = {}
        self._outputs: dict[str, np.ndarray] = {}  # where the session writes: views, but for float16
        self._counted: dict[np.dtype, int] = {}  # where the statistics begin, which come last
        statistics = set(parts.statistics.values())
        lengths: dict[np.dtype, int] = {}
        places: dict[str, tuple[np.dtype, int, tuple[int, ...]]] = {}
        rest = [name for name in declared if name not in gradients]
        for name in [*order, *sorted(rest, key=lambda name: name in statistics)]:
            if declared[name].elem_type == TensorProto.BFLOAT16:
                raise UnsupportedError(f"{name!r}: gradients in bfloat16 are not summed. Use float32 or float16")
            declared_dtype = helper.tensor_dtype_to_np_dtype(declared[name].elem_type)
            wide = _FLOAT if declared_dtype == np.float16 else declared_dtype
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
            declared_dtype = helper.tensor_dtype_to_np_dtype(declared[name].elem_type)
            self._views[name] = view
            self._outputs[name] = view if declared_dtype == dtype else np.zeros(shape, declared_dtype)
        self._values = {name: OrtValue.ortvalue_from_numpy(array) for name, array in self._outputs.items()}
        self._pending: dict[np.dtype, np.ndarray] = {}
        self._starts = [places[name][1] for name in order]
        self._bounds: list[tuple[int, int]] = []  # of the buckets, in the array of the gradients
        self.buckets: list[np.ndarray] = []

    def __getitem__(self, name: str) -> np.ndarray:
        return self._views[name]

    @property
    def plain(self) -> bool:
        """Whether the session writes every gradient in float32."""
        return all(self._outputs[name].dtype == _FLOAT for name in self._order)

    def into_buckets(self, least: int) -> list[list[str]]:
        """Make buckets of so many bytes or more of the gradients, all of them float32; which gradients each has."""
        array, starts = self._arrays[_FLOAT], [*self._starts, self._ends[_FLOAT]]
        sizes = [4 * (end - start) for start, end in pairwise(starts)]
        parts = filled(sizes, least)
        self._bounds = [(starts[first], starts[end]) for first, end in parts]
        self.buckets = [array[start:end] for start, end in self._bounds]
        return [list(self._order[first:end]) for first, end in parts]

    @property
    def rest(self) -> list[np.ndarray]:
        """What is no gradient."""
        return [array[self._ends.get(dtype, 0) :] for dtype, array in self._arrays.items()]

    def bind(self, binding: onnxruntime.IOBinding) -> None:
        for name, value in self._values.items():
            binding.bind_ortvalue_output(name, value)

    def take(self) -> None:
        """Take over what the session has written elsewhere."""
        for name, view in self._views.items():
            if view is not self._outputs[name]:
                view[...] = self._outputs[name]

    def weigh(self, share: float | None) -> None:
        """Weigh the gradients that the session has written; None: there are none."""
        for gradients in self._gradients():
            _weigh(gradients, share)

    def weigh_rest(self, share: float | None, counted: float) -> None:
        """Weigh what is no gradient; running statistics as the mean over the ranks."""
        for dtype, array in self._arrays.items():
            end, start = self._ends.get(dtype, 0), self._counted.get(dtype, 0)
            _weigh(array[end:start], share)
            _weigh(array[start:], None if share is None else counted)

    def sent(self, bucket: int, *, share: float | None) -> None:
        """Make of a bucket what is to be sent: weigh it, and add what waits."""
        start, end = self._bounds[bucket]
        _weigh(self.buckets[bucket], share)
        for pending in self._pending.values():
            self.buckets[bucket] += pending[start:end]

    def forget(self) -> None:
        """Let nothing wait, as it has been sent."""
        self._pending.clear()

    def sum(self, communicator: Communicator) -> None:
        for array in self._arrays.values():
            communicator.sum(array)

    def sum_gradients(self, communicator: Communicator) -> None:
        for gradients in self._gradients():
            communicator.sum(gradients)

    def sum_rest(self, communicator: Communicator) -> None:
        """Sum what is no gradient."""
        for array in self.rest:
            communicator.sum(array)

    def _gradients(self) -> Iterator[np.ndarray]:
        return (self._arrays[dtype][:end] for dtype, end in self._ends.items())

    def finite(self) -> bool:
        return all(np.isfinite(gradients).all() for gradients in self._gradients())

    def fill_gradients(self, number: float) -> None:
        for name in self._order:  # not what lies between them, which stays 0
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


def _weigh(array: np.ndarray, share: float | None) -> None:
    if share is None:
        array[...] = 0  # whatever is there
    elif share != 1:
        array *= array.dtype.type(share)


def _aligned(length: int, dtype: np.dtype) -> np.ndarray:
    """Zeros that begin with a cache line."""
    block = np.zeros(length * dtype.itemsize + _ALIGNED, np.uint8)
    start = -block.ctypes.data % _ALIGNED
    return block[start : start + length * dtype.itemsize].view(dtype)
