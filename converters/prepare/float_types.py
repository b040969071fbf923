"""The same model in another float type, for a forward that is computed more exactly than the model's own."""

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backprop.opset.core.mapped import to_array
from onnx_backprop.opset.graphs.edit import copied, replace_values
from onnx_backprop.opset.graphs.walk import all_graphs, all_nodes, is_standard

FLOATS = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE})
HALVES = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
# attributes that hold an element type, by operator; without the attribute these operators make float32
_DRAWN = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli")
_TYPE_ATTRIBUTES = (
    {"Cast": "to", "EyeLike": "dtype"}
    | dict.fromkeys(_DRAWN, "dtype")
    | dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"), "output_datatype")
)


def with_float_type(model: ModelProto, element: int) -> ModelProto:
    """A copy in which every float tensor has the given element type: inputs, constants, casts, sub-graphs, functions.

    Inferred types in between are dropped. Inputs that an operator wants in float32 whatever the model's type, such as
    a Resize's scales, change too: for `DOUBLE` the result is for onnx's reference evaluator, which does not mind.
    """
    result = copied(model)
    for graph in all_graphs(result):
        del graph.value_info[:]
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type in FLOATS:
                value.type.tensor_type.elem_type = element
        for tensor in graph.initializer:
            _retype_tensor(tensor, element)
    for node in all_nodes(result):
        if is_standard(node):
            _retype_attributes(node, element)
    return result


def half_types(model: ModelProto) -> set[int]:
    """The float types of less than 32 bits that the inputs, outputs and initializers of a model have."""
    graph = model.graph
    declared = {v.type.tensor_type.elem_type for v in (*graph.input, *graph.output, *graph.value_info)}
    return (declared | {t.data_type for t in graph.initializer}) & HALVES


def converted(array: np.ndarray, element: int) -> np.ndarray:
    """A float array in another type; any other array as it is."""
    if helper.np_dtype_to_tensor_dtype(array.dtype) not in FLOATS:
        return array
    return array.astype(helper.tensor_dtype_to_np_dtype(element))


def _retype_attributes(node: NodeProto, element: int) -> None:
    attributes = {a.name: a for a in node.attribute}
    if node.op_type == "ConstantOfShape" and "value" not in attributes:
        node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1, np.float32))))
    if node.op_type == "Constant":
        for name in ("value_float", "value_floats"):
            if name in attributes:
                number = attributes[name].f if name == "value_float" else list(attributes[name].floats)
                tensor = numpy_helper.from_array(np.array(number, np.float32))
                attributes[name].CopyFrom(helper.make_attribute("value", tensor))
    name = _TYPE_ATTRIBUTES.get(node.op_type)
    if name in attributes and attributes[name].i in FLOATS:
        attributes[name].i = element
    elif name is not None and name not in attributes and not node.op_type.endswith("Like"):
        node.attribute.append(helper.make_attribute(name, element))
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            _retype_tensor(attribute.t, element)


def _retype_tensor(tensor: TensorProto, element: int) -> None:
    if tensor.data_type in FLOATS and tensor.data_type != element:
        replace_values(tensor, converted(to_array(tensor), element))
