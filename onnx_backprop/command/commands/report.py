"""`onnx-backprop report`: print versions, machine and the structure of a model without its weights, for a question."""

import argparse

from onnx_backprop.command.options import shared
from onnx_backprop.command.parser import Command, argument
from onnx_backprop.diagnosis.report import report


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    print(report(arguments.model))
    return 0


COMMAND = Command(
    description="It contains names of values and nodes; `anonymize --hide-names` hides them.",
    run=run,
    arguments=[
        argument("model", nargs="?", metavar="MODEL.onnx", help="the model to describe", file="read"),
        *shared("--limit"),
    ],
)
