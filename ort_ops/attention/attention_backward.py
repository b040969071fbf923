"""AttentionBackward, compiled: scores and probabilities of a block again, from the logarithms of their sums.

An item is a part of the queries of the heads that share keys. Its blocks of queries meet the keys that they see;
gradients of the queries stay in a cache for a block, those of keys and values are summed over the item, and over the
parts in a stage behind it. The gradient of a bias, asked for rarely, computes scores once more, where its items share
no sums.
"""

import numpy as np

from onnx_backprop.opset.operators.attention_backward import OP
from onnx_backprop.ort_ops.attention.blocks import (
    BY_ONE,
    BY_SCORES,
    BY_WIDTH,
    COLUMNS,
    KEYS,
    PANEL,
    PANELS,
    QUERIES,
    Attention,
    Offsets,
    diagonal,
    fields,
    fill_tables,
    floats,
    key_count,
    mark,
    marks,
    multiply_all,
    padded,
    product,
    read_bias,
    score,
    seen,
    table_of,
    turn,
    turn_back,
)
from onnx_backprop.ort_ops.attention.panels import differentiate, exponential
from onnx_backprop.ort_ops.compiler.decorators import fast, inner
from onnx_backprop.ort_ops.compiler.llvm import by_type, load_f32, store_f32
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, workspace
from onnx_backprop.ort_ops.vector.gemm_tile import ROWS, SPARE_ROWS, multiply
from onnx_backprop.ort_ops.vector.rows import clear, read_run, write_run

_BIAS, _SINKS = 6, 8
_DIFF, _OUT, _LOGARITHM = 0, 4, 5
_KEY_OUT, _VALUE_OUT, _BIAS_OUT, _SINKS_OUT = range(4)  # of the outputs behind the first
_ITEMS = 8  # at least, where heads are few: two threads end together
_INFINITE = np.float32(np.inf)


@fast("reassoc", "contract")
def _dot(load, _store, x, y, first, count):
    total = np.float32(0.0)
    for i in range(first, first + count):
        total += load(x, i) * load(y, i)
    return total


@inner
def _delta(call, p, head, _scratch):
    """δ = Σ dy·y of the queries of one head."""
    for row in range(head * p.queries, (head + 1) * p.queries):
        along = by_type(p.kind, _dot, call.inputs[_DIFF], call.inputs[_OUT], row * p.width, p.width)
        store_f32(call.shared + p.delta, row, along)


@inner
def _begin(call, p, head, first, count, scratch):
    """A block's queries and dy, turned and as they lie, with zeros behind them; L and δ, under which they have no p."""
    thread, kind, size, width = p.thread, p.kind, p.size, p.width
    panels, row, wide = (count + COLUMNS - 1) // COLUMNS, head * p.queries + first, scratch + p.thread.wide
    query, diff = call.inputs[1], call.inputs[_DIFF]
    clear(scratch + thread.query_rows, 0, QUERIES * p.size_pitch)
    clear(scratch + thread.diff_rows, 0, QUERIES * p.width_pitch)
    for i in range(count):
        read_run(kind, scratch + thread.query_rows, i * p.size_pitch, query, (row + i) * size, 1, size)
        read_run(kind, scratch + thread.diff_rows, i * p.width_pitch, diff, (row + i) * width, 1, width)
    for panel in range(panels):
        at, rows = row + panel * COLUMNS, min(COLUMNS, count - panel * COLUMNS)
        turn(kind, scratch + thread.query + 4 * panel * COLUMNS * size, query, at * size, size, rows, size, wide)
        turn(kind, scratch + thread.diff + 4 * panel * COLUMNS * width, diff, at * width, width, rows, width, wide)
    multiply_all(scratch + thread.query, panels * COLUMNS * size, np.float32(p.scale))
    multiply_all(scratch + thread.query_rows, count * p.size_pitch, np.float32(p.scale))
    for i in range(QUERIES):
        level = load_f32(call.inputs[_LOGARITHM], row + i) if i < count else _INFINITE
        store_f32(scratch + thread.most, i, _INFINITE if level == -_INFINITE else level)
        store_f32(scratch + thread.total, i, load_f32(call.shared + p.delta, row + i) if i < count else np.float32(0.0))


@inner
def _copy_keys(call, p, first, rows, scratch):
    read_run(p.kind, scratch + p.thread.key, 0, call.inputs[2], first * p.size, 1, rows * p.size)
    read_run(p.kind, scratch + p.thread.value, 0, call.inputs[3], first * p.width, 1, rows * p.width)


@inner
def _panel(p, query, count, at, rows, start, panel, biased, scratch):
    """p and ds of a panel, ds before the slope of the softcap."""
    thread = p.thread
    scores, products = scratch + thread.scores + 4 * PANEL * panel, scratch + thread.products + 4 * PANEL * panel
    slopes, lane = scratch + thread.slopes + 4 * PANEL * panel if p.cap > 0.0 else 0, 4 * panel * COLUMNS
    score(p, query, count, at, rows, start, panel, scores, slopes, biased, scratch)
    diff = scratch + thread.diff + lane * p.width
    if p.width:
        product(
            rows, products, scratch + thread.value, 4 * p.width, 4, diff, p.width, table_of(p, scratch, BY_WIDTH), 0
        )
    else:
        clear(products, 0, rows * COLUMNS)
    differentiate(scores, products, rows, scratch + thread.most + lane, scratch + thread.total + lane)


@inner
def _bent(p, panel, rows, scratch):
    """ds times the slope of the softcap."""
    products, slopes = scratch + p.thread.products + 4 * PANEL * panel, scratch + p.thread.slopes + 4 * PANEL * panel
    if p.cap > 0.0:
        for i in range(rows * COLUMNS):
            store_f32(products, i, load_f32(products, i) * load_f32(slopes, i))


@inner
def _add_rows(p, target, pitch, length, rows, panels, weights, source, segments, scratch):
    """target[key] += Σ of weights · rows of the queries."""
    if length == 0:
        return
    table = table_of(p, scratch, BY_SCORES)
    for i in range(0, rows, ROWS):
        left = (weights + 4 * COLUMNS * i, table, 4)
        for j in range(0, length, COLUMNS):
            to, right = (target + 4 * (i * pitch + j), 4 * pitch), (source + 4 * j, 4 * pitch)
            multiply(min(ROWS, rows - i), min(COLUMNS, length - j), to, left, right, (segments, panels), COLUMNS, 1)


@inner
def _queries(call, p, b, h, block, diff_key, diff_value, scratch):
    """One block of queries: its gradient, and what it adds to those of keys and values."""
    thread, first = p.thread, block * QUERIES
    count, head = min(QUERIES, p.queries - first), b * p.heads + h
    panels, keys = (count + COLUMNS - 1) // COLUMNS, key_count(call, p, b)
    start = diagonal(call, p, b, keys)
    low, high = seen(p, first, count, start, keys)
    shared, segments = (b * p.shared + h // p.group) * p.keys, table_of(p, scratch, 4)
    _begin(call, p, head, first, count, scratch)
    clear(scratch + thread.out, 0, PANELS * (p.size + SPARE_ROWS) * COLUMNS)
    for at in range(low, high, KEYS):
        rows, some_seen = min(KEYS, high - at), 0
        _copy_keys(call, p, shared + at, rows, scratch)
        for panel in range(panels):
            query, some = first + panel * COLUMNS, min(COLUMNS, count - panel * COLUMNS)
            begin, end = seen(p, query, some, start, keys)
            few = min(rows, end - at)
            level = scratch + thread.most + 4 * panel * COLUMNS
            biased = 0
            if few > 0 and at + few > begin:
                biased = read_bias(call, p, b, h, query, some, at, few, level, scratch)
            few = few if biased else 0
            some_seen += few
            products = scratch + thread.products + 4 * PANEL * panel
            if few > 0:
                _panel(p, query, some, at, few, start, panel, biased, scratch)
                _bent(p, panel, few, scratch)
                out, key = scratch + thread.out + 4 * panel * (p.size + SPARE_ROWS) * COLUMNS, scratch + thread.key
                product(p.size, out, key, 4, 4 * p.size, products, few, table_of(p, scratch, BY_ONE), 1)
            # tiles read a few rows more, and other panels see more keys
            behind = (rows + SPARE_ROWS - few) * COLUMNS
            clear(products, few * COLUMNS, behind)
            clear(scratch + thread.scores + 4 * PANEL * panel, few * COLUMNS, behind)
        to_key, to_value = diff_key + 4 * at * p.size_pitch, diff_value + 4 * at * p.width_pitch
        scores, ds, second = scratch + thread.scores, scratch + thread.products, segments + 16 * PANELS
        if some_seen > 0 and call.more[_KEY_OUT]:
            _add_rows(p, to_key, p.size_pitch, p.size, rows, panels, ds, scratch + thread.query_rows, segments, scratch)
        if some_seen > 0 and call.more[_VALUE_OUT]:
            _add_rows(
                p, to_value, p.width_pitch, p.width, rows, panels, scores, scratch + thread.diff_rows, second, scratch
            )
    if call.output:
        for panel in range(panels):
            out, at = scratch + thread.out + 4 * panel * (p.size + SPARE_ROWS) * COLUMNS, first + panel * COLUMNS
            multiply_all(out, p.size * COLUMNS, np.float32(p.scale))
            some, place = min(COLUMNS, count - panel * COLUMNS), (head * p.queries + at) * p.size
            turn_back(p.kind, call.output, place, out, p.size, some, p.size_pitch, scratch + thread.staged)


@inner
def _part(call, p, n, scratch):
    """Some of the blocks of the heads that share keys."""
    owner, part, rows = n // p.parts, n % p.parts, p.keys + SPARE_ROWS
    b, shared, units = owner // p.shared, owner % p.shared, p.group * p.blocks
    diff_key, diff_value = scratch + p.thread.diff_key, scratch + p.thread.diff_value
    if p.parts > 1:
        diff_key = call.shared + p.diff_key + 4 * n * rows * p.size_pitch
        diff_value = call.shared + p.diff_value + 4 * n * rows * p.width_pitch
    clear(diff_key, 0, rows * p.size_pitch)
    clear(diff_value, 0, rows * p.width_pitch)
    fill_tables(p, scratch)
    for unit in range(part * units // p.parts, (part + 1) * units // p.parts):
        h, block = shared * p.group + unit // p.blocks, unit % p.blocks
        _queries(call, p, b, h, block, diff_key, diff_value, scratch)
    if p.parts == 1:
        _write(p, call.more[_KEY_OUT], owner, diff_key, p.size, p.size_pitch)
        _write(p, call.more[_VALUE_OUT], owner, diff_value, p.width, p.width_pitch)


@inner
def _write(p, target, owner, sums, length, pitch):
    if target:
        for row in range(p.keys):
            write_run(p.kind, target, (owner * p.keys + row) * length, 1, sums, row * pitch, length)


@inner
def _sum_parts(p, sums, pitch):
    """Of all parts, one after the other, into the first."""
    count = p.keys * pitch
    for part in range(1, p.parts):
        other = sums + 4 * part * (p.keys + SPARE_ROWS) * pitch
        for i in range(count):
            store_f32(sums, i, load_f32(sums, i) + load_f32(other, i))


@inner
def _join(call, p, owner, _scratch):
    rows = owner * p.parts * (p.keys + SPARE_ROWS)
    diff_key = call.shared + p.diff_key + 4 * rows * p.size_pitch
    diff_value = call.shared + p.diff_value + 4 * rows * p.width_pitch
    _sum_parts(p, diff_key, p.size_pitch)
    _sum_parts(p, diff_value, p.width_pitch)
    _write(p, call.more[_KEY_OUT], owner, diff_key, p.size, p.size_pitch)
    _write(p, call.more[_VALUE_OUT], owner, diff_value, p.width, p.width_pitch)


@inner
def _bias(call, p, n, scratch):
    """The gradient of what one block of queries reads of the bias, from all batches and heads that read the same."""
    if call.more[_BIAS_OUT] == 0:
        return
    by_b, by_h, by_q, by_k = p.bias_steps[0] != 0, p.bias_steps[1] != 0, p.bias_steps[2] != 0, p.bias_steps[3] != 0
    blocks = p.blocks if by_q else 1
    block, head, batch = n % blocks, n // blocks, 0
    if by_h:
        batch, head = head // p.heads, head % p.heads
    elif by_b:
        batch, head = head, 0
    sums = scratch + p.thread.diff_bias
    clear(sums, 0, PANELS * p.keys * COLUMNS)
    fill_tables(p, scratch)
    for b in range(batch, batch + 1 if by_b else p.batch):
        for h in range(head, head + 1 if by_h else p.heads):
            for one in range(block, block + 1 if by_q else p.blocks):
                _add_scores(call, p, b, h, one, sums, scratch)
    first = batch * p.bias_steps[0] + head * p.bias_steps[1] + block * QUERIES * p.bias_steps[2]
    rows = min(QUERIES, p.queries - block * QUERIES) if by_q else 1
    columns = p.keys if by_k else 1
    for q in range(rows):
        for k in range(columns):
            total = 0.0
            for i in range(q, q + 1 if by_q else QUERIES):
                for j in range(k, k + 1 if by_k else p.keys):
                    place = (i // COLUMNS * p.keys + j) * COLUMNS + i % COLUMNS
                    total += np.float64(load_f32(sums, place))
            store_f32(scratch + p.thread.staged, k % COLUMNS, np.float32(total))
            if k % COLUMNS == COLUMNS - 1 or k == columns - 1:
                some, to = k % COLUMNS + 1, first + q * p.bias_steps[2] + k // COLUMNS * COLUMNS
                write_run(p.kind, call.more[_BIAS_OUT], to, 1, scratch + p.thread.staged, 0, some)


@inner
def _add_scores(call, p, b, h, block, sums, scratch):
    """ds of a block of queries added to the sums, (keys, COLUMNS) for each panel."""
    thread, first = p.thread, block * QUERIES
    count, keys = min(QUERIES, p.queries - first), key_count(call, p, b)
    start = diagonal(call, p, b, keys)
    low, high = seen(p, first, count, start, keys)
    _begin(call, p, b * p.heads + h, first, count, scratch)
    for at in range(low, high, KEYS):
        rows = min(KEYS, high - at)
        _copy_keys(call, p, (b * p.shared + h // p.group) * p.keys + at, rows, scratch)
        for panel in range((count + COLUMNS - 1) // COLUMNS):
            query, some = first + panel * COLUMNS, min(COLUMNS, count - panel * COLUMNS)
            biased = read_bias(
                call, p, b, h, query, some, at, rows, scratch + thread.most + 4 * panel * COLUMNS, scratch
            )
            if biased == 0:
                continue
            _panel(p, query, some, at, rows, start, panel, biased, scratch)
            ds, to = scratch + thread.products + 4 * PANEL * panel, sums + 4 * COLUMNS * (panel * p.keys + at)
            for i in range(rows * COLUMNS):
                store_f32(to, i, load_f32(to, i) + load_f32(ds, i))


@inner
def _sinks(call, p, h, _scratch):
    """dsink = -Σ e^(sink - L)·δ over batches and queries."""
    target = call.more[_SINKS_OUT]
    if target == 0:
        return
    total, sink = 0.0, load_f32(call.inputs[_SINKS], h)
    for b in range(p.batch):
        for row in range((b * p.heads + h) * p.queries, (b * p.heads + h + 1) * p.queries):
            level = load_f32(call.inputs[_LOGARITHM], row)
            if level != -_INFINITE:
                total -= np.float64(exponential(sink - level) * load_f32(call.shared + p.delta, row))
    store_f32(target, h, np.float32(total))


_MARK = stage("attention_mark", Attention, mark)
_DELTA = stage("attention_delta", Attention, _delta)
_PART = stage("attention_part", Attention, _part)
_JOIN = stage("attention_join", Attention, _join)
_BIAS_STAGE = stage("attention_bias", Attention, _bias)
_SINKS_STAGE = stage("attention_sinks", Attention, _sinks)


def _plan(request: Request) -> Plan:
    numbers = fields(request, 1, _BIAS)
    batch, heads, queries, size = request.outputs[0]
    shared, keys, width = request.outputs[2][1:]
    bias = request.inputs[_BIAS]
    owners, units = batch * shared, heads // shared * -(-queries // QUERIES)
    parts = max(1, min(units, -(-_ITEMS // max(owners, 1)))) if owners < _ITEMS else 1
    sums = {
        "diff_key": FLOAT * (keys + SPARE_ROWS) * padded(size),
        "diff_value": FLOAT * (keys + SPARE_ROWS) * padded(width),
    }
    thread, per_thread = workspace(
        Offsets,
        **floats(numbers, bias),
        query_rows=FLOAT * QUERIES * padded(size),
        diff=FLOAT * QUERIES * width,
        diff_rows=FLOAT * QUERIES * padded(width),
        scores=FLOAT * PANELS * PANEL,
        products=FLOAT * PANELS * PANEL,
        out=FLOAT * PANELS * (size + SPARE_ROWS) * COLUMNS,
        diff_bias=0 if bias is None else FLOAT * PANELS * keys * COLUMNS,
        **(sums if parts == 1 else {}),
    )
    items, marked = marks(request, _BIAS) if numbers["marked"] else (0, 0)
    shares, bytes_shared = workspace(
        Offsets,
        total=FLOAT * batch * heads * queries,
        bias=marked,
        **{n: owners * parts * v for n, v in sums.items() if parts > 1},
    )
    parameters = Attention(
        **numbers,  # type: ignore[arg-type]
        parts=parts, thread=thread, delta=shares.total, marks=shares.bias,
        diff_key=shares.diff_key, diff_value=shares.diff_value,
    )  # fmt: skip
    stages = [(_MARK, items)] if items else []
    stages += [(_DELTA, batch * heads), (_PART, owners * parts)]
    stages += [(_JOIN, owners)] if parts > 1 else []
    if bias is not None:
        items = (
            (bias[0] if bias[0] > 1 else 1)
            * (bias[1] if bias[1] > 1 else 1)
            * (parameters.blocks if bias[2] > 1 else 1)
        )
        stages.append((_BIAS_STAGE, items))
    if request.inputs[_SINKS] is not None:
        stages.append((_SINKS_STAGE, heads))
    return Plan(parameters, tuple(stages), bytes_shared, per_thread)


KERNEL = NativeKernel(OP, _plan)
