"""What MaxPoolBackward and AvgPoolBackward have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.declarations.calls import Draws
from tests.declarations.declaration import AUTO_PAD, DATA_FORMAT, INTS, REQUIRED, Attributes, Bad

VALID: Attributes = {"kernel": [3], "strides": [2], "pads_begin": [1], "pads_end": [1], "data_format": "NCX"}
WINDOWS: Attributes = {"kernel": [2, 2], "strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0]}
ATTRIBUTES: dict[str, tuple[Any, ...]] = {
    "strides": (INTS, REQUIRED),
    "pads_begin": (INTS, REQUIRED),
    "pads_end": (INTS, REQUIRED),
    "kernel": (INTS, REQUIRED),
    "auto_pad": AUTO_PAD,
    "data_format": DATA_FORMAT,
}


def attributes(kernel: int, stride: int, begin: int = 0, end: int = 0, **more: object) -> Attributes:
    """Attributes of a pool along one axis, channels first."""
    result = {"kernel": [kernel], "strides": [stride], "pads_begin": [begin], "pads_end": [end]}
    return result | {"data_format": "NCX"} | more


def geometry(draws: Draws, *, dilated: bool) -> tuple[Attributes, list[int], list[int]]:
    """Attributes, and shapes of source and windows in NCX, the latter's lengths rounded down or up."""
    while True:
        axes = draws.integer(1, 3)
        head = [draws.length(2, small=2), draws.length(150, small=3)]
        auto_pad = draws.pick("None", "None", "None", "VALID", "SAME_UPPER", "SAME_LOWER")
        given, lengths, outs = _axes(draws, axes, auto_pad, dilated=dilated)
        if draws.fits([*head, *lengths], [*head, *outs]):
            return given, [*head, *lengths], [*head, *outs]


def _axes(draws: Draws, axes: int, auto_pad: str, *, dilated: bool) -> tuple[Attributes, list[int], list[int]]:
    same = auto_pad.startswith("SAME")
    kernel, strides, dilations, begin, end, lengths, outs = ([] for _ in range(7))
    for _ in range(axes):
        k, stride = draws.pick(1, 2, 2, 3, 3, 4, 5), draws.integer(1, 3)
        dilation = draws.pick(1, 1, 2, 3, *[7] * draws.large) if dilated and not same else 1
        p, e = draws.integer(0, k - 1), draws.integer(0, k - 1)
        length = draws.length({1: 80, 2: 40, 3: 12}[axes], small=7)
        room = length - (k - 1) * dilation - 1 + (p + e if auto_pad == "None" else 0)
        out = -(-length // stride) if same else max(room // stride + 1, 0)
        up = -(-room // stride) + 1
        if not same and (up - 1) * stride < length + (p if auto_pad == "None" else 0) and draws.flag():
            out = max(up, 0)
        values = (k, stride, dilation, p, e, length, out)
        for list_, value in zip((kernel, strides, dilations, begin, end, lengths, outs), values, strict=True):
            list_.append(value)
    given = {"kernel": kernel, "strides": strides, "pads_begin": begin, "pads_end": end, "auto_pad": auto_pad}
    stated = dilated and (max(dilations) > 1 or draws.flag())
    return given | ({"dilations": dilations} if stated else {}), lengths, outs


def refused(op: str) -> Iterator[Bad]:
    yield Bad(op, "attribute kernel: expected values >= 1, got [0]", {"kernel": [0]})
    yield Bad(op, "attribute strides: expected values >= 1, got [0]", {"strides": [0]})
    yield Bad(op, "attribute pads_begin: expected values >= 0, got [-1]", {"pads_begin": [-1]})
    yield Bad(op, "attribute pads_end: expected values >= 0, got [-1]", {"pads_end": [-1]})
    for name, given, got in (("kernel", [3, 3], 2), ("strides", [], 0), ("pads_end", [1, 1], 2)):
        message = f"attribute {name} (one per spatial axis): expected 1 entries, got {got} in {given}"
        yield Bad(op, message, {name: given})
    yield Bad(op, "attribute pads_begin: expected fewer pixels than the kernel's [3], got [3]", {"pads_begin": [3]})
    yield Bad(op, "attribute pads_end: expected fewer pixels than the kernel's [3], got [4]", {"pads_end": [4]})
