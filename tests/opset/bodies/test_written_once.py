"""Bodies that have been written are kept by all that they depend on."""

from __future__ import annotations

from collections import OrderedDict
from itertools import product
from typing import Any

import pytest

from onnx_backprop.opset.core.op import Arg, Attributes
from onnx_backprop.opset.functions import onnx as onnx_route
from onnx_backprop.opset.functions.onnx import standard_body
from onnx_backprop.opset.operators.registry import BY_NAME

PRELU = BY_NAME["PReLUBackward"]


def calls() -> list[tuple[Any, ...]]:
    """Every argument of `standard_body` in two forms or three."""
    attributes = [Attributes(PRELU, {"data_format": layout}) for layout in ("NCX", "NXC")]
    shapes = [(2, 3, 4, 5), ("N", 3, None, 5), (2, 5, 4, 3)]
    args = [[Arg(shape), Arg((1,)), Arg(shape)] for shape in shapes]
    return [(PRELU, *call) for call in product(attributes, args, (18, 21), (None, 1))]


@pytest.mark.parametrize("single", [False, True])
def test_what_is_kept_is_what_would_be_written(single: bool) -> None:
    written = [onnx_route._body(*call, single=single) for call in calls()]
    assert len({body.SerializeToString(deterministic=True) for body in written}) > len(written) // 3
    for _ in range(2):
        assert [standard_body(*call, single=single) for call in calls()] == written


def test_whoever_gets_a_body_may_change_it() -> None:
    call = calls()[0]
    first, second = standard_body(*call), standard_body(*call)
    for changed in (first, second):
        changed.overload = "changed"
        del changed.node[:]
    assert standard_body(*call) == onnx_route._body(*call, single=False)


def test_no_more_is_kept_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_route, "_written", OrderedDict())
    monkeypatch.setattr(onnx_route, "_MOST_BODIES", 5)
    for call in calls():
        standard_body(*call)
        assert len(onnx_route._written) <= 5
    kept = dict(onnx_route._written)
    monkeypatch.setattr(onnx_route, "_MOST_BYTES", 10)
    for call in calls()[:3]:
        standard_body(*call)
    assert onnx_route._written == kept, "a large body"
