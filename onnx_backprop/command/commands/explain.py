"""`onnx-backprop explain`: tell which rule serves each node, and where and why a gradient path stops."""

import argparse

from onnx_backprop.command.options import free_of, save_page, shared
from onnx_backprop.command.parser import Command
from onnx_backprop.converters.check.explain import explain_gradients


def run(arguments: argparse.Namespace) -> int:
    """0 where the model converts, else 1."""
    explanation = explain_gradients(
        arguments.model, wrt=arguments.wrt, of=arguments.of, stop=arguments.stop, free=free_of(arguments)
    )
    print(explanation)
    save_page(arguments, "Gradients", explanation)
    return 0 if explanation.ok else 1


COMMAND = Command(
    description="Writes nothing. Exit code 0: the model converts, 1: not, 2: bad input.",
    run=run,
    arguments=[
        *shared("model", help="the ONNX model to explain"),
        *shared("--wrt", "--of", "--stop", "--free", "--limit", "--html", "--force"),
    ],
)
