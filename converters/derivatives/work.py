"""One model under differentiation: stages of it, typed again between them, and what is left of them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.prepare.load import Free
from onnx_backprop.converters.prepare.selection import Patterns
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.differentiate import Progress
from onnx_backprop.converters.reverse.expand import drop_dead, drop_unread
from onnx_backprop.converters.reverse.models.backward import Draft
from onnx_backprop.converters.reverse.models.differentiation import Differentiation
from onnx_backprop.opset import DOMAIN, OPSET_VERSION
from onnx_backprop.opset.graphs.walk import all_nodes

Model = ModelProto | ir.Model | str | Path
Names = Sequence[str] | None


class Options(TypedDict, total=False):
    """The keywords of every derivative, see `backward`."""

    stop: Patterns | None
    free: Free | None
    kernels: str
    inline: bool
    straight_through: bool
    strict: bool
    checkpoint: int
    progress: Progress


class Work(Draft):
    """A model to which derivatives are added."""

    def __init__(self, model: Model, wrt: Names, of: Names, **options: Unpack[Options]) -> None:
        """wrt, of: the names that the caller is going to differentiate."""
        super().__init__(model, names={"wrt": wrt, "of": of}, **options)

    def plan(self, wrt: Names, of: Names) -> Differentiation:
        """What would be differentiated by what."""
        return Differentiation(self.model, wrt=wrt, of=of, quiet=True)

    def inputs(self, names: Iterable[str]) -> list[ir.Value]:
        return _picked(self.graph.inputs, names)

    def outputs(self, names: Iterable[str]) -> list[ir.Value]:
        return _picked(self.graph.outputs, names)

    def drop_outputs(self, names: Iterable[str]) -> None:
        """Take outputs, which another stage needed, away, with the nodes that nothing else reads."""
        for value in self.outputs(names):
            self.graph.outputs.remove(value)
        drop_dead(self.graph)

    def append(self, op: Builder) -> None:
        """Put what a builder has emitted, and outputs need, behind the graph's nodes."""
        drop_unread(op.nodes, self.graph.outputs)
        self.graph.extend(op.nodes)
        if any(node.domain == DOMAIN for node in all_nodes(op.nodes)):
            self.model.opset_imports.setdefault(DOMAIN, OPSET_VERSION)


def named(names: Mapping[str, str], suffix: str) -> dict[str, str]:
    """{value: <x><suffix>} for {x: value}: what a second stage calls the seed or the gradient of a value."""
    return {value: f"{x}{suffix}" for x, value in names.items()}


def _picked(values: Sequence[ir.Value], names: Iterable[str]) -> list[ir.Value]:
    known = {str(value.name): value for value in values}
    return [known[name] for name in names]
