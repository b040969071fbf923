"""Weights of a session that lie in memory once: in mapped files, or in arrays that sessions share."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backprop.opset.core import mapped
from onnx_backprop.opset.core.mapped import are_many, can_be_mapped, is_mapped, mapped_tensors, to_array
from onnx_backprop.opset.graphs.edit import add_import, assign
from onnx_backprop.opset.graphs.order import consumers
from onnx_backprop.opset.graphs.walk import is_standard, reads

if TYPE_CHECKING:
    from typing import Any as SessionOptions
else:
    from onnxruntime import SessionOptions

OrtValue = onnxruntime.OrtValue
_MICROSOFT = "com.microsoft"
_MULTIPLIES = ("Gather", "Gemm", "MatMul")
_LINE = 64  # bytes of a cache line, at which kernels expect tensors to begin


def ort_value(tensor: TensorProto) -> OrtValue:
    """The numbers of a tensor where they lie; a copy if they do not begin with a cache line."""
    array = to_array(tensor)
    if tensor.data_type == TensorProto.BFLOAT16:
        return OrtValue.ortvalue_from_numpy_with_onnx_type(np.array(array), TensorProto.BFLOAT16)
    if array.ctypes.data % _LINE == 0:
        return OrtValue.ortvalue_from_numpy(array)
    result = OrtValue.ortvalue_from_shape_and_type(list(tensor.dims), tensor.data_type)
    result.update_inplace(array)
    return result


def take_weights(
    model: ModelProto, shared: Mapping[str, OrtValue] = MappingProxyType({}), *, fuse: bool = True
) -> dict[str, OrtValue]:
    """Make inputs of large weights that products and lookups alone read; the values to feed for them.

    Of a constant onnxruntime makes copies: packed for a product, transposed for its gradient. Of an input it makes
    none, and packs it block by block in each run. Nothing is taken where all of them have few bytes.
    shared: values that another model of the same weights has by these names. fuse: by operators that the CPU alone has.
    """
    graph = model.graph
    readers = consumers(graph.node)
    inputs = {value.name for value in graph.input}
    ends = {value.name for value in graph.output}
    taken = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.name not in inputs | ends and can_be_mapped(tensor) and _is_multiplied(tensor.name, readers, ends)
    }
    if not are_many(taken.values()):
        return {}
    values = {name: shared.get(name) or ort_value(tensor) for name, tensor in taken.items()}
    graph.input.extend(helper.make_tensor_value_info(n, t.data_type, t.dims) for n, t in taken.items())
    assign(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in taken])
    if fuse:
        _fuse_transposes(model, {name for name, tensor in taken.items() if tensor.data_type == TensorProto.FLOAT})
    return values


def _fuse_transposes(model: ModelProto, weights: set[str]) -> None:
    """FusedMatMul nodes in the place of products with a transposed weight, which would be copied for them.

    onnxruntime does that itself, but not for what it makes a Gemm of, a product of matrices behind which a sum stands.
    """
    graph = model.graph
    matrices = {v.name for v in graph.input if len(v.type.tensor_type.shape.dim) == 2} & weights
    sources = {node.output[0]: node.input[0] for node in graph.node if is_standard(node, "Transpose")}
    for node in graph.node:
        which = [sources.get(name) in matrices for name in node.input] if is_standard(node, "MatMul") else []
        if any(which):
            node.op_type, node.domain = "FusedMatMul", _MICROSOFT
            for n, name in enumerate(("transA", "transB")):
                if which[n]:
                    node.input[n] = sources[node.input[n]]
                    node.attribute.append(helper.make_attribute(name, 1))
            add_import(model, _MICROSOFT)
    read = set().union(*map(reads, graph.node)) | {value.name for value in graph.output}
    assign(graph.node, [n for n in graph.node if n.output[0] in read or sources.get(n.output[0]) not in matrices])


def _is_multiplied(name: str, readers: dict[str, list[NodeProto]], ends: set[str]) -> bool:
    """Whether products and lookups alone read a tensor, perhaps transposed; and operators of our domains."""
    for node in readers.get(name, ()):
        if node.domain == _MICROSOFT:
            return False
        if is_standard(node, "Transpose"):
            if node.output[0] in ends or not _is_multiplied(node.output[0], readers, ends):
                return False
        elif is_standard(node) and node.op_type not in _MULTIPLIES:
            return False
    return name in readers


def give_values(model: ModelProto, options: SessionOptions) -> list[OrtValue]:
    """Let a session on these options read the mapped weights of a model where they lie; they are to be kept with it.

    The model is changed: onnxruntime takes no reference to a file by its whole path, nor values of what nobody reads.
    """
    read = {value.name for value in model.graph.output}.union(*map(reads, model.graph.node))
    if any(is_mapped(tensor) and tensor.name not in read for tensor in model.graph.initializer):
        kept = [tensor for tensor in model.graph.initializer if tensor.name in read or not is_mapped(tensor)]
        assign(model.graph.initializer, kept)
    tensors = list(mapped_tensors(model))
    values = [ort_value(tensor) for tensor in tensors]
    for tensor in tensors:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "mapped"
    if tensors:
        options.add_external_initializers([tensor.name for tensor in tensors], values)
    return values


def give_back() -> None:
    """Let the system have what a conversion leaves: graphs that refer to themselves, and memory that glibc keeps."""
    gc.collect()
    mapped.give_back()
    if trim := None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
