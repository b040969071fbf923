"""A model of one operator of the domain around given arrays, for any element type, fed in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import onnxruntime
from onnx import AttributeProto, ModelProto, TensorProto, helper

import onnx_backprop as ob
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.operators.registry import BY_NAME

ELEMENT_TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
KINDS = {"ints": AttributeProto.INTS, "floats": AttributeProto.FLOATS}


def model(
    op_type: str,
    attributes: Mapping[str, object],
    inputs: Sequence[np.ndarray | None],
    *,
    dtype: str = "f32",
    node_name: str = "the_node",
    opset: int = 18,
) -> ModelProto:
    """Tensors are float32 graph inputs, cast to `dtype` before the node and back behind it.

    All dimensions of the graph inputs are symbolic, so that nothing but the run knows the shapes.
    """
    nodes, graph_inputs, node_inputs = [], [], []
    for spec, array in zip(BY_NAME[op_type].inputs, inputs, strict=False):
        name = spec.name
        if array is None:
            node_inputs.append("")
            continue
        shape = [f"{name}_{axis}" for axis in range(array.ndim)]
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        graph_inputs.append(helper.make_tensor_value_info(name, element, shape))
        if spec.type_name != "T1" or dtype == "f32":
            node_inputs.append(name)
        else:
            nodes.append(helper.make_node("Cast", [name], [f"{name}_cast"], to=ELEMENT_TYPES[dtype]))
            node_inputs.append(f"{name}_cast")
    while node_inputs and not node_inputs[-1]:
        node_inputs.pop()
    results = results_of(op_type)
    node = helper.make_node(op_type, node_inputs, results, domain=ob.DOMAIN, name=node_name)
    kinds = {a.name: KINDS.get(a.kind) for a in BY_NAME[op_type].attributes}
    for name, value in attributes.items():  # only an empty list needs its kind said
        node.attribute.append(helper.make_attribute(name, value, attr_type=None if value else kinds.get(name)))
    nodes.append(node)
    outputs = [name.replace("result", "output") for name in results]
    for result, output in zip(results, outputs, strict=True):
        nodes.append(helper.make_node("Cast", [result], [output], to=TensorProto.FLOAT))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    return helper.make_model(
        helper.make_graph(nodes, op_type, graph_inputs, infos),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(ob.DOMAIN, ob.OPSET_VERSION)],
        ir_version=10,
    )


def results_of(op_type: str) -> list[str]:
    """What the outputs of an operator are called: result, result_1 …"""
    return ["result" if n == 0 else f"result_{n}" for n in range(len(BY_NAME[op_type].outputs))]


def feeds(op_type: str, inputs: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
    """What a session on `model` is fed."""
    names = [i.name for i in BY_NAME[op_type].inputs]
    return {name: array for name, array in zip(names, inputs, strict=False) if array is not None}


@cache
def options(threads: int) -> onnxruntime.SessionOptions:
    """Sessions on so many threads, which do not wait busily: other processes of the tests need the cores."""
    result = onnxruntime.SessionOptions()
    result.intra_op_num_threads = threads
    result.log_severity_level = 3
    result.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return result


def run(
    op_type: str,
    attributes: Mapping[str, object],
    inputs: Sequence[np.ndarray | None],
    *,
    dtype: str = "f32",
    kernels: str = "numpy",
) -> np.ndarray:
    """The operator's first output in an onnxruntime session, as float32."""
    return run_all(op_type, attributes, inputs, dtype=dtype, kernels=kernels)[0]


def run_all(
    op_type: str,
    attributes: Mapping[str, object],
    inputs: Sequence[np.ndarray | None],
    *,
    dtype: str = "f32",
    kernels: str = "numpy",
) -> list[np.ndarray]:
    """All of the operator's outputs in an onnxruntime session, as float32."""
    session = ob.session(model(op_type, attributes, inputs, dtype=dtype), kernels=kernels)
    return [np.asarray(value) for value in session.run(None, feeds(op_type, inputs))]


def leave_out_outputs(model: ModelProto, names: list[str]) -> list[int]:
    """Give the node of `model` outputs of these names, "" for one that is left out; the positions of the others."""
    wanted = [n for n, name in enumerate(names) if name]
    graph = model.graph
    assign(graph.node[0].output, names)
    assign(graph.node, [graph.node[0], *(node for node in graph.node[1:] if node.input[0] in names)])
    assign(graph.output, [graph.output[n] for n in wanted])
    return wanted
