"""Tensors in the memory of a device, and how many of them were copied there and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnxruntime

from onnx_backprop.opset.core.errors import KernelError
from onnx_backprop.providers.choose import Target

OrtValue = onnxruntime.OrtValue
HOST = "Cpu"  # what onnxruntime calls the CPU's memory
# what Dawn, Vulkan, Direct3D and CUDA say
_LOST = (
    "device lost",
    "device_lost",
    "is lost",
    "was lost",
    "device_removed",
    "device removed",
    "unspecified launch failure",
)


@dataclass
class Copies:
    """How many tensors were copied between the memory of the CPU and that of a device."""

    to_device: int = 0
    to_host: int = 0


class Memory:
    """The memory of a device.

    copies: of tensors that are kept there; what a run is fed and gives is not counted. info: onnxruntime's record of
    the memory of a plugin; None where it has none of its own.
    """

    def __init__(self, target: Target) -> None:
        self.copies, self.info = Copies(), target.memory
        self._name, self._index, self._lock = target.provider.memory, target.index, target.lock

    def empty(self, shape: list[int], element_type: int, place: Any) -> OrtValue:
        """A tensor of no values yet. place: onnxruntime's record of a memory."""
        with self._lock:
            try:
                return OrtValue.ortvalue_from_shape_and_type(shape, element_type, memory_info=place)
            except Exception:
                if not self._name:
                    raise
            return OrtValue.ortvalue_from_shape_and_type(shape, element_type, self._name, self._index)

    def moved(self, value: OrtValue, place: Any) -> OrtValue | None:
        """A tensor with the same values in another memory; None where none can be made there."""
        source = self.fetched(value)
        if place.name == HOST:
            return source
        try:
            result = self.empty(list(source.shape()), source.element_type(), place)
            with self._lock:
                try:
                    onnxruntime.copy_tensors([source], [result])
                except Exception:  # noqa: BLE001 - a provider that is built in copies in its own way
                    result.update_inplace(source.numpy())
        except Exception:  # noqa: BLE001 - whatever it says, there is no such tensor
            return None
        self.copies.to_device += 1
        return result

    def fetched(self, value: OrtValue, *, count: bool = True) -> OrtValue:
        """A tensor in the CPU's memory: itself, or a copy of one that lies elsewhere.

        Errors: KernelError where nothing can be read there any more.
        """
        if value.device_name() == "cpu":
            return value
        self.copies.to_host += count
        result = OrtValue.ortvalue_from_shape_and_type(list(value.shape()), value.element_type())
        with self._lock:
            try:
                onnxruntime.copy_tensors([value], [result])
            except Exception as e:  # noqa: BLE001 - a provider that is built in copies in its own way
                try:
                    result.update_inplace(value.numpy())  # not a tensor in the array's memory, which goes with it
                except Exception:  # noqa: BLE001 - as one of a plugin does not
                    raise lost(str(e)) from e
        return result


def is_lost(error: str) -> bool:
    """Whether an error of onnxruntime says that the device is gone: a driver was reset, a GPU unplugged."""
    return any(words in error.lower() for words in _LOST)


def lost(error: str) -> KernelError:
    """The error about a device whose memory can no longer be read."""
    return KernelError(
        f"the device is lost, and with it what lay in its memory: {error}. Start again, in another process, from the "
        "last checkpoint"
    )
