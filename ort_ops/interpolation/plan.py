"""Plans for `interpolation.gather` from the taps of every axis. Plain Python."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnx_backprop.opset.maths.interpolation import Taps
from onnx_backprop.ort_ops.compiler.machine import PERMUTES, VECTOR, last_level_cache, processors
from onnx_backprop.ort_ops.compiler.records import size
from onnx_backprop.ort_ops.interpolation.gather import ACROSS, ALONG, GATHER, WINDOWS
from onnx_backprop.ort_ops.interpolation.rows import Interpolation, Offsets, RowAxis
from onnx_backprop.ort_ops.interpolation.windows import GatherWindows, windows
from onnx_backprop.ort_ops.runtime.bridge import Request
from onnx_backprop.ort_ops.runtime.stages import Plan
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, WORD, workspace
from onnx_backprop.ort_ops.vector.permute import ROWS, WINDOW

# elements of a row of dy that a chunk of columns reads, about
_CHUNK = {ALONG: 4096, ACROSS: 512, WINDOWS: 1024}
_MOST_ENTRIES = 16  # of a block, on average; beyond that it is quicker to transpose rows
_PARTS = 32  # of the work for every processor: large ones, as what one fetches ahead the next part writes


@dataclass(frozen=True)
class _Column:
    """Wᵀ of one axis by rows: taps starts[i] to starts[i + 1] of source pixel i, destination indices and weights."""

    starts: np.ndarray
    indices: np.ndarray
    weights: np.ndarray


def _by_pixel(taps: Taps) -> _Column:
    """Taps that fall together are added up, those that weigh nothing are left out."""
    outs = np.repeat(np.arange(len(taps.indices)), taps.indices.shape[1])
    pairs = taps.indices.reshape(-1) * max(len(taps.indices), 1) + outs
    unique, place = np.unique(pairs, return_inverse=True)
    weights = np.bincount(place, taps.weights.reshape(-1), len(unique)).astype(np.float32)
    unique, weights = unique[weights != 0], weights[weights != 0]
    pixels, indices = np.divmod(unique, max(len(taps.indices), 1))
    counts = np.bincount(pixels, minlength=taps.length)
    return _Column(np.concatenate([[0], np.cumsum(counts)]), indices, weights)


def _copies(column: _Column, out: int) -> bool:
    """Whether Wᵀ is the identity."""
    count = len(column.starts) - 1
    if not out == count == len(column.indices):
        return False
    one_each = (column.starts == np.arange(count + 1)).all()
    return bool(one_each and (column.indices == np.arange(count)).all() and (column.weights == 1).all())


@dataclass(frozen=True)
class _Axis:
    """An axis of dx and dy, or several that are kept and lie side by side."""

    length: int
    out: int
    column: _Column | None


def _axes(lengths: Sequence[int], outs: Sequence[int], taps: Sequence[Taps | None]) -> list[_Axis]:
    """The axes from the first on, neighbours that are kept as one."""
    result: list[_Axis] = []
    for length, out, of_axis in zip(lengths, outs, taps, strict=True):
        column = None if of_axis is None else _by_pixel(of_axis)
        if column is not None and _copies(column, out):
            column = None
        if column is None and result and result[-1].column is None:
            result[-1] = _Axis(result[-1].length * length, result[-1].out * out, None)
        elif column is not None or length != 1:
            result.append(_Axis(length, out, column))
    return result


def plan(request: Request, data: int, taps: Callable[[], Sequence[Taps | None]]) -> Plan:
    """Taps per axis of the output, None for an axis that is kept; `data` is which input holds dy.

    An empty dy, for which no taps can be told, gives zeros.
    """
    outs = request.inputs[data]
    assert outs is not None
    if 0 in outs:
        count = math.prod(request.output)
        axes = [_Axis(count, 0, _Column(np.zeros(count + 1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)))]
    else:
        axes = _axes(request.output, outs, taps())
    inner = 1
    if axes and axes[-1].column is None and len(axes) > 1:
        inner = axes.pop().length
    column = axes.pop() if axes else _Axis(1, 1, None)
    tables: list[np.ndarray] = []
    table_at = size(Interpolation) + size(RowAxis) * len(axes)

    def place(table: np.ndarray) -> int:
        nonlocal table_at
        tables.append(table)
        table_at += len(table)
        return table_at - len(table)

    stride, most = column.out * inner, 1
    entries: list[RowAxis] = []
    for axis in reversed(axes):
        entry = RowAxis(length=axis.length, stride=stride)
        if axis.column is not None:
            entry = replace(entry, starts=place(axis.column.starts), taps=place(_words(axis.column)))
            most *= max(1, int(np.diff(axis.column.starts).max(initial=0)))
        entries.append(entry)
        stride *= axis.out
    rows = math.prod(a.length for a in axes)
    method, table = _method(column, inner)
    chunks = _chunks(column, inner, _CHUNK[method])
    read, out = int(chunks[:, 3].max()) * inner, int(chunks[:, 1].max()) * inner
    pitch = -(-(read + WINDOW) // VECTOR) * VECTOR
    wide = VECTOR * (read + 2 * VECTOR)
    arrays, at_once = {
        ALONG: ({"sums": read, "gathered": out}, 1),
        ACROSS: ({"sums": wide, "transposed": wide, "gathered": VECTOR * (out + VECTOR), "tile": VECTOR**2}, VECTOR),
        WINDOWS: ({"sums": ROWS * pitch, "gathered": ROWS * out}, ROWS),
    }[method]
    sizes = {name: FLOAT * floats for name, floats in arrays.items()}
    offsets, per_thread = workspace(Offsets, table=2 * WORD * most, **sizes)
    units = math.ceil(rows / at_once) * len(chunks)
    per_item = max(1, units // (_PARTS * processors()))
    head = Interpolation(
        kind=request.element_type,
        data=data,
        axes=len(axes),
        axis_table=size(Interpolation),
        row_count=rows,
        columns=column.length,
        inner=inner,
        starts=0 if column.column is None else place(column.column.starts),
        taps=0 if column.column is None else place(_words(column.column)),
        chunks=len(chunks),
        chunk_table=place(chunks.reshape(-1)),
        offsets=offsets,
        method=method,
        units=units,
        per_item=per_item,
        pitch=pitch,
        innermost=[axis.column is not None for axis in axes] in ([True], [False, True]),
        streamed=4 * (math.prod(outs) + math.prod(request.output)) > last_level_cache(),
    )
    if table is not None:
        per_chunk = -(-chunks[:, 1] * inner // VECTOR)
        head = replace(
            head,
            ends=place(table.ends),
            entries=place(table.entries(np.repeat(chunks[:, 2] * inner, per_chunk))),
            patterns=place(np.frombuffer(table.patterns.tobytes(), np.int64)),
        )
    blocks = [*(entry.words() for entry in reversed(entries)), *tables]
    behind = np.concatenate([np.asarray(block, np.int64) for block in blocks])
    return Plan(head, ((GATHER, math.ceil(units / per_item)),), per_thread=per_thread, tables=behind)


def _method(axis: _Axis, inner: int) -> tuple[int, GatherWindows | None]:
    """How columns are gathered, and the tables of windows if that is the way."""
    if axis.column is None or inner >= VECTOR:
        return ALONG, None
    if PERMUTES and len(axis.column.indices):
        table = windows(axis.column.starts, axis.column.indices, axis.column.weights, inner)
        if len(table.bases) <= _MOST_ENTRIES * (len(table.ends) - 1):
            return WINDOWS, table
    return ACROSS, None


def _words(column: _Column) -> np.ndarray:
    """A tap as one word: index, an int32, and weight, a float32."""
    pairs = np.empty((len(column.indices), 2), np.int32)
    pairs[:, 0], pairs[:, 1] = column.indices, column.weights.view(np.int32)
    return pairs.view(np.int64).reshape(-1)


def _chunks(axis: _Axis, inner: int, limit: int) -> np.ndarray:
    """Rows are `Chunk`s."""
    if axis.column is None:
        size = max(1, limit // inner)
        firsts = np.arange(0, axis.length, size)
        counts = np.minimum(size, axis.length - firsts)
        return np.stack([firsts, counts, firsts, counts], axis=1)
    # What is written has to come into the cache first, and more than is read: reductions go by smaller chunks.
    per_cell = axis.out / axis.length if axis.out >= axis.length else 4.0
    size = max(1, int(limit / (per_cell * inner)))
    size = max(VECTOR, size // VECTOR * VECTOR)
    result = []
    starts, indices = axis.column.starts, axis.column.indices
    for first in range(0, axis.length, size):
        count = min(size, axis.length - first)
        touched = indices[starts[first] : starts[first + count]]
        low = int(touched.min(initial=axis.out)) if len(touched) else 0
        result.append((first, count, low, int(touched.max(initial=-1)) + 1 - low if len(touched) else 0))
    return np.array(result, np.int64)
