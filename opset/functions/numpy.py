"""The body of the routes "numpy" and "numba": one Python operator, in the domain of the route."""

import numpy as np
from onnx import FunctionProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.opset.core.op import NUMBER_TYPES, Op
from onnx_backprop.opset.functions.protos import ABSENT_SHAPE, Present, function, in_its_type, reference

NUMPY_DOMAIN = "onnx_backprop.numpy"
NUMBA_DOMAIN = "onnx_backprop.loops"
CHECK_DOMAIN = "ai.onnx.contrib"
CHECK_OP = "OnnxBackpropCheck"


def overload_of(op: Op, present: Present, outputs: int) -> str:
    """The overload of a pattern of inputs and a number of outputs: named after those that are absent."""
    missing = [i.name for i, there in zip(op.inputs, present, strict=True) if not there]
    missing += [o.name for o in op.outputs[outputs:]]
    return f"without_{'_'.join(missing)}" if missing else ""


def python_body(domain: str, op: Op, present: Present, opset: int, outputs: int) -> FunctionProto:
    """Everything becomes a tensor, one Python operator computes in float64.

    Floating-point inputs are cast to float32 and the result back, so that f16 and bf16 are rounded once; of an
    input whose values do not matter only the shape is passed on. The Python operator answers (data, shape) for
    each output and a message; a non-empty one fails the run in the check nodes, for a Python exception there would
    end the process.
    """
    nodes: list[NodeProto] = []
    feeds: list[str] = []
    for spec, there in zip(op.inputs, present, strict=True):
        feed = f"input_{spec.name}"
        feeds.append(feed)
        if not there:
            value = numpy_helper.from_array(np.zeros(ABSENT_SHAPE, NUMBER_TYPES[spec.type_name].dtype))
            nodes.append(helper.make_node("Constant", [], [feed], value=value))
        elif spec.shape_only:
            nodes.append(helper.make_node("Shape", [spec.name], [feed]))
        elif spec.floats:
            nodes.append(helper.make_node("Cast", [spec.name], [feed], to=TensorProto.FLOAT))
        else:
            nodes.append(helper.make_node("Identity", [spec.name], [feed]))
    for attribute in op.attributes:
        if attribute.kind in ("float", "ints", "floats"):
            feeds.append(f"attribute_{attribute.name}")
            constant = helper.make_node("Constant", [], [feeds[-1]])
            constant.attribute.append(reference(f"value_{attribute.kind}", attribute))
            nodes.append(constant)
    results = [name for o in op.outputs for name in (f"data_{o.name}", f"shape_{o.name}")]
    kernel = helper.make_node(op.key, feeds, [*results, "message"], domain=domain, name="kernel")
    kernel.attribute.extend(reference(a.name, a) for a in op.attributes if a.kind in ("int", "string"))
    nodes.append(kernel)
    for o in op.outputs[:outputs]:
        data, shape, checked, result = (f"{what}_{o.name}" for what in ("data", "shape", "checked", "result"))
        nodes += [
            helper.make_node(CHECK_OP, [shape, "message"], [checked], domain=CHECK_DOMAIN, name=f"check_{o.name}"),
            helper.make_node("Reshape", [data, checked], [result], name=result, allowzero=1),
            in_its_type(op, o, result),
        ]
    domains = {domain: 1, CHECK_DOMAIN: 1}
    overload = overload_of(op, present, outputs)
    return function(op, present, nodes, overload=overload, opset=opset, domains=domains, outputs=outputs)
