"""A training step that notices what is no number, for kernels that lose it: `max(NaN, 0)` is 0 on many a GPU."""

import numpy as np
from onnx import ModelProto, TensorProto

from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.slots import SCALE
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import rename, unique, used_names

_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def watch(graph: TrainingGraph, model: ModelProto) -> None:
    """loss ← loss + 0 · Σ gradients, in `model`, which is that of `graph`: NaN where a gradient is NaN or infinite.

    Products and sums keep what is no number, and the gradient of a weight is a product with all that its layer reads.
    Their sum is one of sums along axis 0, which a GPU computes side by side. Float64 runs on the CPU, which loses
    nothing; a graph with a scale of its loss looks at its gradients itself.
    """
    taken = used_names(model.graph)
    op, total = Emitter("finite", taken), ""
    declared = {value.name: value.type.tensor_type for value in (*model.graph.input, *model.graph.output)}
    types = {name: value.elem_type for name, value in declared.items()}
    for parameter, gradient in {} if graph.slot(SCALE) else graph.parameters.items():
        if types[parameter] == TensorProto.DOUBLE:
            continue
        wide = op.Cast(gradient, to=TensorProto.FLOAT) if types[parameter] in _HALF else gradient
        if len(declared[parameter].shape.dim) > 1:
            wide = op.ReduceSum(wide, op.constant([0], np.int64), keepdims=0)
        part = op.ReduceSum(wide, keepdims=0)
        total = op.Add(total, part) if total else part
    if not total:
        return
    zero = op.Mul(total, op.constant(0, np.float32))
    alone = unique(f"{graph.loss}/alone", taken)
    for node in model.graph.node:
        rename(node, {graph.loss: alone})
    if types[graph.loss] != TensorProto.FLOAT:
        zero = op.Cast(zero, to=types[graph.loss])
    model.graph.node.extend(op.finish({graph.loss: op.Add(alone, zero)}))
