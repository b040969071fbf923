"""Examples as batches of rows of one length, the loss of the next token, and what a mean loss says as a perplexity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from onnx_backprop.converters.training.losses import Loss, SoftmaxCrossEntropy
from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.text.tokenizer import IGNORED, Tokens
from onnx_backprop.training.data.batches import Batches
from onnx_backprop.training.trainer import Trainer

_STEP = 8  # rows are as long as a multiple of this, so that few lengths occur


def loss() -> Loss:
    """The cross entropy of the labels of `TextBatches`."""
    return SoftmaxCrossEntropy(axis=-1, ignore_index=IGNORED)


class TextBatches(Batches):
    """Batches of examples: input_ids, labels, attention_mask and position_ids, each (B, T) int64.

    Rows end in padding, whose mask is 0 and whose label `IGNORED`; T is the longest of a batch, in steps of 8.
    A text longer than `length` becomes several rows, in which each token is learned once; an example with a prompt is
    cut.
    """

    def __init__(
        self, examples: Sequence[Tokens], size: int, *, length: int, pad: int = 0, seed: int = 0, shuffle: bool = True
    ) -> None:
        """Warns: OnnxBackpropWarning for examples that are cut. Errors: InvalidArgumentError for none, or a length < 2.

        pad: the token that fills rows up.
        """
        if length < 2:
            raise InvalidArgumentError(f"length: expected 2 or more, got {length}")
        parts = [part for example in examples for part in _parts(example, length)]
        cut = sum(len(ids) > length and IGNORED in labels[1:] for ids, labels in examples)
        if cut:
            warn(
                f"length: {cut} of {len(examples)} examples have more than {length} tokens; what is behind is left out"
            )
        parts = [part for part in parts if (part.labels[1:] != IGNORED).any()]
        if not parts:
            raise InvalidArgumentError(f"examples: expected at least one with something to learn in {length} tokens")
        longest = max(len(part.ids) for part in parts)
        shape = (len(parts), -(-longest // _STEP) * _STEP)
        arrays = {name: np.zeros(shape, np.int64) for name in ("input_ids", "labels", "attention_mask", "position_ids")}
        arrays["input_ids"][:] = pad
        arrays["labels"][:] = IGNORED
        for row, (ids, labels) in enumerate(parts):
            count = len(ids)
            arrays["input_ids"][row, :count] = ids
            arrays["labels"][row, : count - 1] = labels[1:]  # of each place the token behind it
            arrays["attention_mask"][row, :count] = 1
            arrays["position_ids"][row, :count] = np.arange(count)
        super().__init__(arrays, min(size, len(parts)), seed=seed, shuffle=shuffle)

    def only(self, names: Iterable[str]) -> TextBatches:
        """These batches with the arrays of some names alone, as a graph takes them; in place."""
        self._lengths = self.arrays["attention_mask"].sum(axis=1)
        self.arrays = {name: self.arrays[name] for name in names}
        return self

    @property
    def learned(self) -> int:
        """How many tokens an epoch learns."""
        return int((self.arrays["labels"] != IGNORED).sum())

    def _take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        lengths = self._lengths if "attention_mask" not in self.arrays else self.arrays["attention_mask"].sum(axis=1)
        longest = -(-int(lengths[rows].max(initial=1)) // _STEP) * _STEP
        return {name: array[rows, :longest] for name, array in self.arrays.items()}


def perplexity(trainer: Trainer, batches: TextBatches) -> float:
    """exp of the mean over all tokens of -log p(token): 1 for a model that knows them, V for one that guesses."""
    total, count = 0.0, 0
    for batch in batches:
        tokens = int((batch["labels"] != IGNORED).sum())
        total += tokens * trainer.evaluate(batch)
        count += tokens
    return math.exp(min(total / count, 700.0))


def _parts(example: Tokens, length: int) -> Iterator[Tokens]:
    """The rows of an example: of a text that is learned whole all its windows, which share a token."""
    whole = (example.labels[1:] != IGNORED).all()
    last = max(len(example.ids) - 1, 1) if whole else 1
    for start in range(0, last, length - 1):
        yield Tokens(*(array[start : start + length] for array in example))
