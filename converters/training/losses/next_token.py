"""The loss of language models: the cross entropy of every token, given those before it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims, element_type
from onnx_backprop.converters.training.losses.base import (
    NAME,
    NOT_NEGATIVE,
    Expectation,
    Loss,
    LossBuilder,
    between,
    checked,
    require_rank,
    scalar,
    symbolic,
    wide,
)
from onnx_backprop.converters.training.losses.cross_entropy import BLOCK_ROWS, check_labels, labels_of
from onnx_backprop.converters.training.losses.linear import emit_blocks, positions_shape
from onnx_backprop.converters.training.names import NEXT_TOKEN
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.shapes import Dims


@dataclass(frozen=True, kw_only=True)
class NextToken(Loss):
    """Σ w · ((1 - ε) · -log p[t] - ε/C · Σ_c log p_c + ζ · (log Σ_c exp y_c)²) / Σ w over the tokens that count.

    y[b, n] are the logits after token n, p = softmax(y) and t = labels[b, n + 1], so the labels are the input ids
    themselves; with `shift=False` t = labels[b, n]. Tokens with the label `ignore_index` do not count, nor does the
    prediction after the last token. If no token counts, the loss and all gradients are 0. With `accumulate`, an update
    divides the summed gradients of all its batches by the tokens of all of them, as transformers does by
    `num_items_in_batch`; with reduction "sum" it is the mean of the batches' sums.

    Args:
        ignore_index: the label to leave out, -100 as in transformers.
        shift: whether the logits are compared with the next label.
        weights: the name of a new input, w of every label, float, of the shape of the labels. Default: 1 for all.
        label_smoothing: ε in 0 … 1.
        z_loss: ζ, which keeps log Σ exp y near 0 (Chowdhery et al., "PaLM", section 5; 1e-4 there).
        block_rows: as in SoftmaxCrossEntropy.
        label_type: of the labels: "int64", "int32", "int16" or "int8".

    Shapes: y (B, T, C), or (T, C); the target is the new input `labels`, (B, T) or (T); `target="input_ids"` uses an
    input of the model. Source: transformers, ForCausalLMLoss.
    """

    name: ClassVar[str] = NEXT_TOKEN
    roles: ClassVar[tuple[str, ...]] = ("labels",)
    expects: ClassVar[Mapping[str, Expectation]] = {
        "label_smoothing": between(0, 1),
        "z_loss": NOT_NEGATIVE,
        "block_rows": BLOCK_ROWS,
        "weights": NAME,
        "shift": ("True or False", lambda given: isinstance(given, bool)),
    }
    ignore_index: int = -100
    shift: bool = True
    weights: str | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    block_rows: int | None = None
    label_type: str = "int64"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_labels(self.name, self.label_type, self.ignore_index)

    def squashes(self) -> bool:
        return True

    def emit(self, op: LossBuilder, *predictions: ir.Value) -> ir.Value:
        """Emit the nodes, with the target as a new input `labels`."""
        (prediction,) = predictions
        labels, shape = labels_of(op, self, prediction, -1, self.label_type, self.ignore_index)
        op.compared[-1] |= {"shift": self.shift, "weights": self.weights}
        weights = None
        if self.weights is not None:
            weights = self._weights(op, prediction, shape[:-1])
        t = op.Reshape(self._next(op, labels, self.ignore_index), [-1])
        t.shape = ir.Shape([None])
        ignored = op.Equal(t, self.ignore_index)
        y = wide(op, prediction)
        kind = element_type(y)
        counts: ir.Value = op.Where(ignored, op.number(0, kind), op.number(1, kind))
        if weights is not None:
            weights = op.Cast(op.Reshape(self._next(op, weights, 0), [-1]), to=kind)
            weights.shape = t.shape
            counts = op.Where(ignored, 0, weights)
        counts.shape = t.shape
        op.counted = op.ReduceSum(counts, keepdims=0) if self.reduction == "mean" else None
        divisor = None if op.counted is None else op.Where(op.Equal(op.counted, 0), 1, op.counted)  # before the blocks
        total = emit_blocks(
            op,
            prediction,
            t,
            weights,
            self.ignore_index,
            rows=self.block_rows,
            smoothing=self.label_smoothing,
            z_loss=self.z_loss,
        )
        if total is None:
            total = self._whole(op, y, t, ignored, counts)
        total.shape = ir.Shape([])
        if op.counted is not None and divisor is not None:
            op.counted.shape = divisor.shape = total.shape
            total = op.Div(total, divisor)
        return scalar(total, y)

    def _weights(self, op: LossBuilder, prediction: ir.Value, shape: Dims) -> ir.Value:
        given = op.input(str(self.weights), dtype=ir.DataType.FLOAT, shape=shape)
        if given.name != self.weights:
            raise InvalidArgumentError(
                f"{self.name}: weights: expected a name that is free, and the model has {self.weights!r}. Take another"
            )
        wanted = positions_shape(op, prediction) if symbolic(shape) else None
        return checked(op, given, shape, wanted, prediction)

    def _next(self, op: LossBuilder, values: ir.Value, last: int) -> ir.Value:
        """What comes next at every token, and `last` behind the last one."""
        if not self.shift:
            return values
        rank = len(dims(values) or ())
        padded = op.Pad(values, [0] * (2 * rank - 1) + [1], op.scalar(last, values))
        return op.Slice(padded, [1], [np.iinfo(np.int64).max], [-1])

    def _whole(self, op: LossBuilder, y: ir.Value, t: ir.Value, ignored: ir.Value, counts: ir.Value) -> ir.Value:
        """The weighted sum over all tokens, of logits that are there as a whole."""
        shape = require_rank(y)
        y = op.typed(op.Reshape(y, op.joined(op.ints([-1]), op.lengths(y, len(shape) - 1))), y)
        y.shape = ir.Shape((None, shape[-1]))
        attributes = {"reduction": "none", "ignore_index": self.ignore_index}
        smooth = self.label_smoothing
        results = op.emit("SoftmaxCrossEntropyLoss", [y, t], attributes, outputs=2 if smooth else 1)
        each = results[0]
        if smooth:
            results[1].shape = y.shape
            even = op.Neg(op.ReduceMean(results[1], [1], keepdims=0))
            each = op.Add(op.Mul(1 - smooth, each), op.Mul(smooth, even))
        if self.z_loss:
            lse = op.ReduceLogSumExp(y, [1], keepdims=0)
            each = op.Add(each, op.Mul(self.z_loss, op.Mul(lse, lse)))
        each = op.Where(ignored, 0, op.Mul(each, counts))
        each.shape = t.shape
        return op.ReduceSum(each, keepdims=0)
