"""`training_graph`: a forward model in, one graph that computes its loss and the gradients of its parameters out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, numpy_helper

from ..opset.errors import InvalidArgumentError, InvalidModelError, UnsupportedError
from ..opset.functions import check_kernels
from .backward import DEFAULT_KERNELS, Differentiation, check_names, finish, used_names
from .builder import Builder, dims, is_float
from .differentiate import Progress
from .files import save_model
from .losses import check_loss, describe, emit_loss
from .prepare import pick, prepare


@dataclass(frozen=True)
class TrainingGraph:
    """A training graph and what a training loop needs to know about it.

    model: its outputs are the loss, the model's own outputs, then the gradients in the order of `parameters`; its
        inputs the data, the target, then the parameters, whose defaults are the model's own values.
    loss: the name of the loss output, a one-element tensor.
    inputs: what every step must feed: the data inputs, then the target.
    target: the name of the target input, None for a model that computes its own loss.
    parameters: each trainable initializer and the name of its gradient output.
    """

    model: ModelProto
    loss: str
    inputs: tuple[str, ...]
    target: str | None
    parameters: dict[str, str]

    def initial_values(self) -> dict[str, np.ndarray]:
        """The values of the parameters in the model, as arrays of one's own, in the order of `parameters`."""
        tensors = {tensor.name: tensor for tensor in self.model.graph.initializer}
        return {name: np.array(numpy_helper.to_array(tensors[name])) for name in self.parameters}

    def save(self, path: str | Path) -> None:
        """Write the model; the file appears complete or not at all. InvalidArgumentError where it cannot be."""
        save_model(self.model, path)


def training_graph(
    model: ModelProto | str | Path,
    *,
    loss: str | None = None,
    trainable: Sequence[str] | None = None,
    frozen: Sequence[str] | None = None,
    optimizer: None = None,
    kernels: str = DEFAULT_KERNELS,
    prediction: str | None = None,
    straight_through: bool = False,
    progress: Progress = iter,
) -> TrainingGraph:
    """(loss, d loss / d parameters) as one graph: `<p>_grad` = ∂loss/∂p for every trainable p.

    Args:
        model: a ModelProto or the path of one; it is not changed.
        loss: None for a model whose output is its loss already, or one of, with y the prediction and t the target,
            "mse": mean((y - t)²);
            "l1": mean(|y - t|), derivative 0 where y = t;
            "bce_with_logits": mean(max(y, 0) - y·t + log(1 + exp(-|y|)));
            "softmax_cross_entropy": mean of -log softmax(y)[label] over all positions, classes along axis 1.
        trainable: initializers to differentiate by. Default: every float initializer that influences the loss.
        frozen: initializers to leave out of that default. No gradient is computed for them or for what lies
            before them alone.
        optimizer: None; update steps inside the graph come in a later version.
        kernels: how the operators of our domain run, see `use_kernels`.
        prediction: the output that the loss reads. Default: the only float output.
        straight_through: differentiate QuantizeLinear as if it did not round, see `backward`.
        progress: wraps the list of nodes while they are walked, for a progress bar.

    Shapes: the target input is `target`, of the prediction's shape and type, or for softmax_cross_entropy `labels`,
    int64, of the prediction's shape (N, C, d1, …) less its axis 1. When the model already uses that name, a number
    is put behind it; the result's `target` holds the name. Symbolic dimensions stay symbolic, and feeding a target
    of another shape than the prediction's, or a label outside 0 … C - 1, fails the run.

    The loss is a 0-D tensor of the prediction's type, but float32 for float16 and bfloat16, which are widened before
    it; gradients have their parameter's type. With loss=None the output that is the loss moves to the front.

    Raises: InvalidArgumentError (unknown names with near misses, a name both trainable and frozen, a loss of more
    than one element, several outputs to choose from), UnsupportedError for an optimizer, and what `backward` raises.
    """
    check_kernels(kernels)
    check_loss(loss)
    if optimizer is not None:
        raise UnsupportedError(
            f"optimizer: expected None, got {optimizer!r}. Update steps inside the graph come in a later version; "
            "until then update the parameters from their gradients outside"
        )
    original = prepare(model)
    ir_model = ir.from_proto(original)
    graph = ir_model.graph
    trainable, frozen = _check_parameters(graph, trainable, frozen)
    inputs = [str(value.name) for value in graph.inputs if not value.is_initializer()]
    y = _prediction(graph, prediction)
    target = None
    if loss is None:
        _require_one_element(y)
        graph.outputs.remove(y)
        value = y
    else:
        op = Builder(used_names(graph))
        op.prefix = loss
        value, target_value = emit_loss(op, loss, y)
        graph.extend(op.nodes)
        graph.inputs.append(target_value)
        target = str(target_value.name)
        inputs.append(target)
    graph.outputs.insert(0, value)
    parameters = Differentiation(
        ir_model,
        wrt=trainable,
        of=[str(value.name)],
        without=frozen,
        argument="trainable",
        straight_through=straight_through,
        progress=progress,
    ).emit()
    return TrainingGraph(
        model=finish(ir_model, original, kernels),
        loss=str(value.name),
        inputs=tuple(inputs),
        target=target,
        parameters=parameters,
    )


def _check_parameters(
    graph: ir.Graph, trainable: Sequence[str] | None, frozen: Sequence[str] | None
) -> tuple[list[str] | None, list[str]]:
    """Names that exist, are not repeated and are not in both lists."""
    initializers = {str(v.name): v for v in graph.initializers.values()}
    if trainable is not None:
        pick(check_names("trainable", trainable), initializers, argument="trainable", what="an initializer")
    if frozen:
        pick(check_names("frozen", frozen), initializers, argument="frozen", what="an initializer")
    both = [name for name in trainable or () if name in (frozen or ())]
    if both:
        raise InvalidArgumentError(f"trainable, frozen: {', '.join(map(repr, both))} in both lists. Leave it in one")
    return None if trainable is None else list(trainable), list(frozen or ())


def _prediction(graph: ir.Graph, name: str | None) -> ir.Value:
    """The output that the loss reads, or that is the loss."""
    outputs = {str(value.name): value for value in graph.outputs}
    if name is not None:
        (value,) = pick([name], outputs, argument="prediction", what="a graph output")
        if not is_float(value):
            kind = value.dtype.name if value.dtype is not None else "unknown"
            raise InvalidArgumentError(f"prediction: {name!r} has type {kind}; losses exist for floats only")
        return value
    floats = [value for value in outputs.values() if is_float(value)]
    if not floats:
        raise InvalidModelError(
            f"the model has no float output to compute a loss from; it has {', '.join(outputs) or 'none'}"
        )
    if len(floats) > 1:
        names = ", ".join(repr(value.name) for value in floats)
        raise InvalidArgumentError(
            f"prediction: the model has {len(floats)} float outputs, {names}. Name the one that the loss reads"
        )
    return floats[0]


def _require_one_element(value: ir.Value) -> None:
    shape = dims(value)
    if shape is None or any(d != 1 for d in shape):
        raise InvalidArgumentError(
            f"loss: with loss=None the output {value.name!r} is the loss and must have one element, "
            f"got shape {describe(shape)}. Name a loss, or reduce the output in the model"
        )
