"""What the function bodies of all routes have in common: the interface of an operator as a FunctionProto.

A function has no optional inputs, so each pattern of absent ones is an overload of its own, and an attribute that may
be absent needs a default that nobody can mean.
"""

from collections.abc import Callable, Mapping, Sequence

from onnx import AttributeProto, FunctionProto, NodeProto, TensorProto, helper

from onnx_backprop.opset.core.op import Attribute, Op, Output

# What an absent optional attribute looks like inside a body: no int64 attribute of the domain can mean this.
ABSENT_INT = -(2**63)
# An absent optional input: no operator's input has this shape, empty batches and lengths included.
ABSENT_SHAPE = (0, 7919, 0)

Present = tuple[bool, ...]

_PROTO_KIND: dict[str, Callable[[str], AttributeProto]] = {
    "int": lambda name: helper.make_attribute(name, ABSENT_INT),
    "float": lambda name: helper.make_attribute(name, float("nan")),
    "string": lambda name: helper.make_attribute(name, ""),
    "ints": lambda name: helper.make_attribute(name, [], attr_type=AttributeProto.INTS),
    "floats": lambda name: helper.make_attribute(name, [], attr_type=AttributeProto.FLOATS),
}


def present_inputs(op: Op, node: NodeProto) -> Present:
    """Which inputs of the operator a node connects."""
    return tuple(n < len(node.input) and bool(node.input[n]) for n in range(len(op.inputs)))


def function(
    op: Op,
    present: Present,
    nodes: Sequence[NodeProto],
    *,
    overload: str,
    opset: int,
    domains: Mapping[str, int] | None = None,
    outputs: int | None = None,
) -> FunctionProto:
    """The FunctionProto of an operator with the given inputs present and nodes inside.

    outputs: how many of them a node names (default: all); onnxruntime does not inline a function that has more.

    An absent input before a present one keeps its place, or the node's inputs would arrive shifted; the body must not
    read it.

    opset: of the default domain; the checker wants the model's own. domains: further opset imports.
    """
    last = max(n for n, there in enumerate(present) if there)
    return helper.make_function(
        op.domain,
        op.name,
        [i.name for i in op.inputs[: last + 1]],
        [o.name for o in op.outputs[:outputs]],
        nodes,
        [helper.make_opsetid("", opset), *(helper.make_opsetid(d, v) for d, v in (domains or {}).items())],
        attributes=[a.name for a in op.attributes if a.required],
        attribute_protos=[_default(a) for a in op.attributes if not a.required],
        overload=overload,
    )


def named_outputs(op: Op, node: NodeProto) -> int:
    """How many outputs of an operator a node names, those left out before the last one included."""
    return min(len(node.output), len(op.outputs))


def _default(attribute: Attribute) -> AttributeProto:
    if attribute.default is not None:
        return helper.make_attribute(attribute.name, attribute.default)
    return _PROTO_KIND[attribute.kind](attribute.name)


def reference(name: str, attribute: Attribute) -> AttributeProto:
    """An attribute of a body's node that takes the value of the function's attribute."""
    return AttributeProto(name=name, type=_PROTO_KIND[attribute.kind](name).type, ref_attr_name=attribute.name)


def in_its_type(op: Op, output: Output, result: str) -> NodeProto:
    """The node that makes an output of a result of any float type."""
    if output.type_name == "T1":
        like = next(i.name for i in op.inputs if i.type_name == "T1" and not i.shape_only)
        return helper.make_node("CastLike", [result, like], [output.name])
    return helper.make_node("Cast", [result], [output.name], to=TensorProto.FLOAT)
