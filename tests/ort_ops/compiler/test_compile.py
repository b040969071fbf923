"""The language of kernels: what it computes beside Python, and what it refuses."""

from __future__ import annotations

import ctypes
import itertools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from onnx_backprop.ort_ops.compiler.decorators import exported, inner
from onnx_backprop.ort_ops.compiler.llvm import BF16, F16, F32, by_type, load_f32
from onnx_backprop.ort_ops.compiler.records import Record, Triple, view
from onnx_backprop.ort_ops.compiler.values import DOUBLE, INT, CompileError

TABLE = (3, 1, 4, 1, 5)

LIMIT = 7

NUMBERS = (-9, -8, -7, -1, 0, 1, 2, 7, 8, 9)

KINDS = {INT: ctypes.c_int64, DOUBLE: ctypes.c_double}


def run(function, *arguments, kinds=(INT, INT, INT)):
    """What the compiled function answers; the kinds of its result and its parameters."""
    compiled = exported(*kinds)(function)
    return ctypes.CFUNCTYPE(*[KINDS[kind] for kind in kinds])(compiled.address)(*arguments)


@inner
def _halves(x, y):
    return (x // 2, x % 2), y


@inner
def _nothing(x):
    if x:
        return
    _halves(x, x)


def divide(x, y):
    return 1000 * (x // y) + x % y


def divide_by_constants(x, y):
    return 1000 * (x // 8) + 100 * (x % 8) + 10 * (y // 3) + y % -3


def compare(x, y):
    chain = -8 <= x < y <= 8
    both = x and y
    return (4 if chain and not both else 2) + (x == y or x > 5) + min(x, y, 3) * max(x, y)


def loop(x, y):
    total = 0
    for i in range(x, y, 2):
        if i == 3:
            continue
        if i > LIMIT:
            break
        total += 10 * i
    for i in range(5, x, -1):
        total -= i
    while total > 100:
        total -= 7
    for n in TABLE:
        if n == y:
            return total + 1000
    return total


def len_of(pair):
    return pair[0] - pair[1]


FUNCTIONS = [divide, divide_by_constants, compare, loop]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_integers_are_those_of_python(function) -> None:
    compiled = exported(INT, INT, INT)(function)
    call = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 3)(compiled.address)
    for x, y in itertools.product(NUMBERS, NUMBERS):
        if y or function is not divide:
            assert call(x, y) == int(function(x, y)), (x, y)


def test_tuples_and_calls() -> None:
    difference = inner(len_of)

    def computed(x, y):
        (quotient, rest), other = _halves(x, y)
        three, total = (x, y, rest), 0
        for axis in range(3):
            total = 3 * total + three[axis]
        if three == (x, y, 1):
            total += 5
        _nothing(x)
        return total + TABLE[y % 5] + difference(three[1:]) + quotient - other

    for x, y in itertools.product(NUMBERS, NUMBERS):
        total = 9 * x + 3 * y + x % 2 + (5 if x % 2 else 0)
        want = total + TABLE[y % 5] + y - x % 2 + x // 2 - y
        assert run(computed, x, y) == want


def test_floats() -> None:
    """float32 stays float32; with an integer or a float64 it becomes float64, as in NumPy."""

    def computed(address, x):
        single = load_f32(address, 0)
        product = single * single - np.float32(0.1)
        return np.sqrt(np.float64(product)) / x + single * x - (1.0 if product > np.float32(2.0) else -0.5)

    values = np.array([3.3], np.float32)
    got = run(computed, values.ctypes.data, 7.0, kinds=(DOUBLE, INT, DOUBLE))
    single = values[0]
    product = single * single - np.float32(0.1)
    assert got == np.sqrt(np.float64(product)) / 7.0 + np.float64(single) * 7.0 - 1.0


@dataclass(kw_only=True)
class Numbers(Record):
    first: int
    three: Triple
    real: float
    true: bool


@dataclass(kw_only=True)
class Outer(Record):
    before: int
    held: Numbers
    after: int


def test_records_in_records() -> None:
    """Their fields are read and stored where they lie."""
    numbers = Numbers(first=2, three=(3, 4, 5), real=0.5, true=True)
    words = np.array(Outer(before=1, held=numbers, after=6).words(), np.int64)
    assert words.tolist() == [1, *numbers.words(), 6]

    def computed(address, index):
        outer = view(Outer, address)
        held = outer.held
        held.first = 7
        x, _, _ = outer.held.three
        return outer.before + 10 * held.three[index] + 100 * x + 1000 * outer.after + 10000 * (held.real == 0.5)

    assert run(computed, words.ctypes.data, 2) == 1 + 50 + 300 + 6000 + 10000
    assert words[1] == 7


def test_arithmetic_of_tuples() -> None:
    """Element by element, nested ones too; a number goes with every element."""
    least: Any = min

    def computed(x, y):
        one, other = ((x, y), 3), ((y, 2), x)
        (a, b), c = one * other - 1  # pyright: ignore[reportOperatorIssue]
        (d, e), f = least(one, other, 5)
        return a + 10 * b + 100 * c + 1000 * d + 10000 * e + 100000 * f

    def want(x, y):
        d, e, f = min(x, y, 5), min(y, 2, 5), min(3, x, 5)
        return x * y - 1 + 10 * (2 * y - 1) + 100 * (3 * x - 1) + 1000 * d + 10000 * e + 100000 * f

    for x, y in itertools.product(NUMBERS, NUMBERS):
        assert run(computed, x, y) == want(x, y)


def test_records() -> None:
    """Fields are read and stored, elements of tuples by an index that is not known before."""
    blocks = [Numbers(first=n, three=(n, 10 * n, 100 * n), real=n / 2, true=n == 2) for n in (1, 2)]
    words = np.array([word for block in blocks for word in block.words()], np.int64)

    def computed(address, index):
        block, other = view(Numbers, address), view(Numbers, address, 1)
        total = other.three[index] + block.three[2] + (1000 if other.true else 0)
        block.first = total + (7 if other.real == 1.0 else 0)
        return block.first

    def unpacked(address, _):
        x, y, z = view(Numbers, address).three
        return x + y + z

    for index in range(3):
        want = (2, 20, 200)[index] + 100 + 1000 + 7
        assert run(computed, words.ctypes.data, index) == want == words[0]
    assert run(unpacked, words.ctypes.data, 0) == 111
    assert words[1:].tolist() == [word for block in blocks for word in block.words()][1:]


def test_functions_as_arguments() -> None:
    """With arguments behind a star; each combination is a function of its own."""

    def first(load, _store, address, index):
        return np.float64(load(address, index))

    of_first: Any = inner(first)
    choose: Any = by_type

    def computed(address, kind):
        return choose(kind, of_first, address, 0)

    values = np.array([1.5, 0, 0, 0], np.float32)
    kinds = (DOUBLE, INT, INT)
    assert run(computed, values.ctypes.data, F32, kinds=kinds) == 1.5
    assert run(computed, values.view(np.float16)[1:].copy().ctypes.data, F16, kinds=kinds) == 1.9375
    assert run(computed, values.view(np.int16)[1:].copy().ctypes.data, BF16, kinds=kinds) == 1.5


def _no_field(address):
    return view(Numbers, address).second  # pyright: ignore[reportAttributeAccessIssue]


def _unlike(x):
    return (x, 1) + (x, 2, 3)  # noqa: RUF005


def _record_stored(address):
    view(Outer, address).held = address


def _listing(x):
    return [x]


def _mixed(x):
    y = 0
    if x:
        y = 1.5
    return y


def _element_of_unlike(x):
    return (1, 1.5)[x]


def _unknown(x):
    return x + never_defined  # noqa: F821 # pyright: ignore[reportUndefinedVariable]


@pytest.mark.parametrize(
    "function", [_listing, _mixed, _element_of_unlike, _unknown, _unlike, _no_field, _record_stored]
)
def test_what_is_not_in_the_language_is_refused_with_its_line(function) -> None:
    line = function.__code__.co_firstlineno
    with pytest.raises(CompileError, match=r"test_compile\.py:(\d+)") as caught:
        _ = exported(INT, INT)(function).address
    match = re.search(r"\.py:(\d+)", str(caught.value))
    assert match
    assert line < int(match[1]) < line + 5
