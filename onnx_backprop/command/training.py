"""What the options of a training make: the loss of classes, optimizer, schedule, callbacks, a learning rate."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_backprop.command.options import loss_of, say, shared
from onnx_backprop.command.parser import argument, flag
from onnx_backprop.converters.tables import sparkline
from onnx_backprop.converters.training.losses import LOSSES, Loss
from onnx_backprop.converters.training.optimizers import OPTIMIZERS, Optimizer
from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.opset.core.reading import load
from onnx_backprop.training.schedules import Constant, Cosine, Linear, OneCycle, Schedule, Step, Warmup

if TYPE_CHECKING:
    from onnx_backprop.training.rates import RateSearch

BALANCED = "balanced"
SCHEDULES = ("constant", "linear", "cosine", "step", "one_cycle")
_OF_LOSSES = ("weight", "ignore_index", "label_smoothing")  # of some losses, and what an option is called by them
OF_OPTIMIZERS = [
    argument("--momentum", type=float, metavar="NUMBER", help="momentum of sgd and rmsprop"),
    *shared("--weight-decay", "--clip-norm", "--accumulate"),
    argument(
        "--ema", type=float, metavar="DECAY", help="keep running means of the weights; train measures and writes these"
    ),
    argument(
        "--per-sample-clip",
        type=float,
        metavar="NORM",
        help="differential privacy: limit the norm of each row's gradient",
    ),
    argument(
        "--noise",
        default=0.0,
        metavar="NUMBER",
        help="deviation of the noise on the sum of these gradients, as a multiple of that limit (0)",
    ),
    argument(
        "--expected-batch", type=int, metavar="ROWS", help="divide that sum by this (default: the rows of each batch)"
    ),
]
OF_LOSSES = [
    argument(
        "--class-weights",
        dest="weight",
        also="weight",
        metavar="balanced|W,…|FILE",
        help="class weights of the loss; balanced: rows / (classes · rows of the class); FILE: .npy or text",
    ),
    argument("--ignore-index", type=int, metavar="N", help="ignore this label, as 255 in masks"),
    argument("--label-smoothing", type=float, metavar="SHARE", help="spread this share of the target over all classes"),
]
WATCHED = [
    argument(
        "--metrics",
        metavar="NAMES",
        help="metrics of the evaluation, with commas: accuracy, top5, f1, iou, dice, auroc, mae, rmse, psnr, …",
    ),
    argument(
        "--monitor",
        metavar="NAME",
        help="what --patience and --keep-best compare: a metric, or 'evaluation', its loss (default: the first metric, "
        "else evaluation)",
    ),
    argument(
        "--patience", default=0, metavar="EPOCHS", help="end the training after so many epochs without an improvement"
    ),
    flag("--keep-best", help="write the weights of the best epoch, and its checkpoint"),
    argument("--time-limit", type=float, metavar="MINUTES", help="end the training after so many minutes"),
    flag("--find-rate", help="first try learning rates, and use the one at which the loss falls most steeply"),
]


def loss_with(arguments: argparse.Namespace, data: Mapping[str, Any]) -> str | Loss | None:
    """The loss that is asked for, with what options say of its classes. data: to count labels of."""
    loss = loss_of(arguments)
    given = {name: getattr(arguments, name) for name in _OF_LOSSES if getattr(arguments, name, None) is not None}
    if not given:
        return loss
    for name in given:
        takes = [n for n, kind in LOSSES.items() if is_dataclass(kind) and name in {f.name for f in fields(kind)}]
        if loss not in takes:
            raise InvalidArgumentError(f"goes with {', '.join(takes)}, not with {loss}", name)
    assert loss is not None
    if "weight" in given:
        given["weight"] = _weights(given["weight"], data, given.get("ignore_index"), _classes(arguments))
    kind: Any = LOSSES[loss]
    return kind(**given)


def _classes(arguments: argparse.Namespace) -> int:
    """The number of classes that a model says of its prediction; 0 if it does not."""
    outputs = load(arguments.model, mapped=True).graph.output
    chosen = [y for y in outputs if len(outputs) == 1 or y.name == arguments.prediction]
    dims = chosen[0].type.tensor_type.shape.dim if chosen else ()
    return dims[1].dim_value if len(dims) > 1 else 0


def _weights(text: str, data: Mapping[str, Any], ignored: int | None, classes: int) -> list[float]:
    """A weight for each class, from its number of labels, from the option or from a file."""
    if text != BALANCED:
        try:
            path = Path(text)
            if path.suffix == ".npy":
                numbers = np.load(path, allow_pickle=False)
            elif path.is_file():
                numbers = np.array(path.read_text(encoding="utf-8").replace(",", " ").split(), float)
            else:
                numbers = np.array(text.split(","), float)
        except (OSError, ValueError) as e:
            expected = f"{BALANCED}, numbers with commas, or a file of numbers, .npy or text"
            raise InvalidArgumentError(f"expected {expected}, got {text!r}: {e}", "weight") from e
        return [float(number) for number in numbers.reshape(-1)]
    if "labels" not in data:
        raise InvalidArgumentError(f"{BALANCED} counts the array labels, there are {', '.join(data)}", "weight")
    labels = data["labels"]
    labels = np.asarray(labels[np.arange(len(labels))]).reshape(-1)
    labels = labels[labels != ignored] if ignored is not None else labels
    if labels.dtype.kind not in "biu" or not labels.size or labels.min() < 0:
        raise InvalidArgumentError(
            f"{BALANCED}: expected labels from 0 on. Say what is ignored: --ignore-index", "weight"
        )
    counts = np.bincount(labels.astype(np.int64), minlength=classes)
    there = counts > 0
    return np.where(there, len(labels) / (there.sum() * np.maximum(counts, 1)), 1.0).tolist()


def callbacks_of(arguments: argparse.Namespace, best: Path) -> list[Any]:
    """What --patience, --keep-best and --time-limit ask for. best: where the best checkpoint is saved."""
    from onnx_backprop.converters.training.metrics.choose import named_metrics  # not before: other commands need none
    from onnx_backprop.training.callbacks import EarlyStopping, KeepBest, TimeLimit

    given = (arguments.metrics or "evaluation").split(",")[0]
    monitor = arguments.monitor or (given if given == "evaluation" else next(iter(named_metrics(given))))
    result: list[Any] = []
    if arguments.keep_best:
        result.append(KeepBest(best, monitor))
    if arguments.patience:
        result.append(EarlyStopping(monitor, patience=arguments.patience))
    if arguments.time_limit is not None:
        result.append(TimeLimit(minutes=arguments.time_limit))
    return result


def check_watched(arguments: argparse.Namespace, *, split: bool = False) -> None:
    """Before any long work: what looks at an evaluation has one. split: whether --split is one too."""
    evaluated = arguments.evaluation is not None or (split and arguments.split)
    for name in ("metrics", "patience", "keep_best"):
        if getattr(arguments, name) and not evaluated:
            data = f"--evaluation{' or --split' if split else ''}, the data to measure"
            raise InvalidArgumentError(f"--{name.replace('_', '-')}: goes with {data}")
    if arguments.monitor and not (arguments.patience or arguments.keep_best):
        raise InvalidArgumentError("--monitor: goes with --patience or --keep-best")
    if arguments.time_limit is not None and not 0 < arguments.time_limit < inf:
        raise InvalidArgumentError(f"--time-limit: expected a number above 0, got {arguments.time_limit}")
    if arguments.patience < 0:
        raise InvalidArgumentError(f"--patience: expected 0 or more, got {arguments.patience}")
    if arguments.metrics:
        from onnx_backprop.training.measures import chosen_metrics  # not before: it needs a runtime

        chosen_metrics(arguments.metrics)


def search_rate(arguments: argparse.Namespace, trainer: Any, loader: Any) -> "RateSearch":
    """Try learning rates; the one that suits is `--learning-rate` from here on."""
    search: RateSearch = trainer.find_learning_rate(loader)
    arguments.learning_rate = trainer.learning_rate = float(f"{search.suggestion:.2g}")
    tried = f"{search.points[0][0]:.2g} … {search.points[-1][0]:.2g}"
    course = sparkline([loss for _, loss in search.means])
    say(arguments, f"learning rate: {arguments.learning_rate:g} of {tried}, losses {course}")
    return search


def best_of(callbacks: Sequence[Any]) -> dict[str, str]:
    """What --keep-best has found, and why --patience or --time-limit has ended the training."""
    from onnx_backprop.training.callbacks import KeepBest

    reasons = [each.reason for each in callbacks if getattr(each, "reason", "")]
    ends = {"ended": "; ".join(reasons)} if reasons else {}
    keepers = [each for each in callbacks if isinstance(each, KeepBest) and each.best is not None]
    return ends | {f"best {each.monitor}": f"{each.best:.4g}, whose weights are written" for each in keepers}


def optimizer_of(arguments: argparse.Namespace) -> Optimizer:
    """What --optimizer and its numbers ask for."""
    given = {n: getattr(arguments, n, None) for n in ("momentum", "weight_decay", "clip_norm", "accumulate", "ema")}
    if given["momentum"] is not None and arguments.optimizer not in ("sgd", "rmsprop"):
        raise InvalidArgumentError(f"--momentum: goes with sgd and rmsprop, not with {arguments.optimizer}")
    return OPTIMIZERS[arguments.optimizer](**{name: value for name, value in given.items() if value is not None})


def schedule_of(arguments: argparse.Namespace, steps: int) -> Schedule:
    rate = arguments.learning_rate
    if arguments.warmup > steps:
        text = f"the training has {steps} updates, so that the learning rate ends below {rate:g}. Shorten it"
        warn(text, argument="warmup")
    schedule: Schedule = {
        "constant": lambda: Constant(rate),
        "linear": lambda: Linear(rate, steps=steps),
        "cosine": lambda: Cosine(rate, steps=steps),
        "step": lambda: Step(rate, every=max(1, steps // 3)),
        "one_cycle": lambda: OneCycle(rate, steps=steps),
    }[arguments.schedule]()
    return Warmup(schedule, steps=arguments.warmup) if arguments.warmup else schedule
