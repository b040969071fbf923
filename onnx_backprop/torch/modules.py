"""`module`: an ONNX model as a module of PyTorch, whose forward and backward pass run in onnxruntime."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx import ModelProto, TensorProto

from onnx_backprop.converters.prepare.exporters.origins import FROZEN, origin_of
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.converters.training.passes import Variables, inference, passes, variables
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.mapped import can_be_mapped, lent, refer_like, to_array, whole
from onnx_backprop.opset.graphs.edit import copied, replace_values, without_numbers
from onnx_backprop.opset.graphs.names import unique
from onnx_backprop.ort_ops import Named, SessionOptions, give_back, native_kernels_work
from onnx_backprop.providers.choose import Target, chosen
from onnx_backprop.providers.placed import check_kernels
from onnx_backprop.torch.runs import Function, Run
from onnx_backprop.torch.tensors import array_of, dtype_of, torch
from onnx_backprop.training.inputs import Inputs, refusals

COUNT = "num_batches_tracked"  # of a BatchNorm of PyTorch


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
        self._types = {v.name: dtype_of(v.type.tensor_type.elem_type) for v in source.model.graph.input}
        self._places: dict[str, tuple[Any, str]] = {}
        self._forget()
        self._layouts = source.layouts
        for name in source.names:
            value, layout = stored[name], source.layouts[name]
            self._types[name] = dtype_of(value.data_type)
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
        self._compiled: dict[tuple[bool, frozenset[str], tuple[str, ...]], Run] = {}
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
            results = Function.apply(run, tuple(tensors), *tensors.values()) if wrt else tuple(run.infer(tensors))
        outputs = results[: len(run.outputs)]
        with torch.no_grad():
            for name, new in zip(run.statistics, results[len(outputs) :], strict=True):
                tensors[name].copy_(new)
                owner, leaf = self._places[name]
                if leaf == "running_mean":
                    getattr(owner, COUNT).add_(1)
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

    def _run(self, wrt: tuple[str, ...]) -> Run:
        owners = {name: self._places[name][0] for name in self._model.statistics if name in self._places}
        kept = frozenset(name for name, owner in owners.items() if self.training and not owner.training)
        key = (self.training, kept, wrt)
        with self._lock:
            if key not in self._compiled:
                graphs = passes(self._source(self._places), wrt, training=self.training, kept=kept)
                self._compiled[key] = Run(graphs, self._kernels, self._options, self._target)
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
                replace_values(tensor, array_of(stored))
        return replace(self._model, model=model)

    def _reference(self, tensor: TensorProto) -> TensorProto:
        """A tensor whose numbers are those of this module whenever they are read, so that there is no copy of them."""
        name = tensor.name
        if name not in self._references:
            self._references[name] = lent(tensor, self, lambda m: array_of(m._stored(name).detach().contiguous()))
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


def _put(owner: Any, leaf: str, tensor: Any, *, trained: bool) -> tuple[Any, str]:
    if trained:
        owner.register_parameter(leaf, torch.nn.Parameter(tensor))
    else:
        owner.register_buffer(leaf, tensor)
    return owner, leaf
