"""Random valid models: each node is run by onnxruntime as it is added, and one that it refuses is left out.

A model is what its number says, in every run. Its floats are float32 or float64, its values small and finite, its
outputs depend on inputs and weights in every way that `STEPS` has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnxruntime
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from onnx_backprop.opset.graphs.walk import reads

Feeds = dict[str, np.ndarray]
LARGEST, MOST = 50.0, 200  # of the numbers and of the elements of a value
IR_VERSION, DEPTH = 10, 2


def exact() -> onnxruntime.SessionOptions:
    """Options without output, and without what changes results.

    That are products with dequantised weights, which are rounded, and an optimizer that takes away an Expand of a length
    of 1 to a fixed one of 0.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    options.add_session_config_entry("optimization.disable_specified_optimizers", "ExpandElimination")
    return options


QUIET, PLAIN = exact(), exact()
PLAIN.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
onnxruntime.set_default_logger_severity(3)  # RoiAlign warns of every node
QUIET.intra_op_num_threads = PLAIN.intra_op_num_threads = 1


class RejectedError(Exception):
    """What was drawn is no valid node here."""


def stock(model: ModelProto) -> onnxruntime.InferenceSession:
    """A session of stock onnxruntime, without its optimizations where these fail on a model that loads."""
    source, providers = model.SerializeToString(), ["CPUExecutionProvider"]
    try:
        return onnxruntime.InferenceSession(source, QUIET, providers=providers)
    except Exception as e:  # noqa: BLE001 - of many classes
        try:
            return onnxruntime.InferenceSession(source, PLAIN, providers=providers)
        except Exception:  # noqa: BLE001
            raise e from None


def run_stock(model: ModelProto, feeds: Feeds, outputs: Sequence[str] | None = None) -> list[np.ndarray]:
    """One run in stock onnxruntime, which is given copies."""
    session = stock(model)
    accepted = {v.name for v in (*session.get_inputs(), *session.get_overridable_initializers())}
    fed = {k: v.copy() for k, v in feeds.items() if k in accepted}
    return list(map(np.asarray, session.run(outputs, fed)))


@dataclass
class Graph:
    """A graph that grows. seen: its values, those of the graphs around included. unread: those that nodes may not read."""

    rng: np.random.Generator
    opset: int
    dtype: type
    outer: Graph | None = None
    seen: Feeds = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)
    weights: Feeds = field(default_factory=dict)
    inputs: Feeds = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)

    @property
    def depth(self) -> int:
        return 0 if self.outer is None else self.outer.depth + 1

    def name(self, kind: str) -> str:
        """A name that no graph around has; branches of one node share theirs."""
        return f"{kind}{'abc'[self.depth]}{len(self.seen)}"

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, items: Sequence) -> object:
        return items[int(self.rng.integers(len(items)))]

    def value(self, holds: Callable[[np.ndarray], bool] = lambda _: True, kind: str = "f") -> str:
        """A value of floats, integers or booleans of which something holds, late ones more often."""
        names = [n for n, v in self.seen.items() if v.dtype.kind == kind and n not in self.unread and holds(v)]
        if not names:
            raise RejectedError
        return names[-1 - int(len(names) * self.rng.random() ** 2)]

    def weight(self, shape: Sequence[int], low: float = -1, high: float = 1, *, tied: float = 0.3) -> str:
        """A float tensor: one that is there already, an initializer here or in the main graph, or an input."""
        shape = tuple(int(n) for n in shape)
        same = [
            n
            for n, v in self.seen.items()
            if n in self.weights and n not in self.unread
            if v.dtype == self.dtype and v.shape == shape and v.min(initial=low) >= low
        ]
        if same and self.chance(tied):
            return str(self.pick(same))
        array = self.rng.uniform(low, high, shape).astype(self.dtype)
        graphs = [self]
        while (outer := graphs[-1].outer) is not None and (len(graphs) > 1 or self.chance(0.5)):
            graphs.append(outer)
        root = graphs[-1]
        name = root.name("w")
        for graph in graphs:
            graph.seen[name] = array
        (root.inputs if root.outer is None and low == -1 and self.chance(0.2) else root.weights)[name] = array
        return name

    def constant(self, array: object, dtype: type | None = None) -> str:
        """Numbers that say what a node does: an initializer, a Constant, or what a node computes of them."""
        value = np.asarray(array, dtype or np.int64)
        if self.chance(0.5):
            name = self.name("k")
            self.seen[name] = self.weights[name] = value
            return name
        return self.emit("Constant", [], value=numpy_helper.from_array(value))

    def emit(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: object) -> str:
        """Add a node; its first result. RejectedError where onnxruntime refuses it or a number is not small and finite."""
        names = [self.name("v")] + [f"{self.name('v')}_{n}" for n in range(1, outputs)]
        given = {k: v for k, v in attributes.items() if v != []}
        node = helper.make_node(op, inputs, names, name=f"{op}_{names[0]}", **given)
        fed = {n: self.seen[n] for n in sorted(reads(node)) if n}
        infos = [info_of(n, v) for n, v in fed.items()]
        model = wrapped(
            helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(n) for n in names]), self.opset
        )
        try:
            results = run_stock(model, fed)
        except Exception as e:  # noqa: BLE001 - of many classes
            raise RejectedError(str(e)) from None
        for value in results:
            large = value.dtype.kind != "b" and np.abs(value).max(initial=0) > LARGEST
            if value.size > MOST or value.ndim > 5 or large or not np.isfinite(value).all():
                raise RejectedError
        self.nodes.append(node)
        self.seen.update(zip(names, results, strict=True))
        return names[0]

    def inner(self, **inputs: np.ndarray) -> Graph:
        graph = Graph(self.rng, self.opset, self.dtype, self, dict(self.seen), unread=self.unread)
        graph.seen |= inputs
        graph.inputs = dict(inputs)
        return graph

    def grow(self, count: int) -> None:
        """Try to add so many steps."""
        for _ in range(count):
            before = dict(self.seen), list(self.nodes), dict(self.weights), dict(self.inputs)
            try:
                STEPS[int(self.rng.choice(len(STEPS), p=np.array(_WEIGHTS) / sum(_WEIGHTS)))](self)
            except RejectedError:
                self.seen, self.nodes, self.weights, self.inputs = before

    def proto(self, outputs: Sequence[str]) -> GraphProto:
        tensors = [numpy_helper.from_array(v, n) for n, v in self.weights.items()]
        infos = [[info_of(n, self.seen[n]) for n in names] for names in (self.inputs, outputs)]
        return helper.make_graph(self.nodes, "g", infos[0], infos[1], tensors)


def wrapped(graph: GraphProto, opset: int) -> ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSION)


def info_of(name: str, value: np.ndarray):
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


STEPS: list[Callable[[Graph], object]] = []
_WEIGHTS: list[float] = []


def step(often: float) -> Callable[[Callable[[Graph], object]], Callable[[Graph], object]]:
    def register(function: Callable[[Graph], object]) -> Callable[[Graph], object]:
        STEPS.append(function)
        _WEIGHTS.append(often)
        return function

    return register
