"""A training graph as the files that the Trainer in JavaScript reads.

training.onnx: the step, its state fed as inputs; evaluation.onnx: loss and outputs in inference mode, the weights fed
as inputs; forward.onnx: the whole inference model, which is where the weights come from and what is downloaded;
training.json: what is known of them, among it the place of each weight in forward.onnx, so that JavaScript reads and
writes weights without protobuf.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backprop.converters.training.metadata import METADATA
from onnx_backprop.converters.training.result import TrainingGraph
from onnx_backprop.converters.training.slots import MEAN
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.mapped import PROTO_LIMIT
from onnx_backprop.opset.graphs.edit import assign, without_tensors
from onnx_backprop.opset.graphs.order import for_default_sessions
from onnx_backprop.training.inputs import Inputs

FORMAT = 1
# Element types that a typed array of JavaScript holds, by the names that onnxruntime has for them there.
_TYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
_GRAPH, _INITIALIZER, _NAME, _RAW_DATA = 7, 5, 8, 9  # fields of ModelProto, GraphProto and TensorProto
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # kinds of fields in protobuf


def bundle(
    graph: TrainingGraph, *, step: ModelProto | None = None, forward: ModelProto | None = None
) -> dict[str, bytes]:
    """The files by name.

    step: what to run in the place of the graph's model, of the same inputs and outputs. forward: the inference model
    with the same weights, where it is not to be the graph's, whose lengths may have been fixed.

    Errors: InvalidArgumentError for element types that JavaScript has no arrays of, and for models above 2 GB.
    """
    model = graph.inference_model() if forward is None else forward
    for tensor in model.graph.initializer:
        if not tensor.HasField("raw_data"):  # but numbers one by one, whose bytes protobuf has its own idea of
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    whole = _serialized(model)
    places = dict(raw_data(whole))
    about = _about(graph, places)
    state = graph.initial_state()
    for name, entry in about["state"].items():
        if "at" in entry:
            raw = state[name].astype(state[name].dtype.newbyteorder("<")).tobytes()
            assert whole[entry["at"] : entry["at"] + len(raw)] == raw, name
    training = light(graph.model if step is None else step, graph)
    assign(training.graph.node, for_default_sessions(training.graph.node))  # JavaScript cannot ask for the file's order
    return {
        "training.json": json.dumps(about, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(),
        "training.onnx": _serialized(training),
        "evaluation.onnx": _serialized(light(graph.eval_model(), graph)),
        "forward.onnx": whole,
    }


def light(model: ModelProto, graph: TrainingGraph) -> ModelProto:
    """A model without the tensors that are fed and what only Python reads; the optimizer's numbers are constants."""
    result = without_tensors(model, graph.updates)
    constant = {tensor.name for tensor in result.graph.initializer}
    assign(result.graph.input, [value for value in result.graph.input if value.name not in constant])
    assign(result.metadata_props, [entry for entry in result.metadata_props if entry.key != METADATA])
    del result.graph.value_info[:]
    return result


def _serialized(model: ModelProto) -> bytes:
    if model.ByteSize() > PROTO_LIMIT:
        raise InvalidArgumentError(
            "the model has more than 2 GB, which is more than a browser loads. Use a smaller one"
        )
    return model.SerializeToString()


def _about(graph: TrainingGraph, places: dict[str, int]) -> dict[str, Any]:
    declared = {value.name: value for value in (*graph.model.graph.input, *graph.model.graph.output)}
    inputs = Inputs(graph)
    state: dict[str, dict[str, Any]] = {}
    for slot in graph.state:
        state[slot.name] = entry = _declared(declared[slot.name]) | {"new": slot.output}
        if slot.start is not None:
            entry["fill"] = slot.start
        elif slot.role == MEAN:
            entry["copy"] = slot.of
        elif slot.name in places:
            entry["at"] = places[slot.name]
        else:
            raise InvalidArgumentError(f"{slot.name!r} is trained, but no output of the model depends on it. Freeze it")
    axes = {each["target"]: each.get("axis") for each in graph.options.compared if not each.get("shift")}
    known = [
        {"name": name, "classes": of.get("classes"), "ignored": of.get("ignored"), "axis": axes.get(name)}
        for name, of in inputs.labels.items()
    ]
    labels = known[0] if len(known) == 1 else None  # of several, the session finds what there is not
    rate = declared[str(graph.learning_rate)]
    return {
        "format": FORMAT,
        "loss": graph.loss,
        "learningRate": {"name": rate.name, "dtype": _declared(rate)["dtype"]},
        "inputs": {name: _declared(declared[name]) for name in graph.inputs},
        "outputs": list(graph.outputs),
        "labels": labels,
        "state": state,
    }


def _declared(value: ValueInfoProto) -> dict[str, Any]:
    """The element type and shape of an input; null for a shape, or a length without a name, that is unknown."""
    tensor = value.type.tensor_type
    dtype = str(np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)))
    if dtype not in _TYPES or tensor.elem_type == TensorProto.STRING:
        raise InvalidArgumentError(
            f"{value.name!r} has type {dtype}, which JavaScript has no arrays of, nor training.json a name. Convert "
            "the model to float32; training_graph(…, precision='fp16') computes in float16 and keeps state in float32"
        )
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim]
    return {"dtype": dtype, "dims": dims if tensor.HasField("shape") else None}


def raw_data(model: bytes) -> Iterator[tuple[str, int]]:
    """The names of a serialized model's initializers and where the bytes of each begin."""
    for graph, start, end in _fields(model, 0, len(model)):
        for tensor, first, last in _fields(model, start, end) if graph == _GRAPH else ():
            if tensor == _INITIALIZER:
                parts = {field: (a, b) for field, a, b in _fields(model, first, last)}
                if _RAW_DATA in parts:
                    yield model[slice(*parts[_NAME])].decode(), parts[_RAW_DATA][0]


def _fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields of a message in the wire format of protobuf: number, and where the value begins and ends."""
    while start < end:
        tag, start = _varint(data, start)
        kind = tag & 7
        if kind == _VARINT:
            stop = _varint(data, start)[1]
        elif kind == _LENGTH:
            length, start = _varint(data, start)
            stop = start + length
        else:
            assert kind in (_FIXED64, _FIXED32), kind
            stop = start + (8 if kind == _FIXED64 else 4)
        yield tag >> 3, start, stop
        start = stop


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
