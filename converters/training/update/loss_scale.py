"""Dynamic loss scaling for float16, whose smallest number is 6·10⁻⁸: in the graph, with its state among the inputs.

    seed = scale;  g = <gradient> / scale in float32;  finite = all g are finite
    finite:      the step, good ← good + 1; at 2000 scale ← 2 · scale, good ← 0
    not finite:  no parameter and nothing of the optimizer changes; scale ← scale / 2, good ← 0, skipped ← skipped + 1

Running statistics and random numbers are the forward pass's and go on in both cases, as in torch. The scale stays
within 2⁻¹⁴ … 2²⁴. Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
"""

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.reverse.builder import Builder
from onnx_backprop.converters.reverse.known import element_type
from onnx_backprop.converters.rules.common import cast
from onnx_backprop.converters.training.names import GOOD_STEPS, LEAST_SCALE, LOSS_SCALE, SKIPPED_STEPS
from onnx_backprop.converters.training.slots import COUNTER, SCALE
from onnx_backprop.converters.training.update.optimizer_function import one_element
from onnx_backprop.converters.training.update.step import StepState, state_input

INITIAL, LARGEST = 2.0**15, 2.0**24
INTERVAL = 2000  # good steps until the scale grows


def scaled_loss(graph: ir.Graph, op: Builder, loss: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(the scale, a new input; the loss times it, a further output to differentiate)."""
    scale = ir.Value(name=op.unique(LOSS_SCALE), type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]))
    graph.inputs.append(scale)
    op.prefix = LOSS_SCALE
    scaled = op.typed(op.Mul(loss, cast(op, scale, element_type(loss))), loss)
    graph.extend(op.nodes)
    op.nodes.clear()
    graph.outputs.append(scaled)
    return scale, scaled


def unscale(graph: ir.Graph, op: Builder, scale: ir.Value, gradients: list[ir.Value]) -> None:
    """Divide gradients, which are outputs of the graph, by the scale; the quotients get their names."""
    op.prefix = LOSS_SCALE
    inverses: dict[tuple[ir.DataType, int], ir.Value] = {}
    for g in gradients:
        name, ones = str(g.name), one_element(g.shape)
        key = element_type(g), len(ones)
        if key not in inverses:
            inverse = op.Reciprocal(cast(op, scale, key[0]))
            inverses[key] = op.Reshape(inverse, ones) if ones else inverse
        place = graph.outputs.index(g)
        g.name = op.unique(f"{name}_scaled")
        quotient = op.typed(op.Mul(g, inverses[key]), g)
        quotient.name = name
        graph.outputs[place] = quotient
    graph.extend(op.nodes)
    op.nodes.clear()


def with_default(graph: ir.Graph, scale: ir.Value) -> None:
    """Without an optimizer there is no state: the scale is an input with a default."""
    scale.const_value = ir.tensor(np.array(INITIAL, np.float32), name=scale.name)
    graph.register_initializer(scale)


def renewed_scale(op: Builder, state: StepState, scale: ir.Value, gradients: list[ir.Value]) -> ir.Value:
    """Put the scale and its counts into the state; whether all gradients are finite, 0-D."""
    op.prefix = LOSS_SCALE
    total = op.Sum(*(cast(op, op.ReduceL1(g, keepdims=0), ir.DataType.FLOAT) for g in gradients))
    finite = op.LessOrEqual(total, float(np.finfo(np.float32).max))
    good, skipped = (state_input(op, name, ir.DataType.INT64) for name in (GOOD_STEPS, SKIPPED_STEPS))
    grows = op.GreaterOrEqual(op.Add(good, 1), INTERVAL)
    larger = op.Where(grows, op.Min(op.Mul(scale, 2.0), LARGEST), scale)
    state.renew(scale, op.Where(finite, larger, op.Max(op.Mul(scale, 0.5), LEAST_SCALE)), SCALE, INITIAL)
    state.renew(good, op.Where(op.And(finite, op.Not(grows)), op.Add(good, 1), 0), COUNTER, 0, GOOD_STEPS)
    number = op.Cast(op.Not(finite), to=ir.DataType.INT64)
    state.renew(skipped, op.Add(skipped, number), COUNTER, 0, SKIPPED_STEPS)
    return finite
