"""Chunks of a reduction read the cells of the output that they touch, and none beyond it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnx_backprop.ort_ops.interpolation.plan import _chunks


@pytest.mark.parametrize("touched", [[[0], [0], [0]], [[0, 1], [1], [1, 2]], [[], [], []], [[3], [], [1, 2, 3]]])
def test_what_is_read(touched: list[list[int]]) -> None:
    cells = [cell for row in touched for cell in row]
    starts = np.cumsum([0, *map(len, touched)])
    column = SimpleNamespace(starts=starts, indices=np.array(cells, np.int64))
    axis: Any = SimpleNamespace(column=column, out=max(cells, default=0) + 1, length=len(touched))
    ((first, count, low, read),) = _chunks(axis, 1, 1 << 20).tolist()
    assert (first, count) == (0, 3)
    assert (low, read) == ((min(cells), max(cells) + 1 - min(cells)) if cells else (0, 0))
