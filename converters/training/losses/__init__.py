"""Losses: what `training_graph` puts behind a model's output, as ordinary ONNX nodes.

    loss = MSE(reduction="sum")  # or its name, "mse", for the defaults
    loss = SoftmaxCrossEntropy(weight=[1, 3], ignore_index=-100, label_smoothing=0.1)
    loss = 0.7 * Dice("mask") + MSE("depth")  # of several outputs; or {"mask": "dice", "depth": "mse"}
    loss = lambda op, outputs: op.ReduceMean(op.Abs(op.Sub(outputs["y"], op.input("t", outputs["y"]))), keepdims=0)
    loss = lambda op, outputs: op.Sqrt(MSE()(op, outputs["y"]))  # a ready one among one's own nodes

float16 and bfloat16 predictions are cast to float32 first: one rounding back to the model's type, at the gradient
of the prediction, and a mean over more than 65504 elements stays finite. Sums over many elements are exact to 1e-6.
"""

# May import `names` of `training`, `rules`, `reverse`, `prepare` and opset.

from collections.abc import Callable
from typing import TypeVar

from onnx_backprop.converters.training.losses.base import Loss, LossBuilder, LossFunction
from onnx_backprop.converters.training.losses.binary import BCE, BCEWithLogits, Focal
from onnx_backprop.converters.training.losses.compose import LossSum
from onnx_backprop.converters.training.losses.cross_entropy import NLL, SoftmaxCrossEntropy
from onnx_backprop.converters.training.losses.ctc import CTC
from onnx_backprop.converters.training.losses.distributions import CosineEmbedding, KLDivergence
from onnx_backprop.converters.training.losses.elements import L1, MSE, Huber, SmoothL1
from onnx_backprop.converters.training.losses.next_token import NextToken
from onnx_backprop.converters.training.losses.overlap import Dice, Tversky
from onnx_backprop.opset.core.errors import InvalidArgumentError

__all__ = [
    "BCE",
    "CTC",
    "L1",
    "MSE",
    "NLL",
    "BCEWithLogits",
    "CosineEmbedding",
    "Dice",
    "Focal",
    "Huber",
    "KLDivergence",
    "Loss",
    "LossBuilder",
    "LossSum",
    "NextToken",
    "SmoothL1",
    "SoftmaxCrossEntropy",
    "Tversky",
    "register_loss",
]

_READY = (MSE, L1, Huber, SmoothL1, BCEWithLogits, BCE, Focal, SoftmaxCrossEntropy, NLL, Dice, Tversky)
_READY += (KLDivergence, CosineEmbedding, CTC, NextToken)
LOSSES: dict[str, type[Loss] | LossFunction] = {loss.name: loss for loss in _READY}
AnyDefinition = TypeVar("AnyDefinition", bound=type[Loss] | LossFunction)


def register_loss(name: str) -> Callable[[AnyDefinition], AnyDefinition]:
    """A decorator: a name for a loss of your own, for `training_graph(loss="name")` and `--loss name`.

        @ob.register_loss("log_cosh")
        def log_cosh(op, outputs):  # mean of log cosh(y - t)
            y = outputs["y"]
            return op.ReduceMean(op.Log(op.Cosh(y - op.input("target", y))), keepdims=0)

    The loss is a function of the builder and the model's outputs, or a subclass of `losses.Loss` with default
    arguments. A subclass can be added to others, can choose the output that it reads, and checks its target's shape. A
    second loss of the same name replaces the first.

    Errors: InvalidArgumentError for the name of a loss of this package, and for anything that is no loss.
    """
    if not isinstance(name, str) or not name or (name in LOSSES and LOSSES[name] in _READY):
        raise InvalidArgumentError(f"name: expected one that no loss of this package has, got {name!r}")

    def register(loss: AnyDefinition) -> AnyDefinition:
        given: object = loss
        if not callable(given) or (isinstance(given, type) and not issubclass(given, Loss)):
            raise InvalidArgumentError(f"{name}: expected a function or a subclass of losses.Loss, got {loss!r}")
        LOSSES[name] = loss
        return loss

    return register


def __dir__() -> list[str]:
    return list(__all__)
