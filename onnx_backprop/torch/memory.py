"""The memory of a module's parameters and buffers: who else reads it, and who writes it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from onnx_backprop.opset.core.errors import OnnxBackpropWarning, UnsupportedError
from onnx_backprop.torch.tensors import torch

_LISTS = re.compile(r"_foreach_\w+_")  # functions that change all tensors of a list
# methods that change what a tensor is taken for, and none of its numbers
_SHAPES = frozenset(
    {"as_strided_", "detach_", "rename_", "requires_grad_", "share_memory_", "squeeze_", "swapaxes_", "swapdims_"}
    | {"t_", "transpose_", "unsqueeze_"}
)


class ModuleTensors:
    """The parameters and buffers of a module that torch.export runs, with tensors without numbers in their places.

    changed_buffers: the names of those that it has changed.
    """

    def __init__(self, module: Any) -> None:
        self.changed_buffers: set[str] = set()
        self._places: dict[int, tuple[Any, dict[str, Any], str, str]] = {}
        for path, part in module.named_modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        self._places.setdefault(id(tensor), (tensor, tensors, name, f"{path}.{name}".lstrip(".")))
        self._stand_ins: dict[int, tuple[Any, str]] = {}  # what stands for each, and its name
        self._versions: dict[str, int] = {}  # how often each has been changed in place

    def find_stand_ins(self) -> None:
        """Note what stands for each tensor, as soon as torch.export has put it there, before anything replaces that."""
        if self._stand_ins or all(tensors.get(name) is tensor for tensor, tensors, name, _ in self._places.values()):
            return
        for key, (tensor, tensors, name, path) in self._places.items():
            stand_in = tensors.get(name)
            if stand_in is not None and isinstance(stand_in, torch.nn.Parameter) == isinstance(
                tensor, torch.nn.Parameter
            ):
                self._stand_ins[key] = stand_in, path
                self._versions[path] = stand_in._version

    def stand_in_of(self, tensor: Any) -> Any:
        """What stands for a parameter that forward has from elsewhere than from its module, as from a list."""
        return self._stand_ins.get(id(tensor), (tensor, ""))[0]

    def refuse_changes(self, function: Any, args: Sequence[Any]) -> None:
        """Errors: UnsupportedError for a function that has changed a parameter in place, or given it other memory."""
        name = getattr(function, "__name__", "a function")
        assigns = function == torch.Tensor.data.__set__
        # of the tensors of such a list torch.export does not count the versions
        listed = {id(x) for x in args[0]} if _LISTS.fullmatch(name) else ()
        for tensor, path in self._stand_ins.values():
            assigned = (assigns and args[0] is tensor) or id(tensor) in listed
            if tensor._version == self._versions[path] and not assigned:
                continue
            self._versions[path] = tensor._version
            if name in _SHAPES or name.endswith("batch_norm"):
                continue
            if assigns or isinstance(tensor, torch.nn.Parameter):
                raise _changed(path, ".data =" if assigns else name)
            self.changed_buffers.add(path)

    def refuse_replacements(self) -> None:
        """Errors: UnsupportedError if the module has another tensor in the place of a parameter."""
        for tensor, tensors, name, path in self._places.values():
            if isinstance(tensor, torch.nn.Parameter) and tensors.get(name) is not tensor:
                raise _changed(path, "assignment")


def _changed(path: str, how: str) -> UnsupportedError:
    return UnsupportedError(
        f"export: forward changes {path!r} by {how}: expected parameters that an optimizer alone changes, as a file "
        "has no such step. Compute a new tensor of it, as torch.clamp(w, min=0), or change it outside of forward, "
        "after each step"
    )


def refuse_views(constants: Iterable[Any], parameters: Sequence[tuple[str, Any]]) -> None:
    """Errors: UnsupportedError if a tensor that became a constant lies in the memory of a parameter."""
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    for constant in constants:
        for name, parameter in trained:
            if isinstance(constant, torch.Tensor) and _overlap(constant, parameter):
                raise UnsupportedError(
                    f"export: forward reads a tensor that was computed of the parameter {name!r} before, in the same "
                    "memory: expected the parameter itself, as the file would not follow its updates. Compute that "
                    "tensor in forward"
                )


def _is_trained(tensor: Any) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad


def memory_key(tensor: Any) -> object:
    """What trained parameters of the same numbers in the same memory have in common; of other tensors, themselves."""
    if not _is_trained(tensor) or not tensor.numel() or _storage(tensor) is None or not tensor.data_ptr():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def warn_of_shared(tensors: Sequence[tuple[str, Any]]) -> None:
    """Say which tensors lie in the memory of trained parameters, without being the same one."""
    several = list({id(tensor): (name, tensor) for name, tensor in reversed(tensors)}.values())[::-1]
    for (name, tensor), (other, later) in combinations(several, 2):
        if not (_is_trained(tensor) or _is_trained(later)) or not _overlap(tensor, later):
            continue
        end = "in the file each is a tensor of its own, and does not follow the other"
        if memory_key(tensor) == memory_key(later):
            end = "the file has one tensor, which a step updates once, while an optimizer of PyTorch updates both"
        warnings.warn(
            f"export: {name!r} and {other!r} share memory: {end}. Make them one parameter, as by b.weight = a.weight, "
            "or clone() one",
            OnnxBackpropWarning,
            stacklevel=4,
        )


def _storage(tensor: Any) -> int | None:
    """Which memory a tensor lies in; None for one that has none of its own, as a sparse one or one inside of vmap."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _overlap(a: Any, b: Any) -> bool:
    """Whether two tensors have a number in common."""
    if not a.numel() or not b.numel() or _storage(a) is None or _storage(a) != _storage(b):
        return False
    if a.dtype != b.dtype:
        return True
    (first, end), (other, last) = _range(a), _range(b)
    if end <= other or last <= first:
        return False
    used = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool)
    used.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(used.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def _range(tensor: Any) -> tuple[int, int]:
    """The first number of the memory that a tensor has, and the one behind its last."""
    first = tensor.storage_offset()
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + 1 + sum((length - 1) * stride for length, stride in lengths)
