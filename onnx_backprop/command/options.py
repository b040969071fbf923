"""What several commands have in common: options, each declared once, limits, arrays from files, progress bars."""

import argparse
import contextlib
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx_backprop.command.parser import Argument, argument, flag
from onnx_backprop.converters.check.explain import GradientExplanation
from onnx_backprop.converters.check.report import GradientReport
from onnx_backprop.converters.pages import write_page
from onnx_backprop.converters.reverse.models.backward import DEFAULT_KERNELS
from onnx_backprop.converters.tables import wrapped
from onnx_backprop.converters.training.losses import LOSSES
from onnx_backprop.converters.training.optimizers import OPTIMIZERS
from onnx_backprop.converters.training.rewrites.precision import PRECISIONS
from onnx_backprop.opset.core.archives import NpzArrays
from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropError, OnnxBackpropWarning
from onnx_backprop.opset.core.limits import Limits, limits
from onnx_backprop.opset.core.progress import watched
from onnx_backprop.training.data import stored

NO_LOSS = "none"
_NO_LOSS: dict[str, Any] = {NO_LOSS: None}
_LOSSES = ChainMap[str, Any](_NO_LOSS, LOSSES)  # which grows
ROWS = 12  # tensors that are listed
_names = partial(argument, nargs="+", action="extend")
_SHARED = [
    argument("model", metavar="MODEL", help="the forward ONNX model", file="read"),
    argument("-o", "--output", metavar="OUT", required=True, help="the ONNX model to write", file="written model"),
    argument("--data", required=True, help="arrays to train on, by the names of the inputs", file="rows"),
    argument("--evaluation", help="arrays to measure the loss on after every epoch", file="rows"),
    _names(
        "--wrt",
        also="wrt_inputs",
        metavar="NAME",
        help="inputs, initializers and values inside to differentiate by (default: every float one)",
    ),
    _names("--stop", metavar="NAME", help="values inside the graph that no gradient passes; globs too"),
    _names("--free", metavar="INPUT:AXIS=NAME", help="a fixed length that becomes a symbol, as x:0=batch"),
    _names("--of", metavar="NAME", help="outputs, or values inside, to differentiate (default: every float output)"),
    argument("--loss", choices=_LOSSES, help=f"the loss to add; {NO_LOSS}: the model's output is its loss"),
    argument("--prediction", metavar="NAME", help="the output that the loss reads, or a value inside"),
    _names("--trainable", metavar="NAME", help="parameters to train; globs too"),
    _names("--frozen", metavar="NAME", help="parameters to leave; globs too"),
    argument("--rank", default=8, least=1, metavar="N", help="of the change of a matrix (%(default)s)"),
    argument("--alpha", default=16.0, metavar="NUMBER", help="its scale times its rank (%(default)s)"),
    argument(
        "--checkpoint",
        default=0,
        metavar="STEPS",
        help="store the states of Loop and Scan at every so many steps, compute those between again; default: all",
    ),
    argument(
        "--per-sample",
        nargs="*",
        metavar="INPUT",
        help="of each row of a batch alone; inputs whose axis 0 has the rows (default: those with a symbol there)",
    ),
    flag("--straight-through", help="differentiate quantisation as if it did not round"),
    flag("--strict", help="refuse names whose gradient is zero or that nothing depends on"),
    _names("--tie", metavar="A=B", help="parameters that hold the same numbers and are to stay equal"),
    flag("--untie", help="give every place that reads a merged bias one of its own"),
    argument(
        "--precision", choices=tuple(PRECISIONS), help="products and saved values in this type, weights in float32"
    ),
    argument(
        "--memory",
        metavar="SIZE",
        help="the most that activations may take, as 512MB, or as a share, 50%%: others are computed again",
    ),
    flag("--training-mode", help="Dropout and BatchNormalization in training mode"),
    argument(
        "--no-frozen-statistics",
        dest="frozen_statistics",
        action="store_false",
        help="leave BatchNormalization in its mode where --frozen or --trainable keeps its scale and bias",
    ),
    argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="of the weights (%(default)s)"),
    argument("--batch-size", default=32, least=1, metavar="ROWS", help="rows of a step (%(default)s)"),
    argument("--learning-rate", default=1e-3, least=0, metavar="RATE", help="the highest one (%(default)s)"),
    argument("--weight-decay", type=float, metavar="NUMBER", help="(default: the optimizer's own)"),
    argument("--clip-norm", type=float, metavar="NUMBER", help="limit of the norm of all gradients"),
    argument("--accumulate", default=1, least=1, metavar="STEPS", help="steps of one update (%(default)s)"),
    argument("--epochs", default=10, least=1, metavar="N", help="times through the data (%(default)s)"),
    argument("--warmup", default=0, least=0, metavar="STEPS", help="of linear rise in front (%(default)s)"),
    argument("--every", default=0, metavar="STEPS", help="between checkpoints (default: an epoch)"),
    argument("--log", metavar="FILE", help="a line for every step, .csv or .jsonl", file="written"),
    argument("--report", metavar="FILE.html", help="curves, gradient norms and timings in one file", file="written"),
    argument("--seed", default=0, least=0, help="of random inputs and directions (%(default)s)"),
    argument("--kernels", default=DEFAULT_KERNELS, help="how our operators run (%(default)s)"),
    argument("--device", metavar="NAME", help="what it runs on: webgpu, cuda, coreml, … (default: the CPU)"),
    argument(
        "--read-every",
        default=1,
        least=1,
        metavar="STEPS",
        help="after which losses are read, since that waits for the device (%(default)s)",
    ),
    flag("--inline", help="no functions, lowest opset: a file for onnxruntime before 1.27 as well"),
    argument(
        "--limit",
        action="append",
        metavar="NAME=NUMBER",
        help="another value for a limit that an error names, as npz_bytes=8000000000",
    ),
    argument("--html", metavar="FILE.html", help="write it as a page too", file="written"),
    flag("--force", help="replace what is there"),
    flag("--quiet", help="print nothing but errors"),
]
_BY_NAME = {each.names[0]: each for each in _SHARED}
# what messages of the library advise -> what that is in the command
_ADVICE = {f"{each.dest}=True": name for name, each in _BY_NAME.items() if each.settings.get("action") == "store_true"}
_ADVICE["training_graph(model, loss=…, optimizer=…) and save it"] = "`convert MODEL -o TRAINING --loss … --optimizer …`"
_ADVICE |= {
    "clip_norm=1.0": "--clip-norm 1.0",
    "Give expected_batch": "Give --expected-batch",
    "ob.dequantize(model)": "train --dequantize",
}


def shared(*names: str, **settings: Any) -> list[Argument]:
    """Arguments that several commands have; `settings`: what is particular to one."""
    return [replace(_BY_NAME[name], settings={**_BY_NAME[name].settings, **settings}) for name in names]


def as_options(message: OnnxBackpropError | OnnxBackpropWarning, known: Iterable[Argument]) -> str:
    """An error or a warning of the library in the terms of a command, which has these arguments."""
    text = str(message)
    for each in known:
        if message.argument in (each.dest, each.also) and message.argument and text.startswith(f"{message.argument}: "):
            text = each.names[0] + text.removeprefix(message.argument)
            break
    for keyword, option in _ADVICE.items():
        text = text.replace(keyword, option)
    before, advised, behind = text.partition("wrt_inputs=['")
    return f"{before}--wrt " + behind.replace("']", "", 1) if advised else text


def by_name(arguments: argparse.Namespace, names: str) -> dict[str, Any]:
    """The values of options that the library calls as the command does; None where a command has no such option."""
    return {name: getattr(arguments, name, None) for name in names.split()}


def derivative_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What functions that differentiate a model take."""
    return by_name(arguments, "wrt stop kernels straight_through strict checkpoint") | {"free": free_of(arguments)}


def training_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What convert and train hand on to `training_graph`."""
    pairs = [text.split("=") for text in arguments.tie or ()]
    for pair in pairs:
        if len(pair) != 2:
            raise InvalidArgumentError(f"--tie: expected two names as A=B, got {'='.join(pair)!r}")
    given = by_name(arguments, "trainable frozen prediction straight_through strict checkpoint stop untie")
    given |= by_name(arguments, "precision memory per_sample_clip expected_batch")
    given |= {"free": free_of(arguments), "per_sample": per_sample_of(arguments)}
    given["noise"] = getattr(arguments, "noise", 0.0)
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


def per_sample_of(arguments: argparse.Namespace) -> bool | list[str]:
    """The inputs that --per-sample names, True where it names none."""
    named = getattr(arguments, "per_sample", None)
    return False if named is None else named or True


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
    return limits(**numbers_of(arguments, "limit", "NAME=NUMBER, as npz_bytes=8000000000"))


def numbers_of(arguments: argparse.Namespace, option: str, expected: str, least: int = 0) -> dict[str, int]:
    """The numbers that an option gives by name, each as NAME=NUMBER."""
    result: dict[str, int] = {}
    for text in getattr(arguments, option, None) or ():
        name, _, number = text.partition("=")
        if not name or not number.isdecimal() or int(number) < least:
            raise InvalidArgumentError(f"--{option}: expected {expected}, got {text!r}")
        result[name] = int(number)
    return result


def say(arguments: argparse.Namespace, text: str) -> None:
    """Tell the person, unless it was to be quiet; at once, as what comes next may take long."""
    if not getattr(arguments, "quiet", False):
        print(wrapped(text), flush=True)


def save_page(arguments: argparse.Namespace, what: str, report: GradientReport | GradientExplanation) -> None:
    """What --html asks for."""
    if arguments.html:
        write_page(arguments.html, f"{what} of {Path(arguments.model).name}", report.html())
        say(arguments, f"\nwritten: {arguments.html}")


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
            sys.stderr.write(f"compiling {total} kernel{'' if total == 1 else 's'} for this processor, once\n")

    if not quiet:
        ahead.watchers.append(show)
    try:
        yield
    finally:
        ahead.watchers[:] = [watcher for watcher in ahead.watchers if watcher is not show]
