"""What a message adds to a name that nobody knows."""

import difflib
from collections.abc import Collection, Iterable


def near(name: str, names: Iterable[str]) -> str:
    """`. Did you mean 'a' or 'b'?` for a name that is not among `names`."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f". Did you mean {' or '.join(map(repr, close))}?" if close else ""


def suggest(name: str, names: Collection[str]) -> str:
    """Near misses, or where there are none, the names that there are."""
    listed = ", ".join(list(names)[:10]) + (", …" if len(names) > 10 else "")
    return near(name, names) or f". There are {listed or 'none'}"
