"""`onnx-backprop report`: print versions, machine and the structure of a model, for a question; no weight of it."""

import argparse

from onnx_backprop.command.options import shared
from onnx_backprop.command.parser import Command, argument
from onnx_backprop.diagnosis.report import report


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    print(report(arguments.model))
    return 0


COMMAND = Command(
    description="Names of values and nodes stand in it; `anonymize --hide-names` hides them.",
    run=run,
    arguments=[
        argument("model", nargs="?", metavar="MODEL.onnx", help="the model that the question is about", file="read"),
        *shared("--limit"),
    ],
)
