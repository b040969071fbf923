"""`TextBatches`: examples as batches of rows of one length, for `losses.NextToken`."""

from collections.abc import Iterable, Sequence

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.text.tokenizer import IGNORED, Tokens
from onnx_backprop.training.data import packing
from onnx_backprop.training.data.batches import Batches

_NAMES = ("input_ids", "labels", "attention_mask", "position_ids")


class TextBatches(Batches):
    """Batches of examples: input_ids, labels, attention_mask and position_ids, each (B, T) int64.

    A label is the token itself, or `IGNORED` where nothing is learned: in prompts, in padding, and for the first token
    of an example. Rows end in padding, whose mask is 0; T is the longest of a batch, in steps of `step`.

    learned: how many tokens an epoch learns.
    """

    def __init__(
        self,
        examples: Sequence[Tokens],
        size: int,
        *,
        length: int,
        pad: int = 0,
        pack: bool = False,
        step: int = 8,
        names: Iterable[str] = _NAMES,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """length: the most tokens of a row; longer examples are cut by `windows`, with its warnings and errors.

        pad: the token that fills up rows. pack: put as many examples into a row as fit, one after the other; the
        positions of each start at 0. A token then also sees other examples before it in its row, unless the model
        separates them by their positions. step: row lengths are multiples of it, so that few lengths occur. names: the
        arrays of a batch, as a graph takes them.
        """
        parts = sorted(windows(examples, length), key=lambda part: -len(part.ids) if pack else 0)
        self._step = step
        width = length if pack else -(-max(len(part.ids) for part in parts) // 8) * 8
        rows = [
            packing.pack(
                [one.ids.tolist() for one in some], width, labels=[one.labels.tolist() for one in some], pad=pad
            )
            for some in ([parts] if pack else [[part] for part in parts])
        ]
        arrays = {name: np.concatenate([row[name] for row in rows]) for name in _NAMES}
        self._lengths = arrays["attention_mask"].sum(axis=1)
        self.learned = int((arrays["labels"] != IGNORED).sum())
        chosen = {name: arrays[name] for name in names}
        super().__init__(chosen, min(size, len(self._lengths)), seed=seed, shuffle=shuffle)

    def _take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        longest = self._longest(rows)
        return {name: np.asarray(array[rows])[:, :longest] for name, array in self.arrays.items()}

    def _longest(self, rows: np.ndarray) -> int:
        return -(-int(self._lengths[rows].max(initial=1)) // self._step) * self._step


def windows(examples: Sequence[Tokens], length: int) -> list[Tokens]:
    """The examples in at most `length` tokens each, without those that then have nothing to learn.

    A text that is learned whole gives all its windows, which share a token; an example with a prompt is cut.
    Warns: OnnxBackpropWarning for examples that are cut. Errors: InvalidArgumentError for none, or a length below 2.
    """
    if length < 2:
        raise InvalidArgumentError(f"expected 2 or more, got {length}", "length")
    result: list[Tokens] = []
    cut = 0
    for ids, labels in examples:
        whole = bool((labels[1:] != IGNORED).all())
        for start in range(0, max(len(ids) - 1, 1) if whole else 1, length - 1):
            part = Tokens(ids[start : start + length], labels[start : start + length])
            result += [part] if (part.labels[1:] != IGNORED).any() else []
        cut += len(ids) > length and not whole
    if cut:
        text = f"{cut} of {len(examples)} examples are longer than {length} tokens; what is behind is left out"
        warn(text, argument="length")
    if not result:
        raise InvalidArgumentError(f"expected at least one with something to learn in {length} tokens", "examples")
    return result
