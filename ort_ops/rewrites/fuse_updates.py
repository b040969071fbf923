"""The updates of a training graph as native operators: one pass over memory in place of one for every Mul and Add.

A file calls a function of standard operators for all tensors of an optimizer. What it does to each is read off its
nodes, whatever the optimizer; its numbers stay as they are, worked out in float64.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.opset.core.op import UPDATE_DOMAIN
from onnx_backprop.opset.functions.native import NATIVE_DOMAIN
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.order import ancestors, producers
from onnx_backprop.opset.graphs.walk import all_graphs
from onnx_backprop.ort_ops.elementwise.kernel import NAME
from onnx_backprop.ort_ops.elementwise.program import STEPS, Program

_MEMBER = re.compile(r"(.+)_(\d+)(_new)?")
_SAME = ("Identity", "Reshape")  # which leave a number as it is


def fuse_updates(model: ModelProto) -> ModelProto:
    """Replace the calls of update functions, in place, where they take float32 tensors; returns the model."""
    called = {(f.name, f.overload): f for f in model.functions if f.domain == UPDATE_DOMAIN}
    parts = {key: split for key, function in called.items() if (split := _Split(function)).groups}
    if not parts:
        return model
    for graph in all_graphs(model.graph):
        nodes: list[NodeProto] = []
        for node in graph.node:
            split = parts.get((node.op_type, node.overload)) if node.domain == UPDATE_DOMAIN else None
            nodes += split.nodes(node) if split else [node]
        assign(graph.node, nodes)
    for split in parts.values():
        split.shorten()
    if all(o.domain != NATIVE_DOMAIN for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid(NATIVE_DOMAIN, 1))
    return model


class _OtherError(Exception):
    """A formula that has no program."""


@dataclass
class _Group:
    """Items of one formula, each with the positions of its inputs and outputs; and the numbers that it reads."""

    program: str
    numbers: tuple[str, ...]
    items: list[tuple[list[int], list[int]]] = field(default_factory=list)


class _Split:
    """A function as the numbers that it works out, and formulas on tensors that have a program."""

    def __init__(self, function: FunctionProto) -> None:
        self._function = function
        self._maker = producers(function.node)
        self._items = self._members()
        self._tensors = {function.input[n] for inputs, _ in self._items.values() for n in inputs}
        self._moved: dict[str, bool] = {}
        found: dict[tuple[str, tuple[str, ...]], _Group] = {}
        for inputs, outputs in self._items.values():
            try:
                key = self._formula([function.input[n] for n in inputs], [function.output[n] for n in outputs])
            except _OtherError:
                continue
            found.setdefault(key, _Group(*key)).items.append((inputs, outputs))
        self.groups = list(found.values())
        taken = [item for group in self.groups for item in group.items]
        self._kept_outputs = self._others(len(function.output), [n for _, outputs in taken for n in outputs])
        self._kept_inputs = self._others(len(function.input), [n for inputs, _ in taken for n in inputs])

    @staticmethod
    def _others(count: int, taken: list[int]) -> list[int]:
        return [n for n in range(count) if n not in set(taken)]

    def _members(self) -> dict[str, tuple[list[int], list[int]]]:
        """The positions of inputs X_n, G_n … and of outputs X_n_new … by n."""
        members: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for n, name in enumerate(self._function.output):
            match = _MEMBER.fullmatch(name)
            if match and match[3]:
                members[match[2]][1].append(n)
        for n, name in enumerate(self._function.input):
            match = _MEMBER.fullmatch(name)
            if match and not match[3] and match[2] in members:
                members[match[2]][0].append(n)
        return dict(members)

    def _moves(self, name: str) -> bool:
        """Whether a value depends on a tensor."""
        if name not in self._moved:
            node = self._maker.get(name)
            self._moved[name] = name in self._tensors or (node is not None and any(map(self._moves, node.input)))
        return self._moved[name]

    def _formula(self, inputs: list[str], outputs: list[str]) -> tuple[str, tuple[str, ...]]:
        """The program of an item and its numbers; _OtherError where it has none."""
        steps: list[tuple[str, tuple[str, ...]]] = []
        known = {name: f"t{n}" for n, name in enumerate(inputs)}
        numbers: dict[str, str] = {}

        def operand(name: str) -> str:
            if name in known:
                return known[name]
            node = self._maker.get(name)
            if not self._moves(name):
                source = self._number(name)
                return numbers.setdefault(source, f"s{len(numbers)}")
            if node is not None and node.op_type == "Identity":
                return operand(node.input[0])
            if node is None or node.op_type not in STEPS or node.attribute or node.domain:
                raise _OtherError
            step = node.op_type, tuple(map(operand, node.input))
            steps.append(step)
            known[name] = f"v{len(steps) - 1}"
            return known[name]

        results = [operand(name) for name in outputs]
        if not numbers:  # which tell the type
            raise _OtherError
        text = str(Program(len(inputs), tuple(steps), tuple(results)))
        try:
            Program.parse(text)
        except InvalidModelError as e:
            raise _OtherError from e
        return text, tuple(numbers)

    def _number(self, name: str) -> str:
        """What a number of float32 is rounded from, or what a truth is the truth of."""
        node = self._maker.get(name)
        while node is not None and node.op_type in _SAME:
            name = node.input[0]
            node = self._maker.get(name)
        if (
            node is None
            or node.op_type != "Cast"
            or [a.i for a in node.attribute if a.name == "to"] not in ([TensorProto.FLOAT], [TensorProto.BOOL])
        ):
            raise _OtherError
        return node.input[0]

    def nodes(self, node: NodeProto) -> list[NodeProto]:
        """What a call becomes: one for the numbers and what has no program, and the native operators."""
        first, call = node.name or node.output[0], NodeProto()
        call.CopyFrom(node)
        numbers = [f"{first}/numbers_{n}" for n in range(len(self.groups))]
        inputs, outputs = list(node.input), list(node.output)
        del call.input[:], call.output[:]
        call.input.extend(inputs[n] for n in self._kept_inputs)
        call.output.extend([*numbers, *(outputs[n] for n in self._kept_outputs)])
        pairs = zip(self.groups, numbers, strict=True)
        return [call, *(_native(group, own, inputs, outputs) for group, own in pairs)]

    def shorten(self) -> None:
        """Leave the function what `nodes` calls it for."""
        function = self._function
        kept_inputs = [function.input[n] for n in self._kept_inputs]
        kept_outputs = [function.output[n] for n in self._kept_outputs]
        axis = numpy_helper.from_array(np.array([1], np.int64))
        nodes = [*function.node, helper.make_node("Constant", [], ["numbers/shape"], value=axis)]
        given: list[str] = []
        for n, group in enumerate(self.groups):
            flat = [f"numbers_{n}/{k}" for k in range(len(group.numbers))]
            nodes += [
                helper.make_node("Reshape", [source, "numbers/shape"], [name])
                for source, name in zip(group.numbers, flat, strict=True)
            ]
            given.append(f"numbers_{n}")
            nodes.append(helper.make_node("Concat", flat, [f"numbers_{n}/exact"], axis=0))
            nodes.append(helper.make_node("Cast", [f"numbers_{n}/exact"], given[-1:], to=TensorProto.FLOAT))
        assign(function.input, kept_inputs)
        assign(function.output, [*given, *kept_outputs])
        assign(function.node, [nodes[n] for n in ancestors(nodes, (*given, *kept_outputs))])


def _native(group: _Group, numbers: str, inputs: list[str], outputs: list[str]) -> NodeProto:
    read = [inputs[n] for taken, _ in group.items for n in taken]
    made = [outputs[n] for _, given in group.items for n in given]
    name = numbers.replace("numbers", "update")
    return helper.make_node(NAME, [numbers, *read], made, name=name, domain=NATIVE_DOMAIN, program=group.program)
