"""The gradient of a mean over the whole batch, of which a rank has some rows: it divides by what all ranks count.

    dL/dy of a row = … / W,  W = Σ_r weight_r = weight · scale,  scale = W / weight

So every value that belongs to one row has the bits that it has on one rank, and no gradient is weighed afterwards.
"""

from onnx import ModelProto, TensorProto, helper

from onnx_backprop.converters.reverse.divisors import divisions_for
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.emit import Emitter
from onnx_backprop.opset.graphs.names import unique, used_names


def divide_by_all(model: ModelProto, loss: str) -> str | None:
    """Let the gradient of the node that makes the loss multiply its count by a new input, in place.

    The name of that input, a float64; None, and nothing is changed, where the loss is not made by a mean.
    """
    nodes = model.graph.node
    divisions = divisions_for(loss, nodes)
    if len(divisions) != 1:
        return None
    op = Emitter("whole_batch", used_names(model.graph))
    scale = unique("whole_batch/scale", op.taken)
    (position,), copies = divisions, list(map(copied, nodes))
    divisor = copies[position].input[1]
    copies[position].input[1] = op.CastLike(op.Mul(op.Cast(divisor, to=TensorProto.DOUBLE), scale), divisor)
    assign(nodes, [*copies[:position], *op.nodes, *copies[position:]])
    model.graph.input.append(helper.make_tensor_value_info(scale, TensorProto.DOUBLE, []))
    return scale
