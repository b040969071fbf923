"""Loaders and batches as people have them: functions that make them, generators, arrays in arrays."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from onnx_backprop.opset.core.errors import InvalidArgumentError


class Called:
    """What a function makes, anew in every epoch."""

    def __init__(self, function: Callable[[], Iterable[Any]]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        batches = self._function()
        if not isinstance(batches, Iterable):
            raise InvalidArgumentError(f"loader: the function returned {type(batches).__name__}, expected batches")
        return iter(batches)


def reusable(loader: Any, times: int, argument: str = "loader") -> Any:
    """A loader that can be gone through so many times: a function is called each time.

    Errors: InvalidArgumentError for a generator that would be empty the second time.
    """
    if callable(loader) and not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        function: Any = loader
        return Called(function)
    if isinstance(loader, Iterator) and times > 1:
        raise InvalidArgumentError(
            f"{argument}: a {type(loader).__name__} gives its batches once, and they are gone through {times} times. "
            "Give a list of them, or the function that makes it"
        )
    return loader


def flattened(batch: Sequence[Any], names: Sequence[str]) -> dict[str, Any] | None:
    """The arrays of a batch with tuples, lists or mappings in it, as ((image, mask), label); None where it is none.

    Those without names have the names in their order that mappings in it leave. Where there are as many as names, each
    is an array: a list of rows is one.
    """
    if len(batch) == len(names) and not any(isinstance(part, Mapping) for part in batch):
        return dict(zip(names, batch, strict=True))
    named: dict[str, Any] = {}
    arrays: list[Any] = []

    def gather(part: Any) -> None:
        if isinstance(part, Mapping):
            named.update(part)
        elif isinstance(part, tuple | list) and any(_holds_arrays(inner) for inner in part):
            for inner in part:
                gather(inner)
        else:
            arrays.append(part)

    for part in batch:
        gather(part)
    left = [name for name in names if name not in named]
    return None if len(arrays) != len(left) else {**named, **dict(zip(left, arrays, strict=True))}


def _holds_arrays(part: Any) -> bool:
    """Whether it is an array, or has one inside; a list of numbers is an array itself."""
    if isinstance(part, Mapping) or hasattr(part, "shape"):
        return True
    return isinstance(part, tuple | list) and any(map(_holds_arrays, part))
