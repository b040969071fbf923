"""`onnx-backprop fmu`: write an FMU of FMI 3 with directional and adjoint derivatives, for simulators."""

import argparse

from onnx_backprop.command.options import numbers_of, say, shared
from onnx_backprop.command.parser import Command, argument, flag
from onnx_backprop.opset.core.errors import InvalidArgumentError


def run(arguments: argparse.Namespace) -> int:
    """Write the FMU."""
    states = dict(map(_state, arguments.states or ()))
    lengths = numbers_of(arguments, "lengths", "NAME=N with N of 1 or more, as batch=1", least=1)

    from onnx_backprop.fmi import fmu  # onnxruntime

    path = fmu(
        arguments.model,
        arguments.output,
        states=states,
        of=arguments.of,
        lengths=lengths,
        target=arguments.target.split(",") if arguments.target else None,
        runtime=not arguments.no_runtime,
    )
    say(arguments, f"written: {path}, {path.stat().st_size / 1e6:,.1f} MB")
    return 0


def _state(text: str) -> tuple[str, str]:
    name, _, derivative = text.partition("=")
    if not name or not derivative:
        raise InvalidArgumentError(f"expected INPUT=OUTPUT, as x=dx, got {text!r}", "states")
    return name, derivative


COMMAND = Command(
    description="Of a function, for Model Exchange and Co-Simulation; with --states, of a differential equation, for "
    "Model Exchange. The variables are the inputs and outputs of the model: docs/fmi.md.",
    run=run,
    arguments=[
        *shared("model"),
        argument("-o", "--output", metavar="OUT.fmu", required=True, help="the FMU to write", file="written"),
        argument(
            "--states",
            nargs="+",
            action="extend",
            metavar="INPUT=OUTPUT",
            help="inputs that are continuous states, each with the output that is its derivative by time",
        ),
        *shared("--of", help="the outputs (default: all)"),
        argument("--lengths", nargs="+", action="extend", metavar="NAME=N", help="of symbolic dimensions, as batch=1"),
        argument(
            "--target",
            metavar="NAME,…",
            help="linux-x86_64, windows-x86_64, macos-x86_64, linux-aarch64, macos-arm64 (default: this one)",
        ),
        flag("--no-runtime", help="leave onnxruntime out: ONNXRUNTIME_LIB says where it is"),
        *shared("--limit", "--force", "--quiet"),
    ],
)
