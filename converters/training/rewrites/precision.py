"""Mixed precision: products of float16 or bfloat16 operands, saved values in half their size, everything else float32.

A value that the backward pass reads is rounded where it is made and stored in the half type; a matrix product or
convolution reads rounded operands, its sums are float32. Kernels run on float32 between casts, since onnxruntime has
next to none of half types on a processor: the graph is the same for both types and loads wherever a float32 one does.

    h = Cast(x, half);  f = Cast(h, float32)      read by the rest of the forward pass in the place of x
    Cast(Reshape(h, 0 · Size(dy)), float32)       read by the backward pass

The Reshape to zeros keeps the shape, and makes the second cast wait for the gradient dy that it is read with: it would
otherwise be the first one, shared, with its float32 result kept from the forward to the backward pass.
"""

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_backprop.converters.recompute.marks import ROUNDED
from onnx_backprop.converters.recompute.waiting import Backward, waiting
from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import is_float, type_name
from onnx_backprop.converters.reverse.models.differentiation import Differentiation
from onnx_backprop.converters.rules.common import HALF_TYPES
from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.functions.mat_mul_n_bits import MICROSOFT
from onnx_backprop.opset.graphs.facts import KEEPS_ROUNDED
from onnx_backprop.opset.graphs.walk import values_read

PRECISIONS = {"bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16}
# Read two rounded operands; a bias is added to the sum in float32.
PRODUCTS = frozenset(
    {("", name) for name in ("Conv", "ConvTranspose", "DeformConv", "Einsum", "Gemm", "MatMul")}
    | {(DOMAIN, f"Convolution{name}") for name in ("", "BackwardData", "BackwardWeights")}
    | {(DOMAIN, f"ConvTranspose{name}") for name in ("BackwardData", "BackwardWeights")}
    | {(MICROSOFT, "MatMulNBits"), (DOMAIN, "MatMulNBitsBackwardData")}
)
# Their results are float32 where they are saved; others follow what they read.
FLOAT32 = frozenset(
    {"Acos", "Asin", "Cosh", "Exp", "Log", "Pow", "Reciprocal", "Sinh", "Softplus", "Tan"}
    | {"CumSum", "LogSoftmax", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"}
    | {f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Mean", "Prod", "Sum", "SumSquare")}
)
# Computed in float32 from float32 or half; of their results only the first, which is no statistic, may be half.
NORMALIZED = frozenset(
    {"BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization"}
    | {"LRN", "MeanVarianceNormalization", "RMSNormalization", "Softmax"}
)


def check_precision(precision: str | None, graph: ir.Graph) -> ir.DataType | None:
    """The half type; InvalidArgumentError for an unknown name, or a model that is not of float32."""
    if precision is None:
        return None
    if precision not in PRECISIONS:
        names = ", ".join(map(repr, PRECISIONS))
        raise InvalidArgumentError(f"expected None or one of {names}, got {precision!r}", "precision")
    for value in graph.initializers.values():
        if is_float(value) and value.dtype in HALF_TYPES:
            raise InvalidArgumentError(
                f"{value.name!r} has type {type_name(value)}. Mixed precision starts from float32 weights; "
                "leave precision out, and the gradients of a half model are computed in float32, or convert it",
                "precision",
            )
    if all(value.dtype != ir.DataType.FLOAT for value in graph.initializers.values()):
        raise InvalidArgumentError(
            "the model has no float32 weights, nothing would be rounded. Leave it out", "precision"
        )
    return PRECISIONS[precision]


class Rounding:
    """Rounds what a graph with its gradients stores and multiplies; `apply` does it."""

    def __init__(
        self,
        graph: ir.Graph,
        op: Builder,
        forward: Sequence[ir.Node],
        differentiation: Differentiation,
        of_loss: Collection[str],
        half: ir.DataType,
    ) -> None:
        """forward: all nodes but those of the backward pass. of_loss: names of what the loss has added to the model.

        These values stay float32, and so does what the nodes that make them read.
        """
        self._op = op
        op.prefix = half.name.lower()
        self.graph, self.half = graph, half
        self._forward, self._active, self._kept = list(forward), differentiation.path.active, set(of_loss)
        for node in forward:
            if not self._kept.isdisjoint(_names(node)):
                self._kept |= {str(x.name) for x in node.inputs if x is not None}
        self._pass = Backward(graph, forward, differentiation.gradients.values())
        self._backward, self._place, self._late = self._pass.nodes, self._pass.place, self._pass.late
        self._gate = self._pass.gate
        self._exact: set[ir.Value] = set()  # whose numbers are of the half type
        self._stored: dict[ir.Value, ir.Value] = {}
        self._rounded: dict[tuple[ir.Value, ir.Value | None], ir.Value] = {}

    def apply(self) -> None:
        """Rewrite the graph."""
        for value in self._saved():
            self._store(value)
        for node in self._forward:
            if _is_product(node) and not self._active.isdisjoint(node.outputs):
                for index, x in _operands(node):
                    node.replace_input_with(index, self._round(x, node, None))
            self._note(node)
        for node in self._backward:
            for index, x in enumerate(node.inputs):
                if x in self._stored:
                    asked = node.op_type == "Shape"
                    node.replace_input_with(index, self._stored[x] if asked else self._widen(x, node))
            if _is_product(node):
                for index, x in _operands(node):
                    node.replace_input_with(index, self._round(x, node, self._gate(node)))
            self._note(node)
        self.graph.sort()  # constants and casts that several nodes read stand before the one that asked first

    def _saved(self) -> list[ir.Value]:
        """The values to store: those of half type, as autocast would have them, that the backward pass reads."""
        read: set[ir.Value] = set()
        inside: set[ir.Value] = set()  # of branches, which would read them without waiting
        for node in self._backward:
            if node.op_type not in ("Shape", "Size"):
                read.update(x for x in node.inputs if x is not None)
            inside |= values_read(node) - set(node.inputs)
        halves: set[ir.Value] = set()
        result: list[ir.Value] = []
        for node in self._forward:
            if (node.domain == "" and node.op_type in FLOAT32) or self._kept.intersection(_names(node)):
                continue
            normalized = node.domain == "" and node.op_type in NORMALIZED
            if not (normalized or _is_product(node) or not halves.isdisjoint(node.inputs)):
                continue
            for y in node.outputs[:1] if normalized else node.outputs:
                if y.dtype == ir.DataType.FLOAT and y in self._active:
                    halves.add(y)
                    if y in read and y not in inside:
                        result.append(y)
        return result

    def _store(self, x: ir.Value) -> None:
        """Round a value where it is made."""
        node = x.producer()
        assert node is not None
        readers = [(reader, n) for reader, n in x.uses() if reader not in self._place]
        stored = self._op.Cast(x, to=self.half)
        wide = self._op.Cast(stored, to=ir.DataType.FLOAT)
        wide.shape = stored.shape = x.shape
        for cast in self._op.nodes:  # whose shape alone other nodes of the forward pass may ask for
            cast.metadata_props[ROUNDED] = str(x.name)
        self._place_nodes(node, after=True)
        for reader, n in readers:
            reader.replace_input_with(n, stored if reader.op_type == "Shape" else wide)
        self._stored[x] = stored
        self._exact.add(wide)

    def _round(self, x: ir.Value, node: ir.Node, gate: ir.Value | None) -> ir.Value:
        """A product's operand."""
        if x in self._exact:
            return x
        maker = x.producer()
        if maker in self._place and x not in self._late and maker.op_type in KEEPS_ROUNDED:
            for index, source in enumerate(maker.inputs):
                if source is not None and source.dtype == x.dtype:
                    maker.replace_input_with(index, self._round(source, maker, self._gate(maker)))
            self._exact.add(x)
            return x
        gate = None if x in self._late else gate
        if (x, gate) not in self._rounded:
            y = self._op.Cast(self._op.Cast(self._once(x, gate), to=self.half), to=ir.DataType.FLOAT)
            y.shape = x.shape
            if node not in self._place:
                self._op.nodes[-1].metadata_props[ROUNDED] = str(x.name)
            self._place_nodes(node)
            self._rounded[x, gate] = y
            self._exact.add(y)
        return self._rounded[x, gate]

    def _widen(self, x: ir.Value, node: ir.Node) -> ir.Value:
        """A stored value for a node of the backward pass."""
        stored, gate = self._stored[x], self._gate(node)
        if (stored, gate) not in self._rounded:
            y = self._op.Cast(self._once(stored, gate), to=ir.DataType.FLOAT)
            y.shape = x.shape
            self._place_nodes(node)
            self._rounded[stored, gate] = y
            self._exact.add(y)
        return self._rounded[stored, gate]

    def _once(self, x: ir.Value, gate: ir.Value | None) -> ir.Value:
        return x if gate is None else waiting(self._op, x, [gate])

    def _note(self, node: ir.Node) -> None:
        if node in KEEPS_ROUNDED:
            floats = [x for x in node.inputs if x is not None and is_float(x)]
            if self._exact.issuperset(floats):
                self._exact.update(node.outputs)

    def _place_nodes(self, node: ir.Node, *, after: bool = False) -> None:
        (self.graph.insert_after if after else self.graph.insert_before)(node, self._op.nodes)
        self._op.nodes.clear()


def _is_product(node: ir.Node) -> bool:
    return (node.domain, node.op_type) in PRODUCTS


def _operands(node: ir.Node) -> list[tuple[int, ir.Value]]:
    inputs = node.inputs if node.op_type == "Einsum" else node.inputs[:2]
    return [(n, x) for n, x in enumerate(inputs) if x is not None and x.dtype == ir.DataType.FLOAT]


def _names(node: ir.Node) -> set[str]:
    return {str(y.name) for y in node.outputs}
