"""The runs of a model's forward and backward pass, as one differentiable function of PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnxruntime
from onnx import ModelProto

from onnx_backprop.converters.training.passes import Passes
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.ort_ops import SessionOptions, be_lean, default_options, kernels_on, lower, session
from onnx_backprop.ort_ops.huge_pages import HugePages
from onnx_backprop.providers.choose import Target
from onnx_backprop.providers.placed import Placed, options_for
from onnx_backprop.torch.sessions import PausingSession, SessionForEachPass, Sessions, Started
from onnx_backprop.torch.tensors import Tensors, called, torch


class Run:
    """The sessions of one kind of call: one that pauses for the loss, or one for each pass where none can.

    ends: the outputs, and the new statistics, that a call gives. seeds: those that gradients are computed from. reads:
    the inputs and the residuals that the backward pass reads.
    """

    def __init__(
        self, graphs: Passes, kernels: str | None, options: SessionOptions | None, target: Target | None
    ) -> None:
        self.masks, self.outputs, self.statistics = graphs.masks, graphs.outputs, tuple(graphs.statistics)
        self.ends, self.seeds = graphs.ends, graphs.seeds
        self.reads: tuple[str, ...] = ()
        self._gradients = graphs.gradients
        self._huge_pages = HugePages()
        # PyTorch's threads want the cores, as those of NumPy do
        if target is not None:
            session_options = be_lean(options or options_for(target))
        else:
            session_options = be_lean(options) if options else default_options(python_operators=True, lean=True)
            graphs = replace(graphs, model=lower(graphs.model, kernels_on(session_options, kernels), graphs.ends).model)

        def opened(part: ModelProto) -> onnxruntime.InferenceSession:
            if target is None:
                return session(part, kernels=None, session_options=session_options)
            placed = Placed(part, target, session_options)
            result = placed.session({})
            placed.say()
            return result

        if not graphs.gradients:
            self._inference = opened(graphs.model)
            return
        pausing = PausingSession.opened(graphs, opened, session_options) if target is None else None
        self._sessions: Sessions = pausing or SessionForEachPass(graphs, opened)
        self.reads = self._sessions.reads

    def infer(self, tensors_by_name: Tensors) -> list[Any]:
        """The values of `ends`, without gradients."""
        self._huge_pages.about_to_run()
        return list(called(self._inference, tensors_by_name).values())

    def start(self, tensors_by_name: Tensors) -> Started:
        """A run up to the loss."""
        self._huge_pages.about_to_run()
        return self._sessions.start(tensors_by_name)

    def by_variable(self, values: Tensors) -> dict[str, Any]:
        """The gradients among the outputs of a backward pass."""
        return {name: values[gradient] for name, gradient in self._gradients.items()}


class Function(torch.autograd.Function):
    """A run as one differentiable function of tensors."""

    @staticmethod
    def forward(ctx: Any, run: Run, names: Sequence[str], *tensors: Any) -> tuple[Any, ...]:
        tensors_by_name = dict(zip(names, tensors, strict=True))
        started = run.start(tensors_by_name)
        read = {**tensors_by_name, **started.residuals}
        ctx.save_for_backward(*(read[name] for name in run.reads))
        ctx.run, ctx.names, ctx.backward_of_run = run, names, started.backward
        ctx.mark_non_differentiable(
            *(y for name, y in zip(run.ends, started.results, strict=True) if name not in run.seeds)
        )
        return tuple(started.results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        run = ctx.run
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "the gradient of a model of onnx_backprop.torch has no derivative in PyTorch. Leave create_graph out, "
                "or compute second derivatives with onnx_backprop.hvp"
            )
        read = dict(zip(run.reads, ctx.saved_tensors, strict=True))
        seeds = {y: dy for y, dy in zip(run.ends, gradients, strict=True) if y in run.seeds}
        by_name = run.by_variable(ctx.backward_of_run(seeds, read))
        return (None, None, *(by_name.get(name) for name in ctx.names))
