"""The decoder that a training graph was made of, with its cache: kept beside the graph, without the weights.

A step reads no cache; what generates does. The nodes lie in the metadata of the training graph, compressed; each
initializer that the graph has too is there by name, type and shape alone.
"""

import base64
import binascii
import zlib
from collections.abc import Mapping

from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, numpy_helper

from onnx_backprop.opset.core.errors import InvalidModelError
from onnx_backprop.opset.core.sound import sound
from onnx_backprop.opset.graphs.edit import assign
from onnx_backprop.opset.graphs.walk import all_nodes

KEPT = "onnx_backprop.decoder"  # key of the model's metadata
_LONGEST = 1 << 28  # bytes of nodes, and of the few tensors that a training graph does not have


def store_decoder(model: ModelProto, decoder: ModelProto, tensors: Mapping[str, TensorProto], came: ModelProto) -> None:
    """Write a decoder into the metadata of the training graph that is made of it.

    decoder: without the initializers, which are `tensors`. came: as it was given; it says what inputs and outputs are.
    """
    from onnx_backprop.converters.prepare.accept import EARLIER, MICROSOFT  # which a trainer of a file does not need

    present = {tensor.name: tensor for tensor in model.graph.initializer}
    stored = {tensor.name for tensor in came.graph.initializer}
    assign(decoder.graph.output, came.graph.output)
    assign(decoder.graph.input, [value for value in came.graph.input if value.name not in stored])
    for node in all_nodes(decoder):
        if node.domain == MICROSOFT and node.op_type in EARLIER:  # onnxruntime has it in the default domain alone
            node.domain = ""
    for name, tensor in tensors.items():
        if name in present and _same(tensor, present[name]):
            decoder.graph.initializer.add(name=name, data_type=tensor.data_type, dims=tensor.dims)
        else:
            decoder.graph.initializer.append(tensor)
    data = zlib.compress(decoder.SerializeToString())
    model.metadata_props.add(key=KEPT, value=base64.b64encode(data).decode("ascii"))


def stored_decoder(model: ModelProto) -> ModelProto | None:
    """The decoder that a training graph holds, with the graph's weights; None where it holds none.

    Errors: InvalidModelError for what cannot be one.
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == KEPT), None)
    if text is None:
        return None
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), _LONGEST)
        if not stream.eof:
            raise InvalidModelError(f"the model's metadata entry {KEPT!r} is no whole decoder")
        decoder = ModelProto.FromString(data)
    except (binascii.Error, ValueError, zlib.error, DecodeError) as e:
        raise InvalidModelError(f"the model's metadata entry {KEPT!r} is no decoder: {e}") from e
    present = {tensor.name: tensor for tensor in model.graph.initializer}
    for tensor in decoder.graph.initializer:
        if not _has_data(tensor):
            original = present.get(tensor.name)
            if original is None or (original.data_type, original.dims) != (tensor.data_type, tensor.dims):
                raise InvalidModelError(
                    f"the model's metadata entry {KEPT!r} names {tensor.name!r}, which is no such initializer"
                )
            tensor.CopyFrom(original)
    return sound(decoder)


def _same(a: TensorProto, b: TensorProto) -> bool:
    """Whether two tensors hold the same numbers in the same type."""
    if (a.data_type, a.dims) != (b.data_type, b.dims):
        return False
    if TensorProto.EXTERNAL in (a.data_location, b.data_location):
        return list(a.external_data) == list(b.external_data)
    if a.HasField("raw_data") and b.HasField("raw_data"):
        return a.raw_data == b.raw_data
    return numpy_helper.to_array(a).tobytes() == numpy_helper.to_array(b).tobytes()


def _has_data(tensor: TensorProto) -> bool:
    """Whether a tensor is more than a name, a type and lengths; one without elements is whole."""
    return 0 in tensor.dims or len(tensor.ListFields()) > 2 + bool(tensor.dims)
