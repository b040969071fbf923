"""The answer as one table: each tensor, its name in the module, its numbers, and whether it is trained or why not."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from onnx_backprop.converters import pages
from onnx_backprop.converters.tables import table
from onnx_backprop.opset.core.errors import printable

TRAINED, FROZEN, STATISTIC = "trained", "frozen", "statistic"
_ROWS = 16  # that a page lists at once
_HEADER = ("tensor", "in the module", "shape", "numbers", "share", "")
_MODULE, _NUMBERS = 1, (2, 3, 4)


class Row(NamedTuple):
    """A tensor of a file.

    name: in the file. module: in the module of PyTorch, "" if it is unknown or the same. state: "trained", "frozen",
    "statistic", or what it is that is no parameter. doubt: why that is not sure, "" if it is.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    state: str
    doubt: str = ""

    @property
    def numbers(self) -> int:
        """How many elements it has."""
        return prod(self.shape)


def lines(rows: Sequence[Row], *, most: int | None = None) -> list[str]:
    """The table as text. most: rows to show, None for all."""
    total = sum(row.numbers for row in rows) or 1
    cells: list[tuple[str, ...]] = [_cells(row, total) for row in rows[:most]]
    if len(cells) < len(rows):
        cells.append((f"… and {len(rows) - len(cells)} more", *[""] * (len(_HEADER) - 1)))
    kept = [n for n in range(len(_HEADER)) if n != _MODULE or any(row.module for row in rows)]
    numbers = [kept.index(n) for n in _NUMBERS]
    return table([_HEADER[n] for n in kept], [[row[n] for n in kept] for row in cells], numbers=numbers)


def page(rows: Sequence[Row]) -> str:
    """The table as a part of a page."""
    total, largest = sum(row.numbers for row in rows) or 1, max((row.numbers for row in rows), default=0) or 1
    cells: list[list[pages.Cell]] = []
    for row in rows:
        name, module, shape, numbers, share, state = _cells(row, total)
        verdict = pages.Verdict(state, None if row.doubt else row.state == TRAINED or None)
        cells.append([name, module, shape, pages.Bar(numbers, row.numbers / largest), share, verdict])
    return pages.table(_HEADER, cells, numbers=_NUMBERS, most=_ROWS)


def counted(rows: Sequence[Row]) -> str:
    """How many numbers are trained, frozen and so on, in one sentence."""
    groups = {TRAINED: 0, FROZEN: 0, STATISTIC: 0, "left out": 0}
    for row in rows:
        groups[row.state if row.state in groups else "left out"] += row.numbers
    total = sum(groups.values())
    counts = ", ".join(f"{count:,} {group}" for group, count in groups.items() if count)
    return f"{counts or 0}" + (f" ({groups[TRAINED] / total:.1%} trained)" if total else "")


def _cells(row: Row, total: int) -> tuple[str, str, str, str, str, str]:
    state = f"{row.state}? {row.doubt}" if row.doubt else row.state
    shape = "×".join(map(str, row.shape)) or "scalar"
    share = f"{row.numbers / total:.1%}"
    return printable(row.name), printable(row.module), shape, f"{row.numbers:,}", share, printable(state)
