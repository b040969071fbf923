"""The model of an evaluation: the loss, and what metrics need of a batch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.prepare.ir_models import to_ir, to_proto
from onnx_backprop.converters.prepare.load import infer_large
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.training.metrics.base import Comparison, Metric, Read
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.graphs.names import used_names


@dataclass(frozen=True)
class MetricModel:
    """model: its outputs are the loss, then sums. sums: of each metric the outputs that hold them, by what they are."""

    model: ModelProto
    sums: Mapping[str, Mapping[str, str]]


def comparison(graph: TrainingGraph, metric: str, prediction: str | None, target: str | None) -> Comparison:
    """What a metric reads: what the loss reads, of those that have the names that are given.

    Errors: InvalidArgumentError for unknown names, where the loss reads several predictions and none is named, and for
    a graph that does not say what its loss reads.
    """
    known = [Comparison.of(record) for record in graph.options.compared]
    if not known and not (prediction and target):
        raise InvalidArgumentError(
            f"{metric}: the graph does not say what its loss reads: it computes the loss itself, or an earlier version "
            "has written it. Name both: prediction=, target=; or make the graph again with a loss of this package"
        )
    fitting = [each for each in known if prediction in (None, each.prediction) and target in (None, each.target)]
    if len({(each.prediction, each.target) for each in fitting}) > 1:
        pairs = ", ".join(dict.fromkeys(f"{each.prediction!r} beside {each.target!r}" for each in fitting))
        raise InvalidArgumentError(f"{metric}: the loss reads {pairs}. Name the one that is meant: prediction=")
    if fitting:
        return fitting[0]
    if not (prediction and target):
        names = [each.prediction if prediction else each.target for each in known]
        given = prediction or target
        raise InvalidArgumentError(
            f"{metric}: expected one of {', '.join(map(repr, dict.fromkeys(names)))}, which the loss reads, "
            f"got {given!r}{near(str(given), names)}. Another one needs both names: prediction=, target="
        )
    if target not in graph.inputs:
        raise InvalidArgumentError(
            f"{metric}: target: expected one of {', '.join(graph.inputs)}, got {target!r}{near(target, graph.inputs)}"
        )
    return Comparison(prediction=prediction, target=target)


def metric_model(graph: TrainingGraph, metrics: Mapping[str, Metric]) -> MetricModel:
    """The model of an evaluation with the sums of metrics behind the loss; weights in files stay there."""
    pairs = {name: comparison(graph, name, metric.prediction, metric.target) for name, metric in metrics.items()}
    wanted = dict.fromkeys(about.prediction for about in pairs.values())
    model = to_ir(graph.eval_model(outputs=list(wanted), mapped=True))
    inputs = {str(value.name): value for value in model.graph.inputs}
    values = {str(value.name): value for value in model.graph.outputs}
    op = Builder(used_names(model.graph))
    sums: dict[str, dict[str, str]] = {}
    results: list[ir.Value] = []
    for name, about in pairs.items():
        op.prefix = f"metrics/{name}"
        y, t = values[about.prediction], inputs.get(about.target)
        if t is None or dims(y) is None or dims(t) is None:
            raise InvalidArgumentError(
                f"{name}: expected a prediction and a target of known rank, {about.prediction!r} and {about.target!r} "
                "are not. Give the output of the model a shape"
            )
        sums[name] = {}
        read = Read(metric=name, about=_typed(about, y, t), y=y, t=t, weights=inputs.get(about.weights or ""))
        for what, value in metrics[name].emit(op, read).items():
            value = op.Identity(value)
            value.name = sums[name][what] = op.unique(f"metrics/{name}/{what}")
            results.append(value)
    model.graph.extend(op.nodes)
    del model.graph.outputs[1:]
    model.graph.outputs.extend(results)
    return MetricModel(infer_large(to_proto(model)), sums)


def _typed(about: Comparison, y: ir.Value, t: ir.Value) -> Comparison:
    """With the axis of the classes of a pair that no loss reads: 1, where labels lack one of the axes."""
    if about.loss or about.axis is not None or t.dtype is None or t.dtype.is_floating_point():
        return about
    return about if len(dims(t) or ()) == len(dims(y) or ()) else replace(about, axis=1)
