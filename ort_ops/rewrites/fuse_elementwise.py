"""Chains of elementwise operators as one native operator each: one pass over memory in place of one for every node.

    s = Sub(1, y)  p = Mul(y, s)  dx = Mul(dy, p)   ->   dx = Elementwise(y, dy; "Sub s0 t0; Mul t0 v0; Mul t1 v1")

A chain is a node with those before it that nobody else reads, or that read nothing but what the chain reads, all
float32 and of one shape, which must be stated, in sizes or symbols; a run in which it is another one is refused.
Numbers are constants of one element. Values are those of the standard operators, since every step is rounded; only that
onnxruntime's Where makes 0 of -0, and that it has other roundings of Exp, Erf and Sigmoid.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.functions.native import NATIVE_DOMAIN
from onnx_backprop.opset.graphs.edit import add_import, assign, copied
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import positions
from onnx_backprop.opset.graphs.walk import reads
from onnx_backprop.ort_ops.elementwise.kernel import ELEMENTWISE
from onnx_backprop.ort_ops.elementwise.program import CHOICE, FLAG, STEPS, TENSOR, Program

_DOMAINS = {"ReLUBackward": (DOMAIN,)}  # of the steps that are no operators of ONNX
_KINDS = {TENSOR: TensorProto.FLOAT, FLAG: TensorProto.BOOL, CHOICE: TensorProto.BOOL}
_MOST_TENSORS = 12  # that a chain reads: each has a register
_MOST_STEPS = 48

_ROUNDED = ("Exp", "Erf", "Sigmoid")  # alone too, so that what is computed in two places is the same

Shape = tuple[int | str, ...]


def fuse_elementwise(model: ModelProto) -> ModelProto:
    """Replace chains of the main graph, of two or more nodes, in place; returns the model."""
    _bypass_dropout(model)
    chains = Chains(model)
    absorbed: dict[int, NodeProto | None] = {}
    for last in range(len(model.graph.node) - 1, -1, -1):
        if last not in absorbed and chains.is_step(last):
            members, copies = chains.grown(last, absorbed)
            if members | copies != {last} or model.graph.node[last].op_type in _ROUNDED:
                absorbed |= dict.fromkeys(members)
                absorbed[last] = chains.fused(sorted(members | copies), last)
    if absorbed:
        nodes = list(map(copied, model.graph.node))
        kept = [left for n, node in enumerate(nodes) if (left := absorbed.get(n, node)) is not None]
        assign(model.graph.node, _without_unread(kept, {value.name for value in model.graph.output}))
        model.graph.initializer.extend(chains.numbers)
        add_import(model, NATIVE_DOMAIN)
    return model


def _bypass_dropout(model: ModelProto) -> None:
    """Let nodes read what Dropout in inference mode passes on."""
    inside = {name for node in model.graph.node for name in reads(node) if name not in node.input}
    passed: dict[str, str] = {}
    for node in model.graph.node:
        for n, name in enumerate(node.input):
            if name in passed:
                node.input[n] = passed[name]
        if (
            node.op_type == "Dropout"
            and not node.domain
            and len(node.input) < 3
            and not inside.intersection(node.output)
        ):
            passed[node.output[0]] = node.input[0]


def _without_unread(nodes: list[NodeProto], read: set[str]) -> list[NodeProto]:
    """The nodes without steps that nobody reads any more, every chain having its own copy."""
    kept: list[NodeProto] = []
    for node in reversed(nodes):
        if node.op_type not in (*STEPS, ELEMENTWISE, "Dropout") or not read.isdisjoint(node.output):
            kept.append(node)
            read.update(reads(node))
    return kept[::-1]


@dataclass
class Chains:
    """What is known of a graph's values, and the numbers of the chains so far."""

    model: ModelProto
    numbers: list[TensorProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        graph = self.model.graph
        self._nodes = graph.node
        self._used_names = used_names(graph)
        self._shapes: dict[str, Shape] = {}
        self._types: dict[str, int] = {}
        for value in [*graph.value_info, *graph.input, *graph.output]:
            self._declare(value)
        self._scalars: dict[str, tuple[float, int]] = {}  # of float32: value and rank
        inputs = {value.name for value in graph.input}
        for tensor in graph.initializer:
            if tensor.name not in inputs:
                self._constant(tensor.name, tensor)
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self._constant(node.output[0], node.attribute[0].t)
        self._producers = positions(graph.node)
        self._reads = Counter(name for node in graph.node for name in (*node.input, *(reads(node) - {*node.input})))
        self._reads.update(value.name for value in graph.output)
        self._step_reads = Counter(
            name
            for n, node in enumerate(graph.node)
            if self.is_step(n) and STEPS[node.op_type].result == TENSOR
            for name in node.input
        )

    def _declare(self, value: ValueInfoProto) -> None:
        kind = value.type.tensor_type
        dims = [d.dim_param or (d.dim_value if d.HasField("dim_value") else "") for d in kind.shape.dim]
        if kind.HasField("shape") and "" not in dims:
            self._shapes[value.name] = tuple(dims)
            self._types[value.name] = kind.elem_type

    def _constant(self, name: str, tensor: TensorProto) -> None:
        local = tensor.data_location == TensorProto.DEFAULT
        if tensor.data_type == TensorProto.FLOAT and local and set(tensor.dims) <= {1}:
            self._scalars[name] = float(numpy_helper.to_array(tensor).reshape(())), len(tensor.dims)

    def shape(self, name: str) -> Shape | None:
        """That of a float32 tensor; None where it is not stated."""
        return self._shapes.get(name) if self._types.get(name) == TensorProto.FLOAT else None

    def is_step(self, n: int) -> bool:
        """Whether a node is a step on tensors of the shape of its result, numbers aside."""
        node = self._nodes[n]
        step = STEPS.get(node.op_type)
        if step is None or node.domain not in _DOMAINS.get(node.op_type, ("", "ai.onnx")):
            return False
        if (node.attribute and node.op_type not in _DOMAINS) or len(node.input) != len(step.operands):
            return False
        (name,) = node.output
        shape = self._shapes.get(name)
        if not shape or self._types[name] != _KINDS[step.result]:
            return False
        tensors = 0
        for x, operand in zip(node.input, step.operands, strict=True):
            if x in self._scalars and operand == TENSOR and self._scalars[x][1] <= len(shape):
                continue
            if self._shapes.get(x) != shape or self._types[x] != _KINDS[operand]:
                return False
            tensors += 1
        return tensors > 0

    def grown(self, last: int, absorbed: dict[int, NodeProto | None]) -> tuple[set[int], set[int]]:
        """(a node and those before it that only it and each other read, those that others read and that are copied).

        Copies read nothing but what the chain reads anyway, so that their results need not be kept for the chain; or
        one tensor in the place of a result of which all readers may have copies, so that it is not made at all.
        """
        members, copies = {last}, set[int]()
        if STEPS[self._nodes[last].op_type].result == FLAG:
            return members, copies
        while True:
            chain = members | copies
            reads = Counter(name for n in members for name in self._nodes[n].input)
            names = dict.fromkeys(name for n in sorted(chain, reverse=True) for name in self._nodes[n].input)
            before = [(self._producers[name], name) for name in names if name in self._producers]
            steps = [(n, name) for n, name in before if n not in chain and n not in absorbed and self.is_step(n)]
            exclusive = [n for n, name in steps if self._reads[name] == reads[name] and self._fits(chain | {n})]
            if exclusive:
                members.add(exclusive[0])
                continue
            duplicated = next((more for n, _ in steps if (more := self._duplicable(n, chain, absorbed))), None)
            if duplicated is None:
                break
            copies |= duplicated
        produced = {name for n in members | copies for name in self._nodes[n].output}
        read = {name for n in members | copies for name in self._nodes[n].input} - produced
        return ({last}, set()) if self._has_flags(read) else (members, copies)

    def _has_flags(self, names: Iterable[str]) -> bool:
        return any(self._types.get(name) == TensorProto.BOOL for name in names)

    def _duplicable(self, n: int, members: set[int], absorbed: dict[int, NodeProto | None]) -> set[int] | None:
        """A node with those before it, up to what members of a chain read beside its result, and one tensor more."""
        available = {name for m in members for name in (*self._nodes[m].input, *self._nodes[m].output)}
        available -= set(self._nodes[n].output)
        (result,) = self._nodes[n].output
        most = int(self._reads[result] == self._step_reads[result])
        leaves, collected, waiting = set[str](), set[int](), [n]
        while waiting:
            collected.add(step := waiting.pop())
            for name in self._nodes[step].input:
                if name in available or name in self._scalars:
                    continue
                m = self._producers.get(name)
                if len(members | collected) >= _MOST_STEPS:
                    return None
                if m is not None and m not in absorbed and self.is_step(m):
                    waiting.append(m)
                    continue
                leaves.add(name)
                if len(leaves) > most or self._types.get(name) != TensorProto.FLOAT:
                    return None
        return collected

    def _fits(self, members: set[int]) -> bool:
        return len(members) <= _MOST_STEPS and len(self._tensors(members)) <= _MOST_TENSORS

    def _tensors(self, members: Iterable[int]) -> list[str]:
        """What they read from elsewhere, numbers aside."""
        produced = {name for n in members for name in self._nodes[n].output}
        read = dict.fromkeys(name for n in sorted(members) for name in self._nodes[n].input)
        return [name for name in read if name not in produced and name not in self._scalars]

    def alone(self, n: int) -> NodeProto | None:
        """A node as a chain, where it is a step that reads no flags."""
        return None if not self.is_step(n) or self._has_flags(self._nodes[n].input) else self.fused([n], n)

    def fused(self, members: list[int], last: int) -> NodeProto:
        """The native node of a chain; its numbers become an initializer."""
        tensors = self._tensors(members)
        known = {name: f"t{n}" for n, name in enumerate(tensors)}
        values: dict[str, str] = {}  # of numbers, by their bits
        steps: list[tuple[str, tuple[str, ...]]] = []

        def operand(name: str) -> str:
            if name in known:
                return known[name]
            return values.setdefault(np.float32(self._scalars[name][0]).tobytes().hex(), f"s{len(values)}")

        for n in members:
            node = self._nodes[n]
            steps.append((node.op_type, tuple(map(operand, node.input))))
            known[node.output[0]] = f"v{len(steps) - 1}"
        node = self._nodes[last]
        program = Program(len(tensors), tuple(steps), (known[node.output[0]],))
        numbers = np.frombuffer(bytes.fromhex("".join(values) or "00000000"), np.float32)
        name = unique(f"{node.output[0]}/numbers", self._used_names)
        self.numbers.append(numpy_helper.from_array(numbers, name))
        return helper.make_node(
            ELEMENTWISE, [name, *tensors], node.output, name=node.name, domain=NATIVE_DOMAIN, program=str(program)
        )
