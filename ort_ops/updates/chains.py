"""Chains of elementwise operators as one native operator each: one pass over memory in place of one for every node.

    s = Sub(1, y)  p = Mul(y, s)  dx = Mul(dy, p)   ->   dx = Elementwise(y, dy; "Sub s0 t0; Mul t0 v0; Mul t1 v1")

A chain is a node with those before it that nobody else reads, all float32 and of one shape, which must be stated, in
sizes or symbols; a run in which it is another one is refused. Numbers are constants of one element. Values are those of
the standard operators, since every step is rounded; only that onnxruntime's Where makes 0 of -0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.functions.numba import NATIVE_DOMAIN
from onnx_backprop.ort_ops.updates.kernel import ELEMENTWISE
from onnx_backprop.ort_ops.updates.program import FLAG, STEPS, TENSOR, Program

_DOMAINS = {"ReLUBackward": (DOMAIN,)}  # of the steps that are no operators of ONNX
_KINDS = {TENSOR: TensorProto.FLOAT, FLAG: TensorProto.BOOL}
_MOST_TENSORS = 12  # that a chain reads: each has a register

Shape = tuple[int | str, ...]


def fuse_chains(model: ModelProto) -> ModelProto:
    """Replace chains of two or more nodes of the main graph, in place; returns the model."""
    chains = _Chains(model)
    absorbed: dict[int, NodeProto | None] = {}
    for last in range(len(model.graph.node) - 1, -1, -1):
        if last not in absorbed and chains.joins(last):
            members = chains.before(last, absorbed)
            if len(members) > 1:
                absorbed |= dict.fromkeys(members)
                absorbed[last] = chains.fused(members, last)
    if absorbed:
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(kept for n, node in enumerate(nodes) if (kept := absorbed.get(n, node)) is not None)
        model.graph.initializer.extend(chains.numbers)
        if all(o.domain != NATIVE_DOMAIN for o in model.opset_import):
            model.opset_import.append(helper.make_opsetid(NATIVE_DOMAIN, 1))
    return model


@dataclass
class _Chains:
    """What is known of a graph's values, and the numbers of the chains found so far."""

    model: ModelProto
    numbers: list[TensorProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        graph = self.model.graph
        self._nodes = graph.node
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
        self._maker = {name: n for n, node in enumerate(graph.node) for name in node.output}
        self._reads = Counter(name for node in graph.node for name in _read_by(node))
        self._reads.update(value.name for value in graph.output)

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

    def joins(self, n: int) -> bool:
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

    def before(self, last: int, taken: dict[int, NodeProto | None]) -> list[int]:
        """A node and those before it that only it and each other read, in the order of the graph."""
        if STEPS[self._nodes[last].op_type].result == FLAG:
            return [last]
        members = {last}
        refused: set[int] = set()
        while True:
            reads = Counter(name for n in members for name in self._nodes[n].input)
            found = next(
                (
                    n
                    for name in reads
                    if (n := self._maker.get(name)) is not None
                    and n not in members | refused
                    and n not in taken
                    and self._reads[name] == reads[name]
                    and self.joins(n)
                ),
                None,
            )
            if found is None:
                break
            if len(self._tensors([*members, found])) <= _MOST_TENSORS:
                members.add(found)
            else:
                refused.add(found)
        return self._complete(sorted(members), last)

    def _complete(self, members: list[int], last: int) -> list[int]:
        """The members; only the last where one of them reads a flag from elsewhere."""
        made = {name for n in members for name in self._nodes[n].output}
        read = {name for n in members for name in self._nodes[n].input} - made
        return [last] if any(self._types.get(name) == TensorProto.BOOL for name in read) else members

    def _tensors(self, members: list[int]) -> list[str]:
        """What they read from elsewhere, numbers aside."""
        made = {name for n in members for name in self._nodes[n].output}
        read = dict.fromkeys(name for n in sorted(members) for name in self._nodes[n].input)
        return [name for name in read if name not in made and name not in self._scalars]

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
        name = f"{node.output[0]}/numbers"
        self.numbers.append(numpy_helper.from_array(numbers, name))
        return helper.make_node(
            ELEMENTWISE, [name, *tensors], node.output, name=node.name, domain=NATIVE_DOMAIN, program=str(program)
        )


def _read_by(node: NodeProto) -> list[str]:
    """What a node reads, its sub-graphs' nodes included."""
    inner = [a.g for a in node.attribute if a.HasField("g")] + [g for a in node.attribute for g in a.graphs]
    return [
        *node.input,
        *(name for graph in inner for n in graph.node for name in _read_by(n)),
        *(value.name for graph in inner for value in graph.output),
    ]
