"""The command `onnx-backprop`: convert a model, check or explain its gradients, train it, list operators, run the demo.

Bad input ends in one line on stderr and exit code 2, an interruption in exit code 130; a result file is complete
or not there at all. `check` and `explain` end in exit code 1 when a
gradient is not right, or not there.
"""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from onnx_backprop.command import commands
from onnx_backprop.command.commands import command
from onnx_backprop.command.files import check_files
from onnx_backprop.command.options import as_options, limits_of
from onnx_backprop.command.parser import Argument, Parser
from onnx_backprop.converters.tables import fitting, wrapped
from onnx_backprop.opset.core.errors import OnnxBackpropError, OnnxBackpropWarning, UnsupportedOpError
from onnx_backprop.opset.core.progress import hidden
from onnx_backprop.opset.extensions import load_extensions
from onnx_backprop_command import PROGRAM, parser_of, summaries


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file in an old encoding gets question marks for what it lacks
            stream.reconfigure(errors="replace")
    known: list[Argument] = []  # the arguments of the command that runs
    try:
        load_extensions()  # which may bring losses and optimizers
        argv = sys.argv[1:] if argv is None else list(argv)
        parser = _parser(argv)
        if not argv:
            parser.print_help(sys.stderr)
            return 2
        arguments, arguments.rest = parser.parse_known_args(argv)
        arguments.argv = argv
        known.extend(arguments.command.all_arguments())
        if arguments.rest and not arguments.command.takes_rest:
            arguments.parser.unrecognized(arguments.rest)
        with (
            warnings.catch_warnings(),
            fitting(),
            limits_of(arguments),
            hidden(really=getattr(arguments, "quiet", False)),
        ):
            warnings.simplefilter("always", OnnxBackpropWarning)
            warnings.showwarning = partial(_show_warning, known)
            check_files(arguments)
            arguments.command.check_numbers(arguments)
            code: int = arguments.command.run(arguments)
        sys.stdout.flush()
    except OnnxBackpropError as e:
        text = as_options(e, known)
        if not isinstance(e, UnsupportedOpError):  # which is a list, one operator a line
            text = " ".join(text.split())
        print(wrapped(f"{PROGRAM}: error: {text}", sys.stderr), file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print(f"{PROGRAM}: interrupted{'. ' if e.args else ''}{e}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone: nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _show_warning(known: Sequence[Argument], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """One line for a warning of this package; another's as Python writes it."""
    text = (
        wrapped(f"{PROGRAM}: warning: {as_options(message, known)}\n", sys.stderr)
        if isinstance(message, OnnxBackpropWarning)
        else warnings.formatwarning(message, category, *where[:2])
    )
    sys.stderr.write(text)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Of the command that runs, the others by name; its module alone is imported."""
    parser, parsers = parser_of(Parser)
    name = next((word for word in argv if not word.startswith("-")), "")
    for each, sentence in summaries(commands.__path__).items():
        if each == name:
            command(name).add_to(parsers, name, sentence)
        else:
            parsers.add_parser(each, help=sentence)
    return parser
