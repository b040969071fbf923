"""Scratch of plans: arrays do not overlap, none reaches beyond the end, and one that is too small is caught."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass, fields

import numpy as np
import pytest

from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.workspace import LINE, workspace
from tests.ort_ops.planned import random_convolution, without_matrix_tiles


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    rows: int = 0
    sums: int = 0
    other: int = 0


@pytest.mark.parametrize(("rows", "sums"), [(1, 1), (0, 5), (LINE, 3), (LINE + 1, 0), (1000, 7 * LINE)])
def test_arrays_follow_one_another(rows: int, sums: int) -> None:
    offsets, total = workspace(Offsets, rows=rows, sums=sums)
    assert (offsets.rows, offsets.other) == (0, 0)
    assert rows <= offsets.sums < rows + LINE
    assert offsets.sums % LINE == 0
    assert total == offsets.sums + sums


def test_a_misspelt_array_is_refused() -> None:
    with pytest.raises(TypeError, match="sum"):
        workspace(Offsets, sum=3)


def test_offsets_of_plans_lie_within_their_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processors with registers of matrices, if this is one, and without."""
    rng, seen = np.random.default_rng(0), set()
    for n in range(300):
        if n == 100:
            without_matrix_tiles(monkeypatch)
        plan = random_convolution(rng).plan("f32")
        offsets = plan.parameters.offsets  # type: ignore[attr-defined]
        used = {field.name: getattr(offsets, field.name) for field in fields(offsets) if getattr(offsets, field.name)}
        seen |= {type(offsets).__qualname__, *used}
        for name, offset in used.items():
            assert offset % LINE == 0, name
            assert 0 < offset <= plan.per_thread, name
    assert seen >= {
        "GatherOffsets",
        "CellsOffsets",
        "Offsets",
        "copy",
        "columns",
        "transformed",
        "products",
        "gradient",
    }


GUARDED = """
import numpy as np
import tests.ort_ops.guarded as guarded
from onnx_backprop.ort_ops.convolution.winograd import kernel, plan, tiles, weights
from onnx_backprop.ort_ops.runtime.workspace import workspace
from tests.property.calls import Call

def smaller(record, **sizes):
    offsets, total = workspace(record, **sizes)
    return offsets, total - LESS

tiles.MIN_WORK, tiles.matrix_tiles = 0, lambda: False
plan.matrix_tiles = tiles.matrix_tiles
guarded.guard_scratch()
kernel.workspace = weights.workspace = smaller
draw = np.random.default_rng(0).standard_normal
x, w, dy = (draw(shape).astype(np.float32) for shape in ((1, 32, 32, 32), (48, 32, 3, 3), (1, 48, 32, 32)))
ones = {name: [1, 1] for name in ("strides", "dilations", "pads_begin", "pads_end")}
ones |= {"data_format": "NCX", "weights_format": "OIX"}
inputs, stated = ([x, w], {}) if OP == "Convolution" else ([x, dy], {"weights_shape": w.shape})
print(guarded.check(Call(OP, ones | stated, inputs, 0), "f32", at_end=True))
"""


@pytest.mark.parametrize(
    ("op", "less"),
    [("Convolution", 0), ("Convolution", 192), ("ConvolutionBackwardWeights", 0), ("ConvolutionBackwardWeights", 256)],
)
def test_winograds_scratch_is_as_large_as_what_is_written(op: str, less: int) -> None:
    """In a process of its own, whose scratch ends before an unreadable page: three or four cache lines less end it."""
    program = f"OP, LESS = {op!r}, {less}\n{GUARDED}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == (-signal.SIGSEGV if less else 0), result.stderr
    assert result.stdout == ("" if less else "answered\n")
