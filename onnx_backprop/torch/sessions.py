"""The sessions of a forward and a backward pass, with a loss of PyTorch's between them: one, or one for each pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import onnxruntime
from onnx import ModelProto, ValueInfoProto

from onnx_backprop.converters.training.passes import Passes
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.ort_ops import SessionOptions, has_kernels
from onnx_backprop.torch.tensors import Tensors, apart, array_of, called, dtype_of, fed, info_of, torch

Open = Callable[[ModelProto], onnxruntime.InferenceSession]


class Backward(Protocol):
    """The rest of a run that has given its outputs."""

    def __call__(self, seeds: Tensors, read: Tensors) -> dict[str, Any]:
        """The gradients, by the outputs that they are. seeds: by outputs of the model; read: what `reads` names."""
        ...


@dataclass(frozen=True)
class Started:
    """A run behind its forward pass. results: of `ends`; residuals: what else the backward pass reads, by name."""

    results: list[Any]
    residuals: dict[str, Any]
    backward: Backward


class Sessions(Protocol):
    """What runs both passes.

    reads: the inputs and the residuals that the backward pass reads, and that PyTorch keeps for it.
    """

    reads: tuple[str, ...]

    def start(self, tensors_by_name: Tensors) -> Started:
        """A run up to the loss."""
        ...


class SessionForEachPass:
    """Two sessions: the first one gives, beside its outputs, what the second one reads."""

    def __init__(self, graphs: Passes, opened: Open) -> None:
        sessions: list[onnxruntime.InferenceSession] = []

        def types(part: ModelProto) -> dict[str, ValueInfoProto]:
            sessions.append(opened(part))
            return {value.name: info_of(value) for value in sessions[0].get_outputs()}

        _, model, _ = graphs.split(types)
        self._forward, self._backward = sessions[0], opened(model)
        self._ends, self._seeds = graphs.ends, graphs.seeds
        inputs = [value.name for value in self._backward.get_inputs()]
        self.reads = tuple(name for name in inputs if name not in graphs.seeds.values())

    def start(self, tensors_by_name: Tensors) -> Started:
        """A run of the first session."""
        values = called(self._forward, tensors_by_name)
        return Started([values[name] for name in self._ends], values, self._finish)

    def _finish(self, seeds: Tensors, read: Tensors) -> dict[str, Any]:
        return called(self._backward, {**read, **{self._seeds[y]: dy for y, dy in seeds.items()}})


class PausingSession:
    """One session, whose runs pause for the loss."""

    @classmethod
    def opened(cls, graphs: Passes, opened: Open, options: SessionOptions) -> PausingSession | None:
        """None where there can be none; `graphs` is changed otherwise."""
        # Threads of a parallel session wait for each other's nodes, also for those behind the pauses of other runs.
        if options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL or not has_kernels(options):
            return None
        from onnx_backprop.ort_ops.runtime.ahead import gives_the_same  # not above: they may not be importable
        from onnx_backprop.ort_ops.runtime.pause import add_pause

        if not gives_the_same(graphs.model):  # behind a second backward pass
            return None
        reads = graphs.inputs_of_backward
        elements = {v.name: v.type.tensor_type.elem_type for v in graphs.model.graph.output}
        token = add_pause(graphs.model, graphs.ends, graphs.seeds)
        if token is None:
            return None
        dtypes = {name: dtype_of(elements[name]) for name in graphs.ends}
        return cls(opened(graphs.model), token, dtypes, reads, graphs.statistics)

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        token: str,
        dtypes: dict[str, Any],
        reads: tuple[str, ...],
        statistics: Mapping[str, str],
    ) -> None:
        """token: the input that tells runs apart; dtypes: of `ends`; statistics: inputs that may be written into."""
        self.reads, self.ends, self.statistics = reads, list(dtypes), statistics
        self._session, self._token, self._dtypes = session, token, dtypes
        self._inputs = [value.name for value in session.get_inputs() if value.name != token]
        self.gradients = [value.name for value in session.get_outputs()][:-1]

    def start(self, tensors_by_name: Tensors) -> Started:
        """A run up to its pause."""
        run = _Run(self, tensors_by_name)
        results = [torch.from_numpy(y).to(d) for y, d in zip(run.values, self._dtypes.values(), strict=True)]
        return Started(results, {}, run)

    def begin(self, tensors_by_name: Tensors) -> tuple[Any, set[int]]:
        """A `PausedRun`, and where the memory of its tensors begins."""
        from onnx_backprop.ort_ops.runtime.pause import PausedRun

        feeds, places = fed(self._inputs, tensors_by_name)
        return PausedRun(self._session, self._token, feeds), places

    def read_early(self) -> list[str]:
        """The inputs that PyTorch does not keep for the backward pass."""
        return [name for name in self._inputs if name not in self.reads]


class _Run:
    """A run that has paused. Of a graph that PyTorch keeps, a second backward pass runs the forward pass again."""

    def __init__(self, sessions: PausingSession, tensors_by_name: Tensors) -> None:
        self._sessions = sessions
        # nobody notices what is written into an inference tensor
        self._kept = {
            name: t.clone() if (t := tensors_by_name[name]).is_inference() else t for name in sessions.read_early()
        }
        self._versions = {name: t._version for name, t in self._kept.items() if name not in sessions.statistics}
        self._waiting = [sessions.begin({**tensors_by_name, **self._kept})]  # the first backward pass takes it out

    @property
    def values(self) -> list[Any]:
        """What it has handed out, as long as no backward pass has begun."""
        return self._waiting[0][0].values

    def __call__(self, seeds: Tensors, read: Tensors) -> dict[str, Any]:
        sessions = self._sessions
        written = [name for name, version in self._versions.items() if self._kept[name]._version != version]
        try:
            run, places = self._waiting.pop()
        except IndexError:
            if written:
                raise InvalidArgumentError(
                    f"{written[0]!r} was written into behind the forward pass, which is run again for a second "
                    "backward pass of the same outputs. Compute both before the update"
                ) from None
            run, places = sessions.begin({**read, **self._kept})
        arrays = {sessions.ends.index(y): array_of(dy.detach().contiguous()) for y, dy in seeds.items()}
        values = run.resume(arrays, repeatable=not written)
        return apart(dict(zip(sessions.gradients, values, strict=True)), places)
