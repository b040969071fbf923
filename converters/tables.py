"""Text for people: tables, and lines that are broken between words where a terminal would break them anywhere."""

import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise, zip_longest
from typing import TextIO

from onnx_backprop.opset.core.errors import printable

_GAP = "  "
PIPED = 100  # characters of a table's line that a command writes to a file or a pipe
_piped: ContextVar[int | None] = ContextVar("piped", default=None)


def columns(stream: TextIO | None = None) -> int | None:
    """Characters of a line of a terminal; None for files and pipes, whose lines stay whole, but for tables.

    stream: that the text is for; default: the standard output.
    """
    stream = sys.stdout if stream is None else stream
    if stream is None or not stream.isatty():
        return None
    return shutil.get_terminal_size((80, 24)).columns


def wrapped(text: str, stream: TextIO | None = None) -> str:
    """A text whose lines fit on the terminal, broken between words; what is broken goes on two places further in."""
    width = columns(stream)
    if width is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _Words(width).wrap(line) or [""])


@contextmanager
def fitting(characters: int = PIPED) -> Iterator[None]:
    """A block in which tables for files and pipes have lines of so many characters."""
    token = _piped.set(characters)
    try:
        yield
    finally:
        _piped.reset(token)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> list[str]:
    """Lines of columns as wide as their widest cell; the columns of the given `numbers` stand to the right.

    Cells are broken where the lines would not fit on the terminal, or in those of `fitting`: between words and behind
    the /, ; and . of names. Where that is not enough, a row is a paragraph that names its columns.
    """
    lines = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[n]) for row in lines) for n in range(len(header))]
    room = columns() or _piped.get()
    if room is not None and not _narrowed(widths, lines, room - len(_GAP) * (len(header) - 1)):
        head, *others = lines
        paragraphs = (
            "; ".join(f"{name}: {cell}" if name else cell for name, cell in zip(head, row, strict=True) if cell)
            for row in others
        )
        return [part for text in paragraphs for part in _Words(room).wrap(text)]
    aligned = [f"{'>' if n in numbers else '<'}{width}" for n, width in enumerate(widths)]
    return [
        _GAP.join(f"{cell:{a}}" for cell, a in zip(parts, aligned, strict=True)).rstrip()
        for row in lines
        for parts in zip_longest(*(_broken(cell, w) for cell, w in zip(row, widths, strict=True)), fillvalue="")
    ]


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """A curve of at most so many characters, each the mean of its share of the values, from ▁, the least, to █.

    Logarithmic when all values are above 0 and span a factor of 20.
    """
    count = min(width, len(values))
    ends = [len(values) * n // count for n in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    if min(means) > 0 and max(means) > 20 * min(means):
        means = [math.log(m) for m in means]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[int(7 * (m - low) / (high - low)) if high > low else 0] for m in means)


def format_bytes(count: float) -> str:
    """A size of memory or of a file."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def _narrowed(widths: list[int], lines: Sequence[Sequence[str]], room: int) -> bool:
    """Take from the widest columns until they fit; False where they do not, and stay."""
    least = [max(len(piece) for row in lines for piece in _Names.wordsep_re.split(row[n])) for n in range(len(widths))]
    if sum(least) > room:
        return False
    while sum(widths) > room:
        widths[max((w > least[n], w, n) for n, w in enumerate(widths))[2]] -= 1
    return True


def _broken(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else _Names(width).wrap(cell)


class _Words(textwrap.TextWrapper):
    """Breaks between words alone."""

    def __init__(self, width: int) -> None:
        super().__init__(width, subsequent_indent=_GAP, break_long_words=False, break_on_hyphens=False)
        self.drop_whitespace = True


class _Names(textwrap.TextWrapper):
    """Breaks between words, and behind the separators in names."""

    wordsep_re = re.compile(r"(\s+|(?<=[/.:;])(?=\w))")

    def __init__(self, width: int) -> None:
        super().__init__(width, break_long_words=False)

    def _split(self, text: str) -> list[str]:
        return [piece for piece in self.wordsep_re.split(text) if piece]
