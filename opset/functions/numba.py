"""The body of route "numba": one native operator that has the specification's own attributes and inputs."""

from onnx import FunctionProto, helper

from onnx_backprop.opset.core.op import Op
from onnx_backprop.opset.functions.numpy import overload_of
from onnx_backprop.opset.functions.protos import Present, function, in_its_type, reference

NATIVE_DOMAIN = "ai.onnx.contrib"
NATIVE_PREFIX = "OnnxBackprop_"


def native_body(op: Op, present: Present, opset: int, outputs: int, *, typed: bool) -> FunctionProto:
    """Tensors pass as they are, without a copy; an absent optional input stays absent.

    An attribute that the node does not have arrives as the function's default, which nobody can mean.

    typed: the graph around the node states the element types of its results. Otherwise a cast behind the kernel does,
    for onnxruntime wants to know it before it looks at the kernel; it changes nothing and is mostly removed.
    """
    inputs = [i.name if there else "" for i, there in zip(op.inputs, present, strict=True)]
    while inputs and not inputs[-1]:
        inputs.pop()
    named = op.outputs[:outputs]
    results = [o.name if typed else f"result_{o.name}" for o in op.outputs]
    kernel = helper.make_node(NATIVE_PREFIX + op.name, inputs, results, domain=NATIVE_DOMAIN, name="kernel")
    kernel.attribute.extend(reference(a.name, a) for a in op.attributes)
    nodes, overload = [kernel], overload_of(op, present, outputs)
    if not typed:
        nodes += [in_its_type(op, o, result) for o, result in zip(named, results, strict=False)]
        overload += "_cast" if overload else "cast"
    domains = {NATIVE_DOMAIN: 1}
    return function(op, present, nodes, overload=overload, opset=opset, domains=domains, outputs=outputs)
