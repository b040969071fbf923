"""What the weights of a trainer give in inference mode: outputs, and the loss of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from onnx import ModelProto

from onnx_backprop.converters.training.names import PERPLEXITY
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.distributed.shards import Shard, Weights
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError
from onnx_backprop.opset.core.progress import shown
from onnx_backprop.opset.graphs.edit import without_tensors
from onnx_backprop.providers.placed import Placed
from onnx_backprop.training.data.batches import of_data
from onnx_backprop.training.divergence import BadBatchError
from onnx_backprop.training.inputs import Inputs, refusals, rows, size
from onnx_backprop.training.measures import Measures, Names, check_ranks, counts_tokens
from onnx_backprop.training.reports.history import Measured, TokenLoss

if TYPE_CHECKING:
    from onnx_backprop.converters.training.metrics import Metric
    from onnx_backprop.training.ranks import Ranks

Feeds = Mapping[str, Any]
Values = Mapping[str, onnxruntime.OrtValue]
Session = onnxruntime.InferenceSession | Placed


class Evaluator:
    """Runs the model of a training graph in inference mode.

    open_: what runs a model whose weights are inputs; it adds to `frozen` those that nothing trains. A session is
    opened when it is needed first: one for the outputs, one for the loss alone where logits are computed in blocks.
    """

    def __init__(
        self, graph: TrainingGraph, inputs: Inputs, open_: Callable[[ModelProto], Session], frozen: Values
    ) -> None:
        self._graph, self._inputs, self._open, self._frozen = graph, inputs, open_, frozen
        self._sessions: dict[bool, Session] = {}  # by whether they compute the loss alone
        self._unlabelled: tuple[Session, list[str]] | None = None  # without the loss, and the inputs it leaves out
        self._with_metrics: tuple[tuple[Any, ...], Session, Names] | None = None  # the last ones that were asked for
        self._tokens, self._counts = counts_tokens(graph), _labels_of(graph)

    def outputs(
        self, feeds: Feeds, weights: Values, *, loss_alone: bool = False, session: Session | None = None
    ) -> dict[str, Any]:
        """The outputs of the model, the loss among them, for a batch with its target; or those of another session."""
        if session is None and loss_alone not in self._sessions:
            model = self._graph.eval_model(outputs=() if loss_alone else None, mapped=True)
            self._sessions[loss_alone] = self._open(without_tensors(model, self._graph.forward_state))
        return self._outputs(feeds, weights, session or self._sessions[loss_alone])

    def predictions(self, feeds: Feeds, weights: Values) -> dict[str, Any]:
        """The outputs for a batch; without its targets those of the model alone, where these depend on none."""
        left = [name for name in self._graph.options.loss_inputs if name not in feeds]
        if not left or any(name not in self._inputs.names for name in feeds):
            return self.outputs(feeds, weights)
        if self._unlabelled is None:
            model = self._graph.eval_model(loss=False, mapped=True)
            needed = {value.name for value in model.graph.input}
            without = [name for name in self._inputs.names if name not in needed]
            self._unlabelled = self._open(without_tensors(model, self._graph.forward_state)), without
        session, without = self._unlabelled
        return self._outputs({n: v for n, v in feeds.items() if n not in without}, weights, session, without)

    def _outputs(
        self, feeds: Feeds, weights: Values, session: Session, without: Collection[str] = ()
    ) -> dict[str, Any]:
        batch = self._inputs.ort_values(feeds, without)
        if isinstance(session, Placed) and session.loses_nan:
            fault = self._inputs.fault(f"{session.target.name} may lose what is no number", feeds, nan_alone=True)
            if fault:
                raise fault
        with refusals(batch):
            if isinstance(session, Placed):
                return session.run(lengths_of(batch), partial(self._run, batch, weights))
            return self._run(batch, weights, session)

    def _run(self, batch: Values, weights: Values, session: onnxruntime.InferenceSession) -> dict[str, Any]:
        accepted = {value.name for value in session.get_inputs()}
        fed = {**self._frozen, **weights}
        fed = {**batch, **{name: value for name, value in fed.items() if name in accepted}}
        outputs = session.get_outputs()
        names = [value.name for value in outputs]
        if not all(value.type.startswith("tensor(") for value in outputs):
            return dict(zip(names, session.run(names, fed), strict=True))
        results = session.run_with_ort_values(names, fed)
        return {name: np.array(value.numpy()) for name, value in zip(names, results, strict=True)}

    def _metrics(self, metrics: Mapping[str, Metric]) -> tuple[Session | None, Names]:
        """What computes the loss and the sums of metrics, and the names of these; one session is kept."""
        if self._tokens:  # or all logits would be computed for what the loss says already
            metrics = {n: m for n, m in metrics.items() if m.name != PERPLEXITY or m.prediction or m.target}
        if not metrics:
            return None, {}
        asked = tuple(metrics.items())
        if self._with_metrics is None or self._with_metrics[0] != asked:
            from onnx_backprop.converters.training.metrics.model import metric_model  # for which onnx_ir is imported

            model = metric_model(self._graph, metrics)
            session = self._open(without_tensors(model.model, self._graph.forward_state))
            self._with_metrics = asked, session, model.sums
        return self._with_metrics[1:]

    def mean(
        self,
        loader: Iterable[Any],
        weights: Values,
        ranks: Ranks | None,
        metrics: Mapping[str, Metric],
        *,
        what: str = "in batch {} of the evaluation the loss is",
    ) -> Measured:
        """The loss and the metrics of all batches, of which each of several ranks computes its share.

        what: the start of the error about a loss that is no finite number, in which the batch has a number.
        """
        if ranks is not None:
            check_ranks(metrics, ranks.communicator)
        session, names = self._metrics(metrics)
        measures = Measures({name: metrics[name] for name in names}, names)
        total, seen = 0.0, 0
        unlabelled: Exception | None = None
        batches = loader if ranks is None else ranks.whole_batches(loader)
        first, step = (0, 1) if ranks is None else (ranks.communicator.rank, ranks.communicator.size)
        for n, batch in enumerate(shown(batches, what="evaluating", unit="batch")):
            feeds = self._inputs.named(batch)
            try:
                loss, results = self._measured(feeds, weights, what.format(first + n * step), session)
            except BadBatchError as e:
                fault = of_data(e, loader, first + n * step, "the data of the evaluation")
                if self._counts is None or self._weight(feeds):
                    raise fault from None
                unlabelled = fault  # all of its labels are left out, so that its loss is a mean of nothing
                continue
            count = self._weight(feeds)
            total += count * loss
            seen += count
            measures.add(results)
        if ranks is not None:
            total, seen = ranks.totals(total, seen)
            measures.gather(ranks.communicator)
        if not seen and unlabelled is not None:
            raise unlabelled
        if not seen:
            what = "token" if self._tokens else "label"
            why = "is empty; expected at least one batch" if self._counts is None else f"holds no {what} that counts"
            raise InvalidArgumentError(f"the loader {why}")
        values = measures.values()
        return TokenLoss(total / seen, seen, values) if self._tokens else Measured(total / seen, values)

    def _weight(self, feeds: Feeds) -> float:
        """What a batch counts in a mean over several: the numbers of its target, or its labels that count.

        Without a single target its rows: the length of axis 0, which may be that of time.
        """
        if self._counts is None:
            targets = self._graph.options.loss_inputs
            return size(feeds[targets[0]]) if len(targets) == 1 else rows(feeds[self._graph.inputs[0]])
        return self._counts.of(Shard(self._inputs.checked(feeds)))

    def _measured(
        self, feeds: Feeds, weights: Values, what: str, session: Session | None
    ) -> tuple[float, dict[str, Any]]:
        results = self.outputs(feeds, weights, loss_alone=bool(self._graph.options.blocks), session=session)
        loss = float(results[self._graph.loss].reshape(()))
        if not math.isfinite(loss) and (fault := self._inputs.fault(f"{what} {loss}", feeds)):
            raise fault
        return loss, results


def _labels_of(graph: TrainingGraph) -> Weights | None:
    """What weighs a batch by its labels; None where rows do, and for sums of losses that weigh rows differently."""
    try:
        weights = Weights(graph)
    except UnsupportedError:
        return None
    return weights if weights.of_labels else None


def lengths_of(fed: Values) -> dict[str, Sequence[int]]:
    """The shape of each tensor."""
    return {name: value.shape() for name, value in fed.items()}
