"""A model's forward and backward pass as two models, for a caller who computes the loss in between.

The forward model gives, beside the outputs, what the backward model reads: nothing is computed twice but what costs
nothing, as changes of shape, which would be copied as outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
from onnx import ModelProto, ValueInfoProto

from onnx_backprop.converters.parameters.choice import BUFFERS, choose
from onnx_backprop.converters.parameters.layout import Layout, layout_of
from onnx_backprop.converters.parameters.report import warn_of
from onnx_backprop.converters.prepare.exporters.origins import FROZEN, NAMED, origin_of
from onnx_backprop.converters.prepare.exporters.statistics import STATISTICS
from onnx_backprop.converters.prepare.exporters.torch_metadata import BUFFER
from onnx_backprop.converters.prepare.ir_models import to_proto
from onnx_backprop.converters.prepare.load import infer_large
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import is_float
from onnx_backprop.converters.reverse.models.backward import Draft
from onnx_backprop.converters.reverse.path import find_path
from onnx_backprop.converters.training.modes import draw_masks, infer_mode, keep_statistics, renew_statistics, train
from onnx_backprop.converters.training.sharing import describe_shared, shared
from onnx_backprop.converters.training.sharing import untie as separate
from onnx_backprop.converters.training.split import part
from onnx_backprop.converters.training.stops.biases import stop_second_biases, warn_of_second_biases
from onnx_backprop.converters.training.stops.estimators import stop_estimators, warn_of_estimators
from onnx_backprop.converters.training.stops.padding import stop_padding, warn_of_padding
from onnx_backprop.opset.core.errors import warn
from onnx_backprop.opset.core.mapped import Numbers, by_reference
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.edit import without_tensors
from onnx_backprop.opset.graphs.facts import HANDS_ON, MAY_SHARE, VIEW
from onnx_backprop.opset.graphs.names import used_names
from onnx_backprop.opset.graphs.order import ancestors, positions
from onnx_backprop.opset.graphs.walk import is_standard, reads


@dataclass(frozen=True)
class Variables:
    """A model that is prepared; its parameters, the running statistics of its BatchNormalizations, and buffers.

    layouts: where each of them lies in the module that was exported.
    numbers: of the model that came, to which this one refers; None where it has its own.
    """

    model: ModelProto
    parameters: tuple[str, ...]
    statistics: tuple[str, ...]
    buffers: tuple[str, ...]
    layouts: dict[str, Layout]
    numbers: Numbers | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.parameters, *self.statistics, *self.buffers)


@dataclass(frozen=True)
class Passes:
    """Both passes in one model, the nodes of the forward one first.

    model: parameters and statistics are inputs without values.
    outputs: of the model that came.
    statistics: each running statistic of a BatchNormalization in training mode and the output that is its new value.
    masks: the input that Dropouts draw their masks from, int64 (2,): a seed and a number; None without such nodes.
    seeds: each float output and the input that is its gradient.
    gradients: each variable that is differentiated by and the output that is its gradient.
    """

    model: ModelProto
    outputs: tuple[str, ...]
    statistics: dict[str, str]
    masks: str | None
    seeds: dict[str, str]
    gradients: dict[str, str]

    @property
    def ends(self) -> list[str]:
        """The outputs of the forward pass."""
        return [*self.outputs, *self.statistics.values()]

    def _parts(self) -> tuple[list[int], set[int]]:
        """The positions of the nodes of the forward pass, and those of the rest."""
        nodes = self.model.graph.node
        early = ancestors(nodes, self.ends)
        return early, set(ancestors(nodes, self.gradients.values())).difference(early)

    @property
    def inputs_of_backward(self) -> tuple[str, ...]:
        """The inputs, without seeds, that the backward pass reads, be it in a value that may lie in an input's memory.

        onnxruntime gives a changed shape the memory of what came, takes a Mul by 1 away, and transposes a transposed
        value into the one in front of both.
        """
        nodes, inputs = self.model.graph.node, [v.name for v in self.model.graph.input]
        early, late = self._parts()
        origin = {name: name for name in inputs}  # of each value that depends on inputs; "": memory of its own
        for node in (nodes[n] for n in early):
            varying = [name for name in node.input if name in origin]
            if varying:
                shares = node in MAY_SHARE and (node in HANDS_ON or len(varying) == 1)
                origin |= dict.fromkeys(node.output, origin[varying[0]] if shares else "")
        read = {origin.get(name) for name in set(self.gradients.values()).union(*(reads(nodes[n]) for n in late))}
        return tuple(name for name in inputs if name in read.difference(self.seeds.values()))

    def split(
        self, types: Callable[[ModelProto], dict[str, ValueInfoProto]]
    ) -> tuple[ModelProto, ModelProto, tuple[str, ...]]:
        """(the forward model, the backward model, what the first hands to the second).

        types: of the outputs of the forward model, which inference may not have found.
        """
        nodes = list(self.model.graph.node)
        maker = positions(nodes)
        early, late = self._parts()
        read = set(self.gradients.values()).union(*(reads(nodes[n]) for n in late))
        free = [n for n in early if nodes[n] in VIEW or is_standard(nodes[n], "Constant")]
        again = {free[n] for n in ancestors([nodes[n] for n in free], read)}
        read = read.union(*(reads(nodes[n]) for n in again))
        residuals = sorted(name for name in read if name in maker and maker[name] not in late | again)
        declared = {v.name: v for v in (*self.model.graph.value_info, *self.model.graph.output)}
        ends = [*self.ends, *(name for name in residuals if name not in self.ends)]
        known = [declared.get(name, ValueInfoProto(name=name)) for name in ends]
        forward = part(self.model, [nodes[n] for n in early], [], known)
        value_types = types(forward)
        backward = part(
            self.model,
            [nodes[n] for n in sorted(late | again)],
            [],
            [declared[name] for name in dict.fromkeys(self.gradients.values())],
            {name: value_types[name] for name in residuals},
        )
        return forward, backward, tuple(residuals)


def variables(model: ModelProto | ir.Model | str | Path, *, untie: bool = False) -> Variables:
    """What a model has for a training: see `Variables`. untie: as of `training_graph`."""
    light, numbers = by_reference(load(model, mapped=True))
    return replace(_variables(Draft(light), untie=untie), numbers=numbers)


def _variables(draft: Draft, *, untie: bool) -> Variables:
    graph = draft.graph
    if untie:
        separate(graph)
    model = infer_large(
        to_proto(draft.model)
    )  # without the stops, which `passes` puts into the graph it differentiates
    warn_of_estimators(stop_estimators(graph))
    floats = [value for value in graph.initializers.values() if is_float(value)]
    path = find_path(graph, [y for y in graph.outputs if is_float(y)], floats)
    choice = choose(graph, [value for value in floats if value in path.active])
    trained = [value for value in floats if value in path.active and value not in choice.left_out]
    warn_of(graph, choice, trained)
    trained_names = [str(value.name) for value in trained]
    warn_of_padding(stop_padding(graph), trained_names)
    warn_of_second_biases(stop_second_biases(graph), trained_names)
    parameters = [*trained, *(value for value in floats if origin_of(value).kind == FROZEN)]
    normalizations = [node for node in graph if node.domain == "" and node.op_type == "BatchNormalization"]
    read = [value for node in normalizations for place in STATISTICS if (value := node.inputs[place]) is not None]
    statistics = [value for value in dict.fromkeys(read) if value.is_initializer()]
    rest = [value for value in floats if value not in (*trained, *statistics)]
    unread = [value for value in rest if value not in path.active and origin_of(value).kind == BUFFER]
    named = [value for value, what in choice.left_out.items() if what in BUFFERS or origin_of(value).kind == NAMED]
    buffers = [*(value for value in rest if value in named), *unread]
    names = {str(value.name) for value in parameters}
    together = {name: readers for name, readers in shared(graph).items() if name in names}
    if together:
        warn(describe_shared(together))
    groups = [tuple(str(value.name) for value in group) for group in (parameters, statistics, buffers)]
    layouts = {str(value.name): layout_of(value) for value in (*parameters, *statistics, *buffers)}
    return Variables(model, *groups, layouts=layouts)


def inference(variables: Variables) -> ModelProto:
    """The model in inference mode."""
    draft = Draft(variables.model, ready=True)
    infer_mode(draft.graph)
    return draft.finish()


def passes(variables: Variables, wrt: Sequence[str], *, training: bool, kept: Collection[str] = ()) -> Passes:
    """The passes of a model with gradients by `wrt`, parameters and statistics being inputs without values.

    training: with Dropout and BatchNormalization in training mode, else in inference mode, as those BatchNormalizations
    are in either that read a statistic among `kept`. Errors: as `backward`.
    """
    draft = Draft(variables.model, ready=True, progress=iter)
    inputs = set(variables.names)
    graph = draft.graph
    outputs = tuple(str(value.name) for value in graph.outputs)
    (train if training else infer_mode)(graph)
    keep_statistics(graph, (), graph.initializers, kept)
    for stop in (stop_estimators, stop_padding, stop_second_biases) if wrt else ():
        stop(graph)
    op = Builder(used_names(graph))
    statistics = {
        str(old.name): str(new.name) for old, new in (renew_statistics(graph, op) if training else {}).items()
    }
    masks = draw_masks(graph, op) if training else None
    if masks is not None:
        graph.inputs.append(masks)
    draft.infer_types()
    graph = draft.graph
    values = {str(value.name): value for node in graph for value in node.outputs}
    seeds: dict[str, str] = {}
    gradients: dict[str, str] = {}
    if wrt:
        differentiation, gradients = draft.differentiate(wrt=wrt, of=None, seed_all=True, quiet=True)
        seeds = differentiation.seeds
    graph.outputs.extend(values[name] for name in statistics.values() if not values[name].is_graph_output())
    graph.inputs.extend(
        value for name, value in graph.initializers.items() if name in inputs and not value.is_graph_input()
    )
    model = without_tensors(draft.finish(), inputs)
    return Passes(model, outputs, statistics, None if masks is None else str(masks.name), seeds, gradients)
