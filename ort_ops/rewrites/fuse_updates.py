"""The updates of a training graph as native operators: one pass over memory in place of one for every Mul and Add.

A file calls a function of standard operators for all tensors of an optimizer. What it does to each is read off its
nodes, whatever the optimizer; its numbers stay as they are, worked out in float64.
"""

from dataclasses import dataclass, field

import numpy as np
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.opset.core.op import UPDATE_DOMAIN
from onnx_backprop.opset.functions.native import NATIVE_DOMAIN
from onnx_backprop.opset.functions.update_functions import Member, members
from onnx_backprop.opset.graphs.edit import add_import, assign
from onnx_backprop.opset.graphs.facts import VIEW
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import ancestors, producers
from onnx_backprop.opset.graphs.walk import all_graphs
from onnx_backprop.ort_ops.elementwise.kernel import NAME
from onnx_backprop.ort_ops.elementwise.program import STEPS, Program


def fuse_updates(model: ModelProto) -> ModelProto:
    """Replace the calls of update functions, in place, where they take float32 tensors; returns the model."""
    called = {(f.name, f.overload): f for f in model.functions if f.domain == UPDATE_DOMAIN}
    fusions = {key: fusion for key, function in called.items() if (fusion := _Fusion(function)).groups}
    if not fusions:
        return model
    taken = used_names(model.graph)
    for graph in all_graphs(model.graph):
        nodes: list[NodeProto] = []
        for node in graph.node:
            fusion = fusions.get((node.op_type, node.overload)) if node.domain == UPDATE_DOMAIN else None
            nodes += fusion.nodes(node, taken) if fusion else [node]
        assign(graph.node, nodes)
    for fusion in fusions.values():
        fusion.shorten()
    add_import(model, NATIVE_DOMAIN)
    return model


class _NoProgramError(Exception):
    """A formula that has no program."""


@dataclass
class _Group:
    """The tensors of one formula, and the numbers that it reads."""

    program: str
    numbers: tuple[str, ...]
    members: list[Member] = field(default_factory=list)


class _Fusion:
    """A function as the numbers that it works out, and formulas on tensors that have a program."""

    def __init__(self, function: FunctionProto) -> None:
        self._function = function
        self._producers = producers(function.node)
        tensors = members(function)
        self._tensors = {function.input[n] for member in tensors for n in member.inputs}
        self._depends: dict[str, bool] = {}
        groups: dict[tuple[str, tuple[str, ...]], _Group] = {}
        for member in tensors:
            try:
                key = self._formula(
                    [function.input[n] for n in member.inputs], [function.output[n] for n in member.outputs]
                )
            except _NoProgramError:
                continue
            groups.setdefault(key, _Group(*key)).members.append(member)
        self.groups = list(groups.values())
        taken = [member for group in self.groups for member in group.members]
        self._remaining_outputs = self._remaining(len(function.output), [n for member in taken for n in member.outputs])
        self._remaining_inputs = self._remaining(len(function.input), [n for member in taken for n in member.inputs])

    @staticmethod
    def _remaining(count: int, taken: list[int]) -> list[int]:
        return [n for n in range(count) if n not in set(taken)]

    def _varies(self, name: str) -> bool:
        """Whether a value depends on a tensor."""
        if name not in self._depends:
            node = self._producers.get(name)
            self._depends[name] = name in self._tensors or (node is not None and any(map(self._varies, node.input)))
        return self._depends[name]

    def _formula(self, inputs: list[str], outputs: list[str]) -> tuple[str, tuple[str, ...]]:
        """The program of a tensor's update and its numbers; _NoProgramError where it has none."""
        steps: list[tuple[str, tuple[str, ...]]] = []
        known = {name: f"t{n}" for n, name in enumerate(inputs)}
        numbers: dict[str, str] = {}

        def operand(name: str) -> str:
            if name in known:
                return known[name]
            node = self._producers.get(name)
            if not self._varies(name):
                source = self._number(name)
                return numbers.setdefault(source, f"s{len(numbers)}")
            if node is not None and node.op_type == "Identity":
                return operand(node.input[0])
            if node is None or node.op_type not in STEPS or node.attribute or node.domain:
                raise _NoProgramError
            step = node.op_type, tuple(map(operand, node.input))
            steps.append(step)
            known[name] = f"v{len(steps) - 1}"
            return known[name]

        results = [operand(name) for name in outputs]
        if not numbers:  # which tell the type
            raise _NoProgramError
        text = str(Program(len(inputs), tuple(steps), tuple(results)))
        try:
            Program.parse(text)
        except InvalidModelError as e:
            raise _NoProgramError from e
        return text, tuple(numbers)

    def _number(self, name: str) -> str:
        """What a number of float32 is rounded from, or what a truth is the truth of."""
        node = self._producers.get(name)
        while node is not None and node in VIEW:
            name = node.input[0]
            node = self._producers.get(name)
        if (
            node is None
            or node.op_type != "Cast"
            or [a.i for a in node.attribute if a.name == "to"] not in ([TensorProto.FLOAT], [TensorProto.BOOL])
        ):
            raise _NoProgramError
        return node.input[0]

    def nodes(self, node: NodeProto, taken: set[str]) -> list[NodeProto]:
        """What a call becomes: one for the numbers and what has no program, and the native operators.

        taken: the names of the model, to which those of these are added.
        """
        first, call = node.name or node.output[0], NodeProto()
        call.CopyFrom(node)
        numbers = [unique(f"{first}/numbers_{n}", taken) for n in range(len(self.groups))]
        inputs, outputs = list(node.input), list(node.output)
        del call.input[:], call.output[:]
        call.input.extend(inputs[n] for n in self._remaining_inputs)
        call.output.extend([*numbers, *(outputs[n] for n in self._remaining_outputs)])
        updates = [unique(f"{first}/update_{n}", taken) for n in range(len(self.groups))]
        parts = zip(updates, self.groups, numbers, strict=True)
        return [call, *(_native(name, group, vector, inputs, outputs) for name, group, vector in parts)]

    def shorten(self) -> None:
        """Leave the function what `nodes` calls it for."""
        function = self._function
        inputs = [function.input[n] for n in self._remaining_inputs]
        outputs = [function.output[n] for n in self._remaining_outputs]
        axis = numpy_helper.from_array(np.array([1], np.int64))
        nodes = [*function.node, helper.make_node("Constant", [], ["numbers/shape"], value=axis)]
        vectors: list[str] = []
        for n, group in enumerate(self.groups):
            flat = [f"numbers_{n}/{k}" for k in range(len(group.numbers))]
            nodes += [
                helper.make_node("Reshape", [source, "numbers/shape"], [name])
                for source, name in zip(group.numbers, flat, strict=True)
            ]
            vectors.append(f"numbers_{n}")
            nodes.append(helper.make_node("Concat", flat, [f"numbers_{n}/exact"], axis=0))
            nodes.append(helper.make_node("Cast", [f"numbers_{n}/exact"], vectors[-1:], to=TensorProto.FLOAT))
        assign(function.input, inputs)
        assign(function.output, [*vectors, *outputs])
        assign(function.node, [nodes[n] for n in ancestors(nodes, (*vectors, *outputs))])


def _native(name: str, group: _Group, numbers: str, inputs: list[str], outputs: list[str]) -> NodeProto:
    read = [inputs[n] for member in group.members for n in member.inputs]
    renewed = [outputs[n] for member in group.members for n in member.outputs]
    return helper.make_node(NAME, [numbers, *read], renewed, name=name, domain=NATIVE_DOMAIN, program=group.program)
