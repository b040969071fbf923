"""Histograms of weights and gradients while a training runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from onnxruntime import InferenceSession

from onnx_backprop.converters.pages import chart, fragment
from onnx_backprop.converters.pages import text as escaped
from onnx_backprop.converters.training.split import split
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.ort_ops import lower, session
from onnx_backprop.training.callbacks.base import Callback, Run, check_number
from onnx_backprop.training.reports.history import Record

_QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
_SHOWN = ("least", "5 %", "median", "95 %", "largest")


class _Tracker(Protocol):
    def histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, step: int) -> None: ...


@dataclass
class Course:
    """Histograms of one tensor. steps, counts, edges: of each. quantiles: of 0, 5, 50, 95 and 100 %."""

    steps: list[int] = field(default_factory=list)
    counts: list[np.ndarray] = field(default_factory=list)
    edges: list[np.ndarray] = field(default_factory=list)
    quantiles: list[np.ndarray] = field(default_factory=list)


class Histograms(Callback):
    """Keeps a histogram of every parameter, and of its gradient, after every `every` steps; a notebook shows them.

    batch: for the gradients, as `step` takes one; without it only weights are counted. bins: of each. to: a tracker
    that gets them too, as `TensorBoard`. `found` has them by names, "weights/w1" and "gradients/w1".

    Gradients are those of the loss at the weights after the step, before clipping and the optimizer. Works on one rank;
    for a training on a device they are computed on the CPU.
    """

    def __init__(
        self,
        batch: Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        every: int = 100,
        bins: int = 64,
        to: _Tracker | None = None,
    ) -> None:
        for name, value in (("every", every), ("bins", bins)):
            check_number(self, name, value, 1, whole=True)
        if to is not None and not hasattr(to, "histogram"):
            raise InvalidArgumentError(f"Histograms: to: expected a tracker, as TensorBoard, got {to!r}")
        self._batch, self._every, self._bins, self._to = batch, every, bins, to
        self._gradients: tuple[InferenceSession, dict[str, str]] | None = None
        self.found: dict[str, Course] = {}

    def start(self, run: Run) -> bool | None:
        if self._batch is not None:
            if run.trainer.communicator.size > 1:
                raise InvalidArgumentError("Histograms: batch: gradients are counted on one rank alone. Leave it out")
            run.trainer.inputs.checked(run.trainer.named(self._batch))
        return None

    def __call__(self, trainer: Any, record: Record) -> bool | None:
        if trainer.steps % self._every:
            return None
        for name, array in trainer.parameters().items():
            self._add(f"weights/{name}", array, record.step)
        for name, array in self.gradients(trainer).items():
            self._add(f"gradients/{name}", array, record.step)
        return None

    def gradients(self, trainer: Any) -> dict[str, np.ndarray]:
        """The gradient of the loss of the batch by each parameter."""
        if self._batch is None:
            return {}
        if self._gradients is None:
            parts = split(trainer.graph, trainer.graph.model)
            model = lower(parts.gradients, trainer.kernels, [trainer.graph.loss]).model
            options = trainer.session_options if trainer._memory is None else None
            self._gradients = session(model, kernels=None, session_options=options), parts.of
        running, outputs = self._gradients
        fed = trainer.inputs.ort_values(trainer.named(self._batch))
        accepted = [value.name for value in running.get_inputs()]
        state = trainer._buffers.state
        fed |= {name: trainer._buffers.on_host(value) for name, value in state.items() if name in accepted}
        arrays = running.run_with_ort_values(list(outputs.values()), fed)
        return {name: np.array(value.numpy()) for name, value in zip(outputs, arrays, strict=True)}

    def _add(self, name: str, array: np.ndarray, step: int) -> None:
        values = array.astype(np.float64).reshape(-1)
        values = values[np.isfinite(values)]
        if not values.size:
            return
        counts, edges = np.histogram(values, self._bins)
        course = self.found.setdefault(name, Course())
        course.steps.append(step)
        course.counts.append(counts)
        course.edges.append(edges)
        course.quantiles.append(np.quantile(values, _QUANTILES))
        if self._to is not None:
            self._to.histogram(name, counts, edges, step)

    def _repr_html_(self) -> str:
        """For notebooks: quantiles over the steps."""
        parts = [f"<p>{len(self.found)} tensors</p>"]
        for name, course in self.found.items():
            curves = {
                shown: [(float(s), float(q[n])) for s, q in zip(course.steps, course.quantiles, strict=True)]
                for n, shown in enumerate(_SHOWN)
            }
            parts += [f"<h2>{escaped(name)}</h2>", chart(curves, "step", "value")]
        return fragment(*parts)
