"""Changes to models and files, drawn from a `random.Random`: of a model's messages and of any file's bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError, EncodeError, Message
from onnx import AttributeProto, ModelProto, NodeProto, ValueInfoProto

Rng = random.Random
INTS = (0, 1, -1, 2, 3, 7, 64, 255, 256, 65536, 2**20, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-38, 1e38, 1e-45, float("inf"), float("-inf"), float("nan"), 2.0**31, 1e9)
TEXTS = (
    *("", "\0", "x", "w", "y", "\n\n", "\x1b[31mred", "a" * 100_000, "é\u202e", "../../etc/passwd", "/etc/passwd", "N"),
    *("NOTSET", "SAME_UPPER", "linear", "Conv", "If", "Loop", "Constant", "Identity", "com.microsoft", "ai.onnx"),
)
OPERATORS = (
    *(
        "Conv",
        "ConvTranspose",
        "MaxPool",
        "AveragePool",
        "Resize",
        "Upsample",
        "LSTM",
        "GRU",
        "RNN",
        "If",
        "Loop",
        "Scan",
    ),
    *("Softmax", "Gemm", "MatMul", "Einsum", "Gather", "GatherND", "ScatterND", "Slice", "Split", "Pad", "Reshape"),
    *("Transpose", "Concat", "Squeeze", "Unsqueeze", "Expand", "Tile", "Range", "ConstantOfShape", "Constant", "TopK"),
    *("LayerNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization", "Dropout", "Cast"),
    *("ReduceSum", "ReduceMean", "ReduceProd", "CumSum", "Where", "Pow", "Max", "Clip", "Identity", "Shape", "Size"),
    *("QuantizeLinear", "DequantizeLinear", "GridSample", "RoiAlign", "DeformConv", "Attention", "RotaryEmbedding"),
    *("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", "SequenceMap", "Optional", "DFT", "STFT", "Col2Im"),
    *("MaxUnpool", "LpPool", "GlobalLpPool", "CenterCropPad", "OneHot", "Compress", "Trilu", "EyeLike", "Multinomial"),
)


def data(content: bytes, rng: Rng) -> bytes:
    """Some changes of bytes: flips, numbers of the ends of their ranges, pieces cut out, doubled, moved."""
    result = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not result:
            return bytes(result)
        at, length = rng.randrange(len(result)), rng.choice((1, 1, 2, 4, 8, 64))
        match rng.randrange(6):
            case 0:
                result[at] ^= 1 << rng.randrange(8)
            case 1:
                result[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del result[at : at + length]
            case 3:
                result[at:at] = result[at : at + length]
            case 4:
                number = rng.choice(INTS) & (1 << 64) - 1
                size = rng.choice((2, 4, 8))
                result[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, "little")
            case _:
                other = rng.randrange(len(result))
                result[at : at + length] = result[other : other + length]
    return bytes(result) if rng.random() < 0.95 else bytes(result[: rng.randrange(len(result) + 1)])


def model(content: bytes, rng: Rng) -> bytes:
    """A model's file after some changes: mostly of its messages, at times of its bytes."""
    if rng.random() < 0.25:
        return data(content, rng)
    changed = ModelProto.FromString(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        rng.choice(CHANGES)(changed, rng)
    try:
        return changed.SerializeToString()
    except (EncodeError, DecodeError):
        return content


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                yield from _messages(inner)


def _any(changed: ModelProto, rng: Rng, kind: type) -> Any:
    candidates = [one for one in _messages(changed) if isinstance(one, kind)]
    return rng.choice(candidates) if candidates else None


def _scalar(field, rng: Rng):
    """A value for a field: what is at the ends of its type, or means something elsewhere."""
    kind = field.cpp_type
    if kind in (field.CPPTYPE_INT32, field.CPPTYPE_ENUM):
        return rng.choice((0, 1, 2, 6, 7, 8, 10, 11, 16, 23, 99, -1, 2**31 - 1, -(2**31)))
    if kind in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
        value = rng.choice(INTS)
        return abs(value) if kind == field.CPPTYPE_UINT64 else value
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.type == field.TYPE_BYTES:
        return rng.choice((b"", b"\xff\xfe", b"nearest", b"SAME_UPPER", rng.randbytes(rng.choice((1, 4, 8, 37)))))
    return rng.choice(TEXTS)


def field(changed: ModelProto, rng: Rng) -> None:
    """Any field of any message: another value, cleared, an entry more or less."""
    message = _any(changed, rng, Message)
    assert message is not None
    which = rng.choice(message.DESCRIPTOR.fields)
    set_now = [one for one, _ in message.ListFields()]
    if set_now and rng.random() < 0.8:
        which = rng.choice(set_now)
    if rng.random() < 0.2:
        message.ClearField(which.name)
        return
    try:
        if which.is_repeated:
            _entries(getattr(message, which.name), which, rng)
        elif which.message_type is not None:
            getattr(message, which.name).SetInParent()
        else:
            setattr(message, which.name, _scalar(which, rng))
    except (ValueError, TypeError, EncodeError):
        message.ClearField(which.name)


def _entries(values, which, rng: Rng) -> None:
    action = rng.randrange(4)
    if values and action == 0:
        del values[rng.randrange(len(values))]
    elif which.message_type is not None:
        if values:
            values.add().CopyFrom(rng.choice(list(values)))
        else:
            values.add()
    elif values and action in (1, 2):
        values[rng.randrange(len(values))] = _scalar(which, rng)
    else:
        values.append(_scalar(which, rng))


def attribute(changed: ModelProto, rng: Rng) -> None:
    """An attribute of another value or type, one that a node has not, or none."""
    node = _any(changed, rng, NodeProto)
    if not isinstance(node, NodeProto):
        return
    present = list(node.attribute)
    one = rng.choice(present) if present and rng.random() < 0.8 else node.attribute.add(name="axis")
    if present and rng.random() < 0.1:
        node.attribute.remove(one)
        return
    if rng.random() < 0.4:
        setattr(one, "type", rng.choice(AttributeProto.AttributeType.values()))  # noqa: B010 - a plain number
    for name in ("i", "f", "s"):
        if one.HasField(name) or rng.random() < 0.2:
            setattr(one, name, _scalar(one.DESCRIPTOR.fields_by_name[name], rng))
    for name in ("ints", "floats", "strings"):
        if len(getattr(one, name)) or rng.random() < 0.1:
            _entries(getattr(one, name), one.DESCRIPTOR.fields_by_name[name], rng)


def edge(changed: ModelProto, rng: Rng) -> None:
    """A node reads or makes something else, or more, or less."""
    node = _any(changed, rng, NodeProto)
    if not isinstance(node, NodeProto):
        return
    names = [name for one in _messages(changed) if isinstance(one, NodeProto) for name in (*one.input, *one.output)]
    names += [one.name for one in _messages(changed) if isinstance(one, ValueInfoProto)]
    ends = node.input if rng.random() < 0.8 else node.output
    other = rng.choice([*names, "", "nobody"])
    try:
        if not ends or rng.random() < 0.2:
            ends.append(other)
        elif rng.random() < 0.2:
            del ends[rng.randrange(len(ends))]
        else:
            ends[rng.randrange(len(ends))] = other
    except (TypeError, ValueError):  # a name that is no text
        return


def operator(changed: ModelProto, rng: Rng) -> None:
    """A node of another operator or domain."""
    node = _any(changed, rng, NodeProto)
    if isinstance(node, NodeProto):
        node.op_type = rng.choice(OPERATORS)
        if rng.random() < 0.2:
            node.domain = rng.choice(("", "ai.onnx", "com.microsoft", "own", "onnx_backprop", "ai.onnx.ml"))


def nodes(changed: ModelProto, rng: Rng) -> None:
    """A node taken out, doubled or moved."""
    graphs = [g for g in _messages(changed) if getattr(g, "node", None)]
    if not graphs:
        return
    kept = rng.choice(graphs).node
    one = rng.randrange(len(kept))
    copy = NodeProto.FromString(kept[one].SerializeToString())
    if rng.random() < 0.5:
        del kept[one]
    if rng.random() < 0.6:
        kept.insert(rng.randrange(len(kept) + 1), copy)


def opset(changed: ModelProto, rng: Rng) -> None:
    """Another version of opset or IR."""
    if rng.random() < 0.3:
        changed.ir_version = rng.choice((0, 1, 3, 4, 7, 8, 10, 13, 99, -1, 2**40))
    elif changed.opset_import:
        rng.choice(changed.opset_import).version = rng.choice((*range(28), -1, 1000, 2**40))


def dims(changed: ModelProto, rng: Rng) -> None:
    """A length of a tensor or of a declared type."""
    candidates = [(one, "dims") for one in _messages(changed) if one.DESCRIPTOR.name == "TensorProto"]
    candidates += [(one, "dim") for one in _messages(changed) if one.DESCRIPTOR.name == "TensorShapeProto"]
    if not candidates:
        return
    message, name = rng.choice(candidates)
    lengths = getattr(message, name)
    value = rng.choice((0, 1, 2, 3, -1, -5, 1000, 2**31, 2**33, 2**62, 2**63 - 1))
    if name == "dims":
        if lengths and rng.random() < 0.7:
            lengths[rng.randrange(len(lengths))] = value
        else:
            lengths.append(value)
    elif lengths and rng.random() < 0.7:
        rng.choice(list(lengths)).dim_value = value
    else:
        lengths.add().dim_value = value


def numbers(changed: ModelProto, rng: Rng) -> None:
    """Numbers of a tensor, which may be a shape, an axis, a scale or a count."""
    candidates = [one for one in _messages(changed) if one.DESCRIPTOR.name == "TensorProto"]
    candidates = [one for one in candidates if one.raw_data or one.float_data or one.int64_data]
    if not candidates:
        return
    tensor = rng.choice(candidates)
    if tensor.raw_data:
        raw = bytearray(tensor.raw_data)
        if tensor.data_type == 7 and len(raw) >= 8:
            at = 8 * rng.randrange(len(raw) // 8)
            raw[at : at + 8] = rng.choice(INTS).to_bytes(8, "little", signed=True)
        else:
            raw = bytearray(data(bytes(raw), rng))
        tensor.raw_data = bytes(raw)
    elif tensor.int64_data:
        tensor.int64_data[rng.randrange(len(tensor.int64_data))] = rng.choice(INTS)
    else:
        tensor.float_data[rng.randrange(len(tensor.float_data))] = rng.choice(FLOATS)


def metadata(changed: ModelProto, rng: Rng) -> None:
    """What a training graph says about itself, as JSON or none."""
    if not changed.metadata_props:
        field(changed, rng)
        return
    entry = rng.choice(changed.metadata_props)
    entry.value = text(entry.value, rng)


CHANGES: tuple[Callable[[ModelProto, Rng], None], ...] = (
    *(field, field, attribute, attribute, edge, edge, operator, nodes, opset, dims, dims, numbers, numbers, metadata),
)


def text(value: str, rng: Rng) -> str:
    """JSON in which something else stands, or that is none any more."""
    try:
        content = json.loads(value)
    except (ValueError, RecursionError):
        content = value
    if rng.random() < 0.15:
        return data(value.encode(), rng).decode("utf-8", "replace")
    if rng.random() < 0.02:
        return "[" * 5000 + "]" * 5000
    for _ in range(rng.choice((1, 1, 2))):
        content = _mutated(content, rng)
    return json.dumps(content)


def _mutated(value, rng: Rng):
    """A JSON value in which one entry, however deep, is something else, missing, doubled or new."""
    others = (None, True, 0, -1, 3.5, 2**70, "", "x", "float32", [], {}, [1], {"x": 1}, [[]], 1e300, float("nan"))
    if rng.random() < 0.2 or not isinstance(value, (dict, list)) or not value:
        return rng.choice(others)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: one for name, one in value.items() if name != key}
        if rng.random() < 0.1:
            return value | {rng.choice(("x", "__metadata__", "")): rng.choice(others)}
        return value | {key: _mutated(value[key], rng)}
    at = rng.randrange(len(value))
    if rng.random() < 0.15:
        return value[:at] + value[at + 1 :]
    return [*value[:at], _mutated(value[at], rng), *value[at + rng.randrange(2) :]]


def checkpoint(content: bytes, rng: Rng) -> bytes:
    """A safetensors file in whose header something else stands, or whose bytes are others."""
    if rng.random() < 0.3:
        return data(content, rng)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entries = header.get("__metadata__", {})
    if entries and rng.random() < 0.7:
        key = rng.choice(list(entries))
        entries[key] = text(entries[key], rng)
        changed = json.dumps(header)
    else:
        changed = text(json.dumps(header), rng)
    raw = changed.encode()
    size = len(raw) if rng.random() < 0.97 else rng.choice(INTS) & (1 << 64) - 1
    return size.to_bytes(8, "little") + raw + content[8 + length :]


def archive(content: bytes, rng: Rng) -> bytes:
    """A zip file of arrays whose bytes are others, those of the arrays' headers and of the directory above all."""
    result = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        marks = [n for mark in (b"NUMPY", b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06") for n in _places(result, mark)]
        if marks and rng.random() < 0.7:
            at = min(len(result) - 1, rng.choice(marks) + rng.randrange(64))
            result[at : at + 2] = data(bytes(result[at : at + 2]), rng)[:2].ljust(2, b"0")
        else:
            result = bytearray(data(bytes(result), rng))
    return bytes(result)


def _places(content: bytes | bytearray, mark: bytes) -> list[int]:
    places, at = [], content.find(mark)
    while at >= 0:
        places.append(at)
        at = content.find(mark, at + 1)
    return places
