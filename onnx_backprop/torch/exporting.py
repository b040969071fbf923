"""`export`: a module of PyTorch as an ONNX model that trains as the module does."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, helper

from onnx_backprop.converters.prepare.fused.expand import expand_fused
from onnx_backprop.converters.prepare.fused.table import LOSSES
from onnx_backprop.converters.prepare.ir_models import to_proto
from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError, OnnxBackpropWarning, UnsupportedError
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.facts import DRAWS
from onnx_backprop.opset.graphs.names import unique
from onnx_backprop.opset.graphs.walk import is_standard
from onnx_backprop.ort_ops import session
from onnx_backprop.torch.lowering import Recorder, lower
from onnx_backprop.torch.memory import ModuleTensors, refuse_views, warn_of_shared
from onnx_backprop.torch.modules import COUNT, torch
from onnx_backprop.torch.rewriting import (
    array,
    drop_unread,
    in_order,
    leaf_shapes,
    mark,
    name_apart,
    name_dimensions,
    name_loss,
    tie,
)
from onnx_backprop.torch.translations import translations

# subclasses of torch.autograd.Function whose gradient is that of their forward pass, or which are warned of as hooks
_OF_TORCH = frozenset({"torch.nn.modules._functions.BackwardHookFunction", "torch.utils.checkpoint.CheckpointFunction"})
# largest difference of an output, relative to its largest number, for each type
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def export(
    module: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    check: bool = True,
) -> ModelProto:
    """y = module(*args, **kwargs) as an ONNX model, or (loss(y, *targets), y): the one to train from.

        model = ob.torch.export(network, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        graph = ob.training_graph(model, loss="mse", optimizer="adamw")

    It is `torch.onnx.export(dynamo=True)`, which optimises for inference, less what changes a training:

    - Every parameter is an initializer of its own name, shape and numbers. What the module has under several names,
      tied weights, is one initializer, the first of them; metadata "onnx_backprop.aliases" has the others as JSON.
    - The metadata of each initializer says what it was: PARAMETER, BUFFER or CONSTANT_TENSOR, as torch writes it, and
      "onnx_backprop.requires_grad" is "False" for parameters that require no gradient.
    - BatchNormalization and Dropout stay nodes in either mode, each in the mode of its module, those of attention and
      between layers of recurrent nets too: a BatchNorm in eval() inside a module in train() stays in inference mode.
      What a module itself leaves out in eval(), as `p if self.training else 0.0`, is not in the file: call train().
    - `detach()`, `x.data`, `item()` and `torch.no_grad()` are Identity nodes with metadata "onnx_backprop.stop", which
      pass no gradient.

    Args:
        module: on the CPU. It is not changed, nor are its mode, its buffers or torch's random numbers.
        args, kwargs: what to call it with. Numbers among them become constants, as of `torch.export.export`.
        loss: called with the module's output and the targets, gives one number, which is the first output, "loss". A
            module may have parameters and buffers, which are named "loss.…". Then `training_graph` takes loss=None
            and prediction="loss". None: for a loss that `training_graph` adds, or a module that returns its loss.
        targets: examples of what the loss takes beside the output; the inputs "target", or "target_0", ….
        dynamic_shapes: of args and kwargs, as of `torch.export.export`. With a loss, those of targets may follow, or be
            under their names; axes of targets that nothing is said of are symbolic where the graph allows it.
        input_names, output_names: other names, in order; with a loss, "loss" is named too.
        opset_version: of the model. Default: torch's.
        check: run both, and compare their outputs. Dropout is left out of both, and a module that draws numbers
            otherwise is not compared.

    Raises: KernelError without PyTorch and onnxscript; UnsupportedError for what torch.export or torch.onnx do not
    export, each with their exception as its cause, and for outputs that differ; InvalidArgumentError for arguments that
    do not fit, and a loss of several numbers. OnnxBackpropWarning for functions and hooks with a backward pass of their
    own, which no file has, and for buffers other than running statistics that the module changes.
    """
    try:
        import_module("onnxscript")
    except ImportError as e:
        raise KernelError(
            f"onnx_backprop.torch.export needs onnxscript, and importing it failed: {e}. Install it with "
            "`pip install onnxscript`"
        ) from e
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgumentError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    if not isinstance(args, tuple) or not isinstance(targets, tuple):
        raise InvalidArgumentError(
            f"args, targets: expected tuples, got {type(args).__name__} and {type(targets).__name__}. Write (x,)"
        )
    if targets and loss is None:
        raise InvalidArgumentError("targets: without a loss, nothing reads them. Name a loss, or leave them out")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        advice = (
            "Save what export returns: onnx.save(model, path)" if isinstance(kwargs, str | Path) else "Write {name: x}"
        )
        raise InvalidArgumentError(f"kwargs: expected a mapping of arguments by name, got {kwargs!r}. {advice}")
    named = dict(kwargs or {})
    _require_momentum(module)
    with _kept(module), _with_loss(module, loss, len(targets)) as names:
        tensors = ModuleTensors(module)
        feeds = named | dict(zip(names, targets, strict=True))
        shapes = _shapes(module, dynamic_shapes, args, named, names, targets)
        program, functions, hooks = _captured(module, args, feeds, shapes, tensors, check=check)
        expected = _outputs(module, args, feeds) if check else None
        tensors.refuse_replacements()
        parameters = list(module.named_parameters(remove_duplicate=False))
        buffers = list(module.named_buffers(remove_duplicate=False))
    refuse_views(program.constants.values(), parameters)
    _warn_of_functions(functions)
    _warn_of_hooks(module, of_values=hooks)
    converted = _converted(program, input_names, output_names, opset_version)
    _warn_of_state(program, converted.exported_program, buffers, tensors.changed_buffers)
    warn_of_shared([*parameters, *buffers])
    model = converted.model
    tie(model.graph, [*parameters, *buffers])
    mark(model.graph, parameters)
    drop_unread(model.graph, {name for name, _ in parameters})
    _warn_of_names(name_apart(model.graph), input_names)
    name_dimensions(model.graph, leaf_shapes((*args, *feeds.values()), in_order(module, shapes, args, feeds)))
    if loss is not None:
        name_loss(model.graph, output_names)
    proto = to_proto(model)
    expand_fused(proto, {}, LOSSES)  # which onnxruntime would not load
    if expected is not None:
        _compare(model, proto, program, expected)
    return proto


def _require_momentum(module: Any) -> None:
    """Errors: UnsupportedError for a BatchNorm whose statistics are those of all batches so far, equally weighted."""
    for name, part in module.named_modules():
        cumulative = isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.momentum is None
        if cumulative and part.training and part.track_running_stats:
            raise UnsupportedError(
                f"export: {name or 'the module'!r}, a {type(part).__name__} in training mode, has momentum=None, "
                "statistics over all batches so far: expected a number, by which ONNX renews them. Set momentum=0.1, "
                "or put that module into eval()"
            )


@contextmanager
def _kept(module: Any) -> Iterator[None]:
    """Put back what a call of a module changes: buffers, other tensors in the places of parameters, random numbers."""
    owners = [(store, dict(store)) for part in module.modules() for store in (part._buffers, part._parameters)]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    random = torch.get_rng_state()
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about itself
            yield
    finally:
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, before in values:
                buffer.copy_(before)
        for store, before in owners:
            store.update(before)


@contextmanager
def _with_loss(module: Any, loss: Callable[..., Any] | None, count: int) -> Iterator[list[str]]:
    """Let a module answer (loss, outputs), for as long as this lasts; the names of the targets."""
    if loss is None:
        yield []
        return
    forward, before = module.forward, "forward" in vars(module)
    if module._forward_hooks or module._forward_pre_hooks:
        raise UnsupportedError(
            "export: a loss for a module that has forward hooks itself: expected none. Put it into a module of yours "
            "whose forward calls it"
        )
    signature = inspect.signature(forward)
    taken = {*signature.parameters, *dir(module)}
    names = [unique("target" if count == 1 else f"target_{n}", taken) for n in range(count)]
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    given = list(signature.parameters.values())
    place = len(given) - (bool(given) and given[-1].kind is inspect.Parameter.VAR_KEYWORD)
    part = unique("loss", taken) if isinstance(loss, torch.nn.Module) else None

    def both(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in names]
        outputs = forward(*args, **kwargs)
        return loss(outputs, *targets), outputs

    setattr(both, "__signature__", signature.replace(parameters=[*given[:place], *more, *given[place:]]))  # noqa: B010
    if part is not None:
        module.add_module(part, loss)
    module.forward = both
    try:
        yield names
    finally:
        if before:
            module.forward = forward
        else:
            del module.forward
        if part is not None:
            delattr(module, part)


def _shapes(
    module: Any, shapes: Any, args: tuple[Any, ...], named: Mapping[str, Any], names: Sequence[str], targets: Any
) -> Any:
    """Dynamic shapes by the names of arguments, targets among them."""
    if shapes is None or not names:
        return shapes
    bound = inspect.signature(module.forward).bind_partial(*args, **named)
    result = dict(shapes) if isinstance(shapes, Mapping) else {}
    if not isinstance(shapes, Mapping):
        order = [*bound.arguments, *names]
        if len(shapes) not in (len(bound.arguments), len(order)):
            raise InvalidArgumentError(f"dynamic_shapes: expected those of {', '.join(order)}, got {len(shapes)}")
        result = dict(zip(order, shapes, strict=False))
    for name, target in zip(names, targets, strict=True):
        if isinstance(target, torch.Tensor):
            result.setdefault(name, dict.fromkeys(range(target.dim()), torch.export.Dim.AUTO))
    return result


def _outputs(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that a module answers, Dropout left out."""
    with torch.no_grad(), Recorder():
        return [x for x in torch.utils._pytree.tree_leaves(module(*args, **kwargs)) if isinstance(x, torch.Tensor)]


def _captured(
    module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Any, tensors: ModuleTensors, *, check: bool
) -> tuple[Any, list[str], bool]:
    """The ExportedProgram, lowered; the functions called that have a backward pass of their own; hooks on values.

    What torch.export refuses is run as it is, if it is to be checked: an error of the module itself says more.
    """
    with _functions() as functions:
        try:
            with Recorder(tensors) as recorder, torch.fx.experimental._config.patch(backed_size_oblivious=True):
                program = torch.export.export(module, args, dict(kwargs), dynamic_shapes=shapes, strict=False)
        except Exception as e:
            refused = _refused("torch.export.export", e)
            if check and refused is not _cause(e):
                _outputs(module, args, kwargs)
            raise refused from e
    lower(program)
    return program, functions, recorder.hooks


def _converted(program: Any, inputs: Any, outputs: Any, opset_version: int | None) -> Any:
    """The ONNXProgram."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                input_names=inputs,
                output_names=outputs,
                opset_version=opset_version,
                custom_translation_table=translations(),
            )
    except Exception as e:
        raise _refused("torch.onnx.export", e) from e
    finally:
        logger.setLevel(level)


def _refused(what: str, error: BaseException) -> UnsupportedError:
    cause = _cause(error)
    if isinstance(cause, UnsupportedError):
        return cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return UnsupportedError(f"export: {what} refuses the module: {type(cause).__name__}: {' '.join(lines[:2])[:300]}")


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _compare(model: ir.Model, proto: ModelProto, program: Any, expected: Sequence[Any]) -> None:
    """Run the model and compare its outputs. Errors: UnsupportedError, with the largest difference."""
    if any(node.op_type in DRAWS for node in model.graph.all_nodes()):
        return
    plain = copied(proto)
    types = {tensor.name: tensor.data_type for tensor in plain.graph.initializer}
    for node in plain.graph.node:
        if is_standard(node, "Dropout"):
            del node.input[2:]
        elif is_standard(node, "BatchNormalization"):
            # onnxruntime's is wrong in training mode where its optimizer takes the renewed statistics away
            outputs = zip(node.output[1:], node.input[3:], strict=False)
            plain.graph.output.extend(
                helper.make_tensor_value_info(new, types[old], None) for new, old in outputs if old in types
            )
    leaves = torch.utils._pytree.tree_leaves(program.example_inputs)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    names = [value.name for value in plain.graph.input]
    feeds = dict(zip(names, [array(x) for x in tensors], strict=True))
    try:
        results = session(plain).run(None, feeds)
    except Exception as e:
        raise UnsupportedError(f"export: onnxruntime does not run the model, so that it is not checked: {e}") from e
    if len(expected) != len(proto.graph.output):
        raise UnsupportedError(
            f"export: the module has {len(expected)} outputs, and the model {len(proto.graph.output)}. Return tensors"
        )
    for value, result, tensor in zip(proto.graph.output, results, expected, strict=False):
        got, want = np.asarray(result), array(tensor)
        if got.shape != want.shape:
            raise UnsupportedError(
                f"export: {value.name!r} is {got.shape} in the model, and {want.shape} in the module"
            )
        if not want.size:
            continue
        a, b = got.astype(np.float64), want.astype(np.float64)
        difference = float(np.max(np.abs(np.subtract(a, b, out=np.zeros_like(a), where=a != b))))
        limit = _TOLERANCES.get(tensor.dtype, 0) * max(1e-3, float(np.abs(b[np.isfinite(b)]).max(initial=0)))
        if not difference <= limit and not np.array_equal(a, b, equal_nan=True):
            raise UnsupportedError(
                f"export: {value.name!r} differs from the module's by up to {difference:.3g}, expected {limit:.3g} at "
                "most. check=False leaves this out"
            )


@contextmanager
def _functions() -> Iterator[list[str]]:
    """The names of the subclasses of torch.autograd.Function that are called meanwhile.

    Inside of one gradients are off, and are on again behind it. torch.export, which sees the blocks of no_grad and
    enable_grad alone, would end one there with gradients off and leave everything behind without: it sees none there.
    """
    called: list[str] = []
    base = torch.autograd.function._SingleLevelFunction  # what `swish = Swish.apply` calls too, which was taken before
    switch = torch._C._set_grad_enabled

    def unseen(mode: bool) -> None:
        with torch._C.DisableTorchFunction():
            switch(mode)

    def recorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if f"{cls.__module__}.{cls.__name__}" not in _OF_TORCH:
            called.append(cls.__name__)
        outside, torch._C._set_grad_enabled = torch._C._set_grad_enabled, unseen
        try:
            return super(base, cls).apply(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled = outside

    base.apply = classmethod(recorded)
    try:
        yield called
    finally:
        del base.apply


def _warn_of_functions(called: Sequence[str]) -> None:
    if called:
        names = ", ".join(dict.fromkeys(called))
        warnings.warn(
            f"export: the module calls {names}, of torch.autograd.Function: its forward pass is in the file, and its "
            "backward pass is not. The gradient is that of the forward pass as written",
            OnnxBackpropWarning,
            stacklevel=3,
        )


def _warn_of_hooks(module: Any, *, of_values: bool) -> None:
    parts = [name or "the module" for name, part in module.named_modules() if _hooked(part)]
    parts += [name for name, p in module.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    parts += ["values that forward computes (register_hook)"] * of_values
    if parts:
        warnings.warn(
            f"export: {', '.join(parts)}: backward hooks, which no file has. Gradients are those without them",
            OnnxBackpropWarning,
            stacklevel=3,
        )


def _warn_of_names(renamed: Mapping[str, str], names: Sequence[str] | None) -> None:
    if renamed and names and not renamed.keys().isdisjoint(names):
        taken = ", ".join(sorted(renamed.keys() & set(names)))
        raise InvalidArgumentError(f"input_names: {taken}: expected names that no parameter and no buffer has")
    if renamed:
        pairs = ", ".join(f"{old!r} is the input {new!r}" for old, new in renamed.items())
        warnings.warn(
            f"export: {pairs}, as a parameter or a buffer has that name, too. input_names gives inputs other names",
            OnnxBackpropWarning,
            stacklevel=3,
        )


def _hooked(part: Any) -> bool:
    return bool(part._backward_hooks or part._backward_pre_hooks)


def _warn_of_state(program: Any, converted: Any, buffers: Sequence[tuple[str, Any]], written: Collection[str]) -> None:
    """Say which buffers the module changes in a call, running statistics of BatchNorm aside.

    converted: the program as the exporter has decomposed it, which forgets those of InstanceNorm. written: those that
    functions have changed in place, of which torch.export does not know what `x.data` gave out.
    """
    named = {name for name, _ in buffers if name.rpartition(".")[2] != COUNT}
    changed = [name for name in converted.graph_signature.buffers_to_mutate.values() if name in named]
    stored = program.graph_signature.inputs_to_buffers
    for call in program.graph.nodes:
        if call.op == "call_function" and call.target is torch.ops.aten.instance_norm.default and call.args[5]:
            changed += [stored[x.name] for x in call.args[3:5] if getattr(x, "name", "") in stored]
    changed += [name for name in sorted(written) if name in named and name not in changed]
    if changed:
        warnings.warn(
            f"export: the module changes its buffers {', '.join(map(repr, changed))} in each call. In the file they "
            "keep their values, or are left out if no result depends on them, so that a training goes another way than "
            "the module's, or gives another module in eval(). Export in eval(), if that leaves them",
            OnnxBackpropWarning,
            stacklevel=3,
        )
