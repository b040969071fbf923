"""Direct preference optimisation: a model learns which of two answers is better, without a model of rewards.

    L = mean over pairs of -log σ(β · (m - r)),  m = log p(chosen) - log p(rejected), r = m of the model before training

log p is the sum over the learned tokens of an answer. Source: Rafailov et al., "Direct Preference Optimization", 2023.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.training.losses.base import LossBuilder
from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropError
from onnx_backprop.text.batches import TextBatches
from onnx_backprop.text.examples import read_text, tokens_of
from onnx_backprop.text.templates import template_for
from onnx_backprop.text.tokenizer import IGNORED, Tokenizer, Tokens
from onnx_backprop.training.trainer import Trainer

Pair = tuple[Tokens, Tokens]  # the chosen answer, with its prompt, and the rejected one
EXPECTED = '{"prompt": …, "chosen": …, "rejected": …}, each a text or a list of messages'


def read_pairs(path: str | Path, tokenizer: Tokenizer, *, template: str | None = None) -> list[Pair]:
    """The pairs of a .jsonl, one in a line: prompt, chosen and rejected, all texts or all lists of messages.

    Errors: InvalidArgumentError, with file and line, for what cannot be read or is none of these.
    """
    chosen = cache(lambda: template_for(tokenizer, template))
    result: list[Pair] = []
    for number, line in enumerate(read_text(Path(path)).split("\n"), 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            prompt, *answers = (example[key] for key in ("prompt", "chosen", "rejected"))
            lines = (
                {"messages": [*prompt, *answer]}
                if isinstance(prompt, list)
                else {"prompt": prompt, "completion": answer}
                for answer in answers
            )
            better, worse = (tokens_of(json.dumps(one), tokenizer, chosen) for one in lines)
        except OnnxBackpropError as e:
            raise type(e)(f"{path}, line {number}: {e}") from e
        except (ValueError, KeyError, TypeError) as e:
            raise InvalidArgumentError(f"{path}, line {number}: expected {EXPECTED}") from e
        result.append((better, worse))
    if not result:
        raise InvalidArgumentError(f"{path} holds no pair. Each line is {EXPECTED}")
    return result


def preference_loss(
    beta: float = 0.1, logits: str = "logits"
) -> Callable[[LossBuilder, Mapping[str, ir.Value]], ir.Value]:
    """L of the output `logits` (2P, T, C) of `PairBatches`, as `training_graph(…, loss=preference_loss())` takes it.

    It adds the inputs `labels` (2P, T) int64 and `reference` (P,) float, which is r. Errors: InvalidArgumentError for a
    beta that is no number above 0.
    """
    if not 0 < beta < math.inf:
        raise InvalidArgumentError(f"expected a number above 0, got {beta!r}", "beta")

    def loss(op: LossBuilder, outputs: Mapping[str, ir.Value]) -> ir.Value:
        y = outputs[logits]
        rows, length, *_ = dims(y) or (None, None)
        labels = op.input("labels", dtype=ir.DataType.INT64, shape=(rows, length))
        reference = op.input("reference", dtype=ir.DataType.FLOAT, shape=("pairs",))
        behind = op.Slice(op.Pad(labels, [0, 0, 0, 1], op.Cast(IGNORED, to=ir.DataType.INT64)), [1], [2**62], [1])
        flat = op.Reshape(op.Cast(y, to=ir.DataType.FLOAT), op.joined(op.ints([-1]), op.Shape(y, start=-1)))
        attributes = {"reduction": "none", "ignore_index": IGNORED}
        (each,) = op.emit("SoftmaxCrossEntropyLoss", [flat, op.Reshape(behind, [-1])], attributes)
        answers = op.ReduceSum(op.Reshape(each, op.Shape(labels)), [1], keepdims=0)  # -log p
        better, worse = (op.Slice(answers, [first], [2**62], [0], [2]) for first in (0, 1))
        margin = op.Sub(op.Sub(worse, better), reference)
        return op.ReduceMean(op.Softplus(op.Mul(-beta, margin)), keepdims=0)

    return loss


class PairBatches(TextBatches):
    """Batches of pairs: rows 2i and 2i + 1 are the chosen and the rejected answer; `reference` (P,) is r of each pair.

    r is 0 until `refer` has computed it with a trainer of the untrained model.
    """

    def __init__(self, pairs: Sequence[Pair], size: int, *, length: int, names: Sequence[str], **more: Any) -> None:
        """size: pairs of a batch. names: of the inputs of the graph, which are those of `TextBatches` and `reference`.

        Errors: InvalidArgumentError for a pair that is longer than `length`, or none.
        """
        if long := [n for n, pair in enumerate(pairs) if max(len(one.ids) for one in pair) > length]:
            raise InvalidArgumentError(f"pair {long[0] + 1} is longer than {length} tokens. Leave it out", "pairs")
        names = [name for name in names if name != "reference"]
        super().__init__([one for pair in pairs for one in pair], 2, length=length, names=names, **more)
        lengths = self._lengths.reshape(-1, 2).max(axis=1)
        arrays: dict[str, np.ndarray] = {
            name: np.asarray(array).reshape(len(pairs), 2, -1) for name, array in self.arrays.items()
        }
        arrays["reference"] = np.zeros(len(pairs), np.float32)
        super(TextBatches, self).__init__(arrays, min(size, len(pairs)), seed=self.seed, shuffle=self.shuffle)
        self._lengths = lengths

    def _take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        batch = {name: np.asarray(self.arrays[name][rows]) for name in self.arrays}
        longest = self._longest(rows)
        return {
            name: value if name == "reference" else value[..., :longest].reshape(2 * len(rows), -1)
            for name, value in batch.items()
        }

    def samples(self) -> Iterator[dict[str, np.ndarray]]:
        """A batch of the first pairs."""
        yield self._take(np.arange(self.size))

    def refer(self, trainer: Trainer, logits: str = "logits") -> None:
        """Take r from the model as it is, for all pairs. logits: the output of that name."""
        reference = np.asarray(self.arrays["reference"])
        for start in range(0, self.rows, self.size):
            rows = np.arange(start, min(start + self.size, self.rows))
            batch = self._take(rows)
            y = np.asarray(trainer.predict(batch)[logits], np.float64)[:, :-1]
            labels = batch["labels"][:, 1:]
            top = y.max(axis=-1, keepdims=True)
            log_p = y - top - np.log(np.exp(y - top).sum(axis=-1, keepdims=True))
            learned = np.take_along_axis(log_p, np.maximum(labels, 0)[..., None], -1)[..., 0]
            sums = np.where(labels == IGNORED, 0, learned).sum(axis=1)
            reference[rows] = sums[::2] - sums[1::2]
