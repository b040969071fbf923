"""Writing models: the file is complete or it is not there."""

import contextlib
import glob
import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

from onnx import ModelProto, TensorProto

from onnx_backprop.opset.core import mapped
from onnx_backprop.opset.core.errors import InvalidArgumentError
from onnx_backprop.opset.core.files import named, remove_unused, replacing
from onnx_backprop.opset.core.mapped import byte_size, is_mapped, raw
from onnx_backprop.opset.graphs.edit import without, without_tensors

ALIGNMENT = 4096  # of a tensor in the external file, so that runtimes can map it into memory
_HASH = "[0-9a-f]" * 16
SMALL = 1024  # bytes; smaller tensors stay in the model file
_ADDED = 48  # characters of the longest name that is made of a file's, by `replacing` and for a checkpoint


def save_model(model: ModelProto, path: str | Path, *, limit: int | None = None) -> None:
    """Write a model under a temporary name in the same folder, then rename it; an existing file is replaced.

        ob.save_model(ob.lora("model.onnx", ["*attn*"], rank=8).model, "adapted.onnx")

    The model may refer to weights in files, as the results of `training_graph`, `lora` and `backward` do for a file
    with 64 MiB or more of weights beside it; such references hold for this process only. The written file has the
    weights.

    A model of more than `limit` bytes, 2 GB by default, gets its initializers of 1 KiB or more in one file beside it,
    `<name>.<16 digits>.data`, with a hash of the content as the digits. Whoever reads while others write, or after one
    was killed, finds a model with its own tensors. Such files of earlier models of that name are removed. The format is
    protobuf whatever the suffix.

    Errors: InvalidArgumentError if the folder is missing, the path is a folder or a device, or the system refuses to
    write.
    """
    target = Path(os.path.realpath(named(path)))
    check_writable(path)
    try:
        earlier = {path: path.stat().st_ino for path in sidecars(path)}
        whole = _Whole(model)
        if whole.size <= (mapped.PROTO_LIMIT if limit is None else limit):
            with replacing(target) as (file,):
                whole.write(file)
        else:
            data = _write_two(model, target)
            earlier.pop(data, None)
        # what somebody else has put there meanwhile belongs to the model that has the name now
        remove_unused(path for path, number in earlier.items() if path.exists() and path.stat().st_ino == number)
    except OSError as e:
        raise InvalidArgumentError(f"cannot write {path}: {e.strerror or e}") from e


def _write_two(model: ModelProto, target: Path) -> Path:
    """Write a model and its tensors; the path of these."""
    small, tensors = _split(model)
    digest = hashlib.blake2b(digest_size=8)
    for offset, tensor in tensors:
        digest.update(f"{offset}:".encode())
        digest.update(raw(tensor))
    data = target.with_name(f"{target.name}.{digest.hexdigest()}.data")
    for tensor in small.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.external_data.add(key="location", value=data.name)
    if small.ByteSize() > mapped.PROTO_LIMIT:
        raise InvalidArgumentError(f"cannot write {target}: the model holds more than 2 GB outside its initializers")
    with replacing(data, target) as (file, head_file):
        _write_tensors(file, tensors)
        head_file.write(small.SerializeToString())
    return data


def check_writable(path: str | Path) -> None:
    """Raise InvalidArgumentError when a file cannot be written there for a reason that shows beforehand."""
    try:
        target = Path(os.path.realpath(named(path)))
        reason = _unwritable(target)
    except (OSError, ValueError) as e:  # no name at all, or a longer one than the system takes
        raise InvalidArgumentError(f"cannot write {str(path)!r}: {getattr(e, 'strerror', None) or e}") from e
    if reason:
        raise InvalidArgumentError(f"cannot write {path}: {reason}")


def _unwritable(target: Path) -> str | None:
    if target.is_dir():
        return "it is a folder. Name a file"
    if target.exists() and not target.is_file():
        return "it exists and is not a regular file"
    if not target.parent.is_dir():
        return f"there is no folder {target.parent}. Make it first"
    with contextlib.suppress(FileNotFoundError):
        os.stat(f"{target}{'.' * _ADDED}")
    return None


def same_file(one: str | Path, other: str | Path) -> bool:
    """Whether two paths lead to one file, by links of any kind, or will when it is written."""
    with contextlib.suppress(OSError, ValueError):  # a file that is missing, or no name at all
        return os.path.realpath(one) == os.path.realpath(other) or os.path.samefile(one, other)
    return False


def sidecars(path: str | Path) -> list[Path]:
    """The files beside a model that `save_model` removes: the tensors of earlier ones of that name."""
    target = Path(os.path.realpath(path))
    return list(target.parent.glob(f"{glob.escape(target.name)}.{_HASH}.data"))


class _Whole:
    """A model as one protobuf message whose tensors' bytes are not copied: those before, of and behind the graph."""

    def __init__(self, model: ModelProto) -> None:
        before, behind = _around(model, "graph")
        start, end = _around(model.graph, "initializer")
        self._tensors = [(self._stub(tensor), tensor) for tensor in model.graph.initializer]
        lengths = [len(stub) + byte_size(tensor) * _is_raw(tensor) for stub, tensor in self._tensors]
        heads = [_tag(model.graph, "initializer", length) for length in lengths]
        inside = len(start) + sum(map(len, heads)) + sum(lengths) + len(end)
        self._before, self._behind = before + _tag(model, "graph", inside) + start, end + behind
        self._heads = heads
        self.size = len(self._before) + inside - len(start) - len(end) + len(self._behind)

    @staticmethod
    def _stub(tensor: TensorProto) -> bytes:
        """A tensor without its bytes, but with what announces them, which may come last."""
        if not _is_raw(tensor):
            return tensor.SerializeToString()
        kept = without(tensor, "raw_data", "external_data", "data_location")
        return kept.SerializeToString() + _tag(tensor, "raw_data", byte_size(tensor))

    def write(self, file: BinaryIO) -> None:
        file.write(self._before)
        for head, (stub, tensor) in zip(self._heads, self._tensors, strict=True):
            file.write(head + stub)
            if _is_raw(tensor):
                file.write(raw(tensor))
        file.write(self._behind)


def _is_raw(tensor: TensorProto) -> bool:
    return tensor.HasField("raw_data") or is_mapped(tensor)


def _around(message: Any, name: str) -> tuple[bytes, bytes]:
    """What a message has in front of a field, and behind it."""
    number = message.DESCRIPTOR.fields_by_name[name].number
    fields = [field for field, _ in message.ListFields()]
    front = without(message, *(field.name for field in fields if field.number >= number))
    rest = without(message, *(field.name for field in fields if field.number <= number))
    return front.SerializeToString(), rest.SerializeToString()


def _tag(message: Any, name: str, length: int) -> bytes:
    """How a field of so many bytes begins in protobuf's encoding: its number and the length, seven bits a byte."""
    result = bytearray()
    for number in (message.DESCRIPTOR.fields_by_name[name].number << 3 | 2, length):
        rest = number
        while rest > 127:
            result.append(rest & 127 | 128)
            rest >>= 7
        result.append(rest)
    return bytes(result)


def _split(model: ModelProto) -> tuple[ModelProto, list[tuple[int, TensorProto]]]:
    """The model with its large initializers referring to a file that is not named yet, and those with their offsets."""
    small = without_tensors(model, {tensor.name for tensor in model.graph.initializer})
    tensors: list[tuple[int, TensorProto]] = []
    offset = 0
    for tensor in model.graph.initializer:
        length = 0 if tensor.data_type == TensorProto.STRING else byte_size(tensor)
        if length < SMALL:
            small.graph.initializer.append(tensor)
            continue
        tensors.append((offset, tensor))
        reference = small.graph.initializer.add(
            name=tensor.name,
            data_type=tensor.data_type,
            dims=tensor.dims,
            doc_string=tensor.doc_string,
            data_location=TensorProto.EXTERNAL,
        )
        for key, text in (("offset", str(offset)), ("length", str(length))):
            reference.external_data.add(key=key, value=text)
        offset += -(-length // ALIGNMENT) * ALIGNMENT
    return small, tensors


def _write_tensors(file: BinaryIO, tensors: list[tuple[int, TensorProto]]) -> None:
    for offset, tensor in tensors:
        file.seek(offset)
        file.write(raw(tensor))
