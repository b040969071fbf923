"""`onnx-backprop convert`: write a model that also computes gradients."""

import argparse
import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto, ValueInfoProto

from onnx_backprop.command.options import (
    NO_LOSS,
    ROWS,
    by_name,
    derivative_options,
    numbers_of,
    per_sample_of,
    say,
    shared,
    training_options,
)
from onnx_backprop.command.parser import Command, argument, flag
from onnx_backprop.command.training import OF_OPTIMIZERS, optimizer_of
from onnx_backprop.converters.derivatives.dense import hessian, jacobian
from onnx_backprop.converters.derivatives.family import family, members
from onnx_backprop.converters.derivatives.products import hvp, jvp, scalar_gradient, vjp
from onnx_backprop.converters.derivatives.vmap import vmap
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.converters.reverse.models.backward import backward
from onnx_backprop.converters.reverse.models.derivatives import derivatives
from onnx_backprop.converters.training.losses import LOSSES
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.standard.gradient_operator import expand_gradients, has_training_nodes
from onnx_backprop.converters.training.training_graph import training_graph
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import InvalidArgumentError, printable
from onnx_backprop.opset.core.reading import load

MODES: dict[str, Callable[..., ModelProto]] = {
    "backward": backward,
    "value_and_grad": scalar_gradient,
    "vjp": vjp,
    "jvp": jvp,
    "hvp": hvp,
    "jacobian": jacobian,
    "hessian": hessian,
    "vmap": vmap,
}
BATCHED, OF_ROWS = ("vjp", "jvp", "hvp"), ("backward", "jacobian")
FAMILY = "family"


def run(arguments: argparse.Namespace) -> int:
    """Write the converted model."""
    _check_options(arguments)
    with _logging(verbose=arguments.verbose):
        if arguments.mode == FAMILY:
            return _write_family(arguments)
        model = load(arguments.model, mapped=True)
        expanded = has_training_nodes(model)
        if expanded:
            model = expand_gradients(model, kernels=arguments.kernels, inline=arguments.inline)
        if arguments.loss is None and expanded and not (arguments.wrt or arguments.of or arguments.mode):
            result = model
            lines = [("inputs", _required(result)), ("outputs", _names(result.graph.output))]
        elif arguments.loss is None:
            result = differentiated(arguments, model)
            added = _names(result.graph.output) if arguments.mode == "vmap" else results(result)
            lines = [("inputs", _required(result)), (arguments.mode or "gradients", added)]
        else:
            graph = training_graph(
                model,
                lengths=numbers_of(arguments, "lengths", "NAME=N with N of 1 or more, as batch=8", least=1),
                wrt_inputs=arguments.wrt or (),
                optimizer=None if arguments.optimizer is None else optimizer_of(arguments),
                **by_name(arguments, "kernels inline training_mode frozen_statistics"),
                **training_options(arguments),
            )
            result = graph.model
            say(arguments, graph.summary(most=None if arguments.verbose else ROWS))
            lines = _training_lines(graph)
    save_model(result, arguments.output)
    _print_summary(arguments, result, lines)
    return 0


def _write_family(arguments: argparse.Namespace) -> int:
    """OUT and its derivatives beside it."""
    if arguments.of or arguments.batched or arguments.axes or arguments.per_sample is not None:
        raise InvalidArgumentError(
            f"--of, --batched, --axes and --per-sample: do not go with --mode {FAMILY}, in which every output has any "
            "number of seeds"
        )
    target = Path(arguments.output)
    there = [path for path in members(target) if path.exists()]
    if there and not arguments.force:
        raise InvalidArgumentError(f"-o: {there[0]} exists. Give another name, or --force to replace it")
    paths = family(arguments.model, target, **derivative_options(arguments))
    for path in paths:
        say(arguments, f"written: {path}")
    return 0


def differentiated(arguments: argparse.Namespace, model: ModelProto) -> ModelProto:
    """What the function of a mode makes of a model."""
    mode = arguments.mode or "backward"
    if arguments.batched and mode not in BATCHED:
        raise InvalidArgumentError(f"--batched: goes with --mode {', '.join(BATCHED)}, got {mode}")
    if arguments.per_sample is not None and mode not in OF_ROWS:
        raise InvalidArgumentError(f"--per-sample: goes with --loss or --mode {', '.join(OF_ROWS)}, got {mode}")
    if mode == "vmap":
        return _mapped(arguments, model)
    if arguments.axes:
        raise InvalidArgumentError(f"--axes: goes with --mode vmap, got {mode}")
    more: dict[str, Any] = {"batched": True} if arguments.batched else {}
    more |= {"per_sample": per_sample_of(arguments)} if mode in OF_ROWS else {}
    return MODES[mode](model, of=arguments.of, inline=arguments.inline, **derivative_options(arguments), **more)


def _mapped(arguments: argparse.Namespace, model: ModelProto) -> ModelProto:
    """`vmap` over the axes that --axes names."""
    others = ("wrt", "of", "stop", "free", "straight_through", "strict", "checkpoint")
    if stray := [name for name in others if getattr(arguments, name)]:
        raise InvalidArgumentError(f"{_named(stray)}: {'do' if len(stray) > 1 else 'does'} not go with --mode vmap")
    axes: dict[str, int] = {}
    for text in arguments.axes or ():
        name, _, axis = text.rpartition(":")
        if not (name and axis.removeprefix("-").isdecimal()):
            raise InvalidArgumentError(f"--axes: expected INPUT:AXIS, as x:0, got {text!r}")
        axes[name] = int(axis)
    return vmap(model, axes, kernels=arguments.kernels, inline=arguments.inline)


def results(model: ModelProto) -> list[str]:
    """The outputs that the newest derivative of a model has added."""
    return [name for one in derivatives(model)[-1:] for name in _leaves(one.results)]


def _leaves(tree: dict[str, Any]) -> list[str]:
    return [name for entry in tree.values() for name in (_leaves(entry) if isinstance(entry, dict) else [entry])]


def _names(values: Iterable[ValueInfoProto]) -> list[str]:
    return [value.name for value in values]


def _required(model: ModelProto) -> list[str]:
    """The inputs that a run must be fed."""
    optional = {tensor.name for tensor in model.graph.initializer}
    return [name for name in _names(model.graph.input) if name not in optional]


def _check_options(arguments: argparse.Namespace) -> None:
    with_loss = ("prediction", "trainable", "frozen", "tie", "untie", "precision", "memory", "lengths")
    with_loss = (*with_loss, "optimizer", "training_mode")
    without_loss = ("of", "mode", "batched", "axes")
    if arguments.loss is None:
        stray = [name for name in with_loss if getattr(arguments, name)]
        stray += ["no_frozen_statistics"] * (not arguments.frozen_statistics)
        hint = f"go with --loss ({', '.join(LOSSES)}, or {NO_LOSS} for a model that computes its own)"
    else:
        stray = [name for name in without_loss if getattr(arguments, name)]
        hint = "do not go with --loss; use --trainable, --frozen and --prediction"
    defaults = {each.dest: each.settings.get("default") for each in OF_OPTIMIZERS}
    if not stray and arguments.optimizer is None:
        stray = [name for name, default in defaults.items() if getattr(arguments, name) != default]
        hint = "go with --optimizer"
    if stray:
        raise InvalidArgumentError(f"{_named(stray)}: {hint if len(stray) > 1 else _of_one(hint)}")
    if arguments.lengths and not arguments.memory:
        raise InvalidArgumentError("--lengths: goes with --memory")
    if arguments.verbose and arguments.quiet:
        raise InvalidArgumentError("--verbose and --quiet exclude each other")


def _named(options: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in options)


def _of_one(hint: str) -> str:
    """What is said of several options, of one."""
    return f"does{hint[2:]}" if hint.startswith("do ") else f"goes{hint[2:]}"


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
        *([("state", list(graph.updates))] if graph.updates else []),
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


COMMAND = Command(
    usage="%(prog)s IN -o OUT [options]",
    description="Without --loss, the result computes d OF / d WRT, or the derivative that --mode names. With --loss, "
    "it computes the loss and the gradients of the parameters; with --optimizer too, a whole step, for `compile` and "
    "`Trainer`. Without any of these, Gradient, Adam, Adagrad and Momentum nodes of ai.onnx.preview.training become "
    "nodes that onnxruntime runs. Lists of names end at the next option.",
    run=run,
    arguments=[
        *shared("model", metavar="IN", help="the ONNX model to read"),
        *shared("-o"),
        *shared(
            "--wrt",
            help="differentiate with respect to these inputs, initializers and values inside (default: all float "
            "initializers); with --loss: to inputs, besides the parameters",
        ),
        argument(
            "--mode",
            choices=(*MODES, FAMILY),
            help="the derivative, by the name of its function (default: backward); vmap: a model for many rows; "
            "family: IN and, beside it, its derivatives for CasADi",
        ),
        argument(
            "--axes", nargs="+", action="extend", metavar="INPUT:AXIS", help="where vmap puts the new axis, as x:0"
        ),
        flag("--batched", help="several seeds in one run (vjp, jvp, hvp)"),
        *shared("--per-sample"),
        *shared("--of", "--stop", "--free", "--loss", "--prediction", "--trainable", "--frozen", "--tie", "--untie"),
        *shared("--straight-through", "--strict", "--checkpoint", "--kernels", "--precision", "--memory"),
        *shared("--training-mode", "--no-frozen-statistics"),
        *shared(
            "--optimizer",
            default=None,
            help="the optimizer that updates the weights (default: none, gradients are outputs)",
        ),
        *OF_OPTIMIZERS,
        *shared("--limit", "--force", "--quiet"),
        argument(
            "--lengths",
            nargs="+",
            action="extend",
            metavar="NAME=N",
            help="lengths of symbolic dimensions for --memory, as batch=8",
        ),
        *shared("--inline"),
        flag("--verbose", help="show how nodes are converted"),
    ],
)
