"""`Trainer.summary`: what is trained, layer by layer, and what a step takes of memory and operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_backprop.converters import pages
from onnx_backprop.converters.tables import format_bytes, table, wrapped

if TYPE_CHECKING:
    from onnx_backprop.training.reports.layers import Layers

_HEADER = ("layer", "operator", "output", "parameters", "FLOPs")
_NUMBERS = (3, 4)
_ROWS = 40  # that a page lists at once


@dataclass(frozen=True)
class Summary:
    """The layers of a model in training, and what they come to; text, and a table in a notebook."""

    layers: Layers
    facts: dict[str, str]

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each layer."""
        return [
            (
                each.name,
                each.operator,
                "?" if each.shape is None else "×".join(map(str, each.shape)) or "scalar",
                f"{each.parameters:,}" + ("" if each.trained == each.parameters else f" ({each.trained:,} trained)"),
                _counted(each.operations),
            )
            for each in self.layers.layers
        ]

    def text(self, most: int | None = None) -> str:
        """As lines. most: rows to show, None for all."""
        rows = self.rows()
        shown = rows[:most]
        if len(shown) < len(rows):
            shown.append((f"… and {len(rows) - len(shown)} more", *[""] * (len(_HEADER) - 1)))
        lines = table(_HEADER, shown, numbers=_NUMBERS)
        return "\n".join((*lines, *(wrapped(f"{name}: {value}") for name, value in self.facts.items())))

    __str__ = text

    __repr__ = __str__  # what a session of Python shows

    def _repr_html_(self) -> str:
        """For notebooks."""
        shown = pages.table(_HEADER, self.rows(), numbers=_NUMBERS, most=_ROWS)
        return pages.fragment(shown, pages.facts(self.facts))


def summary(trainer: Any, /, *batch: Any, **more: Any) -> Summary:
    """The layers, output shapes, parameters, operations and memory of a step, and how far the training is.

    batch: as `step` takes one, whose lengths those of the shapes are. Without it each length that the model leaves open
    is 1. FLOPs are 2 for each multiplication of a product, of the forward pass; a step takes about three times as many.
    Memory is of the graph, before kernels join nodes: weights, what the optimizer keeps beside them, and what the
    backward part reads of the forward part.

    Errors: InvalidArgumentError for a batch that does not fit.
    """
    from onnx_backprop.training.reports.layers import layers_of  # for which onnx_ir is imported

    given = trainer.inputs.together(batch, more)
    fed = trainer.inputs.checked(given) if given else {}
    lengths: dict[str, int] = {}
    for value in trainer.graph.model.graph.input:
        shape: Sequence[int] = np.shape(fed[value.name]) if value.name in fed else ()
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param:
                lengths.setdefault(dim.dim_param, shape[axis] if axis < len(shape) else 1)
    details = layers_of(trainer.graph, lengths)
    parameters, trained = (sum(getattr(each, name) for each in details.layers) for name in ("parameters", "trained"))
    operations = sum(each.operations for each in details.layers)
    sizes = ", ".join(f"{name} {'×'.join(map(str, np.shape(array)))}" for name, array in fed.items())
    if not fed:
        sizes = "every length that is open is 1" if lengths else "of the model's lengths"
        if any(each.shape is None for each in details.layers):
            sizes += "; some shapes then are not known: give it a batch"
    total = details.weights + details.state + details.activations
    facts = {
        "batch": sizes,
        "parameters": f"{parameters:,}, {trained:,} trained",
        "FLOPs": f"{_counted(operations)} forward, about {_counted(3 * operations)} a step",
        "memory": f"about {format_bytes(total)}: weights {format_bytes(details.weights)}, optimizer and statistics "
        f"{format_bytes(details.state)}, activations {format_bytes(details.activations)}",
    }
    if trainer.graph.options.memory:
        facts["activations"] = trainer.graph.memory_summary()
    facts["training"] = f"{trainer.steps:,} steps, epoch {trainer.epoch}, learning rate {trainer.learning_rate:g}"
    if trainer.losses.points:
        facts["loss"] = f"{trainer.losses.points[0][1]:.4g} -> {trainer.losses.last:.4g}"
    return Summary(details, facts)


def _counted(number: float) -> str:
    """A number with a prefix: 1.2 G."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {prefix}"
    return f"{number:g}"
