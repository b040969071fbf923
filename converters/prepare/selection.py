"""Choosing initializers: by name, by glob (`layer1.*`), or by regular expression (`re:…` or a compiled pattern)."""

import fnmatch
import re
from collections.abc import Iterable, Sequence

from onnx_backprop.converters.prepare.load import check_names
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import near, suggest

Patterns = Sequence[str | re.Pattern[str]]
REGEX = "re:"
_WILDCARDS = frozenset("*?[")


def select(
    argument: str, patterns: Patterns, names: Iterable[str], *, exact: Iterable[str] = (), what: str = "an initializer"
) -> list[str]:
    """The names that any of the patterns chooses; those of one pattern in the order of `names`.

    A string that is a name means that name, whatever characters it has. `names`: what patterns choose from; `exact`:
    further names that are found when they are written out. `what`: what they name, for messages.
    A regular expression has to match the whole name.

    Raises: InvalidArgumentError for a string instead of a list, an empty list, a name given twice, an expression that
    does not compile, and a pattern that matches nothing, with near misses.
    """
    check_names(argument, patterns)
    pool = list(names)
    known = {*pool, *exact}
    result: dict[str, bool] = {}  # name -> whether it was written out
    for pattern in patterns:
        if not isinstance(pattern, str | re.Pattern):
            raise InvalidArgumentError(f"{argument}: expected names or patterns, got {pattern!r}")
        if isinstance(pattern, str) and pattern in known:
            if result.get(pattern):
                raise InvalidArgumentError(f"{argument}: {pattern!r} is given twice")
            result[pattern] = True
            continue
        found = _matches(argument, pattern, pool)
        if not found:
            raise _nothing(argument, pattern, pool, known, what)
        for name in found:
            result.setdefault(name, False)
    return list(result)


def is_pattern(text: str | re.Pattern[str]) -> bool:
    """Whether a text that is no name can match names as a glob or a regular expression."""
    return not isinstance(text, str) or text.startswith(REGEX) or not _WILDCARDS.isdisjoint(text)


def _matches(argument: str, pattern: str | re.Pattern[str], names: Sequence[str]) -> list[str]:
    if isinstance(pattern, str) and not pattern.startswith(REGEX):
        return fnmatch.filter(names, pattern) if is_pattern(pattern) else []
    try:
        compiled = re.compile(pattern[len(REGEX) :]) if isinstance(pattern, str) else pattern
    except re.error as e:
        raise InvalidArgumentError(f"{argument}: {pattern!r} is not a regular expression: {e}") from e
    return [name for name in names if compiled.fullmatch(name)]


def _nothing(
    argument: str, pattern: str | re.Pattern[str], pool: Sequence[str], known: Iterable[str], what: str
) -> InvalidArgumentError:
    text = pattern if isinstance(pattern, str) else pattern.pattern
    if not is_pattern(pattern):
        hint = near(text, known) or suggest(text, pool)
        return InvalidArgumentError(f"{argument}: expected the name of {what}, got {text!r}{hint}")
    plain = re.sub(r"[\\*?^$()\[\]|+]", "", text.removeprefix(REGEX))
    return InvalidArgumentError(f"{argument}: {text!r} matches no {what.partition(' ')[2]}{suggest(plain, pool)}")
