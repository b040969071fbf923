"""Writing a choice into a graph as plain ONNX that onnxruntime neither merges back nor runs too early.

A view of x that has to wait is Reshape(x, z): z are as many zeros as x has axes, each of which copies a length of x,
behind empty slices of what is waited for. Reshape passes its input's memory on, and nothing of that can be computed
before a run. A copy of a node reads such views, so it equals no other node and runs when the gradient that needs it has
come.

onnxruntime melts neighbours into one node, which may round otherwise, where the value between them has one reader. So
that the bits stay, a value that had several readers and is left with one is read through a view, and values with one
reader get no other.
"""

from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from onnx_backprop.converters.prepare.exporters.detached import STOP, is_stop
from onnx_backprop.converters.recompute.marks import VIEW
from onnx_backprop.converters.recompute.program import Buffer, GraphProgram
from onnx_backprop.converters.recompute.replay import Replay
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import dims
from onnx_backprop.opset.graphs.facts import SHAPE

_COPY = "recomputed"


class RecomputeEmitter:
    """Rewrites the graph of a program for a replay."""

    def __init__(self, program: GraphProgram, replay: Replay, exclusive: Iterable[ir.Node], op: Builder) -> None:
        self.program, self.replay, self.op = program, replay, op
        self.exclusive = set(exclusive)
        self.edges = {v: program.edges(v) for node in program.nodes for v in node.outputs}
        self.copies: dict[ir.Value, ir.Value] = {}
        self.before: dict[ir.Node, list[ir.Node]] = {}  # what has to stand in front of a node
        self.behind: dict[ir.Node, list[ir.Node]] = {}
        self.constants: list[ir.Node] = []
        self._empty: dict[ir.Value, ir.Value] = {}
        self._views: dict[tuple[ir.Value, ir.Value], ir.Value] = {}

    def write(self) -> list[ir.Node]:
        """All nodes in their order; the graph still has to be given them."""
        for n in sorted(self.replay.copies_at):
            self._copy(n, self.replay.copies_at[n])
        self._wait_for_exclusive()
        moved = self._hoist_shapes()
        for value, copy in list(self.copies.items()):
            if self.edges[value] > 1 and len(copy.uses()) == 1:
                self._separate(copy, value)
        for buffer in sorted(self.replay.choice.dropped, key=lambda b: (b.created, str(b.value.name))):
            for value in buffer.members:
                if self.edges[value] > 1 and len(value.uses()) == 1 and value.producer() in self.program.forward:
                    self._separate(value, value)
        result = self.constants
        for node in self.program.nodes:
            if node not in moved:
                result += self._with_neighbours(node)
        return result

    def _with_neighbours(self, node: ir.Node) -> Iterator[ir.Node]:
        for other in self.before.get(node, ()):
            yield from self._with_neighbours(other)
        yield node
        for other in self.behind.get(node, ()):
            yield from self._with_neighbours(other)

    def _emitted(self, start: int) -> list[ir.Node]:
        """Take the nodes out of the builder that it got since then; constants go to the front of the graph."""
        nodes = self.op.nodes[start:]
        del self.op.nodes[start:]
        self.constants += [node for node in nodes if node.op_type == "Constant"]
        return [node for node in nodes if node.op_type != "Constant"]

    def _after(self, value: ir.Value, *awaited: ir.Value) -> ir.Value:
        """A view of a value that can be read when others have been computed."""
        op = self.op
        ends = [self._empty_slice(other) for other in awaited]
        view = op.Reshape(value, op.Concat(*ends, op.ints([0] * len(dims(value) or ())), axis=0))
        return op.typed(view, value)

    def _empty_slice(self, value: ir.Value) -> ir.Value:
        """No elements of a value, as int64 along one axis."""
        op = self.op
        if value not in self._empty:
            start = len(op.nodes)
            flat = value if dims(value) is not None and len(dims(value) or ()) == 1 else op.Reshape(value, [-1])
            empty = op.Slice(flat, [0], [0])
            self._empty[value] = empty if value.dtype == ir.DataType.INT64 else op.Cast(empty, to=ir.DataType.INT64)
            self._place(value, self._emitted(start), first=True)
        return self._empty[value]

    def _copy(self, n: int, nodes: Sequence[ir.Node]) -> None:
        """Emit copies of nodes in front of the node at a position, and let what comes from there on read them."""
        program, op = self.program, self.op
        reader = program.nodes[n]
        gate = self._gate(n)
        start = len(op.nodes)
        op.prefix = f"{reader.name}/{_COPY}"
        for node in nodes:
            inputs = [None if v is None else self._read(v, gate, node) for v in node.inputs]
            self._clone(node, inputs)
        for node in nodes:
            for buffer in {b: None for v in node.outputs if (b := program.buffer_of.get(v)) is not None}:
                if buffer in self.replay.choice.dropped:
                    self._redirect_readers(buffer, gate)
        self.before.setdefault(reader, []).extend(self._emitted(start))

    def _clone(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> None:
        """A second node with other inputs, whose outputs are the copies from then on."""
        op = self.op
        copy = ir.node(
            node.op_type,
            inputs,
            attributes=None,
            domain=node.domain,
            overload=node.overload,
            num_outputs=len(node.outputs),
            name=op.unique(f"{node.name or node.outputs[0].name}/{_COPY}"),
        )
        for name, attribute in node.attributes.items():
            copy.attributes[name] = attribute
        if is_stop(node):  # which a later differentiation of the graph wants to know
            copy.metadata_props[STOP] = node.metadata_props[STOP]
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            if old.name:
                new.name = op.unique(f"{old.name}/{_COPY}")
                op.typed(new, old)
                self.copies[old] = new
            else:
                new.name = ""
        op.nodes.append(copy)

    def _read(self, value: ir.Value, gate: ir.Value, reader: ir.Node | None = None) -> ir.Value:
        """What a copy of a reader reads in the place of a value: a copy, the value, or a view of it that waits."""
        program = self.program
        buffer = program.buffer_of.get(value)
        if buffer is None:
            data = value.is_graph_input() and not value.is_initializer()
            return self._waiting(value, gate) if data and dims(value) is not None else value
        melts = reader is not None and program.melts(value, reader)
        if value in self.copies and (melts or not self.replay.available(buffer)):
            return self.copies[value]
        producer = value.producer()
        assert producer is not None
        is_view = value is not buffer.value
        if self.replay.available(buffer) and (not is_view or program.can_hold(value)):
            return self._waiting(value, gate)
        # a view of a copy, or of what is kept under another name
        key = (value, gate)
        if key not in self._views:
            known = dict(self.copies)
            self._clone(producer, [None if v is None else self._read(v, gate, producer) for v in producer.inputs])
            self._views[key] = self.copies[value]
            if self.replay.available(buffer):
                self.copies = known
        return self._views[key]

    def _waiting(self, value: ir.Value, gate: ir.Value) -> ir.Value:
        if (value, gate) not in self._views:
            self._views[value, gate] = self._after(value, gate)
        return self._views[value, gate]

    def _redirect_readers(self, buffer: Buffer, gate: ir.Value) -> None:
        """Let the backward part read the copy of a buffer."""
        program = self.program
        for value in buffer.members:
            if value.producer() not in program.forward:
                continue
            uses = [(node, i) for node, i in value.uses() if node in program.backward and node.op_type not in SHAPE]
            if uses:
                copy = self._read(value, gate)
                for node, i in uses:
                    node.replace_input_with(i, copy)

    def _gate(self, n: int) -> ir.Value:
        """A gradient that comes shortly before a position, and that one more reader changes nothing for."""
        program = self.program
        waiting = [program.nodes[n]]
        for node in waiting:  # which grows
            produced = {
                v: program.position[p]
                for v in node.inputs
                if v is not None and (p := v.producer()) is not None and p in program.backward
            }
            early = {v: place for v, place in produced.items() if place < n and v.producer() not in self.exclusive}
            latest = max((v for v in early if self._readable(v)), key=early.__getitem__, default=None)
            if latest is not None:
                return latest
            others = [v.producer() for v in produced if v not in early]
            others += [reader for v in node.outputs for reader, _ in v.uses() if reader in program.backward]
            others += [v.producer() for v in early]
            waiting += [other for other in dict.fromkeys(others) if other is not None and other not in waiting]
        return self.program.graph.outputs[0]  # the loss: nothing of the backward part comes before it

    def _readable(self, value: ir.Value) -> bool:
        """Whether one more reader keeps nodes from being melted that are melted without it."""
        readers = [node for node, _ in value.uses()]
        known = value.dtype is not None and isinstance(value.type, ir.TensorType)
        return known and (self.edges.get(value, 0) > 1 or all(reader.domain for reader in readers))

    def _wait_for_exclusive(self) -> None:
        """Let what comes after a gradient wait for all that belongs to one parameter and reads it."""
        program, op = self.program, self.op
        for node in program.nodes:
            for value in node.outputs if node in program.backward and node not in self.exclusive else ():
                buffer = program.buffer_of.get(value)
                if buffer is None or buffer.size <= program.small or dims(value) is None or value.is_graph_output():
                    continue
                place = {reader: program.position[reader] for reader, _ in value.uses() if reader in program.position}
                exclusive = [r for r in place if r in self.exclusive]
                last = max((place[r] for r in exclusive), default=-1)
                later = [(r, i) for r, i in value.uses() if place.get(r, -1) > last and r not in self.exclusive]
                later = [(r, i) for r, i in later if not program.melts(value, r)]
                results = [result for r in exclusive if (result := self._result(r, later, place)) is not None]
                if later and results and self.edges[value] > 1:
                    start = len(op.nodes)
                    op.prefix = f"{value.name}/awaited"
                    view = self._after(value, *results)
                    first = min((r for r, _ in later), key=lambda r: place[r])
                    self.before.setdefault(first, [])[:0] = self._emitted(start)
                    for reader, i in later:
                        reader.replace_input_with(i, view)

    def _result(
        self, node: ir.Node, later: Sequence[tuple[ir.Node, int]], place: dict[ir.Node, int]
    ) -> ir.Value | None:
        """The last value on the way to a parameter's gradient, before others go on, that can have one more reader."""
        limit = min((place[reader] for reader, _ in later), default=-1)
        value, readable = node.outputs[0], None
        while True:
            ends = value.is_graph_output()
            readable = value if ends or self._readable(value) else readable
            readers = [reader for reader, _ in value.uses()]
            if ends or len(readers) != 1 or not (self.program.position.get(readers[0], limit) < limit):
                return readable
            value = readers[0].outputs[0]

    def _hoist_shapes(self) -> set[ir.Node]:
        """Take shapes of the forward part's values when these are made, where they are gone later; the nodes moved."""
        program, late = self.program, dict[ir.Value, list[ir.Node]]()
        moved: set[ir.Node] = set()
        for node in program.nodes:
            value = node.inputs[0] if node in SHAPE else None
            buffer = None if value is None else program.buffer_of.get(value)
            if value is None or buffer is None or node not in program.backward or buffer.size <= program.small:
                continue
            known = value.producer() in program.forward and dims(value) is not None and not value.is_graph_output()
            if known and self.replay.until.get(buffer, program.last(buffer)) < program.position[node]:
                late.setdefault(value, []).append(node)
        for value, nodes in late.items():
            readers = [(r, i) for r, i in value.uses() if r in program.forward and not program.melts(value, r)]
            if not readers:
                continue
            start = len(self.op.nodes)
            self.op.prefix = f"{value.name}/known"
            view = self._marked(self._after(value, *(node.outputs[0] for node in nodes)), value)
            self._place(value, [*nodes, *self._emitted(start)])
            for reader, i in readers:
                reader.replace_input_with(i, view)
            moved.update(nodes)
        return moved

    def _separate(self, value: ir.Value, original: ir.Value) -> None:
        """Let the only reader of a value, or of a copy of it, read it through a view, unless they are melted anyway."""
        ((reader, i),) = value.uses()
        if dims(value) is None or self.program.melts(original, reader):
            return
        start = len(self.op.nodes)
        self.op.prefix = f"{value.name}/apart"
        view = self._after(value, value)
        reader.replace_input_with(i, self._marked(view, value) if value is original else view)
        self._place(value, self._emitted(start))

    def _place(self, value: ir.Value, nodes: list[ir.Node], *, first: bool = False) -> None:
        """Let nodes stand behind the one that makes a value."""
        producer = value.producer()
        if producer is None:
            self.constants += nodes
        else:
            behind = self.behind.setdefault(producer, [])
            at = 0 if first else len(behind)
            behind[at:at] = nodes

    def _marked(self, view: ir.Value, value: ir.Value) -> ir.Value:
        """The view, noted to be one of a value of the forward model, which goes with the gradients."""
        producer = view.producer()
        assert producer is not None
        producer.metadata_props[VIEW] = str(value.name)
        return view
