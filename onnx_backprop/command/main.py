"""The command `onnx-backprop`: convert a model, check or explain its gradients, list operators, run the demo.

Bad input ends in one line on stderr and exit code 2, an interruption in exit code 130; a result file is complete
or not there at all. `check` and `explain` end in exit code 1 when a
gradient is not right, or not there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onnx import ModelProto, ValueInfoProto

from onnx_backprop import __version__, check_gradients
from onnx_backprop.command.files import check_files
from onnx_backprop.command.modes import add_modes, differentiated, results
from onnx_backprop.command.options import NO_LOSS, free_of, limits_of, read_arrays, say, share, training_options
from onnx_backprop.command.parser import Parser
from onnx_backprop.command.train import ROWS, add_train
from onnx_backprop.command.web import add_web
from onnx_backprop.converters.check.explain import GradientExplanation, explain_gradients
from onnx_backprop.converters.check.report import GradientReport
from onnx_backprop.converters.pages import write_page
from onnx_backprop.converters.prepare.files import save_model
from onnx_backprop.converters.reverse.registry import supported_ops
from onnx_backprop.converters.tables import table, wrapped
from onnx_backprop.converters.training.losses import LOSSES
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.standard.gradient_operator import expand_gradients, has_training_nodes
from onnx_backprop.converters.training.training_graph import training_graph
from onnx_backprop.opset import DOMAIN, OPS, OPSET_VERSION, OnnxBackpropError, UnsupportedOpError
from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropWarning, printable
from onnx_backprop.opset.core.progress import hidden
from onnx_backprop.opset.core.reading import load

PROGRAM = "onnx-backprop"
_FIRST_STEPS = f"""\
first steps:
  {PROGRAM} explain model.onnx
  {PROGRAM} train model.onnx -o trained.onnx --data data.npz --loss mse

`{PROGRAM} COMMAND --help` explains a command.
"""
_OPTION = re.compile(
    r"(wrt|of|stop|free|trainable|frozen|tie|prediction|precision|memory|kernels): "
)  # that a message of the library begins with


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file in an old encoding gets question marks for what it lacks
            stream.reconfigure(errors="replace")
    try:
        parser = _parser()
        if not (sys.argv[1:] if argv is None else argv):
            parser.print_help(sys.stderr)
            return 2
        arguments, arguments.rest = parser.parse_known_args(argv)
        arguments.argv = sys.argv[1:] if argv is None else list(argv)
        if arguments.rest and arguments.run is not _demo:
            arguments.parser.unrecognized(arguments.rest)
        with warnings.catch_warnings(), limits_of(arguments), hidden(really=getattr(arguments, "quiet", False)):
            warnings.simplefilter("always", OnnxBackpropWarning)
            warnings.showwarning = _show_warning
            check_files(arguments)
            code: int = arguments.run(arguments)
        sys.stdout.flush()
    except UnsupportedOpError as e:  # a list, one operator a line
        return _fail(str(e))
    except OnnxBackpropError as e:
        return _fail(" ".join(str(e).split()))
    except KeyboardInterrupt as e:
        print(f"{PROGRAM}: interrupted{'. ' if e.args else ''}{e}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone: nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _as_options(message: str) -> str:
    """A message of the library in the terms of the command."""
    for name in ("straight_through", "strict", "untie", "inline"):
        message = message.replace(f"{name}=True", f"--{name.replace('_', '-')}")
    message = re.sub(r"wrt_inputs=\['([^']*)'\]", r"--wrt \1", re.sub("^wrt_inputs: ", "wrt: ", message))
    message = message.replace("clip_norm=1.0", "--clip-norm 1.0").replace("ob.dequantize(model)", "train --dequantize")
    return f"--{message}" if _OPTION.match(message) else message


def _show_warning(message: Warning | str, category: type[Warning], *where: Any) -> None:
    """One line for a warning of ours; another's as Python writes it."""
    ours = issubclass(category, OnnxBackpropWarning)
    text = (
        wrapped(f"{PROGRAM}: warning: {_as_options(str(message))}\n", sys.stderr)
        if ours
        else warnings.formatwarning(message, category, *where[:2])
    )
    sys.stderr.write(text)


def _fail(message: str) -> int:
    print(wrapped(f"{PROGRAM}: error: {_as_options(message)}", sys.stderr), file=sys.stderr)
    return 2


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="Train ONNX models in stock onnxruntime.",
        epilog=_FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_convert, _add_check, _add_explain, add_train, add_web):
        add(commands)

    ops = commands.add_parser("ops", help="list the operators of the domain and the differentiable ONNX operators")
    ops.add_argument("--markdown", action="store_true", help="as Markdown tables")
    ops.set_defaults(run=_ops)

    demo = commands.add_parser(
        "demo",
        help="train a super-resolution model on photographs; needs the source tree, arguments are handed on",
        add_help=False,
    )
    demo.set_defaults(run=_demo)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_convert(commands: argparse._SubParsersAction[Parser]) -> None:
    convert = commands.add_parser(
        "convert",
        help="write a model that computes gradients as well",
        usage="%(prog)s IN -o OUT [options]",
        description="Without --loss the result computes d OF / d WRT, or what --mode names; with it, a loss and the "
        "gradients of the parameters. Without any of them, a model that has Gradient, Adam, Adagrad or Momentum nodes "
        "of ai.onnx.preview.training becomes one that onnxruntime runs. Lists of names end at the next option.",
    )
    convert.add_argument("model", metavar="IN", help="the ONNX model to read")
    convert.add_argument("-o", "--output", metavar="OUT", required=True, help="the ONNX model to write")
    share(
        convert,
        "--wrt",
        help="inputs, initializers and values inside to differentiate by (default: every float initializer); with "
        "--loss: inputs, beside the parameters",
    )
    add_modes(convert)
    share(convert, "--of", "--stop", "--free", "--loss", "--prediction", "--trainable", "--frozen", "--tie", "--untie")
    share(convert, "--straight-through", "--strict", "--checkpoint", "--kernels", "--precision", "--memory")
    share(convert, "--limit", "--force", "--quiet")
    convert.add_argument(
        "--lengths",
        nargs="+",
        action="extend",
        metavar="NAME=N",
        help="of symbolic dimensions, as batch=8, which --memory counts with",
    )
    convert.add_argument(
        "--inline", action="store_true", help="no functions, lowest opset: a file for onnxruntime before 1.27 as well"
    )
    convert.add_argument("--verbose", action="store_true", help="tell how nodes are converted")
    convert.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    with _logging(verbose=arguments.verbose):
        model = load(arguments.model)
        expanded = has_training_nodes(model)
        if expanded:
            model = expand_gradients(model, kernels=arguments.kernels, inline=arguments.inline)
        if arguments.loss is None and expanded and not (arguments.wrt or arguments.of or arguments.mode):
            result = model
            lines = [("inputs", _required(result)), ("outputs", _names(result.graph.output))]
        elif arguments.loss is None:
            result = differentiated(arguments, model)
            lines = [("inputs", _required(result)), (arguments.mode or "gradients", results(result))]
        else:
            graph = training_graph(
                model,
                kernels=arguments.kernels,
                inline=arguments.inline,
                lengths=_lengths(arguments),
                wrt_inputs=arguments.wrt or (),
                **training_options(arguments),
            )
            result = graph.model
            say(arguments, graph.summary(most=None if arguments.verbose else ROWS))
            lines = _training_lines(graph)
    save_model(result, arguments.output)
    _print_summary(arguments, result, lines)
    return 0


def _add_check(commands: argparse._SubParsersAction[Parser]) -> None:
    check = commands.add_parser(
        "check",
        help="check the gradients of a model against differences of its outputs",
        description="Compares <gradient, v> with differences of the model's own outputs along random directions v; "
        "when they contradict each other, checks every node alone. Exit code 0: right, 1: not, 2: bad input.",
    )
    check.add_argument("model", metavar="MODEL", help="the ONNX model to check")
    share(check, "--wrt", "--of", "--stop", "--kernels", "--limit", "--force", "--quiet")
    check.add_argument("--feeds", metavar="FILE.npz", help="values for inputs, by name (default: random)")
    check.add_argument("--seed", type=int, default=0, help="of random inputs and directions (%(default)s)")
    check.add_argument("--tolerance", type=float, help="of the error relative to the derivative")
    check.add_argument("--nodes", action="store_true", help="check every node, even when the whole model is right")
    share(check, "--html")
    check.add_argument("--save-repro", metavar="OUT", help="write the smallest sub-model whose gradient is wrong")
    check.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    if arguments.seed < 0:
        raise InvalidArgumentError(f"--seed: expected 0 or more, got {arguments.seed}")
    feeds = read_arrays(arguments.feeds, "--feeds")
    report = check_gradients(
        arguments.model,
        wrt=arguments.wrt,
        of=arguments.of,
        stop=arguments.stop,
        feeds=None if feeds is None else dict(feeds),
        seed=arguments.seed,
        kernels=arguments.kernels,
        tolerance=arguments.tolerance,
        nodes=arguments.nodes,
    )
    say(arguments, str(report))
    if arguments.save_repro and report.repro is not None:
        report.save_repro(arguments.save_repro)
        say(arguments, f"\nwritten: {arguments.save_repro}")
    _save_page(arguments, "Check", report)
    return 0 if report.ok else 1


def _add_explain(commands: argparse._SubParsersAction[Parser]) -> None:
    explain = commands.add_parser(
        "explain",
        help="tell which rule serves each node, and where and why a gradient path stops",
        description="Writes nothing. Exit code 0: the model converts, 1: not, 2: bad input.",
    )
    explain.add_argument("model", metavar="MODEL", help="the ONNX model to explain")
    share(explain, "--wrt", "--of", "--stop", "--free", "--limit", "--html", "--force")
    explain.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    explanation = explain_gradients(
        arguments.model, wrt=arguments.wrt, of=arguments.of, stop=arguments.stop, free=free_of(arguments)
    )
    print(explanation)
    _save_page(arguments, "Gradients", explanation)
    return 0 if explanation.ok else 1


def _save_page(arguments: argparse.Namespace, what: str, found: GradientReport | GradientExplanation) -> None:
    """What --html asks for."""
    if arguments.html:
        write_page(arguments.html, f"{what} of {Path(arguments.model).name}", found.html())
        say(arguments, f"\nwritten: {arguments.html}")


def _lengths(arguments: argparse.Namespace) -> dict[str, int]:
    """The lengths that --lengths gives."""
    given: dict[str, int] = {}
    for text in arguments.lengths or ():
        name, _, number = text.partition("=")
        if not name or not number.isdecimal() or not int(number):
            raise InvalidArgumentError(f"--lengths: expected NAME=N with N of 1 or more, as batch=8, got {text!r}")
        given[name] = int(number)
    return given


def _names(values: Iterable[ValueInfoProto]) -> list[str]:
    return [value.name for value in values]


def _required(model: ModelProto) -> list[str]:
    """The inputs that a run must be fed."""
    optional = {tensor.name for tensor in model.graph.initializer}
    return [name for name in _names(model.graph.input) if name not in optional]


def _check_options(arguments: argparse.Namespace) -> None:
    with_loss = ("prediction", "trainable", "frozen", "tie", "untie", "precision", "memory", "lengths")
    without_loss = ("of", "mode", "batched")
    if arguments.loss is None:
        stray = [name for name in with_loss if getattr(arguments, name)]
        hint = f"go with --loss ({', '.join(LOSSES)}, or {NO_LOSS} for a model that computes its own)"
    else:
        stray = [name for name in without_loss if getattr(arguments, name)]
        hint = "do not go with --loss; use --trainable, --frozen and --prediction"
    if stray:
        raise InvalidArgumentError(f"{', '.join(f'--{name}' for name in stray)}: {hint}")
    if arguments.verbose and arguments.quiet:
        raise InvalidArgumentError("--verbose and --quiet exclude each other")


@contextlib.contextmanager
def _logging(*, verbose: bool) -> Iterator[None]:
    """What the converters report, on stderr."""
    logger = logging.getLogger("onnx_backprop")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logger.level
    if verbose:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _training_lines(graph: TrainingGraph) -> list[tuple[str, list[str]]]:
    return [
        ("inputs", list(graph.inputs)),
        ("loss", [graph.loss]),
        ("gradients", [*graph.input_gradients.values(), *graph.parameters.values()]),
    ]


def _print_summary(arguments: argparse.Namespace, model: ModelProto, lines: Sequence[tuple[str, list[str]]]) -> None:
    ops = Counter(node.op_type for node in model.graph.node if node.domain == DOMAIN)
    used = [f"{name} × {count}" for name, count in sorted(ops.items())]
    for title, names in [*lines, (f"operators of {DOMAIN}", used)]:
        shown = names if arguments.verbose else names[:8]
        more = f", … ({len(names)} in all; --verbose lists them)" if len(names) > len(shown) else ""
        say(arguments, f"{title}: {printable(', '.join(shown)) or 'none'}{more}")
    inlined = ", inlined" if arguments.inline else ""
    say(arguments, f"written: {arguments.output} (kernels {arguments.kernels!r}{inlined})")


def _ops(arguments: argparse.Namespace) -> int:
    domain = [(op.name, op.source.strip()) for op in OPS]
    versions: dict[str, list[str]] = {}
    for op in supported_ops():
        name = f"{op.domain}::{op.op_type}" if op.domain else op.op_type
        versions.setdefault(name, []).append(str(op.since_version))
    differentiable = [(name, ", ".join(found)) for name, found in versions.items()]
    show = _markdown if arguments.markdown else _plain
    print(f"Operators of the domain {DOMAIN}, version {OPSET_VERSION}\n")
    show(("operator", "source"), domain)
    print("\nONNX operators with a gradient (older models are converted to opset 18 first)\n")
    show(("operator", "versions"), differentiable)
    return 0


def _plain(header: tuple[str, str], rows: Sequence[tuple[str, str]]) -> None:
    head, *lines = table(header, rows)
    print(head, "-" * len(head), *lines, sep="\n")


def _markdown(header: tuple[str, str], rows: Sequence[tuple[str, str]]) -> None:
    print(f"| {header[0]} | {header[1]} |\n|---|---|")
    for name, text in rows:
        print(f"| `{name}` | {text} |")


def _demo(arguments: argparse.Namespace) -> int:
    root = Path(__file__).resolve().parents[2]
    if not (root / "models" / "super_resolution.py").is_file():
        raise InvalidArgumentError(
            "the demo is a script of the source tree, models/super_resolution.py, which an installed package does not "
            f"hold. Get the source of {PROGRAM} {__version__} and run `make demo` in its top folder"
        )
    if absent := [name for name in ("matplotlib", "PIL", "skimage") if find_spec(name) is None]:
        raise InvalidArgumentError(
            f"the demo needs {', '.join(absent)}. Run `make demo`, or `pip install '.[demo]'` in {root}"
        )
    # as a module, since the scripts import each other; -P, or a folder `models` where the user stands would win
    command = [sys.executable, "-P", "-m", "models.super_resolution", *arguments.rest]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
