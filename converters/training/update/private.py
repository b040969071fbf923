"""Steps of differential privacy: the gradients of a batch's rows, each clipped, summed, and noise on the sum.

    g = (Σ_i g_i · min(1, C / ‖g_i‖₂) + N(0, σ²C²)) / B

g_i is the gradient of the loss of a batch of row i alone, its norm over all trained parameters together. B is a number,
the rows that are expected of a batch, or without it those of the batch. With k runs to an update each adds noise of
the variance σ²C²/k, so that the update has what one of all their rows would.

A weight's gradient that is a product aᵀb is not kept for every row: ‖g_i‖² is ‖a_i‖²‖b_i‖² for one position, else
taken of a product that nobody keeps, and Σ_i f_i·g_i one product over all rows. Source: Abadi et al., "Deep Learning
with Differential Privacy", 2016; Goodfellow, "Efficient Per-Example Gradient Computations", 2015.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.forward import unsupported
from onnx_backprop.converters.reverse.known import dims, element_type, in_training, inputs_of, known_lengths
from onnx_backprop.converters.reverse.models.named import values_by_name
from onnx_backprop.converters.rules.common import as_shaped, cast
from onnx_backprop.converters.training.modes import hashed
from onnx_backprop.converters.training.optimizers import Optimizer, require
from onnx_backprop.converters.training.rewrites.sums import staged
from onnx_backprop.opset.core.errors import InvalidArgumentError, UnsupportedError
from onnx_backprop.opset.graphs.names import Names, used_names
from onnx_backprop.opset.graphs.walk import all_nodes, is_standard

_SALT = 1 << 20  # of the noise: Dropouts count from 0
_ROW = 0x9E3779B1  # odd: rows have seeds of their own


@dataclass(frozen=True)
class Privacy:
    """clip: C. noise: σ. expected: B; None for the rows of each batch."""

    clip: float
    noise: float
    expected: int | None

    def deviation(self, accumulate: int) -> float:
        """Of the noise of a run; where B is not known without that divisor."""
        return self.noise * self.clip / math.sqrt(accumulate) / (self.expected or 1)


def check_privacy(clip: Any, noise: Any, expected: Any, optimizer: Optimizer | None) -> Privacy | None:
    """What is asked for; InvalidArgumentError for numbers out of range, and without an optimizer or a clip."""
    if clip is None:
        if noise or expected is not None:
            raise InvalidArgumentError(
                "noise, expected_batch: go with per_sample_clip (--per-sample-clip), the norm that they bound"
            )
        return None
    require("training_graph", "per_sample_clip", clip, low=0)
    require("training_graph", "noise", noise, low=0)
    if not clip:
        raise InvalidArgumentError("expected more than 0, got 0", "per_sample_clip")
    if expected is not None and (isinstance(expected, bool) or not isinstance(expected, int) or expected < 1):
        raise InvalidArgumentError(f"expected the number of rows, 1 or more, got {expected!r}", "expected_batch")
    if optimizer is None:
        raise InvalidArgumentError(
            "goes with an optimizer. Without one, per_sample=True gives the gradients of each row", "per_sample_clip"
        )
    if optimizer.accumulate > 1 and expected is None:
        raise InvalidArgumentError(
            "accumulate with per_sample_clip: the runs of an update may have different rows, and one of few would "
            "weigh more than its noise hides. Give expected_batch, the rows that are expected of one run",
            "expected_batch",
        )
    return Privacy(float(clip), float(noise), expected)


def check_rows(graph: ir.Graph) -> None:
    """UnsupportedError for a node that mixes rows, so that a row's gradient would depend on the others."""
    for node in all_nodes(graph):
        if in_training(node):
            raise unsupported(
                node,
                "it standardises by the statistics of the whole batch, so that no row has a gradient of its own to "
                "clip. Leave training_mode out, which keeps its running statistics, or put GroupNorm in its place",
            )


class RowSums:
    """Gradients of one row, that become the clipped mean over the rows of a batch once these are given back.

    forward: the model with its loss, which stays as it is for the batch.
    """

    def __init__(self, privacy: Privacy, model: ir.Model) -> None:
        self._privacy, self._forward = privacy, model.clone().graph
        self._factor = ""
        self.rows: str | None = None  # the number of rows, a value in float64 where it is not known
        self._sums: dict[str, tuple[str, ...]] = {}  # of a gradient: the two factors of a product, or itself

    def clip(self, graph: ir.Graph, gradients: Mapping[str, str], counts: ir.Value | None) -> None:
        """Of the graph of one row: put min(1, C / ‖g‖) and what is to be summed in the place of its outputs.

        counts: its loss, where that may be a mean of nothing, as of labels that are all ignored: NaN, and g is 0.
        """
        values, names = values_by_name(graph), used_names(graph)
        squares: list[ir.Value] = []
        parts: dict[str, tuple[ir.Value, ...]] = {}
        for x, name in gradients.items():
            g, op = values[name], Builder(names)
            if element_type(g) not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
                raise UnsupportedError(f"per_sample_clip: {x!r} is {element_type(g)}; expected parameters in float32")
            op.prefix = f"{name}/clip"
            g.name = op.unique(f"{name}_of_row")
            parts[name] = factors = _product(g) or (g,)
            ways = factors if len(factors) == 2 and known_lengths(factors[0], 0, 1) == [1] else (g,)
            of_parts = [staged(op, part, "ReduceSumSquare", ir.DataType.DOUBLE) for part in ways]
            squares.append(of_parts[0] if len(of_parts) == 1 else op.Mul(*of_parts))
            node = g.producer()
            assert node is not None
            graph.insert_after(node, op.nodes)  # there, so that what only a norm reads is gone before the next one
        op = Builder(names)
        op.prefix = "clip"
        empty = None if counts is None else op.IsNaN(op.Reshape(counts, []))
        factor = op.Min(op.Div(self._privacy.clip, op.Sqrt(op.Sum(*squares))), 1.0)
        factor = factor if empty is None else op.Where(empty, 0.0, factor)
        factor.name = self._factor = op.unique("clip/factor")
        graph.outputs.clear()
        graph.outputs.append(factor)
        for name, factors in parts.items():  # either of two may be what the loss hands back
            outputs = [part if empty is None else op.Where(empty, 0.0, part) for part in factors]
            if len(outputs) == 2:  # the factor is in one of them
                scaled = op.Mul(outputs[1], cast(op, factor, element_type(outputs[1])))
                outputs = [op.Identity(outputs[0]), scaled]
            self._sums[name] = tuple(str(value.name) for value in outputs)
            graph.outputs.extend(outputs)
        graph.extend(op.nodes)

    def add_up(self, graph: ir.Graph, gradients: Mapping[str, str]) -> None:
        """Of the graph of all rows: the means under the names of the gradients, behind the forward model's outputs."""
        values, names = values_by_name(graph), used_names(graph)
        names.update(gradients.values())
        row_inputs, op = inputs_of(graph), Builder(names)
        factor = values[self._factor]
        graph.outputs.clear()
        rows: ir.Value | None = None
        if self._privacy.expected is None:
            op.prefix = "clip"
            rows = op.Squeeze(op.Cast(op.length(factor, 0), to=ir.DataType.DOUBLE), [0])
            rows.name = self.rows = op.unique("clip/rows")
        for x, name in gradients.items():
            op.prefix = f"{name}/rows"
            parts = [values[part] for part in self._sums[name]]
            dtype, shape = element_type(parts[0]), known_lengths(row_inputs[x]) or []
            if len(parts) == 1:
                weights = op.Reshape(cast(op, factor, dtype), [1, -1])
                total = op.MatMul(weights, op.Reshape(parts[0], [-1, math.prod(shape)]))
            else:
                a, b = (op.Reshape(part, [-1, length]) for part, length in zip(parts, shape, strict=True))
                total = op.MatMul(op.Transpose(a, perm=[1, 0]), b)
            divisor = self._privacy.expected if rows is None else cast(op, rows, dtype)
            total = op.Div(total, divisor)
            mean = op.Reshape(total, shape)
            mean.name, mean.shape = name, ir.Shape(shape)
            graph.outputs.append(mean)
        graph.extend(op.nodes)
        _put_in_front(graph, self._forward)


def _product(g: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """A (T, D) and b (T, K) of a gradient aᵀb, as the rules of products emit it."""
    node = g.producer()
    if node is None or not is_standard(node, "Gemm") or [*node.inputs[2:]] not in ([], [None]):
        return None
    numbers = {name: attribute.value for name, attribute in node.attributes.items()}
    a, b = node.inputs[:2]
    return (a, b) if a is not None and b is not None and numbers == {"transA": 1} else None


def seeds_of_rows(graph: ir.Graph, name: str, rows: ir.Value) -> None:
    """Let an input of random state that has rows be one seed for all, of which every row makes one of its own.

    rows: an input with the rows in front.
    """
    old = inputs_of(graph)[name]
    new = ir.Value(name=name, type=old.type, shape=ir.Shape([2]))
    op = Builder(used_names(graph))
    op.prefix = name
    numbers = op.Range(0, op.Squeeze(op.length(rows, 0), [0]), 1)
    seeds = op.Add(new, op.Mul(op.Unsqueeze(numbers, [1]), [_ROW, 0]))
    old.replace_all_uses_with(seeds)
    graph.inputs[graph.inputs.index(old)] = new
    graph.insert_before(graph[0], op.nodes)


def _put_in_front(graph: ir.Graph, forward: ir.Graph) -> None:
    """Add another graph's nodes, which keep their names, in front of all others, and its outputs likewise."""
    taken, names = used_names(forward), Names({*used_names(graph), *used_names(forward)})
    op = Builder(names)
    for node in graph:
        for named in (node, *node.outputs):
            if named.name in taken:
                named.name = op.unique(f"rows/{named.name}")
    row_inputs = inputs_of(graph)
    for value in inputs_of(forward).values():
        if value.name in row_inputs:
            value.replace_all_uses_with(row_inputs[str(value.name)])
        else:
            forward.initializers.pop(str(value.name))
            graph.register_initializer(value)
    outputs, nodes = list(forward.outputs), list(forward)
    forward.outputs.clear()
    symbols = {length for value in row_inputs.values() for length in dims(value) or ()}
    for value in (value for node in nodes for value in node.outputs):  # names of other lengths may be those of others
        if value.shape is not None and value not in outputs:
            lengths = [d if isinstance(d, int) or d in symbols else None for d in dims(value) or ()]
            value.shape = ir.Shape(lengths)
    forward.remove(nodes)
    graph.insert_before(graph[0], nodes)
    for place, value in enumerate(outputs):
        graph.outputs.insert(place, value)


def add_noise(
    op: Builder, gradients: Mapping[ir.Value, ir.Value], state: ir.Value, deviation: float, rows: ir.Value | None
) -> dict[ir.Value, ir.Value]:
    """By parameter its gradient with normal noise. state: of the random numbers. rows: what divides the deviation."""
    result: dict[ir.Value, ir.Value] = {}
    for n, (x, g) in enumerate(gradients.items()):
        op.prefix = f"{g.name}/noise"
        noise, dtype = normal(op, g, state, _SALT + 2 * n), element_type(g)  # of which ranks have the whole
        scale = deviation if rows is None else cast(op, op.Div(deviation, rows), dtype)
        result[x] = op.typed(op.Add(g, op.Mul(cast(op, noise, dtype), scale)), g)
    return result


def normal(op: Builder, like: ir.Value, state: ir.Value, salt: int) -> ir.Value:
    """√(-2·log u)·cos 2πv, float32 of the shape of `like`, standard normal for u and v uniform in (0, 1].

    u and v are 32 bits each of `hashed`, with two keys. The largest is 6.7.
    """
    u, v = (
        op.Mul(op.Add(op.Cast(hashed(op, like, state, salt + n), to=ir.DataType.FLOAT), 0.5), 2.0**-32) for n in (0, 1)
    )
    flat = op.Mul(op.Sqrt(op.Mul(op.Log(u), -2.0)), op.Cos(op.Mul(v, 2 * math.pi)))
    return as_shaped(op, flat, like)
