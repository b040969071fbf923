"""Parameters that hold the same numbers, of which the file does not say that the module has them once."""

import re
from collections.abc import Collection
from itertools import combinations, permutations

import numpy as np
import onnx_ir as ir

from onnx_backprop.converters.parameters.layout import shown, size
from onnx_backprop.converters.parameters.values import is_uniform
from onnx_backprop.converters.prepare.exporters.origins import FOLDED, origin_of

_LEAST = 8  # numbers of two matrices that are not equal by chance
_NUMBER = re.compile(r"\d+")


def equal_weights(trained: Collection[ir.Value]) -> list[str]:
    """Matrices that hold the same numbers, perhaps transposed, as an embedding and a head that a module ties."""
    matrices = [v for v in trained if v.const_value is not None and v.shape is not None and len(v.shape) == 2]
    alike: dict[tuple[object, ...], list[ir.Value]] = {}
    for value in matrices:
        if value.const_value is not None and size(value) >= _LEAST:
            array = value.const_value.numpy()
            if not is_uniform(array):
                alike.setdefault((value.dtype, *sorted(array.shape), float(array[0, 0])), []).append(value)
    pairs = [pair for group in alike.values() for pair in combinations(group, 2)]
    pairs = [(a, b) for a, b in pairs if _NUMBER.sub("", shown(a)) != _NUMBER.sub("", shown(b))]  # no copies of a layer
    pairs = [(a, b) for a, b in pairs if _are_equal(a, b)]
    return [
        f"{shown(a)} and {shown(b)} hold the same numbers and are trained apart. If the module has one parameter for "
        f"both, tie=[({str(a.name)!r}, {str(b.name)!r})] keeps them equal"
        for a, b in pairs
    ]


def parts_of(trained: Collection[ir.Value]) -> list[str]:
    """Weights that an exporter has sliced of another, as of an attention's three, which another call reads whole."""
    edges: dict[tuple[object, ...], list[tuple[ir.Value, np.ndarray]]] = {}
    for value in trained:
        if (
            value.const_value is not None
            and value.shape is not None
            and len(value.shape) == 2
            and size(value) >= _LEAST
        ):
            array = value.const_value.numpy()
            for end in (0, -1) if origin_of(value).kind == FOLDED and not is_uniform(array) else ():
                edges.setdefault((value.dtype, len(array), end, float(array[0, end])), []).append((value, array))
    sentences: list[str] = []
    for (*_, end, _), group in edges.items():
        for (whole, all_), (part, some) in permutations(group, 2):
            width = some.shape[1]
            same = np.array_equal(all_[:, :width] if end == 0 else all_[:, -width:], some)
            if width < all_.shape[1] and same:
                sentences.append(
                    f"{shown(part)} holds a part of the numbers of {shown(whole)} and is trained apart. If the module "
                    "has one parameter for both, ob.torch.export keeps it one"
                )
    return sentences


def _are_equal(a: ir.Value, b: ir.Value) -> bool:
    if a.const_value is None or b.const_value is None:
        return False
    first, second = a.const_value.numpy(), b.const_value.numpy()
    for other in (second, second.T):
        if first.shape != other.shape or not np.array_equal(first[:1], other[:1]):
            continue
        if np.array_equal(first, other):
            return True
    return False
