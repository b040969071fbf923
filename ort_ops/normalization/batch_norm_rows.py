"""BatchNormTrainingBackward of rows of channels (NXC), compiled: memory is read twice, in whole rows.

The rows are shared out in parts. Of some rows that stay in a cache, each channel's own mean comes first, then the sums
about it; rows and parts are joined by Chan's formula in float64. The second reading takes the gradient. Very many
channels are cut into blocks, and where these are enough work, or there are few rows, a block is finished by one worker
at once. Few channels would make short loops: some rows that follow one another are one line then, and what belongs to
one channel is joined at the end. Shapes alone decide the order of all sums.
"""

from dataclasses import dataclass, replace

import numpy as np

from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import load_f32, load_f64, store_f32, store_f64
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.normalization import batch_norm_sums as norm
from onnx_backprop.ort_ops.normalization.batch_norm_factors import MEAN, factors_of
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.runtime.workspace import DOUBLE, FLOAT, workspace
from onnx_backprop.ort_ops.vector.registers import copy_run
from onnx_backprop.ort_ops.vector.rows import clear

LINE = 1024  # elements of folded rows
WIDEST, NARROWEST = 2048, 256  # channels of a block, where there are several
CACHED = 1 << 15  # elements of a chunk
MAX_CHUNK = 64  # lines
PART = 1 << 15  # elements of a part, at least
PART_ROWS = 128  # of a part, at least
MAX_ITEMS = 32
STAGGER = 48  # elements, so that arrays do not begin whole pages apart, in the same few places of a cache


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    """Of a scratch: of a chunk of lines, of all lines, of the gradient; each has several arrays."""

    sums: int = 0
    totals: int = 0
    factors: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchNormRows(Record):
    """The numbers of a plan. A line is `fold` rows, of `width` channels at a time.

    thread, shared: of a thread, `span` elements to an array, and of all, where there are parts, `channels` to an array.
    """

    kind: int
    rows: int
    channels: int
    width: int
    blocks: int  # of channels
    parts: int  # of the rows
    fold: int
    span: int  # elements of a line with what fills up a vector
    chunk: int  # lines that are added up in float32
    epsilon: float
    thread: Offsets
    shared: Offsets = Offsets()


@inner
def _repeat(line, count, times):
    """float32 line[n·count + i] = line[i]."""
    for n in range(1, times):
        copy_run(line + 4 * n * count, line, count)


@inner
def _place(p, item):
    """(first channel, channels, first line, whole lines to, elements of the line behind them) of a part of a block."""
    rows, channels, width, fold = p.rows, p.channels, p.width, p.fold
    blocks, parts = p.blocks, p.parts
    channel, part, lines = item % blocks * width, item // blocks, (rows + fold - 1) // fold
    first, last = part * lines // parts, (part + 1) * lines // parts
    whole = min(last, rows // fold)
    rest = (rows - whole * fold) * channels if whole < last else 0
    return channel, min(width, channels - channel), first, whole, rest


@inner
def _chunk(call, p, sums, totals, start, before, lines, count):
    """Some lines from the element `start` on, added to the totals of those before."""
    x, dy = call.inputs[0], call.inputs[1]
    kind, span = p.kind, p.span
    pitch, given = p.fold * p.channels, call.inputs[MEAN]
    if given == 0:
        clear(sums, 0, count)
        for line in range(0, lines, norm.GROUP):
            norm.add_lines(kind, sums, x, start + line * pitch, pitch, min(norm.GROUP, lines - line), count)
        norm.divide(sums, count, np.float64(lines))
    clear(sums, norm.C_DEVIATION * span, (norm.SUMS - norm.C_DEVIATION) * span)
    for line in range(0, lines, norm.GROUP):
        norm.add_moments(kind, sums, span, x, dy, start + line * pitch, pitch, min(norm.GROUP, lines - line), count)
    if given:
        norm.flush_given(totals, sums, span, count)
    else:
        norm.flush(totals, sums, span, count, np.float64(before), np.float64(lines))


@inner
def _measure(call, p, item, scratch):
    """The totals of a part of a block; where in the scratch they are, SPAN to an array."""
    span, chunk, fold = p.span, p.chunk, p.fold
    channel, count, first, whole, rest = _place(p, item)
    sums, totals = scratch + p.thread.sums, scratch + p.thread.totals
    given, pitch = call.inputs[MEAN], fold * p.channels
    for i in range(norm.TOTALS * span):
        store_f64(totals, i, 0.0)
    if given:
        copy_run(sums, given + 4 * channel, count)
        _repeat(sums, count, fold)
    for line in range(first, whole, chunk):
        some = min(chunk, whole - line)
        _chunk(call, p, sums, totals, line * pitch + channel, line - first, some, count * fold)
    if rest:
        _chunk(call, p, sums, totals, whole * pitch, whole - first, 1, rest)
    for i in range(count * fold):
        store_f64(totals, i, np.float64(whole - first) + (1.0 if i < rest else 0.0))
    while fold > 1:
        fold //= 2
        norm.join_totals(call, totals, span, totals + 8 * fold * count, span, fold * count)
    return totals


@inner
def _finish(call, p, channel, count, totals, span, factors, factors_span):
    """From the totals of some channels to the factors of their gradient; diff_gamma and diff_beta."""
    given = call.inputs[MEAN]
    rows, epsilon = np.float64(max(1, p.rows)), p.epsilon
    for i in range(count):
        mean = np.float64(load_f32(given, channel + i)) if given else load_f64(totals, norm.T_MEAN * span + i)
        square, whole = load_f64(totals, norm.T_SQUARE * span + i), load_f64(totals, norm.T_DY * span + i)
        along = load_f64(totals, norm.T_DY_DEVIATION * span + i)
        slope, along, level = factors_of(call, channel + i, rows, epsilon, square, whole, along)
        rounded = np.float32(mean)
        store_f32(factors, norm.F_MEAN * factors_span + i, rounded)
        store_f32(factors, norm.F_SLOPE * factors_span + i, np.float32(slope))
        store_f32(factors, norm.F_ALONG * factors_span + i, np.float32(along))
        store_f32(factors, norm.F_LEVEL * factors_span + i, np.float32(level + along * (np.float64(rounded) - mean)))


@inner
def _differentiate(call, p, item, factors):
    """dx of a part of a block, from the factors of its channels, SPAN to an array."""
    dx = call.output
    x, dy = call.inputs[0], call.inputs[1]
    kind, span = p.kind, p.span
    fold = p.fold
    channel, count, first, whole, rest = _place(p, item)
    if dx == 0:
        return
    for n in range(norm.FACTORS):
        _repeat(factors + 4 * n * span, count, fold)
    pitch = fold * p.channels
    for line in range(first, whole):
        norm.differentiate_line(kind, dx, x, dy, line * pitch + channel, count * fold, factors, span)
    if rest:
        norm.differentiate_line(kind, dx, x, dy, whole * pitch, rest, factors, span)


@inner
def _item(call, p, item, scratch):
    """A part: its totals. Where there is but one: the whole block."""
    span, channels, totals = p.span, p.channels, _measure(call, p, item, scratch)
    channel, count = _place(p, item)[:2]
    if p.parts == 1:
        factors = scratch + p.thread.factors
        _finish(call, p, channel, count, totals, span, factors, span)
        _differentiate(call, p, item, factors)
        return
    part = call.shared + p.shared.totals + 8 * (item // p.blocks * norm.TOTALS * channels + channel)
    for n in range(norm.TOTALS):
        for i in range(count):
            store_f64(part, n * channels + i, load_f64(totals, n * span + i))


@inner
def _joined(call, p, block, _scratch):
    """The parts of a block, one after the other."""
    channels, parts = p.channels, p.parts
    channel, count = _place(p, block)[:2]
    totals = call.shared + p.shared.totals + 8 * channel
    for part in range(1, parts):
        norm.join_totals(call, totals, channels, totals + 8 * part * norm.TOTALS * channels, channels, count)
    factors = call.shared + p.shared.factors + 4 * channel
    _finish(call, p, channel, count, totals, channels, factors, channels)


@inner
def _graded(call, p, item, scratch):
    """The gradient of a part, the last ones first: they may still be in a cache."""
    if call.output == 0:
        return
    span, channels, item = p.span, p.channels, p.parts * p.blocks - 1 - item
    channel, count = _place(p, item)[:2]
    factors, source = scratch + p.thread.factors, call.shared + p.shared.factors + 4 * channel
    for n in range(norm.FACTORS):
        copy_run(factors + 4 * n * span, source + 4 * n * channels, count)
    _differentiate(call, p, item, factors)


_ITEMS = stage("batch_norm_items", BatchNormRows, _item)
_JOIN = stage("batch_norm_join", BatchNormRows, _joined)
_GRADE = stage("batch_norm_grade", BatchNormRows, _graded)


def plan(kind: int, rows: int, channels: int, epsilon: float) -> Plan:
    """For rows of channels."""
    wanted = max(1, min(MAX_ITEMS, rows * channels // PART))
    most = max(1, rows // PART_ROWS)
    blocks = max(-(-channels // WIDEST), min(wanted // most, channels // NARROWEST), 1)
    width = -(-channels // (16 * blocks)) * 16 if blocks > 1 else channels
    blocks = -(-channels // width)
    parts = max(1, min(wanted // blocks, most))
    fold = 1
    while blocks == 1 and 2 * fold <= rows and 2 * fold * channels <= LINE:
        fold *= 2
    parts = max(1, min(parts, rows // fold))
    span = -(-fold * width // 16) * 16
    span += STAGGER if span % 512 == 0 else 0
    thread, per_thread = workspace(
        Offsets, sums=FLOAT * norm.SUMS * span, totals=DOUBLE * norm.TOTALS * span, factors=FLOAT * norm.FACTORS * span
    )
    parameters = BatchNormRows(
        kind=kind,
        rows=rows,
        channels=channels,
        width=width,
        blocks=blocks,
        parts=parts,
        fold=fold,
        span=span,
        chunk=max(1, min(MAX_CHUNK, CACHED // (fold * width))),
        epsilon=epsilon,
        thread=thread,
    )
    items = parts * blocks
    if parts == 1:
        return Plan(parameters, ((_ITEMS, items),), per_thread=per_thread)
    stages = (_ITEMS, items), (_JOIN, blocks), (_GRADE, items)
    totals, factors = DOUBLE * norm.TOTALS * parts * channels, FLOAT * norm.FACTORS * channels
    offsets, shared = workspace(Offsets, totals=totals, factors=factors)
    return Plan(replace(parameters, shared=offsets), stages, shared, per_thread)
