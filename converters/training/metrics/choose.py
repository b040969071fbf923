"""Which metrics are asked for: names, records, functions of arrays, and objects that are updated and compute."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.training.losses.base import Expectation, one_of
from onnx_backprop.converters.training.metrics.base import Metric, Number, Read, Sums
from onnx_backprop.converters.training.metrics.classes import (
    F1,
    Accuracy,
    ConfusionMatrix,
    Dice,
    IoU,
    Precision,
    Recall,
    TopK,
)
from onnx_backprop.converters.training.metrics.scores import AUROC, Perplexity
from onnx_backprop.converters.training.metrics.values import MAE, PSNR, R2, RMSE, SSIM
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import near

_READY = (Accuracy, TopK, F1, Precision, Recall, ConfusionMatrix, IoU, Dice, AUROC, Perplexity)
_READY += (MAE, RMSE, R2, PSNR, SSIM)
METRICS: dict[str, type[Metric]] = {metric.name: metric for metric in _READY}
_TOP = re.compile(r"top_?(\d+)")


@dataclass(frozen=True, kw_only=True)
class Function(Metric):
    """function(target, output) of the arrays of all batches together, in scikit-learn's order: y_true, y_pred.

    An object with `update` and `compute`, as in torchmetrics, is reset and updated with (output, target), in that
    order, as tensors if it is a PyTorch module.

    Args:
        function: returns a number, or an array of numbers.
        form: None: the output and the target as they are, batches joined along axis 0. "classes": two arrays (M,), the
            label and the predicted class at each position that counts, or 1 for yes and 0 for no. "probabilities": (M,)
            and (M, C), for yes and no (M,).
        better: "higher" or "lower", for callbacks that look for the best.

    All arrays of the evaluation are in memory together. Several ranks are refused.
    """

    name: ClassVar[str] = "function"
    expects: ClassVar[Mapping[str, Expectation]] = {
        "function": (
            "a function of (target, output), or an object with update and compute",
            lambda given: callable(given) or _is_updated(given),
        ),
        "form": one_of(None, "classes", "probabilities"),
        "better": one_of(None, "higher", "lower"),
    }
    function: Any = None
    form: str | None = None
    better: str | None = None

    @property
    def label(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__)).strip("<>")

    def emit(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        if self.form is None:
            return {"output": read.y, "target": read.t}
        if not read.classes:
            return self._of_yes_and_no(op, read)
        labels, mask = read.labels(op)
        if self.form == "classes":
            output = read.chosen(op)
        else:
            takes, output = read.about.takes, read.rows(op)
            output = op.Softmax(output, axis=-1) if takes == "logits" else output
            output = op.Exp(output) if takes == "log_probabilities" else output
        return {"output": output, "target": labels} | ({} if mask is None else {"kept": mask})

    def _of_yes_and_no(self, op: Builder, read: Read) -> dict[str, ir.Value]:
        yes, true = (op.Cast(op.Reshape(x, [-1]), to=ir.DataType.INT64) for x in read.decided(op, None))
        if self.form == "classes":
            return {"output": yes, "target": true}
        y = op.Reshape(read.values(op)[0], [-1])
        return {"output": op.Sigmoid(y) if read.about.takes == "logits" else y, "target": true}

    def merged(self, one: Sums, other: Sums) -> Sums:
        """The arrays of two batches, in lists that grow."""
        lists: Any = one if isinstance(one["output"], list) else {name: [array] for name, array in one.items()}
        for name, array in other.items():
            lists[name].append(array)
        return lists

    def value(self, sums: Sums) -> Number:
        output, target = (self._joined(sums, what) for what in ("output", "target"))
        if "kept" in sums:
            mask = self._joined(sums, "kept")
            output, target = output[mask], target[mask]
        try:
            return _number(self._computed(output, target))
        except InvalidArgumentError:
            raise
        except Exception as e:
            raise InvalidArgumentError(
                f"metrics: {self.label} raised {type(e).__name__}: {str(e).rstrip('.')}. It is called with (target, "
                f"output), arrays {target.dtype} {list(target.shape)} and {output.dtype} {list(output.shape)}; "
                "metrics.Function(…, form='classes') gives it the class that is chosen at every position"
            ) from e

    def _joined(self, sums: Sums, what: str) -> np.ndarray:
        arrays = sums[what] if isinstance(sums[what], list) else [sums[what]]
        shapes = {np.shape(array)[1:] for array in arrays}
        if len(shapes) > 1:
            raise InvalidArgumentError(
                f"metrics: {self.label}: expected batches that can be joined along axis 0, got arrays of the shapes "
                f"{', '.join(str(list(shape)) for shape in sorted(shapes))} behind it. Take metrics.Function(…, "
                "form='classes'), whose arrays are flat"
            )
        return np.concatenate([np.atleast_1d(array) for array in arrays])

    def _computed(self, output: np.ndarray, target: np.ndarray) -> Any:
        if not _is_updated(self.function):
            return self.function(target, output)
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(self.function, torch.nn.Module):
            output, target = (torch.from_numpy(np.array(array)) for array in (output, target))
        if hasattr(self.function, "reset"):
            self.function.reset()
        self.function.update(output, target)
        return self.function.compute()


def _is_updated(given: Any) -> bool:
    return callable(getattr(given, "update", None)) and callable(getattr(given, "compute", None))


def _number(result: Any) -> Number:
    """What a function gives, as a number or an array of numbers."""
    array = np.asarray(result.detach().cpu().numpy() if hasattr(result, "detach") else result)
    if array.dtype.kind not in "biuf":
        raise InvalidArgumentError(f"metrics: expected a number or an array of numbers of the function, got {result!r}")
    return array if array.ndim else float(array)


AnyMetric = str | Metric | Callable[..., Any]


def named_metrics(given: str | AnyMetric | Iterable[AnyMetric] | Mapping[str, AnyMetric] | None) -> dict[str, Metric]:
    """The metrics that are asked for, by the names that results have.

    given: a name, several with commas between them, "iou:mask" being that of the prediction mask; a record; a function
    (target, output) or an object with update and compute; a list of these, or a dict with names of one's own. Errors:
    InvalidArgumentError for something else, and for a name that stands twice or is one of a record of a step.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        pairs = [(str(name), _metric(metric)) for name, metric in given.items()]
    else:
        several = isinstance(given, Iterable) and not isinstance(given, str) and not _is_updated(given)
        entries: Iterable[Any] = given if several else [given]  # pyright: ignore[reportAssignmentType]
        each = [part for one in entries for part in _parts(one)]
        labels = [part.replace(":", "_") if isinstance(part, str) else _metric(part).label for part in each]
        pairs = list(zip(labels, map(_metric, each), strict=True))
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(f"metrics: {name!r} stands twice. Name them: metrics={{'one': …, 'other': …}}")
    return dict(pairs)


def _parts(given: Any) -> list[Any]:
    return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else [given]


def _metric(given: Any) -> Metric:
    if isinstance(given, Metric):
        return given
    if isinstance(given, str):
        name, _, prediction = given.partition(":")
        top = _TOP.fullmatch(name)
        if name not in METRICS and top is None:
            known = (*METRICS, "top5")
            raise InvalidArgumentError(
                f"metrics: expected one of {', '.join(known)}, a record of onnx_backprop.metrics or a function of "
                f"(target, output), got {given!r}{near(name, known)}"
            )
        metric = METRICS[name]() if top is None else TopK(k=int(top[1]))
        return replace(metric, prediction=prediction or None)
    if isinstance(given, type) and issubclass(given, Metric):
        raise InvalidArgumentError(f"metrics: {given.__name__} is a class. Write {given.__name__}()")
    if not callable(given) and not _is_updated(given):
        raise InvalidArgumentError(
            "metrics: expected a name, a record of onnx_backprop.metrics or a function of (target, output), "
            f"got {given!r}"
        )
    return Function(function=given)
