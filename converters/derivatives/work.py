"""One model under differentiation: stages of `Differentiation`, typed again between them, and what is left of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import onnx_ir as ir
from onnx import ModelProto

from onnx_backprop.converters.derivatives.batched import write_out
from onnx_backprop.converters.prepare.free import Free
from onnx_backprop.converters.prepare.ir_models import to_ir, to_proto
from onnx_backprop.converters.prepare.load import infer_large
from onnx_backprop.converters.prepare.selection import Patterns
from onnx_backprop.converters.prepare.stops import prepared
from onnx_backprop.converters.prepare.writing.inline import check_inline
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.differentiate import Progress
from onnx_backprop.converters.reverse.expand import drop_unread
from onnx_backprop.converters.reverse.models.backward import DEFAULT_KERNELS, Differentiation, finish_short
from onnx_backprop.converters.reverse.models.derivatives import Derivative, record
from onnx_backprop.opset import DOMAIN, OPSET_VERSION
from onnx_backprop.opset.core.progress import shown
from onnx_backprop.opset.functions.use_kernels import check_kernels
from onnx_backprop.opset.graphs.walk import all_nodes

Model = ModelProto | ir.Model | str | Path


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


@dataclass(frozen=True)
class Settings:
    """The same with their defaults."""

    stop: Patterns | None = None
    free: Free | None = None
    kernels: str = DEFAULT_KERNELS
    inline: bool = False
    straight_through: bool = False
    strict: bool = False
    checkpoint: int = 0
    progress: Progress = field(default=shown)


class Work:
    """A prepared model to which derivatives are added; values go by their names, which stages keep.

    wrt, of: the names that the caller is going to differentiate.
    """

    def __init__(self, model: Model, wrt: Sequence[str] | None, of: Sequence[str] | None, settings: Settings) -> None:
        check_kernels(settings.kernels)
        check_inline(settings.kernels, inline=settings.inline)
        self.settings = settings
        self.original, self.model = prepared(model, stop=settings.stop, free=settings.free, wrt=wrt, of=of)

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def plan(self, wrt: Sequence[str] | None, of: Sequence[str] | None) -> Differentiation:
        """What would be differentiated by what."""
        return Differentiation(self.model, wrt=wrt, of=of, quiet=True)

    def differentiate(self, **arguments: Any) -> tuple[Differentiation, dict[str, str]]:
        """A stage of the reverse mode, and {x: its gradient}."""
        given = {name: getattr(self.settings, name) for name in ("straight_through", "strict", "checkpoint")}
        stage = Differentiation(self.model, progress=self.settings.progress, **(given | arguments))
        return stage, stage.emit()

    def type(self) -> None:
        """Give what a stage has emitted its types and shapes, which the next one wants to know."""
        self.model = to_ir(infer_large(to_proto(self.model)))

    def begin_batch(self, seeds: Iterable[str]) -> None:
        """The same before products with several seeds; bodies in standard operators are taken apart for that."""
        self.type()
        if self.settings.kernels == "onnx":
            write_out(self.graph, self.inputs(seeds), self.model.opset_imports)

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

    def done(self, made: Derivative) -> ModelProto:
        """The model with its outputs in order: its own, then the results."""
        record(self.model, made)
        return finish_short(self.model, self.original, self.settings.kernels, inline=self.settings.inline)


def drop_dead(graph: ir.Graph) -> None:
    """Remove the nodes of a graph that no output of it depends on."""
    nodes = list(graph)
    kept = list(nodes)
    drop_unread(kept, graph.outputs)
    graph.remove(set(nodes).difference(kept))


def named(names: Mapping[str, str], suffix: str) -> dict[str, str]:
    """{value: <x><suffix>} for {x: value}: what a second stage calls the seed or the gradient of a value."""
    return {value: f"{x}{suffix}" for x, value in names.items()}


def _picked(values: Sequence[ir.Value], names: Iterable[str]) -> list[ir.Value]:
    known = {str(value.name): value for value in values}
    return [known[name] for name in names]
