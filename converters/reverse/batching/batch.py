"""`batch`: what depends on chosen values of a graph, for many of them along a new leading axis.

Nodes are taken in their order. A node with a batching rule becomes what the rule emits; one without, that has a body of
standard operators, becomes that body. The others gather, and become the body of one Scan when something outside needs
what they make. What does not depend on the values stays as it is, and is computed once.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from onnx_backprop.converters.reverse.batching import axes, elementwise, folds, moves, products
from onnx_backprop.converters.reverse.batching.control import batch_control, comes_apart, control_of
from onnx_backprop.converters.reverse.batching.registry import RULES, Answer, Rows, Shared, repeated
from onnx_backprop.converters.reverse.batching.together import spans
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.expand import Expansion, function_body, rename
from onnx_backprop.converters.reverse.forward import label, unsupported
from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.converters.reverse.unread import detach
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import OnnxBackpropError
from onnx_backprop.opset.core.shapes import Dim
from onnx_backprop.opset.graphs.facts import DRAWS
from onnx_backprop.opset.graphs.names import named_after, unique
from onnx_backprop.opset.graphs.order import descendants
from onnx_backprop.opset.graphs.walk import DEFAULT_DOMAINS, all_nodes, is_standard, subgraphs, values_read

AXIS = "seeds"  # the symbol of the leading axis of seeds
_RULE_MODULES = (axes, elementwise, folds, moves, products)  # imported for their rules


def batch(
    graph: ir.Graph,
    op: Builder,
    seeds: Sequence[ir.Value],
    results: Sequence[ir.Value],
    opsets: Mapping[str, int],
    *,
    stacked: Sequence[ir.Value] | None = None,
    symbol: Dim = None,
    by_rules: bool = True,
) -> list[ir.Value]:
    """One result for every entry of the seeds along a new axis 0.

    seeds: graph inputs, which get that axis; results: graph outputs. What does not depend on the seeds is computed
    once. stacked: values with that axis, in the place of the seeds, which go from the inputs. symbol: its length;
    None for a symbol that is new to the graph, since onnxruntime reuses memory between equal ones.
    by_rules: False puts everything into one Scan. Returns what takes the place of the results, among the outputs too,
    under their names; `<x>_rows` is what an input that is an output too becomes.
    """
    symbol = free_symbol(graph, AXIS) if symbol is None else symbol
    rows: list[ir.Value] = []
    for seed in seeds:
        row = ir.Value(name=op.unique(f"{seed.name}_row"), type=seed.type, shape=seed.shape)
        seed.replace_all_uses_with(row, replace_graph_outputs=True)
        rows.append(row)
        if stacked is not None:
            graph.inputs.remove(seed)
        elif row.shape is not None:
            seed.shape = ir.Shape([symbol, *row.shape])
    batched = dict(zip(rows, seeds if stacked is None else stacked, strict=True))
    of_seeds = dict(zip(seeds, rows, strict=True))
    results = [of_seeds.get(value, value) for value in results]
    inside = descendants(graph, rows)
    places = [list(graph.outputs).index(value) for value in results]
    for value in results:
        graph.outputs.remove(value)
    graph.remove(inside)
    walk = _Walk(graph, op, batched, opsets, symbol, set(results))
    walk.take(inside, by_rules=by_rules)
    names = [str(seeds[rows.index(value)].name if value in rows else value.name) for value in results]
    outputs: list[ir.Value] = []
    for value in results:
        new = walk.result(value)
        if new in outputs or new.producer() is None or new.is_graph_output():
            new = op.Identity(new)
        new.type, new.shape = value.type, None if value.shape is None else ir.Shape([symbol, *value.shape])
        outputs.append(new)
    for value in results:
        if value.producer() is not None:
            value.name = op.unique(f"{value.name}_row")
    kept = {str(value.name) for value in (*graph.inputs, *graph.initializers.values(), *batched.values())}
    for place, name, new in sorted(zip(places, names, outputs, strict=True), key=lambda one: one[0]):
        new.name = op.unique(f"{name}_rows") if name in kept else name
        graph.outputs.insert(place, new)
    return outputs


def free_symbol(graph: ir.Graph, name: str) -> str:
    """A name for a length that no value of a graph has, those of its sub-graphs among them."""
    values = [value for one in (graph, *graph.subgraphs()) for value in (*one.inputs, *one.initializers.values())]
    values += [value for node in all_nodes(graph) for value in node.outputs]
    return unique(name, {length for value in values for length in dims(value) or () if isinstance(length, str)})


class _Walk:
    """The nodes of a graph, one after the other, and what has become of their values.

    batched: values of one row, and the same with all rows. wanted: values that are asked for at the end.
    """

    def __init__(
        self,
        graph: ir.Graph,
        op: Builder,
        batched: dict[ir.Value, ir.Value],
        opsets: Mapping[str, int],
        symbol: Dim,
        wanted: set[ir.Value],
        length: ir.Value | None = None,
    ) -> None:
        self._graph, self._op, self._batched, self._opsets = graph, op, batched, opsets
        self._symbol, self._wanted = symbol, wanted
        self._length = op.length(next(iter(batched.values())), 0) if length is None else length
        self._instead: dict[ir.Value, ir.Value] = {}
        self._folded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._readers: defaultdict[ir.Value, set[ir.Node]] = defaultdict(set)
        self._waiting: list[ir.Node] = []  # for a Scan
        self._waited_for: set[ir.Value] = set()  # what they make
        self._bound: set[ir.Node] = set()
        self._kept: set[ir.Node] = set()  # emitted as they are

    def take(self, nodes: Sequence[ir.Node], *, by_rules: bool) -> None:
        """All nodes, in their order."""
        for node in nodes:
            self._note_reads(node)
        together, self._bound = {0: len(nodes)}, set(nodes)
        if by_rules:
            together, self._bound, _ = spans(nodes, self._batched, comes_apart)
        last = -1
        for n, node in enumerate(nodes):
            if n in together:
                self._scan()
                last = together[n]
            self._take(node, in_span=n <= last)
            if n == last:
                self._scan()
        self._scan()

    def result(self, value: ir.Value) -> ir.Value:
        """A value with all rows, equal ones where it is the same for all of them."""
        while value in self._instead:
            value = self._instead[value]
        return self._batched[value] if value in self._batched else repeated(self._op, value, self._length)

    def _note_reads(self, node: ir.Node) -> None:
        for value in values_read(node):
            self._readers[value].add(node)

    def _take(self, node: ir.Node, *, in_span: bool) -> None:
        reads = values_read(node)
        waits = not reads.isdisjoint(self._waited_for)
        if not waits and reads.isdisjoint(self._batched):
            self._op.nodes.append(node)
            self._kept.add(node)
        elif node in self._bound or (waits and in_span):
            self._wait(node)
        elif subgraphs(node):
            if not self._by_bodies(node, waits=waits):
                self._wait(node)
        elif not self._by_rule(node, waits=waits):
            body = self._body(node)
            if body is None:
                self._wait(node)
            for inner in () if body is None else self._written_out(node, body):
                self._take(inner, in_span=in_span)

    def _wait(self, node: ir.Node) -> None:
        self._waiting.append(node)
        self._waited_for.update(node.outputs)

    def _by_rule(self, node: ir.Node, *, waits: bool) -> bool:
        """Whether a rule has served a node."""
        rule = RULES.get(("" if node.domain in DEFAULT_DOMAINS else node.domain, node.op_type))
        if rule is None:
            return False
        if waits:
            self._scan()
        self._op.prefix = named_after(label(node), node.op_type) or label(node)
        rows = Rows(self._op, node, self._batched, self._length, self._wanted, self._folded)
        answer: Answer = rule(self._op, rows)
        if answer is None:
            return False
        if isinstance(answer, Shared):
            self._replace(node.outputs[0], answer.value)
        else:
            results = [answer] if isinstance(answer, ir.Value) else answer
            for row, new in zip(node.outputs, results, strict=True):
                self._batched[row] = self._typed(new, row)
        detach(node)
        return True

    def _by_bodies(self, node: ir.Node, *, waits: bool) -> bool:
        """Whether the bodies of a branch or a loop have rows now."""
        differing = self._batched | dict.fromkeys(self._waited_for)
        control = control_of(node, differing)
        if control is None:
            return False
        if waits:
            self._scan()
        self._op.prefix = named_after(label(node), node.op_type) or label(node)
        values = [None if value is None else self._batched.get(value, value) for value in node.inputs]
        states = [
            self.result(value)
            for value in node.inputs[control.first : control.first + control.states]
            if value is not None
        ]
        outputs = batch_control(self._op, control, values, states, self._symbol, self._inside)
        for row, new in zip(node.outputs, outputs, strict=True):
            self._batched[row] = self._typed(new, row)
        detach(node)
        return True

    def _inside(
        self, body: ir.Graph, op: Builder, begin: dict[ir.Value, ir.Value], ends: Sequence[ir.Value]
    ) -> list[ir.Value]:
        """What the outputs of a body are with all rows, given what differs where it comes in."""
        batched = self._batched | begin
        nodes = descendants(body, batched)
        body.remove(nodes)
        walk = _Walk(body, op, batched, self._opsets, self._symbol, set(ends), self._length)
        walk.take(nodes, by_rules=True)
        return [walk.result(value) for value in ends]

    def _typed(self, new: ir.Value, row: ir.Value) -> ir.Value:
        if new.producer() is not None and new.name:
            new.type, new.shape = row.type, None if row.shape is None else ir.Shape([self._symbol, *row.shape])
        return new

    def _replace(self, value: ir.Value, new: ir.Value) -> None:
        """Let another value stand for one that a node makes."""
        if new.producer() is not None and value.type is not None:
            new.type, new.shape = value.type, value.shape
        self._readers[new] |= self._readers[value]
        value.replace_all_uses_with(new, replace_graph_outputs=True)
        self._instead[value] = new
        if value in self._wanted:
            self._wanted.add(new)

    def _body(self, node: ir.Node) -> Expansion | None:
        """What a node is made of; None of one that draws, since a row is to have numbers of its own."""
        if node.op_type in (*DRAWS, "Dropout") or node.domain not in (*DEFAULT_DOMAINS, DOMAIN):
            return None
        try:
            return function_body(node, self._opsets)
        except OnnxBackpropError:
            return None

    def _written_out(self, node: ir.Node, body: Expansion) -> list[ir.Node]:
        for reads in self._readers.values():
            reads.discard(node)
        for inner in body.nodes:
            rename(inner, named_after(label(node), node.op_type) or label(node), self._op.unique)
            self._note_reads(inner)
        for value, new in zip(node.outputs, body.outputs, strict=True):
            if new is not None:
                self._replace(value, new)
        detach(node)
        return body.nodes

    def _scan(self) -> None:
        """Put the nodes that wait into a Scan over the rows of what they read."""
        nodes, self._waiting, self._waited_for = self._waiting, [], set()
        op, group = self._op, set(nodes)
        ends = [
            value
            for node in nodes
            for value in node.outputs
            if value.name and (value in self._wanted or not self._readers[value] <= group)
        ]
        if not ends:
            for node in nodes:
                detach(node)
            return
        for end in ends:
            if not isinstance(end.type, ir.TensorType | None):
                raise unsupported(nodes[0], f"{end.name!r} is no tensor, so that rows of it have no common axis")
        nodes = [*self._constants(group), *nodes]
        read = dict.fromkeys(value for node in nodes for value in _in_order(node) if value in self._batched)
        rows: list[ir.Value] = []
        for value in read:
            row = ir.Value(name=op.unique(f"{value.name}_row"), type=value.type, shape=value.shape)
            _replace_reads(nodes, value, row)
            rows.append(row)
        op.prefix = label(nodes[-1])
        body = op.inside()
        body.nodes, body.prefix = nodes, op.prefix
        unranked = [end for end in ends if end.shape is None]  # a Scan has to know how many axes it stacks
        puts_out = [_flat(body, end) if end in unranked else end for end in ends]
        puts_out += [_ranked(body.Shape(end)) for end in unranked]
        step = ir.Graph(rows, puts_out, nodes=body.nodes, name=op.unique(f"{op.prefix}/row"))
        attributes = {"body": step, "num_scan_inputs": len(rows)}
        results = op.emit("Scan", [self._batched[value] for value in read], attributes, outputs=len(puts_out))
        shapes = dict(zip(unranked, results[len(ends) :], strict=True))
        for end, new in zip(ends, results, strict=False):
            if end in shapes:  # the largest length of any row: one that differs is no product of elements
                shape = op.ReduceMax(shapes[end], [0], keepdims=0)
                new.type, new = end.type, op.Reshape(new, op.joined(self._length, shape), allowzero=1)
            self._batched[end] = self._typed(new, end)

    def _constants(self, group: set[ir.Node]) -> list[ir.Node]:
        """The Constants that only these nodes read, taken along: inference sees their numbers beside them."""
        outside = [node for node in self._graph if is_standard(node, "Constant") and _read_by(node.outputs[0], group)]
        self._graph.remove(outside)
        kept = {node for node in self._kept if is_standard(node, "Constant") and _read_by(node.outputs[0], group)}
        inside = [node for node in self._op.nodes if node in kept]
        self._op.nodes[:] = [node for node in self._op.nodes if node not in kept]
        self._kept -= kept
        return [*outside, *inside]


def _flat(body: Builder, value: ir.Value) -> ir.Value:
    flat = _ranked(body.Reshape(value, [-1]))
    flat.type = value.type
    return flat


def _ranked(value: ir.Value) -> ir.Value:
    value.shape = ir.Shape([None])
    return value


def _read_by(value: ir.Value, group: set[ir.Node]) -> bool:
    """Whether only some nodes read a value."""
    readers = [reader for reader, _ in value.uses()]
    return bool(readers) and not value.is_graph_output() and all(reader in group for reader in readers)


def _in_order(node: ir.Node) -> Iterable[ir.Value]:
    """What a node reads, the same every time."""
    return sorted(values_read(node), key=lambda value: str(value.name))


def _replace_reads(nodes: Sequence[ir.Node], value: ir.Value, new: ir.Value) -> None:
    """Let nodes, and those inside them, read another value."""
    for node in all_nodes(nodes):
        for index, read in enumerate(node.inputs):
            if read is value:
                node.replace_input_with(index, new)
        for graph in subgraphs(node):
            for index, end in enumerate(graph.outputs):
                if end is value:
                    graph.outputs[index] = new
