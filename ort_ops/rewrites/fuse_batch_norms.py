"""BatchNorms of a training step with the chains in front of them and behind them: one node and its passes for both.

    z = BatchNorm(x)  s = Add(z, r)  y = Relu(s)                    ->   y = BatchNorm(x, r; "…; Add v2 t1; Relu v3")
    dz = ReLUBackward(y, dy)  dx = BatchNormTrainingBackward(x, dz) ->   dx = BatchNormTrainingBackward(x, dy, y; "…")

z is not stored then, and dz lies where dx comes to lie, or is put out where others read it and the gradient comes right
behind it. A chain that reads z to make dz, as that of HardSwish does, has it computed again from x and the statistics;
the same where z is read as Relu(z), so that y need not be there. A chain that reads Mul(dy, gate) or Expand(pool), with
one number for each plane of x, spreads these itself. Bits are those of the separate nodes, and no tensor is there for
longer. Left alone: a z that anybody else reads, NXC, types other than float32, bool among them, and planes of few
elements, which gain nothing. Where a size is a symbol they are taken to have many; in a run in which they have one,
sums have another order.
"""

import math
from collections import defaultdict

from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.functions.native import NATIVE_DOMAIN, NATIVE_PREFIX
from onnx_backprop.opset.graphs.edit import add_import, assign, copied
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.order import positions
from onnx_backprop.opset.graphs.walk import is_standard, reads
from onnx_backprop.ort_ops.elementwise.kernel import ELEMENTWISE
from onnx_backprop.ort_ops.elementwise.program import Program
from onnx_backprop.ort_ops.normalization.batch_norm_programs import CHANNEL_NUMBERS, MOST_NUMBERS, NORMALISED
from onnx_backprop.ort_ops.rewrites.fuse_elementwise import Chains, Shape
from onnx_backprop.ort_ops.runtime.call import MAX_INPUTS

FORWARD, BACKWARD = "BatchNormForwardTraining", "BatchNormTrainingBackward"
X, GAMMA, BETA = 0, 3, 4  # inputs of FORWARD
SHORT = 16  # elements of a plane, for which the calls of a program take longer than passes over memory


def fuse_batch_norms(model: ModelProto) -> ModelProto:
    """Replace BatchNorms of the main graph with their neighbours, in place; returns the model."""
    if any(node.op_type == FORWARD and node.domain == DOMAIN for node in model.graph.node):
        _Fusion(model).run()
    return model


class _Fusion:
    """A graph, who makes its values and who reads them, and the nodes that have become others."""

    def __init__(self, model: ModelProto) -> None:
        self._model, self._chains = model, Chains(model)
        self._nodes = [copied(node) for node in model.graph.node]
        self._producers = positions(self._nodes)
        self._readers: dict[str, list[int]] = defaultdict(list)
        for n, node in enumerate(self._nodes):
            for name in reads(node):
                self._readers[name].append(n)
        for value in model.graph.output:
            self._readers[value.name].append(len(self._nodes))
        self._taken = used_names(model.graph)
        self._types = {value.name for value in (*model.graph.value_info, *model.graph.output)}
        self._changed: dict[int, NodeProto | None] = {}

    def run(self) -> None:
        """Gradients first: they may leave z to one reader."""
        for n in range(len(self._nodes) - 1, -1, -1):
            if self._is(n, BACKWARD):
                self._backward(n)
        for n in range(len(self._nodes)):
            if self._is(n, FORWARD):
                self._forward(n)
        if self._changed:
            graph = self._model.graph
            kept = [node for n, old in enumerate(self._nodes) if (node := self._changed.get(n, old)) is not None]
            assign(graph.node, kept)
            used = {name for node in kept for name in node.input}
            graph.initializer.extend(tensor for tensor in self._chains.numbers if tensor.name in used)
            add_import(self._model, NATIVE_DOMAIN)

    def _is(self, n: int, op_type: str) -> bool:
        node = self._nodes[n]
        channels_first = any(a.name == "data_format" and a.s == b"NCX" for a in node.attribute)
        return node.op_type == op_type and node.domain == DOMAIN and channels_first

    def _chain(self, n: int) -> NodeProto | None:
        """A node as a native chain, where it is one or a step of one; not of short planes."""
        node, shape = self._nodes[n], self._chains.shape(self._nodes[n].output[0])
        if n in self._changed or not shape or _short(shape):
            return None
        if node.op_type == ELEMENTWISE and node.domain == NATIVE_DOMAIN:
            return node
        return self._chains.alone(n)

    def _backward(self, n: int) -> None:
        """A gradient with the chain that makes dz, in its place."""
        node = self._nodes[n]
        x, dz, mean, variance, gamma = _five_inputs(node)
        first, last = self._producers.get(mean), self._producers.get(dz)
        if first is None or last is None or not variance or not self._is(first, FORWARD):
            return
        alone = self._readers[dz] == [n]
        forward, chain = self._nodes[first], self._chain(last)
        given = _five_inputs(forward)
        if [*forward.output[3:5], given[X], given[GAMMA]] != [mean, variance, x, gamma] or chain is None:
            return
        if _epsilon(forward) != _epsilon(node) or any(self._producers.get(name, -1) > last for name in node.input):
            return
        if not alone and (n != last + 1 or len(node.output) < 3):  # dx would be there for longer
            return
        z = forward.output[0]
        steps = _Steps(chain, z)
        relu = [m for m in self._readers[z] if m < len(self._nodes) and is_standard(self._nodes[m], "Relu")]
        if relu and self._nodes[relu[0]].output[0] in chain.input:
            steps.known[self._nodes[relu[0]].output[0]] = steps.step("Relu", "v2")
        planes = self._planes(steps, self._chains.shape(x)) if alone else {}
        others, program = steps.finished()
        if not others:
            return
        inputs = [x, others[0], mean, variance, given[GAMMA], given[BETA], chain.input[0], *others[1:], *steps.planes]
        outputs = [*node.output, *[dz][alone:]]
        if self._native(last, node, program, inputs, outputs, len(steps.planes)):
            self._changed[n] = None
            self._changed |= planes
            self._readers[z] = [m for m in self._readers[z] if m != last]
            self._readers[mean].append(last)

    def _planes(self, steps: "_Steps", shape: Shape | None) -> dict[int, None]:
        """Let a program spread numbers of planes itself: of Expand, and of Mul with a tensor; those nodes go."""
        gone: dict[int, None] = {}
        plane = shape and (*shape[:2], *[1] * len(shape[2:]))
        for name in steps.others():
            m = self._producers.get(name, -1)
            if plane == shape or m < 0 or m in self._changed or len(self._readers[name]) != 1:
                continue
            node = self._nodes[m]
            shapes = [self._chains.shape(operand) for operand in node.input]
            if is_standard(node, "Mul") and plane in shapes and shape in shapes:
                tensor, numbers = node.input if shapes[0] == shape else node.input[::-1]
                steps.known[name] = steps.step("Mul", steps.tensor(tensor), steps.plane(numbers))
            elif is_standard(node, "Expand") and shapes[0] == plane and len(steps.others()) + len(steps.tensors) > 1:
                steps.known[name] = steps.plane(node.input[0])
            else:
                continue
            gone[m] = None
        return gone

    def _forward(self, n: int) -> None:
        """A BatchNorm with the chain that alone reads z, in its place."""
        node = self._nodes[n]
        readers = self._readers[node.output[0]]
        if len(readers) != 1 or readers[0] == len(self._nodes) or node.output[0] not in self._nodes[readers[0]].input:
            return
        last = readers[0]
        chain = self._chain(last)
        elsewhere = [m for name in node.output[1:] if name for m in self._readers[name]]
        if chain is None or min(elsewhere, default=last + 1) <= last:
            return
        others, program = _Steps(chain, node.output[0]).finished()
        inputs = [*_five_inputs(node), chain.input[0], *others]
        if self._native(last, node, program, inputs, [chain.output[0], *node.output[1:]]):
            self._changed[n] = None

    def _native(
        self, at: int, node: NodeProto, program: Program, inputs: list[str], outputs: list[str], planes: int = 0
    ) -> bool:
        """Put a BatchNorm with a program in the place of a node, if it can have that, and has a place to write to."""
        if not self._readers[outputs[0]] or len(inputs) > MAX_INPUTS or program.numbers > MOST_NUMBERS:
            return False
        outputs = [name or unique(f"{outputs[0]}/unread", self._taken) for name in outputs]
        self._changed[at] = NodeProto(
            op_type=NATIVE_PREFIX + node.op_type, domain=NATIVE_DOMAIN, name=node.name, input=inputs, output=outputs,
            attribute=[*node.attribute, *map(helper.make_attribute, ("program", "planes"), (str(program), planes))],
        )  # fmt: skip
        for name in outputs:  # or onnxruntime would not keep the order
            if name not in self._types:
                self._model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        return True


def _short(shape: Shape) -> bool:
    lengths = [length for length in shape[2:] if isinstance(length, int)]
    return len(lengths) == len(shape[2:]) and math.prod(lengths) <= SHORT


def _five_inputs(node: NodeProto) -> list[str]:
    return [*node.input, *[""] * 3][:5]


def _epsilon(node: NodeProto) -> float:
    return next(a.f for a in node.attribute if a.name == "epsilon")


class _Steps:
    """A program of a chain behind the steps that make z."""

    def __init__(self, chain: NodeProto, z: str) -> None:
        self._chain, self._steps = chain, list[tuple[str, tuple[str, ...]]](NORMALISED)
        self.tensors, self.planes = list[str](), list[str]()
        self.known = {z: "v2"}  # what steps in front make of the chain's inputs
        self._program = Program.parse(next(a.s.decode() for a in chain.attribute if a.name == "program"))

    def others(self) -> list[str]:
        """The inputs of the chain that are not known."""
        return [name for name in self._chain.input[1:] if name not in self.known]

    def step(self, op: str, *operands: str) -> str:
        self._steps.append((op, operands))
        return f"v{len(self._steps) - 1}"

    def tensor(self, name: str) -> str:
        self.tensors += [name] * (name not in self.tensors)
        return f"t{1 + self.tensors.index(name)}"

    def plane(self, name: str) -> str:
        """The number of a plane, among those of the chain the first."""
        self.planes.append(name)
        return f"s{CHANNEL_NUMBERS + len(self.planes) - 1}"

    def finished(self) -> tuple[list[str], Program]:
        """The tensors that it reads beside x, and the program."""
        places = [self.known.get(name) or self.tensor(name) for name in self._chain.input[1:]]
        moved = {"s": CHANNEL_NUMBERS + len(self.planes), "v": len(self._steps)}

        def renamed(operand: str) -> str:
            kind, n = operand[0], int(operand[1:])
            return places[n] if kind == "t" else f"{kind}{n + moved[kind]}"

        steps = [(op, tuple(map(renamed, operands))) for op, operands in self._program.steps]
        results = tuple(map(renamed, self._program.results))
        return self.tensors, Program(1 + len(self.tensors), (*self._steps, *steps), results)
