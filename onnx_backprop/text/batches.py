"""`TextBatches`: examples as batches of rows of one length, for `losses.NextToken`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.text.tokenizer import IGNORED, Tokens
from onnx_backprop.training.data.batches import Batches

_STEP = 8  # rows are as long as a multiple of this, so that few lengths occur


class TextBatches(Batches):
    """Batches of examples: input_ids, labels, attention_mask and position_ids, each (B, T) int64.

    Rows end in padding, whose mask is 0 and whose label `IGNORED`; T is the longest of a batch, in steps of 8.
    A text longer than `length` becomes several rows, in which each token is learned once; an example with a prompt is
    cut.
    """

    def __init__(
        self, examples: Sequence[Tokens], size: int, *, length: int, pad: int = 0, seed: int = 0, shuffle: bool = True
    ) -> None:
        """pad: the token that fills rows up. Warns and errors: as `windows`."""
        parts = windows(examples, length)
        longest = max(len(part.ids) for part in parts)
        shape = (len(parts), -(-longest // _STEP) * _STEP)
        arrays = {name: np.zeros(shape, np.int64) for name in ("input_ids", "labels", "attention_mask", "position_ids")}
        arrays["input_ids"][:] = pad
        arrays["labels"][:] = IGNORED
        for row, (ids, labels) in enumerate(parts):
            count = len(ids)
            arrays["input_ids"][row, :count] = ids
            arrays["labels"][row, :count] = labels
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
        return int((self.arrays["labels"][:, 1:] != IGNORED).sum())

    def _take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        lengths = self._lengths if "attention_mask" not in self.arrays else self.arrays["attention_mask"].sum(axis=1)
        longest = -(-int(lengths[rows].max(initial=1)) // _STEP) * _STEP
        return {name: array[rows, :longest] for name, array in self.arrays.items()}


def windows(examples: Sequence[Tokens], length: int) -> list[Tokens]:
    """The examples in `length` tokens each at most, and those that have something to learn there.

    Of a text that is learned whole all its windows, which share a token; an example with a prompt is cut.
    Warns: OnnxBackpropWarning for examples that are cut. Errors: InvalidArgumentError for none, or a length below 2.
    """
    if length < 2:
        raise InvalidArgumentError(f"expected 2 or more, got {length}", "length")
    result: list[Tokens] = []
    cut = 0
    for example in examples:
        whole = bool((example.labels[1:] != IGNORED).all())
        last = max(len(example.ids) - 1, 1) if whole else 1
        parts = [Tokens(*(x[start : start + length] for x in example)) for start in range(0, last, length - 1)]
        result += [part for part in parts if (part.labels[1:] != IGNORED).any()]
        cut += len(example.ids) > length and not whole
    if cut:
        text = f"{cut} of {len(examples)} examples are longer than {length} tokens; what is behind is left out"
        warn(text, argument="length")
    if not result:
        raise InvalidArgumentError(f"expected at least one with something to learn in {length} tokens", "examples")
    return result
