"""`training_graph`: a forward model in, one graph that computes its loss, its gradients and the update out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.prepare.decoder import CacheEditor
from onnx_backprop.converters.prepare.load import Free
from onnx_backprop.converters.prepare.selection import Patterns
from onnx_backprop.converters.recompute.memory import check_memory
from onnx_backprop.converters.reverse.differentiate import PerSample, Progress
from onnx_backprop.converters.reverse.models.backward import DEFAULT_KERNELS
from onnx_backprop.converters.training.losses import LOSSES
from onnx_backprop.converters.training.losses.compose import AnyLoss, check_loss
from onnx_backprop.converters.training.optimizers import Optimizer, check_optimizer
from onnx_backprop.converters.training.phases import TrainingDraft
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.rewrites.precision import check_precision
from onnx_backprop.converters.training.settings import Settings, plain
from onnx_backprop.converters.training.sharing import Ties
from onnx_backprop.converters.training.update.private import check_privacy
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import explaining
from onnx_backprop.opset.core.progress import shown


@explaining("As training_graph(model, loss='mse', optimizer='adamw')")
def training_graph(
    model: ModelProto | ir.Model | str | Path,
    *,
    loss: AnyLoss = None,
    trainable: Patterns | None = None,
    frozen: Patterns | None = None,
    wrt_inputs: Sequence[str] = (),
    stop: Patterns | None = None,
    free: Free | None = None,
    given: Patterns = (),
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
    per_sample: PerSample = False,
    per_sample_clip: float | None = None,
    noise: float = 0.0,
    expected_batch: int | None = None,
    tie: Ties = (),
    untie: bool = False,
    precision: str | None = None,
    memory: int | str | None = None,
    lengths: Mapping[str, int] | None = None,
    progress: Progress = shown,
) -> TrainingGraph:
    """(loss, d loss / d parameters) as one graph, `<p>_grad` = ∂loss/∂p; with an optimizer (loss, p after a step).

        graph = ob.training_graph("model.onnx", loss="mse", optimizer="adamw")
        trainer = ob.Trainer(graph)  # or graph.save("training.onnx"), for any onnxruntime

    Args:
        model: a ModelProto, an onnx_ir.Model or the path of a file; it is not changed.
        loss: None if the model's output is its loss already; else a name or object of `losses`. With the prediction y
            and the target t:
            "mse": mean((y - t)²);
            "l1": mean(|y - t|), derivative 0 where y = t;
            "huber": mean of d²/2 where |d| <= 1, else |d| - 1/2, d = y - t;
            "bce_with_logits": mean(max(y, 0) - y·t + log(1 + exp(-|y|)));
            "softmax_cross_entropy": mean of -log softmax(y)[label] over all positions; "next_token": the same for the
            label behind each token, see `losses.NextToken`;
            "bce" and "nll": the same for probabilities; "smooth_l1", "focal", "dice", "tversky", "kl_div",
            "cosine_embedding", "ctc"; a sum of losses, as 0.7 * losses.Dice("mask") + losses.MSE("depth"), or a dict of
            outputs and losses;
            or a callable `loss(op, outputs)`, which gets the model's outputs by name, emits nodes with op, a
            `LossBuilder` (`op.Sub(a, b)`, `op.input("t", like)`), and returns a value of one element.
        trainable: initializers to train: names, globs (`layer1.*`) or regular expressions (`re:…`). Default: every
            float initializer that influences the loss and is a parameter. Exponents, eps, limits, masks, scales,
            statistics, tables of positions and single numbers in plain arithmetic define the function; they are
            parameters only if named exactly. `TrainingGraph.left_out` lists them with the reason.
        frozen: initializers not to train. No gradient is computed that only they need.
        wrt_inputs: float inputs of the model with a gradient too: extra outputs `<x>_grad` = ∂loss/∂x, of the shape and
            type of x, see `TrainingGraph.input_gradients`. Clipping, accumulation and the scale of the loss do not
            change them. Without an optimizer the model may then have no parameters.
        stop: values inside the graph that no gradient passes, as `backward` takes them.
        free: fixed lengths of inputs that become symbols, as {"x": {0: "batch"}}, see `backward`.
        given: inputs of a decoder that each batch has, names or globs, as ["past_key_values.*"]. By default its pasts
            are empty, its presents are left out, and the graph derives masks, positions and lengths from the tokens
            unless a batch has them, see `TrainingGraph.optional`. If one past is given, all pasts become inputs.
        optimizer: None, or a name or object of `optimizers`: "sgd", "adam", "adamw", "rmsprop", "adagrad", "lion".
        kernels: how the operators of our domain run, see `use_kernels`.
        inline: write them, and the update, into the graph itself, for runtimes before onnxruntime 1.27, see `backward`.
        prediction: the output that the loss reads, or a value inside the model, such as the logits before a softmax.
            Default: the only float output.
        training_mode: put Dropout and BatchNormalization into training mode. False leaves them as the model has them:
            an inference model is then fine-tuned with constant running statistics.
        frozen_statistics: whatever `training_mode` is, put a BatchNormalization into inference mode if `frozen` or
            `trainable` leaves its scale and bias untrained, as usual in fine-tuning: its running statistics stay. One
            without scale and bias is chosen by the names of its statistics. False: freezing changes no mode.
        gradient_norms: with an optimizer, an extra output `gradient_norms`: ‖`<p>_grad`‖₂ of every parameter before
            clipping, float32, in the order of `parameters`.
        carry_state: update running statistics and random numbers without an optimizer too, see `TrainingGraph.updates`.
        straight_through: differentiate QuantizeLinear as if it did not round, see `backward`.
        strict: refuse a name in `trainable` that the loss does not depend on, see `backward`.
        checkpoint: store the states of a Loop or Scan only at every so many steps, see `backward`.
        per_sample: without an optimizer, the loss and the gradients of each row of a batch alone, see `backward`: the
            loss is (N,), each for a batch of that row, and `<p>_grad` has the rows in front.
        per_sample_clip: C, with an optimizer: the update is along (Σ_i g_i · min(1, C / ‖g_i‖₂) + N(0, σ²C²)) / B, g_i
            being the gradient of row i with respect to all parameters, for differential privacy (DP-SGD).
            `per_sample` then names the inputs with rows, if True would not find them. `clip_norm`, `clip_value` and
            `gradient_norms` apply after the noise, and `accumulate` adds one noise per update.
        noise: σ. Its numbers are a function of `random_state`, as Dropout's masks are, and new in every run.
        expected_batch: B, the expected number of rows of a run. Default: the rows of the batch. Poisson sampling,
            accumulation and several ranks need it.
        tie: pairs of initializers with the same numbers, one perhaps transposed, that stay equal: the first replaces
            the second.
        untie: give every reader of a tensor of equal numbers its own copy. Exporters merge biases that are still zero;
            by default such a tensor is trained as one, with a warning.
        precision: "bf16" or "fp16": matrix products and convolutions of operands rounded to that type, what the
            backward pass reads stored in it, everything else and all weights in float32. With "fp16" the loss is scaled
            and the optimizer skips steps whose gradients are not finite; without an optimizer the scale is the input
            `loss_scale`, 2¹⁵ by default, and the gradients are divided by it.
        memory: the most that activations may take at once: bytes, "512MB" or "2GiB", or "50%" of what they take without
            a budget. Forward values that the backward pass reads are then computed again, where that costs least, in
            plain ONNX; gradients keep their bits. Activations are all values of forward and backward except the
            gradients of the parameters. `settings["memory"]` has the expected amount.
        lengths: of the symbolic dimensions of the inputs, {"batch": 8}, for `memory`; other lengths run too.
        progress: wraps the list of nodes while they are walked. Default: a progress bar if a person is watching, on a
            terminal or in a notebook; `iter` for none.

    Shapes: the target input is `target`, of the prediction's shape and type, or for softmax_cross_entropy `labels`,
    int64, of the prediction's shape (N, C, d1, …) without axis 1. If the model already uses that name, a number follows
    it; the result's `target` holds the name. Symbolic dimensions stay symbolic. A target of another shape than the
    prediction's, or a label outside 0 … C - 1, fails the run.

    The loss is a 0-D tensor of the prediction's type, but float32 for float16 and bfloat16, which are widened before
    it; gradients have their parameter's type. With loss=None the output that is the loss moves to the front.

    With an optimizer, the inputs are `learning_rate` (0-D, float64 if a parameter is, else float32), the parameters and
    the state; the outputs are `<x>_new` for each of them, see `TrainingGraph.updates`. The optimizer's hyperparameters
    are inputs `optimizer.<name>` with defaults; one that is 0 adds nothing to the graph.

    Raises: InvalidArgumentError (unknown names with near misses, a name both trainable and frozen, a loss of more than
    one element, several outputs to choose from), and what `backward` raises.
    """
    chosen = check_loss(loss, LOSSES)
    if lengths is not None and not isinstance(lengths, Mapping):
        raise InvalidArgumentError(f"lengths: expected numbers by names, as {{'batch': 8}}, got {lengths!r}")
    updater = check_optimizer(optimizer)
    budget = None if memory is None else check_memory(memory)
    privacy = check_privacy(per_sample_clip, noise, expected_batch, updater)
    alone: dict[str, Any] = {"memory": memory, "precision": precision}
    if privacy is None:
        alone |= {"an optimizer without per_sample_clip": optimizer, "carry_state": carry_state}
    else:
        alone, per_sample = alone | {"wrt_inputs": wrt_inputs}, per_sample or True
    if per_sample is not False and any(alone.values()):
        others = " and ".join(name for name, value in alone.items() if value)
        asked = "per_sample" if privacy is None else "per_sample_clip"
        raise InvalidArgumentError(f"the gradients of each row do not go with {others}. Leave one out", asked)
    draft = TrainingDraft(
        model,
        updater,
        prediction,
        CacheEditor(given, wrt_inputs),
        stop=stop,
        free=free,
        kernels=kernels,
        inline=inline,
        straight_through=straight_through,
        strict=strict,
        checkpoint=checkpoint,
        progress=progress,
    )
    draft.privacy = privacy
    draft.tie(tie, apart=untie)
    if training_mode:
        draft.set_modes()
    requested = draft.requested(trainable, frozen, wrt_inputs)
    half = check_precision(precision, draft.graph)
    draft.add_loss(chosen, prediction)
    choice = draft.choose(requested, stopped=bool(stop))
    kept = draft.keep_statistics(requested, choice) if frozen_statistics else []
    stateful = carry_state or updater is not None
    if stateful:
        draft.carry_state()
    draft.take_rows_of_loss(per_sample)
    draft.differentiate_loss(requested, choice, half, budget=budget is not None)
    draft.give_rows_back()
    if stateful:
        draft.update(norms=gradient_norms)
    expected = {} if budget is None else draft.keep_to_budget(budget, lengths or {})
    if per_sample is False or privacy is not None:
        draft.stage_sums()
    result = TrainingGraph(
        model=draft.finish(),
        loss=draft.loss,
        inputs=(*draft.inputs, *draft.targets),
        target=draft.targets[0] if draft.targets else None,
        parameters=draft.parameters,
        input_gradients=draft.input_gradients,
        outputs=draft.outputs,
        optional=draft.editor.cache.derived,
        learning_rate=draft.learning_rate,
        state=draft.state,
        gradient_norms=draft.gradient_norms,
        frozen=tuple(name for name in choice.frozen if name not in draft.parameters),
        left_out=choice.left_out,
        settings=Settings(
            loss=plain(chosen),
            optimizer=plain(updater),
            loss_inputs=draft.targets,
            labels=draft.labels,
            compared=draft.compared,
            blocks=draft.blocks,
            training_mode=training_mode,
            precision=precision,
            doubtful=choice.doubtful,
            memory=expected,
            frozen_statistics=kept,
            privacy={} if privacy is None else vars(privacy),
        ).described(),
    )
    if not (tie or untie):
        draft.keep_decoder(result.model)
    result.describe()
    return result
