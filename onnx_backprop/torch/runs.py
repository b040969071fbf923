"""The runs of a model's forward and backward pass, as one differentiable function of PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from onnx_backprop.converters.training.passes import Passes
from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError, UnsupportedError
from onnx_backprop.ort_ops import SessionOptions, be_lean, default_options, has_kernels, kernels_on, lower, session
from onnx_backprop.ort_ops.huge_pages import HugePages
from onnx_backprop.providers.choose import Target
from onnx_backprop.providers.placed import Placed, options_for

try:
    torch: Any = import_module("torch")
except ImportError as e:
    raise KernelError(
        f"onnx_backprop.torch needs PyTorch, and importing it failed: {e}. Install it with `pip install torch`, or "
        "train with onnx_backprop.Trainer, which does without"
    ) from e
OrtValue = onnxruntime.OrtValue
Tensors = Mapping[str, Any]


class Backward(Protocol):
    """The rest of a run that has given its outputs."""

    def __call__(self, seeds: Tensors, read: Tensors) -> dict[str, Any]:
        """The gradients, by variables. seeds: by outputs; read: what `Run.reads` names."""
        ...


@dataclass(frozen=True)
class Started:
    """A run behind its forward pass. results: of `Run.ends`; residuals: what else the backward pass reads, by name."""

    results: list[Any]
    residuals: dict[str, Any]
    backward: Backward


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
            self._forward = opened(graphs.model)
        elif target is not None or not self._pause(graphs, opened, session_options):
            self._split(graphs, opened)

    def infer(self, tensors_by_name: Tensors) -> list[Any]:
        """The values of `ends`, without gradients."""
        self._huge_pages.about_to_run()
        return list(_called(self._forward, tensors_by_name).values())

    def start(self, tensors_by_name: Tensors) -> Started:
        """A run up to the loss."""
        self._huge_pages.about_to_run()
        return self._start(tensors_by_name)

    def _split(self, graphs: Passes, opened: Callable[[ModelProto], onnxruntime.InferenceSession]) -> None:
        """A session for each pass."""

        def types(part: ModelProto) -> dict[str, ValueInfoProto]:
            self._forward = opened(part)
            return {value.name: _info(value) for value in self._forward.get_outputs()}

        _, model, _ = graphs.split(types)
        session = opened(model)
        self.reads = tuple(v.name for v in session.get_inputs() if v.name not in graphs.seeds.values())

        def backward(seeds: Tensors, read: Tensors) -> dict[str, Any]:
            return self._by_variable(_called(session, {**read, **{self.seeds[y]: dy for y, dy in seeds.items()}}))

        def start(tensors_by_name: Tensors) -> Started:
            values = _called(self._forward, tensors_by_name)
            return Started([values[name] for name in self.ends], values, backward)

        self._start = start

    def _pause(
        self, graphs: Passes, opened: Callable[[ModelProto], onnxruntime.InferenceSession], options: SessionOptions
    ) -> bool:
        """A session for both passes; whether there can be one."""
        # Threads of a parallel session wait for each other's nodes, also for those behind the pauses of other runs.
        if options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL or not has_kernels(options):
            return False
        from onnx_backprop.ort_ops.runtime.ahead import gives_the_same  # not above: they may not be importable
        from onnx_backprop.ort_ops.runtime.pause import PausedRun, add_pause

        if not gives_the_same(graphs.model):  # behind a second backward pass
            return False
        reads = graphs.inputs_of_backward
        elements = {v.name: v.type.tensor_type.elem_type for v in graphs.model.graph.output}
        token = add_pause(graphs.model, graphs.ends, graphs.seeds)
        if token is None:
            return False
        dtypes = {name: dtype_of(elements[name]) for name in self.ends}
        self.reads = reads
        session = opened(graphs.model)
        inputs = [value.name for value in session.get_inputs() if value.name != token]
        names = [value.name for value in session.get_outputs()][:-1]
        rest = [name for name in inputs if name not in reads]

        def begun(tensors_by_name: Tensors) -> tuple[PausedRun, set[int]]:
            fed, places = _fed(inputs, tensors_by_name)
            return PausedRun(session, token, fed), places

        def start(tensors_by_name: Tensors) -> Started:
            # nobody notices what is written into an inference tensor
            kept = {name: t.clone() if (t := tensors_by_name[name]).is_inference() else t for name in rest}
            versions = {name: tensor._version for name, tensor in kept.items() if name not in self.statistics}
            waiting = [begun({**tensors_by_name, **kept})]
            arrays = dict(zip(self.ends, waiting[0][0].values, strict=True))

            def backward(seeds: Tensors, read: Tensors) -> dict[str, Any]:
                """In a graph that PyTorch is told to keep, all but the first one run the forward pass again."""
                written = [name for name, version in versions.items() if kept[name]._version != version]
                try:
                    run, places = waiting.pop()
                except IndexError:
                    if written:
                        raise InvalidArgumentError(
                            f"{written[0]!r} was written into behind the forward pass, which is run again for a second "
                            "backward pass of the same outputs. Compute both before the update"
                        ) from None
                    run, places = begun({**read, **kept})
                arrays = {self.ends.index(y): array_of(dy.detach().contiguous()) for y, dy in seeds.items()}
                values = run.resume(arrays, repeatable=not written)
                return self._by_variable(_apart(dict(zip(names, values, strict=True)), places))

            results = [torch.from_numpy(arrays[name]).to(dtypes[name]) for name in self.ends]
            return Started(results, {}, backward)

        self._start = start
        return True

    def _by_variable(self, values: Tensors) -> dict[str, Any]:
        return {name: values[gradient] for name, gradient in self._gradients.items()}


class Function(torch.autograd.Function):
    """A run as one differentiable function of tensors."""

    @staticmethod
    def forward(ctx: Any, run: Run, names: Sequence[str], *tensors: Any) -> tuple[Any, ...]:
        tensors_by_name = dict(zip(names, tensors, strict=True))
        started = run.start(tensors_by_name)
        read = {**tensors_by_name, **started.residuals}
        ctx.save_for_backward(*(read[name] for name in run.reads))
        ctx.run, ctx.names, ctx.rest = run, names, started.backward
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
        by_name = ctx.rest(seeds, read)
        return (None, None, *(by_name.get(name) for name in ctx.names))


def _fed(names: Iterable[str], tensors_by_name: Tensors) -> tuple[dict[str, OrtValue], set[int]]:
    """Tensors for a session, in the same memory, and where that begins."""
    taken = {name: tensors_by_name[name].detach().contiguous() for name in names}
    places = {tensor.data_ptr() for tensor in taken.values()}
    return {name: OrtValue.from_dlpack(tensor) for name, tensor in taken.items()}, places


def _called(session: onnxruntime.InferenceSession, tensors_by_name: Tensors) -> dict[str, Any]:
    """The outputs of a session on those of the tensors that it reads."""
    fed, places = _fed([v.name for v in session.get_inputs()], tensors_by_name)
    names = [value.name for value in session.get_outputs()]
    return _apart(dict(zip(names, session.run_with_ort_values(names, fed), strict=True)), places)


def _apart(values: Mapping[str, OrtValue], places: set[int]) -> dict[str, Any]:
    """Values of onnxruntime as tensors in the same memory, none in that of another or at one of the places."""
    results: dict[str, Any] = {}
    for name, value in values.items():
        result = torch.from_dlpack(value)
        if result.data_ptr() in places and result.numel():  # one tensor under two names, which PyTorch may write into
            result = result.clone()
        places.add(result.data_ptr())
        results[name] = result
    return results


def array_of(tensor: Any) -> np.ndarray:
    """The same memory; of bfloat16, which NumPy has not, as onnx does."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def dtype_of(elements: int) -> Any:
    """PyTorch's name of a type of ONNX; None for a type that it has not."""
    return getattr(torch, helper.tensor_dtype_to_np_dtype(elements).name, None)


def _info(value: Any) -> ValueInfoProto:
    """What a session says of an output, as of a graph's input."""
    if not value.type.startswith("tensor("):
        raise UnsupportedError(
            f"the backward pass reads {value.name!r}, a {value.type}, which PyTorch cannot hold. Train with "
            "onnx_backprop.Trainer"
        )
    elements = TensorProto.DataType.Value(value.type[len("tensor(") : -1].upper())
    return helper.make_tensor_value_info(value.name, elements, value.shape)
