"""`Module`, `Optimizer`, `LinearLRScheduler`: onnxruntime-training's loop in stock onnxruntime."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from onnx_backprop.artifacts.state import ArtifactError, CheckpointState, OrtValue, Uri
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.converters.training.metadata import optimizer_state
from onnx_backprop.converters.training.names import OPTIMIZER_METADATA, STEP
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.slots import COUNTER, MEAN, Slot
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.reading import load
from onnx_backprop.ort_ops import SessionOptions, session
from onnx_backprop.training.divergence import bad_batch
from onnx_backprop.training.inputs import refusals
from onnx_backprop.training.schedules import checked_rate

LAZY_RESET = "lazy_reset_grad"


def accumulation_names(gradient: str) -> tuple[str, str]:
    """The buffer that a gradient is added to, and the sum."""
    return f"{gradient}.accumulation.buffer", f"{gradient}.accumulation.out"


class Module:
    """Runs the training and the evaluation model: `loss = module(x, labels)`.

    In training mode the gradients are added to those before, until `lazy_reset_grad` is called. Evaluation needs no
    second file: without `eval_model_uri` the evaluation model is taken out of the training model.
    """

    training: bool

    def __init__(
        self,
        train_model_uri: Uri,
        state: CheckpointState,
        eval_model_uri: Uri | None = None,
        device: str = "cpu",
        session_options: SessionOptions | None = None,
    ) -> None:
        if device != "cpu":
            raise ArtifactError(f"device: expected 'cpu', got {device!r}")
        self.training = True
        self._state, self._options = state, session_options
        proto = load(os.fspath(train_model_uri))
        self.graph = TrainingGraph.load(proto)
        missing = [n for n in (*self.graph.parameters, *self.graph.frozen) if n not in state.values]
        if missing:
            raise ArtifactError(f"the checkpoint has no parameter {missing[0]!r}, which the training model needs")
        _check_state(state.values, _types(proto))
        self._train = session(proto, kernels=None, session_options=session_options)
        carried = {name: value for name, value in self.graph.initial_state().items() if name not in state.values}
        self._carried = {name: OrtValue.ortvalue_from_numpy(value) for name, value in carried.items()}
        accumulated = {accumulation_names(g)[1] for g in self.graph.parameters.values()}
        internal = accumulated | set(self.graph.parameters.values()) | set(self.graph.updates.values())
        self._train_outputs = [value.name for value in proto.graph.output if value.name not in internal]
        if eval_model_uri is None:
            evaluation = self.graph.eval_model(outputs=self._train_outputs)
        else:
            evaluation = load(os.fspath(eval_model_uri))
        self._eval = session(evaluation, kernels=None, session_options=session_options)
        self._eval_names = {value.name for value in evaluation.graph.input}
        self._eval_outputs = [value.name for value in evaluation.graph.output]
        self._reset = True

    def __call__(self, *user_inputs: Any) -> Any:
        """One training or evaluation step; the loss, or a tuple of all outputs where there are several.

        Inputs in the order of `input_names`: arrays give arrays, OrtValues give OrtValues, and so do outputs that are
        no tensors. Errors: ArtifactError for another number of inputs, for what onnxruntime cannot run, and for a loss
        that is no finite number because of the data; nothing is added to the gradients then.
        """
        names = self.input_names()
        if len(user_inputs) != len(names):
            raise ArtifactError(f"expected {len(names)} inputs, {', '.join(names)}; got {len(user_inputs)}")
        feeds = {
            name: value if isinstance(value, OrtValue) else OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value))
            for name, value in zip(names, user_inputs, strict=True)
        }
        try:
            with refusals(dict(feeds)):
                results = self._train_step(feeds) if self.training else self._eval_step(feeds)
        except InvalidArgumentError as e:
            raise ArtifactError(str(e)) from e
        if not any(isinstance(value, OrtValue) for value in user_inputs):
            results = [np.array(value.numpy()) if value.is_tensor() else value for value in results]
        return results[0] if len(results) == 1 else tuple(results)

    def _train_step(self, feeds: dict[str, OrtValue]) -> list[Any]:
        graph, state = self.graph, self._state
        feeds |= {name: state.values[name] for name in (*graph.parameters, *graph.frozen)}
        feeds |= {name: state.values.get(name) or self._carried[name] for name in graph.updates}
        feeds[LAZY_RESET] = OrtValue.ortvalue_from_numpy(np.array([self._reset]))
        for name, gradient in graph.parameters.items():
            if name not in state.gradients:
                zeros = np.zeros_like(state.values[name].numpy())
                state.gradients[name] = OrtValue.ortvalue_from_numpy(zeros)
            feeds[accumulation_names(gradient)[0]] = state.gradients[name]
        sums = [accumulation_names(gradient)[1] for gradient in graph.parameters.values()]
        wanted = [*self._train_outputs, *sums, *graph.updates.values()]
        results = self._train.run_with_ort_values(wanted, feeds)
        named = dict(zip(wanted, results, strict=True))
        self._check_loss(named.get(graph.loss), feeds)
        for name, out in zip(graph.parameters, sums, strict=True):
            state.gradients[name] = named[out]
        for name, out in graph.updates.items():
            (state.values if name in state.values else self._carried)[name] = named[out]
        self._reset = False
        return [named[name] for name in self._train_outputs]

    def _eval_step(self, feeds: dict[str, OrtValue]) -> list[Any]:
        feeds |= {name: value for name, value in self._state.values.items() if name in self._eval_names}
        results = list(self._eval.run_with_ort_values(self._eval_outputs, feeds))
        self._check_loss(dict(zip(self._eval_outputs, results, strict=True)).get(self.graph.loss), feeds)
        return results

    def _check_loss(self, loss: OrtValue | None, feeds: Mapping[str, OrtValue]) -> None:
        """ArtifactError where the loss is no finite number and what is fed explains it."""
        if loss is None or not loss.is_tensor() or np.isfinite(value := loss.numpy()).all():
            return
        given = {name: feeds[name] for name in self.graph.inputs}
        fault = bad_batch(f"the loss is {float(value.reshape(-1)[0])}", given, self.graph.options.labels)
        if fault is not None:
            raise ArtifactError(str(fault))

    def train(self, mode: bool = True) -> "Module":
        """Switch to training, or away from it."""
        self.training = mode
        return self

    def eval(self) -> "Module":
        """Switch to evaluation."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Let the next training step begin from zero gradients."""
        self._reset = True

    def input_names(self) -> list[str]:
        """The names of the inputs of a call, in their order."""
        return list(self.graph.inputs)

    def output_names(self) -> list[str]:
        """The names of what a call returns."""
        return list(self._train_outputs if self.training else self._eval_outputs)

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """How many numbers all parameters hold."""
        return sum(int(np.prod(self._state.values[name].shape())) for name in self._chosen(trainable_only))

    def get_contiguous_parameters(self, trainable_only: bool = False) -> OrtValue:
        """All parameters one after the other, float32, 1-D, in the order of the checkpoint."""
        parts = [self._state.values[name].numpy().ravel() for name in self._chosen(trainable_only)]
        return OrtValue.ortvalue_from_numpy(np.concatenate(parts).astype(np.float32))

    def copy_buffer_to_parameters(self, buffer: OrtValue, trainable_only: bool = True) -> None:
        """The other way round; ArtifactError for a buffer of another length."""
        values = np.array(buffer.numpy()).ravel()
        if len(values) != self.get_parameters_size(trainable_only):
            raise ArtifactError(
                f"buffer: expected {self.get_parameters_size(trainable_only)} numbers, got {len(values)}"
            )
        start = 0
        for name in self._chosen(trainable_only):
            old = self._state.values[name]
            size = int(np.prod(old.shape()))
            part = values[start : start + size].reshape(old.shape())
            self._state.parameters[name].data = part
            start += size

    def _chosen(self, trainable_only: bool) -> list[str]:
        return [name for name in self._state.values if not trainable_only or self._state.trained[name]]

    def export_model_for_inferencing(self, inference_model_uri: Uri, graph_output_names: list[str]) -> None:
        """Write the model in inference mode with the weights of the checkpoint, cut to some of its tensors.

        Dropout and BatchNormalization are in inference mode; above 2 GB the weights lie in a file beside it.
        FloatingPointError when the training has diverged.
        """
        try:
            values = {name: np.array(value.numpy()) for name, value in self._state.values.items()}
            model = self.graph.inference_model(values, outputs=graph_output_names)
        except InvalidArgumentError as e:
            raise ArtifactError(str(e)) from e
        self._state.check_finite(values)
        save_model(model, os.fspath(inference_model_uri))


class Optimizer:
    """Updates the parameters of a module along its gradients: `optimizer.step()`."""

    def __init__(self, optimizer_uri: Uri, module: Module) -> None:
        proto = load(os.fspath(optimizer_uri))
        self._module, self._state = module, module._state
        self._rate, self._slots = _about(proto, Path(os.fspath(optimizer_uri)))
        self._session = session(proto, kernels=None, session_options=module._options)
        self._learning_rate = 1e-3
        self._rate_type = _types(proto)[self._rate][0]
        initial = self._initial(proto)
        stored = self._state.optimizer
        _check_state(stored, {name: (value.dtype, list(value.shape)) for name, value in initial.items()})
        self._values = {
            n: stored[n] if n in stored else OrtValue.ortvalue_from_numpy(value) for n, value in initial.items()
        }
        self._state.optimizer = self._values
        self._state.counter = next((s.name for s in self._slots if (s.role, s.of) == (COUNTER, STEP)), STEP)

    def _initial(self, proto: ModelProto) -> dict[str, np.ndarray]:
        """What the optimizer's own state starts from."""
        types, result = _types(proto), {}
        for slot in self._slots:
            dtype, shape = types[slot.name]
            if slot.start is not None:
                result[slot.name] = np.full(shape, slot.start, dtype)
            elif slot.role == MEAN and slot.of in self._state.values:
                result[slot.name] = self._state.values[slot.of].numpy().astype(dtype)
        return result

    def step(self) -> None:
        """One update; ArtifactError before any training step has computed gradients."""
        graph, state = self._module.graph, self._state
        if not state.gradients:
            raise ArtifactError("there are no gradients. Run a training step first: module.train(); module(…)")
        rate = np.array(self._learning_rate, self._rate_type)
        feeds = {name: state.values[name] for name in graph.parameters} | self._values
        feeds |= {f"{name}_grad": state.gradients[name] for name in graph.parameters}
        feeds[self._rate] = OrtValue.ortvalue_from_numpy(rate)
        results = self._session.run_with_ort_values([slot.output for slot in self._slots], feeds)
        for slot, value in zip(self._slots, results, strict=True):
            (self._values if slot.name in self._values else state.values)[slot.name] = value

    @property
    def steps(self) -> int:
        """How many updates there have been."""
        return int(self._values[self._state.counter].numpy())

    def set_learning_rate(self, learning_rate: float) -> None:
        """The learning rate of the next updates; InvalidArgumentError unless it is a finite number of 0 or more."""
        self._learning_rate = checked_rate(learning_rate, self._rate_type)

    def get_learning_rate(self) -> float:
        """The learning rate of the next update; 10⁻³ at the start."""
        return self._learning_rate


class LinearLRScheduler:
    """η = initial · t / warmup while t < warmup, then initial · (total - t) / (total - warmup), at least 0.

    t is the number of updates so far. The rate is set when the scheduler is made and at each `step`.
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        if not 0 <= warmup_step_count < total_step_count:
            raise ArtifactError(
                f"expected 0 <= warmup_step_count < total_step_count, got {warmup_step_count}, {total_step_count}"
            )
        self._optimizer = optimizer
        self._warmup, self._total, self._initial = warmup_step_count, total_step_count, initial_lr
        self.step()

    def step(self) -> None:
        """Set the learning rate of the next update."""
        t = self._optimizer.steps
        falling = max(0.0, (self._total - t) / (self._total - self._warmup))
        factor = t / self._warmup if t < self._warmup else falling
        self._optimizer.set_learning_rate(self._initial * factor)


def _about(proto: ModelProto, path: Path) -> tuple[str, tuple[Slot, ...]]:
    """What an optimizer model says of itself: the name of its learning rate, and the records of its state."""
    text = next((entry.value for entry in proto.metadata_props if entry.key == OPTIMIZER_METADATA), None)
    if text is None:
        raise ArtifactError(f"{path} is no optimizer model of onnx_backprop. Write one with generate_artifacts")

    def wrong(what: str) -> ArtifactError:
        return ArtifactError(f"{path} is no optimizer model of onnx_backprop: its metadata entry: {what}")

    types, outputs = _types(proto), {value.name for value in proto.graph.output}
    rate, slots = optimizer_state(text, wrong)
    if not {rate, *(slot.name for slot in slots)} <= types.keys() or not outputs >= {slot.output for slot in slots}:
        raise wrong("state, learning_rate: expected names of tensors that go in, and of outputs")
    return rate, slots


def _check_state(values: Mapping[str, OrtValue], declared: Mapping[str, tuple[Any, list[int]]]) -> None:
    """ArtifactError for a tensor of a checkpoint of another type or shape than the model declares."""
    for name, value in values.items():
        got = value.numpy()
        if name in declared and (got.dtype, list(got.shape)) != declared[name]:
            dtype, shape = declared[name]
            raise ArtifactError(
                f"the checkpoint belongs to another model: {name!r} is {got.dtype}{list(got.shape)} in it, "
                f"{dtype}{shape} in the model"
            )


def _types(proto: ModelProto) -> dict[str, tuple[Any, list[int]]]:
    """Type and shape of every input that is a tensor."""
    return {
        value.name: (
            helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
            [d.dim_value for d in value.type.tensor_type.shape.dim],
        )
        for value in proto.graph.input
        if value.type.tensor_type.elem_type in helper.get_all_tensor_dtypes()
    }
