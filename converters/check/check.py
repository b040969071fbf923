"""`check`: are the gradients of a model right? The whole model first, then node by node where it is not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, NodeProto, numpy_helper

from onnx_backprop.converters.check.check_model import Examination, Examiner, Open, Progress, path_between
from onnx_backprop.converters.check.differences import RIGHT, UNDECIDED, WRONG, Answer
from onnx_backprop.converters.check.feeds import Feeds
from onnx_backprop.converters.check.report import GradientReport, NodeResult, Result
from onnx_backprop.converters.prepare.accept import put_in_order
from onnx_backprop.converters.prepare.exporters.detached import is_stop, restore_detached
from onnx_backprop.converters.prepare.exporters.hidden_weights import lift_weights
from onnx_backprop.converters.prepare.ir_models import to_ir, to_proto
from onnx_backprop.converters.prepare.load import prepare
from onnx_backprop.converters.prepare.selection import Patterns
from onnx_backprop.converters.prepare.stops import prepared
from onnx_backprop.converters.prepare.submodel import Submodels, boundary, chunks, with_outputs
from onnx_backprop.converters.reverse.models.backward import DEFAULT_KERNELS
from onnx_backprop.opset.core.errors import InvalidArgumentError, OnnxBackpropError
from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.core.progress import shown
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.edit import copied
from onnx_backprop.opset.graphs.walk import all_nodes, called, reads, subgraphs

CHUNK = 64  # nodes whose inputs are kept at the same time


def check(
    model: ModelProto | ir.Model | str | Path,
    open_session: Open,
    *,
    wrt: Sequence[str] | None = None,
    of: Sequence[str] | None = None,
    stop: Patterns | None = None,
    feeds: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
    kernels: str = DEFAULT_KERNELS,
    tolerance: float | None = None,
    nodes: bool = False,
    float64: bool = False,
    progress: Progress | None = None,
) -> GradientReport:
    """The report of `onnx_backprop.check_gradients`; `open_session` makes a model into a function that runs it."""
    progress = progress or partial(shown, what="checking", unit="check")
    proto = copied(load(model))
    put_in_order(proto)
    lift_weights(proto)
    restore_detached(proto)  # as `backward` does, whose stops the differences are to hold
    if stop is not None or any(map(is_stop, all_nodes(proto))):
        proto = _stopped(proto, wrt, of, stop)
    examiner = Examiner(open_session, seed, kernels, tolerance, float64=float64)
    if feeds is not None and not isinstance(feeds, Mapping):
        raise InvalidArgumentError(f"feeds: expected arrays by the names of inputs, got {feeds!r}")
    whole = examiner.examine(proto, wrt, of, dict(feeds or {}), progress)
    rounding = tuple(sorted(whole.rounding, key=lambda one: -one.largest))
    report = GradientReport(whole.results, whole.forward, seed, rounding=rounding)
    if report.verdict == RIGHT and not nodes:
        return report
    return NodeByNode(examiner, whole).extend(report, progress)


def _stopped(
    proto: ModelProto, wrt: Sequence[str] | None, of: Sequence[str] | None, stop: Patterns | None
) -> ModelProto:
    """The model with its stops as nodes of the main graph, where their values can be held."""
    result = to_proto(prepared(proto, stop=stop, wrt=wrt, of=of)[1])
    for node in result.graph.node:
        if any(map(is_stop, all_nodes(inner for graph in subgraphs(node) for inner in graph.node))):
            raise InvalidArgumentError(
                f"{node.op_type} {called(node)!r} has a stop inside, in whose place no difference of the model's "
                "outputs can hold a value. Check the model without it",
                "stop",
            )
    return result


class NodeByNode:
    """Which node is to blame: each one checked alone, at the values that reach it in the whole model."""

    def __init__(self, examiner: Examiner, whole: Examination) -> None:
        self.examiner = examiner
        self.prepared = prepare(_with_values(whole.model, whole.values))
        graph = to_ir(self.prepared).graph
        self.path = path_between(graph, whole.outputs, whole.variables)
        self.active = {str(value.name) for value in self.path.active}
        self.submodels = Submodels(self.prepared)
        on_path = {name for node in self.path.nodes for name in (str(v.name) for v in node.outputs) if name}
        self.nodes = [node for node in self.submodels.nodes if on_path & set(node.output)]
        self.feeds = {name: value for name, value in whole.feeds.items() if name not in whole.values}
        self.feeds |= {n: v for n, v in whole.values.items() if n in {i.name for i in self.prepared.graph.input}}

    def extend(self, report: GradientReport, progress: Progress) -> GradientReport:
        """The report with a line for every node, worst first, and the smallest sub-model that shows what is wrong."""
        results: list[NodeResult] = []
        smallest: tuple[int, ModelProto] | None = None
        remaining = iter(progress(self.nodes))
        for chunk in chunks(self.nodes, CHUNK):
            values = self._values(chunk)
            for _ in chunk:
                node = next(remaining)
                result = self._check([node], values)
                results.append(result)
                if result.verdict == WRONG:
                    size = sum(values[name].size for name in self.submodels.inputs([node]) if name in values)
                    if smallest is None or size < smallest[0]:
                        smallest = (size, self._extract([node], values))
        results.sort(key=lambda result: result.badness, reverse=True)
        report = replace(report, nodes=tuple(results))
        if smallest is not None:
            return replace(report, repro=smallest[1])
        if report.verdict == WRONG:
            return replace(report, repro=self._smallest_run())
        return report

    def _values(self, nodes: Sequence[NodeProto]) -> Feeds:
        """The values of everything that some nodes read."""
        names = sorted({name for node in nodes for name in reads(node)})
        constants = {name: to_array(t) for name, t in self.submodels.constants.items() if name in names}
        wanted = [name for name in names if name not in constants]
        computed = self.examiner.open(with_outputs(self.prepared, wanted))(self.feeds) if wanted else {}
        return constants | computed

    def _variables(self, nodes: Sequence[NodeProto]) -> list[str]:
        return [name for name in boundary(nodes) if name in self.active]

    def _extract(self, nodes: Sequence[NodeProto], values: Feeds) -> ModelProto:
        return self.submodels.extract(nodes, values, variables=self._variables(nodes))

    def _check(self, nodes: Sequence[NodeProto], values: Feeds) -> NodeResult:
        first = nodes[0]
        try:
            examined = self.examiner.examine(self._extract(nodes, values), self._variables(nodes), None, {})
        except OnnxBackpropError as e:
            return NodeResult(first.op_type, called(first), Result("", Answer(UNDECIDED, np.nan, (0, 0)), str(e)))
        worst = max(examined.results, key=lambda result: result.badness)
        rounding = max((one.largest for one in examined.rounding), default=0.0)
        return NodeResult(first.op_type, called(first), worst, rounding)

    def _smallest_run(self) -> ModelProto:
        """No node alone is wrong: the fewest consecutive nodes that are, found by halving from both ends."""
        count = len(self.nodes)

        def wrong(start: int, end: int) -> bool:
            some = self.nodes[start:end]
            return self._check(some, self._values(some)).verdict == WRONG

        start = _last(0, count - 1, lambda n: wrong(n, count))
        end = count - _last(0, count - start - 1, lambda n: wrong(start, count - n))
        nodes = self.nodes[start:end]
        return self._extract(nodes, self._values(nodes))


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number in [low, high] for which `holds`, given that it holds at `low` and not again once it fails."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _with_values(model: ModelProto, values: Feeds) -> ModelProto:
    """The model with its variables' initializers set to the values they were checked at."""
    result = copied(model)
    for tensor in result.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
    return result
