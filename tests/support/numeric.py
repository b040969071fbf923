"""Running models and differentiating functions by finite differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from onnx import ModelProto

import onnx_backprop as ob


def outputs(model: ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output of one run in an onnxruntime session, by name."""
    session = ob.session(model)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, map(np.asarray, session.run(names, dict(feeds))), strict=True))


def central_differences(f: Callable[[np.ndarray], float], x: np.ndarray, *, step: float = 1e-5) -> np.ndarray:
    """The gradient of a scalar function of a float64 array, element by element."""
    assert x.dtype == np.float64
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        moved = x.copy()
        moved[index] = x[index] + step
        above = f(moved)
        moved[index] = x[index] - step
        gradient[index] = (above - f(moved)) / (2 * step)
    return gradient
