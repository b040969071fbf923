"""The gradient of a mean over the whole batch, of which a rank has some rows: it divides by what all ranks count.

    dL/dy of a row = … / W,  W = Σ_r weight_r = weight · scale,  scale = W / weight

So every value that belongs to one row has the bits that it has on one rank, and no gradient is weighed afterwards.
"""

from __future__ import annotations

from onnx import ModelProto, TensorProto, helper

from onnx_backprop.converters.reverse.divisors import divisions_for
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.names import unique, used_names


def divide_by_all(model: ModelProto, loss: str) -> str | None:
    """Let the gradient of the node that makes the loss multiply its count by a new input, in place.

    The name of that input, a float64; None, and nothing is changed, where the loss is not made by a mean.
    """
    nodes = model.graph.node
    found = divisions_for(loss, nodes)
    if len(found) != 1:
        return None
    reserved = used_names(model.graph)
    count, product, whole, scale = (
        unique(f"whole_batch/{n}", reserved) for n in ("count", "product", "divisor", "scale")
    )
    divisor = nodes[found[0]].input[1]
    added = [
        helper.make_node("Cast", [divisor], [count], name=count, to=TensorProto.DOUBLE),
        helper.make_node("Mul", [count, scale], [product], name=product),
        helper.make_node("CastLike", [product, divisor], [whole], name=whole),
    ]
    copies = list(map(copied, nodes))
    copies[found[0]].input[1] = whole
    assign(nodes, [*copies[: found[0]], *added, *copies[found[0] :]])
    model.graph.input.append(helper.make_tensor_value_info(scale, TensorProto.DOUBLE, []))
    return scale
