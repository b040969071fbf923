"""AttentionForwardTraining, compiled: a block of queries meets all keys that it sees, block by block (FlashAttention).

The largest score so far and the sum of powers below it are kept for every query; when a larger one comes, what was
summed is made smaller. Blocks that causality, windows and lengths hide are not visited.
"""

import numpy as np

from onnx_backprop.opset.operators.attention_forward_training import OP
from onnx_backprop.ort_ops.attention.blocks import (
    BY_ONE,
    COLUMNS,
    KEYS,
    NEVER,
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
    product,
    read_bias,
    score,
    seen,
    table_of,
    turn,
    turn_back,
)
from onnx_backprop.ort_ops.attention.panels import finish, rescale, soften
from onnx_backprop.ort_ops.compiler.decorators import inner
from onnx_backprop.ort_ops.compiler.llvm import load_f32, store_f32
from onnx_backprop.ort_ops.runtime.bridge import NativeKernel, Request
from onnx_backprop.ort_ops.runtime.stages import Plan, stage
from onnx_backprop.ort_ops.runtime.workspace import FLOAT, workspace
from onnx_backprop.ort_ops.vector.gemm_tile import SPARE_ROWS
from onnx_backprop.ort_ops.vector.rows import clear, copy_run, read_run

_BIAS, _SINKS = 3, 5


@inner
def _begin(call, p, head, first, count, scratch):
    """The block's queries, turned and scaled, and the sums of none or of the sink alone."""
    thread, panels, sinks = p.thread, (count + COLUMNS - 1) // COLUMNS, call.inputs[_SINKS]
    fill_tables(p, scratch)
    for panel in range(panels):
        at = first + panel * COLUMNS
        place = scratch + thread.query + 4 * panel * COLUMNS * p.size
        rows = min(COLUMNS, count - panel * COLUMNS)
        turn(
            p.kind, place, call.inputs[0], (head * p.queries + at) * p.size, p.size, rows, p.size, scratch + thread.wide
        )
        multiply_all(place, COLUMNS * p.size, np.float32(p.scale))
    for i in range(QUERIES):
        store_f32(scratch + thread.most, i, load_f32(sinks, head % p.heads) if sinks else NEVER)
        store_f32(scratch + thread.total, i, np.float32(1.0) if sinks else np.float32(0.0))
    clear(scratch + thread.out, 0, panels * (p.width + SPARE_ROWS) * COLUMNS)


@inner
def _block(call, p, n, scratch):
    """One block of queries of one head; the last ones, which see the most keys, come first."""
    head, block, thread = n // p.blocks, p.blocks - 1 - n % p.blocks, p.thread
    b, h = head // p.heads, head % p.heads
    first = block * QUERIES
    count = min(QUERIES, p.queries - first)
    keys = key_count(call, p, b)
    start = diagonal(call, p, b, keys)
    low, high = seen(p, first, count, start, keys)
    shared = (b * p.shared + h // p.group) * p.keys
    scores, key, value = scratch + thread.scores, scratch + thread.key, scratch + thread.value
    _begin(call, p, head, first, count, scratch)
    for at in range(low, high, KEYS):
        rows = min(KEYS, high - at)
        read_run(p.kind, key, 0, call.inputs[1], (shared + at) * p.size, 1, rows * p.size)
        read_run(p.kind, value, 0, call.inputs[2], (shared + at) * p.width, 1, rows * p.width)
        for panel in range((count + COLUMNS - 1) // COLUMNS):
            query = first + panel * COLUMNS
            some = min(COLUMNS, count - panel * COLUMNS)
            begin, end = seen(p, query, some, start, keys)
            few = min(rows, end - at)
            lane = 4 * panel * COLUMNS
            most, total = scratch + thread.most + lane, scratch + thread.total + lane
            if few <= 0 or at + few <= begin:
                continue
            biased = read_bias(call, p, b, h, query, some, at, few, most, scratch)
            if biased == 0:
                continue
            out = scratch + thread.out + lane * (p.width + SPARE_ROWS)
            score(p, query, some, at, few, start, panel, scores, 0, biased, scratch)
            soften(scores, few, most, total, scratch + thread.factor)
            rescale(out, p.width, scratch + thread.factor)
            product(p.width, out, value, 4, 4 * p.width, scores, few, table_of(p, scratch, BY_ONE), 1)
    _end(call, p, head, first, count, scratch)


@inner
def _end(call, p, head, first, count, scratch):
    thread, logarithms = p.thread, call.more[0]
    for panel in range((count + COLUMNS - 1) // COLUMNS):
        some, at = min(COLUMNS, count - panel * COLUMNS), head * p.queries + first + panel * COLUMNS
        most, total = scratch + thread.most + 4 * panel * COLUMNS, scratch + thread.total + 4 * panel * COLUMNS
        finish(most, total)
        if logarithms:
            copy_run(logarithms + 4 * at, most, some)
        if call.output:
            out = scratch + thread.out + 4 * panel * (p.width + SPARE_ROWS) * COLUMNS
            rescale(out, p.width, total)
            turn_back(p.kind, call.output, at * p.width, out, p.width, some, p.width_pitch, scratch + thread.staged)


_MARK = stage("attention_mark", Attention, mark)
_BLOCK = stage("attention_forward", Attention, _block)


def _plan(request: Request) -> Plan:
    numbers = fields(request, 0, _BIAS)
    width, heads = int(request.outputs[0][3]), request.outputs[0][0] * request.outputs[0][1]
    thread, bytes_ = workspace(
        Offsets,
        **floats(numbers, request.inputs[_BIAS]),
        scores=FLOAT * PANEL,
        out=FLOAT * PANELS * (width + SPARE_ROWS) * COLUMNS,
        factor=FLOAT * COLUMNS,
    )
    parameters = Attention(**numbers, parts=1, thread=thread)  # type: ignore[arg-type]
    block = _BLOCK, heads * parameters.blocks
    if not parameters.marked:
        return Plan(parameters, (block,), 0, bytes_)
    items, shared = marks(request, _BIAS)
    return Plan(parameters, ((_MARK, items), block), shared, bytes_)


KERNEL = NativeKernel(OP, _plan)
