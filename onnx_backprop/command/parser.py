"""The parser of the command: a complaint is one line, with near misses and the help to ask for."""

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.hints import near

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)", re.S)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are InvalidArgumentErrors."""

    def error(self, message: str) -> NoReturn:
        """What argparse finds to be wrong; for a choice that there is not with near misses."""
        choice = _CHOICE.search(message)
        self._complain(message, near(choice[1], re.split(r"[', ]+", choice[2])) if choice else "")

    def unrecognized(self, arguments: Sequence[str]) -> NoReturn:
        """What `parse_known_args` leaves; with near misses for an option."""
        options = [option for action in self._actions for option in action.option_strings]
        unknown = next((text for text in arguments if text.startswith("-")), "").partition("=")[0]
        self._complain(f"unrecognized arguments: {' '.join(arguments)}", near(unknown, options) if unknown else "")

    def _complain(self, message: str, hint: str) -> NoReturn:
        raise InvalidArgumentError(f"{message}{hint or '.'} `{self.prog} --help` explains the arguments")
