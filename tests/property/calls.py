"""Hypothesis strategies: valid calls of every operator, over all attributes, layouts, ranks and small lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from hypothesis import strategies as st

from tests.declarations.calls import Call, Draws, Small
from tests.declarations.registry import DECLARED
from tests.operators.convolution.calls import Correlation, correlation

T = TypeVar("T")


@st.composite
def drawn(draw: st.DrawFn, calls: Callable[[Draws], T]) -> T:
    """What a declaration's function draws."""
    return calls(Small(draw))


def correlations(*, transposed: bool) -> st.SearchStrategy[Correlation]:
    return drawn(partial(correlation, transposed=transposed))


CALLS: dict[str, Callable[[], st.SearchStrategy[Call]]] = {
    op: partial(drawn, declaration.calls) for op, declaration in DECLARED.items()
}
