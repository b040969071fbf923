"""The body of route "numba": one native operator that has the specification's own attributes and inputs."""

from __future__ import annotations

from onnx import FunctionProto, helper

from .function_protos import Present, function, reference
from .numpy_body import overload_of
from .op import Op

NATIVE_DOMAIN = "ai.onnx.contrib"
NATIVE_PREFIX = "OnnxBackprop_"


def native_body(op: Op, present: Present, opset: int) -> FunctionProto:
    """Tensors pass as they are, without a copy; an absent optional input stays absent.

    An attribute that the node does not have arrives as the function's default, which nobody can mean.
    """
    inputs = [i.name if there else "" for i, there in zip(op.inputs, present, strict=True)]
    while inputs and not inputs[-1]:
        inputs.pop()
    kernel = helper.make_node(NATIVE_PREFIX + op.name, inputs, [op.output], domain=NATIVE_DOMAIN, name="kernel")
    kernel.attribute.extend(reference(a.name, a) for a in op.attributes)
    return function(op, present, [kernel], overload=overload_of(op, present), opset=opset, domains={NATIVE_DOMAIN: 1})
