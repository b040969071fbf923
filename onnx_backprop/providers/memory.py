"""Tensors in the memory of a device, and how many of them were copied there and back."""

from __future__ import annotations

from dataclasses import dataclass

import onnxruntime

from onnx_backprop.providers.choose import Target

OrtValue = onnxruntime.OrtValue


@dataclass
class Copies:
    """How many tensors were copied between the memory of the CPU and that of a device."""

    to_device: int = 0
    to_host: int = 0


class Memory:
    """The memory of a device. copies: of tensors that are kept there; what a run is fed and gives is not counted."""

    def __init__(self, target: Target) -> None:
        self.copies = Copies()
        self._info, self._name, self._index = target.memory, target.provider.memory, target.index

    @property
    def is_own(self) -> bool:
        """Whether it is another memory than the CPU's."""
        return self._info is not None or bool(self._name)

    def empty(self, shape: list[int], element_type: int) -> OrtValue:
        """A tensor there, of no values yet."""
        if self._info is not None:
            return OrtValue.ortvalue_from_shape_and_type(shape, element_type, memory_info=self._info)
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type, self._name or "cpu", self._index)

    def copied(self, value: OrtValue) -> OrtValue:
        """A copy there of a tensor in the CPU's memory."""
        result = self.empty(list(value.shape()), value.element_type())
        self.copies.to_device += 1
        if self._info is not None:
            onnxruntime.copy_tensors([value], [result])
        else:
            result.update_inplace(value.numpy())
        return result

    def fetched(self, value: OrtValue, *, count: bool = True) -> OrtValue:
        """A tensor in the CPU's memory: itself, or a copy of one that lies elsewhere."""
        if on_host(value):
            return value
        self.copies.to_host += count
        if self._info is None:
            return OrtValue.ortvalue_from_numpy(value.numpy())
        result = OrtValue.ortvalue_from_shape_and_type(list(value.shape()), value.element_type())
        onnxruntime.copy_tensors([value], [result])
        return result


def on_host(value: OrtValue) -> bool:
    """Whether a tensor lies in the CPU's memory."""
    return value.device_name() == "cpu"
