"""`Buffers`: the state of a training in memory of onnxruntime, what a step reads of it and where it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
from onnx import TensorProto, TypeProto, helper

from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.mapped import look_at
from onnx_backprop.opset.core.signals import Deferred
from onnx_backprop.ort_ops import run_bound

if TYPE_CHECKING:
    from onnx_backprop.distributed.sharded import Division

OrtValue = onnxruntime.OrtValue


class Buffers:
    """Two sets of buffers, each with the binding of a session that reads it and writes the other.

    They change places when a step has succeeded, but for the tensors of `in_place`: these are the same in both, as
    native updates overwrite them at the very end of a step.

    steps: how many have renewed the state. division: of which part of it is here, where ranks divide it.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        session: onnxruntime.InferenceSession,
        in_place: frozenset[str],
        guard: str,
        division: Division | None,
        frozen: Mapping[str, OrtValue],
    ) -> None:
        """`set` gives them their first values. guard: the input that `in_place` depends on, see `NativeGraph`.

        frozen: inputs that no step renews.
        """
        self._frozen = frozen
        self.steps = 0
        self.in_place, self._guard_input = in_place, guard
        self._updates, self._session, self._division = graph.updates, session, division
        self._types = {value.name: value.type.tensor_type for value in graph.model.graph.input}
        self._guard = np.ones((), np.float32)  # 2 while a step has renewed the state and nothing else knows of it
        self._guard_value = OrtValue.ortvalue_from_numpy(self._guard)
        results = [name for name in (graph.loss, graph.gradient_norms) if name is not None]
        self.more: dict[str, OrtValue] = {}  # outputs of any lengths that the last run has made
        made = {value.name for value in session.get_outputs()}  # not those of another rank's half
        self._more = [name for name in graph.input_gradients.values() if name in made]
        declared = {value.name: value.type.tensor_type for value in graph.model.graph.output}
        self._results = {name: OrtValue.ortvalue_from_numpy(np.zeros(*_array(declared[name]))) for name in results}

    def set(self, state: dict[str, np.ndarray]) -> None:
        """Take the arrays, one after the other out of `state`."""
        places, others = ({}, {}) if self._division is None else self._division.allocated(self.in_place)
        first = {name: self.ort_value(name, state.pop(name), places.get(name)) for name in list(state)}
        second = {
            name: value
            if name in self.in_place
            else others.get(name) or OrtValue.ortvalue_from_shape_and_type(value.shape(), self._types[name].elem_type)
            for name, value in first.items()
        }
        self._sets = (first, self._bound(first, second)), (second, self._bound(second, first))

    @property
    def state(self) -> dict[str, OrtValue]:
        """What the next step reads."""
        self.swap_if_renewed()
        return self._sets[0][0]

    @property
    def binding(self) -> onnxruntime.IOBinding:
        """The binding of the next step, for what changes from step to step."""
        self.swap_if_renewed()
        return self._sets[0][1]

    def _bound(self, source: Mapping[str, OrtValue], target: Mapping[str, OrtValue]) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        for name, output in self._updates.items():
            read, written = source[name], target[name]
            if self._division is not None:
                read, written = self._division.part(name, read), self._division.part(name, written)
            binding.bind_ortvalue_input(name, read)
            binding.bind_ortvalue_output(output, written)
        for name, value in self._frozen.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in self._results.items():
            binding.bind_ortvalue_output(name, value)
        if self.in_place:
            binding.bind_ortvalue_input(self._guard_input, self._guard_value)
        return binding

    def run(self) -> None:
        """Run the step that `binding` is for; the state then is what it was, but for that which is renewed in place."""
        binding = self._sets[0][1]
        for name in self._more:
            binding.bind_output(name)
        run_bound(self._session, binding, self._guard)
        if self._more:
            self.more = dict(zip(self._more, binding.get_outputs()[-len(self._more) :], strict=True))

    def result(self, name: str) -> np.ndarray:
        """The loss of the last run, or the norms of its gradients."""
        return self._results[name].numpy()

    def renew(self) -> None:
        """Take what the last run has written for the state."""
        if not self.in_place:  # or else the update has set it
            self._guard[...] = 2
        self.swap_if_renewed()

    def swap_if_renewed(self) -> None:
        """Swap the two sets of buffers if a run has renewed the state; an interruption may have come between."""
        if self._guard != 1:
            with Deferred():
                if self._guard > 1:
                    self._sets = self._sets[::-1]
                    self.steps += 1
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
        value = value if self._division is None else self._division.own(name, value)
        result = place or OrtValue.ortvalue_from_shape_and_type(np.shape(value), self._types[name].elem_type)
        result.update_inplace(np.ascontiguousarray(value).reshape(np.shape(value)))
        look_at(result.tensor_size_in_bytes())
        return result

    def arrays(self, values: Mapping[str, OrtValue], *, copy: bool = True) -> dict[str, np.ndarray]:
        """Copies of tensors of onnxruntime, by names of the state; copy=False: views, which the next step changes."""
        if any(self._types[name].elem_type == TensorProto.BFLOAT16 for name in values):
            raise InvalidArgumentError(
                "bfloat16 parameters cannot be read back from onnxruntime. Use float32 or float16"
            )
        arrays = {name: np.array(value.numpy(), copy=copy or None) for name, value in values.items()}
        return arrays if self._division is None else {n: self._division.whole(n, a) for n, a in arrays.items()}


def _array(declared: TypeProto.Tensor) -> tuple[list[int], np.dtype]:
    """The shape and the type of a tensor whose lengths are known."""
    return [d.dim_value for d in declared.shape.dim], helper.tensor_dtype_to_np_dtype(declared.elem_type)
