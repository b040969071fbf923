"""Blocks of int64 whose words have names: dataclasses for Python, loads and stores for compiled code.

    @dataclass(frozen=True, kw_only=True)
    class Rows(Record):
        length: int
        step: Triple

Python makes a block of `Rows(count=…, step=…).words()`; compiled code reads `view(Rows, address).step[2]`. A field is
an `int` or a `bool` (an int64), a `float` (a float64), a tuple of a fixed number of ints, or a record.
"""

from functools import cache
from typing import NamedTuple, TypeVar, get_args, get_type_hints

import numpy as np

Triple = tuple[int, int, int]


class Field(NamedTuple):
    """Where a field lies, in words; `length` is 0 for what is no tuple, `record` None for what is no record."""

    first_word: int
    length: int
    real: bool
    record: "type[Record] | None"

    @property
    def words(self) -> int:
        """How many it has."""
        return size(self.record) if self.record else max(self.length, 1)


class Record:
    """The base of dataclasses that name the words of a block."""

    def words(self) -> list[int]:
        """The block, float64 as their bits."""
        words: list[int] = []
        for name, field in layout(type(self)).items():
            value = getattr(self, name)
            numbers = value.words() if field.record else value if field.length else (value,)
            assert len(numbers) == field.words, f"{name}: {value}"
            words += (int(np.float64(n).view(np.int64)) if field.real else int(n) for n in numbers)
        return words


@cache
def layout(record: type[Record]) -> dict[str, Field]:
    """The fields of a record in their order."""
    fields: dict[str, Field] = {}
    first_word = 0
    for name, kind in get_type_hints(record).items():
        nested = kind if isinstance(kind, type) and issubclass(kind, Record) else None
        fields[name] = Field(first_word, len(get_args(kind)), kind is float, nested)
        first_word += fields[name].words
    return fields


def size(record: type[Record]) -> int:
    """How many words a record has."""
    return sum(field.words for field in layout(record).values())


def offset(record: type[Record], name: str) -> int:
    """Bytes from the start of a record to a field."""
    return 8 * layout(record)[name].first_word


R = TypeVar("R", bound=Record)


def view(record: type[R], address: int, index: int = 0) -> R:
    """For compiled code only: the record at an address, or so many records behind it."""
    raise TypeError(f"{record.__name__} {index} at {address:#x} can be looked at by compiled code only")
