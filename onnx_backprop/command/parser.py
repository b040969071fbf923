"""Commands as records, and their parser: a complaint is one line, with near misses and the help to ask for."""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Literal, NoReturn

from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import near

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)", re.S)


# what becomes of the file that an argument names; rows may lie in a folder, a model's weights beside it
File = Literal["read", "rows", "written", "written model"]


@dataclass(frozen=True)
class Argument:
    """An argument of a command: its names and what argparse takes of it.

    file: what becomes of the file that it names. also: what else the library calls it. least: of a number.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any]
    file: File | None = None
    also: str = ""
    least: int | None = None

    @property
    def dest(self) -> str:
        """The attribute of the namespace that holds its value, and what the library calls it."""
        long = next((name for name in self.names if name.startswith("--")), self.names[0])
        return str(self.settings.get("dest", long.strip("-").replace("-", "_")))


def argument(
    *names: str, file: File | None = None, also: str = "", least: int | None = None, **settings: Any
) -> Argument:
    """An argument as `add_argument` of argparse takes it; a number has the type of its default."""
    if isinstance(default := settings.get("default"), int | float):
        settings.setdefault("type", type(default))
    return Argument(names, settings, file, also, least)


flag = partial(argument, action="store_true")


@dataclass(frozen=True)
class Command:
    """A command: what it calls for its exit code, and its arguments, some of them in groups.

    takes_rest: what the parser does not know goes to the command, `--help` too.
    """

    run: Callable[[argparse.Namespace], int]
    arguments: Sequence[Argument] = ()
    groups: Mapping[str, Sequence[Argument]] = field(default_factory=dict)
    description: str | None = None
    usage: str | None = None
    takes_rest: bool = False

    def all_arguments(self) -> Iterator[Argument]:
        """Those in groups too."""
        yield from self.arguments
        for arguments in self.groups.values():
            yield from arguments

    def check_numbers(self, values: argparse.Namespace) -> None:
        """InvalidArgumentError for one that is not finite or below the least."""
        for each in self.all_arguments():
            number = getattr(values, each.dest)
            if each.least is not None and not each.least <= number < inf:
                raise InvalidArgumentError(f"{each.names[0]}: expected {each.least} or more, got {number}")

    def refuse_options(self, values: argparse.Namespace, reason: str, *dests: str) -> None:
        """InvalidArgumentError for an argument that has another value than its default, and no effect for a reason."""
        for each in self.all_arguments():
            if each.dest in dests and getattr(values, each.dest) != each.settings.get("default"):
                raise InvalidArgumentError(f"{each.names[0]}: {reason}")

    def add_to(self, parsers: Any, name: str, sentence: str) -> None:
        """Add its parser, and the sentence that says what it does, to the sub-parsers of another."""
        parser = parsers.add_parser(
            name, help=sentence, usage=self.usage, description=self.description, add_help=not self.takes_rest
        )
        for title, arguments in {"": self.arguments, **self.groups}.items():
            target = parser.add_argument_group(title) if title else parser
            for each in arguments:
                target.add_argument(*each.names, **each.settings)
        parser.set_defaults(command=self, parser=parser)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are InvalidArgumentErrors."""

    def error(self, message: str) -> NoReturn:
        """What argparse finds to be wrong; for a choice that there is not with near misses, a missing one with all."""
        choice = _CHOICE.search(message)
        missing = set(message.partition("are required: ")[2].split(", "))
        listed = [a for a in self._actions if a.choices and missing & set(a.option_strings)]
        hint = "".join(f". {a.option_strings[0]} is one of {', '.join(map(str, a.choices or ()))}." for a in listed)
        self._complain(message, near(choice[1], re.split(r"[', ]+", choice[2])) if choice else hint)

    def unrecognized(self, arguments: Sequence[str]) -> NoReturn:
        """What `parse_known_args` leaves; with near misses for an option."""
        options = [option for action in self._actions for option in action.option_strings]
        unknown = next((text for text in arguments if text.startswith("-")), "").partition("=")[0]
        initials = [o for o in options if unknown == "--" + "".join(word[0] for word in o.strip("-").split("-"))]
        hint = f". Did you mean {initials[0]!r}?" if len(initials) == 1 and len(unknown) > 3 else near(unknown, options)
        self._complain(f"unrecognized arguments: {' '.join(arguments)}", hint if unknown else "")

    def _complain(self, message: str, hint: str) -> NoReturn:
        raise InvalidArgumentError(f"{message}{hint or '.'} `{self.prog} --help` explains the arguments")
