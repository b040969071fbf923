"""`module`: an ONNX model as a module of PyTorch, whose forward and backward pass run in onnxruntime."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from onnx_backprop.converters.prepare.exporters.origins import FROZEN, origin_of
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.converters.training.passes import Passes, Variables, inference, passes, variables
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError, UnsupportedError
from onnx_backprop.opset.core.mapped import can_be_mapped, lent, refer_like, to_array, whole
from onnx_backprop.opset.graphs.edit import copied, replace_values, without_numbers
from onnx_backprop.opset.graphs.names import unique
from onnx_backprop.ort_ops import (
    Named,
    SessionOptions,
    be_lean,
    default_options,
    give_back,
    kernels_on,
    lower,
    native_kernels_work,
    session,
)
from onnx_backprop.ort_ops.huge_pages import HugePages
from onnx_backprop.providers.choose import Target, chosen
from onnx_backprop.providers.placed import Placed, check_kernels, options_for
from onnx_backprop.training.inputs import Inputs, refusals

try:
    torch: Any = import_module("torch")
except ImportError as e:
    raise KernelError(
        f"onnx_backprop.torch needs PyTorch, and importing it failed: {e}. Install it with `pip install torch`, or "
        "train with onnx_backprop.Trainer, which does without"
    ) from e

OrtValue = onnxruntime.OrtValue
COUNT = "num_batches_tracked"  # of a BatchNorm of PyTorch
Tensors = Mapping[str, Any]


def module(
    model: ModelProto | ir.Model | str | Path,
    *,
    kernels: str = "native",
    untie: bool = False,
    session_options: SessionOptions | None = None,
    device: str | None = None,
    providers: Sequence[Named] | None = None,
) -> Module:
    """A `torch.nn.Module` of a model: y = f(x), and of a loss of y the gradients by x and the weights.

        network = ob.torch.module("model.onnx")
        optimizer = torch.optim.AdamW(network.parameters())
        for x, target in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(network(x), target).backward()
            optimizer.step()
        network.export("trained.onnx")

    Forward and backward pass run in sessions of onnxruntime, on the tensors of PyTorch and without copies: what an
    optimizer writes into a weight is what the next run reads. Converted and compiled is on the first call of each kind:
    in training and in inference mode, with and without gradients.

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file.
        kernels: what the operators of our domain run on, see `use_kernels`.
        untie: give every place that reads a tensor of equal numbers one of its own, as of `training_graph`.
        session_options: yours, for all sessions; as of `Trainer`, memory patterns and reuse are turned off in them.
        device, providers: what the sessions run on, as `session` takes them. Tensors stay PyTorch's, on the CPU, and
            are copied for each run; `Trainer` keeps a training on the device.

    Errors: KernelError without PyTorch; what `training_graph` raises for a file.
    """
    target = chosen(device, providers)
    result = Module(variables(model, untie=untie), kernels=kernels, session_options=session_options, target=target)
    give_back()
    return result


class Module(torch.nn.Module):
    """What `module` makes.

    A call takes the model's inputs, in their order or by their names, as tensors of the model's types on the CPU, and
    returns its output, or a tuple of several. Float inputs get a gradient where they require one.

    Parameters are those of `training_graph` by default; running statistics and other buffers are buffers. Their names
    and shapes are those of the module that was exported, where the file says them, whose `state_dict()` loads into this
    one: a weight that the exporter has transposed is a view of it. Other tensors have their names in the file. Dots are
    modules inside this one, as in PyTorch; where that cannot be, as for "a" and "a.b", slashes take the place of dots.
    What `requires_grad_(False)` freezes has no gradient computed.

    In training mode Dropout draws from PyTorch's generator, and BatchNormalization takes the statistics of the batch
    and renews its running ones as ONNX defines it, by the biased variance. In inference mode (`eval()`) they do not,
    whatever mode the file is in. `network.backbone.eval()` behind `network.train()` puts each BatchNormalization into
    inference mode whose statistics lie in that module; `requires_grad_(False)` changes no mode, as in PyTorch.

    A second derivative, by `create_graph=True`, is refused with UnsupportedError: `ob.hvp` has those. A copy, as by
    copy.deepcopy, makes sessions of its own.
    """

    def __init__(
        self,
        source: Variables,
        *,
        kernels: str,
        session_options: SessionOptions | None = None,
        target: Target | None = None,
    ) -> None:
        super().__init__()
        if target is not None:
            check_kernels(kernels)
        self._target = target
        self._kernels = None if kernels == "native" and not native_kernels_work() else kernels
        self._options = session_options
        stored = {tensor.name: tensor for tensor in source.model.graph.initializer}
        # of the numbers that this module's tensors have there is no second copy: see `_source`
        self._model = replace(source, model=whole(without_numbers(source.model, source.names)), numbers=None)
        names = tuple(v.name for v in source.model.graph.input if v.name not in stored)
        self._inputs = Inputs(TrainingGraph(self._model.model, "", names, None, {}))
        self._types = {v.name: _dtype(v.type.tensor_type.elem_type) for v in source.model.graph.input}
        self._places: dict[str, tuple[Any, str]] = {}
        self._forget()
        self._layouts = source.layouts
        for name in source.names:
            value, layout = stored[name], source.layouts[name]
            self._types[name] = _dtype(value.data_type)
            array = to_array(value)
            known = array.astype("float32" if array.dtype.name == "bfloat16" else array.dtype)  # to PyTorch; a copy
            del array
            tensor = torch.from_numpy(known).to(self._types[name])
            tensor = tensor.t() if layout.transposed else tensor.reshape(-1) if layout.flat else tensor
            owner, leaf = self._register(layout.name, tensor, trained=name in source.parameters)
            self._places[name] = owner, leaf
            if leaf == "running_mean" and not hasattr(owner, COUNT):
                owner.register_buffer(COUNT, torch.tensor(0))  # which no file has, and a state_dict does
            if origin_of(value).kind == FROZEN:
                getattr(owner, leaf).requires_grad_(False)

    def _forget(self) -> None:
        self._compiled: dict[tuple[bool, frozenset[str], tuple[str, ...]], _Run] = {}
        self._references: dict[str, TensorProto] = {}
        self._lock = threading.Lock()

    def _stored(self, name: str) -> Any:
        """A tensor of this module as the file has it, in the same memory."""
        owner, leaf = self._places[name]
        tensor, layout = getattr(owner, leaf), self._layouts[name]
        if not isinstance(tensor, torch.Tensor) or not (layout.transposed or layout.flat):
            return tensor
        return tensor.t() if layout.transposed else tensor.reshape(layout.shape)

    def _register(self, name: str, tensor: Any, *, trained: bool) -> tuple[Any, str]:
        """Where a tensor lies: the module that has it, and its name there."""
        *scopes, leaf = name.split(".")
        owner: Any = self
        for scope in scopes:
            inner = owner._modules.get(scope)
            if inner is None and (not scope or hasattr(owner, scope)):
                break
            owner = owner._modules.setdefault(scope, torch.nn.Module()) if inner is None else inner
        else:
            if leaf and not hasattr(owner, leaf):
                return _put(owner, leaf, tensor, trained=trained)
        return _put(self, unique(name.replace(".", "/"), {*dir(self)}), tensor, trained=trained)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The outputs of the model.

        Errors: InvalidArgumentError for inputs that are missing, unknown, or of another type, shape or device, and for
        what onnxruntime does not run.
        """
        tensors_by_name = self._given(inputs, named)
        tensors = tensors_by_name | {name: self._stored(name) for name in self._places}
        for name in self._places:
            self._check(name, tensors[name])
        wrt = tuple(name for name, tensor in tensors.items() if tensor.requires_grad) if torch.is_grad_enabled() else ()
        run = self._run(wrt)
        if run.masks is not None:
            tensors[run.masks] = torch.randint(0, 2**31, (2,))
        with refusals(tensors_by_name):
            if wrt:
                results = _Function.apply(run, tuple(tensors), *tensors.values())
            else:
                results = tuple(run.forward(tensors).values())
        outputs = results[: len(run.outputs)]
        with torch.no_grad():
            for name, new in zip(run.statistics, results[len(outputs) :], strict=True):
                tensors[name].copy_(new)
        return outputs[0] if len(outputs) == 1 else outputs

    def _given(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        names = self._inputs.names
        if len(inputs) > len(names) or not named.keys().isdisjoint(names[: len(inputs)]):
            raise InvalidArgumentError(f"expected {', '.join(names)}, got {len(inputs)} tensors and {', '.join(named)}")
        tensors_by_name = {**dict(zip(names, inputs, strict=False)), **named}
        self._inputs.check_names(tensors_by_name)
        for name, tensor in tensors_by_name.items():
            self._check(name, tensor)
        self._inputs.check_shapes({name: tuple(tensor.shape) for name, tensor in tensors_by_name.items()})
        return {name: tensors_by_name[name] for name in names}

    def _check(self, name: str, tensor: Any) -> None:
        """Raise for what is no tensor of the type that the model has, on the CPU."""
        expected = self._types[name]
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"{name!r}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype != expected:
            raise InvalidArgumentError(
                f"{name!r} has type {expected}, got a tensor of {tensor.dtype}. Use .to({expected})"
            )
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            kind = f"{tensor.layout} on {tensor.device}"
            raise InvalidArgumentError(f"{name!r}: expected a dense tensor on the CPU, got {kind}. Use .cpu()")

    def _run(self, wrt: tuple[str, ...]) -> _Run:
        owners = {name: self._places[name][0] for name in self._model.statistics if name in self._places}
        kept = frozenset(name for name, owner in owners.items() if self.training and not owner.training)
        key = (self.training, kept, wrt)
        with self._lock:
            if key not in self._compiled:
                graphs = passes(self._source(self._places), wrt, training=self.training, kept=kept)
                self._compiled[key] = _Run(graphs, self._kernels, self._options, self._target)
                del graphs
                give_back()
            return self._compiled[key]

    def export(self, path: str | Path) -> None:
        """Write the plain inference model with the weights and statistics of now; above 2 GB they lie beside it.

        Inputs, outputs, names and metadata are those of the model that came.

        Errors: InvalidArgumentError for weights that are none of the model's type and shape, on the CPU.
        """
        for name in self._places:
            self._check(name, self._stored(name))
        save_model(inference(self._source(self._places)), path)

    def _source(self, names: Collection[str]) -> Variables:
        """The model with some of the module's tensors as they are now."""
        model = copied(self._model.model)
        for tensor in model.graph.initializer:
            if tensor.name not in names:
                continue
            stored = self._stored(tensor.name).detach().contiguous()
            if (shape := tuple(stored.shape)) != tuple(tensor.dims):
                raise InvalidArgumentError(f"{tensor.name!r} has shape {tuple(tensor.dims)}, got a tensor of {shape}")
            if can_be_mapped(tensor):
                refer_like(tensor, self._reference(tensor))
            else:
                replace_values(tensor, _array(stored))
        return replace(self._model, model=model)

    def _reference(self, tensor: TensorProto) -> TensorProto:
        """A tensor whose numbers are those of this module whenever they are read, so that there is no copy of them."""
        name = tensor.name
        if name not in self._references:
            self._references[name] = lent(tensor, self, lambda m: _array(m._stored(name).detach().contiguous()))
        return self._references[name]

    def __getstate__(self) -> dict[str, Any]:
        """Without sessions, their lock and references to this object, which no copy can have."""
        left = ("_compiled", "_references", "_lock")
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        super().__setstate__(saved)
        self._forget()

    def extra_repr(self) -> str:
        """The inputs, and how many numbers are trained."""
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        return f"inputs=({', '.join(self._inputs.names)}), {trained:,} numbers trained"


class _Run:
    """The sessions of one kind of call."""

    def __init__(
        self, graphs: Passes, kernels: str | None, options: SessionOptions | None, target: Target | None
    ) -> None:
        self.masks, self.outputs, self.statistics = graphs.masks, graphs.outputs, tuple(graphs.statistics)
        self.seeds, self._gradients = graphs.seeds, graphs.gradients
        self.reads: tuple[str, ...] = ()
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
            return

        def types(part: ModelProto) -> dict[str, ValueInfoProto]:
            self._forward = opened(part)
            return {value.name: _info(value) for value in self._forward.get_outputs()}

        _, backward, _ = graphs.split(types)
        self._backward = opened(backward)
        self.reads = tuple(v.name for v in self._backward.get_inputs() if v.name not in graphs.seeds.values())

    def forward(self, tensors_by_name: Tensors) -> dict[str, Any]:
        """Outputs, new statistics and what the backward pass reads, by name."""
        self._huge_pages.about_to_run()
        return _called(self._forward, tensors_by_name)

    def backward(self, tensors_by_name: Tensors) -> dict[str, Any]:
        """The gradients, by the names of what they are the gradients of."""
        gradients = _called(self._backward, tensors_by_name)
        return {name: gradients[gradient] for name, gradient in self._gradients.items()}


class _Function(torch.autograd.Function):
    """The two sessions as one differentiable function of tensors."""

    @staticmethod
    def forward(ctx: Any, run: _Run, names: Sequence[str], *tensors: Any) -> tuple[Any, ...]:
        tensors_by_name = dict(zip(names, tensors, strict=True))
        outputs = run.forward(tensors_by_name)
        ctx.run, ctx.names = run, names
        ctx.save_for_backward(*({**tensors_by_name, **outputs}[name] for name in run.reads))
        results = tuple(list(outputs.values())[: len(run.outputs) + len(run.statistics)])
        seeded = [outputs[name] for name in run.seeds]
        ctx.mark_non_differentiable(*(y for y in results if all(y is not other for other in seeded)))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        run = ctx.run
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "the gradient of a model of onnx_backprop.torch has no derivative in PyTorch. Leave create_graph out, "
                "or compute second derivatives with onnx_backprop.hvp"
            )
        tensors_by_name = dict(zip(run.reads, ctx.saved_tensors, strict=True))
        seeds = dict(zip(run.outputs, gradients, strict=False))
        by_name = run.backward(tensors_by_name | {seed: seeds[y] for y, seed in run.seeds.items()})
        return (None, None, *(by_name.get(name) for name in ctx.names))


def _called(session: onnxruntime.InferenceSession, tensors_by_name: Tensors) -> dict[str, Any]:
    """The outputs of a session on those of the tensors that it reads, in the same memory, in tensors of their own."""
    taken = {v.name: tensors_by_name[v.name].detach().contiguous() for v in session.get_inputs()}
    fed = {name: OrtValue.from_dlpack(tensor) for name, tensor in taken.items()}
    names = [value.name for value in session.get_outputs()]
    places = {tensor.data_ptr() for tensor in taken.values()}
    results: dict[str, Any] = {}
    for name, value in zip(names, session.run_with_ort_values(names, fed), strict=True):
        result = torch.from_dlpack(value)
        if result.data_ptr() in places and result.numel():  # one tensor under two names, which PyTorch may write into
            result = result.clone()
        places.add(result.data_ptr())
        results[name] = result
    return results


def _put(owner: Any, leaf: str, tensor: Any, *, trained: bool) -> tuple[Any, str]:
    if trained:
        owner.register_parameter(leaf, torch.nn.Parameter(tensor))
    else:
        owner.register_buffer(leaf, tensor)
    return owner, leaf


def _array(tensor: Any) -> np.ndarray:
    """The same memory; of bfloat16, which NumPy has not, as onnx does."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _dtype(elements: int) -> Any:
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
