"""The body of route "numpy": one Python operator that computes the float64 reference."""

from __future__ import annotations

from onnx import FunctionProto, NodeProto, TensorProto, helper, numpy_helper

from .function_protos import Present, absent, function, reference, result_type
from .op import NUMBER_TYPES, Op

NUMPY_DOMAIN = "onnx_backprop.numpy"
CHECK_DOMAIN = "ai.onnx.contrib"
CHECK_OP = "OnnxBackpropCheck"


def overload_of(op: Op, present: Present) -> str:
    """The overload of a pattern of inputs: named after those that are absent."""
    missing = [i.name for i, there in zip(op.inputs, present, strict=True) if not there]
    return f"without_{'_'.join(missing)}" if missing else ""


def numpy_body(op: Op, present: Present, opset: int) -> FunctionProto:
    """Everything becomes a tensor, one Python operator computes in float64.

    Floating-point inputs are cast to float32 and the result back, so that f16 and bf16 are rounded once; of an
    input whose values do not matter only the shape is passed on. The Python operator answers (data, shape,
    message); a non-empty message fails the run in the check node, for a Python exception there would end the
    process.
    """
    nodes: list[NodeProto] = []
    feeds: list[str] = []
    for spec, there in zip(op.inputs, present, strict=True):
        feed = f"input_{spec.name}"
        feeds.append(feed)
        if not there:
            value = numpy_helper.from_array(absent(NUMBER_TYPES[spec.type_name].dtype))
            nodes.append(helper.make_node("Constant", [], [feed], value=value))
        elif spec.shape_only:
            nodes.append(helper.make_node("Shape", [spec.name], [feed]))
        elif spec.type_name == "T1":
            nodes.append(helper.make_node("Cast", [spec.name], [feed], to=TensorProto.FLOAT))
        else:
            nodes.append(helper.make_node("Identity", [spec.name], [feed]))
    for attribute in op.attributes:
        if attribute.kind in ("float", "ints", "floats"):
            feeds.append(f"attribute_{attribute.name}")
            constant = helper.make_node("Constant", [], [feeds[-1]])
            constant.attribute.append(reference(f"value_{attribute.kind}", attribute))
            nodes.append(constant)
    kernel = helper.make_node(op.name, feeds, ["data", "shape", "message"], domain=NUMPY_DOMAIN, name="kernel")
    kernel.attribute.extend(reference(a.name, a) for a in op.attributes if a.kind in ("int", "string"))
    nodes += [
        kernel,
        helper.make_node(CHECK_OP, ["shape", "message"], ["checked"], domain=CHECK_DOMAIN, name="check"),
        helper.make_node("Reshape", ["data", "checked"], ["result"], name="result", allowzero=1),
        helper.make_node("CastLike", ["result", result_type(op)], [op.output]),
    ]
    domains = {NUMPY_DOMAIN: 1, CHECK_DOMAIN: 1}
    return function(op, present, nodes, overload=overload_of(op, present), opset=opset, domains=domains)
