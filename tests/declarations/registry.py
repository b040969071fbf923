"""All declarations, read off tests/operators: a module there lists those that it has as `OPERATORS`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np

from tests.declarations.calls import Call, Large
from tests.declarations.declaration import AUTO_PAD, Attributes, Bad, Declaration, Value, invalid

DECLARED: dict[str, Declaration] = {
    declaration.op: declaration
    for path in sorted((Path(__file__).parents[1] / "operators").glob("*.py"))
    for declaration in getattr(import_module(f"tests.operators.{path.stem}"), "OPERATORS", ())
}
EXAMPLES = [example for declaration in DECLARED.values() for example in declaration.examples]
VALID = {op: declaration.valid for op, declaration in DECLARED.items()}


def _not_among_the_choices(declaration: Declaration) -> Iterator[Bad]:
    """Of each attribute with choices one in other letters; where these are free, as in auto_pad, another word."""
    for name, (_, _, *choices) in declaration.schema.attributes.items():
        for allowed in choices:
            wrong = "SAME" if allowed == AUTO_PAD[2] else allowed[-1].swapcase()
            message = f"attribute {name}: expected one of {', '.join(allowed)}, got {wrong!r}"
            yield invalid(declaration.op, message, {name: wrong})


REFUSED = [bad for d in DECLARED.values() for bad in (*d.refused, *_not_among_the_choices(d))]


def spoilt(bad: Bad) -> tuple[Attributes, list[Value]]:
    """The attributes and inputs of a bad call."""
    return DECLARED[bad.op].spoilt(bad)


def random_call(rng: np.random.Generator, op: str | None = None) -> Call:
    """A large valid call, of any operator unless one is named."""
    draws = Large(rng)
    return DECLARED[op or draws.pick(*DECLARED)].calls(draws)
