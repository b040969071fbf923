"""Whether the numbers that a file trains by default are those of the module's parameters, for `verdict`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from tests.fidelity.compare import Difference, difference, unnamed
from tests.fidelity.reference import gradients
from tests.field.sources import Feeds

YES, WARNED, NO = "yes", "warned", "no"
CLAMPED = 2e-7  # what the converters to float16 make of numbers that are nearer to 0 than 1e-7


def comparable(variant: str) -> bool:
    """What is quantised stores other numbers."""
    return not variant.endswith("int8")


def trained(module: Any, loss: str, batch: tuple[np.ndarray, ...]) -> tuple[Feeds, Feeds]:
    """Values and gradients of the parameters that require a gradient and influence the loss. batch: target last."""
    grads = gradients(module, loss, batch)
    return {name: p.detach().numpy() for name, p in module.named_parameters() if name in grads}, grads


def same_parameters(
    graph: Any, there: tuple[Feeds, Feeds], texts: Sequence[str], model: onnx.ModelProto
) -> tuple[str, str]:
    """yes, warned or no, and which tensors differ.

    graph: of a conversion by default. there: what the module trains, as `trained` says. texts: the sentences of the
    conversion's OnnxBackpropWarnings; one that counts the last of its tensors ("and 72 more") names those of the graph's
    table that are doubtful for its reason.
    """
    values, (parameters, grads) = graph.initial_values(), there
    slack: dict[str, float] = {}
    if any(value.dtype == np.float16 for value in values.values()):
        parameters = {name: value.astype(np.float16) for name, value in parameters.items()}
        slack = dict.fromkeys(parameters, CLAMPED)
    other = difference(values, parameters, slack, {name: gradient != 0 for name, gradient in grads.items()})
    if not other:
        return YES, ""
    counted = [text for text in texts if re.search(r" and \d+ more \(", text)]
    rows = [r for r in graph.rows() if r.doubt and any(f"({r.doubt})" in text for text in counted)]
    silent = unnamed(other, [*texts, *(r.name for r in rows)], _stored(model), parameters, values)
    return (NO, f"{_short(other)}; no warning names {_few(silent)}") if silent else (WARNED, _short(other))


def _short(other: Difference) -> str:
    parts = ("trained, no parameter", other.extra), ("parameter, not trained", other.missing)
    return "; ".join(f"{what}: {_few(names)}" for what, names in parts if names)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _stored(model: onnx.ModelProto) -> Feeds:
    """The float tensors of the file."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {name: value for name, value in arrays.items() if value.dtype.kind == "f"}
