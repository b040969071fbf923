"""Operators of the domain acme for onnx-backprop, which imports this by the entry point in pyproject.toml.

SquaredRelu and its gradient have kernels, Snake is written out in other operators; a loss and an optimizer have names.
"""

from acme_operators import snake, squared_relu, training  # noqa: F401 - each registers what it defines
