"""From attributes and shapes of the convolution operators to the parameters of compiled loops. Plain Python.

Everything is put in the terms of the correlation of `opset.correlation`: source (N, S, in…), destination (N, D, out…),
weights (D, S/g, k…), whatever layout the tensors have; three spatial axes, missing ones first, of length 1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from ..opset import conv_spec as spec
from ..opset.correlation import geometry, resolve
from ..opset.layout import Order, data_to_ncx
from ..opset.op import Attributes
from ..opset.shapes import permute
from . import conv_parameters as par
from .native_micro import COLUMNS, ROWS

Triple = tuple[int, int, int]

BAND_FLOATS = 128 << 10  # of the copy of a band, so that it stays in the second-level cache
MIN_CELLS = 4 * COLUMNS  # of a band that is cut for the sake of more threads
_DENSE: Triple = (1, 1, 1)


@dataclass(frozen=True)
class Tensor:
    """Batch, channel and spatial strides in elements."""

    n: int
    c: int
    cells: Triple


@dataclass(frozen=True)
class Correlation:
    """One correlation with the layouts of its tensors; `w_out` and `w_in` are the strides of D and S/g."""

    batch: int
    groups: int
    s: int  # channels per group
    d: int
    source_length: Triple
    out_length: Triple
    kernel: Triple
    strides: Triple
    dilations: Triple
    pads: Triple
    last: bool
    source: Tensor
    destination: Tensor
    w_d: int
    w_s: int
    w_kernel: Triple


def three(values: Sequence[int], fill: int) -> Triple:
    padded = (*[fill] * (3 - len(values)), *values)
    return padded[0], padded[1], padded[2]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _tensor(shape: Sequence[int], order: Order) -> Tensor:
    n, c, *cells = permute(tuple(_strides(shape)), order)
    assert isinstance(n, int)
    assert isinstance(c, int)
    return Tensor(n, c, three([int(s) for s in cells if isinstance(s, int)], 0))


def correlation(
    attrs: Attributes,
    source: tuple[int, ...],
    destination: tuple[int, ...],
    weights: tuple[int, ...],
    order: Order,
    *,
    transposed: bool = False,
    infers: bool = False,
) -> Correlation:
    """Shapes in the operator's own layouts, already validated; `order` takes weights to (D, S/g, k…)."""
    x, y, w = spec.ncx(attrs, source), spec.ncx(attrs, destination), permute(weights, order)
    resolved = resolve(
        attrs,
        source=x,
        destination=None if infers else y,
        weights=w,
        names=("source", "destination", "weights"),
        transposed=transposed,
        infers_destination=infers,
    )
    assert resolved is not None
    geo = geometry(attrs, resolved)
    assert x is not None
    assert y is not None
    lengths = [[int(v) for v in dims if isinstance(v, int)] for dims in (x, y, w)]
    to_ncx = data_to_ncx(attrs["data_format"], len(source))
    w_d, w_s, *w_kernel = (int(v) for v in permute(tuple(_strides(weights)), order) if isinstance(v, int))
    result = Correlation(
        batch=lengths[0][0],
        groups=geo.groups,
        s=lengths[0][1] // geo.groups,
        d=lengths[1][1] // geo.groups,
        source_length=three(lengths[0][2:], 1),
        out_length=three(lengths[1][2:], 1),
        kernel=three(lengths[2][2:], 1),
        strides=three(geo.strides, 1),
        dilations=three(geo.dilations, 1),
        pads=three(geo.pads_begin, 0),
        last=attrs["data_format"] == "NXC",
        source=_tensor(source, to_ncx),
        destination=_tensor(destination, to_ncx),
        w_d=w_d,
        w_s=w_s,
        w_kernel=three(w_kernel, 0),
    )
    return _flattened(result)


def _flattened(c: Correlation) -> Correlation:
    """A kernel of one cell that takes every cell to itself knows no axes."""
    if c.kernel != _DENSE or c.strides != _DENSE or any(c.pads) or c.source_length != c.out_length:
        return c
    length = (1, 1, math.prod(c.source_length))
    source = replace(c.source, cells=(0, 0, c.source.cells[2]))
    destination = replace(c.destination, cells=(0, 0, c.destination.cells[2]))
    return replace(c, source_length=length, out_length=length, source=source, destination=destination)


# ----- sums over taps ------


@dataclass(frozen=True)
class _Tap:
    kernel: Triple
    shift: Triple


@dataclass(frozen=True)
class _Phase:
    start: Triple
    count: Triple
    taps: tuple[_Tap, ...]


def _axis_phases(c: Correlation, axis: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """(first source cell, number of cells, [(kernel cell, shift of the destination cell)]) per residue."""
    stride, dilation, pad = c.strides[axis], c.dilations[axis], c.pads[axis]
    length = c.source_length[axis]
    result = []
    for r in range(min(stride, length)):
        reach = [(k, r + pad - k * dilation) for k in range(c.kernel[axis])]
        taps = [(k, at // stride) for k, at in reach if at % stride == 0]
        result.append((r, (length - r + stride - 1) // stride, taps))
    return result


def _data_phases(c: Correlation) -> list[_Phase]:
    """The source cells of equal residues, with the kernel cells that reach them."""
    phases = []
    for z, y, x in product(*(_axis_phases(c, axis) for axis in range(3))):
        taps = tuple(_Tap((kz, ky, kx), (oz, oy, ox)) for (kz, oz), (ky, oy), (kx, ox) in product(z[2], y[2], x[2]))
        phases.append(_Phase((z[0], y[0], x[0]), (z[1], y[1], x[1]), taps))
    return phases


def _forward_phase(c: Correlation) -> _Phase:
    axes = [[(k, k * d - p) for k in range(n)] for n, d, p in zip(c.kernel, c.dilations, c.pads, strict=True)]
    taps = tuple(_Tap((kz, ky, kx), (oz, oy, ox)) for (kz, oz), (ky, oy), (kx, ox) in product(*axes))
    return _Phase((0, 0, 0), c.out_length, taps)


def data_gradient(c: Correlation, kind: int, inputs: tuple[int, int], functions: tuple[int, int]) -> np.ndarray:
    """Parameters of the gradient with respect to the source; `inputs` are data and weights."""
    head = _head(c, kind, inputs, functions, (c.s, c.d), c.destination, c.source, c.out_length)
    head |= three_words(par.STEP_3, _DENSE) | three_words(par.OUT_STEP_3, c.strides)
    head |= {par.W_OUT: c.w_s, par.W_IN: c.w_d, par.W_GROUP: c.d * c.w_d}
    return _gather(c, head, _data_phases(c), (c.s, c.d), _DENSE)


def forward(
    c: Correlation, kind: int, inputs: tuple[int, int], functions: tuple[int, int], *, bias: int = 0
) -> np.ndarray:
    """Parameters of the correlation itself; `bias` is the input that is added to it, 0: none."""
    head = _head(c, kind, inputs, functions, (c.d, c.s), c.source, c.destination, c.source_length)
    head |= three_words(par.STEP_3, c.strides) | three_words(par.OUT_STEP_3, _DENSE)
    head |= {par.W_OUT: c.w_d, par.W_IN: c.w_s, par.W_GROUP: c.d * c.w_d, par.BIAS: bias}
    return _gather(c, head, [_forward_phase(c)], (c.d, c.s), c.strides)


def three_words(at: int, values: Triple) -> dict[int, int]:
    return {at + axis: value for axis, value in enumerate(values)}


def _head(
    c: Correlation,
    kind: int,
    inputs: tuple[int, int],
    functions: tuple[int, int],
    channels: tuple[int, int],
    data: Tensor,
    out: Tensor,
    length: Triple,
) -> dict[int, int]:
    words = {par.PACKER: functions[0], par.WORKER: functions[1], par.KIND: kind}
    words |= {par.BATCH: c.batch, par.GROUPS: c.groups, par.OUTS: channels[0], par.INS: channels[1]}
    words |= {par.LAST: int(c.last), par.DATA: inputs[0], par.WEIGHTS: inputs[1]}
    words |= {par.IN_N: data.n, par.IN_C: data.c, par.OUT_N: out.n, par.OUT_C: out.c}
    return (
        words
        | three_words(par.IN_3, data.cells)
        | three_words(par.OUT_3, out.cells)
        | (three_words(par.LENGTH_3, length))
    )


def words(entries: dict[int, int], size: int) -> list[int]:
    assert max(entries) < size
    return [entries.get(n, 0) for n in range(size)]


def _gather(
    c: Correlation, head: dict[int, int], phases: list[_Phase], channels: tuple[int, int], steps: Triple
) -> np.ndarray:
    """The head, the phases, and the tables of taps and residues behind them."""
    outs, ins = channels
    width = COLUMNS if c.last else ROWS
    tiles = math.ceil(outs / width)
    tables: list[int] = []
    records: list[dict[int, int]] = []
    table_at = par.GATHER_WORDS + par.PHASE_WORDS * len(phases)
    items = units = pack = band_floats = most_taps = 0
    for phase in phases:
        shifts, residues = _shifts(phase, c.last, steps)
        low = _per_axis(min, [shift for shift, _ in shifts])
        high = _per_axis(max, [shift for shift, _ in shifts])
        band, floats = _band(phase.count, low, high, ins * len(residues), steps if c.last else _DENSE)
        bands = three([math.ceil(n / b) for n, b in zip(phase.count, band, strict=True)], 1)
        record = {par.FIRST_ITEM: items, par.FIRST_UNIT: units, par.TAPS: len(phase.taps), par.PACK_AT: pack}
        for at, values in (
            (par.START_3, phase.start),
            (par.COUNT_3, phase.count),
            (par.BAND_3, band),
            (par.BANDS_3, bands),
            (par.LOW_3, low),
            (par.HIGH_3, high),
        ):
            record |= three_words(at, values)
        record[par.TAP_TABLE] = table_at + len(tables)
        for tap, (shift, residue) in zip(phase.taps, shifts, strict=True):
            place = sum(k * s for k, s in zip(tap.kernel, c.w_kernel, strict=True))
            tables += [place, *shift, residue]
        record |= {par.RESIDUES: len(residues), par.RESIDUE_TABLE: table_at + len(tables)}
        tables += [r for residue in residues for r in residue]
        records.append(record)
        items += c.batch * c.groups * math.prod(bands)
        units += c.groups * tiles
        pack += c.groups * tiles * len(phase.taps) * ins * width
        band_floats, most_taps = max(band_floats, floats), max(most_taps, len(phase.taps))
    split = 1 if items >= 4 * processors() else min(tiles, math.ceil(4 * processors() / items))
    for record in records:
        record[par.FIRST_ITEM] *= split
    head |= {par.ITEMS: items * split, par.SPLIT: split, par.UNITS: units, par.PACK_BYTES: 4 * pack}
    head |= {par.PHASES: len(phases), par.PHASE_TABLE: par.GATHER_WORDS}
    head[par.LANE_BYTES] = 4 * ROWS * COLUMNS + 8 * ROWS + 16 * most_taps + 4 * band_floats
    blocks = [words(head, par.GATHER_WORDS), *(words(r, par.PHASE_WORDS) for r in records), tables]
    return np.array([word for block in blocks for word in block], np.int64)


def processors() -> int:
    """How many threads work is cut for; results do not depend on it."""
    return min(os.cpu_count() or 1, 64)


def _per_axis(choose: Callable[..., int], shifts: list[Triple]) -> Triple:
    return three([choose(column) for column in zip(*shifts, strict=True)] if shifts else [], 0)


def _shifts(phase: _Phase, last: bool, steps: Triple) -> tuple[list[tuple[Triple, int]], list[Triple]]:
    """(shift, index of residue) of every tap, and the residues.

    With channels last a shift is in cells. Otherwise it is a quotient: the cells of a residue modulo the step lie
    together in planes of their own.
    """
    if last:
        return [(tap.shift, 0) for tap in phase.taps], [(0, 0, 0)]
    residues: list[Triple] = []
    result = []
    for tap in phase.taps:
        pairs = [divmod(shift, step) for shift, step in zip(tap.shift, steps, strict=True)]
        residue = three([r for _, r in pairs], 0)
        if residue not in residues:
            residues.append(residue)
        result.append((three([q for q, _ in pairs], 0), residues.index(residue)))
    return result, residues


def _band(count: Triple, low: Triple, high: Triple, channels: int, steps: Triple) -> tuple[Triple, int]:
    """The largest box of out cells, and how many floats the copy of what it reads has at most."""

    def floats(band: list[int]) -> int:
        box = [(b - 1) * s + 1 + h - lo for b, s, lo, h in zip(band, steps, low, high, strict=True)]
        plane = math.prod(box) + (high[2] - low[2]) + COLUMNS + 32
        return channels * plane

    return band_of(count, floats, BAND_FLOATS, (1, 1, min(count[2], 2 * COLUMNS)))


def band_of(count: Triple, floats: Callable[[list[int]], int], limit: int, least: Triple) -> tuple[Triple, int]:
    """The largest box of at most `limit` floats, cut along the first axes first, and its floats."""
    band = list(count)
    for axis in range(3):
        parts = 1
        while floats(band) > limit and band[axis] > least[axis]:
            parts += 1
            band[axis] = max(least[axis], math.ceil(count[axis] / parts))
    return three(band, 1), floats(band)
