"""BatchNormalization by the statistics of the whole batch, of which every rank has a part.

    μ = Σ_r Σ x / n,  σ² = Σ_r Σ (x - μ)² / n,  n = Σ_r n_r over all axes but the channels',  d = x - μ
    dx = dy·slope + (d·along + level),  slope = γ·r,  along = -slope·r²·S₂ / n,  level = -slope·S₁ / n
    S₁ = Σ_s share_s Σ dy / share_r,  S₂ = Σ_s share_s Σ dy·d / share_r

dy is the gradient of a rank's own loss, of which the whole one is Σ_s share_s · loss_s, so that a rank's dx lacks the
factor share_r, which its gradients get afterwards; 1, where the loss has the divisor of the whole batch. Sums, and what
is made of them, are float64, and what is done to every element is what the native kernels of one rank do, step by
step: the results have the same bits. One message in the forward pass for μ, one for σ², one backward.
"""

from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.opset import DOMAIN
from onnx_backprop.opset.core.errors import UnsupportedError
from onnx_backprop.opset.graphs.edit import add_import, assign, copied
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import unique, used_names
from onnx_backprop.opset.graphs.walk import attributes_of, is_standard
from onnx_backprop.ort_ops.numpy_route import RANKS_DOMAIN, SUM, WEIGHTED_SUM

_BACKWARD = "BatchNormTrainingBackward"


def synchronise(model: ModelProto) -> int:
    """Let every BatchNormalization in training mode, and its gradient, sum over all ranks, in place; how many do.

    Errors: UnsupportedError for one that does not work in float32 on an input of known rank, or whose gradient is not
    that of the same input, as where activations are computed again.
    """
    writer = _Writer(model)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if is_standard(node, "BatchNormalization") and attributes_of(node).get("training_mode"):
            nodes += writer.forward(node)
        elif node.op_type == _BACKWARD and node.domain == DOMAIN:
            nodes += writer.backward(node)
        else:
            nodes.append(node)
    if writer.statistics:
        copies = list(map(copied, nodes))
        assign(model.graph.node, copies)
        model.graph.initializer.extend(writer.constants)
        add_import(model, RANKS_DOMAIN)
    return len(writer.statistics)


class _Writer(Emitter):
    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        super().__init__("sync_batch_norm", used_names(graph))
        self._types = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input, *graph.output)}
        self.constants: list[TensorProto] = []
        self.statistics: dict[
            str, tuple[str, str, str, str]
        ] = {}  # of an input: μ and d in float32, r and n in float64

    def _constant(self, value: Any, dtype: type[np.generic] = np.int64) -> str:
        name = unique("sync_batch_norm/constant", self.taken)
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def _summed(self, op_type: str, x: str) -> str:
        """Over all ranks."""
        return self.emit(op_type, [x], {"domain": RANKS_DOMAIN})[0]

    def _number(self, value: float) -> str:
        """As float64, of what was float32."""
        return self._constant(np.float32(value), np.float64)

    def _double(self, x: str) -> str:
        return self.Cast(x, to=TensorProto.DOUBLE)

    def _single(self, x: str) -> str:
        return self.Cast(x, to=TensorProto.FLOAT)

    def _spread(self, x: str, per: str) -> str:
        """float32 numbers per channel, for arithmetic with what is normalised."""
        return self.Reshape(self._single(x), per)

    def _done(self, results: list[str], node: NodeProto) -> list[NodeProto]:
        """What was emitted, with the outputs of a node."""
        for result, output in zip(results, node.output, strict=False):
            if output:
                self.nodes.append(helper.make_node("Identity", [result], [output], name=f"{output}/synchronised"))
        nodes, self.nodes = self.nodes, []
        return nodes

    def _axes(self, node: NodeProto) -> tuple[str, str]:
        """All axes of the input but the channels', and the shape that spreads a number per channel over them."""
        kind = self._types.get(node.input[0])
        if kind is None or not kind.HasField("shape") or kind.elem_type != TensorProto.FLOAT:
            raise UnsupportedError(
                "sync_batch_norm: expected an input in float32 of a known rank. Leave it out, statistics are then "
                "those of each rank",
                op_type=node.op_type,
                node=node.name or node.output[0],
            )
        rank = len(kind.shape.dim)
        return self._constant([n for n in range(rank) if n != 1]), self._constant([-1] + [1] * (rank - 2))

    def forward(self, node: NodeProto) -> list[NodeProto]:
        given, (x, scale, bias, *running) = attributes_of(node), node.input
        others, per = self._axes(node)
        total = self.ReduceSum(self._double(x), others, keepdims=0)
        ratio = self.Div(self.Size(x), self.Max(self.Size(scale), self._constant(1)))
        local = self.Reshape(self._double(ratio), self._constant([1]))
        summed = self._summed(SUM, self.Concat(total, local, axis=0))
        last = self._constant([-1])
        count = self.Gather(summed, last)
        mean = self.Div(self.Slice(summed, self._constant([0]), last), count)
        exact = self.Sub(self._double(x), self.Reshape(mean, per))
        squares = self.ReduceSum(self.Mul(exact, exact), others, keepdims=0)
        variance = self.Div(self._summed(SUM, squares), count)
        epsilon = self._number(given.get("epsilon", 1e-5))
        rounded = self._double(self._single(variance))
        rate = self.Reciprocal(self.Sqrt(self.Add(rounded, epsilon)))
        near = self._single(mean)
        deviation = self.Sub(x, self.Reshape(near, per))
        self.statistics[x] = near, deviation, rate, count
        slope = self.Mul(self._double(scale), rate)
        scaled = self.Mul(deviation, self._spread(slope, per))
        y = self.Add(scaled, self.Reshape(bias, per))
        momentum = np.float32(given.get("momentum", 0.9))
        kept, new = self._number(float(momentum)), self._constant(1 - np.float64(momentum), np.float64)
        renewed = [
            self.Add(self.Mul(self._double(old), kept), self.Mul(statistic, new))
            for old, statistic in zip(running, (mean, variance), strict=True)
        ]
        return self._done([y, *map(self._single, renewed)], node)

    def backward(self, node: NodeProto) -> list[NodeProto]:
        x, dy = node.input[:2]
        gamma = node.input[4] if len(node.input) > 4 else ""
        if x not in self.statistics or any(node.input[2:4]):
            raise UnsupportedError(
                "sync_batch_norm: expected the gradient of a BatchNormalization of the same values. Leave memory= and "
                "precision= out, or sync_batch_norm",
                op_type=node.op_type,
                node=node.name or node.output[0],
            )
        mean, deviation, rate, count = self.statistics[x]
        others, per = self._axes(node)
        exact = self._double(dy)
        dbeta = self.ReduceSum(exact, others, keepdims=0)
        distance = self.Sub(self._double(x), self.Reshape(self._double(mean), per))
        along = self.ReduceSum(self.Mul(exact, distance), others, keepdims=0)
        dgamma = self.Mul(along, rate)
        both = self._summed(WEIGHTED_SUM, self.Concat(dbeta, dgamma, axis=0))
        whole, slanted = (self.Div(part, count) for part in self._halves(both, dbeta))
        slope = self.Mul(self._double(gamma), rate) if gamma else rate
        falling = self.Neg(slope)
        level = self.Mul(falling, whole)
        tilt = self.Mul(self.Mul(falling, rate), slanted)
        rest = self.Add(self.Mul(deviation, self._spread(tilt, per)), self._spread(level, per))
        dx = self.Add(self.Mul(dy, self._spread(slope, per)), rest)
        return self._done([dx, self._single(dgamma), self._single(dbeta)], node)

    def _halves(self, both: str, like: str) -> tuple[str, str]:
        length = self.Shape(like)
        start, end = self._constant([0]), self._constant([np.iinfo(np.int64).max])
        return self.Slice(both, start, length), self.Slice(both, length, end)
