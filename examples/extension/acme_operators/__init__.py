"""Operators of the domain acme for onnx-backprop, which imports this module by the entry point in pyproject.toml.

SquaredRelu and its gradient have kernels, Snake is written in other operators; a loss and an optimizer are registered.
"""

from acme_operators import snake, squared_relu, training  # noqa: F401 - each registers what it defines
