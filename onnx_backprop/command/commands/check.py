"""`onnx-backprop check`: check the gradients of a model against differences of its outputs."""

import argparse

from onnx_backprop import check_gradients
from onnx_backprop.command.options import by_name, read_arrays, save_page, say, shared
from onnx_backprop.command.parser import Command, argument, flag


def run(arguments: argparse.Namespace) -> int:
    """0 where the gradients are right, else 1."""
    feeds = read_arrays(arguments.feeds, "--feeds")
    report = check_gradients(
        arguments.model,
        feeds=None if feeds is None else dict(feeds),
        **by_name(arguments, "wrt of stop seed kernels device tolerance nodes float64"),
    )
    say(arguments, str(report))
    if arguments.save_repro and report.repro is not None:
        report.save_repro(arguments.save_repro)
        say(arguments, f"\nwritten: {arguments.save_repro}")
    save_page(arguments, "Check", report)
    return 0 if report.ok else 1


COMMAND = Command(
    description="Compares <gradient, v> with differences of the model's own outputs along random directions v; "
    "when they contradict each other, checks every node alone. Exit code 0: right, 1: not, 2: bad input.",
    run=run,
    arguments=[
        *shared("model", help="the ONNX model to check"),
        *shared("--wrt", "--of", "--stop", "--kernels", "--device", "--limit", "--force", "--quiet"),
        argument("--feeds", metavar="FILE.npz", help="values for inputs, by name (default: random)", file="read"),
        *shared("--seed"),
        argument("--tolerance", type=float, help="of the error relative to the derivative"),
        flag("--nodes", help="check every node, even when the whole model is right"),
        flag("--float64", help="say how far rounding has taken each gradient from that in float64"),
        *shared("--html"),
        argument(
            "--save-repro",
            metavar="OUT",
            help="write the smallest sub-model whose gradient is wrong",
            file="written model",
        ),
    ],
)
