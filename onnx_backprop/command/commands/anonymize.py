"""`onnx-backprop anonymize`: write the same graph with random weights, to show with a question."""

import argparse

from onnx_backprop.command.options import say, shared
from onnx_backprop.command.parser import Command, argument, flag
from onnx_backprop.converters.prepare.writing.files import save_model
from onnx_backprop.diagnosis.anonymize import anonymize


def run(arguments: argparse.Namespace) -> int:
    """Write the model."""
    save_model(anonymize(arguments.model, hide_names=arguments.hide_names, seed=arguments.seed), arguments.output)
    names = "names are hidden" if arguments.hide_names else "names are kept, --hide-names hides them"
    say(arguments, f"written: {arguments.output}; its weights are random, {names}")
    return 0


COMMAND = Command(
    description="Nodes, attributes, types and shapes stay; so do tensors of one number or two, and up to 16 integers.",
    run=run,
    arguments=[
        *shared("model"),
        argument("-o", "--output", metavar="OUT.onnx", required=True, help="what to write", file="written model"),
        flag("--hide-names", help="numbers in the place of all names, and no metadata"),
        *shared("--seed", help="of the weights (%(default)s)"),
        *shared("--limit", "--force", "--quiet"),
    ],
)
