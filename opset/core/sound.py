"""One pass over a model that comes from outside, before anything else looks at it.

What it lets through has texts that are texts, tensors that hold what their dims say, attributes of the types there
are, sub-graphs of a depth that every reader can follow, no more nodes than the limits allow, and functions that end.
"""

import re
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from google.protobuf.message import Message
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backprop.opset.core.errors import InvalidModelError, UnsupportedError
from onnx_backprop.opset.core.limits import current, how_to_raise
from onnx_backprop.opset.core.mapped import bits, byte_size
from onnx_backprop.opset.core.op import DOMAIN
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.walk import DEFAULT_DOMAINS, is_standard, subgraphs

DEPTH = 24  # graphs inside each other, three messages each: protobuf reads 100
_VALUES = frozenset(
    {
        *("value", "sparse_value", "value_int", "value_ints", "value_float", "value_floats"),
        *("value_string", "value_strings"),
    }
)
# none has binary strings among its attributes
_TEXTUAL = (*DEFAULT_DOMAINS, "ai.onnx.preview.training", "ai.onnx.training")
# of windows: what they are, whatever the operator; as attributes of any other they are none of ONNX
_AT_LEAST = {"kernel_shape": 1, "strides": 1, "dilations": 1, "group": 1, "num_groups": 1, "output_padding": 0}
_AT_LEAST |= {"pads": -(2**31), "output_shape": 0}
_HIGHEST = 2**31
_EQUATION = re.compile(rb"[A-Za-z,.>\s-]*")
_KINDS, _ELEMENTS = frozenset(AttributeProto.AttributeType.values()), frozenset(TensorProto.DataType.values())
_Key = tuple[str, str, str]


def sound(proto: ModelProto) -> ModelProto:
    """The model; or a copy in which names that are no UTF-8 have escapes, and nodes no empty names behind the last.

    Of these onnxruntime reads some as if they were tensors. Errors: InvalidModelError, UnsupportedError.
    """
    proto = _repaired(proto)
    for opset in (*proto.opset_import, *(o for f in proto.functions for o in f.opset_import)):
        if not 0 < opset.version < 2**31:
            raise InvalidModelError(f"opset {opset.version} of domain {opset.domain!r} is imported, which is none")
    count = 0
    for node in _nodes((proto.graph, *proto.functions)):
        count += 1
        _check_node(node)
    for node in _nodes((proto.graph,)):
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                raise _invalid(node, f"attribute {attribute.name!r} refers to one of a function, in which it is not")
    for value in proto.graph.input:
        if value.type.WhichOneof("value") in (None, "tensor_type") and not value.type.tensor_type.elem_type:
            raise InvalidModelError(f"the input {value.name!r} has no element type, which every graph input needs")
        if any(dim.dim_value >= _HIGHEST for dim in value.type.tensor_type.shape.dim):
            raise InvalidModelError(f"the input {value.name!r} has a length of {_HIGHEST} or more, which no tensor has")
    if count > current().nodes:
        raise UnsupportedError(f"the model has {count} nodes. {how_to_raise('nodes')}")
    for tensor in tensors(proto):
        _check_tensor(tensor)
    if proto.functions:
        _Functions(proto).check()
    return proto


def tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model: initializers, and those in attributes."""
    for graph in _graphs((proto.graph, *proto.functions)):
        if isinstance(graph, GraphProto):
            yield from graph.initializer
        for node in graph.node:
            for attribute in node.attribute:
                yield from ([attribute.t] if attribute.HasField("t") else attribute.tensors)


def _graphs(outer: Iterable[GraphProto | FunctionProto]) -> Iterator[GraphProto | FunctionProto]:
    """Graphs and those inside them, whatever the depth."""
    waiting: list[tuple[GraphProto | FunctionProto, int]] = [(graph, 1) for graph in outer]
    while waiting:
        graph, depth = waiting.pop()
        if depth > DEPTH:
            raise UnsupportedError(f"sub-graphs stand inside each other more than {DEPTH} deep. Flatten the model")
        yield graph
        waiting += [(inner, depth + 1) for node in graph.node for inner in subgraphs(node)]


def _nodes(outer: Iterable[GraphProto | FunctionProto]) -> Iterator[NodeProto]:
    for graph in _graphs(outer):
        yield from graph.node


def _repaired(proto: ModelProto) -> ModelProto:
    decoded = all(isinstance(text, str) for text in _texts(proto))
    if decoded and not any(map(_has_empty_end, _nodes((proto.graph, *proto.functions)))):
        return proto
    result = copied(proto)
    if not decoded:
        _decode(result)
    for node in filter(_has_empty_end, _nodes((result.graph, *result.functions))):
        while node.input and not node.input[-1]:
            node.input.pop()
    return result


def _has_empty_end(node: NodeProto) -> bool:
    return bool(is_standard(node) and node.input and not node.input[-1])


def _texts(message: Any) -> Iterator[str | bytes]:
    """All texts of a message, tensors' numbers left alone; protobuf gives those out as bytes that are no UTF-8."""
    waiting: list[Any] = [message]
    while waiting:
        message = waiting.pop()
        if isinstance(message, TensorProto):
            yield from (message.name, message.doc_string)
            waiting += message.external_data
            continue
        for field, value in message.ListFields():
            if field.message_type is not None:
                waiting += value if field.is_repeated else (value,)
            elif field.type == field.TYPE_STRING:
                yield from value if field.is_repeated else (value,)


def _decode(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                _decode(inner)
        elif field.type == field.TYPE_STRING and field.is_repeated:
            assign(value, map(_text, value))
        elif field.type == field.TYPE_STRING:
            setattr(message, field.name, _text(value))


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def _invalid(node: NodeProto, message: str) -> InvalidModelError:
    return InvalidModelError(message, op_type=node.op_type, node=node.name or next(iter(node.output), ""))


def _check_node(node: NodeProto) -> None:
    textual = node.domain in _TEXTUAL and node.op_type != "Constant"
    for attribute in node.attribute:
        if not attribute.type or attribute.type not in _KINDS:
            raise _invalid(node, f"attribute {attribute.name!r} has type {attribute.type}, which is none of ONNX")
        if textual and any(isinstance(_as_text(s), bytes) for s in (attribute.s, *attribute.strings)):
            raise _invalid(node, f"attribute {attribute.name!r} is no UTF-8 text")
        if textual and not attribute.ref_attr_name:  # else the value stands where the function is called
            complaint = _against_value(node, attribute)
            if complaint:
                raise _invalid(node, f"attribute {attribute.name!r}: {complaint}")
    if node.op_type == "If" and node.domain in _TEXTUAL:
        branches = {a.name: len(a.g.output) for a in node.attribute if a.HasField("g")}
        if branches != dict.fromkeys(("then_branch", "else_branch"), len(node.output)):
            counts = ", ".join(f"{name} of {count}" for name, count in branches.items())
            raise _invalid(
                node, f"expected a then_branch and an else_branch of {len(node.output)} outputs, got {counts}"
            )
    if not all(one.configuration_id for one in node.device_configurations):
        raise _invalid(node, "a device configuration has no configuration_id")
    if node.op_type == "Constant" and node.domain in _TEXTUAL:
        given = [a.name for a in node.attribute if a.name in _VALUES]
        if len(given) != 1 or len(node.attribute) != 1 or len(node.output) != 1:
            raise _invalid(
                node,
                f"expected one output and one of the attributes {', '.join(sorted(_VALUES))}, "
                f"got {len(node.output)} outputs and {[a.name for a in node.attribute]}",
            )


def _against_value(node: NodeProto, attribute: AttributeProto) -> str:
    """What is wrong with an attribute that counts something, or with an equation; "" where nothing is."""
    numbers = list(attribute.ints) if attribute.type == AttributeProto.INTS else [attribute.i]
    low = _AT_LEAST.get(attribute.name)
    if low is not None and not all(low <= n <= _HIGHEST for n in numbers):
        return f"expected numbers from {low} to {_HIGHEST}, got {numbers}"
    if attribute.name == "kernel_shape" and 8 * prod(numbers) > current().folded_bytes:
        raise UnsupportedError(
            f"a window of {numbers} is too large. {how_to_raise('folded_bytes')}",
            op_type=node.op_type,
            node=node.name or next(iter(node.output), ""),
        )
    if node.op_type == "Einsum" and attribute.name == "equation" and not _EQUATION.fullmatch(attribute.s):
        return f"expected letters, commas, dots and an arrow, got {attribute.s.decode()!r}"  # else inference hangs
    if node.op_type == "Split" and attribute.name == "num_outputs" and attribute.i != len(node.output):
        return f"expected {len(node.output)}, the outputs that are named, got {attribute.i}"
    return ""


def _as_text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _check_tensor(tensor: TensorProto) -> None:
    """As many numbers as the dims say, where they lie in the model itself."""
    if tensor.data_type not in _ELEMENTS or not tensor.data_type:
        raise InvalidModelError(f"tensor {tensor.name!r} has element type {tensor.data_type}, which is none of ONNX")
    if tensor.HasField("segment"):
        raise InvalidModelError(f"tensor {tensor.name!r} is a segment of one, which ONNX tools do not read")
    if any(d < 0 for d in tensor.dims):
        raise InvalidModelError(f"tensor {tensor.name!r} has dims {list(tensor.dims)}, expected none below 0")
    if tensor.data_location == TensorProto.EXTERNAL:
        return
    expected, got, unit = prod(tensor.dims), 0, "entries"
    if tensor.HasField("raw_data"):
        if tensor.data_type == TensorProto.STRING:
            raise InvalidModelError(f"tensor {tensor.name!r} holds strings as raw data")
        expected, got, unit = byte_size(tensor), len(tensor.raw_data), "bytes"
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        got = len(getattr(tensor, field))
        if field == "int32_data" and bits(tensor.data_type) < 8:
            expected = -(-expected * bits(tensor.data_type) // 8)
        elif tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
            expected *= 2
    if got != expected:
        raise InvalidModelError(
            f"tensor {tensor.name!r} of dims {list(tensor.dims)} holds {got} {unit}, expected {expected}. "
            "The file is damaged: export it again"
        )


class _Functions:
    """The functions of a model: none may call itself, and what they are written out is bounded."""

    def __init__(self, proto: ModelProto) -> None:
        self._proto = proto
        self._functions = {(f.domain, f.name, f.overload): f for f in proto.functions if f.domain != DOMAIN}
        self._sizes: dict[_Key, tuple[int, int]] = {}

    def check(self) -> None:
        nodes, depth = self._measured(self._proto.graph, ())
        if nodes > current().expansions:
            shown = nodes if nodes < 10**12 else "more than 10¹²"
            raise UnsupportedError(
                f"the model has {shown} nodes once its functions are written out. {how_to_raise('expansions')}"
            )
        if depth > DEPTH:
            raise UnsupportedError(f"sub-graphs and functions stand inside each other {depth} deep. Flatten the model")

    def _measured(self, graph: GraphProto | FunctionProto, callers: tuple[_Key, ...]) -> tuple[int, int]:
        """The nodes and the depth of a graph that is written out."""
        nodes, deepest, waiting = 0, 1, [(graph, 1)]
        while waiting:
            inner, depth = waiting.pop()
            deepest = max(deepest, depth)
            for node in inner.node:
                key = (node.domain, node.op_type, node.overload)
                nodes += 1
                if key in self._functions:
                    size, below = self._called(key, node, callers)
                    nodes, deepest = nodes + size, max(deepest, depth + below - 1)
                waiting += [(g, depth + 1) for g in subgraphs(node)]
        return nodes, deepest

    def _called(self, key: _Key, node: NodeProto, callers: tuple[_Key, ...]) -> tuple[int, int]:
        function, name = self._functions[key], f"{key[0]}::{key[1]}"
        if len(node.input) > len(function.input) or len(node.output) > len(function.output):
            raise InvalidModelError(
                f"expected at most {len(function.input)} inputs and {len(function.output)} outputs, as the function "
                f"has, got {len(node.input)} and {len(node.output)}",
                op_type=name,
                node=node.name,
            )
        if key in callers:
            raise InvalidModelError(f"function {name!r} calls itself, which no ONNX model may")
        if len(callers) > 100:
            raise UnsupportedError("functions call each other more than 100 deep. Write some of them out")
        if key not in self._sizes:
            self._sizes[key] = self._measured(function, (*callers, key))
        return self._sizes[key]
