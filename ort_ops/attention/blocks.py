"""Blocks of queries and keys: what a call is, which keys a block sees, copies in the order of products, scores.

Products are those of `vector.gemm_tile`: scores (keys x queries) have the queries of a panel side by side, since rows
of keys and values are then read as they lie, and maxima over keys need no sum across a register. Blocks of keys are
copied, so that tiles may read a few rows more, and half types become float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onnx_backprop.opset.maths.attention import BOTTOM_RIGHT, scale_of, window
from onnx_backprop.ort_ops.attention.panels import bend
from onnx_backprop.ort_ops.compiler.decorators import apart, fast, inner
from onnx_backprop.ort_ops.compiler.llvm import F32, by_type, load_f32, load_i64, stack, store_f32, store_i64
from onnx_backprop.ort_ops.compiler.records import Record
from onnx_backprop.ort_ops.runtime.bridge import Request
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, WORD
from onnx_backprop.ort_ops.vector.gemm_tile import COLUMNS, ROWS, SPARE_ROWS, VECTOR, multiply, one_segment, rows_apart
from onnx_backprop.ort_ops.vector.registers import transpose_part, transpose_tile
from onnx_backprop.ort_ops.vector.rows import clear, read_run, write_run

KEYS = 96  # of a block: with 64 numbers a head, keys and values take a first-level cache
PANELS = max(1, 128 // COLUMNS)  # of a block of queries, for which a block of keys is fetched
QUERIES = PANELS * COLUMNS
PANEL = (KEYS + SPARE_ROWS) * COLUMNS  # floats of a panel of scores
NEVER = np.float32(-np.inf)
_LOWEST, _LOW = np.float32(-1e38), np.float32(-1e30)  # a score of at most 1e37 makes no difference between them
_FAR = 1 << 40  # beyond every length, and no sum leaves int64
_number = stack(1)


@dataclass(frozen=True, kw_only=True)
class Offsets(Record):
    """Of a thread's scratch; d…: of gradients, …_rows: as they lie, the others with queries side by side."""

    tables: int = 0
    query: int = 0
    query_rows: int = 0
    diff: int = 0
    diff_rows: int = 0
    key: int = 0
    value: int = 0
    scores: int = 0
    products: int = 0
    slopes: int = 0
    out: int = 0
    staged: int = 0
    wide: int = 0
    bias: int = 0
    most: int = 0
    total: int = 0
    factor: int = 0
    diff_key: int = 0
    diff_value: int = 0
    diff_bias: int = 0


@dataclass(frozen=True, kw_only=True)
class Attention(Record):
    """The numbers of a plan. at: the input that is the query; bias_at: the bias, before lengths, sinks and offsets."""

    kind: int
    at: int
    bias_at: int
    batch: int
    heads: int
    shared: int  # heads of the keys
    group: int  # heads of the queries for each of these
    queries: int
    keys: int
    size: int  # of a query and a key
    width: int  # of a value
    size_pitch: int  # whole vectors of these
    width_pitch: int
    left: int
    right: int
    bottom: bool
    scale: float
    cap: float
    bias_steps: tuple[int, int, int, int]  # 0 along axes of length 1
    blocks: int  # of a head's queries
    parts: int  # of the blocks of the heads that share keys, each with sums of its own
    thread: Offsets
    diff_key: int = 0  # offsets of what all threads share
    diff_value: int = 0
    delta: int = 0
    marks: int = 0
    marked: bool = False  # whether there is a mark for every panel of the bias and block of keys


def padded(count: int) -> int:
    """Whole vectors."""
    return -(-count // VECTOR) * VECTOR


def fields(request: Request, at: int, bias_at: int) -> dict[str, int | float | tuple[int, ...]]:
    """What a plan has of a call's shapes and attributes."""
    attrs, (query, key, value) = request.attributes, request.inputs[at : at + 3]
    assert query is not None and key is not None and value is not None  # noqa: PT018 - for pyright
    left, right = window(attrs)
    bias, steps = request.inputs[bias_at], (0, 0, 0, 0)
    if bias is not None:
        whole = [int(np.prod(bias[axis + 1 :])) for axis in range(4)]
        steps = tuple(step if length > 1 else 0 for step, length in zip(whole, bias, strict=True))
    return {
        "kind": request.element_type, "at": at, "bias_at": bias_at,
        "batch": query[0], "heads": query[1], "shared": key[1], "group": query[1] // key[1],
        "queries": query[2], "keys": key[2], "size": query[3], "width": value[3],
        "size_pitch": padded(query[3]), "width_pitch": padded(value[3]),
        "left": min(left, _FAR), "right": min(right, _FAR), "bottom": attrs["diagonal_alignment"] == BOTTOM_RIGHT,
        "scale": scale_of(attrs, query[3]), "cap": float(np.float32(attrs["softcap"])),
        "bias_steps": steps, "blocks": -(-query[2] // QUERIES),
        # blocks of keys begin where their number says
        "marked": bias is not None and bias[2] == query[2] > 1 and bias[3] == key[2] > 1 and left < 0,
    }  # fmt: skip


def marks(request: Request, bias_at: int) -> tuple[int, int]:
    """(Items of the stage `mark`, bytes of the marks)."""
    bias = request.inputs[bias_at]
    assert bias is not None
    items = bias[0] * bias[1] * -(-bias[2] // COLUMNS)
    return items, WORD * items * -(-bias[3] // KEYS)


def floats(numbers: Mapping[str, int | float | tuple[int, ...]], bias: object) -> dict[str, int]:
    """Bytes of the arrays that both passes have."""
    size, width = int(numbers["size"]), int(numbers["width"])  # type: ignore[arg-type]
    half, capped = numbers["kind"] != F32, numbers["cap"]
    return {
        "tables": WORD * (4 * (ROWS + 2) + 4 * PANELS),
        "query": FLOAT * QUERIES * size,
        "key": FLOAT * ((KEYS + SPARE_ROWS) * size + ROWS),
        "value": FLOAT * ((KEYS + SPARE_ROWS) * width + ROWS),
        "slopes": FLOAT * (PANELS * PANEL if capped else 0),
        "staged": FLOAT * COLUMNS * (max(padded(size), padded(width)) + VECTOR),
        "wide": FLOAT * (VECTOR * max(size, width, KEYS) if half else 0),
        "bias": FLOAT * (PANEL if bias is not None else 0),
        "most": FLOAT * QUERIES,
        "total": FLOAT * QUERIES,
    }


@inner
def key_count(call, p, b):
    """How many keys of a batch count."""
    lengths = call.inputs[p.bias_at + 1]
    return max(0, min(load_i64(lengths, b), p.keys)) if lengths else p.keys


@inner
def diagonal(call, p, b, keys):
    """The key at which the first query of a batch stands."""
    offsets = call.inputs[p.bias_at + 3]
    if offsets:
        return max(-_FAR, min(load_i64(offsets, b), _FAR))
    return keys - p.queries if p.bottom else 0


@inner
def seen(p, first, count, start, keys):
    """(first, end) of the keys that some of `count` queries see; start: where the diagonal begins."""
    low = max(0, first + start - p.left) if p.left >= 0 else 0
    high = min(keys, first + count + start + p.right) if p.right >= 0 else keys
    return low, high


# ----- copies ------


@apart
def turn(kind, target, source, first, pitch, rows, columns, wide):
    """float32 target[c, r] = source[first + r·pitch + c], a row of COLUMNS of which those from `rows` on are 0."""
    for r in range(0, COLUMNS, VECTOR):
        some = max(0, min(VECTOR, rows - r))
        at, step = source + 4 * (first + r * pitch), 4 * pitch
        if kind != F32 or some == 0:
            for n in range(some):
                read_run(kind, wide, n * columns, source, first + (r + n) * pitch, 1, columns)
            at, step = wide, 4 * columns
        for c in range(0, columns, VECTOR):
            place, few = target + 4 * (c * COLUMNS + r), min(VECTOR, columns - c)
            if few == VECTOR and some == VECTOR:
                transpose_tile(place, 4 * COLUMNS, at + 4 * c, step)
            elif some == 0:
                for n in range(few):
                    clear(place, n * COLUMNS, VECTOR)
            else:
                transpose_part(place, 4 * COLUMNS, at + 4 * c, step, some, few)


@apart
def turn_back(kind, target, first, source, rows, columns, pitch, staged):
    """target[first + c·rows + r] = float32 source[r, c], rows of COLUMNS, for c < columns; pitch: rows, padded."""
    for c in range(0, columns, VECTOR):
        for r in range(0, rows, VECTOR):
            place, few = staged + 4 * (c * pitch + r), min(VECTOR, rows - r)
            transpose_part(place, 4 * pitch, source + 4 * (r * COLUMNS + c), 4 * COLUMNS, few, min(VECTOR, columns - c))
    for c in range(columns):
        write_run(kind, target, first + c * rows, 1, staged, c * pitch, rows)


@inner
def multiply_all(target, count, factor):
    for i in range(count):
        store_f32(target, i, load_f32(target, i) * factor)


# ----- products ------

BY_SIZE, BY_WIDTH, BY_ONE, BY_SCORES = range(4)  # tables of where rows of `a` start


@inner
def table_of(p, scratch, number):
    return scratch + p.thread.tables + 8 * (ROWS + 2) * number


@inner
def fill_tables(p, scratch):
    rows_apart(table_of(p, scratch, BY_SIZE), 4 * p.size)
    rows_apart(table_of(p, scratch, BY_WIDTH), 4 * p.width)
    rows_apart(table_of(p, scratch, BY_ONE), 4)
    rows_apart(table_of(p, scratch, BY_SCORES), 4 * COLUMNS)
    segments = table_of(p, scratch, 4)
    for panel in range(PANELS):
        for pitch in range(2):
            step = 4 * COLUMNS * (p.width_pitch if pitch else p.size_pitch)
            store_i64(segments, 2 * (pitch * PANELS + panel), 4 * PANEL * panel)
            store_i64(segments, 2 * (pitch * PANELS + panel) + 1, step * panel)


@apart
def product(rows, c, a, a_row, a_step, b, steps, table, add):
    """(rows x COLUMNS) c (+)= Σ a·b: rows of a lie `a_row` apart, and its steps `a_step`; b in rows of COLUMNS."""
    for i in range(0, rows, ROWS):
        left = (a + i * a_row, table, a_step)
        to = (c + 4 * COLUMNS * i, 4 * COLUMNS)
        multiply(min(ROWS, rows - i), COLUMNS, to, left, (b, 4 * COLUMNS), one_segment(table), steps, add)


# ----- scores ------


# What a bias does to a panel: nothing; hides every key, by -inf or by numbers that stand for it; something else.
_NOTHING, _NEVER_SEEN, _LOWEST_SEEN, _MIXED = range(4)


@fast("reassoc")
def _count(load, _store, source, first, count):
    """How many numbers are not 0, above the lowest, and not -inf."""
    other, above, some = 0, 0, 0
    for i in range(first, first + count):
        x = load(source, i)
        other += 0 if x == np.float32(0.0) else 1
        above += 0 if x <= _LOWEST else 1
        some += 0 if x <= NEVER else 1
    return other, above, some


@inner
def mark(call, p, n, _scratch):
    """The marks of one row of panels, which all heads and batches read that share a bias."""
    panels, blocks = (p.queries + COLUMNS - 1) // COLUMNS, (p.keys + KEYS - 1) // KEYS
    slice_, panel = n // panels, n % panels
    query, step = panel * COLUMNS, p.bias_steps[2]
    first = slice_ * p.queries * p.keys + query * step
    for block in range(blocks):
        other, above, some = 0, 0, 0
        for c in range(min(COLUMNS, p.queries - query)):
            at = first + c * step + block * KEYS
            counts = by_type(p.kind, _count, call.inputs[p.bias_at], at, min(KEYS, p.keys - block * KEYS))
            other, above, some = other + counts[0], above + counts[1], some + counts[2]
        hidden = _MIXED if above else _LOWEST_SEEN if some else _NEVER_SEEN
        store_i64(call.shared + p.marks, n * blocks + block, hidden if other else _NOTHING)


@fast("reassoc")
def _above(numbers, rows, count, least):
    """How many of the first `count` numbers of each row are above a bound."""
    total = 0
    for r in range(rows):
        for c in range(count):
            total += 0 if load_f32(numbers, r * COLUMNS + c) <= least else 1  # NaN as well
    return total


@apart
def read_bias(call, p, b, h, query, count, at, rows, level, scratch):
    """A copy of the bias of a panel, if it has any: 0 where it leaves no key to see, 1 where it adds nothing, else 2.

    level: what scores are compared with before their powers are taken, below which the lowest numbers, which stand for
    -inf in masks, have a power of 0 as well.
    """
    bias, kind, panel = call.inputs[p.bias_at], p.kind, scratch + p.thread.bias
    if bias == 0:
        return 1
    step, along = p.bias_steps[2], p.bias_steps[3]
    first = b * p.bias_steps[0] + h * p.bias_steps[1] + query * step + at * along
    lanes = 0
    for c in range(count):
        lanes += 1 if load_f32(level, c) > _LOW else 0
    if p.marked:
        panels, blocks = (p.queries + COLUMNS - 1) // COLUMNS, (p.keys + KEYS - 1) // KEYS
        row = first // (p.queries * p.keys) * panels + query // COLUMNS
        state = load_i64(call.shared + p.marks, row * blocks + at // KEYS)
        if state == _NOTHING:
            return 1
        if state == _NEVER_SEEN or (state == _LOWEST_SEEN and lanes == count):
            return 0
    if step and along:
        turn(kind, panel, bias, first, step, count, rows, scratch + p.thread.wide)
    elif along:
        for r in range(rows):
            read_run(kind, panel, r * COLUMNS, bias, first + r * along, 1, 1)
            for c in range(1, COLUMNS):
                store_f32(panel, r * COLUMNS + c, load_f32(panel, r * COLUMNS))
    else:
        clear(panel, 0, COLUMNS)
        for c in range(count):
            read_run(kind, panel, c, bias, first + c * step, 1, 1)
        for r in range(1, rows):
            for c in range(COLUMNS):
                store_f32(panel, r * COLUMNS + c, load_f32(panel, c))
    if not load_f32(panel, 0) <= _LOWEST or _above(panel, rows, count, _LOWEST) > 0:
        return 2
    return 0 if lanes == count or _above(panel, rows, count, NEVER) == 0 else 2


@apart
def _hide(p, ahead, rows, scores):
    """-inf where a key is not seen; ahead: how far the first key lies behind the diagonal of the first query."""
    for r in range(rows):
        if p.right >= 0:
            for c in range(max(0, min(COLUMNS, ahead + r - p.right))):
                store_f32(scores, r * COLUMNS + c, NEVER)
        if p.left >= 0:
            for c in range(max(0, min(COLUMNS, ahead + r + p.left + 1)), COLUMNS):
                store_f32(scores, r * COLUMNS + c, NEVER)


@inner
def score(p, query, count, at, rows, start, panel, scores, slopes, biased, scratch):
    """The scores of `count` queries and `rows` keys, whose copies are there; slopes: their place, or 0.

    biased: what `read_bias` has answered.
    """
    thread = p.thread
    table = table_of(p, scratch, BY_SIZE)
    part = scratch + thread.query + 4 * panel * COLUMNS * p.size
    if p.size:
        product(rows, scores, scratch + thread.key, 4 * p.size, 4, part, p.size, table, 0)
    else:
        clear(scores, 0, rows * COLUMNS)
    if p.cap > 0.0:
        place = _number()
        store_f32(place, 0, np.float32(p.cap))
        bend(scores, rows, place, slopes)
    if biased == 2:
        for i in range(rows * COLUMNS):
            store_f32(scores, i, load_f32(scores, i) + load_f32(scratch + thread.bias, i))
    ahead = at - query - start
    if (p.right >= 0 and ahead + rows - 1 > p.right) or (p.left >= 0 and ahead - count + 1 < -p.left):
        _hide(p, ahead, rows, scores)
