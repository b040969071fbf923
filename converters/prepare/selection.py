"""Choosing tensors: by name, by glob (`layer1.*`), or by regular expression (`re:…` or a compiled pattern).

A tensor has its name in the file and, where the file says them, its name in the module of PyTorch and the names of the
modules around it; a pattern may match any of them.
"""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from onnx import TensorProto

from onnx_backprop.converters.prepare.exporters.origins import origin_of, owner
from onnx_backprop.converters.prepare.load import check_names
from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.opset.core.hints import near, suggest
from onnx_backprop.opset.graphs.lazy import ir

Patterns = Sequence[str | re.Pattern[str]]
Aliases = Mapping[str, Collection[str]]
REGEX = "re:"
_WILDCARDS = frozenset("*?[")
_SHOWN = 8  # names that a warning lists


def aliases(tensors: Iterable[TensorProto | ir.Value]) -> dict[str, tuple[str, ...]]:
    """The names that patterns may choose each tensor by: its own, those in the module, and the modules of these."""
    result: dict[str, tuple[str, ...]] = {}
    for tensor in tensors:
        origin = origin_of(tensor)
        inside = [name for name in (origin.name, *origin.ties, *origin.parts) if name]
        names = dict.fromkeys((str(tensor.name), *inside))
        while inside := [module for name in inside if (module := owner(name))]:
            names.update(dict.fromkeys(inside))
        result[str(tensor.name)] = tuple(names)
    return result


def select(
    argument: str,
    patterns: Patterns,
    names: Iterable[str] | Aliases,
    *,
    exact: Iterable[str] | Aliases = (),
    what: str = "an initializer",
) -> list[str]:
    """The names that any of the patterns chooses; those of one pattern in the order of `names`.

    A string that is a name means what has it, whatever characters it has. A regular expression has to match the whole
    name. A warning tells if a pattern for a module, as `layer1.*`, leaves out tensors of it.

    Args:
        argument: what the caller calls the patterns, for messages.
        patterns: the patterns.
        names: what they choose from; or the names that each may be chosen by.
        exact: further names that are found when they are written out; or the names of each.
        what: what they are, for messages.

    Raises: InvalidArgumentError for a string instead of a list, an empty list, a name given twice, an expression that
    does not compile, and a pattern that matches nothing, with near misses.
    """
    check_names(argument, patterns)
    pool, further = _by_alias(names), _by_alias(exact)
    result: dict[str, None] = {}
    written = set[str | re.Pattern[str]]()  # not what they choose: each name of a tied tensor may be given
    for pattern in patterns:
        if not isinstance(pattern, str | re.Pattern):
            raise InvalidArgumentError(f"expected names or patterns, got {pattern!r}", argument)
        chosen = (pool.get(pattern) or further.get(pattern)) if isinstance(pattern, str) else None
        if chosen:
            if len(chosen) == 1 and pattern in written:
                raise InvalidArgumentError(f"{pattern!r} is given twice", argument)
            written.add(pattern)
            result.update(dict.fromkeys(chosen))
            continue
        matched = _matches(argument, pattern, pool)
        if not matched:
            raise _nothing(argument, pattern, list(pool), {*pool, *further}, what)
        chosen = list(dict.fromkeys(name for alias in matched for name in pool[alias]))
        if isinstance(names, Mapping):
            _warn_of_parts(argument, pattern, set(chosen), names)
        for name in sorted(chosen, key=list(names).index):
            result.setdefault(name)
    return list(result)


def written_out(patterns: Patterns, names: Aliases) -> set[str]:
    """The tensors that patterns name in full, by their own name or those in the module."""
    written = {pattern for pattern in patterns if isinstance(pattern, str)}
    return {name for name, others in names.items() if not written.isdisjoint({name, *_in_full(others)})}


def _in_full(others: Collection[str]) -> set[str]:
    """Names of a tensor without those of the modules that it is in."""
    return {name for name in others if not any(other.startswith(f"{name}.") for other in others)}


def chooses(patterns: Patterns, name: str) -> bool:
    """Whether any of the patterns chooses a tensor that has this name in its module."""
    names = [name]
    while module := owner(names[-1]):
        names.append(module)
    return any(pattern in names or _matches("", pattern, names) for pattern in patterns)


def is_pattern(text: str | re.Pattern[str]) -> bool:
    """Whether a text that is no name can match names as a glob or a regular expression."""
    return not isinstance(text, str) or text.startswith(REGEX) or not _WILDCARDS.isdisjoint(text)


def _by_alias(names: Iterable[str] | Aliases) -> dict[str, list[str]]:
    """Each alias and the names of what has it: a tensor may have the name of a module in which others are."""
    if not isinstance(names, Mapping):
        return {name: [name] for name in names}
    result: dict[str, list[str]] = {name: [name] for name in names}
    for name, others in names.items():
        for alias in others:
            if alias != name:
                result.setdefault(alias, []).append(name)
    return result


def _warn_of_parts(argument: str, pattern: str | re.Pattern[str], chosen: set[str], names: Aliases) -> None:
    """Say which tensors of a module a pattern leaves out that names no tensor in it, as `layer1.*`."""
    text = pattern if isinstance(pattern, str) else pattern.pattern
    if any(map(str.isalpha, text.rpartition(".")[2])):
        return
    modules = {n: {owner(name) for name in _in_full(others)}.intersection(others) for n, others in names.items()}
    partly = set[str]().union(*(modules[n] for n in chosen if len(modules[n]) == 1))  # others are tied
    rest = [n for n in names if n not in chosen and modules[n] & partly]
    if rest:
        shown = ", ".join(map(repr, rest[:_SHOWN])) + (f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else "")
        warn(f"{text!r} chooses a part of the tensors of a module; it leaves out {shown}", argument=argument)


def _matches(argument: str, pattern: str | re.Pattern[str], names: Collection[str]) -> list[str]:
    if isinstance(pattern, str) and not pattern.startswith(REGEX):
        return fnmatch.filter(names, pattern) if is_pattern(pattern) else []
    try:
        compiled = re.compile(pattern[len(REGEX) :]) if isinstance(pattern, str) else pattern
    except re.error as e:
        raise InvalidArgumentError(f"{pattern!r} is not a regular expression: {e}", argument) from e
    return [name for name in names if compiled.fullmatch(name)]


def _nothing(
    argument: str, pattern: str | re.Pattern[str], pool: Sequence[str], known: Iterable[str], what: str
) -> InvalidArgumentError:
    text = pattern if isinstance(pattern, str) else pattern.pattern
    if not is_pattern(pattern):
        hint = near(text, known) or suggest(text, pool)
        return InvalidArgumentError(f"expected the name of {what}, got {text!r}{hint}", argument)
    plain = re.sub(r"[\\*?^$()\[\]|+]", "", text.removeprefix(REGEX))
    kind = what.removeprefix("an ").removeprefix("a ")
    parts = {part for name in pool for part in re.split("[./]", name)}
    hint = near(plain, pool) or near(plain.strip("."), sorted(parts)) or suggest(plain, pool)
    return InvalidArgumentError(f"{text!r} matches no {kind}{hint}", argument)
