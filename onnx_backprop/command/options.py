"""What several commands have in common: options, each declared once, limits, arrays from files, progress bars."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from onnx_backprop.converters.reverse.backward import DEFAULT_KERNELS
from onnx_backprop.converters.tables import wrapped
from onnx_backprop.converters.training.losses import LOSSES
from onnx_backprop.converters.training.rewrites.precision import PRECISIONS
from onnx_backprop.opset.core.archives import NpzArrays
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.limits import Limits, limits
from onnx_backprop.opset.core.progress import watched
from onnx_backprop.training.data import stored

NO_LOSS = "none"
_NAMES = {"nargs": "+", "action": "extend", "metavar": "NAME"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "--wrt": _NAMES | {"help": "inputs, initializers and values inside to differentiate by (default: every float one)"},
    "--stop": _NAMES | {"help": "values inside the graph that no gradient passes; globs too"},
    "--free": _NAMES | {"metavar": "INPUT:AXIS=NAME", "help": "a fixed length that becomes a symbol, as x:0=batch"},
    "--of": _NAMES | {"help": "outputs, or values inside, to differentiate (default: every float output)"},
    "--loss": {"choices": (*LOSSES, NO_LOSS), "help": f"the loss to add; {NO_LOSS}: the model's output is its loss"},
    "--prediction": {"metavar": "NAME", "help": "the output that the loss reads, or a value inside"},
    "--trainable": _NAMES | {"help": "parameters to train; globs too"},
    "--frozen": _NAMES | {"help": "parameters to leave; globs too"},
    "--checkpoint": {
        "type": int,
        "default": 0,
        "metavar": "STEPS",
        "help": "store the states of Loop and Scan at every so many steps, compute those between again; default: all",
    },
    "--straight-through": {"action": "store_true", "help": "differentiate quantisation as if it did not round"},
    "--strict": {"action": "store_true", "help": "refuse names whose gradient is zero or that nothing depends on"},
    "--tie": _NAMES | {"metavar": "A=B", "help": "parameters that hold the same numbers and are to stay equal"},
    "--untie": {"action": "store_true", "help": "give every place that reads a merged bias one of its own"},
    "--precision": {"choices": tuple(PRECISIONS), "help": "products and saved values in this type, weights in float32"},
    "--memory": {
        "metavar": "SIZE",
        "help": "the most that activations may take, as 512MB, or as a share, 50%%: others are computed again",
    },
    "--no-frozen-statistics": {
        "dest": "frozen_statistics",
        "action": "store_false",
        "help": "leave BatchNormalization in its mode where --frozen or --trainable keeps its scale and bias",
    },
    "--kernels": {"default": DEFAULT_KERNELS, "help": "how our operators run (%(default)s)"},
    "--limit": {
        "action": "append",
        "metavar": "NAME=NUMBER",
        "help": "another value for a limit that an error names, as npz_bytes=8000000000",
    },
    "--html": {"metavar": "FILE.html", "help": "write it as a page too"},
    "--force": {"action": "store_true", "help": "replace what is there"},
    "--quiet": {"action": "store_true", "help": "print nothing but errors"},
}


def share(parser: argparse.ArgumentParser, *options: str, **settings: Any) -> None:
    """Give a command some of the options that several have; `settings`: what is particular to it."""
    for option in options:
        parser.add_argument(option, **_OPTIONS[option] | settings)


def training_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What convert and train hand on to `training_graph`."""
    pairs = [text.split("=") for text in arguments.tie or ()]
    for pair in pairs:
        if len(pair) != 2:
            raise InvalidArgumentError(f"--tie: expected two names as A=B, got {'='.join(pair)!r}")
    names = ("trainable", "frozen", "prediction", "straight_through", "strict", "checkpoint")
    names += ("stop", "untie", "precision", "memory")
    given = {name: getattr(arguments, name) for name in names}
    given["free"] = free_of(arguments)
    return given | {"loss": loss_of(arguments), "tie": [(a, b) for a, b in pairs]}


def free_of(arguments: argparse.Namespace) -> dict[str, dict[int, str]] | None:
    """The lengths that --free makes symbols of, as `backward` takes them."""
    result: dict[str, dict[int, str]] = {}
    for text in arguments.free or ():
        place, _, symbol = text.rpartition("=")
        name, _, axis = place.rpartition(":")
        if not (name and symbol and axis.removeprefix("-").isdecimal()):
            raise InvalidArgumentError(f"--free: expected INPUT:AXIS=NAME, as x:0=batch, got {text!r}")
        result.setdefault(name, {})[int(axis)] = symbol
    return result or None


def loss_of(arguments: argparse.Namespace) -> str | None:
    """What --loss asks for, as `training_graph` takes it."""
    return None if arguments.loss == NO_LOSS else arguments.loss


def read_arrays(path: str | None, option: str) -> NpzArrays | None:
    """The arrays of an .npz file, to be read one by one; None without one."""
    return None if path is None else NpzArrays(path, what=option)


def read_rows(path: str | None, option: str) -> Mapping[str, Any] | None:
    """The arrays of a file or a folder, read when they are needed; None without one."""
    return None if path is None else stored.read_rows(path, what=option)


def limits_of(arguments: argparse.Namespace) -> AbstractContextManager[Limits]:
    """A block in which the limits hold that --limit asks for."""
    given: dict[str, int] = {}
    for text in getattr(arguments, "limit", None) or ():
        name, _, number = text.partition("=")
        if not number.isdecimal():
            raise InvalidArgumentError(f"--limit: expected NAME=NUMBER, as npz_bytes=8000000000, got {text!r}")
        given[name] = int(number)
    return limits(**given)


def say(arguments: argparse.Namespace, text: str) -> None:
    """Tell the person, unless it was to be quiet; at once, as what comes next may take long."""
    if not getattr(arguments, "quiet", False):
        print(wrapped(text), flush=True)


@contextlib.contextmanager
def compilation_shown(*, quiet: bool) -> Iterator[None]:
    """Say on the standard error when kernels are compiled; on a terminal there is a progress bar, which says it."""
    from onnx_backprop.ort_ops import native_kernels_work  # not before: not every command needs a runtime

    if not native_kernels_work():
        yield
        return
    from onnx_backprop.ort_ops.runtime import ahead

    def show(done: int, total: int) -> None:
        if done == 0 and not watched():
            sys.stderr.write(f"compiling {total} kernels for this processor, once\n")

    if not quiet:
        ahead.watchers.append(show)
    try:
        yield
    finally:
        ahead.watchers[:] = [watcher for watcher in ahead.watchers if watcher is not show]
