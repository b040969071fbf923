"""`onnx-backprop convert --mode …`: the derivatives of the library, by the names of its functions."""

import argparse
from collections.abc import Callable
from typing import Any

from onnx import ModelProto

from onnx_backprop.command.options import free_of
from onnx_backprop.converters.derivatives.dense import hessian, jacobian
from onnx_backprop.converters.derivatives.products import hvp, jvp, scalar_gradient, vjp
from onnx_backprop.converters.reverse.models.backward import backward
from onnx_backprop.converters.reverse.models.derivatives import derivatives
from onnx_backprop.opset.core.errors import InvalidArgumentError

MODES: dict[str, Callable[..., ModelProto]] = {
    "backward": backward,
    "value_and_grad": scalar_gradient,
    "vjp": vjp,
    "jvp": jvp,
    "hvp": hvp,
    "jacobian": jacobian,
    "hessian": hessian,
}
BATCHED = ("vjp", "jvp", "hvp")


def add_modes(parser: argparse.ArgumentParser) -> None:
    """The options of `convert` that say which derivative."""
    parser.add_argument(
        "--mode",
        choices=tuple(MODES),
        help="which derivative, by the name of the function that makes it (default: backward)",
    )
    parser.add_argument("--batched", action="store_true", help="several seeds in one run (vjp, jvp, hvp)")


def differentiated(arguments: argparse.Namespace, model: ModelProto) -> ModelProto:
    """What the function of a mode makes of a model."""
    mode = arguments.mode or "backward"
    if arguments.batched and mode not in BATCHED:
        raise InvalidArgumentError(f"--batched: goes with --mode {', '.join(BATCHED)}, got {mode}")
    more = {"batched": True} if arguments.batched else {}
    return MODES[mode](
        model,
        wrt=arguments.wrt,
        of=arguments.of,
        stop=arguments.stop,
        free=free_of(arguments),
        kernels=arguments.kernels,
        inline=arguments.inline,
        straight_through=arguments.straight_through,
        strict=arguments.strict,
        checkpoint=arguments.checkpoint,
        **more,
    )


def results(model: ModelProto) -> list[str]:
    """The outputs that the newest derivative of a model has added."""
    return [name for one in derivatives(model)[-1:] for name in _leaves(one.results)]


def _leaves(tree: dict[str, Any]) -> list[str]:
    return [name for entry in tree.values() for name in (_leaves(entry) if isinstance(entry, dict) else [entry])]
