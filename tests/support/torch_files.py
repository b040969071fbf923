"""Files as torch's exporters write them, by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from onnx_backprop.converters.prepare.exporters.torch_metadata import SIGNATURE
from onnx_backprop.opset.graphs.edit import assign

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FOLDED = "pkg.onnxscript.optimizer.folded_from"
SCOPES = "pkg.torch.onnx.name_scopes"
W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4) ** 3
X = np.linspace(-1, 2, 6, dtype=np.float32).reshape(2, 3)


def exported(
    body: str,
    tensors: Mapping[str, np.ndarray],
    parameters: str,
    *,
    buffers: str = "",
    folded: Mapping[str, list[str]] | None = None,
    modules: Mapping[str, str] | None = None,
    x: str = "float[N,3] x",
) -> ModelProto:
    """A file as torch writes it. modules: the module of the node that makes a value. folded: what a tensor comes from."""
    body = re.sub(r"(?<=[a-z0-9])\.(?=[a-z])", "__", body)  # which the parser takes for a name
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> g ({x}) => (float y) {{ {body} }}')
    for node in model.graph.node:
        assign(node.input, [name.replace("__", ".") for name in node.input])
    model.producer_name = "pytorch"
    kinds = dict.fromkeys(parameters.split(), "PARAMETER") | dict.fromkeys(buffers.split(), "BUFFER")
    lines = [f"p_{name.replace('.', '_')}: {kind} target='{name}'" for name, kind in kinds.items()]
    text = "\n# inputs\n" + "\n".join(lines) + "\nx: USER_INPUT\n\n# outputs\ny: USER_OUTPUT\n"
    model.graph.metadata_props.add(key=SIGNATURE, value=text)
    for name, array in tensors.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        metadata = {KIND: kinds[name]} if name in kinds else {}
        if folded and name in folded:
            metadata = {FOLDED: str(folded[name])}
        value = model.graph.value_info.add(name=name)
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        for key, text in metadata.items():
            value.metadata_props.add(key=key, value=text)
    for node in model.graph.node:
        module = (modules or {}).get(node.output[0])
        if module is not None:
            node.metadata_props.add(key=SCOPES, value=str(["", module, node.op_type.lower()] if module else ["", "op"]))
    return model


def names_of(graph: ob.TrainingGraph) -> dict[str, np.ndarray]:
    """Each parameter under its name in the module."""
    names = {row.name: row.module or row.name for row in graph.rows()}
    return {names[name]: value for name, value in graph.initial_values().items()}


def with_operations(model: ModelProto, operations: Mapping[str, str], target: str = "f") -> ModelProto:
    """operations: the arguments of torch's operation that each value comes from. target: the operation."""
    for node in model.graph.node:
        if node.output[0] in operations:
            call = f"call_function[target={target}](args = ({operations[node.output[0]]}), kwargs = {{}})"
            text = f"%{node.output[0]} : [num_users=1] = {call}"
            node.metadata_props.add(key="pkg.torch.onnx.fx_node", value=text)
    return model


def scripted(body: str, tensors: Mapping[str, np.ndarray], names: Mapping[str, str] | None = None) -> ModelProto:
    """A file of TorchScript. names: of the nodes, by their outputs."""
    file = exported(body, tensors, "")
    del file.graph.metadata_props[:], file.graph.value_info[:]
    for node in file.graph.node:
        node.name = (names or {}).get(node.output[0], "")
        for index, name in enumerate(node.output):
            node.output[index] = name.replace("__", ".")
    return file
