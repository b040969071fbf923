"""The phases of `training_graph`, in their order: each one function over one `TrainingDraft`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.parameters.choice import choose
from onnx_backprop.converters.parameters.report import partly_frozen, warn_of
from onnx_backprop.converters.parameters.structure import NEVER_TRAINED
from onnx_backprop.converters.prepare.decoder import CacheEditor
from onnx_backprop.converters.prepare.load import check_names
from onnx_backprop.converters.prepare.selection import Patterns, aliases, select, written_out
from onnx_backprop.converters.recompute.memory import fit_memory
from onnx_backprop.converters.recompute.order import weights_early
from onnx_backprop.converters.recompute.waiting import Backward, dropped_again, shapes_first
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.differentiate import PerSample
from onnx_backprop.converters.reverse.known import dims, is_float
from onnx_backprop.converters.reverse.models.backward import Draft
from onnx_backprop.converters.reverse.models.derivatives import Derivative
from onnx_backprop.converters.reverse.models.named import values_by_name
from onnx_backprop.converters.reverse.path import find_path
from onnx_backprop.converters.training.losses.add_loss import add_loss, typed
from onnx_backprop.converters.training.losses.base import Loss, LossFunction
from onnx_backprop.converters.training.losses.compose import LossSum
from onnx_backprop.converters.training.modes import (
    draw_masks,
    keep_statistics,
    nothing_to_switch,
    random_state,
    renew_statistics,
    train,
)
from onnx_backprop.converters.training.optimizers import Optimizer
from onnx_backprop.converters.training.rewrites.precision import Rounding
from onnx_backprop.converters.training.rewrites.sums import stage_sums
from onnx_backprop.converters.training.sharing import describe_shared, shared, tie, untie
from onnx_backprop.converters.training.slots import RANDOM, STATISTIC, Slot
from onnx_backprop.converters.training.stops.biases import stop_second_biases, warn_of_second_biases
from onnx_backprop.converters.training.stops.estimators import stop_estimators, warn_of_estimators
from onnx_backprop.converters.training.stops.padding import stop_padding, warn_of_padding
from onnx_backprop.converters.training.update.loss_scale import renewed_scale, scaled_loss, unscale, with_default
from onnx_backprop.converters.training.update.private import Privacy, RowSums, add_noise, check_rows, seeds_of_rows
from onnx_backprop.converters.training.update.step import StepState, StepWriter, write_outputs
from onnx_backprop.converters.training.whole_decoder import store_decoder
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError, warn
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.names import used_names


@dataclass(frozen=True)
class Requested:
    """What to differentiate by, as it was asked for: inputs, and patterns of parameters.

    trainable: None for the default; () for no parameter. frozen: those of the optimizer's groups included.
    """

    inputs: list[str]
    trainable: Patterns | None
    frozen: list[Any]


@dataclass(frozen=True)
class TrainableChoice:
    """What to differentiate by, None for the default; what that leaves out; and what is not trained, and why."""

    wanted: list[str] | None
    without: dict[str, str]
    frozen: list[str]  # parameters all the same
    left_out: dict[str, str]  # no parameters, and what each is
    doubtful: dict[str, str] = field(default_factory=dict)  # what speaks for a doubt, where the file does not say


class TrainingDraft(Draft):
    """A training graph while phases add to it.

    came: the model as it is given. editor: what becomes of the cache of a decoder.
    loss, targets, labels, compared, blocks, counted: what `add_loss` has emitted. scale: the input that the loss is
    multiplied by. masks: the state of random numbers. statistics: each running statistic and its new value.
    input_gradients, parameters: each variable and its gradient. learning_rate, gradient_norms: as of a `TrainingGraph`.
    state: what a step renews.
    """

    def __init__(
        self, model: Any, optimizer: Optimizer | None, prediction: str | None, editor: CacheEditor, **options: Any
    ) -> None:
        self.came, self.editor = load(model, mapped=True), editor
        names: dict[str, Patterns | None] = {"prediction": None if prediction is None else [prediction]}
        super().__init__(self.came, names=names, edit=editor, **options)
        if editor.cache:
            warn(str(editor.cache))
        self.optimizer = optimizer
        self.outputs = tuple(str(value.name) for value in self.graph.outputs)
        self.inputs = [str(value.name) for value in self.graph.inputs if not value.is_initializer()]
        self.loss = ""
        self.targets: list[str] = []
        self.labels: dict[str, Any] = {}
        self.compared: list[dict[str, Any]] = []
        self.blocks: dict[str, int] = {}
        self.counted: str | None = None
        self.scale: str | None = None
        self.masks: str | None = None
        self.statistics: dict[str, str] = {}
        self.input_gradients: dict[str, str] = {}
        self.parameters: dict[str, str] = {}
        self.state: tuple[Slot, ...] = ()
        self.learning_rate: str | None = None
        self.gradient_norms: str | None = None
        self.privacy: Privacy | None = None
        self._row_sums: RowSums | None = None
        self._leaves_out = False
        self._of_model: set[str] = set()  # names of the model without its loss
        self._of_loss: set[str] = set()
        self._shared: dict[str, list[str]] = {}
        self._forward: set[ir.Node] = set()
        self._backward: set[ir.Node] = set()

    def builder(self) -> Builder:
        """A builder whose names are new to the graph."""
        return Builder(used_names(self.graph))

    def tie(self, pairs: Sequence[tuple[str, str]], *, apart: bool) -> None:
        """Make one of tensors that are to stay equal; apart: and several of those that an exporter merged."""
        tie(self.graph, pairs)
        if apart:
            untie(self.graph)

    def set_modes(self) -> None:
        """Put Dropout and BatchNormalization into training mode."""
        if not train(self.graph):
            warn(nothing_to_switch(self.model))

    def requested(self, trainable: Patterns | None, frozen: Patterns | None, wrt_inputs: Sequence[str]) -> Requested:
        """What the caller has named to differentiate by, once the names are those of the model."""
        named = _inputs_in(self.graph, trainable, trained=self.optimizer is not None)
        if wrt_inputs:
            check_names("wrt_inputs", wrt_inputs)
        _check_names(self.graph, None if named else trainable, frozen)
        groups = () if self.optimizer is None else self.optimizer.groups
        others = [p for group in groups if group.frozen for p in group.parameters]
        inputs = [*wrt_inputs, *(name for name in named if name not in wrt_inputs)]
        return Requested(inputs, () if named else trainable, [*(frozen or ()), *others])

    def add_loss(self, loss: Loss | LossSum | LossFunction | None, prediction: str | None) -> None:
        """Emit the loss, which becomes the first output, with its targets as inputs."""
        self._of_model = used_names(self.graph)
        self._shared = shared(self.graph)  # blocks of rows read what the head does once more
        self.model, self.loss, added = add_loss(self.model, loss, prediction)
        self.targets, self.labels, self.blocks = [str(v.name) for v in added.inputs], added.labels, added.blocks
        self.compared = added.compared
        self.counted = None if added.counted is None else str(added.counted.name)
        self._of_loss = used_names(self.graph) - self._of_model
        terms = (loss, *(term for _, term in getattr(loss, "terms", ())))
        numbers = [getattr(term, name, None) for term in terms for name in ("ignore_index", "weight", "weights")]
        self._leaves_out = any(number is not None for number in numbers)  # so that all labels of a row may count 0
        if self.privacy is not None and self._leaves_out and len(terms) > 2:
            raise UnsupportedError(
                "per_sample_clip: of a sum of losses, one leaves labels out or weighs them, so that it may be a mean "
                "of nothing for a row whose other losses count. Give one loss, or none ignore_index and weights"
            )

    def choose(self, requested: Requested, *, stopped: bool) -> TrainableChoice:
        """What to differentiate by, with warnings about what the file does not say.

        stopped: whether the caller keeps gradients from a part of the graph.
        """
        graph, trainable = self.graph, requested.trainable
        floats = [v for v in graph.initializers.values() if is_float(v)]
        loss = next(value for value in graph.outputs if value.name == self.loss)
        warn_of_estimators(stop_estimators(graph))
        path = find_path(graph, [loss], floats)
        choice = choose(graph, [v for v in floats if v in path.active], loss)
        padding = stop_padding(graph)
        biases = stop_second_biases(graph)
        left_out = {str(v.name): what for v, what in choice.left_out.items()}
        reached = [str(v.name) for v in floats if v in path.active and v.name not in left_out]
        names = aliases(graph.initializers.values())
        frozen = select("frozen", requested.frozen, names) if requested.frozen else []
        without = dict.fromkeys(frozen, "frozen") | left_out
        if trainable is None:
            trained = [v for v in floats if v.name in reached and v.name not in frozen]
            warn_of(graph, choice, trained, frozen=frozen, share=not stopped)
            if sentence := partly_frozen(graph, frozen, requested.frozen or ()):
                warn(sentence)
            warn_of_padding(padding, [str(value.name) for value in trained])
            warn_of_second_biases(biases, [str(value.name) for value in trained])
            doubtful = {str(v.name): why for v, why in choice.doubtful.items() if v.name not in frozen}
            return TrainableChoice(None, without, [name for name in reached if name in frozen], left_out, doubtful)
        if not trainable:
            return TrainableChoice(None, without | dict.fromkeys(reached, "not asked for"), reached, left_out)
        chosen = select("trainable", trainable, {name: names[name] for name in reached}, exact=names)
        written = written_out(trainable, names)
        chosen = [name for name in chosen if name in written or name not in frozen]
        for name in chosen:
            if left_out.get(name) in NEVER_TRAINED:
                what = left_out[name]
                raise InvalidArgumentError(f"{name!r} is a {what}. Leave it out of trainable", argument="trainable")
        if not chosen:
            raise InvalidArgumentError("frozen leaves nothing of what it chooses", argument="trainable")
        warn_of_padding(padding, chosen)
        warn_of_second_biases(biases, chosen)
        left_out = {name: what for name, what in left_out.items() if name not in chosen}
        return TrainableChoice(chosen, without, [name for name in reached if name not in chosen], left_out)

    def keep_statistics(self, requested: Requested, choice: TrainableChoice) -> list[str]:
        """Put each BatchNormalization that the caller freezes into inference mode; the labels of those nodes."""
        names = aliases(self.graph.initializers.values())
        held = set(select("frozen", requested.frozen, names)) if requested.frozen else set[str]()
        if requested.trainable:
            held |= set(names) - set(select("trainable", requested.trainable, names))
        return keep_statistics(self.graph, choice.frozen, choice.left_out, held)

    def carry_state(self) -> None:
        """Let a step renew running statistics and random numbers, which become inputs."""
        op = self.builder()
        statistics = renew_statistics(self.graph, op)
        masks = draw_masks(self.graph, op)
        self.statistics = {str(old.name): str(new.name) for old, new in statistics.items()}
        self.graph.inputs.extend(x for x in statistics if not x.is_graph_input())
        if masks is None and self.privacy is not None and self.privacy.noise:
            masks = random_state(op)
        if masks is not None:
            self.graph.inputs.append(masks)
            self.masks = str(masks.name)

    def take_rows_of_loss(self, per_sample: PerSample) -> None:
        """`take_one_row`, of the targets too."""
        if self.privacy is not None:
            check_rows(self.graph)
            self._row_sums = RowSums(self.privacy, self.model)
        self.take_one_row(per_sample)
        for value in self.graph.inputs if per_sample is not False else ():
            shape = dims(value)
            if value.name in self.targets and (shape is None or (shape and not isinstance(shape[0], int))):
                raise InvalidArgumentError(
                    f"the rows of {value.name!r}, of the shape {list(shape or ['unknown'])}, are not known to be those "
                    f"of the other inputs. Name it too, as per_sample=['x', {value.name!r}]",
                    "per_sample",
                )

    def differentiate_loss(
        self, requested: Requested, choice: TrainableChoice, half: ir.DataType | None, *, budget: bool
    ) -> None:
        """Emit the gradients, in mixed precision where `half` is given, and put what waits for them in order.

        With float16 it is the loss times a scale that is differentiated. What the loss has added to the model stays
        float32, and so does what it reads. budget: whether `keep_to_budget` follows, which takes shapes early itself.
        """
        self.model = typed(self.model)
        graph = self.graph
        self._forward = set(graph)
        scale, target = None, next(y for y in graph.outputs if y.name == self.loss)
        if half == ir.DataType.FLOAT16:
            scale, target = scaled_loss(graph, self.builder(), target)
        forward = list(graph)
        stage, self.parameters = self.differentiate(
            of=[target.name],
            wrt=choice.wanted,
            inputs=requested.inputs,
            inputs_alone=self.optimizer is None,
            without=choice.without,
            argument="trainable",
        )
        names = used_names(graph)
        dropped_again(graph, Builder(names), Backward(graph, forward, stage.gradients.values()))
        if half is not None:
            Rounding(graph, Builder(names), forward, stage, self._of_loss, half).apply()
        if not budget:
            shapes_first(graph, Builder(names), forward)
        if scale is not None:
            graph.outputs.remove(target)
            unscale(graph, Builder(names), scale, self._gradients())
        for x, g in stage.gradients.items():
            if g.shape is None:
                g.shape = x.shape
        weights_early(graph, forward, self._gradients())
        if scale is not None:
            self.scale = str(scale.name)
            if self.optimizer is None:
                with_default(graph, scale)
        self._backward = set(graph) - self._forward
        self.input_gradients = {name: self.parameters.pop(name) for name in requested.inputs}
        trained = {*self.parameters, *self.statistics}
        if together := {name: readers for name, readers in self._shared.items() if name in trained}:
            warn(describe_shared(together))

    def give_rows_back(self) -> None:
        """`spread_rows`; for private steps the loss and the outputs stay the batch's, and gradients are clipped means.

        A row's random numbers are its own.
        """
        derivative = Derivative("vjp", {}, self.input_gradients | self.parameters)
        sums, masks = self._row_sums, self.masks
        if sums is None or self._one_row is None:
            return self.spread_rows(derivative)
        self.infer_types()
        sums.clip(self.graph, self.parameters, self.graph.outputs[0] if self._leaves_out else None)
        drawn = [] if masks is None or not values_by_name(self.graph)[masks].uses() else [masks]
        self.spread_rows(derivative, drawn)
        for name in drawn:
            seeds_of_rows(self.graph, name, self._one_row.first(self.graph))
        sums.add_up(self.graph, self.parameters)
        self.counted = None  # rows weigh alike
        return self.infer_types()

    def _gradients(self) -> list[ir.Value]:
        """The outputs that are gradients."""
        return [y for y in self.graph.outputs if y.name in self.parameters.values()]

    def update(self, *, norms: bool) -> None:
        """Put the update in the place of the gradients among the outputs, and what is renewed behind it.

        Without an optimizer the gradients stay. norms: the norms of the gradients as a further output.
        """
        graph, op, state, values = self.graph, self.builder(), StepState(), values_by_name(self.graph)
        gradients = {values[name]: values[g] for name, g in self.parameters.items()}
        clipped, writer = list(gradients.values()), None
        if self.optimizer is not None:
            if self.privacy is not None and self.privacy.noise and self.masks is not None:
                rows = None if self._row_sums is None or self._row_sums.rows is None else values[self._row_sums.rows]
                deviation = self.privacy.deviation(self.optimizer.accumulate)
                gradients = add_noise(op, gradients, values[self.masks], deviation, rows)
            writer = StepWriter(op, graph, self.optimizer, self.model.opset_imports[""])
            state, self.learning_rate = writer.state, str(writer.rate.name)
            if self.scale is not None:
                writer.finite = renewed_scale(op, state, values[self.scale], list(gradients.values()))
            writer.counted = None if self.counted is None else values[self.counted]
            writer.write(gradients)
            for g in clipped:
                graph.outputs.remove(g)
        for name, new in self.statistics.items():
            state.renew(values[name], values[new], STATISTIC)
        if self.masks is not None:
            state.renew(values[self.masks], op.Add(values[self.masks], [0, 1]), RANDOM, 0)
        self.state = write_outputs(op, graph, state, writer)
        if writer is not None:
            if norms:
                measured = writer.norms(gradients)
                measured.name = self.gradient_norms = op.unique("gradient_norms")
                measured.shape = ir.Shape([len(gradients)])
                graph.outputs.append(measured)
            writer.attach(self.model)
        graph.extend(op.nodes)

    def keep_to_budget(self, budget: float | int, lengths: Mapping[str, int]) -> dict[str, float]:
        """Let activations keep to a budget of memory; what is expected."""
        values = values_by_name(self.graph)
        gradients = [values[name] for name in (*self.input_gradients.values(), *self.parameters.values())]
        return fit_memory(self.model, self._forward, self._backward, gradients, budget, lengths)

    def keep_decoder(self, model: ModelProto) -> None:
        """Let the finished graph hold the decoder that it is made of, if it had a cache."""
        if self.editor.cache:
            store_decoder(model, self.editor.whole, self.editor.tensors, self.came)

    def stage_sums(self) -> None:
        """Put long sums of the loss and of the two passes in stages; the model's own sums stay as they are."""
        stage_sums(self.graph, self._of_model, self._of_loss)


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
    listed = trainable if isinstance(trainable, Sequence) and not isinstance(trainable, str) else ()
    named = [name for name in listed if isinstance(name, str) and name in inputs]
    if named and (trained or len(named) < len(listed)):
        raise InvalidArgumentError(
            f"{named[0]!r} is an input of the model, which no step renews. wrt_inputs=[{named[0]!r}] gives "
            "the gradient by it",
            argument="trainable",
        )
    return named
