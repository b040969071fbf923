"""Tensors that stay in the files beside a model: TensorProtos that refer to memory-mapped files, and their numbers.

The location of such a reference is the real path of a file that this process has mapped, or a name for numbers that are
computed of such, or lent by an object of this process, whenever they are read. It holds for this process alone: `whole`
makes an ordinary model of one with references, and `save_model` writes one, tensor by tensor.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import prod
from typing import TypeVar

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backprop.opset.core.errors import InvalidModelError, UnsupportedError
from onnx_backprop.opset.graphs.edit import copied, without_numbers, without_tensors

Owner = TypeVar("Owner")
PROTO_LIMIT = 2**31 - 1  # bytes a protobuf message can hold
LEAST_MAPPED = 2**26  # bytes beside a model file, from which on its tensors are mapped; fewer are read
LEAST_TENSOR = 2**16  # bytes of a tensor that is mapped
_RESIDENT = 2**25  # bytes that are looked at before their pages are given back
_FOUR, _TWO = ("UINT4", "INT4", "FLOAT4E2M1"), ("UINT2", "INT2")
_PACKED = {TensorProto.DataType.Value(name): bits for names, bits in ((_FOUR, 4), (_TWO, 2)) for name in names}


@dataclass
class _File:
    """A file that is mapped, and what it was like then: its size and the time of its last change."""

    path: str
    handle: int
    state: tuple[int, int]
    memory: mmap.mmap

    @property
    def changed(self) -> bool:
        return _state(os.fstat(self.handle)) != self.state


@dataclass(frozen=True)
class _Computed:
    """Numbers that a function computes, each time they are read."""

    function: Callable[[], np.ndarray]
    path = "the memory of this process"
    changed = False

    @property
    def memory(self) -> memoryview:
        return np.ascontiguousarray(self.function()).reshape(-1).view(np.uint8).data


class Numbers(dict[str, TensorProto]):
    """Tensors of a model that another one refers to, by name: see `by_reference`."""


# by location; for good, but for what is lent: nothing tells of the last reference
_files: dict[str, _File | _Computed] = {}
_locations = count()
_looked_at = 0  # bytes since pages were last given back


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def refer(tensor: TensorProto, path: str | os.PathLike[str], offset: int) -> None:
    """Let a tensor refer to the bytes of a file from an offset on; they are all there."""
    location = _location_of(os.path.realpath(path))
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, text in (("location", location), ("offset", str(offset)), ("length", str(byte_size(tensor)))):
        tensor.external_data.add(key=key, value=text)


def computed(element: int, dims: Sequence[int], function: Callable[[], np.ndarray]) -> TensorProto:
    """A tensor without a name whose numbers a function computes whenever they are read.

    What the function holds is kept for good: it should be mapped tensors, and little beside them.
    """
    tensor = TensorProto(data_type=element, dims=dims, data_location=TensorProto.EXTERNAL)
    location = f"computed#{next(_locations)}"
    _files[location] = _Computed(function)
    for key, text in (("location", location), ("offset", "0"), ("length", str(byte_size(tensor)))):
        tensor.external_data.add(key=key, value=text)
    return tensor


def lent(tensor: TensorProto, owner: Owner, numbers: Callable[[Owner], np.ndarray]) -> TensorProto:
    """A tensor like another one, without a name, whose numbers an object has as long as somebody else holds that."""
    this = weakref.ref(owner)

    def now() -> np.ndarray:
        alive = this()
        assert alive is not None  # what the tensor is for lives no longer
        return numbers(alive)

    result = computed(tensor.data_type, tensor.dims, now)
    weakref.finalize(owner, _files.pop, _entries(result)["location"]).atexit = False
    return result


def refer_like(tensor: TensorProto, other: TensorProto) -> None:
    """Let a tensor have the numbers that a reference has, in the place of its own."""
    tensor.ClearField("raw_data")
    tensor.data_location = other.data_location
    del tensor.external_data[:]
    tensor.external_data.extend(other.external_data)


def by_reference(model: ModelProto) -> tuple[ModelProto, Numbers]:
    """A copy of a model whose large initializers refer to the model's own, and what these live as long as.

    So no conversion copies their numbers.
    """
    numbers = Numbers((t.name, t) for t in model.graph.initializer if can_be_mapped(t) and not is_mapped(t))
    result = without_numbers(model, numbers)
    for tensor in result.graph.initializer:
        if tensor.name in numbers:
            refer_like(tensor, lent(tensor, numbers, partial(_numbers_of, tensor.name)))
    return result, numbers


def _numbers_of(name: str, numbers: Numbers) -> np.ndarray:
    return to_array(numbers[name])


def _location_of(path: str) -> str:
    """The location of a file as it is now: its path, with a number behind it if that means an earlier file."""
    status, number, location = os.stat(path), 1, path
    while isinstance(file := _files.get(location), _File):
        if os.path.samestat(os.fstat(file.handle), status) and not file.changed:
            return location
        number += 1
        location = f"{path}#{number}"
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    memory = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
    _files[location] = _File(path, handle, _state(os.fstat(handle)), memory)
    return location


def are_many(tensors: Iterable[TensorProto]) -> bool:
    """Whether tensors have so many bytes that mapping them is worth it."""
    return sum(map(byte_size, tensors)) >= LEAST_MAPPED


def can_be_mapped(tensor: TensorProto) -> bool:
    """Whether a tensor in a file has whole bytes as numbers, and enough of them."""
    if tensor.data_type == TensorProto.STRING or byte_size(tensor) < LEAST_TENSOR:
        return False
    return prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize == byte_size(tensor)


def byte_size(tensor: TensorProto) -> int:
    """The bytes of the numbers of a tensor, as its dims and its type say."""
    return -(-prod(tensor.dims) * bits(tensor.data_type) // 8)


def bits(element: int) -> int:
    """Of one number of an element type."""
    return _PACKED.get(element) or 8 * helper.tensor_dtype_to_np_dtype(element).itemsize


def is_mapped(tensor: TensorProto) -> bool:
    """Whether a tensor refers to a file that this process has mapped."""
    return tensor.data_location == TensorProto.EXTERNAL and _entries(tensor).get("location", "") in _files


def _entries(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def raw(tensor: TensorProto) -> memoryview | bytes:
    """The little-endian bytes of a tensor, wherever they lie; of a mapped one a view, nothing is copied.

    Errors: InvalidModelError for a file that was written to since.
    """
    if is_mapped(tensor):
        entries = _entries(tensor)
        return view(entries["location"], int(entries["offset"]), int(entries["length"]), tensor.name)
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    return numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data


def view(location: str, offset: int, length: int, name: str) -> memoryview:
    """Some bytes of a mapped file. Pages that were looked at before go back to the system, from time to time."""
    file = _files[location]
    if file.changed:
        raise InvalidModelError(
            f"{file.path}, in which the tensor {name!r} lies, was written to after it was read. Read the model again"
        )
    look_at(length)
    return memoryview(file.memory)[offset : offset + length]


def look_at(length: int) -> None:
    """Note that bytes are read that may lie in mapped files; pages go back to the system from time to time."""
    global _looked_at
    _looked_at += length
    if _looked_at > _RESIDENT:
        give_back()


def give_back() -> None:
    """Let the pages of mapped files go; what is read again comes from the system's cache of files."""
    global _looked_at
    _looked_at = 0
    if hasattr(mmap, "MADV_DONTNEED"):
        for file in tuple(_files.values()):
            if isinstance(file, _File):
                file.memory.madvise(mmap.MADV_DONTNEED)


def to_array(tensor: TensorProto) -> np.ndarray:
    """The numbers of a tensor; of a mapped one a view that cannot be written to."""
    if not is_mapped(tensor):
        return numpy_helper.to_array(tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    return np.frombuffer(raw(tensor), dtype).reshape(tuple(tensor.dims))


def mapped_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """The initializers of the main graph that refer to mapped files; no others do."""
    return (tensor for tensor in model.graph.initializer if is_mapped(tensor))


def whole_if_possible(model: ModelProto) -> ModelProto:
    """`whole`, but a model with more weights in files than a message can hold keeps its references."""
    return model if sum(map(byte_size, mapped_tensors(model))) > PROTO_LIMIT else whole(model)


def whole(model: ModelProto) -> ModelProto:
    """The model; or, if it has references, a copy that holds their numbers.

    Errors: UnsupportedError if these are more than a protobuf message can hold.
    """
    references = {tensor.name: tensor for tensor in mapped_tensors(model)}
    if not references:
        return model
    size = sum(map(byte_size, references.values()))
    if size > PROTO_LIMIT:
        raise UnsupportedError(
            f"the model has weights of {size:,} bytes in files, more than the 2 GB that a model in memory can hold. "
            "training_graph, lora, explain_gradients, Trainer and session take such models, save_model writes them"
        )
    result = without_tensors(model, references)
    order = [tensor.name for tensor in model.graph.initializer]
    kept = {tensor.name: copied(tensor) for tensor in result.graph.initializer}
    del result.graph.initializer[:]
    for name in order:
        reference = references.get(name)
        if reference is None:
            result.graph.initializer.append(kept[name])
            continue
        new = result.graph.initializer.add(name=name, data_type=reference.data_type, dims=reference.dims)
        new.doc_string = reference.doc_string
        new.metadata_props.extend(reference.metadata_props)
        new.raw_data = bytes(raw(reference))
    give_back()
    return result


def serialized(model: ModelProto) -> bytes:
    """The bytes of a model; UnsupportedError if they are more than a protobuf message can hold."""
    size = model.ByteSize()
    if size > PROTO_LIMIT:
        raise UnsupportedError(
            f"the model has {size:,} bytes, more than the 2 GB that onnxruntime reads from memory. Save it by "
            "onnx_backprop.save_model(model, path), which puts its weights in a file beside it, and give the path"
        )
    return model.SerializeToString()
