"""`training_graph`: a forward model in, one graph that computes its loss, its gradients and the update out."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.parameters.choice import choose
from onnx_backprop.converters.parameters.report import warn_of
from onnx_backprop.converters.parameters.structure import NEVER_TRAINED
from onnx_backprop.converters.prepare.free import Free
from onnx_backprop.converters.prepare.load import check_names
from onnx_backprop.converters.prepare.selection import Patterns, aliases, select, written_out
from onnx_backprop.converters.prepare.stops import prepared
from onnx_backprop.converters.prepare.writing.inline import check_inline
from onnx_backprop.converters.recompute.memory import check_memory, fit_memory
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.differentiate import Progress, find_path
from onnx_backprop.converters.reverse.known import is_float
from onnx_backprop.converters.reverse.models.backward import DEFAULT_KERNELS, Differentiation, finish
from onnx_backprop.converters.training.losses import LOSSES
from onnx_backprop.converters.training.losses.add_loss import add_loss, typed
from onnx_backprop.converters.training.losses.base import LossBuilder
from onnx_backprop.converters.training.losses.compose import AnyLoss, check_loss
from onnx_backprop.converters.training.modes import (
    draw_masks,
    keep_statistics,
    nothing_to_switch,
    renew_statistics,
    train,
)
from onnx_backprop.converters.training.optimizers import Optimizer, check_optimizer
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.rewrites.precision import check_precision, emit_gradients
from onnx_backprop.converters.training.rewrites.sums import stage_sums
from onnx_backprop.converters.training.sharing import Ties, shared, told_shared
from onnx_backprop.converters.training.sharing import tie as share
from onnx_backprop.converters.training.sharing import untie as separate
from onnx_backprop.converters.training.update.loss_scale import renewed_scale, with_default
from onnx_backprop.converters.training.update.step import State, StepWriter, write_outputs
from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropWarning
from onnx_backprop.opset.core.progress import shown
from onnx_backprop.opset.functions.use_kernels import check_kernels
from onnx_backprop.opset.graphs.names import used_names


def training_graph(
    model: ModelProto | ir.Model | str | Path,
    *,
    loss: AnyLoss = None,
    trainable: Patterns | None = None,
    frozen: Patterns | None = None,
    wrt_inputs: Sequence[str] = (),
    stop: Patterns | None = None,
    free: Free | None = None,
    optimizer: Optimizer | str | None = None,
    kernels: str = DEFAULT_KERNELS,
    inline: bool = False,
    prediction: str | None = None,
    training_mode: bool = False,
    frozen_statistics: bool = True,
    gradient_norms: bool = False,
    carry_state: bool = False,
    straight_through: bool = False,
    strict: bool = False,
    checkpoint: int = 0,
    tie: Ties = (),
    untie: bool = False,
    precision: str | None = None,
    memory: int | str | None = None,
    lengths: Mapping[str, int] | None = None,
    progress: Progress = shown,
) -> TrainingGraph:
    """(loss, d loss / d parameters) as one graph, `<p>_grad` = ∂loss/∂p, or with an optimizer (loss, p after a step).

        graph = ob.training_graph("model.onnx", loss="mse", optimizer="adamw")
        trainer = ob.Trainer(graph)  # or graph.save("training.onnx"), for any onnxruntime

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed.
        loss: None for a model whose output is its loss already; or a name or object of `losses`: with y the
            prediction and t the target,
            "mse": mean((y - t)²);
            "l1": mean(|y - t|), derivative 0 where y = t;
            "huber": mean of d²/2 where |d| <= 1, else |d| - 1/2, d = y - t;
            "bce_with_logits": mean(max(y, 0) - y·t + log(1 + exp(-|y|)));
            "softmax_cross_entropy": mean of -log softmax(y)[label] over all positions, classes along axis 1;
            "bce" and "nll": the same of probabilities; "smooth_l1", "focal", "dice", "tversky", "kl_div",
            "cosine_embedding", "ctc"; a sum of losses, as 0.7 * losses.Dice("mask") + losses.MSE("depth"), or a dict of
            outputs and losses;
            or a callable `loss(op, outputs)` that emits nodes with op, a `LossBuilder` (`op.Sub(a, b)`,
            `op.input("t", like)`), from the model's outputs by name, and returns a value of one element.
        trainable: initializers to differentiate by: names, globs (`layer1.*`) or regular expressions (`re:…`).
            Default: every float initializer that influences the loss and is a parameter. What defines the function is
            none, unless its name is written out: exponents, eps, limits, masks, scales, statistics, tables of
            positions, single numbers in plain arithmetic. `TrainingGraph.left_out` says what was taken for what.
        frozen: initializers to leave out of that. No gradient is computed for them or for what lies before them alone.
        wrt_inputs: float inputs of the model to differentiate by as well: `<x>_grad` = ∂loss/∂x, of the shape and type
            of x, are outputs behind the model's own, see `TrainingGraph.input_gradients`. Clipping, accumulation and
            the scale of the loss do not change them. Without an optimizer the model may then have no parameters.
        stop: values inside the graph that no gradient passes, as `backward` takes them.
        free: fixed lengths of inputs that become symbols, as {"x": {0: "batch"}}, see `backward`.
        optimizer: None, or a name or object of `optimizers`: "sgd", "adam", "adamw", "rmsprop", "adagrad", "lion".
        kernels: how the operators of our domain run, see `use_kernels`.
        inline: write them, and the update, into the graph itself, for runtimes before onnxruntime 1.27, see `backward`.
        prediction: the output that the loss reads, or a value inside the model, as the logits before a softmax.
            Default: the only float output.
        training_mode: put Dropout and BatchNormalization into training mode. False leaves them as the model has them:
            an inference model is then fine-tuned with its running statistics as constants.
        frozen_statistics: put a BatchNormalization into inference mode, whatever `training_mode` is, where `frozen` or
            `trainable` leaves its scale and its bias as they are, as frozen ones are in fine-tuning: its running
            statistics stay. One without scale and bias is chosen by the names of its statistics. False: freezing
            parameters changes no mode.
        gradient_norms: with an optimizer, a further output `gradient_norms`, ‖`<p>_grad`‖₂ of every parameter before
            clipping, float32 in the order of `parameters`.
        carry_state: without an optimizer too, renew running statistics and random numbers, see `TrainingGraph.updates`.
        straight_through: differentiate QuantizeLinear as if it did not round, see `backward`.
        strict: refuse a name in `trainable` that the loss does not depend on, see `backward`.
        checkpoint: store the states of a Loop or a Scan at every so many steps only, see `backward`.
        tie: pairs of initializers that hold the same numbers, one perhaps transposed, and are to stay equal: the first
            takes the second's place.
        untie: give every place that reads a tensor of equal numbers one of its own. Exporters merge biases that are
            still zero; without it such a tensor is trained as one, and a warning tells so.
        precision: "bf16" or "fp16": matrix products and convolutions of operands rounded to that type, what the
            backward pass reads stored in it, everything else and all weights in float32, see `precision`. With "fp16"
            the loss is scaled, see `loss_scale`: the optimizer leaves steps out whose gradients are not finite; without
            one the scale is the input `loss_scale`, 2¹⁵ by default, and the gradients are divided by it.
        memory: the most that activations may take at once, in bytes, as "512MB" or "2GiB", or as a share of what they
            take without a budget, "50%": what backward reads of the forward part is then computed again where that
            costs least, in plain ONNX, and gradients keep their bits. Activations are all that forward and backward
            compute but the gradients of the parameters. What is expected is `settings["memory"]`.
        lengths: of the symbolic dimensions of the inputs, {"batch": 8}, which `memory` counts with; other lengths run.
        progress: wraps the list of nodes while they are walked. Default: a progress bar where a person is watching, on
            a terminal or in a notebook; `iter` for none.

    Shapes: the target input is `target`, of the prediction's shape and type, or for softmax_cross_entropy `labels`,
    int64, of the prediction's shape (N, C, d1, …) less its axis 1. When the model already uses that name, a number
    is put behind it; the result's `target` holds the name. Symbolic dimensions stay symbolic, and feeding a target
    of another shape than the prediction's, or a label outside 0 … C - 1, fails the run.

    The loss is a 0-D tensor of the prediction's type, but float32 for float16 and bfloat16, which are widened before
    it; gradients have their parameter's type. With loss=None the output that is the loss moves to the front.

    With an optimizer: inputs `learning_rate` (0-D, float64 if a parameter is, else float32), the parameters and the
    state; outputs `<x>_new` for each of them, see `TrainingGraph.updates`. The numbers of the optimizer are inputs
    `optimizer.<number>` with defaults. A number that is 0 leaves no trace.

    Raises: InvalidArgumentError (unknown names with near misses, a name both trainable and frozen, a loss of more
    than one element, several outputs to choose from), and what `backward` raises.
    """
    check_kernels(kernels)
    check_inline(kernels, inline=inline)
    chosen = check_loss(loss, LOSSES)
    updater = check_optimizer(optimizer)
    budget = None if memory is None else check_memory(memory)
    original, ir_model = prepared(model, stop=stop, free=free, prediction=None if prediction is None else [prediction])
    outputs = tuple(str(value.name) for value in ir_model.graph.outputs)
    share(ir_model.graph, tie)
    if untie:
        separate(ir_model.graph)
    if training_mode and not train(ir_model.graph):
        warnings.warn(nothing_to_switch(ir_model), OnnxBackpropWarning, stacklevel=2)
    asked = _inputs_in(ir_model.graph, trainable, trained=updater is not None)
    if wrt_inputs:
        check_names("wrt_inputs", wrt_inputs)
    wrt_inputs = [*wrt_inputs, *(name for name in asked if name not in wrt_inputs)]
    _check_names(ir_model.graph, None if asked else trainable, frozen)
    inputs = [str(value.name) for value in ir_model.graph.inputs if not value.is_initializer()]
    half = check_precision(precision, ir_model.graph)
    made = used_names(ir_model.graph)
    ir_model, loss_name, targets, labels = add_loss(ir_model, chosen, prediction)
    graph = ir_model.graph
    of_loss = used_names(graph) - made
    others = [] if updater is None else [p for group in updater.groups if group.frozen for p in group.parameters]
    choice = _choose(graph, loss_name, () if asked else trainable, [*(frozen or ()), *others], stopped=bool(stop))
    held = _held(graph, None if asked else trainable, [*(frozen or ()), *others]) if frozen_statistics else set()
    kept = keep_statistics(graph, choice.frozen, choice.left_out, held)
    op = LossBuilder(used_names(graph))
    stateful = carry_state or updater is not None
    state = renew_statistics(graph, op) if stateful else {}
    masks = draw_masks(graph, op) if stateful else None
    graph.inputs.extend(x for x in state if not x.is_graph_input())
    if masks is not None:
        graph.inputs.append(masks)
    ir_model = typed(ir_model)
    graph = ir_model.graph
    end = len(graph.outputs)
    together = shared(graph.initializers.values())
    renewed = [value.name for value in state]
    forward = set(graph)
    differentiate = partial(
        Differentiation,
        ir_model,
        wrt=choice.wanted,
        inputs=wrt_inputs,
        inputs_alone=updater is None,
        without=choice.without,
        argument="trainable",
        straight_through=straight_through,
        strict=strict,
        checkpoint=checkpoint,
        progress=progress,
    )
    scale, parameters = emit_gradients(graph, differentiate, loss_name, of_loss, half, budget=budget is not None)
    input_gradients = {name: parameters.pop(name) for name in wrt_inputs}
    if scale is not None and updater is None:
        with_default(graph, scale)
    together = {name: readers for name, readers in together.items() if name in {*parameters, *map(str, renewed)}}
    if together:
        warnings.warn(told_shared(together), OnnxBackpropWarning, stacklevel=2)
    backward = set(graph) - forward
    produced = {str(v.name): v for node in graph for v in node.outputs}
    gradients = [produced[name] for name in (*input_gradients.values(), *parameters.values())]
    known: dict[str, Any] = {}
    if stateful:
        named = {str(old.name): str(new.name) for old, new in state.items()}
        end += len(input_gradients)
        known = _add_update(ir_model, updater, parameters, end, named, masks, scale, norms=gradient_norms)
    expected = None
    if budget is not None:
        expected = fit_memory(ir_model, forward, backward, gradients, budget, lengths or {})
    stage_sums(graph, made, of_loss)
    proto = finish(ir_model, original, kernels, inline=inline)
    result = TrainingGraph(
        model=proto,
        loss=loss_name,
        inputs=(*inputs, *targets),
        target=targets[0] if targets else None,
        parameters=parameters,
        input_gradients=input_gradients,
        outputs=outputs,
        frozen=tuple(name for name in choice.frozen if name not in parameters),
        left_out=choice.left_out,
        settings={
            "loss": _settings(chosen),
            "optimizer": _settings(updater),
            "loss_inputs": targets,
            **({"labels": labels} if labels else {}),
            "training_mode": training_mode,
            "precision": precision,
            **({"doubtful": choice.doubtful} if choice.doubtful else {}),
            **({} if expected is None else {"memory": expected}),
            **({"frozen_statistics": kept} if kept else {}),
        },
        **known,
    )
    result.describe()
    return result


def _check_names(graph: ir.Graph, trainable: Patterns | None, frozen: Patterns | None) -> None:
    """Names that are written out exist, are not repeated and are not in both lists."""
    names = aliases(graph.initializers.values())
    plain: list[set[str]] = []
    for argument, patterns in (("trainable", trainable), ("frozen", frozen)):
        if patterns is not None and (patterns or argument == "trainable"):
            select(argument, patterns, names)
        plain.append(written_out(patterns or (), names))
    if both := sorted(plain[0] & plain[1]):
        raise InvalidArgumentError(f"trainable, frozen: {', '.join(map(repr, both))} in both lists. Leave it in one")


def _inputs_in(graph: ir.Graph, trainable: Patterns | None, *, trained: bool) -> list[str]:
    """The inputs of the model that `trainable` names where it names nothing else: the caller wants their gradients."""
    inputs = {str(value.name) for value in graph.inputs if not value.is_initializer()}
    listed = () if trainable is None or isinstance(trainable, str) else trainable
    named = [name for name in listed if isinstance(name, str) and name in inputs]
    if named and (trained or len(named) < len(listed)):
        raise InvalidArgumentError(
            f"{named[0]!r} is an input of the model, which no step renews. wrt_inputs=[{named[0]!r}] gives "
            "the gradient by it",
            "trainable",
        )
    return named


class _Choice(NamedTuple):
    """What to differentiate by, None for the default; what that leaves out; and what is not trained, and why."""

    wanted: list[str] | None
    without: dict[str, str]
    frozen: list[str]  # parameters all the same
    left_out: dict[str, str]  # no parameters, and what each is
    doubtful: dict[str, str]  # of which the file does not say enough, and what speaks for a doubt


def _choose(
    graph: ir.Graph, loss: str, trainable: Patterns | None, frozen: Patterns, *, stopped: bool = False
) -> _Choice:
    """The choice, with its warnings. stopped: whether the caller keeps gradients from a part of the graph."""
    floats = [v for v in graph.initializers.values() if is_float(v)]
    path = find_path(graph, [value for value in graph.outputs if value.name == loss], floats)
    found = choose(graph, [v for v in floats if v in path.active])
    left_out = {str(v.name): what for v, what in found.left_out.items()}
    doubtful = {str(v.name): why for v, why in found.doubtful.items()}
    reached = [str(v.name) for v in floats if v in path.active and v.name not in left_out]
    names = aliases(graph.initializers.values())
    frozen_names = select("frozen", frozen, names) if frozen else []
    without = dict.fromkeys(frozen_names, "frozen") | left_out
    if not trainable:  # the default, or none at all
        if trainable is not None:
            without |= dict.fromkeys(reached, "not asked for")
            return _Choice(None, without, reached, left_out, {})
        trained = [v for v in floats if v.name in reached and v.name not in frozen_names]
        warn_of(graph, found, trained, frozen=frozen_names, share=not stopped, stacklevel=3)
        doubtful = {name: why for name, why in doubtful.items() if name not in frozen_names}
        return _Choice(None, without, [name for name in reached if name in frozen_names], left_out, doubtful)
    chosen = select("trainable", trainable, {name: names[name] for name in reached}, exact=names)
    written = written_out(trainable, names)
    chosen = [name for name in chosen if name in written or name not in frozen_names]
    for name in chosen:
        if left_out.get(name) in NEVER_TRAINED:
            raise InvalidArgumentError(f"{name!r} is a {left_out[name]}. Leave it out of trainable", "trainable")
    if not chosen:
        raise InvalidArgumentError("frozen leaves nothing of what it chooses", "trainable")
    left_out = {name: what for name, what in left_out.items() if name not in chosen}
    return _Choice(chosen, without, [name for name in reached if name not in chosen], left_out, {})


def _held(graph: ir.Graph, trainable: Patterns | None, frozen: Patterns) -> set[str]:
    """The initializers that a caller wants left as they are: those that are frozen, and those not chosen."""
    names = aliases(graph.initializers.values())
    held = set(select("frozen", frozen, names)) if frozen else set[str]()
    return held | (set(names) - set(select("trainable", trainable, names)) if trainable else set())


def _add_update(
    ir_model: ir.Model,
    optimizer: Optimizer | None,
    parameters: dict[str, str],
    end: int,
    statistics: dict[str, str],
    masks: ir.Value | None,
    scale: ir.Value | None,
    *,
    norms: bool,
) -> dict[str, Any]:
    """Put the update in the place of the gradients among the outputs; what `TrainingGraph` says about it.

    Without an optimizer the gradients stay, and the new statistics and random numbers come behind them.
    """
    graph = ir_model.graph
    values = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    produced = {str(v.name): v for node in graph for v in node.outputs}
    gradients = {values[name]: produced[g] for name, g in parameters.items()}
    op = Builder(used_names(graph))
    writer = None if optimizer is None else StepWriter(op, graph, optimizer, ir_model.opset_imports[""])
    state = State() if writer is None else writer.state
    if scale is not None and writer is not None:
        writer.finite = renewed_scale(op, state, values[str(scale.name)], list(gradients.values()))
    if writer is not None:
        writer.write(gradients)
        del graph.outputs[end:]
    for name, new in statistics.items():
        state.new[values[name]] = produced[new]
    if masks is not None:
        state.new[values[str(masks.name)]] = op.Add(values[str(masks.name)], [0, 1])
        state.fill[str(masks.name)] = 0
    known: dict[str, Any] = {"fill": state.fill, "copies": state.copies}
    known["updates"] = write_outputs(op, graph, state, [] if writer is None else [writer.rate])
    if writer is not None:
        known["learning_rate"] = str(writer.rate.name)
        if norms:
            measured = writer.norms(gradients)
            measured.name = op.unique("gradient_norms")
            measured.shape = ir.Shape([len(parameters)])
            graph.outputs.append(measured)
            known["gradient_norms"] = str(measured.name)
        writer.attach(ir_model)
    graph.extend(op.nodes)
    return known


def _settings(chosen: object) -> Any:
    """What was asked for as something JSON can hold."""
    if is_dataclass(chosen):
        named = {f.name: _settings(getattr(chosen, f.name)) for f in fields(chosen)}
        return {"name": getattr(chosen, "name", type(chosen).__name__), **named}
    if chosen is None or isinstance(chosen, str | bool | int | float):
        return chosen
    if isinstance(chosen, np.generic):
        return chosen.item()
    if isinstance(chosen, np.ndarray):
        return chosen.tolist()
    if isinstance(chosen, Sequence):
        return [_settings(entry) for entry in chosen]
    return getattr(chosen, "__name__", None) or str(chosen)
