"""The body of route "native": one native operator that has the specification's own attributes and inputs."""

import os
import sys

from onnx import FunctionProto, ModelProto, NodeProto, helper

from onnx_backprop.opset.core.op import Op
from onnx_backprop.opset.functions.numpy import overload_of
from onnx_backprop.opset.functions.protos import Present, function, in_its_type, reference

OPERATORS_VARIABLE = "ONNX_BACKPROP_OPERATORS"  # a library to hand operators to in the place of onnxruntime-extensions'
SEPARATE_LIBRARY = sys.platform == "win32" or OPERATORS_VARIABLE in os.environ
# Libraries of one session have domains of their own, and Python operators are in onnxruntime-extensions'.
NATIVE_DOMAIN = "onnx_backprop.native" if SEPARATE_LIBRARY else "ai.onnx.contrib"
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
    results = [o.name if typed else f"result_{o.name}" for o in named]  # a kernel computes all that has a name
    kernel = helper.make_node(NATIVE_PREFIX + op.key, inputs, results, domain=NATIVE_DOMAIN, name="kernel")
    kernel.attribute.extend(reference(a.name, a) for a in op.attributes)
    nodes, overload = [kernel], overload_of(op, present, outputs)
    if not typed:
        nodes += [in_its_type(op, o, result) for o, result in zip(named, results, strict=False)]
        overload += "_cast" if overload else "cast"
    domains = {NATIVE_DOMAIN: 1}
    return function(op, present, nodes, overload=overload, opset=opset, domains=domains, outputs=outputs)


def write_out(model: ModelProto) -> None:
    """Let the main graph's nodes be native operators themselves where their function is no more than one.

    onnxruntime does the same when it loads a model, but puts what it writes out behind all other nodes, which changes
    the order of a graph that it is to follow, and gives it other names.
    """
    single = [f for f in model.functions if len(f.node) == 1 and f.node[0].domain == NATIVE_DOMAIN]
    bodies = {(f.domain, f.name, f.overload): f for f in single}
    for node in model.graph.node:
        body = bodies.get((node.domain, node.op_type, node.overload))
        if body is None:
            continue
        (kernel,) = body.node
        names = dict(zip(body.input, node.input, strict=False)) | dict(zip(body.output, node.output, strict=False))
        stated = {a.name: a for a in (*body.attribute_proto, *node.attribute)}
        native = NodeProto(op_type=kernel.op_type, domain=kernel.domain, name=node.name)
        for a in kernel.attribute:
            value = stated.get(a.ref_attr_name) if a.ref_attr_name else a
            if value is not None:
                native.attribute.add().CopyFrom(value)
                native.attribute[-1].name = a.name
        native.input.extend(names.get(name, "") for name in kernel.input)
        native.output.extend(names.get(name, "") for name in kernel.output)
        node.CopyFrom(native)
