"""What a message adds to a name that nobody knows."""

import difflib
import itertools
import os
from collections.abc import Collection, Iterable

_MOST_FILES = 1000  # of a folder that are looked at


def near(name: str, names: Iterable[str]) -> str:
    """`. Did you mean 'a' or 'b'?` for a name that is not among `names`; without the far where some are very near."""
    names = list(names)
    close = difflib.get_close_matches(name, names, 3, 0.8) or difflib.get_close_matches(name, names, 3, 0.5)
    return f". Did you mean {' or '.join(map(repr, close))}?" if close else ""


def near_file(path: str | os.PathLike[str]) -> str:
    """`near` for a file that is not there, among those beside it."""
    folder, name = os.path.split(os.fspath(path))
    try:
        with os.scandir(folder or ".") as entries:
            return near(name, (e.name for e in itertools.islice(entries, _MOST_FILES) if e.name != name))
    except (OSError, ValueError):  # no folder, or a name that none can have
        return ""


def suggest(name: str, names: Collection[str]) -> str:
    """Near misses, or where there are none, the names that there are."""
    listed = ", ".join(list(names)[:10]) + (", …" if len(names) > 10 else "")
    return near(name, names) or f". There are {listed or 'none'}"
