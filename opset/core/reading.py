"""Reading models: from a path or from memory, the tensors beside a file included, and nothing outside its folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto, checker
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from onnx_backprop.opset.core.errors import InvalidArgumentError, InvalidModelError, OnnxBackpropError
from onnx_backprop.opset.core.files import named
from onnx_backprop.opset.core.hints import near_file
from onnx_backprop.opset.core.mapped import are_many, byte_size, can_be_mapped, is_mapped, refer, whole
from onnx_backprop.opset.core.sound import sound, tensors
from onnx_backprop.opset.extensions import load_extensions
from onnx_backprop.opset.graphs.lazy import ir, is_ir_model


def load(model: ModelProto | ir.Model | str | os.PathLike[str], *, mapped: bool = False) -> ModelProto:
    """Read a model from a path, or take it as it is, and check it; it is copied only if names in it had to be repaired.

    mapped: tensors beside the file stay there if they have many bytes, see `opset.core.mapped`; else all are read.
    Tensors of an onnx_ir.Model that lie in files are read.

    Errors: InvalidArgumentError for a path that names no file, InvalidModelError for a model that is not sound,
    UnsupportedError for one beyond the limits.
    """
    load_extensions()  # before anybody looks at its operators
    if is_ir_model(model):
        model = _of_ir(model)
    if isinstance(model, ModelProto):
        model = sound(model)
        for tensor in tensors(model):
            if uses_external_data(tensor) and not is_mapped(tensor):  # of a folder that nobody has named
                raise InvalidModelError(
                    f"tensor {tensor.name!r} of a model in memory lies in the file "
                    f"{_location(tensor)!r}. Give the path of the model, or read the tensors with "
                    "onnx.load_external_data_for_model"
                )
        return model if mapped else whole(model)
    path = existing(model)
    try:
        proto = _read(path)
    except OnnxBackpropError:
        raise
    except (OSError, checker.ValidationError) as e:
        raise InvalidModelError(f"{path} cannot be read: {e}") from e
    except Exception as e:  # each of onnx's file formats raises errors of its own
        raise InvalidModelError(f"{path} is not an ONNX file: {e}") from e
    if not proto.graph.node and not proto.graph.output:
        raise InvalidModelError(f"{path} is not an ONNX file: it holds no graph")
    return proto if mapped else whole(proto)


def _of_ir(model: ir.Model) -> ModelProto:
    try:
        return ir.to_proto(ir.external_data.load_to_model(model.clone()))
    except Exception as e:  # of each kind of tensor its own
        raise InvalidModelError(f"the onnx_ir.Model cannot be written as a ModelProto: {e}") from e


def _read(path: Path) -> ModelProto:
    """A model file and the tensors beside it; a link to tensors may lead to where the model itself really lies.

    So does a Hugging Face cache: its files are links to blobs in one folder. Any other link is onnx's to refuse.
    """
    proto = sound(onnx.load(path, load_external_data=False))
    real, folder = Path(os.path.realpath(path)).parent, path.parent
    beside = [tensor for tensor in tensors(proto) if uses_external_data(tensor)]
    names = {id(tensor) for tensor in proto.graph.initializer}
    many = are_many(beside)
    for tensor in beside:
        base, location = folder, _location(tensor)
        target = Path(os.path.realpath(folder / location))
        if (folder / location).is_symlink() and target.parent == real:
            base = real
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = target.name
        offset = _offset(path, tensor, target)
        if many and id(tensor) in names and can_be_mapped(tensor):
            _check_place(tensor, base)
            refer(tensor, target, offset)
        else:
            load_external_data_for_tensor(tensor, str(base))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    return sound(proto) if beside else proto


def _offset(path: Path, tensor: TensorProto, target: Path) -> int:
    """Where a tensor begins in a file; InvalidModelError for one that the file does not hold the whole of."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    size = byte_size(tensor)
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or size)
    except ValueError as e:
        raise InvalidModelError(f"{path}: tensor {tensor.name!r}: its offset or length is no number: {e}") from e
    if length != size:
        raise InvalidModelError(
            f"{path}: tensor {tensor.name!r} of dims {list(tensor.dims)} has {length:,} bytes in {target.name!r}, "
            f"expected {size:,}. The file is damaged: export it again"
        )
    if target.is_file() and not 0 <= offset <= target.stat().st_size - size:
        raise InvalidModelError(
            f"{path}: tensor {tensor.name!r} lies in {target.name!r} from byte {offset:,} to {offset + size:,}, and "
            f"that file has {target.stat().st_size:,} bytes. It was not copied whole, or belongs to another model"
        )
    return offset


def _check_place(tensor: TensorProto, base: Path) -> None:
    """What onnx refuses of a path that a tensor names: it reads one byte there."""
    probe = TensorProto(name=tensor.name, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", _location(tensor)), ("length", "1")):
        probe.external_data.add(key=key, value=value)
    load_external_data_for_tensor(probe, str(base))


def external_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files beside a model that its tensors lie in; none for what cannot be read."""
    with contextlib.suppress(Exception):  # of each of onnx's file formats its own
        beside = filter(uses_external_data, tensors(onnx.load(path, load_external_data=False)))
        return [Path(path).parent / name for name in {_location(tensor) for tensor in beside}]
    return []


def _location(tensor: TensorProto) -> str:
    """The file of a tensor, "" where none is named."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def existing(model: object) -> Path:
    """The path of a file; InvalidArgumentError for anything else."""
    if not isinstance(model, str | os.PathLike):
        raise InvalidArgumentError(
            f"expected a ModelProto, an onnx_ir.Model or the path of a file, got {type(model).__name__}"
        )
    path = Path(os.fsdecode(named(model)))
    if not os.path.isfile(path):  # Path.is_file raises for names that are too long
        raise InvalidArgumentError(f"no such file: {path}{near_file(path)}")
    return path
