"""What a message adds to a name that nobody knows."""

import difflib
import itertools
import os
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from onnx import NodeProto, defs

from onnx_backprop.opset.core.errors import InvalidArgumentError

P = ParamSpec("P")
T = TypeVar("T")
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


def explaining(advice: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: arguments that the function does not take are InvalidArgumentErrors with near misses and advice."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except TypeError as e:
                if e.__traceback__ is None or e.__traceback__.tb_next is not None:  # of the function's inside
                    raise
                names = [name for name in signature(function).parameters if name not in ("self", "trainer")]
                unknown = next((name for name in kwargs if name not in names), None)
                initials = {"".join(word[:1] for word in name.split("_")): name for name in names}
                hint = ""
                if unknown is not None:
                    meant = initials.get(unknown)
                    hint = f". Did you mean {meant!r}?" if meant else suggest(unknown, names)
                what = function.__qualname__.removesuffix(".__init__")
                words = str(e).removeprefix(f"{function.__qualname__}() ")
                raise InvalidArgumentError(f"{words}{hint or '.'}{advice and ' '}{advice}", what) from None

        return call

    return decorate


def complaint_of(op_type: str, attributes: Iterable[str]) -> str | None:
    """What is wrong with the name of an operator of ONNX, or with those of its attributes, if anything is."""
    if not defs.has(op_type):
        names = [schema.name for schema in defs.get_all_schemas() if not schema.domain]
        return f"{op_type!r} is no operator of ONNX{near(op_type, names)}"
    known = defs.get_schema(op_type).attributes
    unknown = next((name for name in attributes if name not in known), None)
    return None if unknown is None else f"{op_type} has no attribute {unknown!r}{near(unknown, known)}"


def complaint_of_nodes(nodes: Iterable[NodeProto]) -> str | None:
    """The same of the first of some nodes that it is true of; operators of other domains pass."""
    complaints = (complaint_of(n.op_type, [a.name for a in n.attribute]) for n in nodes if not n.domain)
    return next((words for words in complaints if words), None)
