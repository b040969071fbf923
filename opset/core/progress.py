"""Progress bars of tqdm where a person is watching: on a terminal, or in a notebook."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

_hidden: ContextVar[bool] = ContextVar("hidden", default=False)
_T = TypeVar("_T")


def watched() -> bool:
    """Whether a person sees the standard error while it is written."""
    stream = sys.stderr
    if _hidden.get() or stream is None:
        return False
    return stream.isatty() or _of_notebook(stream)


def in_notebook() -> bool:
    """Whether what is displayed goes to a notebook, and a person is to see it."""
    return not _hidden.get() and _of_notebook(sys.stderr)


def _of_notebook(stream: Any) -> bool:
    return type(stream).__module__ == "ipykernel.iostream"


@contextmanager
def hidden(*, really: bool = True) -> Iterator[None]:
    """A block in which no bar is shown."""
    token = _hidden.set(_hidden.get() or really)
    try:
        yield
    finally:
        _hidden.reset(token)


def note(text: str) -> None:
    """Tell a person who is watching what takes a while from now on."""
    if watched():
        sys.stderr.write(f"{text} …\n")
        sys.stderr.flush()


def bar(**options: Any) -> Any:
    """A bar of tqdm with these options, a widget in a notebook; one that is never seen where nobody is watching."""
    return _tqdm()(**options) if watched() else _Unseen()


def shown(items: Iterable[_T], *, what: str = "differentiating", unit: str = "node") -> Iterable[_T]:
    """The items, with a bar while they are gone through, where a person is watching for longer than half a second."""
    return _tqdm()(items, desc=what, unit=unit, leave=False, delay=0.5) if watched() else items


def _tqdm() -> Any:
    import tqdm  # not before: it takes 40 ms and imports asyncio

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tqdm.TqdmWarning)  # without ipywidgets a notebook gets bars of text
        from tqdm.auto import tqdm as bars
    return bars


class _Unseen:
    """What is asked of a bar, doing nothing."""

    n = 0

    def __enter__(self) -> "_Unseen":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: int = 1) -> None:
        """Move on."""
        self.n += count

    def set_description_str(self, text: str, refresh: bool = True) -> None:
        """Nothing."""

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
