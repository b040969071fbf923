"""The memory of a module's parameters and buffers: who else reads it, and who writes it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from onnx_backprop.opset.core.errors import OnnxBackpropWarning, UnsupportedError
from onnx_backprop.torch.tensors import torch

_ASSIGNMENTS = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))


class Memory:
    """The parameters and buffers of a module that runs. written: the names of buffers that it has changed.

    While torch.export runs it, tensors without numbers stand in their places.
    """

    def __init__(self, module: Any) -> None:
        self.written: set[str] = set()
        self._places: dict[int, tuple[Any, dict[str, Any], str, str]] = {}
        for path, part in module.named_modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        self._places.setdefault(id(tensor), (tensor, tensors, name, f"{path}.{name}".lstrip(".")))

    def present(self, tensor: Any) -> Any:
        """What stands for a parameter that forward has from elsewhere than from its module, as from a list."""
        _, tensors, name, _ = self._places.get(id(tensor), (None, {}, "", ""))
        return tensors.get(name, tensor)

    def require_kept(self, function: Any, args: Sequence[Any]) -> None:
        """Errors: UnsupportedError for a function that changes a parameter in place, or gives it other memory."""
        name = getattr(function, "__name__", "")
        assigned = function == torch.Tensor.data.__set__
        in_place = name in _ASSIGNMENTS or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if not args or not isinstance(args[0], torch.Tensor) or not (assigned or in_place):
            return
        storage = _storage(args[0])
        for _, tensors, key, path in self._places.values():
            tensor = tensors.get(key)
            if tensor is None or storage is None or _storage(tensor) != storage:
                continue
            if assigned or isinstance(tensor, torch.nn.Parameter):
                raise UnsupportedError(
                    f"export: forward changes {path!r} by {'.data =' if assigned else name}: expected parameters that "
                    "an optimizer alone changes, as a file has no such step. Compute a new tensor of it, as "
                    "torch.clamp(w, min=0), or change it outside of forward, after each step"
                )
            self.written.add(path)


def require_known(constants: Iterable[Any], parameters: Sequence[tuple[str, Any]]) -> None:
    """Errors: UnsupportedError if a tensor that became a constant lies in the memory of a parameter."""
    for constant in constants:
        for name, parameter in parameters:
            if isinstance(constant, torch.Tensor) and _overlap(constant, parameter):
                raise UnsupportedError(
                    f"export: forward reads a tensor that was computed of the parameter {name!r} before, in the same "
                    "memory: expected the parameter itself, as the file would not follow its updates. Compute that "
                    "tensor in forward"
                )


def identity(tensor: Any) -> object:
    """What trained parameters of the same numbers in the same memory have in common; of other tensors, themselves."""
    trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
    if not trained or not tensor.numel() or _storage(tensor) is None or not tensor.data_ptr():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def warn_of_shared(tensors: Sequence[tuple[str, Any]]) -> None:
    """Say which tensors lie in the memory of others, without being the same parameter."""
    several = list({id(tensor): (name, tensor) for name, tensor in reversed(tensors)}.values())[::-1]
    for (name, tensor), (other, later) in combinations(several, 2):
        if not _overlap(tensor, later):
            continue
        end = "in the file each is a tensor of its own, and does not follow the other"
        if identity(tensor) == identity(later):
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
    used = torch.zeros(a.untyped_storage().nbytes() // a.element_size(), dtype=torch.bool)
    used.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(used.as_strided(b.shape, b.stride(), b.storage_offset()).any())
