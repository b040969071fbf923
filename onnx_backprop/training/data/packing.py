"""Several tokenised texts in one row: positions, labels and the mask that keeps them apart."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError

_LOWEST = -65504  # which float16 holds; below it a softmax in float32 has nothing left


def pack(
    texts: Iterable[Sequence[int]],
    length: int,
    *,
    labels: Iterable[Sequence[int]] | None = None,
    pad: int = 0,
    ignore_index: int = -100,
    cut: bool = False,
) -> dict[str, np.ndarray]:
    """Texts packed one after the other into rows of `length` tokens: each goes into the first row that has room.

        arrays = ob.pack([[1, 4, 2], [3, 5, 2]], 8)  # [[1, 4, 2, 3, 5, 2, 0, 0]], as tokenizers number texts
        batches = ob.Batches(arrays, size=1)

    Args:
        texts: the token ids of each.
        length: of a row.
        labels: of each text, with its length, and `ignore_index` where nothing is learned, as in a question. Default:
            the ids themselves.
        pad: the id that fills the rest of a row.
        ignore_index: the label there, and of the first token of every text, since no token of it comes before.
        cut: take the first `length` tokens of a longer text.

    Returns: int64 arrays of the shape (rows, length): `input_ids`; `labels`, of the tokens themselves as
    `losses.NextToken` takes them; `position_ids`, from 0 in every text; `segment_ids`, 1, 2, … and 0 after the last
    text; `attention_mask`, 1 where there is a text. That mask does not keep texts apart, see `packed_bias`.
    Errors: InvalidArgumentError for no texts, one without tokens or longer than a row, labels of another length.
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise InvalidArgumentError(f"length: expected 1 or more, got {length!r}")
    ids = [_whole("texts", n, text) for n, text in enumerate(texts)]
    targets = ids if labels is None else [_whole("labels", n, text) for n, text in enumerate(labels)]
    if not ids or len(ids) != len(targets):
        raise InvalidArgumentError(f"texts: expected one or more, with labels for each, got {len(ids)}, {len(targets)}")
    for n, (text, target) in enumerate(zip(ids, targets, strict=True)):
        if not len(text) or len(target) != len(text):
            raise InvalidArgumentError(
                f"texts: expected one token or more and as many labels, got {len(text)} and {len(target)} in text {n}"
            )
        if len(text) > length and not cut:
            raise InvalidArgumentError(
                f"texts: expected at most {length} tokens, got {len(text)} in text {n}. cut=True takes the first ones"
            )
    places, rows = _first_fit([min(len(text), length) for text in ids], length)
    kept = {"input_ids": pad, "labels": ignore_index, "position_ids": 0, "segment_ids": 0, "attention_mask": 0}
    arrays = {name: np.full((rows, length), value, np.int64) for name, value in kept.items()}
    segments = np.zeros(rows, np.int64)
    for (row, start), text, target in zip(places, ids, targets, strict=True):
        count = min(len(text), length)
        at = (row, slice(start, start + count))
        segments[row] += 1
        arrays["input_ids"][at], arrays["labels"][at] = text[:count], target[:count]
        arrays["labels"][row, start] = ignore_index
        arrays["position_ids"][at], arrays["segment_ids"][at] = np.arange(count), segments[row]
        arrays["attention_mask"][at] = 1
    return arrays


def packed_bias(
    segment_ids: Any = None, *, position_ids: Any = None, window: int | None = None, dtype: Any = np.float32
) -> np.ndarray:
    """A bias for attention scores so that a token reads only the tokens before it in its own text: 0 or -65504.

    bias[b, 0, i, j] = 0 where j <= i and segments[b, i] = segments[b, j], and i - j < window if that is given.

    Args:
        segment_ids: (B, T), whole numbers, one for each text of a row, as `pack` gives them.
        position_ids: an alternative; a text begins where they are 0.
        window: how many tokens one reads, including itself.
        dtype: a float, or bool for a mask that is True where a token is read.

    Returns: (B, 1, T, T). A token after the last text reads at least itself, so no row of scores is empty.
    Errors: InvalidArgumentError for both or neither, other shapes and types, positions that do not count up from 0.
    """
    if (segment_ids is None) == (position_ids is None):
        raise InvalidArgumentError("packed_bias: expected segment_ids or position_ids. Give one of them")
    name = "segment_ids" if position_ids is None else "position_ids"
    given = np.asarray(segment_ids if position_ids is None else position_ids)
    if given.ndim != 2 or given.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{name}: expected whole numbers of the shape (batch, time), got {given.dtype} of shape {given.shape}"
        )
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise InvalidArgumentError(f"window: expected None or 1 or more, got {window!r}")
    if position_ids is not None:
        if (given[:, :1] != 0).any() or ((given[:, 1:] != 0) & (given[:, 1:] != given[:, :-1] + 1)).any():
            raise InvalidArgumentError("position_ids: expected numbers that count up from 0 in every text")
        given = np.cumsum(given == 0, axis=1)
    order = np.arange(given.shape[1])
    back = order[:, None] - order
    near = (back >= 0) & (window is None or back < window)
    seen = ((given[:, :, None] == given[:, None, :]) & near)[:, None]
    return seen if np.dtype(dtype).kind == "b" else np.where(seen, 0, _LOWEST).astype(dtype)


def _whole(what: str, n: int, values: Sequence[int]) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"{what}: expected a list of whole numbers, got {array.dtype} {array.shape} as {n}")
    return array.astype(np.int64)


def _first_fit(lengths: Sequence[int], most: int) -> tuple[list[tuple[int, int]], int]:
    """The row and the place in it of each text, and the number of rows."""
    room = np.zeros(len(lengths), np.int64)
    places: list[tuple[int, int]] = []
    rows = 0
    for length in lengths:
        fits = room[:rows] >= length
        row = int(fits.argmax()) if fits.any() else rows
        if row == rows:
            room[row], rows = most, rows + 1
        places.append((row, int(most - room[row])))
        room[row] -= length
    return places, rows
