"""One worked example: a call of an operator and its answer.

In `inputs` a nested list is data and a tuple is the value of an integer input; None is an absent one.
Unless a comment says otherwise a convolution has N = C = 1 and weights [1, 10, 100], so that the digits of a result
tell which cell of the gradient met which cell of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_backprop.opset.core.op import NUMBER_TYPES
from onnx_backprop.opset.operators.registry import BY_NAME

Attributes = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One call of one operator and its answer."""

    id: str
    op: str
    attributes: Attributes
    inputs: tuple[list[Any] | tuple[int, ...] | None, ...]
    expected: list[Any]
    more: tuple[list[Any], ...] = ()  # further outputs

    def arrays(self) -> list[np.ndarray | None]:
        """The inputs as float32 and integer arrays, the latter of the type that the operator takes."""
        result: list[np.ndarray | None] = []
        for spec, given in zip(BY_NAME[self.op].inputs, self.inputs, strict=False):
            kind = NUMBER_TYPES[spec.type_name].dtype if isinstance(given, tuple) else np.float32
            result.append(None if given is None else np.array(given, dtype=kind))
        return result


def row(*values: float) -> list[Any]:
    """One row of one channel: shape (1, 1, length)."""
    return [[list(values)]]


def zeros(*shape: int) -> list[Any]:
    """A source of which only the shape matters."""
    return np.zeros(shape).tolist()
