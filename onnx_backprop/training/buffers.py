"""`Buffers`: the state of a training in memory of onnxruntime, what a step reads of it and where it writes.

On a device the state lies in its memory, but for what its session reads in the CPU's: counters, which are integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import onnxruntime
from onnx import TensorProto, TypeProto, helper

from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.mapped import look_at
from onnx_backprop.opset.core.signals import Deferred
from onnx_backprop.ort_ops import run_bound
from onnx_backprop.ort_ops.huge_pages import HugePages, ask
from onnx_backprop.providers.memory import HOST, Memory

if TYPE_CHECKING:
    from onnx_backprop.distributed.sharded import Division

OrtValue = onnxruntime.OrtValue
State = Mapping[str, OrtValue]

_OF_A_STATE = ("_sets", "_turn", "_places", "_rebound", "_bindings")  # what `set` puts others in the place of


class Buffers:
    """Two sets of buffers, each with the binding of a session that reads it and writes the other.

    They change places when a step has succeeded, but for the tensors of `in_place`: these are the same in both, as
    native updates overwrite them at the very end of a step.

    steps: how many have renewed the state. division: of which part of it is here, where ranks divide it.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        session: onnxruntime.InferenceSession | None,
        in_place: frozenset[str],
        guard: str,
        division: Division | None,
        frozen: Mapping[str, OrtValue],
        memory: Memory | None = None,
        unread: int = 1,
    ) -> None:
        """`set` gives them their first values. guard: the input that `in_place` depends on, see `NativeGraph`.

        session: None where `use` names the one of each step. frozen: inputs that no step renews. memory: of a device.
        unread: the most losses that wait to be read, if that is not 1 on the device.
        """
        self._frozen = frozen
        self._memory = memory
        self._places: dict[str, str] = {}  # in which memory the state lies, where that is not the CPU's
        self._rebound: list[str] = []  # what lies in another memory than the session reads it from
        self.steps = 0
        self.in_place, self._guard_input = in_place, guard
        self._updates, self._session, self._division = graph.updates, session, division
        self._types = {value.name: value.type.tensor_type for value in graph.model.graph.input}
        self._guard = np.ones((), np.float32)  # 2 while a step has renewed the state and nothing else knows of it
        self._guard_value = OrtValue.ortvalue_from_numpy(self._guard)
        results = [name for name in (graph.loss, graph.gradient_norms) if name is not None]
        self.more: dict[str, OrtValue] = {}  # outputs of any lengths that the last run has made
        self._more = list(graph.input_gradients.values())
        if session is not None:  # one rank's half may not make them
            self._more = [name for name in self._more if name in {value.name for value in session.get_outputs()}]
        declared = {value.name: value.type.tensor_type for value in graph.model.graph.output}
        self._results = {name: OrtValue.ortvalue_from_numpy(np.zeros(*_array(declared[name]))) for name in results}
        self._loss = graph.loss
        self._seen, self._ahead = 0, False  # of how many steps the losses were read; whether of the one that runs too
        loss = self._results[self._loss]
        self._losses = [loss] if unread == 1 else self._ring(loss, unread)
        self._bindings: WeakKeyDictionary[onnxruntime.InferenceSession, tuple[onnxruntime.IOBinding, ...]]
        self._bindings = WeakKeyDictionary()
        self._huge_pages = HugePages()

    def set(self, state: dict[str, np.ndarray]) -> None:
        """Take the arrays, one after the other out of `state`. If that fails, the state stays what it was."""
        places, others = ({}, {}) if self._division is None else self._division.allocated(self.in_place)
        first = {name: self.ort_value(name, state.pop(name), places.get(name)) for name in list(state)}
        second = {
            name: value
            if name in self.in_place
            else others.get(name) or OrtValue.ortvalue_from_shape_and_type(value.shape(), self._types[name].elem_type)
            for name, value in first.items()
        }
        before = {name: value for name, value in vars(self).items() if name in _OF_A_STATE}
        try:
            self._sets, self._turn = (first, second), 0
            self._places, self._rebound, self._bindings = {}, [], WeakKeyDictionary()
            if self._session is not None:
                self.use(self._session)
        except BaseException:
            with Deferred():
                vars(self).update(before)
            raise

    def use(self, session: onnxruntime.InferenceSession) -> None:
        """Let a session run the steps to come; what it reads in another memory than it lies in is brought there first.

        A binding copies at once what lies in another memory than the session reads, and never sees it renewed. So what
        cannot be brought there is bound anew for every step.
        """
        self._session = session
        if self._memory is not None:
            names = [value.name for value in session.get_inputs()]
            places = dict(zip(names, session.get_input_memory_infos(), strict=True))
            moved = [n for n in self._sets[0] if n in places and places[n].name != self._places.get(n, HOST)]
            self._rebound = [name for name in moved if not self._move(name, places[name])]
            if moved != self._rebound:
                self._bindings.clear()
        if session not in self._bindings:
            first, second = self._sets
            self._bindings[session] = self._bound(session, first, second), self._bound(session, second, first)

    def _move(self, name: str, place: Any) -> bool:
        """Bring a tensor of the state into a memory; whether that is possible."""
        assert self._memory is not None
        first, second = (self._memory.moved(values[name], place) for values in self._sets)
        if first is None or second is None:
            return False
        self._sets[0][name], self._sets[1][name] = first, second
        self._places[name] = place.name
        return True

    def _ring(self, loss: OrtValue, length: int) -> list[OrtValue]:
        """Places for losses, on the device where tensors can lie there."""
        shape, kind = list(loss.shape()), loss.element_type()
        if self._memory is not None and self._memory.info is not None:
            return [self._memory.empty(shape, kind, self._memory.info) for _ in range(length)]
        return [OrtValue.ortvalue_from_shape_and_type(shape, kind) for _ in range(length)]

    @property
    def state(self) -> dict[str, OrtValue]:
        """What the next step reads."""
        self.swap_if_renewed()
        return self._sets[self._turn]

    @property
    def binding(self) -> onnxruntime.IOBinding:
        """The binding of the next step, for what changes from step to step."""
        self.swap_if_renewed()
        assert self._session is not None, "use() comes first"
        return self._bindings[self._session][self._turn]

    def _bound(self, session: onnxruntime.InferenceSession, source: State, target: State) -> onnxruntime.IOBinding:
        binding = session.io_binding()
        for name, output in self._updates.items():
            read, written = source[name], target[name]
            if self._division is not None:
                read, written = self._division.part(name, read), self._division.part(name, written)
            binding.bind_ortvalue_input(name, read)
            binding.bind_ortvalue_output(output, written)
        for name, value in self._frozen.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in {**self._results, self._loss: self._losses[0]}.items():
            binding.bind_ortvalue_output(name, value)
        if self.in_place:
            binding.bind_ortvalue_input(self._guard_input, self._guard_value)
        return binding

    def run(self) -> None:
        """Run the step that `binding` is for; the state then is what it was, but for that which is renewed in place."""
        self._huge_pages.about_to_run()
        binding = self.binding
        self._ahead = False
        if len(self._losses) > 1:
            binding.bind_ortvalue_output(self._loss, self._losses[self.steps - self._seen])
        for name in self._rebound:
            binding.bind_ortvalue_input(name, self.state[name])
        for name in self._more:
            binding.bind_output(name)
        assert self._session is not None
        run_bound(self._session, binding, self._guard)
        if self._more:
            self.more = dict(zip(self._more, binding.get_outputs()[-len(self._more) :], strict=True))

    def result(self, name: str) -> np.ndarray:
        """The norms of the gradients of the last run."""
        return self._results[name].numpy()

    @property
    def is_full(self) -> bool:
        """Whether the loss of the run before `renew` is the last for which there is a place."""
        return self.steps + 1 - self._seen >= len(self._losses)

    def losses(self, last: int) -> list[float]:
        """The losses of the steps up to `last` that were not read before."""
        read = self._losses[: last - self._seen]
        self._seen, self._ahead = self.steps, last > self.steps
        return [float(self.on_host(value, count=False).numpy().reshape(())) for value in read]

    def restart(self, steps: int) -> None:
        """Count from here, and forget the losses that were not read."""
        self.steps = self._seen = steps

    def renew(self) -> None:
        """Take what the last run has written for the state."""
        if not self.in_place:  # or else the update has set it
            self._guard[...] = 2
        self.swap_if_renewed()

    def swap_if_renewed(self) -> None:
        """Swap the two sets of buffers if a run has renewed the state; an interruption may have come between."""
        if self._guard.item() != 1:
            with Deferred():
                if self._guard.item() > 1:
                    self._turn = 1 - self._turn
                    self.steps += 1
                    self._seen = self.steps if self._ahead else self._seen
                self._guard[...] = 1

    def declared(self) -> dict[str, tuple[list[int], np.dtype]]:
        """Shapes and types of the state, of the whole of it."""
        return {name: _array(self._types[name]) for name in self.state}

    def dtype(self, name: str) -> np.dtype:
        """The type of a tensor of the state."""
        return helper.tensor_dtype_to_np_dtype(self._types[name].elem_type)

    def ort_value(self, name: str, value: np.ndarray, place: OrtValue | None = None) -> OrtValue:
        """A copy at a place, or in memory of onnxruntime's: tensors there begin with a cache line, nobody else has it.

        Of what this rank keeps a part of, that part.
        """
        if self._types[name].elem_type == TensorProto.BFLOAT16:
            return OrtValue.ortvalue_from_numpy_with_onnx_type(np.asarray(value), TensorProto.BFLOAT16)
        value = value if self._division is None else self._division.shard(name, value)
        result = place or OrtValue.ortvalue_from_shape_and_type(np.shape(value), self._types[name].elem_type)
        ask(result.data_ptr(), result.tensor_size_in_bytes())
        result.update_inplace(np.ascontiguousarray(value).reshape(np.shape(value)))
        look_at(result.tensor_size_in_bytes())
        return result

    def on_host(self, value: OrtValue, *, count: bool = True) -> OrtValue:
        """A tensor in the CPU's memory, see `Memory.fetched`."""
        return value if self._memory is None else self._memory.fetched(value, count=count)

    def arrays(self, values: Mapping[str, OrtValue], *, copy: bool = True) -> dict[str, np.ndarray]:
        """Copies of tensors of onnxruntime, by names of the state; copy=False: views, which the next step changes."""
        if any(self._types[name].elem_type == TensorProto.BFLOAT16 for name in values):
            raise InvalidArgumentError(
                "bfloat16 parameters cannot be read back from onnxruntime. Use float32 or float16"
            )
        arrays = {name: np.array(self.on_host(value).numpy(), copy=copy or None) for name, value in values.items()}
        return arrays if self._division is None else {n: self._division.whole(n, a) for n, a in arrays.items()}


def _array(declared: TypeProto.Tensor) -> tuple[list[int], np.dtype]:
    """The shape and the type of a tensor whose lengths are known."""
    return [d.dim_value for d in declared.shape.dim], helper.tensor_dtype_to_np_dtype(declared.elem_type)
