"""What can be differentiated: the table behind `supported_ops()` and the command's `ops`."""

from __future__ import annotations

from typing import NamedTuple

from onnx_backprop.converters.reverse.registry import RULES


class SupportedOp(NamedTuple):
    """One operator version with a gradient rule; the domain "" is ONNX's own."""

    domain: str
    op_type: str
    since_version: int


def supported_ops() -> list[SupportedOp]:
    """The operators that have a gradient rule, sorted; `since_version` as in ONNX's operator documents.

    A model below opset 18 is converted to 18 first, so that it may use older versions than these.
    """
    return sorted(SupportedOp(*key) for key in RULES)
